"""The base class of all settings, and the types, marks and checks that several of them share."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

T = TypeVar("T")
POSITIONAL, HIDDEN = "positional", "hidden"
Positional = Annotated[T, POSITIONAL]
"""A setting that the command line gives without a flag."""
Hidden = Annotated[T, HIDDEN]
"""A setting that is neither a flag nor a key of a file."""
Positive = Annotated[int, Field(ge=1)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]


class SettingError(ValueError):
    """A value that contradicts another one: the setting, what is wrong with it, and the remedy.

    pydantic keeps the exception; `messages.py` adds the origin of the value. A validator of a single field
    leaves `name` empty, because pydantic knows it.
    """

    def __init__(self, name: str, problem: str, remedy: str) -> None:
        super().__init__(name, problem, remedy)
        self.name, self.problem, self.remedy = name, problem, remedy

    def __str__(self) -> str:
        return f"{self.name} {self.problem}; {self.remedy}".strip()


class Settings(BaseModel):
    """Frozen settings that refuse unknown keys; the docstring of a field is its help text."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    NEEDS: ClassVar[Mapping[str, str]] = {}
    """Setting -> the setting without which it has no effect; classes add to those of their bases."""

    @model_validator(mode="after")
    def _check_needs(self) -> Self:
        for kind in type(self).__mro__:
            for name, other in vars(kind).get("NEEDS", {}).items():
                if is_set(self, name) and not getattr(self, other):
                    raise without_effect(self, name, f"without {other}", "give both or neither")
        return self


def group_of(annotation: Any) -> type[BaseModel] | None:
    """Return the class of a group of settings, also of an optional one."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def is_positional(about: FieldInfo) -> bool:
    """Return whether a setting is given without a flag."""
    return POSITIONAL in about.metadata


def is_set(settings: BaseModel, name: str) -> bool:
    """Return whether a setting was given and differs from its default.

    A default that was given counts as not set, because the settings.json of a run lists every setting.
    """
    default = type(settings).model_fields[name].get_default(call_default_factory=False)
    return name in settings.model_fields_set and getattr(settings, name) != default


def without_effect(
    settings: BaseModel, name: str, condition: str, remedy: str = "leave it out"
) -> SettingError:
    """Return the error for a setting that has no effect under a condition."""
    shown = type(settings).model_fields[name].alias or name
    return SettingError(shown, f"has no effect {condition}", remedy)


def is_remote(name: str) -> bool:
    """Return whether the name of a folder is an address such as `s3://bucket/records`."""
    return re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*(::|://)", name) is not None


def parse_bytes(text: str) -> int:
    """Return the bytes of a memory size such as 80GB, 24GiB, 640MB or 16e9.

    Raises SettingError, a ValueError, for other text.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*(?:([kMGT])(i?)B|B?)", text.strip())
    size = 0
    if match:
        base = 1024 if match[3] else 1000
        size = int(float(match[1]) * base ** " kMGT".index(match[2] or " "))
    if size < 10**6:
        problem = f"{text!r} is not a memory size of at least 1 MB"
        raise SettingError("", problem, "write it as 80GB, 24GiB, 640MB or 16e9")
    return size


def check_size(value: Any) -> str | None:
    """Return the text of a memory size after a check, or None."""
    if value is not None:
        parse_bytes(str(value))
    return None if value is None else str(value)
