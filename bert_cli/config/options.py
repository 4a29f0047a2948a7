"""The options of a command: described from its settings class, printed as help, parsed from words.

The settings class is the one source. The docstring of a field is the text of its option, the class that
declares the field gives the heading, and its type says what the option takes. argparse lays out the help
and parses the words; pydantic then validates the texts, so that every mistake is reported at once.
"""

import argparse
import csv
import inspect
import json
import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from bert_cli.config.messages import group_given, unknown_arguments
from bert_cli.config.old_names import FALSE, TRUE
from bert_cli.config.settings import HIDDEN, group_of, is_positional
from bert_cli.errors import ConfigError, combine

LOG_LEVELS = ("debug", "info", "warning", "error")
MAX_WIDTH = 100
HELP_COLUMN = 26
PATH_ENDINGS = ("_dir", "_path", "_file")
OFTEN_PATHS = ("model", "vocab")
"""Settings that take a name or a path."""
METAVARS = {int: "INT", float: "NUMBER", Path: "PATH", str: "TEXT", dict: "JSON"}
NULL = ("null", "None")


@dataclass(frozen=True, kw_only=True)
class Option:
    """One flag or one positional argument."""

    flags: tuple[str, ...]
    """The flag, and the `--no-...` form of a switch; empty for a positional argument."""
    name: str
    """The dotted path of the setting."""
    takes: str
    """The placeholder of the value, such as INT or {a,b}; empty for a switch."""
    choices: tuple[str, ...] = ()
    """All values, if there is a fixed list."""
    text: str
    """The help text, with the default."""
    is_path: bool = False
    is_required: bool = False
    is_list: bool = False
    allows_none: bool = False


@dataclass(frozen=True)
class Section:
    """Options under one heading."""

    title: str
    about: str = ""
    options: list[Option] = field(default_factory=list)


def sections_of(settings: type[BaseModel], command: str) -> list[Section]:
    """Return the options of a command: its own first, then those common to several commands, then groups."""
    positional = Section("arguments")
    by_class: dict[type[BaseModel], Section] = {}
    groups: dict[type[BaseModel], list[Section]] = {}
    for kind in settings.__mro__:
        if issubclass(kind, BaseModel):
            title = f"options of bert {command}" if kind is settings else _heading(kind)
            by_class[kind], groups[kind] = Section(title), []
    if "about" in settings.model_fields:
        by_class[settings].options.append(CONFIG)
    for name, about in settings.model_fields.items():
        classes = [kind for kind in by_class if name in vars(kind).get("__annotations__", {})]
        inner = group_of(about.annotation)
        if HIDDEN in about.metadata:
            continue
        if inner is not None:
            default = about.default if isinstance(about.default, BaseModel) else None
            text = _one_line(about.description)
            # The last class declares the group first, so that its position is the same in all commands.
            groups[classes[-1]] += _group(inner, name, text, default, about.is_required())
        elif is_positional(about):
            positional.options.append(_option(name, about, None, True))
        else:
            by_class[classes[0]].options.append(_option(name, about, None, True))
    sections = [positional, *by_class.values()]
    sections += [section for kind in by_class for section in groups[kind]]
    return [section for section in sections if section.options]


CONFIG = Option(
    flags=("--config",),
    name="config",
    takes="FILE",
    text="JSON file with settings: a path, or the name of a shipped config. Flags override it.",
    is_path=True,
)


def examples_of(settings: type[BaseModel]) -> list[str]:
    """Return the command lines after `Example:` in a class docstring, each on one line."""
    examples: list[list[str]] = []
    for line in (settings.__doc__ or "").splitlines():
        if line.strip().startswith("Example:"):
            examples.append([line.strip().removeprefix("Example:").strip()])
        elif examples:
            examples[-1].append(line.strip())
    return [" ".join(part for part in lines if part) for lines in examples]


def purpose_of(settings: type[BaseModel]) -> str:
    """Return the part of a class docstring before its examples."""
    return inspect.cleandoc(settings.__doc__ or "").partition("Example:")[0].strip()


