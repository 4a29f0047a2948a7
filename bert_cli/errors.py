"""The errors of the tool: four kinds, each with its exit code.

`cli.py` prints one to standard error without a traceback and exits with its code. Any other exception that
escapes is a defect of the tool and keeps its traceback.
"""

import difflib
import re
from collections.abc import Iterable, Sequence


class BertError(Exception):
    """A mistake that the user can fix: where it is, what is wrong, and what to do about it.

    `where` names the object and its value: a file, a flag, a field with its origin. Printed as
    `where: problem; remedy`.
    """

    exit_code = 1

    def __init__(self, where: str, problem: str = "", remedy: str = "") -> None:
        # All three are `args`, so that an error survives pickling on its way from a child process.
        super().__init__(where, problem, remedy)
        self.where, self.problem, self.remedy = where, problem, remedy

    def __str__(self) -> str:
        message = f"{self.where}: {self.problem}" if self.problem else self.where
        return f"{message}; {self.remedy}" if self.remedy else message


class ConfigError(BertError):
    """A setting is unknown, impossible, or contradicts another one."""

    exit_code = 2


class DataError(BertError):
    """An input or output of a data step is missing, cut, corrupt, or of another kind."""

    exit_code = 3


class CheckpointError(BertError):
    """A checkpoint is absent, incomplete, or does not fit the model or the run."""

    exit_code = 4


class DeviceError(BertError):
    """The machine lacks what the run asks for, or the numbers left the finite range."""

    exit_code = 5


def combine(errors: Sequence[ConfigError]) -> ConfigError:
    """Return one error that prints several, each on its own line."""
    return errors[0] if len(errors) == 1 else ConfigError("\n".join(map(str, errors)))


def needs_extra(extra: str) -> str:
    """Return the end of every message about a package that only an extra brings, with the remedy."""
    return f"needs the extra '{extra}'; {install_command(extra)}"


def install_command(extra: str) -> str:
    """Return the command that installs the pinned packages of an extra.

    The pins are those of the installed package's metadata, so the command needs no checkout. Where that
    does not know the extra, the code runs from a checkout.
    """
    # 30 ms to import, which `bert --help` would take too.
    from importlib.metadata import PackageNotFoundError, requires

    try:
        required = requires("bert-cli") or []
    except PackageNotFoundError:
        required = []
    pins = [
        f"'{pin.strip()}'"
        for pin, _, marker in (one.partition(";") for one in required)
        if repr(extra) in marker.replace('"', "'")
    ]
    if not pins:
        return f"pip install -c requirements.lock -e '.[{extra}]'"
    return f"pip install {' '.join(pins)}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that was probably meant, or None.

    A name is near when it is a slip of the complete one, or when each of its words is a slip or the start of
    a word of the other, so that `batch-size` is near `global-batch.micro-batch-size` and `output_dir` is
    not near `dataset_dir`. Of several the one whose last part resembles it most.
    """
    words = _words(name)
    if not words:
        return None

    def is_near(other: str) -> bool:
        theirs = _words(other)
        if _likeness("".join(words), "".join(theirs)) >= 0.85:
            return True
        return all(any(_is_slip(one, word) for word in theirs) for one in words)

    def rank(other: str) -> tuple[bool, float]:
        last = other.rpartition(".")[2].lower()
        likeness = max(_likeness(name.lower(), one) for one in (other.lower(), last))
        return last.startswith(name.lower()), likeness

    return max(filter(is_near, known), key=rank, default=None)


def _words(name: str) -> list[str]:
    return re.findall(r"\w+", name.lower().replace("_", " "))


def _is_slip(one: str, other: str) -> bool:
    is_start = min(len(one), len(other)) >= 3 and (one.startswith(other) or other.startswith(one))
    return is_start or _likeness(one, other) >= 0.75


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()
