"""`tf.train.Example`s of lists of known length taken apart, a block at a time and column by column.

What a run does for every static record that it reads, so passes over memory are what counts. Lists of
as many bytes in every record lie at the same distance from one another and are cut out together; of the
others NumPy finds where each number ends. Numbers go straight into the columns of the step.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from bert_cli.data.records.example_proto import feature_head, read_varint

Bytes2D = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.integer[Any]]
Words = npt.NDArray[np.uint32]
Features = tuple[tuple[str, str, int], ...]
"""Name, kind of list and its length."""
Into = Mapping[str, npt.NDArray[Any]]
BLOCK = 1024
"""Examples taken apart at once: at 128 places their arrays stay within a core's cache."""
WIDEST = 3
"""Bytes of the varints that are read: numbers below 2**21, of which there are no more words."""


def columns_of(
    payloads: Sequence[bytes], features: Sequence[tuple[str, str, int]]
) -> dict[str, npt.NDArray[Any]] | None:
    """Take B Examples apart that have these features (name, kind of list, its length), in this order.

    Arrays [B, length], int32 or float32; None for Examples of another kind or order, or with numbers
    of 2**21 or more: `entries` or TensorFlow can read those.
    """
    columns: dict[str, npt.NDArray[Any]] = {
        name: np.empty((len(payloads), length), np.float32 if kind == "float" else np.int32)
        for name, kind, length in features
    }
    for start in range(0, len(payloads), BLOCK):
        part = slice(start, start + BLOCK)
        into = {name: column[part] for name, column in columns.items()}
        if not _take_apart(payloads[part], tuple(features), into):
            return None
    return columns if payloads else None


def _take_apart(payloads: Sequence[bytes], features: Features, into: Into) -> bool:
    """Put the numbers of a block of Examples into arrays; whether they are such Examples."""
    # Words and rows are cut out from any byte on, also from the last one.
    room = max(_Heads.of(*feature).heads.shape[1] + 4 * feature[2] for feature in features) + 4
    data = np.frombuffer(b"".join([*payloads, bytes(room)]), np.uint8)
    words: Words = np.ndarray(len(data) - 3, "<u4", data, strides=(1,))
    ends = np.cumsum(np.fromiter(map(len, payloads), np.int64, len(payloads)))
    starts = np.concatenate(([0], ends[:-1]))
    size, width = _varints_at(words, starts + 1)
    places = starts + 1 + width
    if np.any(data[starts] != 0x0A) or np.any(places + size != ends):
        return False
    left = features
    while left:
        stretch = _stretch_at(data, int(places[0]), left)
        stops = stretch.put(data, places, into) if stretch else None
        done = len(stretch.columns) if stretch else 1
        if stops is None:
            stops, done = _put_one(data, words, places, left[0], into), 1
        if stops is None or np.any(stops > ends):
            return False
        left, places = left[done:], stops
    return np.array_equal(places, ends)


def _put_one(
    data: Bytes2D, words: Words, places: Ints, feature: tuple[str, str, int], into: Into
) -> Ints | None:
    """Put a feature's numbers that begin at these places into its array; the places after them."""
    name, kind, length = feature
    if kind == "float":
        return _Stretch.of((feature,)).put(data, places, into)
    heads = _Heads.of(name, kind, length)
    row = heads.rows_at(data, words, places)
    if row is None:
        return None
    begins, sizes = places + heads.lengths[row], heads.values[row]
    return begins + sizes if _put_numbers(data, begins, sizes, into[name]) else None


def _stretch_at(data: Bytes2D, place: int, features: Features) -> "_Stretch | None":
    """As many of these features as are floats or have, from this place on, one byte a number."""
    count = 0
    for feature in features:
        heads = _Heads.of(*feature)
        if heads.row_at(data, place) != heads.NARROWEST:
            break
        place += int(heads.lengths[heads.NARROWEST] + heads.values[heads.NARROWEST])
        count += 1
    return _Stretch.of(features[:count]) if count else None


class _Stretch:
    """Features one after another of which all lists have as many bytes in every record.

    Of the seven of a static record of up to 128 places five are such, the last four in a row: cut out and
    compared at once they take half the time.
    """

    def __init__(self, features: Features) -> None:
        self.columns: list[tuple[str, str, slice]] = []
        wanted: list[bytes] = []
        self.bytes = 0
        """Of the whole stretch in a record."""
        for name, kind, length in features:
            size = 4 * length if kind == "float" else length
            head = feature_head(name, kind, size)
            wanted += [head, bytes(size)]
            start = self.bytes + len(head)
            self.bytes = start + size
            self.columns.append((name, kind, slice(start, self.bytes)))
        self.wanted = np.frombuffer(b"".join(wanted), np.uint8)
        # Heads are as they must be, and of a number of one byte the eighth bit is not set.
        self.looked_at = np.full(self.bytes, 0xFF, np.uint8)
        for _, kind, values in self.columns:
            self.looked_at[values] = 0 if kind == "float" else 0x80

    def put(self, data: Bytes2D, places: Ints, into: Into) -> Ints | None:
        """Put what begins at these places into arrays, the places after it; None where a record differs."""
        if int(places.max()) + self.bytes > len(data):
            return None
        rows = _rows(data, places, self.bytes)
        if np.any((rows & self.looked_at) != self.wanted):
            return None
        for name, kind, values in self.columns:
            if kind == "float":
                into[name].view(np.uint8)[...] = rows[:, values]
            else:
                into[name][...] = rows[:, values]
        return places + self.bytes

    @staticmethod
    @lru_cache(maxsize=64)
    def of(features: Features) -> "_Stretch":
        """That of some features, worked out once."""
        return _Stretch(features)


