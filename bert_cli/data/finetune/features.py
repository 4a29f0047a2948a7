"""Tokenized examples of a task in flat arrays, and padded batches of them.

Shapes: n examples, T tokens of all examples, B examples of a batch, S sequence length.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bert_cli.arrays import Array, Bools, Ints8, Ints32, Ints64
from bert_cli.data.io.arrays import read_arrays, write_arrays
from bert_cli.data.records.formats import Batch
from bert_cli.data.records.sentence_pairs import truncated_lengths
from bert_cli.data.tokens.tokenizer import TextTokenizer
from bert_cli.errors import DataError, logger
from bert_cli.files import JSONObject, atomic_file, report_failure

LENGTHS = (32, 64, 96, 128, 192, 256, 320, 384, 448)  # more lengths would take longer to trace
# It is a part of the key, so files of another format are not found, and not read.
CACHE_FORMAT = 4  # increase it when features are built differently
ENCODED_AT_ONCE = 5_000  # texts; the results of the library take about 100 bytes a token

Arrays = Mapping[str, Array]


@dataclass(frozen=True)
class Features:
    """Tokenized examples in flat arrays."""

    tokens: Ints32  # [T] ids of all examples, with special tokens
    segments: Ints8  # [T] 0 in the first text, 1 in the second
    ends: Ints64  # [n] end of each example
    labels: Arrays = field(default_factory=dict)  # columns [n]
    position_labels: Arrays = field(default_factory=dict)  # columns [T, ...]; 0 in padding
    origin: str = ""  # the fingerprint, if columns are outputs of a model
    owner: Ints64 | None = None
    """The number of the text of each example [n], if texts are read in windows."""

    def __len__(self) -> int:
        """Return the number of examples n."""
        return len(self.ends)

    @property
    def starts(self) -> Ints64:
        """Return the start of each example [n]."""
        return np.append(0, self.ends[:-1]).astype(np.int64)

    @property
    def lengths(self) -> Ints64:
        """Return the number of tokens of each example [n]."""
        return self.ends - self.starts

    @property
    def fingerprint(self) -> str:
        """Return `origin`, or a digest of all arrays; the last bits of a model's outputs depend on the machine."""
        if self.origin:
            return self.origin
        digest = hashlib.sha256()
        for name, column in sorted(self.arrays().items()):
            digest.update(name.encode() + np.ascontiguousarray(column).tobytes())
        return digest.hexdigest()[:32]

    def arrays(self) -> dict[str, Array]:
        """Return all arrays by name, for a cache or a fingerprint."""
        arrays: dict[str, Array] = {n: getattr(self, n) for n in ("tokens", "segments", "ends")}
        for group in ("labels", "position_labels"):
            arrays |= {f"{group}.{name}": row for name, row in getattr(self, group).items()}
        if self.owner is not None:
            return arrays | {"owner": self.owner}
        return arrays

    @staticmethod
    def of(arrays: Arrays) -> "Features":
        """Return the features that `arrays` hold; arrays with unknown names are ignored."""
        labels, position_labels = (
            {name.removeprefix(group): arrays[name] for name in arrays if name.startswith(group)}
            for group in ("labels.", "position_labels.")
        )
        plain = arrays["tokens"], arrays["segments"], arrays["ends"]
        return Features(*plain, labels, position_labels, owner=arrays.get("owner"))

    def followed_by(self, following: "Features") -> "Features":
        """Return these examples, then more that have the same columns."""
        others = following.arrays()
        joined = {n: np.concatenate([column, others[n]]) for n, column in self.arrays().items()}
        joined["ends"][len(self) :] += len(self.tokens)
        return Features.of(joined)

    def by_text(self, values: Array) -> Array:
        """Return the mean of `values` [n, L] over the windows of each text; without windows the values."""
        if self.owner is None:
            return values
        first = np.flatnonzero(np.diff(self.owner, prepend=-1))
        windows = np.diff(first, append=len(self.owner))
        # The windows of a text are consecutive, so each text is a range of rows.
        return np.add.reduceat(values, first) / windows[:, None].astype(values.dtype)

    def put(self, outputs: Array, numbers: Ints64, values: Array) -> None:
        """Put values of these examples into `outputs` [n, L], or values of their positions into [T, L]."""
        if values.ndim == outputs.ndim:
            outputs[numbers] = values
        else:
            inside = np.arange(values.shape[1]) < self.lengths[numbers, None]
            index = self.starts[numbers, None] + np.arange(values.shape[1])
            outputs[index[inside]] = values[inside]

    def take(self, numbers: Ints64) -> "Features":
        """Return the examples of these numbers, in this order, without columns by position."""
        lengths = self.lengths[numbers]
        index = runs(self.starts[numbers], lengths)
        labels = {name: column[numbers] for name, column in self.labels.items()}
        owner = self.owner
        if owner is not None:
            owner = np.unique(owner[numbers], return_inverse=True)[1]
        tokens = self.tokens[index]
        return Features(tokens, self.segments[index], lengths.cumsum(), labels, owner=owner)

    def of_texts(self, texts: Bools) -> "Features":
        """Return the examples of a mask of texts [n], which have one or, in windows, several."""
        # A text in windows has a row for each window.
        if self.owner is not None:
            texts = texts[self.owner]
        return self.take(np.flatnonzero(texts))

    def batch(self, numbers: Ints64, sequence_length: int) -> Batch:
        """Return the examples of these numbers [B], padded: columns [B, S] and [B]."""
        inside = np.arange(sequence_length) < self.lengths[numbers, None]
        index = (self.starts[numbers, None] + np.arange(sequence_length))[inside]
        columns: Batch = {}
        flat: dict[str, Array] = {"input_ids": self.tokens, "segment_ids": self.segments}
        flat |= self.position_labels
        for name, column in flat.items():
            # What the engines take: segments are int8 here.
            dtype = np.float32 if column.dtype.kind == "f" else np.int32
            columns[name] = np.zeros((*inside.shape, *column.shape[1:]), dtype)
            columns[name][inside] = column[index]
        columns["input_mask"] = inside.astype(np.int32)
        return columns | {name: column[numbers] for name, column in self.labels.items()}


