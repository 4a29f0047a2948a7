"""The door: which command, its settings, and how it ends.

`COMMANDS` is the whole list. A command is a function `run(settings)` in the file of the same name;
nothing of it is imported before it is asked for, so that `--help` stays under a second and loads no
TensorFlow. Mistakes of the person at the keyboard end here as one message and an exit code.
"""

import difflib
import errno
import importlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from bert_cli.errors import BertError, ConfigError, DataError

# Command -> module with run(settings), module and class of its settings, one line of help.
COMMANDS = {
    "download": (
        "bert_cli.data.download",
        "bert_cli.config.data",
        "DownloadSettings",
        "fetch a Wikipedia dump",
    ),
    "extract": ("bert_cli.data.extract", "bert_cli.config.data", "ExtractSettings", "dump to text"),
    "preprocess": (
        "bert_cli.data.preprocess",
        "bert_cli.config.data",
        "PreprocessSettings",
        "text to sentences",
    ),
    "vocab": (
        "bert_cli.data.vocab",
        "bert_cli.config.data",
        "VocabSettings",
        "train a WordPiece vocabulary",
    ),
    "tokenize": (
        "bert_cli.data.tokenize",
        "bert_cli.config.data",
        "TokenizeSettings",
        "sentences to records",
    ),
    "index": (
        "bert_cli.data.index",
        "bert_cli.config.data",
        "IndexSettings",
        "index records for random access",
    ),
    "pack": (
        "bert_cli.data.pack",
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
        "bert_cli.data.inspect",
        "bert_cli.config.look",
        "InspectSettings",
        "what is in a folder of records, and what of it will hurt",
    ),
    "doctor": (
        "bert_cli.tasks.doctor",
        "bert_cli.config.look",
        "DoctorSettings",
        "look at this machine and a run before it starts",
    ),
    "pretrain": (
        "bert_cli.tasks.pretrain",
        "bert_cli.config.schema",
        "PretrainSettings",
        "pre-train BERT",
    ),
    "squad": (
        "bert_cli.tasks.squad",
        "bert_cli.config.finetune",
        "SquadSettings",
        "fine-tune on questions about paragraphs",
    ),
    "squad-score": (
        "bert_cli.data.squad_score",
        "bert_cli.config.finetune",
        "SquadScoreSettings",
        "score a file of answers as the official scripts do",
    ),
    "glue": (
        "bert_cli.tasks.glue",
        "bert_cli.config.finetune",
        "GlueSettings",
        "fine-tune on a task of GLUE or CLUE",
    ),
    "ner": (
        "bert_cli.tasks.ner",
        "bert_cli.config.finetune",
        "NerSettings",
        "fine-tune on labelled tokens",
    ),
    "classify": (
        "bert_cli.tasks.classify",
        "bert_cli.config.finetune",
        "ClassifySettings",
        "fine-tune on labelled texts of your own",
    ),
    "predict": (
        "bert_cli.tasks.predict",
        "bert_cli.config.use",
        "PredictSettings",
        "what a model says to texts",
    ),
    "export": (
        "bert_cli.tasks.export",
        "bert_cli.config.use",
        "ExportSettings",
        "a model in the form of another runtime",
    ),
    "plan": (
        "bert_cli.tasks.plan",
        "bert_cli.config.schema",
        "PlanSettings",
        "what a layout costs; which one to take",
    ),
    "launch": (
        "bert_cli.tasks.launch",
        "bert_cli.config.parallel",
        "LaunchSettings",
        "start a command as several processes",
    ),
}
KERAS_WRAPS = ("sklearn", "matplotlib")
# A disk that is full, read-only or not there is the machine's matter: a message, no traceback.
NO_FAULT_OF_OURS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOENT,
    errno.ENOTDIR,
)
PARTS = ("tensorflow", "keras", "transformers", "tokenizers", "numpy")


def help_text() -> str:
    """What `bert --help` prints."""
    width = max(map(len, COMMANDS))
    rows = [f"  {name:<{width}}  {row[3]}" for name, row in COMMANDS.items()]
    return "\n".join(
        [
            "usage: bert COMMAND [options]",
            "",
            "Pre-train BERT from a Wikipedia dump or text of your own.",
            "",
            *rows,
            "",
            "bert COMMAND --help tells a command's options; bert --version tells versions.",
        ]
    )


