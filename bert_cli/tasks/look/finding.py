"""A finding of `bert doctor`: one line that says what was looked at, how it is, and what to do.

What a run would do is tried, and its mistake becomes a finding instead of ending the command, so that
all of them are seen at once.
"""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from bert_cli.errors import BertError, DataError, DeviceError

Level = Literal["ok", "warning", "error"]
T = TypeVar("T")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    what: str
    found: str
    remedy: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    kind: type[BertError] = DeviceError
    """What an error is, and so the exit code."""

    def figures_too(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "level": self.level,
            "what": self.what,
            "found": self.found,
            "remedy": self.remedy,
            "figures": dict(self.figures),
        }

    def __str__(self) -> str:
        return f"{self.level:<7}  {self.what:<15}  {self.found}" + (
            f"; {self.remedy}" if self.remedy else ""
        )


Found = Generator[Finding, None, T]
"""Findings one by one, and at the end what the next ones need."""


def tried(what: str, act: Callable[[], T], told: Callable[[T], str]) -> Found[T | None]:
    """Do what a run would do: an ok of what came of it, or its mistake as an error."""
    try:
        value = act()
    except BertError as error:
        yield refused(what, error)
        return None
    except OSError as error:
        where = error.filename or what
        yield refused(what, DataError(f"{where}: {error.strerror}; mend that"))
        return None
    yield Finding("ok", what, told(value))
    return value


def refused(what: str, error: BertError) -> Finding:
    """A mistake of the run as a finding: its text ends in what to do."""
    found, _, remedy = " ".join(str(error).split()).rpartition("; ")
    return Finding("error", what, found or remedy, remedy if found else "", kind=type(error))
