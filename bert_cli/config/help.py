"""What `bert COMMAND --help` prints, and the parser that shells are told of.

argparse lays out what `options.py` found: first what stands by its place and the command's own options,
then those that it shares with other commands, each under its heading, at the end examples. It only tells
and completes; the values of a command line are read by `load.py`.
"""

import argparse
import re
import shutil
import textwrap

from pydantic import BaseModel

from bert_cli.config.options import Option, examples_of, purpose_of, sections_of

WIDEST = 100
LEVELS = ("debug", "info", "warning", "error")
COLUMN = 26


def help_of(settings: type[BaseModel], command: str) -> str:
    """The help of a command, as wide as the terminal and at most 100 columns."""
    parser = argparse.ArgumentParser(
        prog=f"bert {command}", add_help=False, formatter_class=_formatter
    )
    return fill(parser, settings, command).format_help()


def fill(
    parser: argparse.ArgumentParser, settings: type[BaseModel], command: str
) -> argparse.ArgumentParser:
    """Put a command's options into a parser, with headings, purpose and examples; the parser.

    The parser must have no `--help` of its own; it comes last here, with what every command takes.
    """
    sections = sections_of(settings, command)
    places = [option for section in sections for option in section.options if not option.flags]
    parser.usage = " ".join([f"bert {command} [options]", *map(_place, places)])
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
            _add(group, option)
    general = parser.add_argument_group("options of every command")
    general.add_argument("-h", "--help", action="help", help="Print this and exit.")
    general.add_argument(
        "--log-level",
        choices=LEVELS,
        metavar="{" + ",".join(LEVELS) + "}",
        help="Let through what TensorFlow and other libraries say of themselves, from this level on; "
        "by default nothing of it.",
    )
    lines = [in_width(line, _width()) for line in examples_of(settings)]
    parser.epilog = "\n".join(["examples:", *lines]) if lines else None
    return parser


def _add(group: argparse._ArgumentGroup, option: Option) -> None:
    text = option.text.replace("%", "%%")
    if not option.flags:
        repeated = "+" if option.is_required else "*"
        optional = None if option.is_required else "?"
        group.add_argument(
            option.name,
            metavar=option.takes,
            help=text,
            nargs=repeated if option.is_list else optional,
            choices=option.choices or None,
        )
    elif not option.takes:
        group.add_argument(*option.flags, action="store_true", help=text, dest=option.name)
    else:
        group.add_argument(
            *option.flags,
            metavar=option.takes,
            help=text,
            dest=option.name,
            choices=option.choices or None,
        )


def _place(option: Option) -> str:
    word = f"{option.takes} ..." if option.is_list else option.takes
    return word if option.is_required else f"[{word}]"


def in_width(example: str, width: int) -> str:
    """A command line as it can be pasted: a long one goes on, before a flag, on the next line."""
    told, line = "", " "
    for part in re.split(r" (?=--)", example):
        if len(f"{line} {part} \\") > width and line.strip():
            told, line = f"{told}{line} \\\n", "     "
        line = f"{line} {part}"
    return told + line


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=COLUMN, width=_width())


def _width() -> int:
    return min(shutil.get_terminal_size().columns, WIDEST)
