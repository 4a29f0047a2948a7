"""The only file that knows the record formats.

A record is a `tf.train.Example` in a TFRecord frame (length, masked crc32c, payload, masked
crc32c), and each `NAME.tfrecord` has a `NAME.index` beside it: a line `offset size` per record, the
size with its 16 bytes of frame. `static` records are everyone's: seven features of fixed length.
`dynamic` ones hold the unmasked pair once, as one string of little-endian token ids. The Example's
bytes are built here for a whole block of records at once with NumPy, because `tf.train.Example`
builds 22,500 records/s on a core and this twenty times as many; they are byte for byte what protobuf writes with
sorted keys. Only `parse_static` loads TensorFlow, and only when called.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import google_crc32c
import numpy as np
import numpy.typing as npt

from bert_cli.errors import DataError

FRAME_BYTES = 16
"""Bytes of a frame around a payload: length 8, its checksum 4, the payload's checksum 4."""

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
_LIST_TAG = {"bytes": b"\x0a", "float": b"\x12", "int64": b"\x1a"}

Bytes2D = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.integer[Any]]


class DynamicRecords(NamedTuple):
    """Unmasked pairs of a block of B records, their tokens one after another in one flat array."""

    tokens: npt.NDArray[np.int32]
    """Ids of all records, [CLS] and both [SEP] included, no padding."""
    lengths: npt.NDArray[np.int32]
    """[B] tokens of each record."""
    first_lengths: npt.NDArray[np.int32]
    """[B] places of segment A, with [CLS] and its [SEP]."""
    next_sentence_labels: npt.NDArray[np.int32]
    """[B] 1 where segment B is a random next, 0 where it is the actual one."""


def token_bytes(vocab_size: int) -> int:
    """Bytes of one token id in a dynamic record: 2 while the ids fit, else 4."""
    return 2 if vocab_size <= 65536 else 4


# --- writing


def _varint(number: int) -> bytes:
    """A number as protobuf writes it: seven bits a byte, the low ones first."""
    digits = []
    while number > 127:
        digits.append(number & 127 | 128)
        number >>= 7
    return bytes([*digits, number])


@lru_cache(maxsize=1 << 14)
def _head(name: str, kind: str, size: int) -> bytes:
    """All of a feature's entry in the map before its `size` bytes of packed values."""
    head = b""
    for tag in (b"\x0a", _LIST_TAG[kind], b"\x12"):  # values; Feature's list; entry's value
        head = tag + _varint(size + len(head)) + head
    head = b"\x0a" + _varint(len(name)) + name.encode() + head  # entry's key
    return b"\x0a" + _varint(size + len(head)) + head


@lru_cache(maxsize=1 << 14)
def _example_head(size: int) -> bytes:
    return b"\x0a" + _varint(size)


def _packed(numbers: Ints) -> Bytes2D | list[bytes]:
    """Each row of [B, n] as varints: a matrix if all have as many bytes, else bytes per row."""
    if numbers.min(initial=0) < 0:
        raise ValueError(f"{numbers.min()}: a negative number cannot be written to a record")
    width = len(_varint(int(numbers.max(initial=0))))
    if width == 1:
        return numbers.astype(np.uint8)
    rows, count = numbers.shape
    # Slots of equal width, and which of their bytes are used.
    values = np.empty((rows, count, width), np.uint8)
    used = np.empty((rows, count, width), np.bool_)
    used[:, :, 0] = True
    for place in range(width - 1):
        more = numbers >= 1 << (7 * (place + 1))
        used[:, :, place + 1] = more
        digit = (numbers >> (7 * place)) & 127
        values[:, :, place] = np.bitwise_or(digit, more.view(np.uint8) << 7)
    values[:, :, -1] = numbers >> (7 * (width - 1))
    places = np.flatnonzero(used)
    ends = np.searchsorted(places, np.arange(1, rows + 1) * (count * width))
    # The same as values[used], 2.6 times as fast.
    return _cut(values.ravel().take(places).tobytes(), ends.tolist())


def _cut(data: bytes, ends: Sequence[int]) -> list[bytes]:
    return [data[start:end] for start, end in zip((0, *ends), ends, strict=False)]


