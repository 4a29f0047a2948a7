"""Several corpora in one endless stream, each with its fraction of it, and every sample index exact.

The stream is cut into blocks of one length. Each block has the same whole number of examples of each
corpus, its quota, and a permutation of its own, drawn by (seed, block), assigns each example of the
block to a corpus. The examples of a corpus are numbered in the order of the stream: quota times the
blocks before, and the examples of that corpus before it in the block. So the n-th example of a corpus
in the stream is the n-th of its reader, an epoch of a corpus has each of its records once, and a
sample index is all that is needed to continue, as with one corpus.
"""

import hashlib
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from bert_cli.data.records.columns import Batch
from bert_cli.data.records.random_bits import row_keys
from bert_cli.data.stream.permutation import permute
from bert_cli.data.stream.prefetch import check_step, micro_batches, positions_of
from bert_cli.data.stream.reader import Reader
from bert_cli.errors import ConfigError, DataError

USUAL_BLOCK = 8192
"""Places of a block at most where the weights allow it: just below a power of two is permuted fastest."""
LONGEST_BLOCK = 65536
"""Places of a block at most: weights that have no common measure are rounded to parts of it."""
BLOCKS_IN_MEMORY = 8
"""Blocks whose corpora are cached, 1 MB each at most: the steps of a run read one block after another."""
NUMBERING = "each corpus in complete epochs"
"""Part of the fingerprint: what earlier versions read had repeated examples within an epoch of a corpus."""


# What must be equal: its name in a message, and the flag that decides it.
_LENGTHS = {
    "sequence_length": ("places", "--sequence-length"),
    "predictions": ("masked places", "--mask-tokens"),
    "max_sequences_per_pack": ("sequences in an example", "--max-sequences-per-pack"),
}