class _Heads:
    """All that can stand before the values of a list of known length, by the size of its entry."""

    NONE = 0
    """The row of sizes that no such entry has."""
    NARROWEST = 1
    """The row of one byte a number, the only one of floats."""

    def __init__(self, name: str, kind: str, length: int) -> None:
        widest = 4 * length if kind == "float" else WIDEST * length
        narrowest = widest if kind == "float" else length
        sizes = range(narrowest, widest + 1)
        heads = [b"", *(feature_head(name, kind, size) for size in sizes)]
        most = max(map(len, heads))
        self.values = np.array([0, *sizes])
        """Bytes of the values."""
        self.lengths = np.array([len(head) for head in heads])
        self.used = np.where(np.arange(most) < self.lengths[:, None], 255, 0).astype(np.uint8)
        self.heads = np.array([list(head.ljust(most, b"\0")) for head in heads], np.uint8)
        sizes_of_entries = [read_varint(head, 1)[0] for head in heads[1:]]
        self.row_of_size = np.zeros(sizes_of_entries[-1] + 2, np.intp)
        self.row_of_size[sizes_of_entries] = np.arange(1, len(heads))

    def rows_at(self, data: Bytes2D, words: Words, places: Ints) -> Ints | None:
        """Which head begins at each of these places; None where another one or none does."""
        row = self._row_of(_varints_at(words, places + 1)[0])
        found = _rows(data, places, self.heads.shape[1]) & self.used[row]
        if np.any(row == self.NONE) or not np.array_equal(found, self.heads[row]):
            return None
        return row

    def row_at(self, data: Bytes2D, place: int) -> int:
        """The row of the entry at this place by its size alone."""
        size, _ = read_varint(data[place + 1 : place + 1 + WIDEST].tobytes() + b"\0", 0)
        return int(self.row_of_size[min(size, len(self.row_of_size) - 1)])

    def _row_of(self, sizes: Ints) -> Ints:
        return self.row_of_size[np.minimum(sizes, len(self.row_of_size) - 1)]

    @staticmethod
    @lru_cache(maxsize=64)
    def of(name: str, kind: str, length: int) -> "_Heads":
        """Those of a feature, worked out once."""
        return _Heads(name, kind, length)


def _varints_at(words: Words, places: Ints) -> tuple[Ints, Ints]:
    """Numbers and bytes of the varints that begin at these places; nonsense for longer ones."""
    found = words[places].astype(np.int64)
    second = found >> 7 & 1
    third = second & found >> 15
    numbers = found & 0x7F | (found >> 1 & 0x3F80) * second | (found >> 2 & 0x1FC000) * third
    return numbers, 1 + second + third


def _rows(data: Bytes2D, places: Ints, width: int) -> Bytes2D:
    """Bytes [B, width] from these places on."""
    windows: Bytes2D = np.ndarray((len(data) - width + 1, width), np.uint8, data, strides=(1, 1))
    return windows[places]


def _put_numbers(data: Bytes2D, places: Ints, sizes: Ints, into: npt.NDArray[np.int32]) -> bool:
    """Varints that fill so many bytes into [B, length]; whether they do, and none is of over 3 bytes."""
    width = int(sizes.max()) + 2  # three bytes go on behind the last number
    rows = _rows(data, places, width)
    is_last = rows < 0x80
    narrow = np.min_scalar_type(width)
    is_last &= np.arange(width, dtype=narrow) < sizes.astype(narrow)[:, None]
    ends = np.flatnonzero(is_last)
    length = into.shape[1]
    begins = np.arange(len(places)) * width
    if len(ends) != into.size or not np.array_equal(ends[length - 1 :: length] + 1, begins + sizes):
        return False
    starts = np.empty_like(ends)
    np.add(ends[:-1], 1, out=starts[1:])
    starts[::length] = begins
    ends -= starts
    extra = ends
    if int(extra.max()) >= WIDEST:
        return False
    flat = rows.reshape(-1)
    # The first two bytes of a number at once, and the third of the few that have one.
    pairs = flat[1:].astype(np.uint16)
    pairs <<= 8
    pairs |= flat[:-1]
    found = pairs.take(starts)
    above = found >> 1
    above &= 0x3F80
    above *= found >> 7 & 1
    found &= 0x7F
    found |= above
    into.reshape(-1)[...] = found
    widest = np.flatnonzero(extra == WIDEST - 1)
    into.reshape(-1)[widest] |= (flat[starts[widest] + 2].astype(np.int32)) << 14
    return True
