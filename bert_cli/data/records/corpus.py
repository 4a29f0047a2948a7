"""A folder of records: corpus.json, which describes it, and its records by number.

corpus.json may have been written by another tool, another version or a text editor. It is validated once, here,
before memory is allocated or a file is opened by its numbers and names. corpus.offsets, memory-mapped, has the byte
where each record starts, so opening a corpus of any size takes milliseconds.
"""

import os
from itertools import repeat
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from bert_cli.config.data import packed_predictions
from bert_cli.data.records.columns import Batch, Outside, first_outside, value_limits
from bert_cli.data.records.formats import (
    BLOCK,
    DynamicRecords,
    dynamic_lengths,
    parse_dynamic,
    parse_packs,
    parse_static,
)
from bert_cli.data.records.sentence_pairs import SpecialIds
from bert_cli.data.records.tfrecord import read_payload, read_payloads
from bert_cli.data.shards.manifest import MANIFEST as STEP_MANIFEST
from bert_cli.data.shards.manifest import file_crc32c, recorded_step
from bert_cli.errors import DataError
from bert_cli.files import InnerPath, parse_json, read_json

CORPUS = "corpus.json"
OFFSETS = "corpus.offsets"
COPY_LOCK = ".lock"
"""A file that marks a folder as the local copy of a remote one."""
LENGTHS_BLOCK = 1 << 20
"""Records whose lengths are computed at once, in about 40 MB."""

Ints = npt.NDArray[np.integer[Any]]
Numbers = npt.NDArray[np.int64]
Count = Annotated[int, Field(ge=0)]
Positions = Annotated[int, Field(ge=1, le=65535)]


