"""Every option of a command, as people and shells are told of it: what it takes, its default, its heading.

The settings class is the one source: the docstring under a field is the option's text, the class that
declares it gives the heading, its type says what may stand behind it. A command's own options come first,
then those that it shares with others, then groups of settings in their order. `help.py` prints them, and
`bert completion` hands them to shells.
"""

import argparse
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

PATH_ENDINGS = ("_dir", "_path", "_file")
OFTEN_PATHS = ("model", "vocab")
"""Settings that are a name of something or a path to it."""
NAMES = {int: "INT", float: "NUMBER", Path: "PATH", str: "TEXT", dict: "JSON"}


@dataclass(frozen=True)
class Option:
    """One flag, or one word that stands by its place."""

    flags: tuple[str, ...]
    """As they are written, `--no-...` of a switch among them; none for what stands by its place."""
    name: str
    """The dotted path of the setting."""
    takes: str
    """What stands behind it, in capitals or as {a,b}; empty for a switch."""
    choices: tuple[str, ...]
    """All that may stand behind it, where that is a list."""
    text: str
    """What it is for, with its default."""
    is_path: bool
    is_required: bool
    is_list: bool


@dataclass(frozen=True)
class Section:
    """Options under one heading."""

    title: str
    about: str = ""
    options: list[Option] = field(default_factory=list)


def sections_of(settings: type[BaseModel], command: str) -> list[Section]:
    """All options of a command, under their headings, in the order in which they are told."""
    places = Section("arguments")
    by_class: dict[type[BaseModel], Section] = {}
    groups: dict[type[BaseModel], list[Section]] = {}
    for kind in settings.__mro__:
        if issubclass(kind, BaseModel):
            title = f"options of bert {command}" if kind is settings else _heading(kind)
            by_class[kind], groups[kind] = Section(title), []
    if "about" in settings.model_fields:
        by_class[settings].options.append(_config_option())
    for name, about in settings.model_fields.items():
        if argparse.SUPPRESS in about.metadata:
            continue
        home = _home(settings, name)
        inner = group_of(about.annotation)
        if inner is not None:
            text = _in_a_line(about.description)
            default = about.default if isinstance(about.default, BaseModel) else None
            demands = about.is_required()
            groups[_first_home(settings, name)] += _group(inner, name, text, default, demands)
        elif is_by_place(about):
            places.options.append(_option(name, about, None, True))
        else:
            by_class[home].options.append(_option(name, about, None, True))
    told = [places, *by_class.values()]
    told += [section for home in by_class for section in groups[home]]
    return [section for section in told if section.options]


def examples_of(settings: type[BaseModel]) -> list[str]:
    """The command lines that the class' docstring gives behind `Example:`, each on one line."""
    found: list[list[str]] = []
    for line in (settings.__doc__ or "").splitlines():
        if line.strip().startswith("Example:"):
            found.append([line.strip().removeprefix("Example:").strip()])
        elif found:
            found[-1].append(line.strip())
    return [" ".join(part for part in lines if part) for lines in found]


def purpose_of(settings: type[BaseModel]) -> str:
    """What the class' docstring says before its examples."""
    return inspect.cleandoc(settings.__doc__ or "").partition("Example:")[0].strip()


def group_of(annotation: Any) -> type[BaseModel] | None:
    """The class of a group of settings, also where the group may be left out."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def is_by_place(about: FieldInfo) -> bool:
    """Whether a setting is given by its place in the command line, without a flag."""
    return any("CliPositionalArg" in str(mark) for mark in about.metadata)


def _config_option() -> Option:
    text = "JSON file of settings that is read first: a path, or the name of a shipped config; flags win."
    return Option(("--config",), "config", "FILE", (), text, True, False, False)


def _home(settings: type[BaseModel], name: str) -> type[BaseModel]:
    """The class that declares a setting last: one that changes only the default makes it its own."""
    return next(kind for kind in settings.__mro__ if name in vars(kind).get("__annotations__", {}))


def _first_home(settings: type[BaseModel], name: str) -> type[BaseModel]:
    """The class that declares a group first: its place is the same in all commands."""
    declare = (kind for kind in settings.__mro__ if name in vars(kind).get("__annotations__", {}))
    return list(declare)[-1]


def _heading(kind: type[BaseModel]) -> str:
    """The heading of options that commands share: whose they are, or how their class' docstring begins."""
    for example in examples_of(kind):
        return "options of " + " ".join(example.split()[:2])
    return _in_a_line(kind.__doc__).partition(". ")[0].partition(":")[0].rstrip(".")


