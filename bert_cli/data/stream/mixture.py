"""Several corpora in one endless stream, each with its fraction of the examples.

The stream consists of blocks of one length. Each block has the same number of examples of each corpus,
its quota, and a permutation drawn by (seed, block) assigns each example of the block to a corpus. The
examples of a corpus are numbered in the order of the stream: quota times the blocks before, plus the
examples of that corpus before it in the block. So the n-th example of a corpus in the stream is the n-th
of its random order, an epoch of a corpus has each of its records once, and a sample index is all that
is needed to continue, as with one corpus.
"""

import hashlib
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import combinations

import numpy as np
import numpy.typing as npt

from bert_cli.data.records.columns import Batch
from bert_cli.data.records.random_bits import row_keys
from bert_cli.data.stream.permutation import permute
from bert_cli.data.stream.reader import Batching, ExampleStream, shuffled
from bert_cli.data.stream.source import Records
from bert_cli.errors import ConfigError, DataError

USUAL_BLOCK = 8192
"""Largest block where the weights allow it: just below a power of two is permuted fastest."""
LONGEST_BLOCK = 65536
"""Largest block: weights without a common measure are rounded to fractions of it."""
BLOCKS_IN_MEMORY = 8
"""Cached blocks, 1 MB each at most: the steps of a run read one block after another."""
NUMBERING = "each corpus in complete epochs"
"""Part of the fingerprint: earlier versions repeated examples within an epoch of a corpus."""

# Lengths that must be equal: their name in a message, and the flag that decides them.
_LENGTHS = {
    "sequence_length": ("positions", "--sequence-length"),
    "predictions": ("masked positions", "--mask-tokens"),
    "max_sequences_per_pack": ("sequences in an example", "--max-sequences-per-pack"),
}


