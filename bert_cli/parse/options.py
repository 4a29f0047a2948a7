"""The options of a command: described from its settings class, and parsed from words.

The docstring of a field is the text of its option, the class that declares the field gives the heading, and
its type says what the option takes. argparse parses the words; pydantic validates.
"""

import argparse
import csv
import inspect
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from bert_cli.errors import ConfigError, combine, nearest
from bert_cli.facts.architectures import fields_of
from bert_cli.files import JSONObject, json_with_unique_keys
from bert_cli.parse.old_names import FALSE, TRUE, ignored_keys, instead_of, old_names_of, our_name
from bert_cli.parse.removed import removed_setting
from bert_cli.settings.markers import HIDDEN, POSITIONAL, USUAL, group_of, is_path, kinds_of
from bert_cli.settings.settings import Shared

LOG_LEVELS = ("debug", "info", "warning", "error")
METAVARS = {int: "INT", float: "NUMBER", Path: "PATH", str: "TEXT", dict: "JSON"}
NULL = ("null", "None")
# Program -> the remedy for words that it does not take.
SURPLUS = {
    "bert launch": "write bert launch -- COMMAND [options]",
    "bert predict": "write several texts to a file, --input FILE, or one per line on standard input",
}


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
    text: str
    """The help text, with the default."""
    is_path: bool = False
    is_required: bool = False
    is_list: bool = False
    allows_none: bool = False
    is_usual: bool = False


@dataclass(frozen=True)
class Section:
    """Options under one heading."""

    title: str
    about: str = ""
    options: list[Option] = field(default_factory=list)


def sections_of(settings: type[BaseModel], command: str) -> list[Section]:
    """Return the options of a command: first its own, then options of several commands, then groups."""
    positional = Section("arguments")
    by_title: dict[str, Section] = {}
    by_class: dict[type[BaseModel], Section] = {}
    groups: dict[type[BaseModel], list[Section]] = {}
    shared: list[tuple[Section, Section]] = []
    for kind in settings.__mro__:
        if not issubclass(kind, BaseModel):
            continue
        groups[kind] = []
        if Shared in kind.__bases__:
            section = next(by_class[heir] for heir in by_class if kind in heir.__bases__)
            by_class[kind] = Section(section.title)
            shared.append((section, by_class[kind]))
        else:
            title = f"options of bert {command}" if kind is settings else _heading(kind)
            by_class[kind] = by_title.setdefault(title, Section(title))
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
        elif POSITIONAL in about.metadata:
            positional.options.append(_option(name, about, None, True))
        else:
            by_class[classes[0]].options.append(_option(name, about, None, True))
    for section, last in reversed(shared):
        section.options.extend(last.options)
    sections = [positional, *by_title.values()]
    sections += [section for kind in by_class for section in groups[kind]]
    return [section for section in sections if section.options]


CONFIG_TEXT = "JSON file with settings: a path, or the name of a shipped config. Flags override it."
CONFIG = Option(
    flags=("--config",), name="config", takes="FILE", text=CONFIG_TEXT, is_path=True, is_usual=True
)


def examples_of(settings: type[BaseModel]) -> list[str]:
    """Return the command lines after `Example:` in a class docstring, each on one line."""
    texts = (settings.__doc__ or "").split("Example:")[1:]
    return [_one_line(text) for text in texts]


def purpose_of(settings: type[BaseModel]) -> str:
    """Return the part of a class docstring before its examples."""
    return inspect.cleandoc(settings.__doc__ or "").partition("Example:")[0].strip()


def _heading(kind: type[BaseModel]) -> str:
    for example in examples_of(kind):
        return "options of " + " ".join(example.split()[:2])
    return re.split(r"[.:;]", _one_line(kind.__doc__))[0]


def _group(
    kind: type[BaseModel], path: str, about: str, default: BaseModel | None, required: bool
) -> Iterator[Section]:
    section = Section(path.replace("_", "-"), about)
    below: list[Section] = []
    for name, inner in fields_of(kind).items():
        group = group_of(inner.annotation)
        where = f"{path}.{name}"
        if HIDDEN in inner.metadata:
            continue
        if group is None:
            section.options.append(_option(where, inner, default, required))
        else:
            needed = required and inner.is_required()
            value = getattr(default, name, None)
            below += _group(group, where, _one_line(inner.description), value, needed)
    yield section
    yield from below


