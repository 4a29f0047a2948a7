"""TFRecord files of `tf.train.Example` records: their frames, their index and the bytes of the Examples.

A frame is the payload's length, its masked crc32c, the payload, and the payload's masked crc32c. `NAME.index` is the
index of `NAME.tfrecord`, in the form of the tfrecord package: a line `offset size` for each record, the size with the
frame. Blocks of Examples are written and read with NumPy, many times as fast as with protobuf: the bytes written are
protobuf's, with sorted keys, and features may be read in any order.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Self

import google_crc32c
import numpy as np

from bert_cli.arrays import Ints, UInts8
from bert_cli.errors import DataError

Feature = tuple[str, str, list[bytes]]  # name, kind of list, packed values of each record

FRAME_BYTES = 16  # around a payload: length 8, its checksum 4, the payload's checksum 4
HEAD_BYTES = 12
CHECKSUM_BYTES = 4
# The constant of TensorFlow and LevelDB: a checksum of data that contain their own checksum would be no check.
MASK = 0xA282EAD8

_LIST_TAG = {"bytes": b"\x0a", "float": b"\x12", "int64": b"\x1a"}
_VARINT = rb"([\x80-\xff]{0,4}[\0-\x7f])"
_LENGTH = re.compile(rb"\x0a" + _VARINT)  # of the map of features, and of an entry of it


# --- frames


def masked_crc(data: bytes) -> bytes:
    """Return TFRecord's masked crc32c: rotated right by 15 bits plus a constant, little-endian."""
    crc: int = google_crc32c.value(data)
    return (((crc >> 15 | crc << 17) + MASK) & 0xFFFFFFFF).to_bytes(4, "little")


@lru_cache(maxsize=1 << 14)
def _frame_head(size: int) -> bytes:
    length = size.to_bytes(8, "little")
    return length + masked_crc(length)


@lru_cache(maxsize=1 << 14)
def payload_bytes(head: bytes) -> int | None:
    """Return the size of the payload after a frame's head; None where its checksum is wrong."""
    size = int.from_bytes(head[:8], "little")
    if head != _frame_head(size):
        return None
    return size


class RecordWriter:
    """Writes payloads to `path` in TFRecord frames, and their index to `path` with the suffix `.index`."""

    def __init__(self, path: Path) -> None:
        self.records = 0
        self.bytes = 0
        self._file = path.open("wb")
        self._index = path.with_suffix(".index").open("wb")

    def write_all(self, payloads: Iterable[bytes]) -> None:
        """Append records."""
        frames: list[bytes] = []
        lines: list[bytes] = []
        for payload in payloads:
            frames += (_frame_head(len(payload)), payload, masked_crc(payload))
            size = len(payload) + FRAME_BYTES
            lines.append(b"%d %d\n" % (self.bytes, size))
            self.bytes += size
        self._file.write(b"".join(frames))
        self._index.write(b"".join(lines))
        self.records += len(lines)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._index.close()


def read_payloads(frames: Sequence[bytes], where: Callable[[int], str], remedy: str) -> list[bytes]:
    """Return the payloads of frames [n]. Raises DataError at `where(row)` for a truncated, shifted or changed row."""
    payloads = [frame[HEAD_BYTES:-CHECKSUM_BYTES] for frame in frames]
    for row, (frame, payload) in enumerate(zip(frames, payloads, strict=True)):
        head = frame[:HEAD_BYTES]
        if head != _frame_head(len(payload)) or frame[-CHECKSUM_BYTES:] != masked_crc(payload):
            problem = "no record starts here, or it is truncated or corrupt (wrong checksum)"
            raise DataError(where(row), problem, remedy)
    return payloads


# --- tf.train.Example: a map from names to lists of numbers or bytes


@lru_cache(maxsize=1 << 14)
def varint(number: int) -> bytes:
    """Return a number as protobuf writes it: seven bits a byte, the low ones first."""
    digits = []
    while number > 127:
        digits.append(number & 127 | 128)
        number >>= 7
    return bytes([*digits, number])


@lru_cache(maxsize=1 << 14)
def _feature_head(name: str, kind: str, size: int) -> bytes:
    """Return the bytes of a feature before its `size` bytes of packed values."""
    head = b""
    # From the inside out, because each length counts all bytes inside.
    for tag in (b"\x0a", _LIST_TAG[kind], b"\x12"):  # values; Feature's list; entry's value
        head = tag + varint(size + len(head)) + head
    head = b"\x0a" + varint(len(name)) + name.encode() + head  # entry's key
    return b"\x0a" + varint(size + len(head)) + head


