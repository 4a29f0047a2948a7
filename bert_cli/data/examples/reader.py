"""`stream[step]` is the batch of a step: a function of (seed, step) and nothing else.

Step and row give a sample index, and an endless stream has an example at every sample index. So resuming means asking
for another step, each process reads its own part, and micro-batches change no example. A stream reads one folder of
records, or a mixture of several folders.
"""

import hashlib
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from bert_cli.arrays import Ints64
from bert_cli.data.examples.source import Records
from bert_cli.data.random import permute, record_at, row_keys
from bert_cli.data.records.formats import Batch
from bert_cli.errors import ConfigError, DataError
from bert_cli.planning.plan import Plan

AHEAD = 2  # steps that are read before they are needed
BLOCK = 1024  # sequences read, masked and packed at once: 15 MB at 512 positions
USUAL_BLOCK = 8192  # examples of the largest block of a mixture where the weights allow it
LONGEST_BLOCK = 65536  # weights without a common measure are rounded to fractions of it


@dataclass(frozen=True)
class Batching:
    """The examples of each step, and the part that this process reads."""

    examples_per_step: int
    micro_batch_size: int
    rank: int = 0
    world_size: int = 1
    plan: Plan | None = None
    """The plan of a run whose steps differ in size or in their masks."""

    def sample_indices(self, step: int) -> Ints64:
        """Return the sample indices of this process in a step."""
        indices = self.step_indices(step)
        # Consecutive indices for each process: the micro-batches of rank 0 come first.
        each = len(indices) // self.world_size
        return indices[self.rank * each : (self.rank + 1) * each]

    def step_indices(self, step: int) -> Ints64:
        """Return the sample indices of all processes in a step."""
        if self.plan is not None:
            indices = self.plan.sample_indices(step)
            return np.arange(indices.start, indices.stop)
        return np.arange(self.examples_per_step) + step * self.examples_per_step

    def mask_probability(self, step: int) -> float | None:
        """Return the fraction of tokens that are masked in a step, None for the fraction in the settings."""
        if self.plan is not None:
            return self.plan.mask_probability(step)
        return None

    def micro_batches(self, rows: Batch, group: int = 1) -> Batch:
        """Return rows [n, ...], a group for each example, as micro-batches [M, B, ...]."""
        size = self.micro_batch_size * group
        return {name: rows[name].reshape(-1, size, *rows[name].shape[1:]) for name in rows}


class Stream(Protocol):
    """Batches by step."""

    fingerprint: str  # changes with the examples and their order; a resumed run needs the same
    epoch_size: int | None  # examples of an epoch; None where there is no end

    def __getitem__(self, step: int) -> Batch:
        """Return this process' part of the batch of a step, [M, B, ...]."""
        ...

    def describe(self, examples: int) -> list[str]:
        """Return lines of text about a run over so many examples."""
        return []


def read_ahead(
    stream: Stream, first_step: int, end_step: int
) -> Iterator[tuple[int, Batch, float]]:
    """Yield (step, batch, seconds waited for it) for first_step <= step < end_step.

    One thread reads up to AHEAD steps ahead. Its errors are raised here, at their step.
    """
    pool = ThreadPoolExecutor(1, "read-ahead")
    pending: deque[Future[Batch]] = deque()
    try:
        for step in range(first_step, min(first_step + AHEAD, end_step)):
            # One thread: NumPy and reads release the lock of Python, and steps stay in order.
            pending.append(pool.submit(stream.__getitem__, step))
        for step in range(first_step, end_step):
            started = time.monotonic()
            batch = pending.popleft().result()
            waited = time.monotonic() - started
            if step + AHEAD < end_step:
                pending.append(pool.submit(stream.__getitem__, step + AHEAD))
            yield step, batch, waited
    finally:
        pool.shutdown(cancel_futures=True)


# --- examples of records


