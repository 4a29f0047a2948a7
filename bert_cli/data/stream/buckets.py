"""Examples of like lengths in one step, padded to the longest that its bin has: less than packing.

The records of an epoch stand in one list, bin by bin from the shortest to the longest, in an order
of chance within each bin; a step is as many consecutive ones as it has examples, padded to the bin of
the last. So what is left over of a bin goes into the first step of the next wider one, and only of
the widest bin fewer records than a step has are left out, others in each epoch. The steps come in an
order of chance. All of it is a function of (seed, step).
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from bert_cli.data.stream.packing import ByLength
from bert_cli.data.stream.permutation import record_at

Ints = npt.NDArray[np.integer[Any]]

MULTIPLE = 8
"""Ends of bins are multiples of so many places, as matrix units want them."""


class Bins:
    """Place in the stream -> record number, in any epoch."""

    def __init__(
        self, lengths: Ints, sequence_length: int, bins: int, examples_per_step: int, seed: int
    ) -> None:
        """Put records of these lengths [records] into at most `bins` bins; S ends the widest at most."""
        self.seed, self.examples_per_step = seed, examples_per_step
        self._records = ByLength(lengths, sequence_length, "bin", seed)
        self.ends = bin_ends(self._records.histogram, bins)
        """[bins] places of the examples of each bin, ascending."""
        self._low = np.concatenate((np.ones(1, np.int64), self.ends[:-1] + 1))
        self._begins = self._records.starts[self._low]
        self.steps, self.left_out = divmod(len(lengths), examples_per_step)
        """Steps of an epoch, and the records that no step of it has."""

    def __len__(self) -> int:
        """Examples of an epoch."""
        return self.steps * self.examples_per_step

    @property
    def real_token_share(self) -> float:
        """Share of the places of an epoch that hold a token, the records left out counted with it."""
        ends = self.ends[self._bins((np.arange(self.steps) + 1) * self.examples_per_step - 1)]
        places = int(ends.sum()) * self.examples_per_step + self.left_out * int(self.ends[-1])
        return self._records.tokens / places

    def records(self, positions: Ints) -> tuple[Ints, npt.NDArray[np.int64], int]:
        """Epochs [n] and records [n] at positions [n] of the stream, and the places they need."""
        steps, rows = np.divmod(np.asarray(positions, np.int64), self.examples_per_step)
        epochs, drawn = record_at(steps, self.steps, self.seed)
        first = drawn * self.examples_per_step
        slots = first + rows
        bins = self._bins(slots)
        records = self._records.draw(
            self._low[bins], self.ends[bins], slots - self._begins[bins], epochs
        )
        widest = int(self._bins(first + self.examples_per_step - 1).max(initial=0))
        return epochs, records, int(self.ends[widest])

    def _bins(self, slots: Ints) -> npt.NDArray[np.int64]:
        """The bin of each place of an epoch's list."""
        return np.searchsorted(self._begins, slots, side="right") - 1


def bin_ends(histogram: Ints, bins: int) -> npt.NDArray[np.int64]:
    """Ends of at most `bins` bins over a histogram of lengths [S + 1] that pad the fewest places.

    All are multiples of MULTIPLE but S itself. Found by going through all ends, bin by bin.
    """
    longest = len(histogram) - 1
    highest = int(np.flatnonzero(histogram)[-1])
    ends = np.minimum(np.arange(MULTIPLE, highest + MULTIPLE, MULTIPLE), longest)
    counts = np.concatenate((np.zeros(1, np.int64), np.cumsum(histogram)[ends]))
    # places[first, end]: of all examples that are longer than ends[first - 1] and fit into ends[end].
    places = (counts[None, 1:] - counts[:-1, None]).astype(np.float64) * ends
    places[np.tril_indices(len(ends), -1)] = np.inf
    fewest = places[0]
    before: list[npt.NDArray[np.int64]] = []
    for _ in range(min(bins, len(ends)) - 1):
        # One bin more, which begins at any place after a bin that ended there.
        total = np.concatenate(([np.inf], fewest[:-1]))[:, None] + places
        before.append(np.argmin(total, axis=0))
        fewest = total[before[-1], np.arange(len(ends))]
    chosen = [len(ends) - 1]
    for firsts in reversed(before):
        chosen.append(int(firsts[chosen[-1]]) - 1)
    return ends[np.unique(chosen)]