def varint_rows(numbers: Ints) -> list[bytes]:
    """Return each row of [B, n], none negative, as varints."""
    # Bytes of the longest varint: 3 for token ids of 16,384 and more.
    width = len(varint(int(numbers.max(initial=0))))
    if width == 1:
        return byte_rows(numbers.astype(np.uint8))
    rows, count = numbers.shape
    # Slots of equal width, and which of their bytes are used.
    # [B, n, bytes]: a varint uses its first bytes, the unused ones are dropped below.
    values = np.empty((rows, count, width), np.uint8)
    used = np.empty((rows, count, width), np.bool_)
    used[:, :, 0] = True
    for byte in range(width - 1):
        more = numbers >= 1 << (7 * (byte + 1))
        used[:, :, byte + 1] = more
        digit = (numbers >> (7 * byte)) & 127
        values[:, :, byte] = np.bitwise_or(digit, more.view(np.uint8) << 7)
    values[:, :, -1] = numbers >> (7 * (width - 1))
    indices = np.flatnonzero(used)
    ends = np.searchsorted(indices, np.arange(1, rows + 1) * (count * width))
    # The same as values[used], 2.6 times as fast.
    return split_bytes(values.ravel().take(indices).tobytes(), ends.tolist())


def byte_rows(values: UInts8) -> list[bytes]:
    """Return the bytes of each row of [B, n]."""
    return split_bytes(values.tobytes(), range(values.shape[1], values.size + 1, values.shape[1]))


def split_bytes(data: bytes, ends: Sequence[int]) -> list[bytes]:
    """Split bytes at these ends; the last one is the end of the bytes."""
    return [data[start:end] for start, end in zip((0, *ends), ends, strict=False)]


def serialize_examples(features: Sequence[Feature]) -> Iterator[bytes]:
    """Serialize Examples from their features, which are sorted by name."""
    columns: list[list[bytes]] = []
    for name, kind, values in features:
        columns += [[_feature_head(name, kind, len(value)) for value in values], values]
    for body in map(b"".join, zip(*columns, strict=True)):
        yield b"\x0a" + varint(len(body)) + body


def example_bytes(features: Iterable[tuple[str, str, int]]) -> int:
    """Return the size of an Example from names, kinds of list and bytes of packed values."""
    body = sum(len(_feature_head(name, kind, size)) + size for name, kind, size in features)
    # The tag of the map, its length, and the features.
    return 1 + len(varint(body)) + body


def find_lists(payloads: Sequence[bytes], kinds: Mapping[str, str]) -> dict[str, list[bytes]]:
    """Return the packed values of features of Examples by name, empty where an Example has no list of that kind.

    The features of an Example may have any order, and others are ignored.
    """
    lists = {name: [b""] * len(payloads) for name in kinds}
    keys = {bytes([len(name)]) + name.encode(): name for name in kinds}
    by_key = {key + _LIST_TAG[kinds[name]]: lists[name] for key, name in keys.items()}
    head = _feature_heads(tuple(keys))
    for row, payload in enumerate(payloads):
        entry = _LENGTH.match(payload)
        at = entry.end() if entry else 0
        if not entry or at + _number(entry[1]) != len(payload):
            continue
        while entry := _LENGTH.match(payload, at):
            at = entry.end() + _number(entry[1])
            feature = head.match(payload, entry.end())
            values = by_key.get(feature[1] + feature[3]) if feature else None
            if (
                feature
                and values
                and feature.end(2) + _number(feature[2]) == at
                and feature.end(4) + _number(feature[4]) == at
                and feature.end() + _number(feature[5]) == at
            ):
                values[row] = payload[feature.end() : at]
        if at != len(payload):  # a damaged Example
            for values in lists.values():
                values[row] = b""
    return lists


@lru_cache(maxsize=4)
def _feature_heads(keys: tuple[bytes, ...]) -> re.Pattern[bytes]:
    """Return a pattern for what stands before the values of a feature: its key, and the sizes of it and its list."""
    names = b"|".join(map(re.escape, keys))
    return re.compile(rb"\x0a(%b)\x12%b([\x0a\x12\x1a])%b\x0a%b" % (names, *[_VARINT] * 3))


@lru_cache(maxsize=1 << 14)
def _number(varint: bytes) -> int:
    return sum((byte & 127) << 7 * place for place, byte in enumerate(varint))


def parse_varints(lists: Sequence[bytes]) -> tuple[Ints, Ints]:
    """Return the numbers of packed lists in a row, and how many each has; -1 for a truncated list."""
    data = np.frombuffer(b"".join(lists), np.uint8)
    sizes = np.fromiter(map(len, lists), np.int64, len(lists))
    ends = np.cumsum(sizes)
    last_bytes = np.flatnonzero(data < 128)
    counts = np.diff(np.searchsorted(last_bytes, ends), prepend=0)
    if len(last_bytes) == len(data):  # of one byte each
        return data.astype(np.int64), counts
    counts[(sizes > 0) & (data.take(ends - 1, mode="wrap") > 127)] = -1
    numbers = data.take(last_bytes).astype(np.int64)
    is_longer = np.ones(len(numbers), np.bool_)
    for byte in range(1, 10):  # a negative number has ten bytes
        digits = data.take(last_bytes - byte, mode="wrap")
        is_longer &= digits > 127
        if not is_longer.any():
            break
        numbers <<= is_longer * np.uint8(7)
        numbers |= (digits & 127) * is_longer
    is_longer &= data.take(last_bytes - 10, mode="wrap") > 127
    # Of more than ten bytes, which protobuf never writes.
    numbers[is_longer] = np.iinfo(np.int64).max
    return numbers, counts
