"""The door: which command, its settings, and how it ends.

A command is a function `run(settings)` in the file of the same name; `COMMANDS` lists them, and nothing
of one is imported before it is asked for, so that `--help` stays under a second and loads no
TensorFlow. Mistakes of the person at the keyboard end here as one message and an exit code.
"""

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bert_cli.commands import COMMANDS, split_command
from bert_cli.errors import BertError, ConfigError, DataError, DeviceError, nearest
from bert_cli.files import DISK_IS_FULL
from bert_cli.imports import NOTHING, quiet_imports

PARTS = ("tensorflow", "keras", "numpy", "tokenizers", "transformers")
# Name of --log-level -> what TensorFlow knows it by; without it NOTHING is said.
TENSORFLOW_LEVELS = {"debug": "0", "info": "0", "warning": "1", "error": "2"}


def help_text() -> str:
    """What `bert --help` prints."""
    width = max(map(len, COMMANDS))
    rows = [f"  {name:<{width}}  {row.help}" for name, row in COMMANDS.items()]
    return "\n".join(
        [
            "usage: bert COMMAND [options]",
            "",
            "Pre-train BERT from a Wikipedia dump or text of your own.",
            "",
            "commands:",
            *rows,
            "",
            "bert COMMAND --help tells a command's options; bert --version tells versions.",
            "",
            "examples:",
            "  bert download data/dump --sample",
            "  bert pretrain --config pretrain_tiny_128_phase1 --dataset-dir data/wikipedia/128",
            "  bert runs runs",
        ]
    )


def version_text() -> str:
    """The tool's version and those of the parts that decide its numbers, without importing them."""
    from importlib.metadata import PackageNotFoundError, version

    import bert_cli

    lines = [
        f"bert {bert_cli.__version__} ({os.path.dirname(bert_cli.__file__)})",
        f"python {sys.version.split()[0]} ({sys.executable})",
    ]
    for part in PARTS:
        try:
            lines.append(f"{part} {version(part)}")
        except PackageNotFoundError:
            lines.append(f"{part} absent")
    return "\n".join(lines)


def dispatch(arguments: Sequence[str]) -> None:
    """Run the command that the arguments name; raises what it raises."""
    # What follows -- is another command's, and not for us to read.
    words = list(arguments)
    cut = words.index("--") if "--" in words else len(words)
    words, inner = _with_log_level(words[:cut]), words[cut + 1 :]
    if not words or words[0] in ("-h", "--help"):
        from bert_cli.terminal import print_help

        print_help(help_text())
        return
    if words[0] == "--version":
        print(version_text())
        return
    if words[0] == "bench":
        from bert_cli.config.bench import expand_benchmark

        words = expand_benchmark(words)
    name, rest = split_command(words)
    if name not in COMMANDS:
        near = nearest(name, COMMANDS)
        hint = f"did you mean {near!r}?" if near else "see bert --help"
        raise ConfigError(f"bert ({name}): no such command; {hint}")
    settings_class = COMMANDS[name].settings_class()
    from bert_cli.config.load import describe, load

    if name == "launch" and not inner:
        _refuse_without_dashes(rest)
    settings, loaded = load(settings_class, rest, f"bert {name}")
    if inner:
        settings = _with_command(settings, inner, name)
        loaded = replace(loaded, origins={**loaded.origins, "command": "after --"})
    if getattr(settings, "dry_run", False):
        print(f"settings of bert {name}:\n{describe(settings, loaded)}")
    # What is printed alone stays alone.
    beside = sys.stderr if str(getattr(settings, "json_file", None)) == "-" else sys.stdout
    for where, reason in loaded.no_effect.items():
        print(f"{where} has no effect here: {reason}", file=beside)
    for line in loaded.notes:
        print(line, file=beside)
    with quiet_imports():
        run = COMMANDS[name].run_function()
    run(settings)


def _with_log_level(words: list[str]) -> list[str]:
    """The words without `--log-level LEVEL`, which holds for this process and those that it starts."""
    if not any(word.partition("=")[0] == "--log-level" for word in words):
        return words
    import logging

    from bert_cli.config.flags import log_level_of

    level, rest = log_level_of(words)
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = TENSORFLOW_LEVELS[level]
    logging.basicConfig(level=level.upper())
    return rest


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script; the exit code, which holds until the process has ended.

    After the command has ended Python and TensorFlow need up to seconds to leave. A signal in them would
    make -15 or -2 of the code of a run that is done or has saved.
    """
    try:
        return _exit_code(sys.argv[1:] if arguments is None else arguments)
    finally:
        if arguments is None:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)


def _exit_code(arguments: Sequence[str]) -> int:
    """Run the command, print the error that ends it, if any, and return its exit code."""
    # TensorFlow's notes bury what a run prints; what goes wrong also comes as an exception.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", NOTHING)
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    try:
        dispatch(arguments)
    except BrokenPipeError:
        # Someone piped the output to `head`; nobody is left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except BertError as error:
        for line in str(error).splitlines():
            print(f"bert: {line}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("bert: interrupted; the same command continues", file=sys.stderr)
        return 130
    except Exception as error:
        refused = _refused(error)
        if refused is None:
            raise
        print(f"bert: {refused}", file=sys.stderr)
        return DeviceError.exit_code if isinstance(error, MemoryError) else DataError.exit_code
    return 0


def _refused(error: Exception) -> str | None:
    """Return the message for what the system or the network refuses; None for a defect of ours."""
    httpx = sys.modules.get("httpx")
    if isinstance(error, OSError) and (error.filename or error.errno in DISK_IS_FULL):
        where = os.fsdecode(error.filename or "the file that was written last")
        if not where.startswith(os.path.dirname(__file__) + os.sep):
            return f"{where}: {error.strerror}; fix that and run the command again"
    if httpx is not None and isinstance(error, httpx.HTTPError | httpx.InvalidURL):
        request = getattr(error, "_request", None)  # the property raises where there is none
        address = "network" if request is None else request.url
        return f"{address}: {error}; check the address and the network, or give another one"
    if isinstance(error, MemoryError):
        return f"memory: {error or 'none is left'}; give smaller sizes, or run where there is more memory"
    return None


if __name__ == "__main__":
    sys.exit(main())