def _option(path: str, about: FieldInfo, group: BaseModel | None, required: bool) -> Option:
    """Describe one setting; `group` has the command's defaults for the group of the setting."""
    name = path.rpartition(".")[2]
    path = path.removesuffix(name) + (about.alias or name)
    kinds = kinds_of(about.annotation)
    positional = POSITIONAL in about.metadata
    required = required and group is None and about.is_required()
    takes = "" if kinds == [bool] else _takes(kinds, is_path(about))
    flags = (flag_of(path),) if takes else (flag_of(path), off_flag_of(path))
    is_choice = len(kinds) == 1 and get_origin(kinds[0]) is Literal
    default = None
    if group is not None:
        default = getattr(group, name, about.default)
    elif not about.is_required() and not about.default_factory_takes_validated_data:
        default = about.get_default(call_default_factory=True)
    return Option(
        flags=() if positional else flags,
        name=path,
        takes=path.replace("_", "-").upper() if positional else takes,
        choices=tuple(map(str, get_args(kinds[0]))) if is_choice else (),
        text=_with_default(_one_line(about.description), default, required and not positional),
        is_path=is_path(about),
        is_required=required,
        is_list=any(get_origin(kind) is list for kind in kinds),
        allows_none=NoneType in get_args(about.annotation),
        is_usual=USUAL in about.metadata,
    )


def _with_default(text: str, default: object, required: bool) -> str:
    if isinstance(default, bool):
        default = "yes" if default else "no"
    elif isinstance(default, list):
        default = ",".join(map(str, default))
    if required:
        return f"{text} (required)"
    return text if default in (None, "") else f"{text} (default: {default})"


def _takes(kinds: Sequence[Any], names_a_path: bool) -> str:
    """Return the placeholder of a value: a word for each of its possible types."""
    words: list[str] = []
    for kind in kinds:
        if get_origin(kind) is list:
            # An element alone is a list of one; lists of lists are written as JSON.
            (kind,) = kinds_of(get_args(kind)[0])
            word = METAVARS.get(kind, "JSON")
            if group_of(kind) and len(kinds) > 1:
                continue
        else:
            word = METAVARS.get(get_origin(kind) or kind, "TEXT")
        if get_origin(kind) is Literal:
            choices = ",".join(map(str, get_args(kind)))
            word = f"{{{choices}}}" if "," in choices else choices
        words.append("PATH" if names_a_path and word == "TEXT" else word)
    return "|".join(dict.fromkeys(words))


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def parse_words(settings: type[BaseModel], words: Sequence[str], program: str) -> JSONObject:
    """Return the values of a command line as nested texts, under the keys that were typed.

    Raises ConfigError for unknown flags, with the nearest one, for a group that is not JSON, and for a flag
    without its value.
    """
    options = [option for section in sections_of(settings, "") for option in section.options]
    ignored = ignored_keys(has_configs="about" in settings.model_fields)
    before_dashes, command = split_at_dashes(words)
    texts: dict[str, str] = {}  # behind --, of which argparse must take none for a flag
    if "command" not in settings.model_fields and "--" in words:
        if all(option.flags for option in options):
            raise ConfigError(f"{program} (--)", "takes no command", "leave out the --")
        texts = {f"\0{number}": word for number, word in enumerate(command)}
        command = []
    if not all(option.flags for option in options):
        # A word after a switch is a positional argument, not the value of the switch.
        switches = {option.flags[0] for option in options if option.flags and not option.takes}
        switches |= set(map(flag_of, ignored))
        before_dashes = [f"{word}=true" if word in switches else word for word in before_dashes]
        before_dashes += texts
    by_key = {
        key: option
        for option in options
        for key in (option.name, *(old_names_of(option.name) if option.flags else ()))
    }
    try:
        parser = _value_parser(by_key, ignored)
        parsed, unknown = parser.parse_known_intermixed_args(before_dashes)
    except argparse.ArgumentError as error:
        flag = error.argument_name or program
        raise ConfigError(flag, error.message, f"see {program} --help") from error
    if unknown:
        raise _unknown_arguments(options, [texts.get(word, word) for word in unknown], program)
    values: JSONObject = {"command": command} if "--" in words and not texts else {}
    # A group comes before its members, which override its JSON.
    for key, value in sorted(vars(parsed).items(), key=lambda item: item[0].count(".")):
        *groups, name = key.split(".")
        inside = values
        for group in groups:
            inside = inside.setdefault(group, {})
        try:
            value = texts.get(value, value) if isinstance(value, str) else value
            if isinstance(value, list):
                value = [texts.get(word, word) for word in value]
            inside[name] = _value(by_key[key], value) if key in by_key else _group_value(value)
        except json.JSONDecodeError as error:
            if key in by_key:
                where = f"{flag_of(key)} ({error.doc})"
                problem = f"is not valid JSON ({error.msg})"
                raise ConfigError(where, problem, "check quotes, commas and brackets") from error
            first = next(o.flags[0] for o in options if o.name.startswith(f"{our_name(key)}."))
            remedy = f"set a value of the group, such as {first}; see {program} --help"
            where = f"{program} ({flag_of(key)})"
            in_json = f", in JSON ({error.msg})" if error.doc.startswith("{") else ""
            problem = f"is a group of settings{in_json}"
            raise ConfigError(where, problem, remedy) from error
    return values


