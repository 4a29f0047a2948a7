"""The record formats, the columns of a batch, and the columns of packs.

A record is a `tf.train.Example` in a TFRecord frame (`tfrecord.py`). A `static` record has the seven features of fixed
length that BERT's own scripts write, a `dynamic` one the unmasked pair as one string of little-endian token ids.

Shapes: B records, R sequences in the order of their packs, S positions, P masked positions, C maximum sequences of a
pack.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from bert_cli.arrays import Array, Bools, Ints, Ints32
from bert_cli.data.records import tfrecord
from bert_cli.data.records.tfrecord import Feature
from bert_cli.errors import DataError

# The columns by name, [M, B, ...] of the micro-batches of a step or [n, ...] of any examples.
Batch = dict[str, Array]

# The columns, in this order; weights are float32, all others int32.
FIELDS = (
    "input_ids",  # [S]
    "input_mask",  # [S] 1 for a token; in a pack k for the tokens of its k-th sequence
    "segment_ids",  # [S]
    "masked_lm_positions",  # [P]
    "masked_lm_ids",  # [P]
    "masked_lm_weights",  # [P]
    "next_sentence_labels",  # [], or [C] for a pack
    "next_sentence_weights",  # the same shape; 0 without a label
)
PACKED_FIELDS = (
    *FIELDS,
    "position_ids",  # [S] from 0 in each sequence
    "next_sentence_positions",  # [C] position of each sequence's [CLS]
)
# Features of a static record, in the order in which they are written.
STATIC_FEATURES = sorted(set(FIELDS) - {"next_sentence_weights"})
BLOCK = 1024  # records that are read or parsed at once
LARGEST = 2**31 - 1  # larger numbers are read as this number, which is above every limit


class DynamicRecords(NamedTuple):
    """Unmasked pairs of B records: all tokens in a row, with [CLS] and [SEP], and columns [B]."""

    tokens: Ints32
    lengths: Ints32
    first_lengths: Ints32  # of segment A, with [CLS] and its [SEP]
    next_sentence_labels: Ints32  # 1 where segment B is a random next


def token_bytes(vocab_size: int) -> int:
    """Return the bytes of a token id in a dynamic record: 2 if all ids fit, else 4."""
    if vocab_size <= 65536:
        return 2
    return 4


def _kind(name: str) -> str:
    if name == "tokens":
        return "bytes"
    if name.endswith("weights"):
        return "float"
    return "int64"


def find_features(payloads: Sequence[bytes], names: Iterable[str]) -> dict[str, list[bytes]]:
    """Return the packed values of features of records by name, empty where a record has no such list."""
    return tfrecord.find_lists(payloads, {name: _kind(name) for name in names})


# --- writing


def static_payloads(block: Mapping[str, Array]) -> Iterator[bytes]:
    """Serialize masked examples [B], the inverse of `parse_static`."""
    features: list[Feature] = []
    for name in STATIC_FEATURES:
        column = block[name].reshape(len(block[name]), -1)
        if _kind(name) == "float":
            values = np.ascontiguousarray(column, "<f4").view(np.uint8)
            features.append((name, "float", tfrecord.byte_rows(values)))
        else:
            features.append((name, "int64", tfrecord.varint_rows(column)))
    return tfrecord.serialize_examples(features)


def dynamic_payloads(records: DynamicRecords, token_bytes: int = 2) -> Iterator[bytes]:
    """Serialize unmasked pairs, the inverse of `parse_dynamic`."""
    first_lengths = tfrecord.varint_rows(records.first_lengths[:, None])
    labels = tfrecord.varint_rows(records.next_sentence_labels[:, None])
    ends = np.cumsum(records.lengths, dtype=np.int64) * token_bytes
    data = records.tokens.astype(f"<u{token_bytes}").tobytes()
    tokens = tfrecord.split_bytes(data, ends.tolist())
    features = [("first_length", "int64", first_lengths), ("next_sentence_labels", "int64", labels)]
    return tfrecord.serialize_examples([*features, ("tokens", "bytes", tokens)])


# --- lengths without reading


def dynamic_lengths(frame_bytes: Ints, longest: int, token_bytes: int = 2) -> Ints32:
    """Return the number of tokens of dynamic records [n], from the sizes of their frames.

    Besides the tokens only `first_length` varies, by one byte from 128 tokens on, so every size belongs to one length.
    Raises DataError for a size of no record or of two lengths (possible with a first segment of 16,384 tokens).
    """
    table = _length_by_size(longest, token_bytes)
    inside = (frame_bytes > 0) & (frame_bytes < len(table))
    lengths: Ints32 = table[np.where(inside, frame_bytes, 0)]
    if len(lengths) and int(lengths.min()) < 1:
        size = frame_bytes[int(np.argmin(lengths))]
        raise DataError(
            f"records (a frame of {size} bytes)",
            f"does not have the size of a dynamic record of up to {longest} tokens",
            "run `bert index`, and if that does not help make the records again",
        )
    return lengths


@lru_cache(maxsize=4)
def _length_by_size(longest: int, token_bytes: int) -> Ints32:
    """Return the number of tokens of a record by the size of its frame; 0 for no record, -1 for two lengths."""
    lengths: dict[int, int] = {}
    # A length below 2^21: all that a varint of three bytes holds.
    for width in (1, 2, 3):  # bytes of first_length, which is at most the length
        for length in range(1 << 7 * (width - 1), longest + 1):
            features = [("first_length", "int64", width), ("next_sentence_labels", "int64", 1)]
            features.append(("tokens", "bytes", length * token_bytes))
            size = tfrecord.FRAME_BYTES + tfrecord.example_bytes(features)
            # Two lengths of one size occur, as the bytes of a varint grow with its value.
            if lengths.setdefault(size, length) != length:
                lengths[size] = -1
    table = np.zeros(max(lengths) + 1, np.int32)
    table[list(lengths)] = list(lengths.values())
    return table


# --- reading


def static_lengths(sequence_length: int, predictions: int) -> dict[str, int]:
    """Return the length of each feature of a static record."""
    lengths = {"masked_lm": predictions, "next_sentence": 1}
    return {name: lengths.get(name.rpartition("_")[0], sequence_length) for name in STATIC_FEATURES}


def parse_static(
    payloads: Sequence[bytes],
    sequence_length: int,
    predictions: int,
    where: Callable[[int], str] = "record {}".format,
) -> Batch:
    """Parse static records of any tool into columns [B, S] and [B, P]; next_sentence_labels are [B].

    Columns are int32, weights float32. Raises DataError, with `where` of the row, when a feature is absent or has
    another length.
    """
    lengths = static_lengths(sequence_length, predictions)
    columns: Batch = {}
    for name, lists in find_features(payloads, lengths).items():
        is_float = _kind(name) == "float"
        integers = [] if is_float else lists
        numbers, counts = tfrecord.parse_varints(integers)
        if is_float:
            counts = np.array([len(payload) / 4 for payload in lists])
        rows = np.flatnonzero(counts != lengths[name])
        if len(rows):
            sizes = f"S {sequence_length}, P {predictions}"
            raise DataError(
                where(int(rows[0])),
                f"is not a static record of {sizes} ({name} has another length)",
                "use the lengths that the records were made with",
            )
        values: Array = numbers.clip(-LARGEST, LARGEST).astype(np.int32)
        if is_float:
            values = np.frombuffer(b"".join(lists), "<f4").astype(np.float32)
        columns[name] = values.reshape(-1, lengths[name])
    columns["next_sentence_labels"] = columns["next_sentence_labels"][:, 0]
    return columns


def static_mistakes(columns: Batch) -> Iterator[tuple[str, Any]]:
    """Yield (mistake, whether each row [B] has it) for masked examples with values in the valid range."""
    is_token_BS = columns["input_mask"] > 0
    is_hole_BS = is_token_BS[:, 1:] > is_token_BS[:, :-1]
    yield "input_mask has padding before a token", is_hole_BS.any(axis=1) | ~is_token_BS[:, 0]
    positions_BP = columns["masked_lm_positions"]
    is_masked_BP = columns["masked_lm_weights"] > 0
    is_padding_BP = positions_BP >= np.count_nonzero(is_token_BS, axis=1)[:, None]
    yield "masked_lm_positions names padding", (is_padding_BP & is_masked_BP).any(axis=1)
    # Unused slots become -1, -2, ...: no two are equal, and none is a position.
    unused_P = ~np.arange(positions_BP.shape[1])
    sorted_BP = np.sort(np.where(is_masked_BP, positions_BP, unused_P), axis=1)
    is_twice_B = (sorted_BP[:, 1:] == sorted_BP[:, :-1]).any(axis=1)
    yield "masked_lm_positions names a position twice", is_twice_B


def parse_dynamic(payloads: Sequence[bytes], token_bytes: int = 2) -> DynamicRecords:
    """Parse dynamic records. Raises DataError for records of another kind."""
    names = ("first_length", "next_sentence_labels")
    lists = find_features(payloads, ("tokens", *names))
    tokens = lists["tokens"]
    sizes = np.fromiter(map(len, tokens), np.int64, len(tokens))
    parsed = [tfrecord.parse_varints(lists[name]) for name in names]
    if any((counts != 1).any() for _, counts in parsed) or (sizes % token_bytes).any():
        problem = (
            f"are not dynamic records with {', '.join(names)} and with tokens as in corpus.json"
        )
        raise DataError("records", problem, "run `bert index`, or make the records again")
    columns = (sizes // token_bytes, *(numbers for numbers, _ in parsed))
    return DynamicRecords(
        np.frombuffer(b"".join(tokens), f"<u{token_bytes}").astype(np.int32),
        *(column.clip(-LARGEST, LARGEST).astype(np.int32) for column in columns),
    )


# --- packs


def pack_columns(sequences: Batch, counts_B: Ints, sizes: tuple[int, int, int], pad: int) -> Batch:
    """Put masked sequences into packs [B] of `sizes` S, P and C; each pack takes the next `counts` sequences.

    Read row by row, a block of packs has the tokens of its sequences in their order, so a column of packs is one
    masked assignment.
    """
    sequence_length, predictions, pack_size = sizes
    is_token_RS = sequences["input_mask"] > 0
    lengths_R = is_token_RS.sum(axis=1)
    ends_R = np.cumsum(lengths_R, dtype=np.int64)
    # Tokens of each pack.
    totals_B = np.diff(ends_R[np.cumsum(counts_B) - 1], prepend=0)
    starts_R = ends_R - lengths_R - np.repeat(np.cumsum(totals_B) - totals_B, counts_B)
    is_sequence_BC = np.arange(pack_size) < counts_B[:, None]
    # The number of a sequence in its pack, from 0.
    number_R = np.arange(len(lengths_R)) - np.repeat(np.cumsum(counts_B) - counts_B, counts_B)
    is_token_BS = np.arange(sequence_length) < totals_B[:, None]
    is_masked_RP = sequences["masked_lm_weights"] > 0
    pack_R = np.repeat(np.arange(len(counts_B)), counts_B)
    masked_B = np.bincount(pack_R, is_masked_RP.sum(axis=1), len(counts_B)).astype(np.int64)
    is_masked_BP = np.arange(predictions) < masked_B[:, None]
    packed: Batch = {}

    def put(name: str, values: Array, where: Bools, empty: int) -> None:
        dtype = np.float32 if _kind(name) == "float" else np.int32
        packed[name] = np.full(where.shape, empty, dtype)
        packed[name][where] = values

    put("input_ids", sequences["input_ids"][is_token_RS], is_token_BS, pad)
    put("input_mask", np.repeat(number_R + 1, lengths_R), is_token_BS, 0)
    put("segment_ids", sequences["segment_ids"][is_token_RS], is_token_BS, 0)
    positions = np.arange(ends_R[-1]) - np.repeat(ends_R - lengths_R, lengths_R)
    put("position_ids", positions, is_token_BS, 0)
    positions_RP = sequences["masked_lm_positions"] + starts_R[:, None]
    put("masked_lm_positions", positions_RP[is_masked_RP], is_masked_BP, 0)
    for name in ("masked_lm_ids", "masked_lm_weights"):
        put(name, sequences[name][is_masked_RP], is_masked_BP, 0)
    put("next_sentence_positions", starts_R, is_sequence_BC, 0)
    for name in ("next_sentence_labels", "next_sentence_weights"):
        put(name, sequences[name], is_sequence_BC, 0)
    return {name: packed[name] for name in PACKED_FIELDS}
