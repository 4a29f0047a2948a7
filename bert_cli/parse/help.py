"""The text of `bert COMMAND --help`: the options of the command, laid out by argparse.

A training command has some 150 options. Its `--help` lists the usual options, `--help-all` all options.
"""

import argparse
import re
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from pydantic import BaseModel

from bert_cli.parse.options import (
    CONFIG,
    LOG_LEVEL,
    Option,
    Section,
    examples_of,
    purpose_of,
    sections_of,
)

MAX_WIDTH = 100
HELP_COLUMN = 26
USAGES = {  # of commands whose next words are no positional settings
    "bench": "bert bench (pretrain | squad) [options]",
    "launch": "bert launch [options] -- COMMAND [options]",
    "plan": "bert plan (pretrain | squad | glue | ner | classify | embed) [options]",
    "search": "bert search (make | ask | score | export) [options]",
}


def usual_sections(sections: Sequence[Section], command: str) -> list[Section]:
    """Return the sections of the short help: the options of the command, and the usual options of every run.

    A class that marks some of its options as usual shows only the marked options.
    """
    usual = Section("usual settings of a run")
    shown = []
    for section in sections:
        marked = [option for option in section.options if option.is_usual]
        if section.title in ("arguments", f"options of bert {command}"):
            is_marked = any(option is not CONFIG for option in marked)
            options = marked if is_marked else section.options
            shown.append(replace(section, options=options))
        else:
            usual.options.extend(marked)
    return [*shown, usual]


def help_text(settings: type[BaseModel], command: str, *, is_complete: bool = False) -> str:
    """Return the text of `bert COMMAND --help`, as wide as the terminal and at most 100 columns.

    The text of a training command is short unless `is_complete`, for `--help-all`.
    """
    layout = partial(
        argparse.RawDescriptionHelpFormatter, max_help_position=HELP_COLUMN, width=_width()
    )
    parser = argparse.ArgumentParser(f"bert {command}", add_help=False, formatter_class=layout)
    return add_help(parser, settings, command, is_complete=is_complete).format_help()


def add_help(
    parser: argparse.ArgumentParser,
    settings: type[BaseModel],
    command: str,
    *,
    is_complete: bool = True,
) -> argparse.ArgumentParser:
    """Add the options, headings, purpose and examples of a command to a parser, and return it."""
    sections = sections_of(settings, command)
    total = sum(len(section.options) for section in sections)
    has_more = "about" in settings.model_fields
    if has_more and not is_complete:
        sections = usual_sections(sections, command)
    usage = f"bert {command} [options]"
    options = chain.from_iterable(section.options for section in sections)
    for option in options:
        if option.flags:
            continue
        word = option.takes
        if option.is_list:
            word += " ..."
        if not option.is_required:
            word = f"[{word}]"
        usage += f" {word}"
    parser.usage = USAGES.get(command, usage)
    paragraphs = purpose_of(settings).split("\n\n")
    parser.description = "\n\n".join(textwrap.fill(text, _width()) for text in paragraphs)
    for section in sections:
        about = textwrap.fill(section.describe(), _width() - 2) or None
        group = parser.add_argument_group(section.title, about)
        for option in section.options:
            _add_to_help(group, option)
    general = parser.add_argument_group("options of every command")
    general.add_argument("-h", "--help", action="help", help="Print this help and exit.")
    if has_more:
        general.add_argument("--help-all", action="help", help=f"List all {total} options.")
    _add_to_help(general, LOG_LEVEL)
    lines = [wrap_command(line, _width()) for line in examples_of(settings)]
    parser.epilog = None
    if lines:
        parser.epilog = "\n".join(["examples:", *lines])
    return parser


def _add_to_help(group: argparse._ArgumentGroup, option: Option) -> None:
    text = option.describe().replace("%", "%%")
    is_too_wide = len("  " + ", ".join([*option.flags, option.takes])) > _width()
    if option.flags and not option.takes:
        flags = option.flags
        if is_too_wide:
            flags = flags[:1]
        group.add_argument(*flags, action="store_true", help=text, dest=option.name)
        return
    more: dict[str, Any] = {"dest": option.name}
    if not option.flags:
        nargs = {(0, 0): "?", (0, 1): None, (1, 0): "*", (1, 1): "+"}
        more = {"nargs": nargs[option.is_list, option.is_required]}
    # The text names the choices, too.
    takes = option.takes
    if is_too_wide:
        takes = option.name.rpartition("_")[2].upper()
    more |= {"metavar": takes, "help": text, "choices": option.choices or None}
    group.add_argument(*(option.flags or (option.name,)), **more)


def wrap_command(example: str, width: int) -> str:
    """Return a command line that can be pasted, broken before flags if it is too long."""
    lines = ""
    line = " "
    for part in re.split(r" (?=--)", example):
        if len(f"{line} {part} \\") > width and line.strip():
            lines = f"{lines}{line} \\\n"
            line = "     "
        line = f"{line} {part}"
    return lines + line


def _width() -> int:
    return min(shutil.get_terminal_size().columns, MAX_WIDTH)
