"""The command lines of pages, manifests and job files, and the scripts of the repository."""

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import bert_cli
from bert_cli.commands import COMMANDS, split_command
from bert_cli.parse.load import load
from bert_cli.parse.options import split_log_level

ROOT = Path(bert_cli.__file__).parents[1]
JOBS = ROOT / "scripts" / "slurm"


def script(name: str) -> ModuleType:
    """Return a script as a module; its name has no suffix by which it could be imported."""
    loader = SourceFileLoader(name, str(ROOT / "scripts" / name))
    module = module_from_spec(spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


def load_command(words: list[str]) -> object:
    """Return the settings of a command line; raises the errors of the tool."""
    if words[0] == "launch":
        load_command(words[words.index("--") + 1 :])
        words = words[: words.index("--")]
    name, rest = split_command(words)
    return load(COMMANDS[name].settings_class(), split_log_level(rest)[1], f"bert {name}")[0]