def _heading(kind: type[BaseModel]) -> str:
    """Return the heading of shared options: their command, or the first sentence of the docstring."""
    for example in examples_of(kind):
        return "options of " + " ".join(example.split()[:2])
    return re.split(r"[.:;]", _one_line(kind.__doc__))[0]


def _group(
    kind: type[BaseModel], path: str, about: str, default: BaseModel | None, required: bool
) -> Iterator[Section]:
    """Yield the sections of a group and of the groups in it."""
    own = Section(path.replace("_", "-"), about)
    below: list[Section] = []
    for name, inner in kind.model_fields.items():
        group, where = group_of(inner.annotation), f"{path}.{name}"
        if group is None:
            own.options.append(_option(where, inner, default, required))
        else:
            value = getattr(default, name, None)
            value = value if isinstance(value, BaseModel) else None
            needed = required and inner.is_required()
            below += _group(group, where, _one_line(inner.description), value, needed)
    yield own
    yield from below


def _option(path: str, about: FieldInfo, group: BaseModel | None, required: bool) -> Option:
    """Describe one setting; `group` holds the command's defaults of the group it belongs to."""
    name = path.rpartition(".")[2]
    if about.alias:
        path = path.removesuffix(name) + about.alias
    flag = path.replace("_", "-")
    head, _, tail = flag.rpartition(".")
    off = f"--no-{head}.{tail}" if head else f"--no-{flag}"
    is_switch, positional = about.annotation is bool, is_positional(about)
    required = required and group is None and about.is_required()
    takes = "" if is_switch else _takes(about.annotation, name)
    kinds = _kinds(about.annotation)
    only = kinds[0] if len(kinds) == 1 else None
    return Option(
        flags=() if positional else (f"--{flag}", off) if is_switch else (f"--{flag}",),
        name=path,
        takes=flag.upper() if positional else takes,
        choices=tuple(map(str, get_args(only))) if get_origin(only) is Literal else (),
        text=_help_text(about, getattr(group, name) if group else _default(about), required),
        is_path="PATH" in takes or name in OFTEN_PATHS,
        is_required=required,
        is_list=any(get_origin(kind) is list for kind in kinds),
        allows_none=NoneType in get_args(about.annotation),
    )


def _default(about: FieldInfo) -> Any:
    if about.is_required():
        return None
    return about.get_default(call_default_factory=True, validated_data={})


def _help_text(about: FieldInfo, default: Any, required: bool) -> str:
    """Return the help text of a setting with its default as it would be typed."""
    text = _one_line(about.description)
    if required and not is_positional(about):
        return f"{text} (required)"
    if isinstance(default, bool):
        shown = "yes" if default else "no"
    elif isinstance(default, list):
        shown = ",".join(map(str, default))
    else:
        shown = "" if default is None else str(default)
    return f"{text} (default: {shown})" if shown else text


def _kinds(annotation: Any) -> tuple[Any, ...]:
    """Return the types of a setting without None and without the conditions on them."""
    bare = _bare(annotation)
    if get_origin(bare) in (Union, UnionType):
        return tuple(_bare(kind) for kind in get_args(bare) if kind is not NoneType)
    return (bare,)


def _bare(annotation: Any) -> Any:
    return _bare(annotation.__origin__) if hasattr(annotation, "__metadata__") else annotation


def _takes(annotation: Any, name: str) -> str:
    """Return the placeholder of a value: one word for each type that it may have."""
    words: list[str] = []
    for kind in _kinds(annotation):
        if get_origin(kind) is list:
            # An element alone is a list of one; lists of lists are written as JSON.
            kind = _bare(get_args(kind)[0])
            if group_of(kind):
                continue
            word = METAVARS.get(kind, "JSON")
        elif get_origin(kind) is Literal:
            choices = [str(choice) for choice in get_args(kind)]
            word = "{" + ",".join(choices) + "}" if len(choices) > 1 else choices[0]
        else:
            word = METAVARS.get(kind, "TEXT")
        words.append("PATH" if name.endswith(PATH_ENDINGS) and word == "TEXT" else word)
    return "|".join(dict.fromkeys(words))


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def help_text(settings: type[BaseModel], command: str) -> str:
    """Return what `bert COMMAND --help` prints, as wide as the terminal and at most 100 columns."""
    parser = argparse.ArgumentParser(
        prog=f"bert {command}", add_help=False, formatter_class=_formatter
    )
    return add_help(parser, settings, command).format_help()


