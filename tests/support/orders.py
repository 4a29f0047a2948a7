"""Command lines with a config, and what the tool makes of them: settings, or a refusal."""

import json
import shlex
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from bert_cli.commands import COMMANDS, split_command
from bert_cli.errors import ConfigError
from bert_cli.parse.load import Loaded, load

CONFIG = Path("c.json")


def order(line: str | Sequence[str], config: object = None) -> tuple[Any, Loaded]:
    """Return the settings of a command line, and their origins; a config is written to c.json and passed, too."""
    words = shlex.split(line) if isinstance(line, str) else list(line)
    if config is not None:
        CONFIG.write_text(config if isinstance(config, str) else json.dumps(config), "utf-8")
        words += ["--config", str(CONFIG)]
    command, rest = split_command(words)
    return load(COMMANDS[command].settings_class(), rest, f"bert {command}")


def refusal(line: str | Sequence[str], config: object = None) -> str:
    """Return the message of a command line that is refused."""
    with pytest.raises(ConfigError) as error:
        order(line, config)
    return str(error.value)


Meanings = Mapping[str, list[tuple[str, object, str, Any]]]
"""Sentence -> rows: a command line, a config, names of settings, and their value or their values."""


def rows_of(meanings: Meanings) -> pytest.MarkDecorator:
    """Return the rows as parameters of a test, with their sentences."""
    rows = [
        pytest.param(*row, id=f"{sentence}: {row[0]}")
        for sentence, rows in meanings.items()
        for row in rows
    ]
    return pytest.mark.parametrize(("line", "config", "names", "value"), rows)


def value_of(line: str, config: object, names: str) -> Any:
    """Return the value of a setting of a command line, or the values of several."""
    return attrgetter(*names.split())(order(line, config or None)[0])
