"""Tokenized examples of a task, and the batch of a step from them.

Examples lie one after another in flat arrays, each as long as it is; a batch is padded to its
longest example, rounded up so that few lengths come up and each is traced once. As with records, the
examples of a step are a function of (seed, step): its permutation is the one of pre-training. What
was built is kept in a cache under a fingerprint of all that it was built from.

Shapes: n examples, T tokens of all of them, M micro-batches of a step, B examples of one, S places.
"""

import hashlib
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bert_cli.data.records.columns import Batch
from bert_cli.data.records.tokenizer import TextTokenizer
from bert_cli.data.stream.permutation import record_at
from bert_cli.data.stream.reader import Batching, Stream
from bert_cli.errors import DataError
from bert_cli.files import atomic_file

LENGTHS = (32, 64, 96, 128, 192, 256, 320, 384, 448)
"""Places of a batch, unless max_seq_length comes first: more would pad less and trace longer."""
FORMAT = 2
"""Of the cache; features that are built otherwise from now on get another number."""
ENCODED_AT_ONCE = 20_000
"""Texts; the library's answers take some 2 kB each."""

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Features:
    """Tokenized examples, each as long as it is: flat arrays and where each example ends."""

    tokens: npt.NDArray[np.int32]
    """[T] ids of all examples, special ones included."""
    segments: npt.NDArray[np.int8]
    """[T] 0 in the first text, 1 in the second."""
    ends: npt.NDArray[np.int64]
    """[n] end of each example."""
    labels: Arrays = field(default_factory=dict)
    """Columns [n]."""
    place_labels: Arrays = field(default_factory=dict)
    """Columns [T]; a padded place has 0."""

    def __len__(self) -> int:
        """Examples n."""
        return len(self.ends)

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """[n] start of each example."""
        return np.append(0, self.ends[:-1]).astype(np.int64)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[n] tokens of each example."""
        return self.ends - self.starts

    @property
    def fingerprint(self) -> str:
        """Of everything in it."""
        digest = hashlib.sha256()
        for name, column in sorted(arrays_of(self).items()):
            digest.update(name.encode() + np.ascontiguousarray(column).tobytes())
        return digest.hexdigest()[:32]

    def batch(self, numbers: npt.NDArray[np.int64], places: int) -> Batch:
        """The examples of these numbers [B], padded to so many places: columns [B, S] and [B]."""
        inside = np.arange(places) < self.lengths[numbers, None]
        # Behind an example's end stands the next one; what is taken there is zeroed.
        where = np.where(inside, self.starts[numbers, None] + np.arange(places), 0)
        by_place: dict[str, npt.NDArray[Any]] = {
            "input_ids": self.tokens,
            "segment_ids": self.segments,
            **self.place_labels,
        }
        columns: Batch = {
            name: np.where(inside, column[where], 0).astype(_column_type(column))
            for name, column in by_place.items()
        }
        columns["input_mask"] = inside.astype(np.int32)
        return columns | {name: column[numbers] for name, column in self.labels.items()}


def _column_type(column: npt.NDArray[Any]) -> type:
    return np.float32 if column.dtype.kind == "f" else np.int32


def padded_length(longest: int, most: int) -> int:
    """Places of a batch whose longest example has so many tokens; at most `most`."""
    return next((length for length in LENGTHS if longest <= length < most), most)


def by_length(features: Features, micro_batch_size: int) -> list[npt.NDArray[np.int64]]:
    """The numbers of all examples cut into batches of like length, the longest first."""
    order = np.argsort(-features.lengths, kind="stable")
    return [order[s : s + micro_batch_size] for s in range(0, len(order), micro_batch_size)]


class FeatureReader(Stream):
    """`reader[step]`: the batch of a step, the same examples however the run is laid out."""

    def __init__(
        self,
        features: Features,
        *,
        seed: int,
        examples_per_step: int,
        micro_batch_size: int,
        sequence_length: int,
        part: int = 0,
        parts: int = 1,
    ) -> None:
        """Of each step's micro-batches give those of part `part` of `parts`.

        Raises ConfigError for a step that is no whole number of micro-batches in each part.
        """
        self._batching = Batching(examples_per_step, micro_batch_size, part, parts)
        self.features, self.seed, self.sequence_length = features, seed, sequence_length
        self.fingerprint = features.fingerprint
        self.epoch_size: int = len(features)

    def __len__(self) -> int:
        """Examples of an epoch."""
        return len(self.features)

    def __getitem__(self, step: int) -> Batch:
        """Return the batch of a step, or this part of it, [M, B, ...].

        It is as long as the longest example of the whole step, so that its length, and the dropout
        with it, does not depend on the part.
        """
        size = len(self.features)
        _, complete = record_at(self._batching.step_indices(step), size, self.seed)
        _, numbers = record_at(self._batching.sample_indices(step), size, self.seed)
        longest = int(self.features.lengths[complete].max())
        rows = self.features.batch(numbers, padded_length(longest, self.sequence_length))
        return self._batching.micro_batches(rows)


def encode_texts(
    tokenizer: TextTokenizer,
    first: Sequence[str],
    second: Sequence[str] | None,
    labels: Arrays,
    *,
    max_seq_length: int,
) -> tuple[Features, int]:
    """[CLS] first [SEP], or [CLS] first [SEP] second [SEP], and how many had to be cut.

    A second text without tokens adds no [SEP], as in Google's `run_classifier.py` and, of one pair, in
    transformers. Special tokens written in a text are plain characters.

    Of a pair that is too long the longer text loses its last piece until both fit, as in Google's
    `_truncate_seq_pair`.
    """
    special = tokenizer.special
    tokens: list[int] = []
    segments: list[npt.NDArray[np.int8]] = []
    ends = np.zeros(len(first), np.int64)
    cut = 0
    for begin in range(0, len(first), ENCODED_AT_ONCE):
        piece = slice(begin, begin + ENCODED_AT_ONCE)
        left = _ids(tokenizer, first[piece])
        right = _ids(tokenizer, second[piece]) if second is not None else [[]] * len(left)
        for number, (a, b) in enumerate(zip(left, right, strict=True), begin):
            keep_a, keep_b = cut_longer(len(a), len(b), max_seq_length - (3 if b else 2))
            cut += keep_a + keep_b < len(a) + len(b)
            before = len(tokens)
            tokens += [special.cls, *a[:keep_a], special.sep]
            border = len(tokens)
            if b:
                tokens += [*b[:keep_b], special.sep]
            ends[number] = len(tokens)
            segments.append(
                np.repeat(np.array([0, 1], np.int8), [border - before, len(tokens) - border])
            )
    flat = np.concatenate([np.zeros(0, np.int8), *segments])
    return Features(np.array(tokens, np.int32), flat, ends, labels), cut


def _ids(tokenizer: TextTokenizer, texts: Sequence[str]) -> list[list[int]]:
    encoded = tokenizer.library.encode_batch_fast(list(texts), add_special_tokens=False)
    return [encoding.ids for encoding in encoded]


def cut_longer(first: int, second: int, room: int) -> tuple[int, int]:
    """How many pieces of two texts stay when the longer one loses its last until they fit.

    Of two that are equally long the second loses.
    """
    over = max(0, first + second - room)
    # The longer one alone, down to the shorter; then both in turn.
    alone = min(over, abs(first - second))
    first, second = (first - alone, second) if first > second else (first, second - alone)
    rest = over - alone
    return first - rest // 2, second - (rest - rest // 2)


def arrays_of(features: Features) -> dict[str, npt.NDArray[Any]]:
    """All arrays of the features by name, for a cache or a fingerprint."""
    named: dict[str, npt.NDArray[Any]] = {
        "tokens": features.tokens,
        "segments": features.segments,
        "ends": features.ends,
    }
    named |= {f"labels.{name}": column for name, column in features.labels.items()}
    return named | {
        f"place_labels.{name}": column for name, column in features.place_labels.items()
    }


def features_of(arrays: Arrays) -> Features:
    """The features whose arrays these are; others among them are left out."""

    def below(prefix: str) -> dict[str, npt.NDArray[Any]]:
        return {
            name.removeprefix(prefix): column
            for name, column in arrays.items()
            if name.startswith(prefix)
        }

    flat = arrays["tokens"], arrays["segments"], arrays["ends"]
    return Features(*flat, below("labels."), below("place_labels."))


def cached(
    folder: Path | None, made_from: Mapping[str, Any], build: Callable[[], Arrays]
) -> tuple[dict[str, npt.NDArray[Any]], bool]:
    """What `build` gives, from the cache when it was built from the same before; whether it was.

    `made_from` holds everything the arrays depend on: hashes of files, the tokenizer's fingerprint,
    settings. Raises DataError when the folder cannot be written.
    """
    if folder is None:
        return dict(build()), False
    folder = folder.expanduser()
    told = json.dumps({"format": FORMAT, **made_from}, sort_keys=True)
    path = folder / f"{hashlib.sha256(told.encode()).hexdigest()[:32]}.npz"
    if path.is_file():
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as found:
                return dict(found), True
        except (OSError, ValueError, EOFError, zipfile.BadZipFile):
            # A disk's damage; it is only a cache.
            print(f"{path}: cannot be read; built again")
    built = dict(build())
    size = sum(array.nbytes for array in built.values())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(path, size) as partial, partial.open("wb") as output:
            np.savez(output, allow_pickle=False, **built)
    except OSError as error:
        raise DataError(
            f"cache_dir ({folder}): cannot be written ({error.strerror}); give another --cache-dir"
        ) from error
    return built, False


def texts_hash(*columns: Sequence[str]) -> str:
    """SHA-256 of columns of texts; other texts, or the same cut elsewhere, give another one."""
    digest = hashlib.sha256()
    for column in columns:
        for text in column:
            data = text.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little") + data)
        digest.update(b"\xff" * 8)
    return digest.hexdigest()


def file_hash(path: Path) -> str:
    """SHA-256 of a file's bytes. DataError when it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check the path") from error