def add_help(
    parser: argparse.ArgumentParser, settings: type[BaseModel], command: str
) -> argparse.ArgumentParser:
    """Add the options, headings, purpose and examples of a command to a parser, and return it."""
    sections = sections_of(settings, command)
    positional = [option for section in sections for option in section.options if not option.flags]
    parser.usage = " ".join([f"bert {command} [options]", *map(_usage, positional)])
    if command == "launch":
        parser.usage += " -- COMMAND [options]"
    if command == "bench":
        parser.usage = "bert bench (NAME | pretrain | squad | data) [options]"
    paragraphs = purpose_of(settings).split("\n\n")
    parser.description = "\n\n".join(textwrap.fill(text, _width()) for text in paragraphs)
    for section in sections:
        about = textwrap.fill(section.about, _width() - 2) or None
        group = parser.add_argument_group(section.title, about)
        for option in section.options:
            _add_to_help(group, option)
    general = parser.add_argument_group("options of every command")
    general.add_argument("-h", "--help", action="help", help="Print this help and exit.")
    general.add_argument(
        "--log-level",
        choices=LOG_LEVELS,
        metavar="{" + ",".join(LOG_LEVELS) + "}",
        help="Show the log messages of TensorFlow and other libraries from this level on; by default none.",
    )
    lines = [wrap_command(line, _width()) for line in examples_of(settings)]
    parser.epilog = "\n".join(["examples:", *lines]) if lines else None
    return parser


def _add_to_help(group: argparse._ArgumentGroup, option: Option) -> None:
    text, choices = option.text.replace("%", "%%"), option.choices or None
    if not option.flags:
        nargs = {(0, 0): "?", (0, 1): None, (1, 0): "*", (1, 1): "+"}
        group.add_argument(
            option.name,
            metavar=option.takes,
            help=text,
            nargs=nargs[option.is_list, option.is_required],
            choices=choices,
        )
    elif not option.takes:
        group.add_argument(*option.flags, action="store_true", help=text, dest=option.name)
    else:
        group.add_argument(
            *option.flags, metavar=option.takes, help=text, dest=option.name, choices=choices
        )


def _usage(option: Option) -> str:
    word = f"{option.takes} ..." if option.is_list else option.takes
    return word if option.is_required else f"[{word}]"


def wrap_command(example: str, width: int) -> str:
    """Return a command line that can be pasted, broken before flags where it is too long."""
    lines, line = "", " "
    for part in re.split(r" (?=--)", example):
        if len(f"{line} {part} \\") > width and line.strip():
            lines, line = f"{lines}{line} \\\n", "     "
        line = f"{line} {part}"
    return lines + line


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=HELP_COLUMN, width=_width())


def _width() -> int:
    return min(shutil.get_terminal_size().columns, MAX_WIDTH)