class Mixture:
    """The examples of several corpora in one order; it is asked as a `Reader` is."""

    def __init__(
        self,
        corpora: Sequence[tuple[Reader, float]],
        *,
        seed: int,
        examples_per_step: int,
        micro_batch_size: int,
        part: int = 0,
        parts: int = 1,
    ) -> None:
        """Mix readers; a weight is a corpus' share of the examples (packs, where they are packed).

        Each corpus is read in its reader's own order, through all of it before any of it again. Raises
        DataError for corpora that do not go together, naming both; ConfigError for a weight that is
        no positive number or too small beside the others, and for a step that is no whole number of
        micro-batches in each part.
        """
        check_step(examples_per_step, micro_batch_size, parts)
        self.readers = [reader for reader, _ in corpora]
        self.weights = [weight for _, weight in corpora]
        _check_weights(self.readers, self.weights)
        for reader in self.readers:
            _check_bins(reader)
        for one, other in combinations(self.readers, 2):
            _check_different(one, other)
        for other in self.readers[1:]:
            _check_alike(self.readers[0], other)
        self.seed, self.part, self.parts = seed, part, parts
        self.examples_per_step, self.micro_batch_size = examples_per_step, micro_batch_size
        first = self.readers[0]
        self.corpus: dict[str, Any] = first.corpus
        self.sequence_length, self.predictions = first.sequence_length, first.predictions
        self.max_sequences_per_pack = first.max_sequences_per_pack
        self.masked_places = first.masked_places
        self.is_dynamic = all(reader.is_dynamic for reader in self.readers)
        self.has_next_sentences = any(reader.has_next_sentences for reader in self.readers)
        self.quotas = quotas_of(self.weights)
        """Places of each corpus in a block."""
        for reader, weight, quota in zip(self.readers, self.weights, self.quotas, strict=True):
            if quota == 0:
                raise ConfigError(
                    f"dataset_dir (weight {weight:g} of {reader.folder}): is less than half of "
                    f"1/{LONGEST_BLOCK} of all weights, so nothing would be read of it; raise it or "
                    "leave the corpus out"
                )
        self._quotas = np.array(self.quotas)
        self._block = int(self._quotas.sum())
        # The readers draw by the seed too; a block's order must not be that of one of their epochs.
        self._order_seed = int(row_keys(0, "mixture", seed)[0])
        identity = [reader.fingerprint for reader in self.readers], self.quotas
        self.fingerprint = f"{hashlib.sha256(repr(identity).encode()).hexdigest()}, {NUMBERING}"

    def __len__(self) -> int:
        """Examples of all corpora together."""
        return sum(map(len, self.readers))

    @property
    def sequences_per_example(self) -> float:
        """Sequences of an example on average, more than one where they are packed."""
        return self._mean([reader.sequences / len(reader) for reader in self.readers])

    @property
    def real_token_share(self) -> float | None:
        """Share of the places read that hold a token; None where a corpus does not know it."""
        shares = [reader.real_token_share for reader in self.readers]
        known = [share for share in shares if share is not None]
        return self._mean(known) if len(known) == len(shares) else None

    def _mean(self, values: Sequence[float]) -> float:
        """Of a value of each corpus, over the examples that are read."""
        return float(np.dot(values, self._quotas) / self._block)

    def __getitem__(self, step: int) -> Batch:
        """Return the batch of a step, or its part of it, [M, B, ...]."""
        rows = self.rows(positions_of(step, self.examples_per_step, self.part, self.parts))
        return micro_batches(rows, self.micro_batch_size)

    def rows(self, positions: npt.ArrayLike) -> Batch:
        """Return the examples at these positions of the stream, [n, ...], in this order."""
        corpora, places = self.sources(positions)
        batch: Batch = {}
        for number in np.unique(corpora):
            chosen = np.flatnonzero(corpora == number)
            for name, column in self.readers[number].rows(places[chosen]).items():
                if name not in batch:
                    batch[name] = np.empty((len(corpora), *column.shape[1:]), column.dtype)
                batch[name][chosen] = column
        return batch

    def sources(
        self, sample_indices: npt.ArrayLike
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the corpora [n] that sample indices [n] read from, and their sample indices [n] in those.

        Costs about 1 ms for each block of 8,192 that the indices touch and that is not cached.
        """
        blocks, offsets = np.divmod(np.array(sample_indices, np.int64, ndmin=1), self._block)
        corpora, ranks = np.empty_like(blocks), np.empty_like(blocks)
        for block in np.unique(blocks):
            chosen = blocks == block
            assigned = _assignment(tuple(self.quotas), self._order_seed, int(block))
            corpora[chosen], ranks[chosen] = assigned[:, offsets[chosen]]
        return corpora, blocks * self._quotas[corpora] + ranks

    def read_of(self, examples: int) -> list[int]:
        """How many of the first `examples` of the stream come from each corpus."""
        blocks, rest = divmod(examples, self._block)
        corpora, _ = self.sources(np.arange(examples - rest, examples))
        over = np.bincount(corpora, minlength=len(self.quotas)).tolist()
        return [blocks * quota + more for quota, more in zip(self.quotas, over, strict=True)]

    def epochs(self, examples: int) -> list[float]:
        """How often the first `examples` of the stream go through each corpus."""
        return [
            count / len(reader)
            for count, reader in zip(self.read_of(examples), self.readers, strict=True)
        ]

    def describe(self, examples: int) -> list[str]:
        """What a run over so many examples reads of each corpus, in a person's words, a line each."""
        return [
            f"{quota / self._block:.3%} from {reader.folder}: {count:,} examples out of "
            f"{len(reader):,} ({count / len(reader):.3g} epochs)"
            for quota, count, reader in zip(
                self.quotas, self.read_of(examples), self.readers, strict=True
            )
        ]


@lru_cache(maxsize=BLOCKS_IN_MEMORY)
def _assignment(quotas: tuple[int, ...], seed: int, block: int) -> npt.NDArray[np.int64]:
    """Return the corpus of each example of a block, and its rank among the block's examples of that corpus, [2, n]."""
    ends = np.cumsum(quotas)
    corpora = np.searchsorted(ends, permute(np.arange(ends[-1]), ends[-1], seed, block), "right")
    ranks = np.empty_like(corpora)
    for number, quota in enumerate(quotas):
        ranks[corpora == number] = np.arange(quota)
    assigned = np.stack([corpora, ranks])
    assigned.flags.writeable = False
    return assigned


def quotas_of(weights: Sequence[float]) -> list[int]:
    """Places of each corpus in a block, as the weights are to each other.

    Exactly so when the smallest block that divides evenly has at most LONGEST_BLOCK places; as
    many of these as go into USUAL_BLOCK make one. Otherwise rounded to parts of LONGEST_BLOCK, the
    largest remainders up; a corpus may then get nothing.
    """
    exact = [Fraction(str(weight)) for weight in weights]  # 0.1 means a tenth
    shares = [weight / sum(exact) for weight in exact]
    even = math.lcm(*(share.denominator for share in shares))
    block = min(even * max(1, USUAL_BLOCK // even), LONGEST_BLOCK)
    quotas = [math.floor(share * block) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda n: (quotas[n] - shares[n] * block, n))
    for number in by_remainder[: block - sum(quotas)]:
        quotas[number] += 1
    return quotas


def _check_weights(readers: Sequence[Reader], weights: Sequence[float]) -> None:
    if not readers:
        raise ConfigError("dataset_dir: names no corpus; give at least one")
    for reader, weight in zip(readers, weights, strict=True):
        if not (math.isfinite(weight) and weight > 0):
            raise ConfigError(
                f"dataset_dir (weight {weight} of {reader.folder}): is no positive number; give its "
                "share beside the other weights, or leave the corpus out"
            )


def _check_bins(reader: Reader) -> None:
    if reader.is_binned:
        raise ConfigError(
            f"bins: cannot be had with several corpora, of which {reader.folder} is one: a step is mixed, and "
            "its examples would need like lengths; leave them out, or pack the examples"
        )


def _check_different(one: Reader, other: Reader) -> None:
    if one.fingerprint == other.fingerprint:
        raise DataError(
            f"dataset_dir ({one.folder} and {other.folder}): hold the same records, which both would give "
            "at about the same time; name one of them, with the weights added together"
        )


def _check_alike(one: Reader, other: Reader) -> None:
    """Raise DataError unless examples of two corpora can be in one batch."""
    both = f"dataset_dir ({one.folder} and {other.folder})"
    if one.corpus["vocab_sha256"] != other.corpus["vocab_sha256"]:
        raise DataError(
            f"{both}: were made with different vocabularies, so that a number is another word in each; "
            "make one of them again with the other's vocab.txt"
        )
    for name, (what, flag) in _LENGTHS.items():
        lengths = getattr(one, name), getattr(other, name)
        if lengths[0] != lengths[1]:
            raise DataError(
                f"{both}: have {lengths[0]} and {lengths[1]} {what}; make one of them again with the "
                f"other's {flag}"
            )
    shapes = [_columns(reader) for reader in (one, other)]
    differ = sorted({name for name, _, _ in shapes[0] ^ shapes[1]})
    if differ:
        raise DataError(
            f"{both}: give columns that do not fit together ({', '.join(differ)}); make one of them again as "
            "the other was made"
        )


def _columns(reader: Reader) -> set[tuple[str, tuple[int, ...], str]]:
    """Name, shape and type of the columns of an example."""
    return {(name, column.shape[1:], column.dtype.str) for name, column in reader.rows([0]).items()}
