"""The bytes of `tf.train.Example`: serialized for a block of records at once, parsed one by one.

An Example is a map from names to lists of numbers or bytes. `tf.train.Example` serializes 22,500 of them a second on
a core. Joining their varints and heads with NumPy, column by column, is twenty times as fast and gives the same bytes
as protobuf with sorted keys.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes2D = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.integer[Any]]
Rows = Bytes2D | list[bytes]
"""Packed values of a feature of B records: a matrix where all have the same size."""
Feature = tuple[str, str, Rows]
"""Name, kind of list and packed values."""

_LIST_TAG = {"bytes": b"\x0a", "float": b"\x12", "int64": b"\x1a"}


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
    for tag in (b"\x0a", _LIST_TAG[kind], b"\x12"):  # values; Feature's list; entry's value
        head = tag + varint(size + len(head)) + head
    head = b"\x0a" + varint(len(name)) + name.encode() + head  # entry's key
    return b"\x0a" + varint(size + len(head)) + head


@lru_cache(maxsize=1 << 14)
def _example_head(size: int) -> bytes:
    return b"\x0a" + varint(size)


def varint_rows(numbers: Ints, counts_B: Ints | None = None) -> Rows:
    """Return each row of [B, n] as varints, or its first `counts` [B] numbers."""
    if numbers.min(initial=0) < 0:
        raise ValueError(f"{numbers.min()}: a negative number cannot be written to a record")
    width = len(varint(int(numbers.max(initial=0))))
    if width == 1 and counts_B is None:
        return numbers.astype(np.uint8)
    rows, count = numbers.shape
    # Slots of equal width, and which of their bytes are used.
    values = np.empty((rows, count, width), np.uint8)
    used = np.empty((rows, count, width), np.bool_)
    used[:, :, 0] = True
    for byte in range(width - 1):
        more = numbers >= 1 << (7 * (byte + 1))
        used[:, :, byte + 1] = more
        digit = (numbers >> (7 * byte)) & 127
        values[:, :, byte] = np.bitwise_or(digit, more.view(np.uint8) << 7)
    values[:, :, -1] = numbers >> (7 * (width - 1))
    if counts_B is not None:
        used &= (np.arange(count) < counts_B[:, None])[:, :, None]
    indices = np.flatnonzero(used)
    ends = np.searchsorted(indices, np.arange(1, rows + 1) * (count * width))
    # The same as values[used], 2.6 times as fast.
    return split_bytes(values.ravel().take(indices).tobytes(), ends.tolist())


def split_bytes(data: bytes, ends: Sequence[int]) -> list[bytes]:
    """Split bytes at these ends; the last one is the end of the bytes."""
    return [data[start:end] for start, end in zip((0, *ends), ends, strict=False)]


def serialize_examples(features: Sequence[Feature], rows: int) -> Iterator[bytes]:
    """Serialize B Examples from their features, which are sorted by name."""
    columns: list[list[bytes]] = []
    fixed: list[Bytes2D] = []  # a run of features that have the same size in all records

    def close_run() -> None:
        if fixed:
            matrix = np.concatenate(fixed, axis=1)
            ends = range(matrix.shape[1], matrix.size + 1, matrix.shape[1])
            columns.append(split_bytes(matrix.tobytes(), ends))
            fixed.clear()

    for name, kind, values in features:
        if isinstance(values, list):
            close_run()
            columns += [[_feature_head(name, kind, len(value)) for value in values], values]
        else:
            head = np.frombuffer(_feature_head(name, kind, values.shape[1]), np.uint8)
            fixed += [np.broadcast_to(head, (rows, len(head))), values]
    close_run()
    for body in map(b"".join, zip(*columns, strict=True)):
        yield _example_head(len(body)) + body


def example_bytes(features: Iterable[tuple[str, str, int]]) -> int:
    """Return the size of an Example from names, kinds of list and bytes of packed values."""
    body = sum(len(_feature_head(name, kind, size)) + size for name, kind, size in features)
    return len(_example_head(body)) + body


def parse_features(payload: bytes) -> dict[bytes, bytes]:
    """Return the packed values of each feature of an Example; ValueError or IndexError for other bytes."""
    features: dict[bytes, bytes] = {}
    _, at = _parse_varint(payload, 1)
    while at < len(payload):
        size, at = _parse_varint(payload, at + 1)  # map entry
        end = at + size
        size, at = _parse_varint(payload, at + 1)  # key
        name = payload[at : at + size]
        _, at = _parse_varint(payload, at + size + 1)  # Feature
        _, at = _parse_varint(payload, at + 1)  # typed list
        size, at = _parse_varint(payload, at + 1)  # its values
        if at + size != end:
            raise ValueError(f"feature {name!r} is not one list of packed values")
        features[name] = payload[at:end]
        at = end
    return features


def parse_varints(data: bytes) -> list[int]:
    """Return all numbers of a packed list."""
    numbers, at = [], 0
    while at < len(data):
        number, at = _parse_varint(data, at)
        numbers.append(number)
    return numbers


def _parse_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the varint at an index and the index after it."""
    number, shift = data[at] & 127, 7
    while data[at] >= 128:
        at += 1
        number |= (data[at] & 127) << shift
        shift += 7
    return number, at + 1
