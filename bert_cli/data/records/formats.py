"""The record formats: the only file that knows which features a record has.

A record is a `tf.train.Example` in a TFRecord frame (`tfrecord.py`). A `static` record has the seven features of
fixed length that BERT's own scripts write. A `dynamic` record has the unmasked pair once, as one string of
little-endian token ids. A packed record holds several sequences: a static one the columns of a packed batch, a
dynamic one the tokens of all sequences in a row. Only reading static records loads TensorFlow.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bert_cli.data.records.example_proto import (
    Feature,
    example_bytes,
    parse_features,
    parse_varints,
    serialize_examples,
    split_bytes,
    varint_rows,
)
from bert_cli.data.records.tfrecord import FRAME_BYTES
from bert_cli.errors import DataError
from bert_cli.processes import quiet_imports

# Features of a static record, in the order in which they are written, and the type of their lists.
STATIC_FEATURES = {
    "input_ids": "int64",
    "input_mask": "int64",
    "masked_lm_ids": "int64",
    "masked_lm_positions": "int64",
    "masked_lm_weights": "float",
    "next_sentence_labels": "int64",
    "segment_ids": "int64",
}
PACKED_FEATURES = dict(
    sorted(
        {
            **STATIC_FEATURES,
            "next_sentence_positions": "int64",
            "next_sentence_weights": "float",
            "position_ids": "int64",
        }.items()
    )
)
BLOCK = 1024
"""Records that are read or parsed at once. TensorFlow parses numbers as int64: 3 MB at 128 positions."""
LARGEST = 2**31 - 1
"""Numbers that do not fit into int32 are read as this one, which no limit of values allows."""

Ints = npt.NDArray[np.integer[Any]]
_loading = Lock()


class DynamicRecords(NamedTuple):
    """Unmasked pairs of a block of B records, their tokens in one flat array."""

    tokens: npt.NDArray[np.int32]
    """Ids of all records in a row, with [CLS] and [SEP], without padding."""
    lengths: npt.NDArray[np.int32]
    """[B] tokens of each record."""
    first_lengths: npt.NDArray[np.int32]
    """[B] tokens of segment A, with [CLS] and its [SEP]."""
    next_sentence_labels: npt.NDArray[np.int32]
    """[B] 1 where segment B is a random next, 0 where it is the actual one."""


class DynamicPacks(NamedTuple):
    """Unmasked sequences of a block of B packs, pack by pack."""

    sequences: DynamicRecords
    """All R sequences."""
    numbers: npt.NDArray[np.int64]
    """[R] number of each sequence in the corpus before packing; its mask is drawn by it."""
    counts: npt.NDArray[np.int32]
    """[B] sequences of each pack, at least one."""


def tensorflow() -> Any:
    """Return TensorFlow, loaded without its messages on first use; also from several threads."""
    with _loading:
        if "tensorflow" not in sys.modules:
            with quiet_imports():
                import tensorflow
        import tensorflow

        return tensorflow


def token_bytes(vocab_size: int) -> int:
    """Return the bytes of a token id in a dynamic record: 2 if all ids fit, else 4."""
    return 2 if vocab_size <= 65536 else 4


# --- writing


def static_payloads(block: Mapping[str, npt.NDArray[Any]]) -> Iterator[bytes]:
    """Serialize masked examples [B], the inverse of `parse_static`; packed ones have `position_ids`."""
    rows = len(block["input_ids"])
    features: list[Feature] = []
    for name, kind in (PACKED_FEATURES if "position_ids" in block else STATIC_FEATURES).items():
        column = block[name].reshape(rows, -1)
        if kind == "float":
            features.append((name, kind, np.ascontiguousarray(column, "<f4").view(np.uint8)))
        else:
            features.append((name, kind, varint_rows(column)))
    return serialize_examples(features, rows)


def dynamic_payloads(records: DynamicRecords, token_bytes: int = 2) -> Iterator[bytes]:
    """Serialize unmasked pairs, the inverse of `parse_dynamic`."""
    features: list[Feature] = [
        ("first_length", "int64", varint_rows(records.first_lengths[:, None])),
        ("next_sentence_labels", "int64", varint_rows(records.next_sentence_labels[:, None])),
        (
            "tokens",
            "bytes",
            _token_strings(records.tokens, np.cumsum(records.lengths), token_bytes),
        ),
    ]
    return serialize_examples(features, len(records.lengths))


def pack_payloads(packs: DynamicPacks, token_bytes: int = 2) -> Iterator[bytes]:
    """Serialize unmasked packs, the inverse of `parse_packs`."""
    sequences, counts = packs.sequences, packs.counts
    is_sequence_BC = np.arange(int(counts.max(initial=1))) < counts[:, None]
    lists: dict[str, Ints] = {
        "first_lengths": sequences.first_lengths,
        "lengths": sequences.lengths,
        "next_sentence_labels": sequences.next_sentence_labels,
        "numbers": packs.numbers,
    }
    features: list[Feature] = []
    for name, numbers in lists.items():
        padded_BC = np.zeros(is_sequence_BC.shape, np.int64)
        padded_BC[is_sequence_BC] = numbers
        features.append((name, "int64", varint_rows(padded_BC, counts)))
    ends = np.cumsum(sequences.lengths, dtype=np.int64)[np.cumsum(counts) - 1]
    features.append(("tokens", "bytes", _token_strings(sequences.tokens, ends, token_bytes)))
    return serialize_examples(features, len(counts))


def _token_strings(tokens: Ints, ends: Ints, token_bytes: int) -> list[bytes]:
    in_bytes = ends.astype(np.int64) * token_bytes
    return split_bytes(tokens.astype(f"<u{token_bytes}").tobytes(), in_bytes.tolist())


# --- lengths without reading


def dynamic_lengths(frame_bytes: Ints, longest: int, token_bytes: int = 2) -> npt.NDArray[np.int32]:
    """Return the tokens of dynamic records [n], from the sizes of their frames.

    Besides the tokens only `first_length` varies, by one byte from 128 tokens on. A token has two bytes or more,
    so every size belongs to one length. DataError for a size that no record of up to `longest` tokens has, and for
    one of two lengths, which takes a first segment of 16,384 tokens.
    """
    table = _length_by_size(longest, token_bytes)
    inside = (frame_bytes > 0) & (frame_bytes < len(table))
    lengths: npt.NDArray[np.int32] = table[np.where(inside, frame_bytes, 0)]
    if len(lengths) and int(lengths.min()) < 1:
        size = frame_bytes[int(np.argmin(lengths))]
        raise DataError(
            f"records (a frame of {size} bytes)",
            f"is not that of one dynamic record of up to {longest} tokens",
            "run `bert index`, and if that does not help make the records again",
        )
    return lengths


@lru_cache(maxsize=4)
def _length_by_size(longest: int, token_bytes: int) -> npt.NDArray[np.int32]:
    """Return the tokens of a record by the size of its frame; 0 for no record, -1 for two lengths."""
    lengths: dict[int, int] = {}
    for width in (1, 2, 3):  # bytes of first_length, which is at most the length
        for length in range(1 << 7 * (width - 1), longest + 1):
            size = FRAME_BYTES + example_bytes(
                (
                    ("first_length", "int64", width),
                    ("next_sentence_labels", "int64", 1),
                    ("tokens", "bytes", length * token_bytes),
                )
            )
            lengths[size] = length if lengths.get(size, length) == length else -1
    table = np.zeros(max(lengths) + 1, np.int32)
    table[list(lengths)] = list(lengths.values())
    return table


# --- reading


def _dtype(name: str) -> type[np.float32 | np.int32]:
    return np.float32 if name.endswith("weights") else np.int32


def static_lengths(
    sequence_length: int, predictions: int, sequences: int | None = None
) -> dict[str, int]:
    """Return how many numbers each feature of a static record has, or of a pack of `sequences`."""
    kinds = STATIC_FEATURES if sequences is None else PACKED_FEATURES
    lengths = {"masked_lm": predictions, "next_sentence": sequences or 1}
    return {name: lengths.get(name.rpartition("_")[0], sequence_length) for name in kinds}


def parse_static(
    payloads: Sequence[bytes],
    sequence_length: int,
    predictions: int,
    sequences: int | None = None,
) -> dict[str, npt.NDArray[Any]]:
    """Parse static records of any tool into columns [B, S] and [B, P], next_sentence_labels [B].

    Packs of at most `sequences` have next_sentence_* [B, C], and `predictions` are those of a pack. Columns are
    int32, weights float32. DataError when a feature is absent or has another length.
    """
    lengths = static_lengths(sequence_length, predictions, sequences)
    parse = _parser(tuple(lengths.items()))
    columns: dict[str, npt.NDArray[Any]] = {
        name: np.empty((len(payloads), length), _dtype(name)) for name, length in lengths.items()
    }
    for start in range(0, len(payloads), BLOCK):
        block = slice(start, start + BLOCK)
        try:
            parsed = parse(np.array(payloads[block], object))
        except tensorflow().errors.InvalidArgumentError as error:
            of_packs = "" if sequences is None else f", {sequences} sequences"
            lines = str(error.message).splitlines()
            reason = next((line for line in lines if "Key: " in line), lines[0])
            raise DataError(
                f"records (S {sequence_length}, P {predictions}{of_packs})",
                f"not static records of these lengths ({reason[:300]})",
                "give the lengths they were made with",
            ) from error
        for name, values in parsed.items():
            # As unsigned numbers, negative ones are larger than LARGEST: one pass finds both.
            if values.dtype == np.int64 and values.view(np.uint64).max() > LARGEST:
                values = values.clip(-LARGEST, LARGEST)
            columns[name][block] = values
    if sequences is None:
        columns["next_sentence_labels"] = columns["next_sentence_labels"][:, 0]
    return columns


@lru_cache(maxsize=4)
def _parser(lengths: tuple[tuple[str, int], ...]) -> Callable[[Any], dict[str, Any]]:
    """Return a function that parses a block of records with features of these lengths.

    It is a graph with its own session, because an eager operation would initialize all devices of the process, and a
    run sets them later; data steps must not take GPUs.
    """
    tf = tensorflow()
    with tf.Graph().as_default():
        payloads = tf.compat.v1.placeholder(tf.string, [None])
        features = {
            name: tf.io.FixedLenFeature(
                [length], tf.int64 if _dtype(name) is np.int32 else tf.float32
            )
            for name, length in lengths
        }
        parsed = tf.io.parse_example(payloads, features)
        config = tf.compat.v1.ConfigProto(device_count={"GPU": 0})
        parse: Callable[[Any], dict[str, Any]] = tf.compat.v1.Session(config=config).make_callable(
            parsed, [payloads]
        )
    return parse


def parse_dynamic(payloads: Sequence[bytes], token_bytes: int = 2) -> DynamicRecords:
    """Parse dynamic records; DataError when one is of another kind."""
    tokens: list[bytes] = []
    first_lengths: list[int] = []
    labels: list[int] = []
    for payload in payloads:
        try:
            features = parse_features(payload)
            tokens.append(features[b"tokens"])
            first_lengths.append(parse_varints(features[b"first_length"])[0])
            labels.append(parse_varints(features[b"next_sentence_labels"])[0])
        except (KeyError, IndexError, ValueError) as error:
            raise DataError(
                "records",
                "not dynamic ones (tokens, first_length, next_sentence_labels)",
                "corpus.json names another format than the files have, run `bert index`",
            ) from error
    lengths = list(map(len, tokens))
    if any(length % token_bytes for length in lengths):
        raise DataError(
            "records", f"tokens are not of {token_bytes} bytes each", "run `bert index`"
        )
    return _records(tokens, [n // token_bytes for n in lengths], first_lengths, labels, token_bytes)


def parse_packs(payloads: Sequence[bytes], token_bytes: int = 2) -> DynamicPacks:
    """Parse packed dynamic records; DataError when one is of another kind."""
    tokens: list[bytes] = []
    lists: dict[bytes, list[int]] = {
        name: [] for name in (b"first_lengths", b"lengths", b"next_sentence_labels", b"numbers")
    }
    counts: list[int] = []
    for payload in payloads:
        try:
            features = parse_features(payload)
            tokens.append(features[b"tokens"])
            of_pack = {name: parse_varints(features[name]) for name in lists}
        except (KeyError, IndexError, ValueError) as error:
            raise _not_packs() from error
        counts.append(len(of_pack[b"lengths"]))
        if {len(numbers) for numbers in of_pack.values()} != {counts[-1]} or not counts[-1]:
            raise _not_packs()
        has_its_tokens = sum(of_pack[b"lengths"]) * token_bytes == len(tokens[-1])
        if not has_its_tokens or max(of_pack[b"numbers"]) >> 63:
            raise _not_packs()
        for name, numbers in of_pack.items():
            lists[name] += numbers
    sequences = _records(
        tokens,
        lists[b"lengths"],
        lists[b"first_lengths"],
        lists[b"next_sentence_labels"],
        token_bytes,
    )
    return DynamicPacks(
        sequences, np.array(lists[b"numbers"], np.int64), np.array(counts, np.int32)
    )


def _not_packs() -> DataError:
    return DataError(
        "records",
        "not packed dynamic ones (first_lengths, lengths, next_sentence_labels, numbers, tokens)",
        "corpus.json names another format than the files have, run `bert pack` again",
    )


def _records(
    tokens: list[bytes], lengths: list[int], first: list[int], labels: list[int], token_bytes: int
) -> DynamicRecords:
    return DynamicRecords(
        np.frombuffer(b"".join(tokens), f"<u{token_bytes}").astype(np.int32),
        np.array(lengths, np.int32),
        *(
            np.array([min(number, LARGEST) for number in numbers], np.int32)
            for numbers in (first, labels)
        ),
    )
