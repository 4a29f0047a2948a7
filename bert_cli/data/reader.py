"""`reader[step]` is the batch of a step: a function of (seed, step) and nothing else.

Step and row give a position in the endless stream, the permutation gives the record there, and
corpus.offsets, memory-mapped, its place in the files: opening a corpus of any size takes
milliseconds, resuming is asking for another step, and how rows are cut into micro-batches changes
nothing about them. Dynamic records are masked here by (seed, epoch, record number). Records are
fetched in the order in which they lie on disk, one file open at a time.

Shapes: M micro-batches of a step, B examples of a micro-batch, S places, P masked places, V words.
"""

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from bert_cli.config.data import Masking
from bert_cli.data.index import OFFSETS, read_corpus
from bert_cli.data.instances import SpecialIds
from bert_cli.data.masks import mask_examples
from bert_cli.data.permutation import GOLDEN, mix, record_at
from bert_cli.data.random_bits import Keys, row_keys
from bert_cli.data.records import parse_dynamic, parse_static, read_payload
from bert_cli.data.vocab import read_vocabulary
from bert_cli.errors import ConfigError, DataError

Batch = dict[str, npt.NDArray[Any]]
"""input_ids, input_mask, segment_ids [M, B, S], masked_lm_positions, masked_lm_ids [M, B, P] and
next_sentence_labels [M, B] in int32, masked_lm_weights [M, B, P] in float32; [n, ...] from rows."""

FIELDS = (
    "input_ids",
    "input_mask",
    "segment_ids",
    "masked_lm_positions",
    "masked_lm_ids",
    "masked_lm_weights",
    "next_sentence_labels",
)

BLOCK = 1024
"""Rows parsed and masked at once; at 512 places that takes 15 MB, whatever the size of a step."""


class Batches(Protocol):
    """What can be asked for the batch of any step."""

    def __getitem__(self, step: int) -> Batch:
        """Return the step's batch, [M, B, ...]."""


def read_ahead(
    reader: Batches, first_step: int, end_step: int, depth: int = 2
) -> Iterator[tuple[int, Batch, float]]:
    """Yield (step, batch, seconds waited for it) for first_step <= step < end_step.

    One thread reads up to `depth` steps ahead. Its errors are raised here, at their step; closing
    the iterator ends it as soon as the batch it is at is read.
    """
    pool = ThreadPoolExecutor(1, "read-ahead")
    ahead: deque[Future[Batch]] = deque()
    try:
        for step in range(first_step, min(first_step + depth, end_step)):
            ahead.append(pool.submit(reader.__getitem__, step))
        for step in range(first_step, end_step):
            asked = time.monotonic()
            batch = ahead.popleft().result()
            waited = time.monotonic() - asked
            if step + depth < end_step:
                ahead.append(pool.submit(reader.__getitem__, step + depth))
            yield step, batch, waited
    finally:
        pool.shutdown(cancel_futures=True)