def runs(starts: Ints64, lengths: Ints64) -> Ints64:
    """Return start, start + 1, ... of each run, one run after another."""
    before = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) + np.repeat(starts - before, lengths)


def window_spans(lengths: Ints64, room: Ints64 | int, stride: int) -> tuple[Ints64, Ints64, Ints64]:
    """Return the text, the first token and the number of tokens of each window of texts.

    A window has `room` tokens of its text, the last one perhaps fewer; they start `stride` tokens apart.
    """
    parts = 1 + -(-np.maximum(0, lengths - room) // stride)
    owner = np.repeat(np.arange(len(lengths)), parts)
    first = runs(np.zeros(len(parts), np.int64), parts) * stride
    rooms = np.broadcast_to(room, lengths.shape)[owner]
    return owner, first, np.minimum(rooms, lengths[owner] - first)


def most_central(owner: Ints64, first: Ints64, length: Ints64) -> Bools:
    """Return for each token of windows whether its window has the most context around it; ties go to the first window.

    Context is measured as in Google's code of SQuAD: the smaller number of tokens left and right of the token, plus a
    hundredth of the window's length.
    """
    best = np.ones(int(length.sum()), np.bool_)
    ends = length.cumsum()
    begin = 0
    for windows in np.bincount(owner).tolist():
        rows = slice(begin, begin + windows)
        begin += windows
        if windows > 1:
            spans = list(zip(ends[rows] - length[rows], first[rows], length[rows], strict=True))
            values = np.full((windows, spans[-1][1] + spans[-1][2]), -1, np.int64)
            for value, (_, start, size) in zip(values, spans, strict=True):
                left = np.arange(size)
                value[start : start + size] = 100 * np.minimum(left, left[::-1]) + size
            winner = values.argmax(axis=0)  # the earlier window at ties
            for window, (offset, start, size) in enumerate(spans):
                best[offset : offset + size] = winner[start : start + size] == window
    return best


def padded_length(longest: int, limit: int) -> int:
    """Return the sequence length of a batch whose longest example has so many tokens; at most `limit`."""
    return next((length for length in LENGTHS if longest <= length < limit), limit)


def by_length(features: Features, micro_batch_size: int) -> list[Ints64]:
    """Return the numbers of all examples in batches of similar length, the longest first."""
    # The longest first, so that a batch that does not fit into memory fails at once.
    order = np.argsort(-features.lengths, kind="stable")
    return [order[s : s + micro_batch_size] for s in range(0, len(order), micro_batch_size)]


def outputs_of(
    features: Features,
    batches: Iterable[Ints64],
    predict: Callable[[Batch], Sequence[Any]],
    shape: tuple[int, int] | None = None,
) -> Iterator[tuple[Ints64, Batch, list[Array]]]:
    """Yield the numbers of the examples of batches, their columns and what `predict` returns for these.

    A function that is traced for each shape has few: with `shape`, batches have so many examples, their own again, and
    one of the `LENGTHS` of at most so many positions.
    """
    for numbers in batches:
        rows = numbers
        length = int(features.lengths[numbers].max())
        if shape is not None:
            # The examples of a last batch are repeated, and the outputs of the repetitions dropped.
            rows = np.resize(numbers, shape[0])
            length = padded_length(length, shape[1])
        columns = features.batch(rows, length)
        outputs = [np.asarray(values)[: len(numbers)] for values in predict(columns)]
        yield numbers, {name: column[: len(numbers)] for name, column in columns.items()}, outputs


class Pieces(NamedTuple):
    """Tokens of several texts, one text after another; offsets [tokens, 2] are characters in the text."""

    ids: Ints32
    starts: Ints64
    lengths: Ints64
    offsets: Ints32

    def part(self, text: Ints64, first: Ints64, length: Ints64) -> "Pieces":
        """Return as many tokens of these texts, from their first token on."""
        return self._replace(starts=self.starts[text] + first, lengths=length)


def encode(tokenizer: TextTokenizer, texts: Sequence[str], *, with_offsets: bool = False) -> Pieces:
    """Encode texts on all cores, some thousands at once, as the library's results are large."""
    library = tokenizer.library
    encode = library.encode_batch_fast
    if with_offsets:
        encode = library.encode_batch
    ids = [np.zeros(0, np.int32)]
    lengths = []
    offsets = [np.zeros((0, 2), np.int32)]
    for begin in range(0, len(texts), ENCODED_AT_ONCE):
        batch = list(texts[begin : begin + ENCODED_AT_ONCE])
        for text, encoding in zip(batch, encode(batch, add_special_tokens=False), strict=True):
            ids.append(np.array(encoding.ids, np.int32))
            lengths.append(len(encoding.ids))
            if with_offsets:
                spans = np.array(encoding.offsets, np.int32).reshape(-1, 2)
                # The library counts the space before a word to a piece of Unigram, but not of others.
                has_space = [text[start:stop][:1].isspace() for start, stop in encoding.offsets]
                spans[:, 0] += np.array(has_space, np.int32)  # the dtype of an empty list is float
                offsets.append(spans)
    counts = np.array(lengths, np.int64)
    return Pieces(np.concatenate(ids), counts.cumsum() - counts, counts, np.concatenate(offsets))


def framed(tokenizer: TextTokenizer, first: Pieces, second: Pieces, is_pair: Bools) -> Features:
    """Return [CLS] first [SEP] of each part of a text, and second [SEP] in a pair [n]."""
    sizes = np.stack([first.lengths + 2, (second.lengths + 1) * is_pair], axis=1)
    ends = sizes.sum(1).cumsum()
    starts = ends - sizes.sum(1)
    segments = np.repeat(np.tile(np.array([0, 1], np.int8), len(ends)), sizes.ravel())
    tokens = np.full(len(segments), tokenizer.special.sep, np.int32)
    tokens[starts] = tokenizer.special.cls
    for begin, part in ((starts + 1, first), (starts + sizes[:, 0], second)):
        tokens[runs(begin, part.lengths)] = part.ids[runs(part.starts, part.lengths)]
    return Features(tokens, segments, ends)


def encode_texts(
    tokenizer: TextTokenizer,
    first: Sequence[str],
    second: Sequence[str] | None,
    labels: Arrays,
    *,
    max_seq_length: int,
    doc_stride: int | None = None,
) -> tuple[Features, Bools]:
    """Return [CLS] first [SEP], or [CLS] first [SEP] second [SEP], and a mask [n] of truncated texts.

    A second text without tokens adds no [SEP], as in Google's `run_classifier.py`. In a pair that is too long, the
    longer text loses its last piece until both fit, as in Google's `_truncate_seq_pair`.

    With `doc_stride`, a text that is too long becomes several examples, its `window_spans`; of a pair, the second text
    does, and the first is truncated where it leaves no `doc_stride` tokens.
    """
    left = encode(tokenizer, first)
    if second is None:
        second = [""] * len(first)
    right = encode(tokenizer, second)
    is_pair = right.lengths > 0
    # [CLS] and [SEP], and of a pair another [SEP].
    room = max_seq_length - 2 - is_pair
    if doc_stride is None:
        kept = truncated_lengths(left.lengths, right.lengths, room)
        is_cut = kept[0] + kept[1] < left.lengths + right.lengths
        left = left._replace(lengths=kept[0])
        right = right._replace(lengths=kept[1])
        return replace(framed(tokenizer, left, right, is_pair), labels=labels), is_cut
    whole = np.minimum(left.lengths, room - np.minimum(right.lengths, doc_stride))
    is_cut = is_pair & (whole < left.lengths)
    lengths = np.where(is_pair, right.lengths, left.lengths)
    owner, start, length = window_spans(lengths, room - whole * is_pair, doc_stride)
    pair = is_pair[owner]
    left = left.part(owner, np.where(pair, 0, start), np.where(pair, whole[owner], length))
    right = right.part(owner, start * pair, length * pair)
    labels = {name: labels[name][owner] for name in labels}
    return replace(framed(tokenizer, left, right, pair), labels=labels, owner=owner), is_cut


def cached(
    folder: Path | None, made_from: JSONObject, build: Callable[[], Arrays]
) -> dict[str, Array]:
    """Return the arrays of `build`, from the cache if they were built from the same values before.

    `made_from` has everything the arrays depend on. Raises DataError when the folder cannot be written.
    """
    if folder is None:
        return dict(build())
    folder = folder.expanduser()
    key = json.dumps({"format": CACHE_FORMAT, **made_from}, sort_keys=True)
    path = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.npz"
    if path.is_file():
        try:
            return read_arrays(path)
        except DataError:
            logger.info(f"{path}: is damaged; it is built again")
    built = dict(build())
    size = sum(array.nbytes for array in built.values())
    with report_failure(f"cache_dir ({folder})", "written", "use another --cache-dir"):
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(path, size) as partial, partial.open("wb") as output:
            write_arrays(output, built)
    return built


def texts_hash(*columns: Sequence[str]) -> str:
    """Return the SHA-256 of columns of texts; it differs if texts are cut elsewhere."""
    digest = hashlib.sha256()
    for column in columns:
        for text in column:
            data = text.encode("utf-8", "surrogatepass")
            # With its length, or "ab", "c" would have the digest of "a", "bc".
            digest.update(len(data).to_bytes(8, "little") + data)
        digest.update(b"\xff" * 8)
    return digest.hexdigest()
