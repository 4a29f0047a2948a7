"""The settings of `bert bench`: what is measured, for how long, and where the figures go.

A measurement takes every setting of the command that it measures, so a run's own command line with
`bench` before it is its measurement. What that run would save, score and report has no part in it.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, TypeAdapter, ValidationInfo, field_validator, model_validator
from pydantic_settings import CliPositionalArg

from bert_cli.config.data import DataSettings, Splitter
from bert_cli.config.finetune import SquadSettings
from bert_cli.config.load import BENCHMARKS, configs_folder
from bert_cli.config.settings import Positive, Settings, is_set, parse_bytes
from bert_cli.config.training import PretrainSettings
from bert_cli.errors import ConfigError, nearest

KINDS = ("pretrain", "squad", "data")
OF_A_SWEEP = ("sweep_from", "most", "memory")
OTHER_WAYS = ("dry_run", "compile_only")


class BenchSettings(Settings):
    """Measure how fast this machine does a run, and where its time goes.

    `bert bench NAME` measures a standard benchmark: a config and flags with a name, whose figures can be
    laid beside those of another machine; flags behind the name win. `bert bench pretrain`, `squad` and
    `data` measure what their own settings say, and so does a name, as their --help tells.
    Example: bert bench --list
    Example: bert bench tiny_128
    """

    listed: bool = Field(False, alias="list")
    """List the standard benchmarks, with what each of them runs."""

    @model_validator(mode="after")
    def _says_what_to_do(self) -> "BenchSettings":
        if not self.listed:
            raise ValueError(
                f"what to measure is not given; give {', '.join(KINDS)}, or a name that `bert bench --list` tells"
            )
        return self


class Measuring(Settings):
    """How a run is measured, and where the figures go."""

    OPENS_FILES: ClassVar[bool] = False
    SAVES: ClassVar[bool] = False
    WHAT: ClassVar[str]
    """The command that is measured."""
    REAL_EXAMPLES: ClassVar[tuple[str, ...]] = ("dataset_dir",)
    """Flags that name real examples."""

    steps: Positive = 20
    """Steps that are measured."""
    warmup_steps: Annotated[int, Field(ge=0)] = 3
    """Steps that are taken before and left out of the figures."""
    generated_dataset: bool = True
    """Made-up examples; real ones are read where a flag names them, or, those that the config names,
    with --no-generated-dataset."""
    checkpoint: bool = True
    """Save a checkpoint after the steps, to see how long a run waits for it and how long it is written."""
    checkpoint_dir: Path | None = None
    """Folder that the checkpoint is written into, and removed from, so that its disk is measured; by
    default the system's one for temporary files."""
    json_file: Annotated[Path | None, Field(alias="json")] = None
    """Also write every figure to this file, as one JSON object; `-` prints that alone."""
    sweep: Literal["micro-batch"] | None = None
    """Measure one micro-batch after the other, each twice the one before and in a process of its own,
    until one does not fit the memory; all else is as given."""
    sweep_from: Annotated[int, Field(ge=1, alias="from")] = 1
    """First micro-batch of a sweep."""
    most: Positive | None = None
    """Last micro-batch of a sweep; by default the first that does not fit."""
    memory: str | None = None
    """Most memory of this host that a process of a sweep may fill, as 8GB; by default what is free
    when it starts."""

    @model_validator(mode="before")
    @classmethod
    def _a_flag_that_names_examples_is_meant(cls, given: Any, info: ValidationInfo) -> Any:
        """Configs name folders that a machine to be measured does not have; a flag is of this run."""
        origins = (info.context or {}).get("origins", {})
        named = any(origins.get(name, "").startswith("--") for name in cls.REAL_EXAMPLES)
        if isinstance(given, dict) and "generated_dataset" not in given:
            return {**given, "generated_dataset": not named}
        return given

    @field_validator("memory")
    @classmethod
    def _is_a_size(cls, given: str | None) -> str | None:
        if given is not None:
            parse_bytes(given)
        return given

    @model_validator(mode="after")
    def _has_an_effect(self) -> "Measuring":
        for name in OF_A_SWEEP:
            flag = type(self).model_fields[name].alias or name
            if is_set(self, name) and self.sweep is None:
                raise ValueError(f"{flag} has no effect without sweep; give both or neither")
        if self.most is not None and self.most < self.sweep_from:
            raise ValueError(f"most ({self.most}) is less than from ({self.sweep_from}); raise it")
        if self.checkpoint_dir is not None and (self.sweep or not self.checkpoint):
            raise ValueError(
                "checkpoint_dir has no effect where no checkpoint is saved; leave it out"
            )
        for name in OTHER_WAYS:
            if getattr(self, name):
                raise ValueError(f"{name} has no effect on a measurement; leave it out")
        return self


