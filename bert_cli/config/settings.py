"""The base class of all settings, and their shared types."""

import operator
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from bert_cli.config.markers import OnlyWith, is_path, kinds_of
from bert_cli.files import is_utf8

Positive = Annotated[int, Field(ge=1)]
Size = Annotated[int, Field(ge=1, le=10**7)]
"""A size for which memory is allocated before any other check could reject it."""
Devices = Annotated[int, Field(ge=1, le=10**6)]
"""A number of devices, processes or replicas; a layout is searched among all of them."""
Depth = Annotated[int, Field(ge=1, le=1000)]
"""A number of layers; each layer costs milliseconds before the memory of a run is checked."""
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
JSON_TEXT = "Write the results to this file as JSON; `-` prints the JSON instead of the text."
JsonFile = Annotated[Path | None, Field(alias="json", description=JSON_TEXT)]
RUN_LENGTHS = ("total_num_train_samples", "num_epochs")
"""Alternative settings for the length of a run."""


class Unless(NamedTuple):
    """What must hold for a setting to have an effect, with the condition under which it has none, and a remedy."""

    holds: Callable[[Any], bool]
    """Takes the settings."""
    condition: str
    remedy: str = "leave it out"


Need = str | tuple[Any, ...] | Unless
"""A setting that must be given, a setting and the values that it may have, or a predicate."""
INTEGERS = 2**63
"""Bound of the absolute value of integers, as for int64."""


class SettingError(ValueError):
    """An invalid value, or values that contradict each other; a validator of a single field leaves `name` empty."""

    def __init__(self, name: str, problem: str, remedy: str) -> None:
        super().__init__(name, problem, remedy)
        self.name = name
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.name} {self.problem}; {self.remedy}".strip()


class Settings(BaseModel):
    """Frozen settings that refuse unknown keys and infinity; the docstring of a field is its help text."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    NEEDS: ClassVar[Mapping[str, Need | list[Need]]] = {}
    """Setting -> what it needs to have an effect; classes add to the needs of their bases."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Keep the markers of a setting that a class declares again."""
        for name, about in cls.model_fields.items():
            for base in cls.__mro__[1:]:
                for marker in getattr(base, "model_fields", {}).get(name, about).metadata:
                    if isinstance(marker, str | OnlyWith) and marker not in about.metadata:
                        about.metadata.append(marker)

    @field_validator("*", mode="wrap")
    @classmethod
    def _check_value(
        cls, value: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo
    ) -> Any:
        """Reject values that pydantic would convert: booleans to 1, an empty path to the current folder."""
        about = cls.model_fields[info.field_name or ""]
        kinds = kinds_of(about.annotation)
        values = value if isinstance(value, list) else [value]
        if bool not in kinds and any(isinstance(item, bool) for item in values):
            raise SettingError("", "got a boolean", "--help shows what it takes")
        if "" in values and is_path(about):
            raise SettingError("", "is empty", "give a path, '.' for the current folder")
        if not all(map(is_utf8, values)):
            raise SettingError("", f"{value!r} is not UTF-8", "rename it, or write it in UTF-8")
        checked = handler(value)
        for number in (value, checked):
            if isinstance(number, int) and abs(number) >= INTEGERS:
                raise SettingError("", "has too many digits", "give a number below 2^63")
        return checked

    @model_validator(mode="after")
    def _check_needs(self) -> Self:
        for kind in type(self).__mro__:
            for name, needs in vars(kind).get("NEEDS", {}).items():
                if not is_set(self, name):
                    continue
                listed = needs if isinstance(needs, list) else [needs]
                for need in listed:
                    self._check_need(name, need)
        return self

    def _check_need(self, name: str, need: Need) -> None:
        if isinstance(need, str):
            remedy = f"give {need} too, or leave it out"
            need = Unless(operator.attrgetter(need), f"without {need}", remedy)
        elif not isinstance(need, Unless):
            needed, *values = need
            value = getattr(self, needed)
            shown = f"{needed} {value!r}" if isinstance(value, str) else needed
            remedy = f"leave it out or change {needed}"
            need = Unless(lambda _: value in values, f"with {shown}", remedy)
        if not need.holds(self):
            shown = type(self).model_fields[name].alias or name
            raise SettingError(shown, f"has no effect {need.condition}", need.remedy)


def is_set(settings: BaseModel, name: str) -> bool:
    """Return whether a setting was given and differs from its default.

    A default that was given counts as not set, because the settings.json of a run lists every setting.
    """
    default = type(settings).model_fields[name].get_default(call_default_factory=False)
    return name in settings.model_fields_set and getattr(settings, name) != default


def is_remote(name: str) -> bool:
    """Return whether the name of a folder is an address such as `s3://bucket/records`."""
    return re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*(::|://)", name) is not None


def parse_bytes(text: str) -> int:
    """Return the bytes of a memory size such as 80GB, 24GiB, 640MB or 16e9.

    Raises SettingError, a ValueError, for other text.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*(?:([kMGT])(i?)B|B?)", text.strip())
    unit = (1024 if match[3] else 1000) ** " kMGT".index(match[2] or " ") if match else 0
    size = int(float(match[1]) * unit) if match else 0
    if size < 10**6:
        problem = f"{text!r} is not a memory size of at least 1 MB"
        raise SettingError("", problem, "write it as 80GB, 24GiB, 640MB or 16e9")
    return size


def _check_size(value: Any) -> str:
    parse_bytes(str(value))
    return str(value)


MemorySize = Annotated[str, BeforeValidator(_check_size)]