class Mixture(ExampleStream):
    """The examples of several sources in one order."""

    def __init__(
        self, corpora: Sequence[tuple[Records, float]], batching: Batching, seed: int
    ) -> None:
        """Mix sources by their weights: fractions of the examples (of the packs, where they are packed).

        Each corpus is read in its own random order, completely before any of it is repeated. Raises
        DataError for corpora that do not fit together, naming both, and ConfigError for a weight that is
        no positive number or too small.
        """
        self.sources = [source for source, _ in corpora]
        self.weights = [weight for _, weight in corpora]
        _check_weights(self.sources, self.weights)
        for one, other in combinations(self.sources, 2):
            _check_different(one, other)
        for other in self.sources[1:]:
            _check_fits(self.sources[0], other)
        self.quotas = quotas_of(self.weights)
        """Examples of each corpus in a block."""
        for source, weight, quota in zip(self.sources, self.weights, self.quotas, strict=True):
            if quota == 0:
                raise ConfigError(
                    f"dataset_dir (weight {weight:g} of {source.folder})",
                    f"is less than half of 1/{LONGEST_BLOCK} of all weights, so nothing of it would be read",
                    "raise it or leave the corpus out",
                )
        self.batching, self.folder = batching, self.sources[0].folder
        self.has_next_sentences = any(source.has_next_sentences for source in self.sources)
        self.epoch_size: int = sum(map(len, self.sources))
        self._quotas = np.array(self.quotas)
        self._block = int(self._quotas.sum())
        each = [source.sequences / len(source) for source in self.sources]
        self.sequences_per_example = float(np.dot(each, self._quotas) / self._block)
        # The sources draw by the seed too; a block's order must not be that of one of their epochs.
        self._order_seed = int(row_keys(0, "mixture", seed)[0])
        identity = [source.fingerprint for source in self.sources], self.quotas
        self.fingerprint = f"{hashlib.sha256(repr(identity).encode()).hexdigest()}, {NUMBERING}"

    def rows(self, sample_indices: npt.ArrayLike) -> Batch:
        """Return the examples at sample indices [n], in this order, as columns [n, ...]."""
        corpora, indices = self.locate(sample_indices)
        batch: Batch = {}
        for number in np.unique(corpora):
            chosen = np.flatnonzero(corpora == number)
            for name, column in shuffled(self.sources[number], indices[chosen]).items():
                if name not in batch:
                    batch[name] = np.empty((len(corpora), *column.shape[1:]), column.dtype)
                batch[name][chosen] = column
        return batch

    def locate(
        self, sample_indices: npt.ArrayLike
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the corpora [n] of sample indices [n], and their sample indices [n] in these corpora.

        Takes about 1 ms for each block of 8,192 that the indices touch and that is not cached.
        """
        blocks, offsets = np.divmod(np.array(sample_indices, np.int64, ndmin=1), self._block)
        corpora, ranks = np.empty_like(blocks), np.empty_like(blocks)
        for block in np.unique(blocks):
            chosen = blocks == block
            assigned = _assignment(tuple(self.quotas), self._order_seed, int(block))
            corpora[chosen], ranks[chosen] = assigned[:, offsets[chosen]]
        return corpora, blocks * self._quotas[corpora] + ranks

    def counts(self, examples: int) -> list[int]:
        """Return how many of the first `examples` of the stream come from each corpus."""
        blocks, rest = divmod(examples, self._block)
        corpora, _ = self.locate(np.arange(examples - rest, examples))
        last = np.bincount(corpora, minlength=len(self.quotas)).tolist()
        return [blocks * quota + more for quota, more in zip(self.quotas, last, strict=True)]

    def describe(self, examples: int) -> list[str]:
        """Return a line for each corpus: how much of it a run over so many examples reads."""
        return [
            f"{quota / self._block:.3%} from {source.folder}: {count:,} examples out of "
            f"{len(source):,} ({count / len(source):.3g} epochs)"
            for quota, count, source in zip(
                self.quotas, self.counts(examples), self.sources, strict=True
            )
        ]


@lru_cache(maxsize=BLOCKS_IN_MEMORY)
def _assignment(quotas: tuple[int, ...], seed: int, block: int) -> npt.NDArray[np.int64]:
    """Return [2, n]: the corpus of each example of a block, and its rank among those of that corpus."""
    ends = np.cumsum(quotas)
    corpora = np.searchsorted(ends, permute(np.arange(ends[-1]), ends[-1], seed, block), "right")
    ranks = np.empty_like(corpora)
    for number, quota in enumerate(quotas):
        ranks[corpora == number] = np.arange(quota)
    assigned = np.stack([corpora, ranks])
    assigned.flags.writeable = False
    return assigned


def quotas_of(weights: Sequence[float]) -> list[int]:
    """Return the examples of each corpus in a block, in the proportions of the weights.

    They are exact when the smallest block that divides evenly has at most LONGEST_BLOCK examples; as
    many of these as fit into USUAL_BLOCK make one. Otherwise they are rounded to fractions of
    LONGEST_BLOCK, the largest remainders up; a corpus may then get 0.
    """
    exact = [Fraction(str(weight)) for weight in weights]  # 0.1 means a tenth
    fractions = [weight / sum(exact) for weight in exact]
    even = math.lcm(*(fraction.denominator for fraction in fractions))
    block = min(even * max(1, USUAL_BLOCK // even), LONGEST_BLOCK)
    quotas = [math.floor(fraction * block) for fraction in fractions]
    by_remainder = sorted(
        range(len(fractions)), key=lambda n: (quotas[n] - fractions[n] * block, n)
    )
    for number in by_remainder[: block - sum(quotas)]:
        quotas[number] += 1
    return quotas


def _check_weights(sources: Sequence[Records], weights: Sequence[float]) -> None:
    if not sources:
        raise ConfigError("dataset_dir", "names no corpus", "give at least one")
    for source, weight in zip(sources, weights, strict=True):
        if not (math.isfinite(weight) and weight > 0):
            raise ConfigError(
                f"dataset_dir (weight {weight} of {source.folder})",
                "is no positive number",
                "give a number in proportion to the other weights, or leave the corpus out",
            )


def _check_different(one: Records, other: Records) -> None:
    if one.fingerprint == other.fingerprint:
        raise DataError(
            f"dataset_dir ({one.folder} and {other.folder})",
            "hold the same records, so each would be read twice in about the same steps",
            "name one of them, with the weights added together",
        )


def _check_fits(one: Records, other: Records) -> None:
    """Raise DataError unless examples of two corpora can be in one batch."""
    both = f"dataset_dir ({one.folder} and {other.folder})"
    if one.corpus["vocab_sha256"] != other.corpus["vocab_sha256"]:
        raise DataError(
            both,
            "were made with different vocabularies, so that a number is another token in each",
            "make one of them again with the other's vocab.txt",
        )
    for name, (what, flag) in _LENGTHS.items():
        lengths = getattr(one, name), getattr(other, name)
        if lengths[0] != lengths[1]:
            raise DataError(
                both,
                f"have {lengths[0]} and {lengths[1]} {what}",
                f"make one of them again with the other's {flag}",
            )
    differing = sorted({name for name, _, _ in _columns(one) ^ _columns(other)})
    if differing:
        raise DataError(
            both,
            f"have columns that do not fit together ({', '.join(differing)})",
            "make one of them again as the other was made",
        )


def _columns(source: Records) -> set[tuple[str, tuple[int, ...], str]]:
    """Return name, shape and type of each column of an example."""
    example = shuffled(source, 0)
    return {(name, column.shape[1:], column.dtype.str) for name, column in example.items()}
