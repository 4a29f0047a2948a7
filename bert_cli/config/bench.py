"""The settings of `bert bench`, and the standard benchmarks of configs/benchmarks.json.

A measurement takes every setting of the command that it measures, so `bench` before a run's own command
line measures it. A standard benchmark is a named command line: `bert bench NAME` runs it, and flags after
the name override its own, so the same name means the same work on every machine.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, TypeAdapter, ValidationInfo, field_validator, model_validator

from bert_cli.config.data import DataSettings, Splitter
from bert_cli.config.finetune import SquadSettings
from bert_cli.config.load import BENCHMARKS, configs_folder
from bert_cli.config.settings import (
    Positional,
    Positive,
    SettingError,
    Settings,
    check_size,
    is_set,
    without_effect,
)
from bert_cli.config.training import PretrainSettings
from bert_cli.errors import ConfigError, nearest

KINDS = ("pretrain", "squad", "data")
JsonFile = Annotated[Path | None, Field(alias="json")]


class BenchSettings(Settings):
    """Measure how fast this machine runs a training, and what takes the time.

    `bert bench NAME` runs a standard benchmark, whose results can be compared between machines; flags after
    the name override its own. `bert bench pretrain`, `squad` and `data` measure their own settings, which
    their --help lists; a NAME takes the same flags.
    Example: bert bench --list
    Example: bert bench tiny_128
    """

    listed: bool = Field(False, alias="list")
    """List the standard benchmarks with their command lines."""

    @model_validator(mode="after")
    def _lists_the_benchmarks(self) -> "BenchSettings":
        if not self.listed:
            remedy = f"give {', '.join(KINDS)}, or a name of `bert bench --list`"
            raise SettingError("NAME", "is not given", remedy)
        return self


class Measuring(Settings):
    """How a run is measured."""

    OPENS_FILES: ClassVar[bool] = False
    SAVES: ClassVar[bool] = False
    WHAT: ClassVar[str]
    """The command that is measured."""
    REAL_EXAMPLES: ClassVar[tuple[str, ...]] = ("dataset_dir",)
    """Settings that name real examples."""
    NEEDS: ClassVar = {name: "sweep" for name in ("sweep_from", "most", "memory")}

    steps: Positive = 20
    """Number of measured steps."""
    warmup_steps: Annotated[int, Field(ge=0)] = 3
    """Number of steps before the measurement."""
    generated_dataset: bool = True
    """Use synthetic examples; --no-generated-dataset reads those that the config names. A flag that names
    examples reads those."""
    checkpoint: bool = True
    """Save a checkpoint after the steps, to measure how long the run waits for it and how long it takes to
    write."""
    checkpoint_dir: Path | None = None
    """Folder on the disk to measure; the checkpoint is deleted afterwards. By default the system's folder for
    temporary files."""
    json_file: JsonFile = None
    """Also write the results to this file, as one JSON object; `-` prints the JSON alone."""
    sweep: Literal["micro-batch"] | None = None
    """Measure micro-batches of doubling size, each in its own process, until one does not fit in memory; the
    other settings stay."""
    sweep_from: Annotated[int, Field(ge=1, alias="from")] = 1
    """First micro-batch of a sweep."""
    most: Positive | None = None
    """Last micro-batch of a sweep; by default the first that does not fit."""
    memory: str | None = None
    """Maximum host memory of a process of a sweep, such as 8GB; by default the free memory at its start."""

    _check_memory = field_validator("memory")(check_size)

    @model_validator(mode="before")
    @classmethod
    def _read_the_examples_of_a_flag(cls, values: Any, info: ValidationInfo) -> Any:
        """Default to synthetic examples: a config names folders that the machine may not have."""
        origins = (info.context or {}).get("origins", {})
        named = any(origins.get(name, "").startswith("--") for name in cls.REAL_EXAMPLES)
        if isinstance(values, dict) and "generated_dataset" not in values:
            return {**values, "generated_dataset": not named}
        return values

    @model_validator(mode="after")
    def _has_an_effect(self) -> "Measuring":
        if self.most is not None and self.most < self.sweep_from:
            raise SettingError(
                "most", f"{self.most} is less than from ({self.sweep_from})", "raise it"
            )
        if self.checkpoint_dir is not None and (self.sweep or not self.checkpoint):
            raise without_effect(self, "checkpoint_dir", "if no checkpoint is saved")
        for name in ("dry_run", "compile_only"):
            if getattr(self, name):
                raise without_effect(self, name, "on a measurement")
        return self


class BenchPretrainSettings(Measuring, PretrainSettings):
    """Measure pre-training: examples, FLOP/s, memory, and the parts of a step's time.

    Takes every setting of `bert pretrain`, and uses synthetic examples by default.
    Example: bert bench pretrain --config pretrain_tiny_128_phase1
    --global-batch.grad-acc-steps-per-replica 4
    Example: bert bench pretrain --config pretrain_base_128_phase1 --dataset-dir data/128 --json results.json
    Example: bert bench pretrain --config pretrain_demo_128_phase1 --sweep micro-batch --from 8 --most 256
    """

    WHAT: ClassVar[str] = "pretrain"


class BenchSquadSettings(Measuring, SquadSettings):
    """Measure fine-tuning on SQuAD: windows, FLOP/s, memory, and the parts of a step's time.

    Takes every setting of `bert squad`, and uses synthetic windows by default.
    Example: bert bench squad --config squad_base --parallel.layout auto
    Example: bert bench squad --config squad_tiny --dataset-dir data/squad --tokenizer-path runs/tiny
    """

    WHAT: ClassVar[str] = "squad"
    REAL_EXAMPLES: ClassVar[tuple[str, ...]] = ("dataset_dir", "train_file")


class BenchDataSettings(DataSettings):
    """Measure the data steps: text to sentences, to records, to batches.

    Example: bert bench data
    Example: bert bench data data/extracted --vocab bert-base-uncased --json results.json
    """

    input: Positional[Path | None] = None
    """Text, as for `bert preprocess`; by default synthetic."""
    megabytes: float = Field(10.0, gt=0.0)
    """Megabytes (10^6 bytes) of synthetic text."""
    vocab: str | None = None
    """A vocab.txt, a folder with one, or a model name on the Hugging Face hub; by default the benchmark trains
    and measures one."""
    sentence_splitter: Splitter = "punkt"
    """The sentence splitter, as for `bert preprocess`."""
    sequence_length: int = Field(128, ge=8, le=65535)
    """Sequence length S of an example."""
    mask_tokens: int = Field(20, ge=1)
    """Maximum number P of masked positions of an example."""
    max_sequences_per_pack: int = Field(3, ge=2)
    """Maximum sequences in a pack, for reading packs."""
    processes: int = Field(1, ge=1)
    """Local processes of a step; records are read by one thread, as in a run."""
    reading_seconds: float = Field(3.0, gt=0.0)
    """Seconds of reading for each kind of records."""
    seed: int = Field(1984, ge=0, lt=2**31)
    """Seed of the synthetic text and of the order of records."""
    json_file: JsonFile = None
    """Also write the results to this file, as one JSON object; `-` prints the JSON alone."""

    @model_validator(mode="after")
    def _has_an_effect(self) -> "BenchDataSettings":
        if self.input is not None and is_set(self, "megabytes"):
            raise without_effect(self, "megabytes", "on given text")
        if self.mask_tokens > self.sequence_length - 3:
            problem = f"{self.mask_tokens} is more than the tokens of an example "
            problem += f"(sequence_length - 3 = {self.sequence_length - 3})"
            raise SettingError("mask_tokens", problem, "lower it")
        return self


class Benchmark(Settings):
    """A named command line."""

    about: str
    """One sentence: what is measured, and for what."""
    kind: str
    """The measurement: pretrain, squad or data."""
    config: str | None = None
    """Name of a shipped config."""
    flags: list[str] = []
    """More flags, each followed by its value."""

    @property
    def words(self) -> list[str]:
        """Return the words after `bert`."""
        config = ["--config", self.config] if self.config else []
        return ["bench", self.kind, *config, *self.flags]


def benchmarks() -> dict[str, Benchmark]:
    """Return the standard benchmarks by name, in the file's order."""
    raw: dict[str, Any] = json.loads((configs_folder() / BENCHMARKS).read_text(encoding="utf-8"))
    return TypeAdapter(dict[str, Benchmark]).validate_python(raw)


def expand_benchmark(words: Sequence[str]) -> list[str]:
    """Replace `bench NAME ...` by the command line of the benchmark; return other words unchanged.

    Flags after the name override those of the benchmark. Raises ConfigError for an unknown name.
    """
    if len(words) < 2 or words[0] != "bench" or words[1].startswith("-") or words[1] in KINDS:
        return list(words)
    name, rest = words[1], list(words[2:])
    known = benchmarks()
    if name not in known:
        near = nearest(name, [*KINDS, *known])
        remedy = f"did you mean {near!r}?" if near else "see bert bench --list"
        problem = f"is neither a benchmark nor one of {', '.join(KINDS)}"
        raise ConfigError(f"bert bench ({name})", problem, remedy)
    overridden = {word.partition("=")[0] for word in rest if word.startswith("--")}
    own: list[str] = []
    dropping = False
    for word in known[name].words:
        if word.startswith("--"):
            dropping = word in overridden
        if not dropping:
            own.append(word)
    return [*own, *rest]
