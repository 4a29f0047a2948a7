"""`bert completion`: print a script that completes commands, options and file names in a shell.

shtab writes the script from a parser with the options of every command, so a shell need not start Python for
a press of the tab key.
"""

import argparse
from typing import Any

import shtab

from bert_cli.commands import COMMANDS
from bert_cli.config.shipped import named_configs
from bert_cli.config.tools import CompletionSettings
from bert_cli.parse.help import add_help
from bert_cli.parse.options import options_of
from bert_cli.processes import print_line


def run(settings: CompletionSettings) -> None:
    """Print the completion script of a shell."""
    configs = " ".join(named_configs())
    config = {
        "bash": "_bert_configs",
        "zsh": "_bert_configs",
        "fish": f"{configs} {shtab.FILE['fish']}",
        "preamble": {
            "bash": f'_bert_configs() {{ compgen -W "{configs}" -- $1; _shtab_compgen_files $1; }}',
            "zsh": f"_bert_configs() {{ _alternative 'configs:shipped config:({configs})' 'files:file:_files' }}",
        },
    }
    parser = argparse.ArgumentParser(prog="bert", add_help=False)
    parser.add_argument("-h", "--help", action="help", help="list the commands")
    parser.add_argument("--version", action="store_true", help="print versions")
    subparsers: dict[str, Any] = {"": parser.add_subparsers(dest="command")}
    groups = {name.partition(" ")[0] for name in COMMANDS if " " in name}
    for name, command in COMMANDS.items():
        class_of_settings = command.settings_class()
        first, _, second = name.rpartition(" ")
        subparser = subparsers[first].add_parser(second, add_help=False, help=command.help)
        add_help(subparser, class_of_settings, name)
        if name in groups:
            subparsers[name] = subparser.add_subparsers(dest="what")
        paths = {option.name for option in options_of(class_of_settings) if option.is_path}
        for action in subparser._actions:
            if action.dest in paths:
                action.complete = config if action.dest == "config" else shtab.FILE
    print_line(shtab.complete(parser, settings.shell))
