"""The configs that come with the tool, and how a config is found that is given by a path or a name.

A path as it is comes first, so that a file of one's own is never hidden by a shipped one of its name.
"""

import os
from pathlib import Path

from bert_cli.errors import ConfigError, nearest

BENCHMARKS = "benchmarks.json"
"""What lies among the shipped configs and is none: command lines of them with names."""


def shipped_configs() -> Path:
    """The folder of the configs that come with the tool, in a checkout or an installed wheel."""
    package = Path(__file__).parents[1]
    installed = package / "_configs"
    return installed if installed.is_dir() else package.parent / "configs"


def runs_configured() -> dict[str, Path]:
    """The shipped configs of runs by name; the list of benchmarks beside them is none."""
    return {p.stem: p for p in sorted(shipped_configs().glob("*.json")) if p.name != BENCHMARKS}


def find_config(name: str, given_as: str = "--config", folder: Path = Path()) -> Path:
    """A path, from `folder` on, as it is; else a shipped config of that name.

    Raises ConfigError with the nearest file beside it or shipped one, or that lists the shipped ones.
    """
    path = folder / Path(os.path.expandvars(name)).expanduser()
    if path.is_file():
        return path
    known = runs_configured()
    if name.removesuffix(".json") in known:
        return known[name.removesuffix(".json")]
    beside = [file.name for file in sorted(path.parent.glob("*.json"))]
    here = nearest(Path(name).name, beside)
    near = str(Path(name).with_name(here)) if here else nearest(Path(name).stem, known)
    hint = f"did you mean {near!r}?" if near else f"shipped configs: {', '.join(known)}"
    raise ConfigError(f"{given_as} ({name}): no such file; {hint}")
