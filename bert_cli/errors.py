"""How the tool says no: four kinds of mistake, each with its exit code.

A message reads `where (value and origin): what is wrong; what to do`. Whoever raises one of these
knows the remedy; the door (`cli.py`) prints it to standard error without a traceback and leaves
with the code. Anything else that escapes is a defect of ours and keeps its traceback.
"""


class BertError(Exception):
    """A mistake the person at the keyboard can mend."""

    exit_code = 1


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


def needs_extra(extra: str) -> str:
    """The words of every message about a package that only an extra brings, with what to type."""
    return f"needs the extra '{extra}'; pip install -c requirements.lock -e '.[{extra}]'"
