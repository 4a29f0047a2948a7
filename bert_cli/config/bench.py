"""The settings of measurements.

A measurement takes every setting of the command that it measures, so `bench` before a run's own command
line measures it. A standard benchmark of configs/benchmarks.json is a named command line: `bert bench NAME`
runs it, and flags after the name override its own.
"""

import json
from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field, ValidationInfo, model_validator

from bert_cli.config.finetune import SquadSettings
from bert_cli.config.pretrain import PretrainSettings
from bert_cli.config.settings import JsonSettings, Needs, Positive, SettingError, Settings, Unless
from bert_cli.errors import ConfigError, nearest
from bert_cli.parse.load import BENCHMARKS, configs_folder

KINDS = ("pretrain", "squad")


class BenchSettings(Settings):
    """Measure how fast this machine trains, and how the time is spent.

    `bert bench NAME` runs a standard benchmark, whose results can be compared between machines; flags after
    the name override the benchmark's flags. `bert bench pretrain` and `bert bench squad` measure any settings;
    their --help lists the flags, which a NAME takes too.
    Example: bert bench --list
    Example: bert bench tiny_128
    """

    listed: bool = Field(False, alias="list")
    """List the standard benchmarks with their command lines."""

    def _check(self) -> None:
        if not self.listed:
            remedy = f"use {', '.join(KINDS)}, or a name of `bert bench --list`"
            raise SettingError("NAME", "is missing", remedy)


class Measuring(JsonSettings):
    """Settings of a measurement."""

    NEEDS: ClassVar[Needs] = {"dry_run": Unless(lambda _: False, "on a measurement")}
    OPENS_FILES = False
    SAVES = False
    WHAT: ClassVar[str]
    """The command that is measured."""
    REAL_EXAMPLES: ClassVar[tuple[str, ...]] = ("dataset_dir",)
    """Settings that name real examples."""

    steps: Positive = 20
    """Number of measured steps."""
    warmup_steps: Annotated[int, Field(ge=0)] = 3
    """Number of steps before the measurement."""
    log_every_steps: Positive = 1000
    """Print a line every N steps, besides the first and the last one."""
    generated_dataset: bool = True
    """Use synthetic examples instead of the config's; by default off if a flag gives real examples."""
    checkpoint: bool = True
    """Save a checkpoint after the steps, to measure how long the run pauses and how long writing takes. It is written
    into the folder of temporary files (TMPDIR) and deleted."""

    @model_validator(mode="before")
    @classmethod
    def _read_the_examples_of_a_flag(cls, values: object, info: ValidationInfo) -> object:
        """Default to synthetic examples: a config names folders that the machine may not have."""
        origins = (info.context or {}).get("origins", {})
        is_real = any(origins.get(name, "").startswith("--") for name in cls.REAL_EXAMPLES)
        if not isinstance(values, dict) or "generated_dataset" in values:
            return values
        return {**values, "generated_dataset": not is_real}


class BenchPretrainSettings(Measuring, PretrainSettings):
    """Measure pre-training: examples, FLOP/s, memory, and the parts of a step's time.

    Takes every setting of `bert pretrain`, and uses synthetic examples by default.
    Example: bert bench pretrain --config pretrain_tiny_128_phase1
    --global-batch.grad-acc-steps-per-replica 4
    Example: bert bench pretrain --config pretrain_base_128_phase1 --dataset-dir data/128 --json results.json
    """

    WHAT = "pretrain"


class BenchSquadSettings(Measuring, SquadSettings):
    """Measure fine-tuning on SQuAD: windows, FLOP/s, memory, and the parts of a step's time.

    Takes every setting of `bert squad`, and uses synthetic windows by default.
    Example: bert bench squad --config squad_base --parallel.layout auto
    Example: bert bench squad --config squad_tiny --dataset-dir data/squad --tokenizer-path runs/tiny
    """

    WHAT = "squad"
    REAL_EXAMPLES = ("dataset_dir", "train_file")


def benchmarks() -> dict[str, tuple[str, list[str]]]:
    """Return each standard benchmark by name: what it measures, and the words after `bert`."""
    rows = json.loads((configs_folder() / BENCHMARKS).read_text(encoding="utf-8"))
    return {
        name: (row["about"], ["bench", row["kind"], "--config", row["config"], *row["flags"]])
        for name, row in rows.items()
    }


def expand_benchmark(words: Sequence[str]) -> list[str]:
    """Replace `bench NAME ...` by the command line of the benchmark and the words after NAME; other words stay.

    The last of two equal flags counts, so no benchmark has a flag that takes a list. Raises ConfigError for an
    unknown name.
    """
    if len(words) < 2 or words[0] != "bench" or words[1].startswith("-") or words[1] in KINDS:
        return list(words)
    name = words[1]
    known = benchmarks()
    if name not in known:
        near = nearest(name, [*KINDS, *known])
        remedy = f"did you mean {near!r}?" if near else "see bert bench --list"
        problem = f"is neither a benchmark nor one of {', '.join(KINDS)}"
        raise ConfigError(f"bert bench ({name})", problem, remedy)
    _, standard = known[name]
    return [*standard, *words[2:]]
