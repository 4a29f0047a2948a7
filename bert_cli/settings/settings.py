"""The base class of all settings, and their shared types."""

import operator
import os
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

from bert_cli.files import is_utf8
from bert_cli.settings.markers import Engine, Positional, is_path, kinds_of, takes_address

# Alternative settings for the length of a run.
RUN_LENGTHS = ("total_num_train_samples", "num_epochs")


class Unless(NamedTuple):
    """What must hold for a setting to have an effect, with the condition under which it has none, and a remedy."""

    holds: Callable[[Any], bool]
    """Takes the settings."""
    condition: str
    remedy: str = "leave it out"


# A setting that must be given, a setting and the values that it may have, or a predicate.
Need = str | tuple[Any, ...] | Unless
Needs = Mapping[str, Need | list[Need]]
# Start of an address such as `s3://bucket/records`.
START_OF_ADDRESS = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*(::|://)")
# Bound of the absolute value of integers, as for int64.
INTEGERS = 2**63


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
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        defer_build=True,  # most classes of a command's imports are never used by it
    )

    NEEDS: ClassVar[Needs] = {}
    """Setting -> what it needs to have an effect; classes add to the needs of their bases."""
    OPENS_FILES: ClassVar[bool] = True
    """Whether the command opens the files that its settings name."""
    SAVES: ClassVar[bool] = False
    """Whether the command has a run folder."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: object) -> None:
        """Keep the markers of a setting that a class declares again."""
        for name, about in cls.model_fields.items():
            for base in cls.__mro__[1:]:
                declared = getattr(base, "model_fields", {}).get(name, about)
                for marker in declared.metadata:
                    if isinstance(marker, str) and marker not in about.metadata:
                        about.metadata.append(marker)

    @field_validator("*", mode="wrap")
    @classmethod
    def _check_value(
        cls, value: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo
    ) -> Any:
        """Expand paths, and reject what pydantic would convert: booleans to 1, an empty path to the current folder."""
        about = cls.model_fields[info.field_name or ""]
        kinds = kinds_of(about.annotation)
        values = value if isinstance(value, list) else [value]
        if bool not in kinds and any(isinstance(item, bool) for item in values):
            raise SettingError("", "got true or false", "use a value of the kind that --help shows")
        if is_path(about):
            if "" in values:
                raise SettingError("", "is empty", "use a path, '.' for the current folder")
            if not takes_address(about):
                _refuse_addresses(values)
            is_opened = (info.context or {}).get("is_opened", lambda name: False)
            value = _expand(value, is_opened(info.field_name))
        if not all(map(is_utf8, values)):
            raise SettingError("", f"{value!r} is not UTF-8", "rename it, or write it in UTF-8")
        checked = handler(value)
        for number in (value, checked):
            if isinstance(number, int) and abs(number) >= INTEGERS:
                raise SettingError("", "has too many digits", "use a number below 2^63")
        return checked

    def _check(self) -> None:
        """Raise SettingError for values that contradict each other. A class has only its own checks: all are called."""

    @model_validator(mode="after")
    def _check_all(self) -> Self:
        for kind in reversed(type(self).__mro__):
            for name, needs in vars(kind).get("NEEDS", {}).items():
                if is_set(self, name):
                    for need in as_list(needs):
                        self._check_need(name, need)
            vars(kind).get("_check", Settings._check)(self)
        return self

    def _check_need(self, name: str, need: Need) -> None:
        if isinstance(need, str):
            remedy = f"set {need} too, or leave it out"
            need = Unless(operator.attrgetter(need), f"without {need}", remedy)
        elif not isinstance(need, Unless):
            needed, *values = need
            value = getattr(self, needed)
            shown = f"{needed} {value!r}" if isinstance(value, str) else needed
            remedy = f"leave it out or change {needed}"
            need = Unless(lambda _: value in values, f"with {shown}", remedy)
        if not need.holds(self):
            about = type(self).model_fields.get(name)
            shown = about.alias if about and about.alias else name
            raise SettingError(shown, f"has no effect {need.condition}", need.remedy)


class Shared(Settings):
    """Base of settings that several commands have; the help lists them after those of the class that inherits them.

    Arguments and options come in the order of these base classes from the last to the first.
    """


class JsonSettings(Shared):
    """Results as JSON."""

    json_file: Annotated[Path | None, Field(alias="json")] = None
    """Write the results to this file as JSON; `-` prints the JSON instead of the text."""


class EngineSettings(Shared):
    """The framework of a command that builds a model."""

    engine: Engine = "tensorflow"
    """Framework to use; both have every model."""


class DryRunSettings(Shared):
    """A trial."""

    dry_run: bool = False
    """Print what the command would write or start, and do neither."""


class OutSettings(Shared):
    """The output of a step."""

    out: Positional[Path]
    """Output folder."""


class NewOutSettings(Shared):
    """The output of a command that does not continue."""

    out: Positional[Path]
    """Output folder; new or empty."""


def _refuse_addresses(paths: list[Any]) -> None:
    """Raise SettingError for an address: `Path` would drop one of its slashes."""
    for path in paths:
        if isinstance(path, str) and START_OF_ADDRESS.match(path):
            problem = f"{path} is an address, but this command needs local files"
            remedy = "copy them here first, for example with `aws s3 sync`"
            raise SettingError("", problem, remedy)


def _expand(path: Any, is_opened: bool) -> Any:
    """Return a path, or a list of paths, with `~` and the variables of the environment expanded.

    Raises SettingError for a variable that is not set, instead of creating a folder called $DATASETS_DIR.
    """
    if isinstance(path, list):
        return [_expand(item, is_opened) for item in path]
    if not isinstance(path, str):
        return path
    expanded = os.path.expanduser(os.path.expandvars(path))
    if is_opened and re.search(r"\$[\w{]", expanded):
        problem = f"the variable is not set in {path}"
        raise SettingError("", problem, "export it, or use a path without it")
    return expanded


def as_list(value: object) -> list[Any]:
    """Return a list as it is, and another value as a list of one."""
    if isinstance(value, list):
        return value
    return [value]


def is_set(settings: BaseModel, name: str) -> bool:
    """Return whether a setting was given and differs from its default.

    A default that was given counts as not set, because the settings.json of a run lists every setting. The name of a
    setting in a group is its dotted path.
    """
    group, _, inner = name.partition(".")
    if inner:
        return is_set(getattr(settings, group), inner)
    default = type(settings).model_fields[name].get_default(call_default_factory=False)
    return name in settings.model_fields_set and getattr(settings, name) != default


def parse_bytes(text: str) -> int:
    """Return the bytes of a memory size such as 80GB, 24GiB, 640MB or 16e9.

    Raises SettingError, a ValueError, for other text.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*(?:([kMGT])(i?)B|B?)", text.strip())
    size = 0
    if match:
        # GiB counts in 1,024, GB in 1,000; k, M, G and T are the powers 1 to 4.
        base = 1024 if match[3] else 1000
        unit = base ** " kMGT".index(match[2] or " ")
        size = int(float(match[1]) * unit)
    if size < 10**6:
        problem = f"{text!r} is not a memory size of at least 1 MB"
        raise SettingError("", problem, "write it as 80GB, 24GiB, 640MB or 16e9")
    return size


def _check_size(value: object) -> str:
    parse_bytes(str(value))
    return str(value)


MemorySize = Annotated[str, BeforeValidator(_check_size)]
