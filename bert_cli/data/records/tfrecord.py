"""TFRecord frames: written together with their index, and read with both checksums verified.

A frame is the payload's length, its masked crc32c, the payload, and the payload's masked crc32c. `NAME.index` is the
index of `NAME.tfrecord`, in the form of the tfrecord package: a line `offset size` for each record, the size with the
frame.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
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
    """Return TFRecord's masked crc32c: rotated right by 15 bits plus a constant, little-endian."""
    crc: int = google_crc32c.value(data)
    return (((crc >> 15 | crc << 17) + MASK) & 0xFFFFFFFF).to_bytes(4, "little")


def _head(size: int) -> bytes:
    length = size.to_bytes(8, "little")
    return length + masked_crc(length)


def payload_bytes(head: bytes) -> int | None:
    """Return the size of the payload after a frame's head; None where its checksum is wrong."""
    size = int.from_bytes(head[:8], "little")
    return size if head == _head(size) else None


class RecordWriter:
    """Writes payloads to `path` in TFRecord frames, and their index to `path` with the suffix `.index`.

    Both files are complete when the `with` block ends without an error.
    """

    def __init__(self, path: Path) -> None:
        """Open both files, which replaces existing ones."""
        self.records = 0
        self.bytes = 0
        self._heads: dict[int, bytes] = {}  # for a few hundred sizes, each with its checksum
        self._file = path.open("wb")
        self._index = path.with_suffix(".index").open("wb")

    def write(self, payload: bytes) -> None:
        """Append one record."""
        self.write_all((payload,))

    def write_all(self, payloads: Iterable[bytes]) -> None:
        """Append records; twice as fast as one by one."""
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

    def __enter__(self) -> Self:
        """Return the writer."""
        return self

    def __exit__(self, *_: object) -> None:
        """Flush and close both files."""
        self._file.close()
        self._index.close()


def read_payload(buffer: Any, offset: int, name: str | Path = "records", base: int = 0) -> bytes:
    """Return the payload of the frame at `offset` of a buffer that begins at byte `base` of a file.

    Both checksums are verified, so a shifted index or a flipped bit cannot pass for data. DataError names the file
    and the byte.
    """
    where = f"{name} (byte {base + offset})"
    begin = offset + HEAD_BYTES
    head = bytes(buffer[offset:begin])
    if len(head) < HEAD_BYTES:
        raise DataError(where, "the file ends before this record", "rebuild it or run `bert index`")
    size = payload_bytes(head)
    if size is None:
        raise DataError(
            where,
            "no record starts here (wrong checksum of its length)",
            "if its .index is another file's, remove that and run `bert index`, else rebuild the file",
        )
    end = begin + size
    payload, checksum = bytes(buffer[begin:end]), bytes(buffer[end : end + CHECKSUM_BYTES])
    if len(payload) < size or len(checksum) < CHECKSUM_BYTES:
        raise DataError(where, "the file is cut within this record", "rebuild the file")
    if masked_crc(payload) != checksum:
        raise DataError(where, "the record is corrupt (wrong checksum)", "rebuild the file")
    return payload


def read_payloads(frames: Sequence[bytes]) -> list[bytes] | None:
    """Return the payloads of frames [n]; None where one is wrong, for which `read_payload` has the error.

    Heads and checksums are compared all at once; there are only as many different heads as sizes.
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
    expected_heads = np.frombuffer(heads, np.uint8).reshape(-1, HEAD_BYTES)[which]
    if not np.array_equal(sliding_window_view(data, HEAD_BYTES)[ends - sizes], expected_heads):
        return None
    payloads = [frame[HEAD_BYTES:-CHECKSUM_BYTES] for frame in frames]
    crcs = np.fromiter(map(google_crc32c.value, payloads), np.uint32, len(payloads))
    expected = ((crcs >> np.uint32(15)) | (crcs << np.uint32(17))) + np.uint32(MASK)
    stored = sliding_window_view(data, CHECKSUM_BYTES)[ends - CHECKSUM_BYTES].view("<u4")[:, 0]
    return payloads if np.array_equal(stored, expected) else None