def parse_words(
    settings: type[BaseModel], words: Sequence[str], program: str, renamed: Mapping[str, str]
) -> dict[str, Any]:
    """Return the values of a command line as texts, nested like the settings.

    `renamed` maps settings to the old names that the words had for them. Raises ConfigError for unknown
    flags, with the nearest one, for a group that is not JSON, and for a flag without its value.
    """
    options = [option for section in sections_of(settings, "") for option in section.options]
    own, command = split_at_dashes(words)
    if "command" not in settings.model_fields and "--" in words:
        raise ConfigError(f"{program} (--)", "takes no command", "leave out the --")
    has_positional = any(not option.flags for option in options)
    if has_positional:  # a word after a switch is a positional argument, not its value
        switches = {option.flags[0] for option in options if not option.takes}
        own = [f"{word}=true" if word in switches else word for word in own]
    try:
        parsed, unknown = _value_parser(settings, options).parse_known_intermixed_args(own)
    except argparse.ArgumentError as error:
        flag = error.argument_name or program
        raise ConfigError(flag, error.message, f"see {program} --help") from error
    if unknown:
        raise unknown_arguments(settings, unknown, program)
    values: dict[str, Any] = {}
    by_name = {option.name: option for option in options}
    errors: list[ConfigError] = []
    # A group comes before its members, which override its JSON.
    for path, given in sorted(vars(parsed).items(), key=lambda item: item[0].count(".")):
        *groups, name = path.split(".")
        inside = values
        for group in groups:
            inside = inside.setdefault(group, {})
        try:
            option = by_name.get(path)
            inside[name] = _value(option, given) if option else _group_value(given)
        except json.JSONDecodeError as error:
            if option is None:
                errors.append(group_given(settings, path, program, renamed))
                continue
            where = f"{option.flags[0]} ({error.doc})"
            errors.append(ConfigError(where, f"is not valid JSON ({error.msg})", "fix that"))
    if errors:
        raise combine(errors)
    return values | ({"command": command} if "--" in words else {})


def _value_parser(settings: type[BaseModel], options: Sequence[Option]) -> argparse.ArgumentParser:
    """Return the parser of values: every flag takes a text, and required ones may be missing."""
    parser = argparse.ArgumentParser(
        usage="bert",
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
        argument_default=argparse.SUPPRESS,
    )
    for option in options:
        if not option.flags:
            parser.add_argument(option.name, nargs="*" if option.is_list else "?")
        elif not option.takes:
            on, off = option.flags
            parser.add_argument(on, dest=option.name, nargs="?", const="true")
            parser.add_argument(off, dest=option.name, action="store_const", const="false")
        else:
            action = "append" if option.is_list else "store"
            parser.add_argument(*option.flags, dest=option.name, action=action)
    names = [option.name for option in options]
    groups = {
        ".".join(name.split(".")[:n]) for name in names for n in range(1, name.count(".") + 1)
    }
    for group in groups:
        parser.add_argument(f"--{group.replace('_', '-')}", dest=group, nargs="?", const="")
    return parser


def _group_value(given: str) -> dict[str, Any]:
    """Return the JSON object of a group. Raises JSONDecodeError for other text."""
    value = json.loads(given)
    if not isinstance(value, dict):
        raise json.JSONDecodeError("not an object", given, 0)
    return value


def _value(option: Option, given: Any) -> Any:
    """Return a value as pydantic takes it: a list, a boolean, None, or the text."""
    if not option.takes and option.flags:
        return {**dict.fromkeys(TRUE, True), **dict.fromkeys(FALSE, False)}.get(
            given.lower(), given
        )
    if not isinstance(given, list):
        return None if given in NULL and option.allows_none and option.flags else given
    values: list[Any] = []
    for text in given:
        if text in NULL:
            return None
        if text.lstrip().startswith("["):
            values += json.loads(text)
        elif text.lstrip().startswith("{"):
            values.append(json.loads(text))
        else:
            values += next(csv.reader([text], skipinitialspace=True), [])
    return values


def split_at_dashes(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words before `--` and those after it, which belong to another command."""
    end = words.index("--") if "--" in words else len(words)
    return list(words[:end]), list(words[end + 1 :])


def split_log_level(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the level of `--log-level`, empty if it is not given, and the other words.

    Raises ConfigError for an unknown level.
    """
    own, _ = split_at_dashes(words)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="")
    try:
        parsed, rest = parser.parse_known_args(own)
    except argparse.ArgumentError as error:
        known = ", ".join(LOG_LEVELS)
        raise ConfigError("--log-level", f"takes one of {known}", "give one of them") from error
    return parsed.log_level, [*rest, *words[len(own) :]]
