"""Command lines with a config, and what the tool makes of them: settings, or a refusal."""

import json
import shlex
from collections.abc import Sequence
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
