"""The table of commands.

It has only names, so that importing it loads no command. A command may have two words; its first word is then a command
too.
"""

from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # not needed by `bert --help`
    from bert_cli.settings.settings import Settings


class Command(NamedTuple):
    """The location of a command's code, and its help."""

    module: str
    """Module with `run(settings)`, relative to the package; `module:name` for another function, and empty for a word
    that only starts other commands, whose help is printed."""
    settings: str
    """Module and class of the settings, relative to `config` and without the ending `Settings`."""
    help: str
    """The line of `bert --help`."""
    kind: str = "continues"
    """`continues` when it is started again, `writes` files from the start, or `shows` its result on standard output."""
    training: str = ""
    """The training command whose settings it takes, too: it looks at such a run."""

    def settings_class(self) -> "type[Settings]":
        """Import and return the settings class."""
        base: type[Settings] = resolve_name(f"bert_cli.config.{self.settings}Settings")
        if not self.training:
            return base
        from bert_cli.config.tools import over

        return over(base, self.training, COMMANDS[self.training].settings_class())

    def run_function(self) -> Callable[[Any], None]:
        """Import and return the function that runs the command."""
        name = self.module if ":" in self.module else f"{self.module}:run"
        run: Callable[[Any], None] = resolve_name(f"bert_cli.{name}")
        return run


# In the order of `bert --help`, and the first command of each of its groups.
GROUPS = {
    "init": "start here",
    "download": "make data",
    "pretrain": "train",
    "predict": "use",
    "runs": "look",
    "plan": "many machines",
}
_ROWS = {
    "init": ("tasks.init.run", "init.Init", "choose a run for a text and this machine", "writes"),
    "verdict": ("tasks.init.verdict", "init.Verdict", "judge a run of `bert init`", "writes"),
    "doctor": ("tasks.look.doctor", "tools.Doctor", "check this machine, or a run before it starts", "shows"),
    "doctor pretrain": ("tasks.look.doctor", "tools.DoctorRun", "check a run of pre-training", "shows", "pretrain"),
    "doctor squad": ("tasks.look.doctor", "tools.DoctorRun", "check a run on SQuAD", "shows", "squad"),
    "doctor glue": ("tasks.look.doctor", "tools.DoctorRun", "check a run on GLUE or CLUE", "shows", "glue"),
    "doctor ner": ("tasks.look.doctor", "tools.DoctorRun", "check a run of token classification", "shows", "ner"),
    "doctor classify": ("tasks.look.doctor", "tools.DoctorRun", "check a run of classification", "shows", "classify"),
    "doctor embed": ("tasks.look.doctor", "tools.DoctorRun", "check a run for vectors", "shows", "embed"),
    "completion": ("tasks.completion", "tools.Completion", "print a shell completion script", "shows"),
    "download": ("data.steps.download", "data.Download", "download a Wikipedia dump"),
    "extract": ("data.steps.extract", "data.Extract", "extract text from a dump"),
    "preprocess": ("data.steps.preprocess", "data.Preprocess", "split text into sentences"),
    "vocab": ("data.steps.vocab", "data.Vocab", "train a WordPiece vocabulary"),
    "tokenize": ("data.steps.tokenize", "data.Tokenize", "make training records from sentences"),
    "index": ("data.steps.index", "data.Index", "index records for random access"),
    "data": ("tasks.data", "data.DataChain", "run extract to index in one call"),
    "inspect": ("data.steps.inspect", "tools.Inspect", "show and check a folder of records", "shows"),
    "pretrain": ("tasks.run.pretrain", "pretrain.Pretrain", "pre-train BERT"),
    "squad": ("tasks.finetune.squad", "finetune.Squad", "fine-tune on question answering (SQuAD)"),
    "glue": ("tasks.finetune.glue", "finetune.Glue", "fine-tune on a task of GLUE or CLUE"),
    "ner": ("tasks.finetune.ner", "finetune.Ner", "fine-tune on token classification (CoNLL)"),
    "classify": ("tasks.finetune.classify", "finetune.Classify", "fine-tune on text classification"),
    "embed": ("tasks.finetune.embed", "embed.Embed", "train vectors of texts for similarity"),
    "predict": ("tasks.use.predict", "use.Predict", "run a model on texts", "shows"),
    "serve": ("tasks.use.serve", "use.Serve", "open a page to search or to try a model", "shows"),
    "search": ("", "search.Search", "find passages of your own text", "shows"),
    "search make": ("tasks.search.make", "search.SearchMake", "read text into an index"),
    "search ask": ("tasks.search.ask", "search.SearchAsk", "print passages that answer a question", "shows"),
    "search score": ("tasks.search.score", "search.SearchScore", "score answers to your questions", "shows"),
    "search export": ("tasks.search.export", "search.SearchExport", "write passages as a table", "writes"),
    "export": ("tasks.use.export", "use.Export", "export a model to another runtime", "writes"),
    "shrink": ("tasks.use.shrink", "use.Shrink", "write some layers of a model as a model", "writes"),
    "evaluate": ("tasks.use.evaluate", "use.Evaluate", "score a checkpoint on held-out records", "shows"),
    "average": ("tasks.use.average", "use.Average", "average the checkpoints of a run", "writes"),
    "runs": ("tasks.look.runs", "tools.Runs", "list runs with progress and results", "shows"),
    "plot": ("tasks.look.plot", "tools.Plot", "plot the metrics of runs", "writes"),
    "compare": ("tasks.look.runs:compare", "tools.Compare", "compare two runs", "shows"),
    "bench": ("", "bench.Bench", "measure how fast this machine trains", "writes"),
    "bench pretrain": ("tasks.bench.run", "bench.BenchRun", "measure pre-training", "writes", "pretrain"),
    "bench squad": ("tasks.bench.run", "bench.BenchRun", "measure fine-tuning on SQuAD", "writes", "squad"),
    "plan": ("", "tools.Plan", "estimate or propose a layout", "shows"),
    "plan pretrain": ("tasks.look.plan", "tools.PlanRun", "estimate pre-training", "shows", "pretrain"),
    "plan squad": ("tasks.look.plan", "tools.PlanRun", "estimate fine-tuning on SQuAD", "shows", "squad"),
    "plan glue": ("tasks.look.plan", "tools.PlanRun", "estimate fine-tuning on GLUE or CLUE", "shows", "glue"),
    "plan ner": ("tasks.look.plan", "tools.PlanRun", "estimate token classification", "shows", "ner"),
    "plan classify": ("tasks.look.plan", "tools.PlanRun", "estimate text classification", "shows", "classify"),
    "plan embed": ("tasks.look.plan", "tools.PlanRun", "estimate the training of vectors", "shows", "embed"),
    "launch": ("tasks.launch", "tools.Launch", "start a command as several processes"),
}  # fmt: skip
COMMANDS = {name: Command(*row) for name, row in _ROWS.items()}


def split_command(words: Sequence[str]) -> tuple[str, list[str]]:
    """Split words into a command, of one word or two, and its arguments."""
    two = " ".join(words[:2])
    if len(words) > 1 and two in COMMANDS:
        return two, list(words[2:])
    name, *rest = words
    return name, rest
