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

from bert_cli.data.frames import read_payload, read_payloads
from bert_cli.data.index import OFFSETS, is_copy
from bert_cli.data.records import dynamic_lengths
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
