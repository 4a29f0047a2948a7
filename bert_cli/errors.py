"""The errors of the tool: four kinds, each with its exit code; and the log of its libraries.

`cli.py` prints one to standard error without a traceback and exits with its code. Any other exception that
escapes is a defect of the tool and keeps its traceback.
"""

import difflib
import logging
import re
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

# Minimum similarity of a suggested name, 0 to 1.
MIN_SIMILARITY = 0.8
# What installs everything but the extras; `requirements-ask.lock` is less.
COMPLETE = "pip install -c requirements.lock ."
NAMES = {"tensorflow": "TensorFlow", "keras": "Keras", "sklearn": "scikit-learn", "scipy": "SciPy"}
logger = logging.getLogger("bert_cli")
"""What `processes` prints: notes on standard output, warnings on standard error."""
UNPRINTABLE = re.compile("[\0-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class BertError(Exception):
    """A mistake that the user can fix: its location, the problem, and the remedy.

    `where` names the object and its value: a file, a flag, a field and its origin. Printed as `where: problem; remedy`.
    """

    exit_code = 1

    def __init__(self, where: str, problem: str = "", remedy: str = "") -> None:
        # All three are `args`, so that an error survives pickling on its way from a child process.
        where, problem, remedy = map(redact, (where, problem, remedy))
        super().__init__(where, problem, remedy)
        self.where = where
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        message = self.where
        if self.problem:
            message += f": {self.problem}"
        if self.remedy:
            message += f"; {self.remedy}"
        return message


def redact(text: str) -> str:
    """Return text with `***` in place of the secrets in its addresses: user, password and query."""
    text = re.sub(r"(\w://)[^\s/?#\"']*@", r"\1***@", text)
    return re.sub(r"(\w://[^\s?#\"']*\?)[^\s#\"')]+", r"\1***", text)


Error = TypeVar("Error", bound=BertError)


class ConfigError(BertError):
    """A setting is unknown, impossible, or contradicts another one."""

    exit_code = 2


class DataError(BertError):
    """An input or output of a data step is missing, truncated, corrupt, or of another kind."""

    exit_code = 3


class CheckpointError(BertError):
    """A checkpoint is absent, incomplete, or does not fit the model or the run."""

    exit_code = 4


class DeviceError(BertError):
    """The machine lacks what the run asks for, or the numbers left the finite range."""

    exit_code = 5


def combine(errors: Sequence[Error]) -> Error:
    """Return one error that prints several of a kind, each on its own line."""
    if len(errors) == 1:
        return errors[0]
    return type(errors[0])("\n".join(map(str, errors)))


def printable(text: str) -> str:
    """Return text with control characters escaped, because a folder's name may contain some."""
    return UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)


def needs_extra(extra: str) -> str:
    """Return the end of a message about a missing extra: the problem and the remedy."""
    return f"needs the extra '{extra}'; {install_command(extra)}"


def absent_package(error: ModuleNotFoundError, where: str) -> Exception:
    """Return the error for a package that is not installed, as in an installation that only answers."""
    package = (error.name or "").partition(".")[0]
    if package == "jax":
        return ConfigError("engine (jax)", needs_extra("jax"))
    if package in ("", __name__.partition(".")[0]):
        return error
    remedy = f"run `{COMPLETE}` in the folder of its source, with Python 3.11 to 3.13"
    if package == "tensorflow" and where.startswith("engine") and find_spec("jax"):
        remedy = f"pass --engine jax, or {remedy}"
    name = NAMES.get(package, package)
    return ConfigError(where, f"needs {name}, which is not installed", remedy)


def import_extra(package: str, extra: str, where: str) -> Any:
    """Return the imported package. Raises ConfigError if its extra is not installed."""
    try:
        return import_module(package)
    except ImportError:
        raise ConfigError(where, needs_extra(extra)) from None


def install_command(extra: str) -> str:
    """Return the command that installs the pinned packages of an extra.

    The pins come from the metadata of the installed package, so the command needs no checkout. If the metadata
    do not have the extra, the code runs from a checkout.
    """
    # Imported here, because the import takes 30 ms, also for `bert --help`.
    from importlib.metadata import PackageNotFoundError, requires

    try:
        required = requires("bert-cli") or []
    except PackageNotFoundError:
        required = []
    pins = [
        f"'{pin.strip()}'"
        for pin, _, marker in (requirement.partition(";") for requirement in required)
        if repr(extra) in marker.replace('"', "'")
    ]
    if not pins:
        return f"pip install -c requirements.lock -e '.[{extra}]'"
    return f"pip install {' '.join(pins)}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that was probably meant, or None.

    The known name contains `name`, has its letters, or is similar to it completely or in its last part: `batch-size` is
    near `global-batch.micro-batch-size`, and `output_dir` is not near `dataset_dir`.
    """
    plain = _plain(name)

    def similarity(candidate: str) -> float:
        forms = (_plain(candidate), _plain(candidate.rpartition(".")[2]))
        best = max(difflib.SequenceMatcher(None, plain, form).ratio() for form in forms)
        # A name that contains the word is nearer than one that resembles it, and one that begins with it nearer
        # still.
        best += any(plain in form or sorted(plain) == sorted(form) for form in forms)
        return best + forms[1].startswith(plain)

    near = max(known, key=similarity, default=None)
    if len(plain) > 2 and near and similarity(near) >= MIN_SIMILARITY:
        return near
    return None


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return the remedy for an unknown name: the one that was probably meant, or another remedy."""
    near = nearest(name, known)
    if near is None:
        return otherwise
    return f"did you mean {near!r}?"


def _plain(name: str) -> str:
    return " ".join(re.findall(r"[a-z0-9]+", name.lower()))
