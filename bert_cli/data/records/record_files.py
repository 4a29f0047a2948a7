"""The records of a folder by their numbers, wherever in its files they lie.

corpus.offsets, memory-mapped, has the place of each: opening a corpus of any size takes milliseconds.
Records are fetched in the order in which they lie on disk, one file open at a time. What the places
alone tell, the lengths of dynamic records, is told without reading any.
"""

import os
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bert_cli.config.data import packed_predictions
from bert_cli.data.records.columns import Batch, Outside, first_outside, value_limits
from bert_cli.data.records.corpus import is_copy
from bert_cli.data.records.formats import (
    DynamicRecords,
    dynamic_lengths,
    parse_dynamic,
    parse_packs,
    parse_static,
)
from bert_cli.data.records.index import OFFSETS
from bert_cli.data.records.tfrecord import read_payload, read_payloads
from bert_cli.data.shards.checksums import file_crc32c
from bert_cli.errors import DataError

Ints = npt.NDArray[np.integer[Any]]
Numbers = npt.NDArray[np.int64]

BLOCK = 1024
"""Records that are read and then checked, while a processor still holds them."""
AT_ONCE = 1 << 20
"""Records whose lengths are worked out at once, in some 40 MB."""


class RecordFiles:
    """The files of a folder that `read_corpus` has described."""

    def __init__(self, folder: Path, corpus: dict[str, Any]) -> None:
        """Map the offsets; DataError where they or the files are not those of corpus.json."""
        self.folder, self.corpus = folder, corpus
        self.records: int = corpus["records"]
        self._paths = [folder / file["name"] for file in corpus["files"]]
        self._sizes = np.array([file["bytes"] for file in corpus["files"]], np.int64)
        self._ends = np.cumsum([file["records"] for file in corpus["files"]])
        self._offsets = self._map_offsets()
        self._check_files()

    def payloads(self, records: Ints) -> list[bytes]:
        """Fetch records [n], each file read from front to back."""
        order = np.argsort(records, kind="stable")
        numbers = records[order]
        files, starts, stops = self._places(numbers)
        sizes = self._sizes[files]
        wrong = np.flatnonzero((starts < 0) | (starts >= stops) | (stops > sizes))
        if wrong.size:
            first = int(wrong[0])
            path, start, stop = self._paths[files[first]], int(starts[first]), int(stops[first])
            raise self._damaged(int(numbers[first]), path, start, stop)
        payloads: list[bytes] = []
        for begin in range(0, len(numbers), BLOCK):
            part = slice(begin, begin + BLOCK)
            payloads += self._read(files[part], starts[part], (stops - starts)[part])
        # From the order on disk back into the order that was asked for.
        places_of = np.empty_like(order)
        places_of[order] = np.arange(len(order))
        return list(map(payloads.__getitem__, places_of.tolist()))

    def static(self, records: Ints) -> Batch:
        """Return the columns of static records [n], packed or not, as `parse_static` does.

        Raises DataError, with file, record, column, value and range, for a value that no model can read.
        """
        corpus, length = self.corpus, self.corpus["sequence_length"]
        most = corpus.get("max_sequences_per_pack", 1)
        masked = packed_predictions(length, most, corpus["mask_tokens"], corpus["masked_lm_prob"])
        payloads = self.payloads(records)
        columns = parse_static(payloads, length, masked, most if most > 1 else None)
        found = first_outside(columns, value_limits(corpus["vocab_size"], length, most))
        if found is not None:
            raise self._impossible(int(records[found.row]), found)
        return columns

    def check_dynamic(self, sequences: DynamicRecords, records: Ints) -> None:
        """Raise DataError, as `static` does, for impossible values of sequences [R] of these records."""
        length = self.corpus["sequence_length"]
        limits = {
            "tokens": self.corpus["vocab_size"] - 1,
            "lengths": length,
            "first_lengths": length,
            "next_sentence_labels": 1,
        }
        found = first_outside({name: getattr(sequences, name) for name in limits}, limits)
        longer = np.flatnonzero(sequences.first_lengths > sequences.lengths)
        if found is None and longer.size:
            row = int(longer[0])
            value, limit = int(sequences.first_lengths[row]), int(sequences.lengths[row])
            found = Outside("first_lengths", row, value, limit)
        if found is not None:
            ends = np.cumsum(sequences.lengths)
            is_token = found.column == "tokens"
            at = np.searchsorted(ends, found.row, side="right") if is_token else found.row
            raise self._impossible(int(records[at]), found)

    def check_file(self, path: Path) -> int:
        """Read every record of a file, check its values as a run does; return the file's bytes."""
        first, end = self.numbers_of(path)
        for start in range(first, end, BLOCK):
            numbers = np.arange(start, min(start + BLOCK, end))
            if self.corpus["format"] == "static":
                self.static(numbers)
            elif self.corpus.get("max_sequences_per_pack", 1) > 1:
                packs = parse_packs(self.payloads(numbers), self.corpus["token_bytes"])
                self.check_dynamic(packs.sequences, np.repeat(numbers, packs.counts))
            else:
                sequences = parse_dynamic(self.payloads(numbers), self.corpus["token_bytes"])
                self.check_dynamic(sequences, numbers)
        return path.stat().st_size

    def _impossible(self, record: int, found: Outside) -> DataError:
        file = int(np.searchsorted(self._ends, record, side="right"))
        first, _ = self.numbers_of(self._paths[file])
        return DataError(
            f"{self._paths[file]} (record {record - first}, counted from 0): {found.column} has {found.value}, "
            f"which is outside 0 to {found.limit}; make the records again, with the vocabulary that lies beside them"
        )

    def _read(self, files: Ints, starts: Numbers, sizes: Numbers) -> list[bytes]:
        """Payloads of frames. By pread, since a map of a file that shrinks kills the process."""
        frames: list[bytes] = []
        places, lengths = starts.tolist(), sizes.tolist()
        first_of_file = np.flatnonzero(np.diff(files, prepend=-1)).tolist()
        for begin, end in zip(first_of_file, [*first_of_file[1:], len(files)], strict=True):
            opened = os.open(self._paths[files[begin]], os.O_RDONLY | getattr(os, "O_BINARY", 0))
            try:
                frames += map(os.pread, repeat(opened), lengths[begin:end], places[begin:end])
            finally:
                os.close(opened)
        payloads = read_payloads(frames)
        if payloads is not None:
            return payloads
        # One of them is wrong: which?
        return [
            self._payload(_Frame(frame, place), place, self._paths[file])
            for frame, place, file in zip(frames, places, files, strict=True)
        ]

    def _payload(self, frame: "_Frame", start: int, path: Path) -> bytes:
        try:
            return read_payload(frame, start, path)
        except DataError as error:
            if not is_copy(self.folder):
                raise
            raise DataError(f"{str(error).partition(';')[0]}; {self._remedy()}") from None

    def _remedy(self) -> str:
        """What to do about a folder that is not what its corpus.json says."""
        if is_copy(self.folder):
            return f"remove {self.folder}, it will be fetched again"
        return f"run `bert index {self.folder}`"

    def lengths(self, first: int = 0, end: int | None = None) -> npt.NDArray[np.uint16]:
        """Tokens of dynamic records, from number `first` to before `end`, by their places alone."""
        stop = self.records if end is None else end
        lengths = np.empty(stop - first, np.uint16)
        for begin in range(first, stop, AT_ONCE):
            numbers = np.arange(begin, min(begin + AT_ONCE, stop))
            _, starts, stops = self._places(numbers)
            lengths[numbers - first] = dynamic_lengths(
                stops - starts, self.corpus["sequence_length"], self.corpus["token_bytes"]
            )
        return lengths

    def numbers_of(self, path: Path) -> tuple[int, int]:
        """Number of a file's first record, and of the one after its last."""
        file = self._paths.index(path)
        end = int(self._ends[file])
        return end - int(self.corpus["files"][file]["records"]), end

    def _places(self, numbers: Ints) -> tuple[Numbers, Numbers, Numbers]:
        """File, first byte and end of records in ascending order."""
        files = np.searchsorted(self._ends, numbers, side="right")
        starts = self._offsets[numbers].astype(np.int64)
        following = self._offsets[np.minimum(numbers + 1, self.records - 1)].astype(np.int64)
        is_last = numbers + 1 == self._ends[files]
        return files, starts, np.where(is_last, self._sizes[files], following)

    def _damaged(self, number: int, path: Path, start: int, stop: int) -> DataError:
        return DataError(
            f"{self.folder / OFFSETS} (record {number}): names byte {start} of {path} and its end at "
            f"{stop}, which cannot be; it is damaged or of another corpus, {self._remedy()}"
        )

    def _map_offsets(self) -> npt.NDArray[np.uint64]:
        path = self.folder / OFFSETS
        size = path.stat().st_size if path.exists() else 0
        if size != 8 * self.records or self._ends[-1] != self.records:
            raise DataError(
                f"{path} ({size} bytes): does not hold the places of the {self.records} records "
                f"that corpus.json counts; {self._remedy()}"
            )
        return np.memmap(path, "<u8", "r")

    def _check_files(self) -> None:
        """Raise DataError for a file that is not there or not as corpus.json says.

        Of the records and their offsets sizes are compared, of the tokenizer's files checksums.
        """
        for beside in self.corpus.get("beside", []):
            path = self.folder / beside["name"]
            found = file_crc32c(path) if path.exists() and path.name != OFFSETS else None
            if path.name != OFFSETS and found != beside["crc32c"]:
                wrong = "missing" if found is None else f"checksum {found}"
                raise DataError(
                    f"{path} ({wrong}): corpus.json says checksum {beside['crc32c']}; bring back the file that "
                    f"the records were made with, or {self._remedy()} if it was changed on purpose"
                )
        for path, size in zip(self._paths, self._sizes, strict=True):
            found = path.stat().st_size if path.exists() else None
            if found != size:
                raise DataError(
                    f"{path} ({'missing' if found is None else f'{found} bytes'}): corpus.json "
                    f"says {size} bytes; bring the file back or {self._remedy()}"
                )


class _Frame:
    """A piece of a file that is sliced by places in the file, so that errors name those."""

    def __init__(self, data: bytes, start: int) -> None:
        self._data, self._start = data, start

    def __getitem__(self, place: slice) -> bytes:
        return self._data[place.start - self._start : place.stop - self._start]
