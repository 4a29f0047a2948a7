"""Which sequences share an example, so that few of its places are padding.

Only lengths matter, and there are few of them: a strategy says which combinations of lengths make a
pack and how often (shortest-pack-first histogram packing: Krell et al. 2021, "Efficient Sequence
Packing without Cross-contamination", section 3.1), whatever the size of the corpus. Which records of
a length stand where is a permutation drawn by (seed, epoch, length), asked at any place. So an epoch
has each record in exactly one pack, epochs have as many packs with other neighbours in them, and
nothing is kept but the records sorted by length: 4 bytes each.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bert_cli.data.records.random_bits import row_keys
from bert_cli.data.stream.permutation import permute

Ints = npt.NDArray[np.integer[Any]]


class Strategy(NamedTuple):
    """Combinations of lengths and how many packs have each."""

    lengths: npt.NDArray[np.int64]
    """[K, C] lengths of a combination's sequences, the longest first; 0 for none."""
    counts: npt.NDArray[np.int64]
    """[K] packs of each combination."""


def shortest_pack_first(histogram: Ints, sequences: int) -> Strategy:
    """Pack a histogram of lengths [S + 1] into packs of S places and at most C sequences.

    From the longest to the shortest, each sequence goes into the open pack with the most room, and
    into a new one when it fits into none. Packs of equal lengths are treated as one, so the work
    grows with S and not with the sequences. Sequences of no length are not there.
    """
    longest = len(histogram) - 1
    done: dict[tuple[int, ...], int] = {}
    # Open packs by the room that is left: their lengths and how many there are.
    open_packs: list[dict[tuple[int, ...], int]] = [{} for _ in range(longest + 1)]

    def put(lengths: tuple[int, ...], count: int) -> None:
        room = longest - sum(lengths)
        packs = done if len(lengths) == sequences else open_packs[room]
        packs[lengths] = packs.get(lengths, 0) + count

    for length in range(longest, 0, -1):
        left = int(histogram[length])
        room = longest
        while left and room >= length:
            if not open_packs[room]:
                room -= 1
                continue
            lengths, count = open_packs[room].popitem()
            used = min(count, left)
            if count > used:
                open_packs[room][lengths] = count - used
            put((*lengths, length), used)
            left -= used
        # Into none: of new packs each is the one with the most room until it is full, as far as two
        # of this length fit into one.
        each = min(longest // length, sequences)
        whole, rest = divmod(left, each)
        for copies, count in ((each, whole), (rest, 1)):
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
    """Record numbers sorted by length, and those of a group of lengths drawn in an order of chance."""

    def __init__(self, lengths: Ints, longest: int, name: str, seed: int) -> None:
        """Sort records by their lengths [records], of which none is 0 or longer than `longest`."""
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
        """Records at slots [n], counted from 0, of those that have `low` [n] to `high` [n] tokens.

        Each epoch and each `high` has a permutation of its own.
        """
        starts = self.starts[low]
        groups = epochs * np.int64(65536) + high
        chosen = permute(slots, self.starts[high + 1] - starts, self._seed, groups)
        return self._order[starts + chosen].astype(np.int64)


class Packs:
    """Pack number -> record numbers, in any epoch."""

    def __init__(self, lengths: Ints, sequence_length: int, sequences: int, seed: int) -> None:
        """Pack records of these lengths [records], each of 1 to S tokens, at most C together."""
        self.sequence_length, self.sequences = sequence_length, sequences
        self._records = ByLength(lengths, sequence_length, "pack", seed)
        self.strategy = shortest_pack_first(self._records.histogram, sequences)
        self._ends = np.cumsum(self.strategy.counts)
        # In the order of combinations and their slots, the first of the records of its length that
        # each slot of a combination takes; its k-th pack takes the k-th from there.
        flat = self.strategy.lengths.ravel()
        taken = np.repeat(self.strategy.counts, sequences)
        first = np.zeros(len(flat), np.int64)
        order = np.argsort(flat, kind="stable")
        before = np.cumsum(taken[order]) - taken[order]
        starts = np.searchsorted(flat[order], flat[order])
        first[order] = before - before[starts]
        self._first = first.reshape(self.strategy.lengths.shape)

    def __len__(self) -> int:
        """Packs of an epoch."""
        return int(self.strategy.counts.sum())

    @property
    def real_token_share(self) -> float:
        """Share of the places that hold a token."""
        return self._records.tokens / (len(self) * self.sequence_length)

    def records(self, packs: Ints, epochs: Ints) -> npt.NDArray[np.int64]:
        """Record numbers [n, C] of packs [n] in epochs [n], longest first; -1 for none."""
        combinations = np.searchsorted(self._ends, packs, side="right")
        within = packs - (self._ends - self.strategy.counts)[combinations]
        lengths = self.strategy.lengths[combinations]
        there = lengths > 0
        chosen = lengths[there]
        records = np.full(lengths.shape, -1, np.int64)
        records[there] = self._records.draw(
            chosen,
            chosen,
            (self._first[combinations] + within[:, None])[there],
            np.broadcast_to(epochs[:, None], lengths.shape)[there],
        )
        return records