def version_text() -> str:
    """The tool's version and those of the parts that decide its numbers, without importing them."""
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for part in PARTS:
        try:
            found.append(f"{part} {version(part)}")
        except PackageNotFoundError:
            found.append(f"{part} absent")
    import bert_cli

    return f"bert {bert_cli.__version__} ({', '.join(found)}, python {sys.version.split()[0]})"


def dispatch(arguments: Sequence[str]) -> None:
    """Run the command that the arguments name; raises what it raises."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(help_text())
        return
    if arguments[0] == "--version":
        print(version_text())
        return
    name, *rest = arguments
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "see bert --help"
        raise ConfigError(f"bert ({name}): no such command; {hint}")
    module, home, kind, _ = COMMANDS[name]
    from bert_cli.config.load import describe, load

    # What follows -- is another command's, and not for us to read.
    cut = rest.index("--") if "--" in rest else len(rest)
    rest, inner = rest[:cut], rest[cut + 1 :]
    if name == "launch" and not inner:
        _refuse_without_dashes(rest)
    settings, loaded = load(getattr(importlib.import_module(home), kind), rest, f"bert {name}")
    if inner:
        settings = _with_command(settings, inner, name)
        loaded = replace(loaded, origins={**loaded.origins, "command": "after --"})
    if getattr(settings, "dry_run", False):
        print(f"settings of bert {name}:\n{describe(settings, loaded)}")
    for where, reason in loaded.no_effect.items():
        print(f"{where} has no effect here: {reason}")
    with quietly(), lightly():
        run = importlib.import_module(module).run
    run(settings)


def _refuse_without_dashes(words: Sequence[str]) -> None:
    for word in words:
        if word in COMMANDS:
            raise ConfigError(
                f"bert launch ({word}): the command stands after --, as `bert launch -- {word} ...`"
            )


def _with_command(settings: Any, inner: list[str], name: str) -> Any:
    """The settings with the command that followed --."""
    if "command" not in type(settings).model_fields:
        raise ConfigError(f"bert {name} (-- {' '.join(inner)}): takes no command; leave out the --")
    return settings.model_copy(update={"command": inner})


@contextmanager
def lightly() -> Iterator[None]:
    """Hide from Keras, while it is imported, what it imports for parts that nothing here uses.

    Its wrappers for scikit-learn and its picture galleries take a third of the time that TensorFlow
    and Keras need to be there, for every process of a run. Scores import theirs afterwards.
    """
    hidden: dict[str, Any] = {name: None for name in KERAS_WRAPS if name not in sys.modules}
    sys.modules.update(hidden)
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)


@contextmanager
def quietly() -> Iterator[None]:
    """Keep back what is written to standard error, unless it ends in an exception.

    TensorFlow writes ten lines about itself while it is imported, before any log level holds.
    TF_CPP_MIN_LOG_LEVEL=0 in the environment lets them through.
    """
    if os.environ["TF_CPP_MIN_LOG_LEVEL"] == "0":
        yield
        return
    sys.stderr.flush()
    with tempfile.TemporaryFile() as kept:
        before = os.dup(2)
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except BaseException:
            kept.seek(0)
            os.write(before, kept.read())
            raise
        finally:
            os.dup2(before, 2)
            os.close(before)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script; the exit code."""
    # TensorFlow's notes bury what a run prints; what goes wrong also comes as an exception.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    try:
        dispatch(sys.argv[1:] if arguments is None else arguments)
    except BrokenPipeError:
        # Someone piped the output to `head`; nobody is left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except BertError as error:
        for line in str(error).splitlines():
            print(f"bert: {line}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if error.errno not in NO_FAULT_OF_OURS:
            raise
        where = error.filename or "disk"
        print(
            f"bert: {where}: {os.strerror(error.errno)}; mend that and run it again",
            file=sys.stderr,
        )
        return DataError.exit_code
    except KeyboardInterrupt:
        print("bert: interrupted; the same command continues", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
