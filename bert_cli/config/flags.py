"""From the words of a command line to values, nested like the settings.

pydantic-settings reads them; before that a switch gets the value that stands behind it, as in
`--do-validation false`, positional arguments come first, and a group is refused.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from bert_cli.config.help import LEVELS
from bert_cli.config.mistakes import flag_mistake, group_mistake, is_positional
from bert_cli.config.options import sections_of
from bert_cli.config.original import FALSE, TRUE
from bert_cli.errors import ConfigError


def parse_flags(
    settings: type[BaseModel],
    arguments: Sequence[str],
    program: str,
    renamed: Mapping[str, str],
) -> dict[str, Any]:
    """The values that flags and positional paths give, nested like the settings.

    `renamed` has the old names that were typed in place of ours. Raises ConfigError for a flag that does
    not exist, with the nearest one that does.
    """
    # 0.2 s to import: only when a command's arguments are read.
    from pydantic_settings import BaseSettings, CliSettingsSource, SettingsError

    described = type(settings.__name__, (settings, BaseSettings), {"__doc__": settings.__doc__})
    words = _with_values(settings, arguments)
    groups = group_mistake(settings, words, program, renamed)
    if groups:
        raise ConfigError(groups)
    try:
        source: Any = CliSettingsSource(
            described,
            cli_prog_name=program,
            cli_parse_args=_words_first(settings, words),
            cli_kebab_case=True,
            cli_implicit_flags=True,
            cli_hide_none_type=True,
            cli_avoid_json=True,
            cli_enforce_required=False,
            cli_exit_on_error=False,
        )
        given = source()
    except SettingsError as error:
        raise ConfigError(flag_mistake(settings, str(error), program)) from error
    return _without_null_lists(given)


def _without_null_lists(given: Mapping[str, Any]) -> dict[str, Any]:
    """What flags give; `null` for a list is none, as in a file, and no list that holds it."""
    return {
        name: _without_null_lists(value)
        if isinstance(value, Mapping)
        else None
        if value == [None]
        else value
        for name, value in given.items()
    }


def log_level_of(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The level that `--log-level` gives, wherever it stands, and the other words; empty where it is not given.

    Raises ConfigError for a level that there is not.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--log-level", choices=LEVELS, default="")
    try:
        found, rest = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        known = ", ".join(LEVELS)
        raise ConfigError(f"--log-level: takes one of {known}; give one of them") from error
    return found.log_level, rest


def _with_values(settings: type[BaseModel], words: Sequence[str]) -> list[str]:
    """The words with `--FLAG` or `--no-FLAG` for a switch that has a value, as in `--FLAG=false`.

    The value may stand behind the flag too, as in `--FLAG false`, where the command has no positional arguments.
    Raises ConfigError for another value.
    """
    options = [option for section in sections_of(settings, "") for option in section.options]
    switches = {option.flags[0]: option.flags for option in options if len(option.flags) == 2}
    is_alone = any(not option.flags for option in options)
    written: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if flag in switches and not equals and not is_alone and rest:
            value = rest.pop(0) if rest[0].lower() in (*TRUE, *FALSE) else ""
        if flag not in switches or not (equals or value):
            written.append(word)
        elif value.lower() in (*TRUE, *FALSE):
            written.append(switches[flag][value.lower() in FALSE])
        else:
            raise ConfigError(f"{flag} ({value}): is a switch; give true or false")
    return written


def _words_first(settings: type[BaseModel], arguments: Sequence[str]) -> list[str]:
    """Positional arguments before flags where their number is open: argparse ends them at the first flag."""
    fields = settings.model_fields
    places = [about for name, about in fields.items() if is_positional(settings, name)]
    if not any(not about.is_required() or "list[" in str(about.annotation) for about in places):
        return list(arguments)
    switches = set()
    for name, about in fields.items():
        if about.annotation is bool:
            switches |= {f"--{name.replace('_', '-')}", f"--no-{name.replace('_', '-')}"}
    words, flags, rest = [], [], list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            words.append(word)
            continue
        flags.append(word)
        if "=" not in word and word not in switches and rest:
            flags.append(rest.pop(0))
    return [*words, *flags]
