"""Length buckets: the examples of a step have similar lengths and little padding, without packing.

The records of an epoch form a list, bucket by bucket from the shortest to the longest, in a random order
within each bucket. A step is as many consecutive records as it has examples, padded to the length of the
last one's bucket. So what remains of a bucket goes into the first step of the next longer one; only of the
longest bucket fewer records than a step has are left out, others in each epoch. The steps are permuted
too. All of it is a function of (seed, step).
"""

from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from bert_cli.data.records.columns import Batch
from bert_cli.data.stream.packing import ByLength
from bert_cli.data.stream.permutation import record_at
from bert_cli.data.stream.reader import Batching, ExampleStream, in_blocks
from bert_cli.data.stream.source import DynamicSource, Records
from bert_cli.errors import ConfigError, DataError

Ints = npt.NDArray[np.integer[Any]]

MULTIPLE = 8
"""Buckets end at multiples of so many positions, as matrix units want them."""


class Buckets:
    """Record numbers by sample index, in any epoch."""

    def __init__(
        self, lengths: Ints, sequence_length: int, buckets: int, examples_per_step: int, seed: int
    ) -> None:
        """Divide records of these lengths [records] into at most `buckets`; the longest ends at S at most."""
        self.seed, self.examples_per_step = seed, examples_per_step
        # The name decides the random order of old and new runs alike.
        self._records = ByLength(lengths, sequence_length, "bin", seed)
        self.ends = bucket_ends(self._records.histogram, buckets)
        """[buckets] positions of the examples of each bucket, ascending."""
        self._shortest = np.concatenate((np.ones(1, np.int64), self.ends[:-1] + 1))
        self._starts = self._records.starts[self._shortest]
        self.steps, self.left_out = divmod(len(lengths), examples_per_step)
        """Steps of an epoch, and the records that none of its steps has."""

    def __len__(self) -> int:
        """Return the number of examples of an epoch."""
        return self.steps * self.examples_per_step

    @property
    def real_token_fraction(self) -> float:
        """Fraction of an epoch's positions with a token; the records left out count as the longest."""
        ends = self.ends[self._bucket_of((np.arange(self.steps) + 1) * self.examples_per_step - 1)]
        positions = int(ends.sum()) * self.examples_per_step + self.left_out * int(self.ends[-1])
        return self._records.tokens / positions

    def records(self, sample_indices: Ints) -> tuple[Ints, npt.NDArray[np.int64], int]:
        """Return the epochs [n] and records [n] at sample indices [n], and the positions they need."""
        steps, rows = np.divmod(np.asarray(sample_indices, np.int64), self.examples_per_step)
        epochs, drawn = record_at(steps, self.steps, self.seed)
        first = drawn * self.examples_per_step
        slots = first + rows
        buckets = self._bucket_of(slots)
        within = slots - self._starts[buckets]
        records = self._records.draw(self._shortest[buckets], self.ends[buckets], within, epochs)
        longest = int(self._bucket_of(first + self.examples_per_step - 1).max(initial=0))
        return epochs, records, int(self.ends[longest])

    def _bucket_of(self, slots: Ints) -> npt.NDArray[np.int64]:
        """Return the bucket of each slot of an epoch's list."""
        return np.searchsorted(self._starts, slots, side="right") - 1


class BucketReader(ExampleStream):
    """The records of a source in steps of similar lengths."""

    def __init__(self, source: Records, batching: Batching, buckets: int) -> None:
        """Raise ConfigError for packs, DataError for static records or fewer than a step has examples."""
        if source.max_sequences_per_pack > 1:
            raise ConfigError(
                f"length_buckets ({buckets})",
                "are for examples of one sequence, and these are packs of up to "
                f"{source.max_sequences_per_pack}",
                "leave out one of the two",
            )
        if not source.is_dynamic:
            raise DataError(
                f"length_buckets ({buckets})",
                f"the records in {source.folder} are static and padded already",
                "leave them out, or make the records with --masking dynamic",
            )
        records, step = len(source), batching.examples_per_step
        if records < step:
            raise DataError(
                f"length_buckets ({buckets})",
                f"the {records} records in {source.folder} are fewer than a step's {step} examples, so no "
                "step could be made of them",
                "leave the length buckets out",
            )
        self._source = cast("DynamicSource", source)
        self.batching, self.folder = batching, source.folder
        self.has_next_sentences = source.has_next_sentences
        # Checkpoints compare this text, so its words stay.
        self.fingerprint = f"{source.fingerprint}, {buckets} bins for steps of {step}"
        lengths = source.files.lengths()
        self.buckets = Buckets(lengths, source.sequence_length, buckets, step, source.seed)
        self.epoch_size: int = len(self.buckets)
        self.sequences_per_example = 1.0

    def rows(self, sample_indices: npt.ArrayLike) -> Batch:
        """Return the examples at sample indices [n], padded to the longest step that they are from."""
        indices = np.array(sample_indices, np.int64, ndmin=1)
        epochs, records, length = self.buckets.records(indices)
        return in_blocks(partial(self._source.padded_examples, length=length), epochs, records)


def bucket_ends(histogram: Ints, buckets: int) -> npt.NDArray[np.int64]:
    """Return the ends of at most `buckets` buckets over lengths [S + 1] with the least padding.

    All are multiples of MULTIPLE but S. Dynamic programming over all ends, bucket by bucket.
    """
    longest = len(histogram) - 1
    highest = int(np.flatnonzero(histogram)[-1])
    ends = np.minimum(np.arange(MULTIPLE, highest + MULTIPLE, MULTIPLE), longest)
    counts = np.concatenate((np.zeros(1, np.int64), np.cumsum(histogram)[ends]))
    # positions[first, end]: of all examples that are longer than ends[first - 1] and fit into ends[end].
    positions = (counts[None, 1:] - counts[:-1, None]).astype(np.float64) * ends
    positions[np.tril_indices(len(ends), -1)] = np.inf
    fewest = positions[0]
    before: list[npt.NDArray[np.int64]] = []
    for _ in range(min(buckets, len(ends)) - 1):
        # One bucket more, which begins after any bucket that ended before.
        total = np.concatenate(([np.inf], fewest[:-1]))[:, None] + positions
        before.append(np.argmin(total, axis=0))
        fewest = total[before[-1], np.arange(len(ends))]
    chosen = [len(ends) - 1]
    for firsts in reversed(before):
        chosen.append(int(firsts[chosen[-1]]) - 1)
    return ends[np.unique(chosen)]
