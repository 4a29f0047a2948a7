"""Which sequences share an example, so that few of its positions are padding.

There are few different lengths: a strategy says which combinations of lengths make a pack and how
many packs have each (shortest-pack-first histogram packing: Krell et al. 2021, "Efficient Sequence
Packing without Cross-contamination", section 3.1), whatever the size of the corpus. The records of a
length are assigned by a permutation drawn by (seed, epoch, length). So an epoch has each record in
exactly one pack, and epochs have as many packs with other neighbours. Memory: 4 bytes a record.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bert_cli.data.records.random_bits import row_keys
from bert_cli.data.stream.permutation import permute

Ints = npt.NDArray[np.integer[Any]]


class Strategy(NamedTuple):
    """Combinations of lengths and the number of packs of each."""

    lengths: npt.NDArray[np.int64]
    """[K, C] lengths of a combination's sequences, the longest first; then zeros."""
    counts: npt.NDArray[np.int64]
    """[K] packs of each combination."""


def shortest_pack_first(histogram: Ints, sequences: int) -> Strategy:
    """Pack a histogram of lengths [S + 1] into packs of S positions and at most C sequences.

    From the longest to the shortest, each sequence goes into the open pack with the most free
    positions, or into a new one when it fits into none. Packs of equal lengths are counted together,
    so the work grows with S and not with the number of sequences. Length 0 is ignored.
    """
    longest = len(histogram) - 1
    done: dict[tuple[int, ...], int] = {}
    # Open packs by their free positions: their lengths -> how many there are.
    open_packs: list[dict[tuple[int, ...], int]] = [{} for _ in range(longest + 1)]

    def put(lengths: tuple[int, ...], count: int) -> None:
        free = longest - sum(lengths)
        packs = done if len(lengths) == sequences else open_packs[free]
        packs[lengths] = packs.get(lengths, 0) + count

    for length in range(longest, 0, -1):
        left = int(histogram[length])
        free = longest
        while left and free >= length:
            if not open_packs[free]:
                free -= 1
                continue
            lengths, count = open_packs[free].popitem()
            used = min(count, left)
            if count > used:
                open_packs[free][lengths] = count - used
            put((*lengths, length), used)
            left -= used
        # The rest goes into new packs. Each has the most free positions until it is full, as far as
        # two of this length fit into one.
        each = min(longest // length, sequences)
        full, rest = divmod(left, each)
        for copies, count in ((each, full), (rest, 1)):
            if copies and count:
                put((length,) * copies, count)
    for packs in open_packs:
        for lengths, count in packs.items():
            done[lengths] = done.get(lengths, 0) + count
    square = np.zeros((len(done), sequences), np.int64)
    for row, lengths in enumerate(done):
        square[row, : len(lengths)] = lengths
    return Strategy(square, np.array(list(done.values()), np.int64))


class ByLength:
    """Record numbers sorted by length; those of a range of lengths are drawn in a random order."""

    def __init__(self, lengths: Ints, longest: int, name: str, seed: int) -> None:
        """Sort records by their lengths [records], each from 1 to `longest`."""
        assert len(lengths) == 0 or 0 < int(lengths.min()) <= int(lengths.max()) <= longest <= 65535
        self.histogram: npt.NDArray[np.int64] = np.bincount(lengths, minlength=longest + 1)
        # A stable sort of 16-bit numbers counts them instead of comparing.
        order = np.argsort(lengths.astype(np.uint16), kind="stable")
        self._order = order.astype(np.uint32 if len(lengths) < 1 << 32 else np.int64)
        self.starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(self.histogram)))
        """[longest + 2] where the records of a length begin in the order."""
        self.tokens = int(self.histogram @ np.arange(longest + 1))
        self._seed = int(row_keys(0, name, seed)[0])

    def draw(self, low: Ints, high: Ints, slots: Ints, epochs: Ints) -> npt.NDArray[np.int64]:
        """Return the records at slots [n] among those of `low` [n] to `high` [n] tokens.

        Each epoch and each `high` has another permutation.
        """
        starts = self.starts[low]
        groups = epochs * np.int64(65536) + high
        chosen = permute(slots, self.starts[high + 1] - starts, self._seed, groups)
        return self._order[starts + chosen].astype(np.int64)


class Packs:
    """Record numbers by pack number, in any epoch."""

    def __init__(self, lengths: Ints, sequence_length: int, sequences: int, seed: int) -> None:
        """Pack records of these lengths [records], each from 1 to S, at most C together."""
        self.sequence_length, self.sequences = sequence_length, sequences
        self._records = ByLength(lengths, sequence_length, "pack", seed)
        self.strategy = shortest_pack_first(self._records.histogram, sequences)
        self._ends = np.cumsum(self.strategy.counts)
        # For each combination and slot, the first of the records of its length that the slot takes:
        # the k-th pack of the combination takes the k-th from there.
        flat = self.strategy.lengths.ravel()
        taken = np.repeat(self.strategy.counts, sequences)
        first = np.zeros(len(flat), np.int64)
        order = np.argsort(flat, kind="stable")
        before = np.cumsum(taken[order]) - taken[order]
        starts = np.searchsorted(flat[order], flat[order])
        first[order] = before - before[starts]
        self._first = first.reshape(self.strategy.lengths.shape)

    def __len__(self) -> int:
        """Return the number of packs of an epoch."""
        return int(self.strategy.counts.sum())

    @property
    def real_token_fraction(self) -> float:
        """Fraction of the positions with a token."""
        return self._records.tokens / (len(self) * self.sequence_length)

    def records(self, packs: Ints, epochs: Ints) -> npt.NDArray[np.int64]:
        """Return the record numbers [n, C] of packs [n] in epochs [n], longest first, then -1."""
        combinations = np.searchsorted(self._ends, packs, side="right")
        within = packs - (self._ends - self.strategy.counts)[combinations]
        lengths = self.strategy.lengths[combinations]
        is_used = lengths > 0
        used = lengths[is_used]
        records = np.full(lengths.shape, -1, np.int64)
        records[is_used] = self._records.draw(
            used,
            used,
            (self._first[combinations] + within[:, None])[is_used],
            np.broadcast_to(epochs[:, None], lengths.shape)[is_used],
        )
        return records
