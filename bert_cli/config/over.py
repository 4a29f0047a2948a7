"""The settings of a verb over a training command: `bert plan squad` takes those of a plan and those of `bert squad`."""

from functools import cache

from bert_cli.config.settings import Settings
from bert_cli.config.training import TrainSettings

EXAMPLES = {
    "pretrain": "--config pretrain_base_128_phase1",
    "squad": "--config squad_base",
    "glue": "--config glue_base",
    "ner": "--max-seq-length 128",
    "classify": "--max-seq-length 256",
    "embed": "--config embed_demo",
}
"""Training command -> flags with which its settings are complete."""


@cache
def over(verb: type[TrainSettings], command: str, training: type[TrainSettings]) -> type[Settings]:
    """Return the settings of a verb with those of the training command whose run it looks at.

    The docstring of the verb has `{command}` and `{flags}` in the place of the command and of its example.
    """
    text = (verb.__doc__ or "").format(command=command, flags=EXAMPLES[command])
    name = verb.__name__.replace("Run", training.__name__.removesuffix("Settings"))
    return type(name, (training, verb), {"__doc__": text, "__module__": __name__})