class Reader:
    """The examples of a folder of records in an endless order drawn by the seed."""

    def __init__(
        self,
        folder: Path,
        *,
        seed: int,
        examples_per_step: int,
        micro_batch_size: int,
        sequence_length: int | None = None,
        predictions: int | None = None,
        masking: Masking | None = None,
        part: int = 0,
        parts: int = 1,
    ) -> None:
        """Open a corpus; what is left out is as the corpus says.

        Static records fix S, P and their masks. Dynamic ones can be read with any P, with an S that is
        not smaller, and are masked as `masking` says. Of each step's micro-batches the reader gives
        those of part `part` of `parts`, in the order of the stream. Raises DataError for lengths or
        files that do not fit, ConfigError for a step that is no whole number of micro-batches in each
        part.
        """
        self.folder, self.seed = folder, seed
        self.examples_per_step, self.micro_batch_size = examples_per_step, micro_batch_size
        self.part, self.parts = part, parts
        check_step(examples_per_step, micro_batch_size, parts)
        self.corpus = read_corpus(folder)
        self.fingerprint: str = self.corpus["fingerprint"]
        self.is_dynamic = self.corpus["format"] == "dynamic"
        self.sequence_length: int = sequence_length or self.corpus["sequence_length"]
        self.predictions: int = predictions or self.corpus["mask_tokens"]
        self._check_lengths()
        self._records: int = self.corpus["records"]
        self._paths = [folder / file["name"] for file in self.corpus["files"]]
        self._sizes = [int(file["bytes"]) for file in self.corpus["files"]]
        self._ends = np.cumsum([file["records"] for file in self.corpus["files"]])
        self._offsets = self._map_offsets()
        self._check_files()
        self._special = SpecialIds(**self.corpus["special_ids"])
        self.masking = masking or Masking()
        self._is_continuation = self._continuations()

    def __len__(self) -> int:
        """Records of the corpus, which are the examples of an epoch."""
        return self._records

    def __getitem__(self, step: int) -> Batch:
        """Return the batch of a step, or its part of it, [M, B, ...]."""
        rows = self.rows(positions_of(step, self.examples_per_step, self.part, self.parts))
        return micro_batches(rows, self.micro_batch_size)

    def rows(self, positions: npt.ArrayLike) -> Batch:
        """Return the examples at these positions of the stream, [n, ...], in this order."""
        epochs, records = record_at(positions, self._records, self.seed)
        payloads = self._payloads(records)
        blocks = []
        for start in range(0, len(payloads), BLOCK):
            part = slice(start, start + BLOCK)
            if self.is_dynamic:
                blocks.append(self._masked(payloads[part], epochs[part], records[part]))
            else:
                blocks.append(parse_static(payloads[part], self.sequence_length, self.predictions))
        return {name: np.concatenate([block[name] for block in blocks]) for name in FIELDS}

    def _payloads(self, records: npt.NDArray[np.int64]) -> list[bytes]:
        """Fetch records [n], each file opened once and read from front to back."""
        payloads = [b""] * len(records)
        order = np.argsort(records, kind="stable")
        numbers = records[order]
        files = np.searchsorted(self._ends, numbers, side="right")
        starts = self._offsets[numbers].astype(np.int64)
        following = self._offsets[np.minimum(numbers + 1, self._records - 1)].astype(np.int64)
        is_last = numbers + 1 == self._ends[files]
        stops = np.where(is_last, np.array(self._sizes)[files], following)
        first_of_file = np.flatnonzero(np.diff(files, prepend=-1))
        for begin, end in zip(first_of_file, [*first_of_file[1:], len(numbers)], strict=True):
            path, size = self._paths[files[begin]], self._sizes[files[begin]]
            opened = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
            try:
                for place in range(begin, end):
                    start, stop = int(starts[place]), int(stops[place])
                    if not 0 <= start < stop <= size:
                        raise DataError(
                            f"{self.folder / OFFSETS} (record {numbers[place]}): names byte {start} of "
                            f"{path} and its end at {stop}, which cannot be; it is damaged or of another "
                            f"corpus, run `bert index {self.folder}`"
                        )
                    frame = _Frame(os.pread(opened, stop - start, start), start)
                    payloads[order[place]] = read_payload(frame, start, path)
            finally:
                os.close(opened)
        return payloads

    def _masked(
        self,
        payloads: Sequence[bytes],
        epochs: npt.NDArray[np.int64],
        records: npt.NDArray[np.int64],
    ) -> Batch:
        """Pad and mask dynamic records, with the mask of their epoch."""
        pairs = parse_dynamic(payloads, self.corpus["token_bytes"])
        keys = np.zeros(len(records), np.uint64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            keys[chosen] = row_keys(records[chosen], "mask", self.seed, int(epoch))
        if int(pairs.lengths.max(initial=0)) > self.sequence_length:
            raise DataError(
                f"{self.folder} (a record of {pairs.lengths.max()} tokens): is longer than the "
                f"{self.sequence_length} places that corpus.json names; rebuild the records"
            )
        places = np.arange(self.sequence_length)
        tokens_BS = np.full((len(payloads), self.sequence_length), self._special.pad, np.int32)
        tokens_BS[places < pairs.lengths[:, None]] = pairs.tokens
        return mask_examples(
            tokens_BS,
            pairs.lengths,
            pairs.first_lengths,
            pairs.next_sentence_labels,
            keys,
            special=self._special,
            vocab_size=self.corpus["vocab_size"],
            predictions=self.predictions,
            masking=self.masking,
            is_continuation=self._is_continuation,
        )

    def _check_lengths(self) -> None:
        stored, masked = self.corpus["sequence_length"], self.corpus["mask_tokens"]
        fits = self.sequence_length >= stored if self.is_dynamic else self.sequence_length == stored
        if not fits:
            raise DataError(
                f"max_seq_length ({self.sequence_length}): the records in {self.folder} have "
                f"{stored} places; give {stored}{' or more' if self.is_dynamic else ''}, or a "
                f"corpus made with --sequence-length {self.sequence_length}"
            )
        if self.predictions != masked and not self.is_dynamic:
            raise DataError(
                f"max_predictions_per_seq ({self.predictions}): the records in {self.folder} have "
                f"{masked} masked places; give {masked}, or a corpus made with "
                f"--mask-tokens {self.predictions}"
            )

    def _map_offsets(self) -> npt.NDArray[np.uint64]:
        path = self.folder / OFFSETS
        size = path.stat().st_size if path.exists() else 0
        if size != 8 * self._records or self._ends[-1] != self._records:
            raise DataError(
                f"{path} ({size} bytes): does not hold the places of the {self._records} records "
                f"that corpus.json counts; run `bert index {self.folder}`"
            )
        return np.memmap(path, "<u8", "r")

    def _check_files(self) -> None:
        for path, size in zip(self._paths, self._sizes, strict=True):
            found = path.stat().st_size if path.exists() else None
            if found != size:
                raise DataError(
                    f"{path} ({'missing' if found is None else f'{found} bytes'}): corpus.json "
                    f"says {size} bytes; bring the file back or run `bert index {self.folder}`"
                )

    def _continuations(self) -> npt.NDArray[np.bool_] | None:
        """Which words continue another one [V], when whole words are masked here."""
        if not self.is_dynamic or self.masking.unit == "token":
            return None
        vocabulary = read_vocabulary(self.folder / "vocab.txt")
        if vocabulary.sha256 != self.corpus["vocab_sha256"]:
            raise DataError(
                f"{vocabulary.path}: is not the vocabulary that the records were made with, but "
                "says which pieces continue a word; bring it back"
            )
        return vocabulary.is_continuation


class GeneratedReader:
    """Made-up examples in the shape of real ones, to try a machine or a layout without data.

    Tokens are uniform noise, so there is nothing to learn but the label frequencies. Ids 0 to 4
    stand for the special tokens; a quarter of the examples is shorter than S and padded.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        seed: int,
        examples_per_step: int,
        micro_batch_size: int,
        sequence_length: int,
        predictions: int,
        part: int = 0,
        parts: int = 1,
    ) -> None:
        check_step(examples_per_step, micro_batch_size, parts)
        if vocab_size < 8 or sequence_length < 8:
            raise ConfigError(
                f"generated_dataset (vocabulary {vocab_size}, {sequence_length} places): made-up "
                "examples need at least 8 of each"
            )
        self.vocab_size, self.seed = vocab_size, seed
        self.examples_per_step, self.micro_batch_size = examples_per_step, micro_batch_size
        self.part, self.parts = part, parts
        self.sequence_length, self.predictions = sequence_length, predictions
        self.fingerprint = f"generated V {vocab_size} S {sequence_length} P {predictions}"
        self._special = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)

    def __getitem__(self, step: int) -> Batch:
        """Return the batch of a step, or its part of it, [M, B, ...]."""
        rows = self.rows(positions_of(step, self.examples_per_step, self.part, self.parts))
        return micro_batches(rows, self.micro_batch_size)

    def rows(self, positions: npt.ArrayLike) -> Batch:
        """Return the examples at these positions of the stream, [n, ...], in this order."""
        keys = row_keys(positions, "generated", self.seed)
        blocks = [self._made_up(keys[s : s + BLOCK]) for s in range(0, len(keys), BLOCK)]
        return {name: np.concatenate([block[name] for block in blocks]) for name in FIELDS}

    def _made_up(self, keys_B: Keys) -> Batch:
        length, special, first_word = self.sequence_length, self._special, np.uint64(5)
        places = np.arange(length)
        # The places' own bits, and four more for what a row has one of.
        steps = np.arange(length + 4, dtype=np.uint64) * GOLDEN
        bits_BS = mix(keys_B[:, None] + steps) >> np.uint64(1)
        words_BS = first_word + bits_BS[:, :length] % (np.uint64(self.vocab_size) - first_word)
        is_short_B, short_B, cut_B, label_B = bits_BS[:, length:].astype(np.int64).T
        lengths_B = np.where(is_short_B % 4 == 0, 6 + short_B % (length - 6), length)
        # At least a word on both sides: [CLS] a [SEP] b [SEP].
        first_lengths_B = 3 + cut_B % (lengths_B - 4)
        tokens_BS = np.where(places < lengths_B[:, None], words_BS.astype(np.int32), special.pad)
        tokens_BS[:, 0] = special.cls
        for ends_B in (first_lengths_B, lengths_B):
            tokens_BS[np.arange(len(keys_B)), ends_B - 1] = special.sep
        return mask_examples(
            tokens_BS,
            lengths_B,
            first_lengths_B,
            label_B % 2,
            keys_B,
            special=special,
            vocab_size=self.vocab_size,
            predictions=self.predictions,
            masking=Masking(),
        )


class _Frame:
    """A piece of a file that is sliced by places in the file, so that errors name those."""

    def __init__(self, data: bytes, start: int) -> None:
        self._data, self._start = data, start

    def __getitem__(self, place: slice) -> bytes:
        return self._data[place.start - self._start : place.stop - self._start]


def check_step(examples_per_step: int, micro_batch_size: int, parts: int) -> None:
    """Raise ConfigError unless a step is a whole number of micro-batches in each part."""
    if examples_per_step < 1 or examples_per_step % micro_batch_size:
        raise ConfigError(
            f"global_batch ({examples_per_step} examples a step): is no multiple of "
            f"micro_batch_size {micro_batch_size}; change one of them"
        )
    if (examples_per_step // micro_batch_size) % parts:
        raise ConfigError(
            f"global_batch ({examples_per_step // micro_batch_size} micro-batches a step): cannot be "
            f"divided among {parts} processes; change one of the two numbers"
        )


def positions_of(step: int, examples_per_step: int, part: int, parts: int) -> npt.NDArray[np.int64]:
    """Places in the stream of the examples of a step, or of part `part` of `parts` of it."""
    each = examples_per_step // parts
    first = step * examples_per_step + part * each
    return np.arange(first, first + each)


def micro_batches(rows: Batch, micro_batch_size: int) -> Batch:
    """Rows [n, ...] cut into micro-batches [M, B, ...]."""
    return {name: a.reshape(-1, micro_batch_size, *a.shape[1:]) for name, a in rows.items()}