def _group(
    kind: type[BaseModel], path: str, about: str, default: BaseModel | None, demands: bool
) -> Iterator[Section]:
    """A group of settings and the groups in it; what it has to be given only where the group has to."""
    own = Section(path.replace("_", "-"), about)
    below: list[Section] = []
    for name, inner in kind.model_fields.items():
        group = group_of(inner.annotation)
        value = getattr(default, name) if default is not None else None
        where = f"{path}.{name}"
        if group is None:
            own.options.append(_option(where, inner, default, demands))
        else:
            given = value if isinstance(value, BaseModel) else None
            required = demands and inner.is_required()
            below += _group(group, where, _in_a_line(inner.description), given, required)
    yield own
    yield from below


def _option(where: str, about: FieldInfo, above: BaseModel | None, demands: bool) -> Option:
    name = where.rpartition(".")[2]
    if about.alias:
        where = where.removesuffix(name) + about.alias
    flag = where.replace("_", "-")
    is_switch, choices = about.annotation is bool, _choices(about.annotation)
    value = getattr(above, name) if above is not None else _default(about)
    is_required = demands and above is None and about.is_required()
    text = _in_a_line(about.description)
    if is_required and not is_by_place(about):
        text += " (required)"
    elif _shown(value):
        text += f" (default: {_shown(value)})"
    takes = "" if is_switch else _takes(about.annotation, name)
    flags: tuple[str, ...] = (f"--{flag}",)
    if is_switch:
        head, _, tail = flag.rpartition(".")
        flags = (f"--{flag}", f"--no-{head}.{tail}" if head else f"--no-{flag}")
    by_place = is_by_place(about)
    return Option(
        flags=() if by_place else flags,
        name=where,
        takes=where.replace("_", "-").upper() if by_place else takes,
        choices=choices,
        text=text,
        is_path="PATH" in takes or name in OFTEN_PATHS,
        is_required=is_required,
        is_list=get_origin(_bare(about.annotation)) is list,
    )


def _default(about: FieldInfo) -> Any:
    return (
        None
        if about.is_required()
        else about.get_default(call_default_factory=True, validated_data={})
    )


def _shown(value: Any) -> str:
    """A default as it would be typed; empty where there is none to tell."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ",".join(str(one) for one in value)
    return "" if value is None else str(value)


def _kinds(annotation: Any) -> tuple[Any, ...]:
    """The types that a setting may have, without None."""
    bare = _bare(annotation)
    if get_origin(bare) in (Union, UnionType):
        return tuple(_bare(kind) for kind in get_args(bare) if kind is not NoneType)
    return (bare,)


def _bare(annotation: Any) -> Any:
    """A type without the conditions that stand beside it."""
    return _bare(annotation.__origin__) if hasattr(annotation, "__metadata__") else annotation


def _choices(annotation: Any) -> tuple[str, ...]:
    kinds = _kinds(annotation)
    if len(kinds) == 1 and get_origin(kinds[0]) is Literal:
        return tuple(str(choice) for choice in get_args(kinds[0]))
    return ()


def _takes(annotation: Any, name: str) -> str:
    """What stands behind a flag, in a word."""
    words: list[str] = []
    for kind in _kinds(annotation):
        if get_origin(kind) is Literal:
            names = [str(choice) for choice in get_args(kind)]
            word = "{" + ",".join(names) + "}" if len(names) > 1 else names[0]
        elif get_origin(kind) is list:
            # A list of one is that one; of groups or of lists it is written as JSON.
            inner = _bare(get_args(kind)[0])
            word = NAMES.get(inner, "JSON") if not group_of(inner) else ""
            word = "PATH" if name.endswith(PATH_ENDINGS) and word == "TEXT" else word
        elif kind is str and name.endswith(PATH_ENDINGS):
            word = "PATH"
        else:
            word = NAMES.get(kind, "TEXT")
        if word and word not in words:
            words.append(word)
    return "|".join(words)


def _in_a_line(text: str | None) -> str:
    return " ".join((text or "").split())
