"""The batch of a training step of a task: padded to its longest example, or several texts in a row.

The examples of a step are a function of (seed, step), by the permutation of pre-training. Shapes: M micro-batches of a
step, B examples of a micro-batch, S sequence length, R rows of packed texts, T texts of a micro-batch.
"""

import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from bert_cli.arrays import Array, Ints32, Ints64
from bert_cli.data.examples.reader import Batching, Stream
from bert_cli.data.examples.source import Packs
from bert_cli.data.finetune.features import Features, padded_length, runs
from bert_cli.data.random import record_at
from bert_cli.data.records.formats import Batch

POSITIONS_OF_A_TEXT = 8  # a row of S positions holds at most S / 8 texts
ROWS_IN_A_BATCH = 16  # numbers of rows to choose from; more numbers would be traced more often
FEW_TEXTS = 2_000  # their batches have one shape: TensorFlow compiles the step for each shape, seconds each time
SAMPLED_EPOCHS = 3  # that decide this shape; a later step that needs more rows is compiled again


@dataclass(eq=False)
class FeatureReader(Stream):
    """Batches of a task: `reader[step]` has the same examples on every layout."""

    features: Features
    """Examples of at most `sequence_length` tokens."""
    batching: Batching
    seed: int
    sequence_length: int
    group: int = 1
    """Number of examples that stay together in the random order."""

    def __post_init__(self) -> None:
        self.fingerprint = self.features.fingerprint
        self.epoch_size: int = len(self.features) // self.group

    def __getitem__(self, step: int) -> Batch:
        """Return this process' part of the batch of a step, [M, B, ...].

        It is padded to the longest example of the complete step, so that dropout does not depend on the number of
        processes.
        """
        complete = self._numbers(self.batching.step_indices(step))
        numbers = self._numbers(self.batching.sample_indices(step))
        longest = int(self.features.lengths[complete].max())
        rows = self.features.batch(numbers, padded_length(longest, self.sequence_length))
        return self.batching.micro_batches(rows, self.group)

    def _numbers(self, indices: Ints64) -> Ints64:
        """Return the example numbers of the groups at these sample indices."""
        _, groups = record_at(indices, self.epoch_size, self.seed)
        return (groups[:, None] * self.group + np.arange(self.group)).reshape(-1)


class TextReader(FeatureReader):
    """Padded batches with columns [M, B]: the index of each text in the step, and a number of its tokens."""

    def __getitem__(self, step: int) -> Batch:
        """Return this process' part of the batch of a step, [M, B, ...]."""
        batch = super().__getitem__(step)
        shape = batch["input_ids"].shape[:2]
        texts = math.prod(shape)
        index = self.batching.rank * texts + np.arange(texts, dtype=np.int32).reshape(shape)
        numbers = _text_numbers(self._texts(step))
        return batch | {"text_index": index, "text_numbers": numbers[index]}

    def _texts(self, step: int) -> Features:
        """Return the examples of a step, of all processes."""
        return self.features.take(self._numbers(self.batching.step_indices(step)))


class PackReader(TextReader):
    """Batches of packed texts: rows [R, S] of several texts each, in any order within a step.

    A row is a pack as in pre-training. Columns [M, T] have the index of each text in
    the step, -1 for none, and a number of its tokens. The batches of few texts have one shape.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.least = 0, 1  # rows and positions of a micro-batch
        if len(self.features) <= FEW_TEXTS:
            self.least = 0, int(self.features.lengths.max())
            steps = -(-SAMPLED_EPOCHS * self.epoch_size // self.batching.examples_per_step)
            rows = (self[step]["input_ids"].shape[1] for step in range(steps))
            self.least = max(rows), self.least[1]

    def __getitem__(self, step: int) -> Batch:
        """Return this process' part of the packs of a step, [M, R, S], and their texts [M, T]."""
        texts = self._texts(step)
        longest = max(self.least[1], int(texts.lengths.max()))
        size = padded_length(longest, self.sequence_length)
        # Columns of texts have a slot for each text that a row may hold; most stay empty.
        slots = max(1, size // POSITIONS_OF_A_TEXT)
        packs = Packs(texts.lengths, size, slots, seed=0)
        texts_of_pack = packs.records(np.arange(len(packs)), np.zeros(len(packs), np.int64))
        pack, slot = np.nonzero(texts_of_pack >= 0)
        text = texts_of_pack[pack, slot]
        texts = texts.take(text)
        lengths = texts.lengths
        offset = texts.starts - texts.starts[slot == 0][pack]
        # At most one row for each text, if no two fit into a row.
        texts_of_batch = self.batching.micro_batch_size * self.group
        micro_batches = len(texts) // texts_of_batch
        # The number of rows is a multiple, so that a batch has one of ROWS_IN_A_BATCH shapes.
        multiple = -(-texts_of_batch // ROWS_IN_A_BATCH)
        rows = -(-len(packs) // (micro_batches * multiple)) * multiple
        rows = min(texts_of_batch, max(rows, self.least[0]))
        # Micro-batches get packs in turn, so that each has long and short texts.
        # [M, R] flat: the micro-batch, then the row in it.
        row = pack % micro_batches * rows + pack // micro_batches
        target = runs(row * size + offset, lengths)
        token_column = partial(_placed, (micro_batches, rows, size), target)
        text_column = partial(_placed, (micro_batches, rows * slots), row * slots + slot)
        columns = {
            "input_ids": token_column(texts.tokens),
            "segment_ids": token_column(texts.segments),
            "input_mask": token_column(np.repeat(slot + 1, lengths)),
            "position_ids": token_column(runs(np.zeros_like(lengths), lengths)),
            "next_sentence_positions": text_column(offset).reshape(micro_batches, rows, slots),
            "text_index": text_column(text, fill=-1),
            "text_numbers": text_column(_text_numbers(texts)),
        }
        columns |= {name: text_column(column) for name, column in texts.labels.items()}
        of_process = micro_batches // self.batching.world_size
        first = self.batching.rank * of_process
        return {name: column[first : first + of_process] for name, column in columns.items()}


def _text_numbers(texts: Features) -> Ints32:
    """Return a number for each text, equal for equal tokens."""
    numbers: dict[bytes, int] = {}
    tokens = (text.tobytes() for text in np.split(texts.tokens, texts.ends[:-1]))
    return np.array([numbers.setdefault(text, len(numbers)) for text in tokens], np.int32)


def _placed(shape: tuple[int, ...], index: Array, values: Array, fill: int = 0) -> Array:
    """Return an array [*shape, ...] with values [n, ...] at flat indices."""
    dtype = np.float32 if values.dtype.kind == "f" else np.int32
    array = np.full((*shape, *values.shape[1:]), fill, dtype)
    array.reshape(-1, *values.shape[1:])[index] = values
    return array
