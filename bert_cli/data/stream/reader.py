"""`stream[step]` is the batch of a step: a function of (seed, step) and nothing else.

Step and row give a sample index in an endless stream, and the stream gives the example there. So
resuming is asking for another step, a thread can read ahead, each process reads its own part, and
how a step is divided into micro-batches changes none of its examples.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from bert_cli.data.records.columns import Batch
from bert_cli.data.stream.permutation import record_at
from bert_cli.data.stream.source import Ints, Source
from bert_cli.errors import ConfigError

BLOCK = 1024
"""Sequences read, masked and packed at once: 15 MB at 512 positions, however large a step is."""


@dataclass(frozen=True)
class Batching:
    """Which examples of a stream a step has, and which of them this process reads.

    Raises ConfigError for a step that is not a multiple of the micro-batch in each process.
    """

    examples_per_step: int
    micro_batch_size: int
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        micro_batches, rest = divmod(self.examples_per_step, self.micro_batch_size)
        if self.examples_per_step < 1 or rest:
            raise ConfigError(
                f"global_batch ({self.examples_per_step} examples a step)",
                f"is no multiple of micro_batch_size {self.micro_batch_size}",
                "change one of them",
            )
        if micro_batches % self.world_size:
            raise ConfigError(
                f"global_batch ({micro_batches} micro-batches a step)",
                f"cannot be divided among {self.world_size} processes",
                "change one of the two numbers",
            )

    def sample_indices(self, step: int) -> npt.NDArray[np.int64]:
        """Return the sample indices of this process in a step."""
        each = self.examples_per_step // self.world_size
        return self.step_indices(step)[self.rank * each : (self.rank + 1) * each]

    def step_indices(self, step: int) -> npt.NDArray[np.int64]:
        """Return the sample indices of all processes in a step."""
        return np.arange(self.examples_per_step) + step * self.examples_per_step

    def micro_batches(self, rows: Batch) -> Batch:
        """Return rows [n, ...] as micro-batches [M, B, ...]."""
        size = self.micro_batch_size
        return {name: rows[name].reshape(-1, size, *rows[name].shape[1:]) for name in rows}


class Stream(Protocol):
    """Batches by step."""

    fingerprint: str
    """Changes with the examples and their order, so that a run does not continue on other ones."""
    epoch_size: int | None
    """Examples of an epoch; None where there is no end."""

    def __getitem__(self, step: int) -> Batch:
        """Return this process' part of the batch of a step, [M, B, ...]."""
        ...

    def describe(self, examples: int) -> list[str]:
        """Return lines about a run over so many examples, for a person."""
        return []


class ExampleStream(Stream, Protocol):
    """A stream of pre-training examples, which are also read by their sample indices."""

    batching: Batching
    folder: Path | None
    """Folder with the tokenizer of the examples; None for synthetic ones."""
    has_next_sentences: bool
    sequences_per_example: float
    """Mean number of sequences of an example: more than one in packs."""

    def rows(self, sample_indices: npt.ArrayLike) -> Batch:
        """Return the examples at sample indices [n], in this order, as columns [n, ...]."""
        ...

    def __getitem__(self, step: int) -> Batch:
        """Return this process' part of the batch of a step, [M, B, ...]."""
        return self.batching.micro_batches(self.rows(self.batching.sample_indices(step)))

    def first_micro_batches(self, number: int) -> Batch:
        """Return the first micro-batches of the stream [number, B, ...], to trace functions with."""
        rows = self.rows(np.arange(number * self.batching.micro_batch_size))
        return self.batching.micro_batches(rows)


class Reader(ExampleStream):
    """The examples of a source in a random order, another one in each epoch."""

    def __init__(self, source: Source, batching: Batching) -> None:
        self.source, self.batching = source, batching
        self.folder, self.fingerprint = source.folder, source.fingerprint
        self.has_next_sentences = source.has_next_sentences
        self.epoch_size: int = len(source)
        self.sequences_per_example = source.sequences / max(1, len(source))

    def rows(self, sample_indices: npt.ArrayLike) -> Batch:
        """Return the examples at sample indices [n], in this order, as columns [n, ...]."""
        return shuffled(self.source, sample_indices)


def shuffled(source: Source, sample_indices: npt.ArrayLike) -> Batch:
    """Return the examples of a source at sample indices [n] of its random order."""
    epochs, numbers = record_at(sample_indices, len(source), source.seed)
    return in_blocks(source.examples, epochs, numbers, source.max_sequences_per_pack)


def in_blocks(
    read: Callable[[Ints, Ints], Batch], epochs: Ints, numbers: Ints, sequences: int = 1
) -> Batch:
    """Return examples of up to so many sequences each, read in blocks of BLOCK sequences."""
    columns: Batch = {}
    size = max(1, BLOCK // sequences)
    for start in range(0, len(numbers), size):
        part = slice(start, start + size)
        for name, column in read(epochs[part], numbers[part]).items():
            if start == 0:
                columns[name] = np.empty((len(numbers), *column.shape[1:]), column.dtype)
            columns[name][part] = column
    return columns
