"""The only file that knows the record formats.

A record is a `tf.train.Example` in a TFRecord frame (`frames.py`). `static` records are everyone's:
seven features of fixed length. `dynamic` ones hold the unmasked pair once, as one string of
little-endian token ids. A packed record of either kind holds several sequences: `static` the columns
of a packed batch, `dynamic` the tokens of all one after another. TensorFlow is loaded only for static
records that another tool has written in its own order.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bert_cli.data.records.example_proto import (
    Column,
    cut,
    entries,
    example_bytes,
    examples,
    packed,
    varints,
)
from bert_cli.data.records.tfrecord import FRAME_BYTES
from bert_cli.data.records.wire_reader import BLOCK, columns_of
from bert_cli.errors import DataError
from bert_cli.imports import quiet_imports

# Features of a static record, as they are written (by name), and the type of their lists.
STATIC_FEATURES = {
    "input_ids": "int64",
    "input_mask": "int64",
    "masked_lm_ids": "int64",
    "masked_lm_positions": "int64",
    "masked_lm_weights": "float",
    "next_sentence_labels": "int64",
    "segment_ids": "int64",
}
# The same of a packed one.
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

Ints = npt.NDArray[np.integer[Any]]


class DynamicRecords(NamedTuple):
    """Unmasked pairs of a block of B records, their tokens one after another in one flat array."""

    tokens: npt.NDArray[np.int32]
    """Ids of all records, [CLS] and both [SEP] included, no padding."""
    lengths: npt.NDArray[np.int32]
    """[B] tokens of each record."""
    first_lengths: npt.NDArray[np.int32]
    """[B] positions of segment A, with [CLS] and its [SEP]."""
    next_sentence_labels: npt.NDArray[np.int32]
    """[B] 1 where segment B is a random next, 0 where it is the actual one."""


class DynamicPacks(NamedTuple):
    """Unmasked sequences of a block of B packs, pack by pack."""

    sequences: DynamicRecords
    """All R of them."""
    numbers: npt.NDArray[np.int64]
    """[R] the record that each was in the corpus that was packed: masks are drawn by it."""
    counts: npt.NDArray[np.int32]
    """[B] sequences of each pack, one at least."""


def token_bytes(vocab_size: int) -> int:
    """Bytes of one token id in a dynamic record: 2 while the ids fit, else 4."""
    return 2 if vocab_size <= 65536 else 4


# --- writing


def static_payloads(block: Mapping[str, npt.NDArray[Any]]) -> Iterator[bytes]:
    """Serialise a block of B masked examples, given as the arrays that `parse_static` returns.

    Packed ones (those with `position_ids`) with the features of a packed batch.
    """
    rows = len(block["input_ids"])
    features: list[tuple[str, str, Column]] = []
    kinds = PACKED_FEATURES if "position_ids" in block else STATIC_FEATURES
    for name, kind in kinds.items():
        array = block[name].reshape(rows, -1)
        if kind == "float":
            features.append((name, kind, np.ascontiguousarray(array, "<f4").view(np.uint8)))
        else:
            features.append((name, kind, packed(array)))
    return examples(features, rows)


def dynamic_payloads(records: DynamicRecords, token_bytes: int = 2) -> Iterator[bytes]:
    """Serialise unmasked pairs, the inverse of `parse_dynamic`; for `token_bytes` see there."""
    ends = np.cumsum(records.lengths, dtype=np.int64) * token_bytes
    tokens = records.tokens.astype(f"<u{token_bytes}").tobytes()
    features: list[tuple[str, str, Column]] = [
        ("first_length", "int64", packed(records.first_lengths[:, None])),
        ("next_sentence_labels", "int64", packed(records.next_sentence_labels[:, None])),
        ("tokens", "bytes", cut(tokens, ends.tolist())),
    ]
    return examples(features, len(records.lengths))


def dynamic_lengths(frame_bytes: Ints, longest: int, token_bytes: int = 2) -> npt.NDArray[np.int32]:
    """Tokens of dynamic records [n], by the sizes of their frames alone.

    Beside the tokens only `first_length` varies, by a byte where it has 128 places or more; a token
    is two bytes, so no two lengths have a size in common. DataError for a size that no record of up
    to `longest` tokens has, and for one that two lengths have, which needs a first segment of
    16,384 places.
    """
    table = _length_by_size(longest, token_bytes)
    inside = (frame_bytes > 0) & (frame_bytes < len(table))
    lengths: npt.NDArray[np.int32] = table[np.where(inside, frame_bytes, 0)]
    if len(lengths) and int(lengths.min()) < 1:
        size = frame_bytes[int(np.argmin(lengths))]
        raise DataError(
            f"records (a frame of {size} bytes): is not that of one dynamic record of up to {longest} "
            "tokens; run `bert index`, and if that does not help make the records again"
        )
    return lengths


@lru_cache(maxsize=4)
def _length_by_size(longest: int, token_bytes: int) -> npt.NDArray[np.int32]:
    """Tokens of the record whose frame has a size; 0 for none, -1 for two."""
    found: dict[int, int] = {}
    for width in (1, 2, 3):  # bytes of first_length, which is at most the length
        for length in range(1 << 7 * (width - 1), longest + 1):
            size = FRAME_BYTES + example_bytes(
                (
                    ("first_length", "int64", width),
                    ("next_sentence_labels", "int64", 1),
                    ("tokens", "bytes", length * token_bytes),
                )
            )
            found[size] = length if found.get(size, length) == length else -1
    table = np.zeros(max(found) + 1, np.int32)
    table[list(found)] = list(found.values())
    return table


def pack_payloads(packs: DynamicPacks, token_bytes: int = 2) -> Iterator[bytes]:
    """Serialise unmasked packs, the inverse of `parse_packs`."""
    rows, counts = len(packs.counts), packs.counts
    held = np.arange(int(counts.max(initial=1))) < counts[:, None]
    ends = np.cumsum(packs.sequences.lengths, dtype=np.int64)[np.cumsum(counts) - 1] * token_bytes
    tokens = packs.sequences.tokens.astype(f"<u{token_bytes}").tobytes()
    lists: dict[str, Ints] = {
        "first_lengths": packs.sequences.first_lengths,
        "lengths": packs.sequences.lengths,
        "next_sentence_labels": packs.sequences.next_sentence_labels,
        "numbers": packs.numbers,
    }
    features: list[tuple[str, str, Column]] = []
    for name, numbers in lists.items():
        square = np.zeros(held.shape, np.int64)
        square[held] = numbers
        features.append((name, "int64", packed(square, counts)))
    features.append(("tokens", "bytes", cut(tokens, ends.tolist())))
    return examples(features, rows)


# --- reading


def static_lengths(
    sequence_length: int, predictions: int, sequences: int | None = None
) -> dict[str, int]:
    """Numbers in each feature of a static record, or of a packed one of at most `sequences`."""
    kinds = STATIC_FEATURES if sequences is None else PACKED_FEATURES
    count = {"masked_lm": predictions, "next_sentence": sequences or 1}
    return {name: count.get(name.rpartition("_")[0], sequence_length) for name in kinds}


def parse_static(
    payloads: Sequence[bytes],
    sequence_length: int,
    predictions: int,
    sequences: int | None = None,
) -> dict[str, npt.NDArray[Any]]:
    """Parse static records into arrays [B, S] and [B, P], next_sentence_labels [B].

    Packed ones of at most `sequences` have next_sentence_* [B, C], and `predictions` are a pack's.
    All are int32, the weights float32. Takes records of any tool that writes these features, in any
    order: those in another order than ours by TensorFlow's parser. DataError when a feature is missing
    or of another length.
    """
    kinds = STATIC_FEATURES if sequences is None else PACKED_FEATURES
    lengths = static_lengths(sequence_length, predictions, sequences)
    arrays = columns_of(payloads, [(name, kind, lengths[name]) for name, kind in kinds.items()])
    if arrays is None:
        # Some at a time: TensorFlow's parser makes int64 of all numbers.
        parts = [
            _parsed_by_tensorflow(payloads[start : start + BLOCK], kinds, lengths)
            for start in range(0, max(len(payloads), 1), BLOCK)
        ]
        arrays = {name: np.concatenate([part[name] for part in parts]) for name in kinds}
    if sequences is None:
        arrays["next_sentence_labels"] = arrays["next_sentence_labels"][:, 0]
    return arrays


def _parsed_by_tensorflow(
    payloads: Sequence[bytes], kinds: Mapping[str, str], lengths: Mapping[str, int]
) -> dict[str, npt.NDArray[Any]]:
    """Arrays of records of any tool, whatever the order of their features, [B, length of each]."""
    with quiet_imports():
        import tensorflow as tf

    features = {
        name: tf.io.FixedLenFeature([lengths[name]], tf.float32 if kind == "float" else tf.int64)
        for name, kind in kinds.items()
    }
    try:
        with tf.device("cpu"):
            parsed = tf.io.parse_example(list(payloads), features)
    except tf.errors.InvalidArgumentError as error:
        told = f"S {lengths['input_ids']}, P {lengths['masked_lm_ids']}"
        if "position_ids" in lengths:
            told += f", {lengths['next_sentence_labels']} sequences"
        raise DataError(
            f"records ({told}): not static records of these "
            "lengths; give the lengths they were made with "
            f"({str(error.message).splitlines()[0][:300]})"
        ) from error
    return {
        # Clipped, because a number of more than 32 bits would become another one that may be valid.
        name: tensor.numpy().astype(np.float32)
        if kinds[name] == "float"
        else tensor.numpy().clip(-(2**31), 2**31 - 1).astype(np.int32)
        for name, tensor in parsed.items()
    }


def parse_dynamic(payloads: Sequence[bytes], token_bytes: int = 2) -> DynamicRecords:
    """Parse dynamic records without TensorFlow; DataError when one is of another kind."""
    tokens: list[bytes] = []
    first_lengths: list[int] = []
    labels: list[int] = []
    for payload in payloads:
        try:
            features = dict(entries(payload))
            tokens.append(features[b"tokens"])
            first_lengths.append(varints(features[b"first_length"])[0])
            labels.append(varints(features[b"next_sentence_labels"])[0])
        except (KeyError, IndexError, ValueError) as error:
            raise DataError(
                "records: not dynamic ones (tokens, first_length, next_sentence_labels); "
                "corpus.json names another format than the files have, run `bert index`"
            ) from error
    lengths = [len(text) for text in tokens]
    return _dynamic(tokens, lengths, first_lengths, labels, token_bytes)


def parse_packs(payloads: Sequence[bytes], token_bytes: int = 2) -> DynamicPacks:
    """Parse packed dynamic records without TensorFlow; DataError when one is of another kind."""
    tokens: list[bytes] = []
    lists: dict[bytes, list[int]] = {
        name: [] for name in (b"first_lengths", b"lengths", b"next_sentence_labels", b"numbers")
    }
    counts: list[int] = []
    for payload in payloads:
        try:
            features = dict(entries(payload))
            tokens.append(features[b"tokens"])
            read = {name: varints(features[name]) for name in lists}
        except (KeyError, IndexError, ValueError) as error:
            raise _no_packs() from error
        counts.append(len(read[b"lengths"]))
        if {len(numbers) for numbers in read.values()} != {counts[-1]} or not counts[-1]:
            raise _no_packs()
        if sum(read[b"lengths"]) * token_bytes != len(tokens[-1]) or max(read[b"numbers"]) >> 63:
            raise _no_packs()
        for name, numbers in read.items():
            lists[name] += numbers
    in_bytes = [length * token_bytes for length in lists[b"lengths"]]
    sequences = _dynamic(
        tokens, in_bytes, lists[b"first_lengths"], lists[b"next_sentence_labels"], token_bytes
    )
    return DynamicPacks(
        sequences, np.array(lists[b"numbers"], np.int64), np.array(counts, np.int32)
    )


def _no_packs() -> DataError:
    return DataError(
        "records: not packed dynamic ones (first_lengths, lengths, next_sentence_labels, numbers, "
        "tokens); corpus.json names another format than the files have, run `bert pack` again"
    )


def _dynamic(
    tokens: list[bytes], in_bytes: list[int], first: list[int], labels: list[int], width: int
) -> DynamicRecords:
    lengths = np.array(in_bytes, np.int32)
    if np.any(lengths % width):
        raise DataError(f"records: tokens are not of {width} bytes each; run `bert index`")
    return DynamicRecords(
        np.frombuffer(b"".join(tokens), f"<u{width}").astype(np.int32),
        lengths // np.int32(width),
        _clipped(first),
        _clipped(labels),
    )


def _clipped(numbers: list[int]) -> npt.NDArray[np.int32]:
    """Return varints as int32; one of more bits becomes 2^31 - 1, which no limit of values allows."""
    return np.array([min(number, 2**31 - 1) for number in numbers], np.int32)