def shuffled(
    source: Records, sample_indices: npt.ArrayLike, probability: float | None = None
) -> Batch:
    """Return the examples of a source at sample indices [n] of its random order, read in blocks of BLOCK sequences."""
    epochs, numbers = record_at(sample_indices, len(source), source.seed)
    size = max(1, BLOCK // source.max_sequences_per_pack)
    parts = (slice(start, start + size) for start in range(0, len(numbers), size))
    blocks = ((part, source.examples(epochs[part], numbers[part], probability)) for part in parts)
    return _assembled(len(numbers), blocks)


def _assembled(number: int, blocks: Iterable[tuple[Ints64 | slice, Batch]]) -> Batch:
    """Return the columns of so many examples from blocks with their rows."""
    columns: Batch = {}
    for rows, block in blocks:
        for name, column in block.items():
            if name not in columns:
                columns[name] = np.empty((number, *column.shape[1:]), column.dtype)
            columns[name][rows] = column
    return columns


class ExampleStream(Stream):
    """The examples of one source or several in one order, each with its fraction of the examples.

    The stream consists of blocks of one length. Each block has the same number of examples of each source, its quota,
    and a permutation drawn by (seed, block) assigns each example of the block to a source. The n-th example of a source
    in the stream is the n-th of its random order, so an epoch of a source has each of its records once.
    """

    def __init__(
        self,
        sources: Sequence[Records],
        batching: Batching,
        weights: Sequence[float] = (1.0,),
        seed: int = 0,
    ) -> None:
        """Mix sources by weights. Raises DataError for sources that do not fit, ConfigError for too small a weight."""
        for left, right in combinations(sources, 2):
            both = f"dataset_dir ({left.folder} and {right.folder})"
            if left.fingerprint == right.fingerprint:
                remedy = "name one of them, with the weights added together"
                raise DataError(both, "hold the same records", remedy)
            if left.corpus["vocab_sha256"] != right.corpus["vocab_sha256"]:
                remedy = "make one of them again with the vocabulary of the other"
                raise DataError(both, "differ in their vocabularies", remedy)
        self.sources = sources
        self.quotas = quotas_of(weights)
        """Examples of each source in a block."""
        for source, weight, quota in zip(sources, weights, self.quotas, strict=True):
            if quota == 0:
                where = f"dataset_dir (weight {weight:g} of {source.folder})"
                problem = f"is too small: the corpus gets no example in {LONGEST_BLOCK}"
                raise ConfigError(where, problem, "raise the weight or leave the corpus out")
        self.batching = batching
        self.folder: Path | None = sources[0].folder
        """With the tokenizer of the examples; None for synthetic ones."""
        self.has_next_sentences = any(source.has_next_sentences for source in sources)
        self.epoch_size: int | None = sum(map(len, sources))
        self._block = sum(self.quotas)
        means = [source.sequences_per_example for source in sources]
        self.sequences_per_example = float(np.dot(means, self.quotas) / self._block)
        """Mean number: more than one in packs."""
        # The sources draw by the seed too; a block's order must not equal the order of one of their epochs.
        self._order_seed = int(row_keys(0, "mixture", seed)[0])
        self.fingerprint = sources[0].fingerprint
        if len(sources) > 1:
            identity = [source.fingerprint for source in sources], self.quotas
            self.fingerprint = hashlib.sha256(repr(identity).encode()).hexdigest()

    def follow(self, plan: Plan) -> None:
        """Read the steps of a plan, which may differ in size and in their masks."""
        self.batching = replace(self.batching, plan=plan)

    def __getitem__(self, step: int) -> Batch:
        """Return this process' part of the batch of a step, [M, B, ...]."""
        batching = self.batching
        rows = self.rows(batching.sample_indices(step), batching.mask_probability(step))
        return batching.micro_batches(rows)

    def first_micro_batches(self, number: int) -> Batch:
        """Return the first micro-batches of the stream [number, B, ...], to trace functions with."""
        rows = self.rows(np.arange(number * self.batching.micro_batch_size))
        return self.batching.micro_batches(rows)

    def rows(self, sample_indices: npt.ArrayLike, probability: float | None = None) -> Batch:
        """Return the examples at sample indices [n], in this order, as columns [n, ...].

        `probability` replaces the fraction of the settings in dynamic masks.
        """
        numbers, indices = self.locate(sample_indices)
        rows_of = ((number, np.flatnonzero(numbers == number)) for number in np.unique(numbers))
        # A generator: the examples of one source at a time are in memory.
        blocks = (
            (rows, shuffled(self.sources[number], indices[rows], probability))
            for number, rows in rows_of
        )
        return _assembled(len(numbers), blocks)

    def locate(self, sample_indices: npt.ArrayLike) -> tuple[Ints64, Ints64]:
        """Return the corpora [n] of sample indices [n], and their sample indices [n] in these corpora."""
        blocks, offsets = np.divmod(np.array(sample_indices, np.int64, ndmin=1), self._block)
        corpora = np.empty_like(blocks)
        ranks = np.empty_like(blocks)
        for block in np.unique(blocks):
            chosen = blocks == block
            assigned = _assignment(tuple(self.quotas), self._order_seed, int(block))
            corpora[chosen], ranks[chosen] = assigned[:, offsets[chosen]]
        return corpora, blocks * np.array(self.quotas)[corpora] + ranks

    def describe(self, examples: int) -> list[str]:
        """Return a line for each of several sources, with the part of it that a run over so many examples reads."""
        if len(self.sources) == 1:
            return []
        blocks, rest = divmod(examples, self._block)
        corpora, _ = self.locate(np.arange(examples - rest, examples))
        counts = blocks * np.array(self.quotas) + np.bincount(corpora, minlength=len(self.quotas))
        return [
            f"{quota / self._block:.3%} from {source.folder}: {count:,} examples, "
            f"{count / len(source):.3g} epochs of {len(source):,}"
            for quota, count, source in zip(self.quotas, counts, self.sources, strict=True)
        ]


@lru_cache(maxsize=8)  # 1 MB each at most: the steps of a run read one block after another
def _assignment(quotas: tuple[int, ...], seed: int, block: int) -> Ints64:
    """Return [2, n]: the corpus of each example of a block, and its rank among the examples of that corpus."""
    ends = np.cumsum(quotas)
    # A permutation of 0 .. n - 1, and the range of a corpus in which each number lies.
    corpora = np.searchsorted(ends, permute(np.arange(ends[-1]), ends[-1], seed, block), "right")
    ranks = np.empty_like(corpora)
    for number, quota in enumerate(quotas):
        ranks[corpora == number] = np.arange(quota)
    return np.stack([corpora, ranks])


def quotas_of(weights: Sequence[float]) -> list[int]:
    """Return the examples of each corpus in a block, in the proportions of the weights.

    Quotas are exact if the smallest block that divides evenly has at most LONGEST_BLOCK examples. Otherwise they are
    rounded to fractions of LONGEST_BLOCK, the largest remainders up; a corpus may then get 0.
    """
    # From the digits that the user wrote, since the nearest float of 0.1 has a denominator of 2^55.
    exact = [Fraction(str(weight)) for weight in weights]  # 0.1 means a tenth
    fractions = [weight / sum(exact) for weight in exact]
    even = math.lcm(*(fraction.denominator for fraction in fractions))
    block = min(even * max(1, USUAL_BLOCK // even), LONGEST_BLOCK)
    quotas = [math.floor(fraction * block) for fraction in fractions]
    by_remainder = sorted(range(len(fractions)), key=lambda n: quotas[n] - fractions[n] * block)
    for number in by_remainder[: block - sum(quotas)]:
        quotas[number] += 1
    return quotas
