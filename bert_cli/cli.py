"""The entry point: find the command, load its settings, run it, and return the exit code.

`commands.py` lists the commands. The code of a command is imported when it runs, so that `--help` stays under a
second and loads no TensorFlow. Mistakes of the user end here as a message and an exit code.
"""

import gc
import io
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from bert_cli.commands import COMMANDS, GROUPS, split_command
from bert_cli.errors import (
    BertError,
    ConfigError,
    DataError,
    DeviceError,
    absent_package,
    did_you_mean,
    printable,
)

try:
    import fcntl  # noqa: F401  # locks of files, which Windows lacks
except ImportError:
    sys.stderr.write(f"bert: {sys.platform}: has no file locks; use Linux, on Windows in WSL2\n")
    sys.exit(DeviceError.exit_code)

from bert_cli.processes import (
    STOP_SIGNALS,
    open_streams,
    print_error,
    print_help,
    print_line,
    quiet_imports,
    set_result,
)

PACKAGES = ("tensorflow", "jax", "keras", "numpy", "tokenizers", "transformers")
# --log-level -> TF_CPP_MIN_LOG_LEVEL; without it NO_LOGS is shown.
TENSORFLOW_LEVELS = {"debug": "0", "info": "0", "warning": "1", "error": "2"}
USAGE = """usage: bert COMMAND [options]

Train BERT encoders on your own text, and search, label and fill masks with them.
{commands}

bert COMMAND --help lists the options of a command; bert --version prints versions.

examples:
  bert init 'reports/*.txt' mine --documents files
  bert classify --pretrained-ckpt-path mine/run --train-file labels.csv --save-ckpt-path labels
  bert predict labels 'a new text'"""
WAYS_FORWARD = {
    "pretrain": "start with `bert init TEXT OUT`, or with --config pretrain_tiny_128_phase1",
    "classify": "start with `bert init TEXT OUT --for labels`, or with --config FILE",
}  # without arguments, after the errors


def help_text() -> str:
    """Return the text of `bert --help`."""
    rows = []
    for name, command in COMMANDS.items():
        second = _second_words(name)
        ending = f" ({name} {'|'.join(second)})" if second else ""
        if name in GROUPS:
            rows.append(f"\n{GROUPS[name]}:")
        if " " not in name:
            rows.append(f"  {name:<10}  {command.help}{ending}")
    return USAGE.format(commands="\n".join(rows))


def _second_words(name: str) -> list[str]:
    return [words.split()[1] for words in COMMANDS if words.startswith(f"{name} ")]


def version_text() -> str:
    """Return the versions of the tool and of the packages that affect its numbers."""
    from bert_cli.versions import package_versions

    versions = package_versions(PACKAGES)
    return "\n".join(
        [
            f"bert {versions['bert_cli']} ({os.path.dirname(__file__)})",
            f"python {versions['python']} ({sys.executable})",
            *(f"{package} {versions[package]}" for package in PACKAGES),
        ]
    )


def dispatch(arguments: Sequence[str]) -> None:
    """Run the command that the arguments name, and raise its errors."""
    words = _apply_log_level(arguments)
    if not words or words[0] in ("-h", "--help"):
        print_help(help_text())
        return
    if words[0] == "--version":
        print_line(version_text())
        return
    from bert_cli.parse.load import describe, load
    from bert_cli.parse.removed import COMMANDS as COMMANDS_OF_BEFORE
    from bert_cli.parse.removed import PROBLEM

    name, rest = split_command(words)
    for removed in {" ".join(words[:2]), words[0]} & {*COMMANDS_OF_BEFORE} - {*COMMANDS}:
        raise ConfigError(f"bert {removed}", PROBLEM, COMMANDS_OF_BEFORE[removed])
    if name not in COMMANDS:
        remedy = did_you_mean(name, COMMANDS, "see bert --help")
        raise ConfigError(f"COMMAND ({name})", "no such command", remedy)
    command = COMMANDS[name]
    if not command.module:
        rest = rest or ["--help"]
        if rest[0] not in ("-h", "--help"):
            first, *others = _second_words(name)
            remedy = f"use one of {', '.join([first, *others])}, as in `bert {name} {first}`"
            raise ConfigError(f"bert {name} ({rest[0]})", "is no command", remedy)
    settings, loaded = load(command.settings_class(), rest, f"bert {name}")
    values = vars(settings)
    if values.get("dry_run"):
        print_line(f"settings of bert {name}:\n{describe(settings, loaded)}")
    kind = _kind_of(name, values)
    set_result(kind == "shows")
    for where, why in loaded.no_effect.items():
        print_note = print_error if _prints_json(values) else print_line
        print_note(f"{where} has no effect here: {why}")
    try:
        if kind == "continues" and values.get("train_file") and not values["generated_dataset"]:
            from bert_cli.data.finetune.tables import check_files

            check_files(values)  # before seconds of TensorFlow
        with _engine(values.get("engine"), f"bert {name}"):
            with quiet_imports():
                run = command.run_function()
            # Collections begin with the work; what was loaded until here stays to the end anyway.
            gc.enable()
            run(settings)
    except KeyboardInterrupt:
        if kind == "continues":
            raise KeyboardInterrupt("the same command continues") from None
        raise