class BenchPretrainSettings(Measuring, PretrainSettings):
    """Measure pre-training: examples, FLOP/s and memory, and where a step's time goes.

    Takes every setting of `bert pretrain`, and made-up examples by default.
    Example: bert bench pretrain --config pretrain_tiny_128_phase1
    --global-batch.grad-acc-steps-per-replica 4
    Example: bert bench pretrain --config pretrain_base_128_phase1 --dataset-dir data/128 --json figures.json
    Example: bert bench pretrain --config pretrain_demo_128_phase1 --sweep micro-batch --from 8 --most 256
    """

    WHAT: ClassVar[str] = "pretrain"


class BenchSquadSettings(Measuring, SquadSettings):
    """Measure fine-tuning on questions: windows, FLOP/s and memory, and where a step's time goes.

    Takes every setting of `bert squad`, and made-up windows by default.
    Example: bert bench squad --config squad_base --parallel.layout auto
    Example: bert bench squad --config squad_tiny --dataset-dir data/squad --tokenizer-path runs/tiny
    """

    WHAT: ClassVar[str] = "squad"
    REAL_EXAMPLES: ClassVar[tuple[str, ...]] = ("dataset_dir", "train_file")


class BenchDataSettings(DataSettings):
    """Measure the data path: text to sentences, to records, to batches.

    Example: bert bench data
    Example: bert bench data data/extracted --vocab bert-base-uncased --json figures.json
    """

    input: CliPositionalArg[Path | None] = None
    """Text, as `bert preprocess` reads it; by default made up."""
    megabytes: float = Field(10.0, gt=0.0)
    """Megabytes (10^6 bytes) of made-up text."""
    vocab: str | None = None
    """A vocab.txt, a folder that holds one, or a model name on the Hugging Face hub; by default one is
    trained on the sentences, which is measured too."""
    sentence_splitter: Splitter = "punkt"
    """The sentence splitter, as for `bert preprocess`."""
    sequence_length: int = Field(128, ge=8, le=65535)
    """Places S of an example."""
    mask_tokens: int = Field(20, ge=1)
    """Most masked places P of an example."""
    max_sequences_per_pack: int = Field(3, ge=2)
    """Most sequences in a pack, where packs are read."""
    processes: int = Field(1, ge=1)
    """Local processes of a step; records are read by one thread, as a run does it."""
    reading_seconds: float = Field(3.0, gt=0.0)
    """How long records of each kind are read."""
    seed: int = Field(1984, ge=0, lt=2**31)
    """Seed of the made-up text and of the order of records."""
    json_file: Path | None = Field(None, alias="json")
    """Also write every figure to this file, as one JSON object; `-` prints that alone."""

    @model_validator(mode="after")
    def _has_an_effect(self) -> "BenchDataSettings":
        if self.input is not None and is_set(self, "megabytes"):
            raise ValueError("megabytes has no effect on text that is given; leave it out")
        if self.mask_tokens > self.sequence_length - 3:
            raise ValueError(
                f"mask_tokens ({self.mask_tokens}) is more than the tokens of an example "
                f"(sequence_length - 3 = {self.sequence_length - 3}); lower it"
            )
        return self


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
    told: dict[str, Any] = json.loads((configs_folder() / BENCHMARKS).read_text(encoding="utf-8"))
    return TypeAdapter(dict[str, Benchmark]).validate_python(told)


def expand_benchmark(words: Sequence[str]) -> list[str]:
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
