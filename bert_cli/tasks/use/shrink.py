"""`bert shrink`: some of a model's layers as a model of their own, from which a student of the model starts."""

import re
from dataclasses import replace

from bert_cli.config.use import ShrinkSettings
from bert_cli.data.finetune.labels import DECISION
from bert_cli.errors import ConfigError
from bert_cli.files import atomic_folder, check_new_folder
from bert_cli.processes import print_line
from bert_cli.tasks.model import models
from bert_cli.tasks.model.opened import write_model_files
from bert_cli.text import count
from bert_cli.train import checkpoint

# The number of a layer in a name of Hugging Face's BERT.
LAYER = re.compile(r"(?<=\blayer\.)\d+(?=\.)")


def run(settings: ShrinkSettings) -> None:
    """Write the chosen layers, the embeddings and the head as a Hugging Face folder.

    Raises ConfigError for a folder in use, an unsupported architecture or an absent layer, and CheckpointError for an
    absent model.
    """
    out = settings.out
    check_new_folder(out)
    source = models.find_source(settings.model, "MODEL")
    config = source.config
    if not config.HAS_EQUAL_LAYERS:
        problem = "has layers with different windows of attention"
        raise ConfigError(source.where, problem, "use a model of another architecture")
    last = settings.layers[-1]
    if last >= config.num_hidden_layers:
        problem = f"is not among the layers 0 to {config.num_hidden_layers - 1} of {source.folder}"
        raise ConfigError(f"layers ({last})", problem, "leave it out")
    tensors = {}
    for name, values in source.tensors().items():
        number = LAYER.search(name)
        if number is None:
            tensors[name] = values
        elif (layer := int(number[0])) in settings.layers:
            renamed = LAYER.sub(str(settings.layers.index(layer)), name, count=1)
            tensors[renamed] = values
    sizes = models.as_trained(source).window_sizes
    described = {**source.described, **sizes, "num_hidden_layers": len(settings.layers)}
    with atomic_folder(out) as folder:
        checkpoint.write_tensors(folder / checkpoint.MODEL, tensors)
        write_model_files(replace(source, described=described), source.architecture, folder)
        (folder / DECISION).unlink(missing_ok=True)  # which examples chose for the complete model
    layers = f"{count(len(settings.layers), 'layer')} ({', '.join(map(str, settings.layers))})"
    print_line(f"shrink: {out} has {layers} of {source.folder}")