class _Checked(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _File(_Checked):
    name: InnerPath
    bytes: Count


class _RecordFile(_File):
    records: Count
    crc32c: str | None = None


class _OtherFile(_File):
    crc32c: str


class Corpus(_Checked):
    """The fields of corpus.json that the tool reads. Older folders lack those with a default."""

    format: Literal["static", "dynamic"]
    sequence_length: Positions
    mask_tokens: Positions
    masked_lm_prob: float | None
    whole_word_masking: bool | None
    vocab_size: Annotated[int, Field(ge=1, lt=2**31)]
    vocab_sha256: str
    token_bytes: Literal[2, 4]
    special_ids: SpecialIds
    tokenizer: dict[str, Any]
    files: list[_RecordFile]
    beside: list[_OtherFile] = []
    records: Count
    fingerprint: str
    next_sentence: bool = True
    max_sequences_per_pack: Positions = 1
    sequences: Count = 0
    real_token_share: float = 1.0
    duplication_factor: int | None = None


def read_corpus(folder: Path) -> dict[str, Any]:
    """Return the validated corpus.json of a folder; DataError where it is absent or invalid."""
    path = folder / CORPUS
    refuse_unfinished(folder)
    if not path.exists():
        is_run = any(folder.glob("step_*/"))
        hint = f"{folder} is a run, see `bert runs {folder.parent}`; " if is_run else ""
        raise DataError(
            str(path),
            "does not exist",
            f"{hint}give a folder of records that `bert tokenize` or `bert index` has finished",
        )
    corpus = read_json(path, Corpus, DataError, _rewrite_remedy(folder))
    return corpus.model_dump(exclude_unset=True)


def parse_corpus(address: str, text: bytes) -> dict[str, Any]:
    """Return the validated corpus.json at an address; DataError where it is invalid."""
    remedy = "run `bert index` on the folder that was copied there, and copy it again"
    return parse_json(address, text, Corpus, DataError, remedy).model_dump(exclude_unset=True)


def refuse_unfinished(folder: Path) -> None:
    """Raise DataError while a step is writing the folder: an older corpus.json does not describe it."""
    if (folder / ".done").exists() and not (folder / STEP_MANIFEST).exists():
        step = recorded_step(folder) or "tokenize"
        raise DataError(
            f"folder ({folder})",
            f"`bert {step}` has not finished in it",
            "run it again to continue",
        )


def _is_copy(folder: Path) -> bool:
    return (folder / COPY_LOCK).exists()


def _rewrite_remedy(folder: Path) -> str:
    """Return how to get an unreadable corpus.json written again; that depends on what wrote it."""
    if _is_copy(folder):
        return f"remove {folder}, it will be fetched again"
    step = recorded_step(folder)
    if step is not None:
        return (
            f"remove it and run the same `bert {step}` again, which keeps the records and writes it"
        )
    vocab = folder / "vocab.txt"
    return (
        f"remove it and run `bert index {folder} --vocab {vocab if vocab.exists() else 'vocab.txt'}`, with "
        "the vocabulary that the records were made with"
    )


class RecordFiles:
    """The records of a folder that `read_corpus` has described, by their numbers."""

    def __init__(self, folder: Path, corpus: dict[str, Any]) -> None:
        """Map the offsets; DataError where they or the files are not those of corpus.json."""
        self.folder, self.corpus = folder, corpus
        self.records: int = corpus["records"]
        self._paths = [folder / file["name"] for file in corpus["files"]]
        self._sizes = np.array([file["bytes"] for file in corpus["files"]], np.int64)
        self._ends = np.cumsum([file["records"] for file in corpus["files"]])
        if _is_copy(folder):
            self._remedy = f"remove {folder}, it will be fetched again"
        else:
            self._remedy = f"run `bert index {folder}`"
        self._offsets = self._map_offsets()
        self._check_files()

    def payloads(self, records: Ints) -> list[bytes]:
        """Return the payloads of records [n]; each file is read once, from front to back."""
        order = np.argsort(records, kind="stable")
        numbers = records[order]
        files, starts, stops = self._frames(numbers)
        wrong = np.flatnonzero((starts < 0) | (starts >= stops) | (stops > self._sizes[files]))
        if wrong.size:
            first = wrong[0]
            raise DataError(
                f"{self.folder / OFFSETS} (record {numbers[first]})",
                f"names the bytes {starts[first]} to {stops[first]} of {self._paths[files[first]]}, which cannot "
                "be; it is damaged or of another corpus",
                self._remedy,
            )
        in_file_order: list[bytes] = []
        for begin in range(0, len(numbers), BLOCK):
            part = slice(begin, begin + BLOCK)
            in_file_order += self._read(files[part], starts[part], (stops - starts)[part])
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        return list(map(in_file_order.__getitem__, rank.tolist()))

    def static(self, records: Ints) -> Batch:
        """Return the columns of static records [n], packed or not, as `parse_static` does.

        DataError, with file, record, column, value and range, for a value that no model can read.
        """
        corpus, length = self.corpus, self.corpus["sequence_length"]
        most = corpus.get("max_sequences_per_pack", 1)
        masked = packed_predictions(length, most, corpus["mask_tokens"], corpus["masked_lm_prob"])
        columns = parse_static(self.payloads(records), length, masked, most if most > 1 else None)
        outside = first_outside(columns, value_limits(corpus["vocab_size"], length, most))
        if outside is not None:
            raise self._impossible(int(records[outside.row]), outside)
        return columns

    def check_dynamic(self, sequences: DynamicRecords, records: Ints) -> None:
        """Raise DataError, as `static` does, for impossible values in the sequences [R] of records [R]."""
        length = self.corpus["sequence_length"]
        limits = {
            "tokens": self.corpus["vocab_size"] - 1,
            "lengths": length,
            "first_lengths": length,
            "next_sentence_labels": 1,
        }
        outside = first_outside({name: getattr(sequences, name) for name in limits}, limits)
        longer = np.flatnonzero(sequences.first_lengths > sequences.lengths)
        if outside is None and longer.size:
            row = int(longer[0])
            value, limit = int(sequences.first_lengths[row]), int(sequences.lengths[row])
            outside = Outside("first_lengths", row, value, limit)
        if outside is not None:
            row = outside.row
            if outside.column == "tokens":
                row = int(np.searchsorted(np.cumsum(sequences.lengths), row, side="right"))
            raise self._impossible(int(records[row]), outside)

    def check_file(self, path: Path) -> int:
        """Check the values of every record of a file, as a run does; return the file's bytes."""
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

    def lengths(self, first: int = 0, end: int | None = None) -> npt.NDArray[np.uint16]:
        """Return the tokens of dynamic records `first` to `end` - 1, from their offsets alone."""
        stop = self.records if end is None else end
        lengths = np.empty(stop - first, np.uint16)
        for begin in range(first, stop, LENGTHS_BLOCK):
            numbers = np.arange(begin, min(begin + LENGTHS_BLOCK, stop))
            _, starts, stops = self._frames(numbers)
            lengths[numbers - first] = dynamic_lengths(
                stops - starts, self.corpus["sequence_length"], self.corpus["token_bytes"]
            )
        return lengths

    def numbers_of(self, path: Path) -> tuple[int, int]:
        """Return the number of a file's first record and the number after its last."""
        file = self._paths.index(path)
        end = int(self._ends[file])
        return end - int(self.corpus["files"][file]["records"]), end

    def _frames(self, numbers: Ints) -> tuple[Numbers, Numbers, Numbers]:
        """Return file, first byte and end of the frames of records in ascending order."""
        files = np.searchsorted(self._ends, numbers, side="right")
        starts = self._offsets[numbers].astype(np.int64)
        following = self._offsets[np.minimum(numbers + 1, self.records - 1)].astype(np.int64)
        is_last = numbers + 1 == self._ends[files]
        return files, starts, np.where(is_last, self._sizes[files], following)

    def _read(self, files: Ints, starts: Numbers, sizes: Numbers) -> list[bytes]:
        """Read frames and return their payloads."""
        frames: list[bytes] = []
        offsets, lengths = starts.tolist(), sizes.tolist()
        first_of_file = np.flatnonzero(np.diff(files, prepend=-1)).tolist()
        for begin, end in zip(first_of_file, [*first_of_file[1:], len(files)], strict=True):
            # pread, because a memory map of a file that shrinks kills the process.
            descriptor = os.open(
                self._paths[files[begin]], os.O_RDONLY | getattr(os, "O_BINARY", 0)
            )
            try:
                frames += map(os.pread, repeat(descriptor), lengths[begin:end], offsets[begin:end])
            finally:
                os.close(descriptor)
        payloads = read_payloads(frames)
        if payloads is not None:
            return payloads
        try:  # one by one, so that the error names the record
            return [
                read_payload(frame, 0, self._paths[file], base=start)
                for frame, file, start in zip(frames, files, offsets, strict=True)
            ]
        except DataError as error:
            remedy = self._remedy if _is_copy(self.folder) else error.remedy
            raise DataError(error.where, error.problem, remedy) from None

    def _impossible(self, record: int, outside: Outside) -> DataError:
        file = int(np.searchsorted(self._ends, record, side="right"))
        first, _ = self.numbers_of(self._paths[file])
        return DataError(
            f"{self._paths[file]} (record {record - first}, counted from 0)",
            f"{outside.column} has {outside.value}, which is outside 0 to {outside.limit}",
            "make the records again, with the vocabulary in their folder",
        )

    def _map_offsets(self) -> npt.NDArray[np.uint64]:
        path = self.folder / OFFSETS
        size = path.stat().st_size if path.exists() else 0
        if size != 8 * self.records or self._ends[-1] != self.records:
            raise DataError(
                f"{path} ({size} bytes)",
                f"does not hold the offsets of the {self.records} records that corpus.json counts",
                self._remedy,
            )
        return np.memmap(path, "<u8", "r")

    def _check_files(self) -> None:
        """Raise DataError for a file that is absent or not as corpus.json says.

        Record files are compared by their sizes, the tokenizer's files by their checksums.
        """
        for other in self.corpus.get("beside", []):
            path = self.folder / other["name"]
            if path.name == OFFSETS:
                continue
            checksum = file_crc32c(path) if path.exists() else None
            if checksum != other["crc32c"]:
                raise DataError(
                    f"{path} ({'missing' if checksum is None else f'checksum {checksum}'})",
                    f"corpus.json says checksum {other['crc32c']}",
                    "bring back the file that the records were made with, or "
                    f"{self._remedy} if it was changed on purpose",
                )
        for path, size in zip(self._paths, self._sizes, strict=True):
            actual = path.stat().st_size if path.exists() else None
            if actual != size:
                raise DataError(
                    f"{path} ({'missing' if actual is None else f'{actual} bytes'})",
                    f"corpus.json says {size} bytes",
                    f"bring the file back or {self._remedy}",
                )
