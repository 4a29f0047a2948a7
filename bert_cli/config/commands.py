"""Every command, with the file that does it and the settings it takes.

The whole list, in the order of `bert --help`. It is names only: nothing of a command is imported before
it is asked for. The door reads it, and so do the help and the completion of shells. A command of two
words has its first word for a command too.
"""

from collections.abc import Sequence

# Command -> module with run(settings), module and class of its settings, one line of help.
COMMANDS = {
    "download": (
        "bert_cli.data.text.download",
        "bert_cli.config.data",
        "DownloadSettings",
        "fetch a Wikipedia dump",
    ),
    "extract": (
        "bert_cli.data.text.extract",
        "bert_cli.config.data",
        "ExtractSettings",
        "dump to text",
    ),
    "preprocess": (
        "bert_cli.data.text.preprocess",
        "bert_cli.config.data",
        "PreprocessSettings",
        "text to sentences",
    ),
    "vocab": (
        "bert_cli.data.records.vocab",
        "bert_cli.config.data",
        "VocabSettings",
        "train a WordPiece vocabulary",
    ),
    "tokenize": (
        "bert_cli.data.records.tokenize",
        "bert_cli.config.data",
        "TokenizeSettings",
        "sentences to records",
    ),
    "index": (
        "bert_cli.data.records.index",
        "bert_cli.config.data",
        "IndexSettings",
        "index records for random access",
    ),
    "pack": (
        "bert_cli.data.records.pack",
        "bert_cli.config.data",
        "PackSettings",
        "pack records, so that few places are padding",
    ),
    "data": (
        "bert_cli.tasks.data",
        "bert_cli.config.data",
        "DataChainSettings",
        "extract to index in one call",
    ),
    "inspect": (
        "bert_cli.data.records.inspect",
        "bert_cli.config.look",
        "InspectSettings",
        "what is in a folder of records, and what of it will hurt",
    ),
    "doctor": (
        "bert_cli.tasks.look.doctor",
        "bert_cli.config.look",
        "DoctorSettings",
        "look at this machine and a run before it starts",
    ),
    "pretrain": (
        "bert_cli.tasks.run.pretrain",
        "bert_cli.config.schema",
        "PretrainSettings",
        "pre-train BERT",
    ),
    "squad": (
        "bert_cli.tasks.finetune.squad",
        "bert_cli.config.finetune",
        "SquadSettings",
        "fine-tune on questions about paragraphs",
    ),
    "squad-score": (
        "bert_cli.data.finetune.squad_score",
        "bert_cli.config.finetune",
        "SquadScoreSettings",
        "score a file of answers as the official scripts do",
    ),
    "glue": (
        "bert_cli.tasks.finetune.glue",
        "bert_cli.config.finetune",
        "GlueSettings",
        "fine-tune on a task of GLUE or CLUE",
    ),
    "ner": (
        "bert_cli.tasks.finetune.ner",
        "bert_cli.config.finetune",
        "NerSettings",
        "fine-tune on labelled tokens",
    ),
    "classify": (
        "bert_cli.tasks.finetune.classify",
        "bert_cli.config.finetune",
        "ClassifySettings",
        "fine-tune on labelled texts of your own",
    ),
    "predict": (
        "bert_cli.tasks.use.predict",
        "bert_cli.config.use",
        "PredictSettings",
        "what a model says to texts",
    ),
    "export": (
        "bert_cli.tasks.use.export",
        "bert_cli.config.use",
        "ExportSettings",
        "a model in the form of another runtime",
    ),
    "plan": (
        "bert_cli.tasks.look.plan",
        "bert_cli.config.schema",
        "PlanSettings",
        "what a layout costs; which one to take",
    ),
    "bench": (
        "bert_cli.tasks.bench.run",
        "bert_cli.config.bench",
        "BenchSettings",
        "how fast this machine is: a standard benchmark",
    ),
    "bench pretrain": (
        "bert_cli.tasks.bench.pretrain",
        "bert_cli.config.bench",
        "BenchPretrainSettings",
        "measure pre-training, and where its time goes",
    ),
    "bench squad": (
        "bert_cli.tasks.bench.squad",
        "bert_cli.config.bench",
        "BenchSquadSettings",
        "measure fine-tuning on questions",
    ),
    "bench data": (
        "bert_cli.tasks.bench.data",
        "bert_cli.config.bench",
        "BenchDataSettings",
        "measure the way from text to batches",
    ),
    "launch": (
        "bert_cli.tasks.launch",
        "bert_cli.config.parallel",
        "LaunchSettings",
        "start a command as several processes",
    ),
    "runs": (
        "bert_cli.tasks.look.runs",
        "bert_cli.config.look",
        "RunsSettings",
        "the runs below a folder: how far, how good, whether alive",
    ),
    "plot": (
        "bert_cli.tasks.look.plot",
        "bert_cli.config.look",
        "PlotSettings",
        "pictures and a page of one run or several",
    ),
    "compare": (
        "bert_cli.tasks.look.compare",
        "bert_cli.config.look",
        "CompareSettings",
        "what differs between two runs",
    ),
    "completion": (
        "bert_cli.tasks.completion",
        "bert_cli.config.shell",
        "CompletionSettings",
        "what makes a shell complete this command line",
    ),
}


def taken_apart(words: Sequence[str]) -> tuple[str, list[str]]:
    """The command that the words begin with, of one word or two, and the words behind it."""
    two = " ".join(words[:2])
    return (two, list(words[2:])) if two in COMMANDS else (words[0], list(words[1:]))