def _prints_json(values: Mapping[str, Any]) -> bool:
    """Return whether standard output has JSON alone (`--json -`)."""
    return str(values.get("json_file")) == "-"


def _kind_of(name: str, values: Mapping[str, Any]) -> str:
    """Return the kind of a command with these settings; `bert launch` is of the kind of what it starts."""
    if values.get("dry_run") or _prints_json(values):
        return "shows"
    if values.get("json_file"):
        return "writes"
    started, _ = split_command(values.get("command") or [name])
    if started not in COMMANDS:
        return "writes"
    return COMMANDS[started].kind


@contextmanager
def _engine(engine: str | None, command: str) -> Iterator[None]:
    """Select an engine for Keras. Raises ConfigError if a package that the command needs is absent."""
    os.environ["KERAS_BACKEND"] = engine or "tensorflow"
    try:
        yield
    except ModuleNotFoundError as error:
        needed_by = f"engine ({engine})" if engine else command
        raise absent_package(error, needed_by) from None


def _apply_log_level(arguments: Sequence[str]) -> list[str]:
    """Set the level of `--log-level` for this process and its children; return the remaining words."""
    if not any(word.startswith("--log-level") for word in arguments):
        return list(arguments)
    import logging

    from bert_cli.parse.options import split_log_level

    level, rest = split_log_level(arguments)
    if level:
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = TENSORFLOW_LEVELS[level]
        logging.basicConfig(level=level.upper())
    return rest


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the console script and return its exit code.

    Python and TensorFlow may need seconds to exit after the command. Signals are ignored during that
    time, because a signal would turn the exit code of a complete run into -15 or -2.
    """
    if arguments is None:
        gc.disable()  # until the code is loaded: objects of modules stay, and searching them takes a tenth of the start
    open_streams()
    set_result(True)
    # It would look for plugins in all installed packages, a tenth of a start.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    words = sys.argv[1:] if arguments is None else arguments
    try:
        dispatch(words)
    except BertError as error:
        for line in str(error).splitlines():
            print_error(f"bert: {printable(line)}")
        forward = WAYS_FORWARD.get(" ".join(words))
        if forward:
            print_error(f"bert: {forward}")
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        print_error("; ".join(["bert: interrupted", *map(str, interrupt.args)]))
        return 130
    except Exception as error:
        known = _known_failure(error)
        if known is None:
            raise
        print_error(f"bert: {printable(str(known))}")
        return known.exit_code
    finally:
        set_result(False)  # what Python writes at its end cannot change the exit code
        if arguments is None:
            gc.freeze()  # or Python looks through all objects again before it exits
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)
    return 0


def _known_failure(error: Exception) -> BertError | None:
    """Return the error for a failure of the system or the network; None for a defect of the tool."""
    # A broken connection is one between processes of the tool: the others name their address.
    if isinstance(error, OSError) and error.errno and not isinstance(error, ConnectionError):
        where = os.fsdecode(error.filename or _file_in_use(error))
        if not where.startswith(os.path.dirname(__file__) + os.sep):
            return DataError(where, str(error.strerror), "check its permissions and the disk")
    # huggingface_hub may use the older package, this tool uses the newer one.
    clients = [sys.modules[name] for name in ("httpx", "httpx2") if name in sys.modules]
    if any(isinstance(error, client.HTTPError | client.InvalidURL) for client in clients):
        request = getattr(error, "_request", None)  # the property raises without a request
        remedy = "check the network and the address"
        where = str(request.url) if request else "network"
        return DataError(where, str(error), remedy)
    if isinstance(error, MemoryError):
        remedy = "use smaller sizes, or a machine with more memory"
        return DeviceError("memory", str(error) or "none is left", remedy)
    return None


def _file_in_use(error: OSError) -> str:
    """Return the file of a failed read or write, whose error does not name it: the innermost that a function has."""
    name = "a file"
    for frame, _ in traceback.walk_tb(error.__traceback__):
        values = frame.f_locals.values()
        paths = [os.fspath(value) for value in values if isinstance(value, os.PathLike)]
        names = [getattr(value, "name", None) for value in values if isinstance(value, io.IOBase)]
        name = [name, *paths, *(each for each in names if isinstance(each, str))][-1]
    return name
