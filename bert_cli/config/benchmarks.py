"""The standard benchmarks by name, as configs/benchmarks.json lists them.

A benchmark is a command line with a name: what is measured, a shipped config, flags. `bert bench NAME`
is that line, and flags behind the name win. The same names mean the same work on every machine, so
that figures can be laid side by side.
"""

import json
from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter

from bert_cli.config.bench import KINDS
from bert_cli.config.parallel import Settings
from bert_cli.config.shipped import BENCHMARKS, shipped_configs
from bert_cli.errors import ConfigError, nearest


class Benchmark(Settings):
    """A command line with a name."""

    about: str
    """One sentence: what is measured, and what it is for."""
    kind: str
    """What is measured: pretrain, squad or data."""
    config: str | None = None
    """Name of a shipped config."""
    flags: list[str] = []
    """What is said beyond the config, each flag followed by its value."""

    @property
    def words(self) -> list[str]:
        """The command line behind `bert`."""
        config = ["--config", self.config] if self.config else []
        return ["bench", self.kind, *config, *self.flags]


def benchmarks() -> dict[str, Benchmark]:
    """Every standard benchmark by its name, in the file's order."""
    told: dict[str, Any] = json.loads((shipped_configs() / BENCHMARKS).read_text(encoding="utf-8"))
    return TypeAdapter(dict[str, Benchmark]).validate_python(told)


def written_out(words: Sequence[str]) -> list[str]:
    """`bench NAME ...` as the command line that it stands for; what is no benchmark stays as it is.

    A flag of the benchmark that is also behind the name gives way to that. Raises ConfigError for a
    name that there is not.
    """
    if len(words) < 2 or words[0] != "bench" or words[1].startswith("-") or words[1] in KINDS:
        return list(words)
    name, rest = words[1], list(words[2:])
    known = benchmarks()
    if name not in known:
        near = nearest(name, [*KINDS, *known])
        hint = f"did you mean {near!r}?" if near else "see bert bench --list"
        raise ConfigError(
            f"bert bench ({name}): is neither a benchmark nor one of {', '.join(KINDS)}; {hint}"
        )
    again = {word.partition("=")[0] for word in rest if word.startswith("--")}
    one = known[name]
    return [*_without(one.words, again), *rest]


def _without(words: Sequence[str], flags: set[str]) -> list[str]:
    """The words without these flags and their values."""
    kept: list[str] = []
    dropping = False
    for word in words:
        if word.startswith("--"):
            dropping = word.partition("=")[0] in flags
        if not dropping:
            kept.append(word)
    return kept
