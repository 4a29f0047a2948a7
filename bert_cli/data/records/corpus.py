"""A folder of records: corpus.json, which describes it, and its records by number.

corpus.json may have been written by another tool, so it is validated before a file is opened by its names.
corpus.offsets, memory-mapped, has the byte where each record starts, so opening a corpus takes milliseconds.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, Field

from bert_cli.arrays import Array, Bools, Ints, Ints64, UInts16
from bert_cli.data.io.manifest import DONE, MANIFEST, read_manifest
from bert_cli.data.records import formats
from bert_cli.data.records.formats import Batch, DynamicRecords
from bert_cli.data.records.tfrecord import read_payloads
from bert_cli.data.tokens.tokenizer import (
    VOCAB_FILE,
    SpecialIds,
    has_tokenizer,
    read_vocabulary,
    vocabulary_path,
)
from bert_cli.errors import DataError
from bert_cli.files import InnerPath, JSONObject, OwnFormat, file_crc32c, read_json

CORPUS = "corpus.json"
OFFSETS = "corpus.offsets"
LENGTHS_BLOCK = 1 << 20  # records whose lengths are computed at once, in about 40 MB

Count = Annotated[int, Field(ge=0)]
Positions = Annotated[int, Field(ge=1, le=65535)]


class _OtherFile(BaseModel, strict=True, extra="allow"):
    name: InnerPath
    bytes: Count
    crc32c: str


class _RecordFile(_OtherFile):
    records: Count


class Corpus(BaseModel, strict=True, extra="allow"):
    """The fields of corpus.json that the tool reads."""

    format: OwnFormat = None
    masking: Literal["static", "dynamic"]
    sequence_length: Positions
    mask_tokens: Positions
    masked_lm_prob: float | None
    whole_word_masking: bool | None
    vocab_size: Annotated[int, Field(ge=1, lt=2**31)]
    vocab_sha256: str
    token_bytes: Literal[2, 4]
    special_ids: SpecialIds
    tokenizer: JSONObject
    files: list[_RecordFile]
    other_files: list[_OtherFile] = []
    records: Count
    fingerprint: str
    next_sentence: bool = True


def read_corpus(folder: Path) -> JSONObject:
    """Return the validated corpus.json of a folder. Raises DataError where it is absent or invalid."""
    path = folder / CORPUS
    refuse_unfinished(folder)
    if not path.exists():
        remedy = "use a complete folder of records, from `bert tokenize` or `bert index`"
        if any(folder.glob("step_*/")):
            remedy = f"{folder} is a run, see `bert runs {folder.parent}`; {remedy}"
        raise DataError(str(path), "does not exist", remedy)
    vocab = Path(VOCAB_FILE)
    if has_tokenizer(folder):
        vocab = vocabulary_path(folder)
    again = f"`bert index {folder} --vocab {vocab}` for other records"
    remedy = f"move it away and run the same `bert tokenize` again, or {again}"
    return read_json(path, Corpus, DataError, remedy).model_dump(exclude_unset=True)


def refuse_unfinished(folder: Path) -> None:
    """Raise DataError while a step is writing the folder: an older corpus.json does not describe it."""
    if (folder / DONE).exists() and not (folder / MANIFEST).exists():
        problem = "the step that writes it is not complete"
        raise DataError(f"folder ({folder})", problem, "run its command again to continue")


def number_of_copies(folder: Path, corpus: JSONObject) -> int | None:
    """Return the duplication factor of static records; None where it is not recorded."""
    if corpus["masking"] != "static":
        return None
    copies = read_manifest(folder).get("settings", {}).get("duplication_factor")
    if not isinstance(copies, int):
        return None
    return copies


class RecordFiles:
    """The records of a folder by their numbers."""

    def __init__(self, folder: Path, corpus: JSONObject | None = None) -> None:
        """Map the offsets. Raises DataError if they or the files do not match corpus.json."""
        corpus = corpus or read_corpus(folder)
        self.folder = folder
        self.corpus = corpus
        self.records: int = corpus["records"]
        self._paths = [folder / file["name"] for file in corpus["files"]]
        self._sizes = np.array([file["bytes"] for file in corpus["files"]], np.int64)
        self._ends = np.cumsum([file["records"] for file in corpus["files"]])
        self._remedy = f"run `bert index {folder}`"
        self._check_files()
        # 8 bytes a record: a thousand million records stay on the disk.
        self._offsets = np.memmap(folder / OFFSETS, "<u8", "r")

    def payloads(self, records: Ints) -> list[bytes]:
        """Return the payloads of records [n]; each file is read once, from front to back."""
        files, starts, stops = self._frames(records)
        sizes = np.maximum(stops - starts, 0)
        frames = [b""] * len(records)
        for file in np.unique(files).tolist():
            rows = np.flatnonzero(files == file)
            # pread, because a memory map of a file that shrinks kills the process.
            with self._paths[file].open("rb", buffering=0) as opened:
                # From front to back: disks and networks read ahead.
                for row in rows[np.argsort(starts[rows])].tolist():
                    frames[row] = os.pread(opened.fileno(), sizes[row], starts[row])
        return read_payloads(
            frames,
            lambda row: f"{self._paths[files[row]]} (byte {starts[row]})",
            f"{self._remedy}, or make the file again",
        )

    def static(self, records: Ints) -> Batch:
        """Return all columns of static records [n]. Raises DataError for an invalid value."""
        corpus = self.corpus
        length = corpus["sequence_length"]
        columns = formats.parse_static(
            self.payloads(records),
            length,
            corpus["mask_tokens"],
            lambda row: self._name(int(records[row])),
        )
        limits = dict.fromkeys(formats.FIELDS, 1) | {"masked_lm_positions": length - 1}
        limits |= dict.fromkeys(("input_ids", "masked_lm_ids"), corpus["vocab_size"] - 1)
        for name, values in columns.items():
            self._check(name, values, limits[name], records)
        for problem, is_wrong in formats.static_mistakes(columns):
            wrong = np.flatnonzero(is_wrong)
            if len(wrong):
                remedy = "make the records again, with one prediction for each masked token"
                raise DataError(self._name(int(records[wrong[0]])), problem, remedy)
        weight = np.float32(corpus.get("next_sentence", True))
        return {"next_sentence_weights": np.full(len(records), weight), **columns}

    def dynamic(self, records: Ints) -> DynamicRecords:
        """Return dynamic records [n]. Raises DataError for an invalid value."""
        corpus = self.corpus
        sequences = formats.parse_dynamic(self.payloads(records), corpus["token_bytes"])
        tokens, lengths, first_lengths, labels = sequences
        self._check("tokens", tokens, corpus["vocab_size"] - 1, np.repeat(records, lengths))
        self._check("lengths", lengths, corpus["sequence_length"], records)
        self._check("first_lengths", first_lengths, lengths, records)
        self._check("next_sentence_labels", labels, 1, records)
        return sequences

    def _check(self, column: str, values: Array, limit: int | Ints, records: Ints) -> None:
        """Raise DataError for the first row of a column, of records [row], with a value outside 0 to the limit."""
        wrong = np.argwhere(~((values >= 0) & (values <= limit)))  # NaN is outside, too
        if not len(wrong):
            return
        at = tuple(wrong[0])
        highest = np.broadcast_to(limit, values.shape)[at]
        raise DataError(
            self._name(int(records[at[0]])),
            f"{column} has {values[at].item()}, which is outside 0 to {highest}",
            "make the records again, with the vocabulary in their folder",
        )

    def _name(self, record: int) -> str:
        path = self._paths[int(np.searchsorted(self._ends, record, side="right"))]
        return f"{path} (record {record - self.numbers_of(path)[0]}, counted from 0)"

    def continuations(self) -> Bools:
        """Return whether each token of the vocabulary [V] continues a word."""
        path = vocabulary_path(self.folder)
        return read_vocabulary(path, self.corpus["vocab_sha256"]).is_continuation

    def check_file(self, path: Path) -> int:
        """Check the values of every record of a file, as a run does; return the file's bytes."""
        first, end = self.numbers_of(path)
        is_static = self.corpus["masking"] == "static"
        for start in range(first, end, formats.BLOCK):
            records = np.arange(start, min(start + formats.BLOCK, end))
            if is_static:
                self.static(records)
            else:
                self.dynamic(records)
        return path.stat().st_size

    def lengths(self) -> UInts16:
        """Return the number of tokens of each dynamic record, from the offsets alone."""
        lengths = np.empty(self.records, np.uint16)
        for begin in range(0, self.records, LENGTHS_BLOCK):
            numbers = np.arange(begin, min(begin + LENGTHS_BLOCK, self.records))
            _, starts, stops = self._frames(numbers)
            lengths[numbers] = formats.dynamic_lengths(
                stops - starts, self.corpus["sequence_length"], self.corpus["token_bytes"]
            )
        return lengths

    def numbers_of(self, path: Path) -> tuple[int, int]:
        """Return the number of a file's first record and the number after its last."""
        file = self._paths.index(path)
        end = int(self._ends[file])
        return end - int(self.corpus["files"][file]["records"]), end

    def _frames(self, numbers: Ints) -> tuple[Ints64, Ints64, Ints64]:
        """Return file, first byte and end of the frames of records."""
        files = np.searchsorted(self._ends, numbers, side="right")
        # Damaged offsets lie in the file, too: the checksum of what stands there is wrong.
        limits = self._sizes[files].astype(np.uint64)
        starts, following = (
            np.minimum(self._offsets[np.minimum(row, self.records - 1)], limits).astype(np.int64)
            for row in (numbers, numbers + 1)
        )
        # The next offset is that of another file, so the last record ends with its file.
        is_last = numbers + 1 == self._ends[files]
        return files, starts, np.where(is_last, self._sizes[files], following)

    def _check_files(self) -> None:
        """Compare record files and offsets by their sizes, the tokenizer's files by their checksums."""
        path = self.folder / OFFSETS
        size = path.stat().st_size if path.exists() else 0
        if size != 8 * self.records or self._ends[-1] != self.records:
            problem = f"does not hold the offsets of the {self.records} records of corpus.json"
            raise DataError(f"{path} ({size} bytes)", problem, self._remedy)
        others = self.corpus.get("other_files", [])
        others = [file for file in others if file["name"] != OFFSETS]
        check_checksums(self.folder, others, self._remedy)
        for path, size in zip(self._paths, self._sizes.tolist(), strict=True):
            actual = "missing"
            if path.exists():
                actual = f"{path.stat().st_size} bytes"
            _compare(path, actual, f"{size} bytes", self._remedy)


def check_checksums(folder: Path, files: Iterable[JSONObject], remedy: str) -> None:
    """Compare files with their entries in corpus.json. Raises DataError where one differs."""
    for file in files:
        path = folder / file["name"]
        actual = "missing"
        if path.exists():
            actual = f"checksum {file_crc32c(path)}"
        _compare(path, actual, f"checksum {file['crc32c']}", remedy)


def _compare(path: Path, actual: str, expected: str, remedy: str) -> None:
    if actual != expected:
        remedy = f"restore the file, or {remedy} if it was changed on purpose"
        raise DataError(f"{path} ({actual})", f"corpus.json says {expected}", remedy)
