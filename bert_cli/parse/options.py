"""The options of a command: described from its settings class, and parsed from words.

The docstring of a field is the text of its option, its class gives the heading, and pydantic validates the values.
"""

import ast
import csv
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain, pairwise, takewhile
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from bert_cli.errors import ConfigError, combine, did_you_mean
from bert_cli.facts.bert import fields_of
from bert_cli.files import JSONObject, json_with_unique_keys
from bert_cli.parse.old_names import FALSE, NO_SETTINGS, TRUE, our_name
from bert_cli.parse.removed import why_unknown
from bert_cli.settings.markers import HIDDEN, POSITIONAL, USUAL, group_of, is_path, kinds_of
from bert_cli.settings.settings import Shared, as_list

LOG_LEVELS = ("debug", "info", "warning", "error")
METAVARS = {int: "INT", float: "NUMBER", Path: "PATH", str: "TEXT", dict: "JSON"}
NULL = ("null", "None")
SWITCH = {**dict.fromkeys(TRUE, True), **dict.fromkeys(FALSE, False)}
# Program -> the remedy for words that it does not take.
SURPLUS = {
    "bert doctor": "write the command of the run first, as in bert doctor pretrain [options]",
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
    describe: Callable[[], str]
    """Returns the help text, with the default; `--help` alone needs it."""
    is_path: bool = False
    is_required: bool = False
    is_list: bool = False
    allows_none: bool = False
    is_usual: bool = False


# The options of a command, by their names.
Options = Mapping[str, Option]


@dataclass(frozen=True)
class Section:
    """Options under one heading."""

    title: str
    describe: Callable[[], str] = str
    options: list[Option] = field(default_factory=list)


def sections_of(settings: type[BaseModel], command: str) -> list[Section]:
    """Return the options of a command: first its own, then options of several commands, then groups.

    An option stands under the heading of the class that declares it; those of a Shared class are the command's own.
    """
    arguments: list[Option] = []
    unshared = [CONFIG] if "about" in settings.model_fields else []
    shared: list[Option] = []
    inherited: dict[str, list[Option]] = {}
    groups = []
    for name, about in settings.model_fields.items():
        if HIDDEN in about.metadata:
            continue
        if group_of(about.annotation):
            groups += _group(settings, name, about, about.default, True)
            continue
        # The class that declares the field last, which also has its docstring.
        owner = next(kind for kind in settings.__mro__ if name in kind.__annotations__)
        if POSITIONAL in about.metadata:
            options = arguments
        elif owner is settings:
            options = unshared
        elif Shared in owner.__bases__:
            options = shared
        else:
            # A command that other commands extend, or else the first words of the class.
            example = next(iter(examples_of(owner)), "")
            title = "options of " + " ".join(example.split()[:2])
            if not example:
                title = re.split(r"[.:;]", _one_line(owner.__doc__))[0]
            options = inherited.setdefault(title, [])
        options.append(_option(settings, name, about, None, True))
    # The fields of base classes come first in a class, and their options last.
    titled = [
        ("arguments", arguments),
        (f"options of bert {command}", unshared + shared),
        *reversed(inherited.items()),
    ]
    sections = [Section(title, options=options) for title, options in titled]
    return [section for section in (*sections, *groups) if section.options]


def options_of(settings: type[BaseModel]) -> list[Option]:
    """Return all options of a command."""
    return list(chain.from_iterable(section.options for section in sections_of(settings, "")))


CONFIG = Option(
    flags=("--config",),
    name="config",
    takes="FILE",
    describe=lambda: (
        "JSON file with settings: a path, or the name of a shipped config. Flags override it."
    ),
    is_path=True,
    is_usual=True,
)
LOG_LEVEL = Option(
    flags=("--log-level",),
    name="log_level",
    takes="{" + ",".join(LOG_LEVELS) + "}",
    choices=LOG_LEVELS,
    describe=lambda: (
        "Show the log messages of TensorFlow and other libraries from this level on; by default none."
    ),
)


def examples_of(settings: type[BaseModel]) -> list[str]:
    """Return the command lines after `Example:` in a class docstring, each on one line."""
    texts = (settings.__doc__ or "").split("Example:")[1:]
    return [_one_line(text) for text in texts]


def purpose_of(settings: type[BaseModel]) -> str:
    """Return the part of a class docstring before its examples."""
    return inspect.cleandoc(settings.__doc__ or "").partition("Example:")[0].strip()


def _group(
    owner: type[BaseModel], path: str, about: FieldInfo, default: object, required: bool
) -> list[Section]:
    """Return the section of a group, and those of the groups in it; `default` has the command's values of the group."""
    name = path.rpartition(".")[2]
    section = Section(path.replace("_", "-"), partial(text_of, owner, name, about))
    kind = group_of(about.annotation)
    assert kind is not None
    below = []
    required = required and about.is_required()
    if not isinstance(default, BaseModel):
        default = None
    for name, inner in fields_of(kind).items():
        where = f"{path}.{name}"
        if HIDDEN in inner.metadata:
            continue
        if group_of(inner.annotation):
            below += _group(kind, where, inner, getattr(default, name, None), required)
        else:
            section.options.append(_option(kind, where, inner, default, required))
    return [section, *below]


def _option(
    owner: type[BaseModel], path: str, about: FieldInfo, group: BaseModel | None, required: bool
) -> Option:
    """Describe a setting of `owner`; `group` has the command's defaults for the group of the setting."""
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
    if isinstance(default, bool):
        default = "yes" if default else "no"
    elif isinstance(default, list):
        default = ",".join(map(str, default))
    ending = ""
    if required and not positional:
        ending = " (required)"
    elif default not in (None, ""):
        ending = f" (default: {default})"
    return Option(
        flags=() if positional else flags,
        name=path,
        takes=path.replace("_", "-").upper() if positional else takes,
        choices=tuple(map(str, get_args(kinds[0]))) if is_choice else (),
        describe=lambda: text_of(owner, name, about) + ending,
        is_path=is_path(about),
        is_required=required,
        is_list=any(get_origin(kind) is list for kind in kinds),
        allows_none=NoneType in get_args(about.annotation),
        is_usual=USUAL in about.metadata,
    )


def _takes(kinds: Sequence[Any], names_a_path: bool) -> str:
    """Return the placeholder of a value: a word for each of its possible types."""
    words = []
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


def text_of(owner: type[BaseModel], name: str, about: FieldInfo) -> str:
    """Return what a setting does: its docstring in the class, in one that it inherits, or in one that inherits it."""
    kinds = (*owner.__mro__, *owner.__subclasses__())
    texts = (_docstrings(kind.__module__).get((kind.__name__, name)) for kind in kinds)
    return _one_line(about.description or next(filter(None, texts), ""))


@cache
def _docstrings(module: str) -> Mapping[tuple[str, str], str]:
    """Return the docstrings of all fields in a module, by class and field. pydantic would read them at each start."""
    if not module.startswith("bert_cli."):
        return {}
    # Python keeps no docstring of a field, so the source is read, for `--help` alone.
    nodes = ast.parse(inspect.getsource(sys.modules[module])).body
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    pairs = ((kind.name, *pair) for kind in classes for pair in pairwise(kind.body))
    return {
        (name, ast.unparse(field.target)): ast.literal_eval(text.value)
        for name, field, text in pairs
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def parse_words(settings: type[BaseModel], words: Sequence[str], program: str) -> JSONObject:
    """Return the values of a command line, under the dotted keys that were typed.

    Raises ConfigError for unknown flags, with the nearest one, a group that is not JSON, and a flag without value.
    """
    options = {option.name: option for option in options_of(settings)}
    positional = [option for option in options.values() if not option.flags]
    has_command = "command" in settings.model_fields
    if "--" in words and not (has_command or positional):
        raise ConfigError(f"{program} (--)", "takes no command", "leave out the --")
    before_dashes, behind = split_at_dashes(words)
    typed, rest = read_flags(options, before_dashes, program)
    unknown = [word for word in rest if not _is_value(options, word)]
    if has_command and "--" in words:
        typed["command"] = behind
    elif not unknown:
        rest += behind
        for option in positional:
            if rest:
                typed[option.name] = rest if option.is_list else rest[0]
            rest = [] if option.is_list else rest[1:]
    # A word after an unknown flag is probably its value; a word before it begins another command line.
    takes_command = has_command or program == "bert doctor"
    if rest and (not unknown or (takes_command and rest[0] not in unknown)):
        remedy = (
            "quote a text with spaces, put options before --, "
            f"write a list as A,B and a config as --config FILE, see {program} --help"
        )
        where = f"{program} ({' '.join(rest)})"
        raise ConfigError(where, "too many arguments", SURPLUS.get(program, remedy))
    errors = []
    flags = [option.flags[0] for option in options.values() if option.flags]
    for word in unknown:
        flag = word.partition("=")[0]
        remedy = did_you_mean(flag, flags, f"see {program} --help")
        if positional:
            remedy += "; write a text that begins with - behind --"
        known = why_unknown(flag.lstrip("-").replace("-", "_"))
        if program == "bert doctor":
            known = "no such flag", did_you_mean(flag, flags, SURPLUS[program])
        errors.append(ConfigError(f"{program} ({word})", *(known or ("no such flag", remedy))))
    if errors:
        raise combine(errors)
    # A group comes before its members, which override its JSON.
    keys = sorted(typed, key=lambda key: key.count("."))
    return {key: _value_of(options, key, typed[key], program) for key in keys}


def read_flags(
    options: Options, words: Sequence[str], program: str
) -> tuple[dict[str, Any], list[str]]:
    """Return the texts of the flags among some words, by the keys that were typed, and the other words."""
    typed: dict[str, Any] = {}
    rest: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        flag, equals, text = word.partition("=")
        match = _find(options, flag)
        if match is None:
            rest.append(word)
            continue
        key, limit = match
        option = options.get(our_name(key))
        is_off = flag == off_flag_of(key)
        taken = list(takewhile(partial(_is_value, options), left[:limit]))
        if equals:
            taken = [text]
        else:
            left = left[len(taken) :]
        if equals and is_off:
            raise ConfigError(flag, f"ignored explicit argument {text!r}", f"see {program} --help")
        if option and option.takes and not taken:
            raise ConfigError(flag, "expected one argument", f"see {program} --help")
        if option and option.is_list:
            typed.setdefault(key, []).extend(taken)
        else:
            typed[key] = " ".join(taken or ["false" if is_off else "true"])
    return typed, rest


def _find(options: Options, flag: str) -> tuple[str, int | None] | None:
    """Return the key of a flag, and how many words it takes at most: None for any number. None for an unknown flag."""
    is_off = flag.startswith("--no-")
    key = flag[5 if is_off else 2 :].replace("-", "_")
    option = options.get(our_name(key))
    limit: int | None = 1
    if option and option.flags:
        is_known = not (is_off and option.takes)
        # Where arguments have no flag, a word after a switch is an argument.
        limit = 1 if option.takes or all(any_option.flags for any_option in options.values()) else 0
    elif _members(options, key):
        is_known = not is_off
    else:
        is_known = key.rpartition(".")[2] in NO_SETTINGS and CONFIG.name in options
        limit = None
    if not is_known or flag not in (flag_of(key), off_flag_of(key)):
        return None
    return key, 0 if is_off else limit


def _members(options: Options, group: str) -> list[Option]:
    """Return the options of a group of settings, under its own or an old name."""
    return [option for name, option in options.items() if name.startswith(f"{our_name(group)}.")]


def _is_value(options: Options, word: str) -> bool:
    """Return whether a word can be a value: no flag, a negative number, or a text with spaces."""
    # -1 and -.5 are numbers, and - alone is standard input.
    if re.fullmatch(r"(?!-).*|-|-\d+|-\d*\.\d+", word, re.DOTALL):
        return True
    return " " in word and _find(options, word.partition("=")[0]) is None


def _value_of(options: Options, key: str, text: Any, program: str) -> Any:
    """Return the value of a key: of a setting, of a group in JSON, or the text of a key without effect."""
    option = options.get(our_name(key))
    if option:
        try:
            return _value(option, text)
        except json.JSONDecodeError as error:
            where = f"{flag_of(key)} ({error.doc})"
            problem = f"is not valid JSON ({error.msg})"
            raise ConfigError(where, problem, "check quotes, commas and brackets") from error
    members = _members(options, key)
    if not members:
        return text
    problem = "is a group of settings"
    if text.startswith("{"):
        try:
            return json_with_unique_keys(text)
        except json.JSONDecodeError as error:
            problem += f", in JSON ({error.msg})"
    remedy = f"set a value of the group, such as {members[0].flags[0]}; see {program} --help"
    raise ConfigError(f"{program} ({flag_of(key)})", problem, remedy)


def _value(option: Option, words: Any) -> Any:
    """Return a value in the form for pydantic: a list, a boolean, None, or the text."""
    if not option.takes:
        return SWITCH.get(words.lower(), words)
    if not isinstance(words, list):
        return None if words in NULL and option.allows_none and option.flags else words
    values = []
    for text in words:
        if text in NULL:
            return None
        if text.lstrip().startswith(("[", "{")):
            values += as_list(json_with_unique_keys(text))
        elif option.flags and text:
            values += next(csv.reader([text], skipinitialspace=True))
        else:  # an empty value, or a positional argument, which the shell has split
            values.append(text)
    return values


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
    try:
        typed, rest = read_flags({LOG_LEVEL.name: LOG_LEVEL}, before_dashes, "bert")
        level = typed.get(LOG_LEVEL.name, "")
        ("", *LOG_LEVELS).index(level)
    except (ConfigError, ValueError):
        known = ", ".join(LOG_LEVELS)
        problem = f"takes one of {known}"
        raise ConfigError("--log-level", problem, "use one of them") from None
    return level, [*rest, *words[len(before_dashes) :]]
