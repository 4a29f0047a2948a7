"""`bert completion`: a script that makes a shell complete commands, options, choices and file names.

The script holds every word there is to complete, so a shell need not start Python for a press of the tab
key. shtab writes it from a parser that is filled with what `--help` tells of each command.
"""

import argparse
from typing import Any

import shtab

from bert_cli.commands import COMMANDS
from bert_cli.config.bench import benchmarks
from bert_cli.config.help import fill
from bert_cli.config.load import named_configs
from bert_cli.config.options import sections_of
from bert_cli.config.tools import CompletionSettings


def run(settings: CompletionSettings) -> None:
    """Print the script for the shell that the settings name."""
    print(shtab.complete(parser_of_all(), settings.shell))


def parser_of_all() -> argparse.ArgumentParser:
    """A parser of the whole command line: each command as a subcommand with its options."""
    parser = argparse.ArgumentParser(prog="bert", add_help=False)
    parser.add_argument("-h", "--help", action="help", help="tell the commands")
    parser.add_argument("--version", action="store_true", help="tell versions")
    below: dict[str, Any] = {"": parser.add_subparsers(dest="command")}
    for name, command in COMMANDS.items():
        settings = command.settings_class()
        first, _, second = name.rpartition(" ")
        told = fill(
            below[first].add_parser(second, add_help=False, help=command.help), settings, name
        )
        if name == "bench":
            below[name] = told.add_subparsers(dest="what")
        paths = {
            option.name
            for section in sections_of(settings, name)
            for option in section.options
            if option.is_path
        }
        for action in told._actions:
            if action.dest == "config":
                _complete_configs(action)
            elif action.dest in paths:
                _complete_files(action)
    for name, one in benchmarks().items():
        below["bench"].add_parser(name, add_help=False, help=one.about)
    return parser


def _complete_configs(action: Any) -> None:
    """What stands behind it is the name of a shipped config, or a file."""
    names = " ".join(named_configs())
    action.complete = {
        "bash": "_bert_configs",
        "zsh": "_bert_configs",
        "fish": f"{names} {shtab.FILE['fish']}",
        "preamble": {
            "bash": f'_bert_configs() {{ compgen -W "{names}" -- $1; _shtab_compgen_files $1; }}',
            "zsh": f"_bert_configs() {{ _alternative 'configs:shipped config:({names})' 'files:file:_files' }}",
        },
    }


def _complete_files(action: Any) -> None:
    """What stands behind it is a file or a folder: shtab reads this mark."""
    action.complete = shtab.FILE
