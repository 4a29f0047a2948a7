"""Markers of settings: facts about a setting besides its type, in its `Annotated`, and functions that read them.

A marker also holds for a class that declares the setting again: `Settings` copies it.
"""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

T = TypeVar("T")
Engine = Literal["tensorflow", "jax"]
POSITIONAL = "positional"
# A setting that the command line gives without a flag.
Positional = Annotated[T, POSITIONAL]
HIDDEN = "hidden"
# A setting without a flag, which only a file or the command itself gives.
Hidden = Annotated[T, HIDDEN]
USUAL = "usual"
# A setting of a training run that `--help` lists; `--help-all` lists every setting.
Usual = Annotated[T, USUAL]
PATH = "path or name"
# A path, or instead of it a name.
PathOrName = Annotated[str, PATH]
ADDRESS = "address"
# A path, or instead of it the address of a service.
PathOrAddress = Annotated[PathOrName, ADDRESS]
FIXED = "fixed"
# A setting that decides the numbers of a run: a checkpoint continues only with the same value.
Fixed = Annotated[T, FIXED]
RECORDED = "recorded"
# A setting that changes the files of a data step, which its manifest records.
Recorded = Annotated[T, RECORDED]


def marked(settings: type[BaseModel], marker: str) -> set[str]:
    """Return the names of the settings with a marker."""
    return {name for name, about in settings.model_fields.items() if marker in about.metadata}


def recorded(settings: BaseModel) -> dict[str, Any]:
    """Return the settings of a data step that its manifest records, as JSON."""
    return settings.model_dump(mode="json", include=marked(type(settings), RECORDED))


def kinds_of(annotation: Any) -> list[Any]:
    """Return the types of a setting without None and without the conditions on them."""
    if hasattr(annotation, "__metadata__"):
        return kinds_of(annotation.__origin__)
    if get_origin(annotation) in (Union, UnionType):
        return list(chain.from_iterable(map(kinds_of, get_args(annotation))))
    if annotation is NoneType:
        return []
    return [annotation]


def is_path(about: FieldInfo) -> bool:
    """Return whether a setting holds a path, several paths, a PathOrName, or a PathOrAddress."""
    return not {Path, PATH}.isdisjoint(_parts_of(about.annotation, *about.metadata))


def takes_address(about: FieldInfo) -> bool:
    """Return whether a setting may be an address instead of a path."""
    return ADDRESS in _parts_of(about.annotation, *about.metadata)


def _parts_of(*parts: object) -> Iterator[object]:
    """Yield types and markers, each with the types and markers in it."""
    for part in parts:
        yield part
        yield from _parts_of(*get_args(part))


def group_of(annotation: Any) -> type[BaseModel] | None:
    """Return the class of a group of settings, also of an optional group; None for a list of groups."""
    classes = (kind for kind in kinds_of(annotation) if isinstance(kind, type))
    return next((kind for kind in classes if issubclass(kind, BaseModel)), None)