def _examples(
    features: Sequence[tuple[str, str, Bytes2D | list[bytes]]], rows: int
) -> Iterator[bytes]:
    """Put names, kinds of list and packed values of B Examples' features together."""
    columns: list[list[bytes]] = []
    fixed: list[Bytes2D] = []  # features of one size for all records, until another kind comes

    def close_fixed() -> None:
        if fixed:
            matrix = np.concatenate(fixed, axis=1)
            columns.append(_cut(matrix.tobytes(), range(0, matrix.size + 1, matrix.shape[1])[1:]))
            fixed.clear()

    for name, kind, data in features:
        if isinstance(data, list):
            close_fixed()
            columns += [[_head(name, kind, len(values)) for values in data], data]
        else:
            head = np.frombuffer(_head(name, kind, data.shape[1]), np.uint8)
            fixed += [np.broadcast_to(head, (rows, len(head))), data]
    close_fixed()
    for body in map(b"".join, zip(*columns, strict=True)):
        yield _example_head(len(body)) + body


def static_payloads(examples: Mapping[str, npt.NDArray[Any]]) -> Iterator[bytes]:
    """Serialise a block of B masked examples, given as the arrays that `parse_static` returns.

    Takes `input_ids`, `input_mask`, `segment_ids` [B, S], `masked_lm_positions`, `masked_lm_ids`,
    `masked_lm_weights` [B, P] and `next_sentence_labels` [B].
    """
    rows = len(examples["input_ids"])
    features: list[tuple[str, str, Bytes2D | list[bytes]]] = []
    for name, kind in STATIC_FEATURES.items():
        array = examples[name].reshape(rows, -1)
        if kind == "float":
            features.append((name, kind, np.ascontiguousarray(array, "<f4").view(np.uint8)))
        else:
            features.append((name, kind, _packed(array)))
    return _examples(features, rows)


def dynamic_payloads(records: DynamicRecords, token_bytes: int = 2) -> Iterator[bytes]:
    """Serialise unmasked pairs, the inverse of `parse_dynamic`; for `token_bytes` see there."""
    ends = np.cumsum(records.lengths, dtype=np.int64) * token_bytes
    tokens = records.tokens.astype(f"<u{token_bytes}").tobytes()
    features: list[tuple[str, str, Bytes2D | list[bytes]]] = [
        ("first_length", "int64", _packed(records.first_lengths[:, None])),
        ("next_sentence_labels", "int64", _packed(records.next_sentence_labels[:, None])),
        ("tokens", "bytes", _cut(tokens, ends.tolist())),
    ]
    return _examples(features, len(records.lengths))


