"""TFRecord's frames: written with an index beside them, and read with both checksums looked at.

A frame is the payload's length, its masked crc32c, the payload, and the payload's masked crc32c. Each
`NAME.tfrecord` has a `NAME.index` beside it: a line `offset size` per record, the size with its frame.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import google_crc32c
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from bert_cli.errors import DataError

FRAME_BYTES = 16
"""Bytes of a frame around a payload: length 8, its checksum 4, the payload's checksum 4."""
HEAD_BYTES = 12
CHECKSUM_BYTES = 4
MASK = 0xA282EAD8


def masked_crc(data: bytes) -> bytes:
    """TFRecord's masked crc32c: rotated right by 15 bits plus a constant, little-endian."""
    crc: int = google_crc32c.value(data)
    return (((crc >> 15 | crc << 17) + MASK) & 0xFFFFFFFF).to_bytes(4, "little")


def _head(size: int) -> bytes:
    """What stands before a payload of so many bytes."""
    length = size.to_bytes(8, "little")
    return length + masked_crc(length)


def payload_bytes(head: bytes) -> int | None:
    """Bytes of the payload behind a frame's head; None where the checksum says that it is no head."""
    size = int.from_bytes(head[:8], "little")
    return size if head == _head(size) else None


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
                head = heads[size] = _head(size)
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


def read_payload(buffer: Any, offset: int, name: str | Path = "records") -> bytes:
    """Give the payload of the record whose frame starts at `offset` of bytes or an mmap.

    Checks both checksums, so a shifted index or a flipped bit cannot pass for data; DataError names
    `name` and `offset`.
    """
    begin = offset + HEAD_BYTES
    head = bytes(buffer[offset:begin])
    if len(head) < HEAD_BYTES:
        raise DataError(
            f"{name} (byte {offset}): the file ends before this record; rebuild it or "
            "run `bert index`"
        )
    size = payload_bytes(head)
    if size is None:
        raise DataError(
            f"{name} (byte {offset}): no record starts here (wrong checksum of its length); "
            "if its .index is another file's, remove that and run `bert index`, else rebuild the file"
        )
    end = begin + size
    payload, check = bytes(buffer[begin:end]), bytes(buffer[end : end + CHECKSUM_BYTES])
    if len(payload) < size or len(check) < CHECKSUM_BYTES:
        raise DataError(
            f"{name} (byte {offset}): the file is cut within this record; rebuild the file"
        )
    if masked_crc(payload) != check:
        raise DataError(
            f"{name} (byte {offset}): the record is corrupt (wrong checksum); rebuild the file"
        )
    return payload


def read_payloads(frames: Sequence[bytes]) -> list[bytes] | None:
    """Payloads of frames [n], or None where one is wrong; `read_payload` says then which and why.

    Heads and checksums are compared all at once, and there are as few different heads as sizes.
    """
    if not frames:
        return []
    sizes = np.fromiter(map(len, frames), np.int64, len(frames))
    if sizes.min() < FRAME_BYTES:
        return None
    data = np.frombuffer(b"".join(frames), np.uint8)
    ends = np.cumsum(sizes)
    different, which = np.unique(sizes, return_inverse=True)
    heads = b"".join([_head(size - FRAME_BYTES) for size in different.tolist()])
    wanted = np.frombuffer(heads, np.uint8).reshape(-1, HEAD_BYTES)[which]
    if not np.array_equal(sliding_window_view(data, HEAD_BYTES)[ends - sizes], wanted):
        return None
    payloads = [frame[HEAD_BYTES:-CHECKSUM_BYTES] for frame in frames]
    found = np.fromiter(map(google_crc32c.value, payloads), np.uint32, len(payloads))
    masked = ((found >> np.uint32(15)) | (found << np.uint32(17))) + np.uint32(MASK)
    said = sliding_window_view(data, CHECKSUM_BYTES)[ends - CHECKSUM_BYTES].view("<u4")[:, 0]
    return payloads if np.array_equal(masked, said) else None