def _value_parser(by_key: Mapping[str, Option], ignored: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of values: every flag takes a text, and required flags may be missing.

    `ignored` are the last parts of accepted keys that are no settings.
    """
    parser = argparse.ArgumentParser(
        usage="bert",
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
        argument_default=argparse.SUPPRESS,
    )
    for key, option in by_key.items():
        if not option.flags:
            parser.add_argument(key, nargs="*" if option.is_list else "?")
        elif not option.takes:
            parser.add_argument(flag_of(key), dest=key, nargs="?", const="true")
            parser.add_argument(off_flag_of(key), dest=key, action="store_const", const="false")
        else:
            action = "append" if option.is_list else "store"
            parser.add_argument(flag_of(key), dest=key, action=action)
    groups = {key[:at] for key in by_key for at, letter in enumerate(key) if letter == "."}
    for group in groups:
        parser.add_argument(flag_of(group), dest=group, nargs="?", const="")
    prefixes = ("", *(f"{group}." for group in groups))
    for prefix, name in itertools.product(prefixes, ignored):
        key = prefix + name
        if key not in by_key:
            parser.add_argument(flag_of(key), dest=key, nargs="*")
            parser.add_argument(off_flag_of(key), dest=key, action="store_const", const=["false"])
    return parser


def _group_value(text: str | list[str]) -> Any:
    if isinstance(text, list):  # of a key that is ignored
        return " ".join(text) or "true"
    value = json_with_unique_keys(text)
    if not isinstance(value, dict):
        raise json.JSONDecodeError("not an object", text, 0)
    return value


def _value(option: Option, words: Any) -> Any:
    """Return a value in the form for pydantic: a list, a boolean, None, or the text."""
    if not option.takes and option.flags:
        switch = {**dict.fromkeys(TRUE, True), **dict.fromkeys(FALSE, False)}
        return switch.get(words.lower(), words)
    if not isinstance(words, list):
        return None if words in NULL and option.allows_none and option.flags else words
    values: list[Any] = []
    for text in words:
        if text in NULL:
            return None
        if text.lstrip().startswith("["):
            values += json_with_unique_keys(text)
        elif text.lstrip().startswith("{"):
            values.append(json_with_unique_keys(text))
        elif option.flags and text:
            try:
                values += next(csv.reader([text], skipinitialspace=True))
            except csv.Error:  # a line end
                values += text.split(",")
        else:  # an empty value, or a positional argument, which the shell has split
            values.append(text)
    return values


def _unknown_arguments(
    options: Sequence[Option], words: Sequence[str], program: str
) -> ConfigError:
    flags = [option.flags[0] for option in options if option.flags]
    # A word after an unknown flag is probably its value.
    unknown = [word for word in words if word.startswith("-")]
    if not unknown or (program == "bert launch" and words[0] not in unknown):
        remedy = (
            "quote a text with spaces, write a list as A,B and a config as --config FILE, "
            f"see {program} --help"
        )
        where = f"{program} ({' '.join(words)})"
        remedy = SURPLUS.get(program, remedy)
        return ConfigError(where, "too many arguments", remedy)
    errors = []
    for word in unknown:
        flag = word.partition("=")[0]
        key = flag.lstrip("-")
        near = nearest(flag, flags)
        remedy = f"did you mean {near!r}?" if near else f"see {program} --help"
        if program == "bert doctor" and flag == "--config":
            remedy = "a run is checked by `bert doctor pretrain`"
        elif not all(option.flags for option in options):
            remedy += "; write a text that begins with - behind --"
        known = instead_of(key) or removed_setting(our_name(key.replace("-", "_")))
        errors.append(ConfigError(f"{program} ({word})", *(known or ("no such flag", remedy))))
    return combine(errors)


def flag_of(key: str) -> str:
    """Return the flag of a setting."""
    return "--" + key.replace("_", "-")


def off_flag_of(key: str) -> str:
    """Return the flag that switches a setting off: --no-dry-run, --no-wandb.enabled."""
    return "--no-" + key.replace("_", "-")


def split_at_dashes(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words before `--`, and the words after it, which belong to another command."""
    end = words.index("--") if "--" in words else len(words)
    return list(words[:end]), list(words[end + 1 :])


def split_log_level(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the level of `--log-level`, empty if it is not given, and the remaining words.

    Raises ConfigError for an unknown level.
    """
    before_dashes, _ = split_at_dashes(words)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="")
    try:
        parsed, rest = parser.parse_known_args(before_dashes)
    except argparse.ArgumentError as error:
        known = ", ".join(LOG_LEVELS)
        raise ConfigError("--log-level", f"takes one of {known}", "use one of them") from error
    return parsed.log_level, [*rest, *words[len(before_dashes) :]]
