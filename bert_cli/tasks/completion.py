"""`bert completion`: print a script that completes commands, options, choices and file names in a shell.

The script holds everything, so a shell need not start Python for a press of the tab key. shtab writes it
from a parser with the options of each command.
"""

import argparse
from typing import Any

import shtab

from bert_cli.commands import COMMANDS
from bert_cli.config.bench import benchmarks
from bert_cli.config.load import named_configs
from bert_cli.config.options import add_help, sections_of
from bert_cli.config.tools import CompletionSettings


def run(settings: CompletionSettings) -> None:
    """Print the script for a shell."""
    print(shtab.complete(full_parser(), settings.shell))


def full_parser() -> argparse.ArgumentParser:
    """Return a parser of the complete command line, with a subcommand for each command."""
    parser = argparse.ArgumentParser(prog="bert", add_help=False)
    parser.add_argument("-h", "--help", action="help", help="list the commands")
    parser.add_argument("--version", action="store_true", help="print versions")
    subparsers: dict[str, Any] = {"": parser.add_subparsers(dest="command")}
    for name, command in COMMANDS.items():
        settings = command.settings_class()
        first, _, second = name.rpartition(" ")
        own = subparsers[first].add_parser(second, add_help=False, help=command.help)
        add_help(own, settings, name)
        if name == "bench":
            subparsers[name] = own.add_subparsers(dest="what")
        paths = {
            option.name
            for section in sections_of(settings, name)
            for option in section.options
            if option.is_path
        }
        for action in own._actions:
            if action.dest == "config":
                action.complete = _config_completion()
            elif action.dest in paths:
                action.complete = shtab.FILE
    for name, one in benchmarks().items():
        subparsers["bench"].add_parser(name, add_help=False, help=one.about)
    return parser


def _config_completion() -> dict[str, Any]:
    """Return shtab's description of a value that is the name of a shipped config or a file."""
    names = " ".join(named_configs())
    return {
        "bash": "_bert_configs",
        "zsh": "_bert_configs",
        "fish": f"{names} {shtab.FILE['fish']}",
        "preamble": {
            "bash": f'_bert_configs() {{ compgen -W "{names}" -- $1; _shtab_compgen_files $1; }}',
            "zsh": f"_bert_configs() {{ _alternative 'configs:shipped config:({names})' 'files:file:_files' }}",
        },
    }