def masked_crc(data: bytes) -> bytes:
    """TFRecord's masked crc32c: rotated right by 15 bits plus a constant, little-endian."""
    crc: int = google_crc32c.value(data)
    return (((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")


class RecordWriter:
    """Writes payloads to `path` in TFRecord frames, and their index beside it as `.index`.

    Both are flushed when the `with` block ends without an error; whoever needs them whole or absent
    gives a path that is renamed afterwards.
    """

    def __init__(self, path: Path) -> None:
        """Start both files, replacing what lies there."""
        self.records = 0
        self.bytes = 0
        self._heads: dict[int, bytes] = {}  # of a few hundred lengths, each with its checksum
        self._file = path.open("wb")
        self._index = path.with_suffix(".index").open("wb")

    def write(self, payload: bytes) -> None:
        """Append one record."""
        self.write_all((payload,))

    def write_all(self, payloads: Iterable[bytes]) -> None:
        """Append records; a block of them at once is twice as fast as one by one."""
        frames: list[bytes] = []
        lines: list[bytes] = []
        heads, offset = self._heads, self.bytes
        for payload in payloads:
            size = len(payload)
            head = heads.get(size)
            if head is None:
                length = size.to_bytes(8, "little")
                head = heads[size] = length + masked_crc(length)
            frames += (head, payload, masked_crc(payload))
            size += FRAME_BYTES
            lines.append(b"%d %d\n" % (offset, size))
            offset += size
        self._file.write(b"".join(frames))
        self._index.write(b"".join(lines))
        self.records += len(lines)
        self.bytes = offset

    def close(self) -> None:
        """Flush and close both files."""
        self._file.close()
        self._index.close()

    def __enter__(self) -> Self:
        """Give the writer itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close both files."""
        self.close()


# --- reading


def read_payload(buffer: Any, offset: int, name: str | Path = "records") -> bytes:
    """Give the payload of the record whose frame starts at `offset` of bytes or an mmap.

    Checks both checksums, so a shifted index or a flipped bit cannot pass for data; DataError names
    `name` and `offset`.
    """
    head = bytes(buffer[offset : offset + 12])
    if len(head) < 12:
        raise DataError(
            f"{name} (byte {offset}): the file ends before this record; rebuild it or "
            "run `bert index`"
        )
    if masked_crc(head[:8]) != head[8:]:
        raise DataError(
            f"{name} (byte {offset}): no record starts here (wrong checksum of its length); "
            "if its .index is another file's, remove that and run `bert index`, else rebuild the file"
        )
    end = offset + 12 + int.from_bytes(head[:8], "little")
    payload = bytes(buffer[offset + 12 : end])
    check = bytes(buffer[end : end + 4])
    if end - offset - 12 != len(payload) or len(check) < 4:
        raise DataError(
            f"{name} (byte {offset}): the file is cut within this record; rebuild the file"
        )
    if masked_crc(payload) != check:
        raise DataError(
            f"{name} (byte {offset}): the record is corrupt (wrong checksum); rebuild the file"
        )
    return payload


def parse_static(
    payloads: Sequence[bytes], sequence_length: int, predictions: int
) -> dict[str, npt.NDArray[Any]]:
    """Parse static records into arrays [B, S] and [B, P], next_sentence_labels [B].

    They are int32, the weights float32. Takes records of any tool that writes these seven features,
    in any order. DataError when one is missing or of another length. Loads TensorFlow, whose parser
    reads 270,000 records/s.
    """
    import tensorflow as tf

    count = {
        "masked_lm_ids": predictions,
        "masked_lm_positions": predictions,
        "masked_lm_weights": predictions,
    }
    count |= {
        "input_ids": sequence_length,
        "input_mask": sequence_length,
        "segment_ids": sequence_length,
    }
    features = {
        name: tf.io.FixedLenFeature(
            [count.get(name, 1)], tf.float32 if kind == "float" else tf.int64
        )
        for name, kind in STATIC_FEATURES.items()
    }
    try:
        with tf.device("cpu"):
            parsed = tf.io.parse_example(list(payloads), features)
    except tf.errors.InvalidArgumentError as error:
        raise DataError(
            f"records (S {sequence_length}, P {predictions}): not static records of these "
            "lengths; give the lengths they were made with "
            f"({str(error.message).splitlines()[0][:300]})"
        ) from error
    arrays = {
        name: tensor.numpy().astype(np.float32 if STATIC_FEATURES[name] == "float" else np.int32)
        for name, tensor in parsed.items()
    }
    arrays["next_sentence_labels"] = arrays["next_sentence_labels"][:, 0]
    return arrays


def parse_dynamic(payloads: Sequence[bytes], token_bytes: int = 2) -> DynamicRecords:
    """Parse dynamic records without TensorFlow; DataError when one is of another kind."""
    tokens: list[bytes] = []
    first_lengths: list[int] = []
    labels: list[int] = []
    for payload in payloads:
        try:
            features = dict(_entries(payload))
            tokens.append(features[b"tokens"])
            first_lengths.append(_read_varint(features[b"first_length"], 0)[0])
            labels.append(_read_varint(features[b"next_sentence_labels"], 0)[0])
        except (KeyError, IndexError, ValueError) as error:
            raise DataError(
                "records: not dynamic ones (tokens, first_length, next_sentence_labels); "
                "corpus.json names another format than the files have, run `bert index`"
            ) from error
    lengths = np.array([len(text) for text in tokens], np.int32)
    if np.any(lengths % token_bytes):
        raise DataError(f"records: tokens are not of {token_bytes} bytes each; run `bert index`")
    return DynamicRecords(
        np.frombuffer(b"".join(tokens), f"<u{token_bytes}").astype(np.int32),
        lengths // np.int32(token_bytes),
        np.array(first_lengths, np.int32),
        np.array(labels, np.int32),
    )


def _read_varint(data: bytes, place: int) -> tuple[int, int]:
    """The varint at `place`, and the place after it."""
    number = data[place]
    place += 1
    if number < 128:
        return number, place
    number &= 127
    shift = 7
    while True:
        byte = data[place]
        place += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, place
        shift += 7


def _entries(payload: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Name and packed content of each feature of an Example."""
    _, place = _read_varint(payload, 1)
    while place < len(payload):
        size, place = _read_varint(payload, place + 1)  # map entry
        end = place + size
        size, place = _read_varint(payload, place + 1)  # key
        name = payload[place : place + size]
        _, place = _read_varint(payload, place + size + 1)  # Feature
        _, place = _read_varint(payload, place + 1)  # typed list
        size, place = _read_varint(payload, place + 1)  # its values
        if place + size != end:
            raise ValueError(f"feature {name!r} is not one list of packed values")
        yield name, payload[place:end]
        place = end
