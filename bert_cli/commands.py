"""The table of commands: the function that runs each, its settings and one line of help.

The table holds names only, so that reading it imports nothing of a command. `cli.py`, the help and shell
completion use it. A command may have two words; its first word is then a command too.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # `bert --help` does without pydantic
    from pydantic import BaseModel


class Command(NamedTuple):
    """Where a command is found, and what it is for."""

    module: str
    """Module with `run(settings)`, relative to the package."""
    settings: str
    """Module and class of the settings, relative to `config`."""
    help: str
    """The line of `bert --help`."""

    def settings_class(self) -> "type[BaseModel]":
        """Import and return the settings class."""
        module, _, name = self.settings.partition(".")
        found: type[BaseModel]
        found = getattr(importlib.import_module(f"bert_cli.config.{module}"), name)
        return found

    def run_function(self) -> Callable[[Any], None]:
        """Import and return the function that runs the command."""
        run: Callable[[Any], None] = importlib.import_module(f"bert_cli.{self.module}").run
        return run


# In the order of `bert --help`.
COMMANDS = {
    name: Command(*row)
    for name, row in {
        "download": ("data.text.download", "data.DownloadSettings", "download a Wikipedia dump"),
        "extract": ("data.text.extract", "data.ExtractSettings", "extract text from a dump"),
        "preprocess": (
            "data.text.preprocess",
            "data.PreprocessSettings",
            "split text into sentences",
        ),
        "vocab": ("data.records.vocab", "data.VocabSettings", "train a WordPiece vocabulary"),
        "tokenize": (
            "data.records.tokenize",
            "data.TokenizeSettings",
            "make training records from sentences",
        ),
        "index": (
            "data.records.index",
            "data.IndexSettings",
            "index records for random access",
        ),
        "pack": (
            "data.records.pack",
            "data.PackSettings",
            "pack short records together to reduce padding",
        ),
        "data": ("tasks.data", "data.DataChainSettings", "run extract to index in one call"),
        "inspect": (
            "data.records.inspect",
            "tools.InspectSettings",
            "show the contents and the problems of a folder of records",
        ),
        "doctor": (
            "tasks.look.doctor",
            "tools.DoctorSettings",
            "check this machine and a run before it starts",
        ),
        "pretrain": ("tasks.run.pretrain", "training.PretrainSettings", "pre-train BERT"),
        "squad": (
            "tasks.finetune.squad",
            "finetune.SquadSettings",
            "fine-tune on question answering (SQuAD)",
        ),
        "squad-score": (
            "tasks.finetune.squad_score",
            "finetune.SquadScoreSettings",
            "score SQuAD predictions as the official scripts do",
        ),
        "glue": (
            "tasks.finetune.glue",
            "finetune.GlueSettings",
            "fine-tune on a task of GLUE or CLUE",
        ),
        "ner": (
            "tasks.finetune.ner",
            "finetune.NerSettings",
            "fine-tune on token classification (CoNLL files)",
        ),
        "classify": (
            "tasks.finetune.classify",
            "finetune.ClassifySettings",
            "fine-tune on text classification (CSV, TSV, JSON lines)",
        ),
        "predict": ("tasks.use.predict", "tools.PredictSettings", "run a model on texts"),
        "export": ("tasks.use.export", "tools.ExportSettings", "export a model to another runtime"),
        "plan": (
            "tasks.look.plan",
            "tools.PlanSettings",
            "estimate memory and cost of a layout, and propose one",
        ),
        "bench": ("tasks.bench.run", "bench.BenchSettings", "run a standard benchmark"),
        "bench pretrain": (
            "tasks.bench.run",
            "bench.BenchPretrainSettings",
            "measure the speed and memory of pre-training",
        ),
        "bench squad": (
            "tasks.bench.run",
            "bench.BenchSquadSettings",
            "measure the speed and memory of fine-tuning on SQuAD",
        ),
        "bench data": (
            "tasks.bench.data",
            "bench.BenchDataSettings",
            "measure the steps from text to batches",
        ),
        "launch": ("tasks.launch", "tools.LaunchSettings", "start a command as several processes"),
        "runs": ("tasks.look.runs", "tools.RunsSettings", "list runs with progress and results"),
        "plot": ("tasks.look.plot", "tools.PlotSettings", "plot the metrics of runs"),
        "compare": (
            "tasks.look.compare",
            "tools.CompareSettings",
            "compare the settings and results of two runs",
        ),
        "completion": (
            "tasks.completion",
            "tools.CompletionSettings",
            "print a shell completion script",
        ),
    }.items()
}


def split_command(words: Sequence[str]) -> tuple[str, list[str]]:
    """Split words into the command that they begin with, of one word or two, and its arguments."""
    two = " ".join(words[:2])
    return (two, list(words[2:])) if two in COMMANDS else (words[0], list(words[1:]))
