"""Postings: the passages that have a word, and how often.

A word stands under itself with its places, by which phrases are found; one of five letters or more also under its first
five. A block has the postings of as many numbers of passages as 14 bits count. New passages
change the last block, or begin others.

Shapes: N passages, n of them with a term.
"""

import sqlite3
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import chain, count, groupby, pairwise

import numpy as np

from bert_cli.arrays import Floats32, Ints32, Ints64, UInts8
from bert_cli.data.search import words

BLOCK = 1 << 14  # numbers of passages
MOST = 255  # times that a word is counted in a passage
PLACES = 256
"""Words of a passage that have places of their own in 8 bits. Passages of 1,000 characters have fewer; of one that has
more, words that are 256 words apart count as neighbours."""
NOWHERE = np.zeros(0, np.int64), np.zeros(0, np.uint8)


def write_postings(table: sqlite3.Connection) -> None:
    """Write the blocks of new passages, and remove those whose passages are gone."""
    last = table.execute("SELECT ifnull(max(id), 0) FROM blocks").fetchone()[0]
    gone = f"id NOT IN (SELECT id / {BLOCK} FROM passages)"
    table.execute(f"DELETE FROM blocks WHERE id = ? OR {gone}", [last])
    for block, sizes, postings in _blocks_of(table, last):
        used = np.trim_zeros(sizes, "b")
        table.execute("INSERT INTO blocks VALUES (?, ?)", [block, bytes(used)])
        rows = ((block, term, *values) for term, values in postings.items())
        table.executemany("INSERT INTO postings VALUES (?, ?, ?, ?)", rows)


def _blocks_of(
    table: sqlite3.Connection, first: int
) -> Iterator[tuple[int, Ints32, dict[str, tuple[bytes, bytes]]]]:
    """Yield each block from the first of these, with the words of its passages [BLOCK] and the postings of its terms.

    Postings are the offsets in the block (uint16 [n]) of passages and their term frequencies (uint8 [n]); then, for
    words, their places in each of these (uint8).
    """
    query = "SELECT id, title, text FROM passages WHERE id >= ? ORDER BY id"
    texts = table.execute(query, [first * BLOCK])
    for block, passages in groupby(texts, lambda row: row[0] // BLOCK):
        sizes = np.zeros(BLOCK, np.int32)
        codes_by_word: defaultdict[str, int] = defaultdict(count().__next__)
        codes = array("q")
        places = array("q")
        for number, *fields in passages:
            first = 0
            for field in fields:
                parts = words.all_words_of(field)
                codes.extend(map(codes_by_word.__getitem__, parts))
                places.extend(range(first, first + len(parts)))
                first += len(parts) + 1  # no phrase begins in a title and ends in the text
                sizes[number % BLOCK] += len(parts)
        stored = np.array([*codes_by_word, *map(words.first_letters, codes_by_word)], np.str_)
        terms, term_of_word = np.unique(stored, return_inverse=True)
        of_words = np.frombuffer(codes, np.int64)
        both = term_of_word[np.concatenate([of_words, of_words + len(codes_by_word)])]
        keys = both * BLOCK + np.tile(np.repeat(np.arange(BLOCK), sizes), 2)
        keys = np.sort(keys * PLACES + np.tile(np.frombuffer(places, np.int64) % PLACES, 2))
        starts = np.flatnonzero(np.diff(keys // PLACES, prepend=-1))
        ranks = np.arange(len(keys)) - np.repeat(starts, np.diff(starts, append=len(keys)))
        keys = keys[ranks < MOST]
        starts = np.flatnonzero(np.diff(keys // PLACES, prepend=-1, append=-1))
        pairs = keys[starts[:-1]] // PLACES
        offsets = (pairs % BLOCK).astype(np.uint16)
        times = np.diff(starts).astype(np.uint8)
        kept = (keys % PLACES).astype(np.uint8)
        ends = pairwise(np.searchsorted(pairs, np.arange(len(terms) + 1) * BLOCK).tolist())
        postings: dict[str, tuple[bytes, bytes]] = {}
        for term, (a, b) in zip(terms.tolist(), ends, strict=True):
            in_order = b"" if term.endswith("*") else bytes(kept[starts[a] : starts[b]])
            postings[term] = bytes(offsets[a:b]) + bytes(times[a:b]), in_order
        postings.pop("", None)
        yield block, sizes, postings


class Postings:
    """The postings of an index; those that are not stored are made."""

    def __init__(self, table: sqlite3.Connection, numbers: Ints64) -> None:
        self._table = table
        lengths = np.zeros((numbers.max(initial=0) // BLOCK + 1, BLOCK), np.int32)
        for block, sizes in table.execute("SELECT * FROM blocks WHERE id < ?", [len(lengths)]):
            used = np.frombuffer(sizes, np.int32)
            lengths[block, : len(used)] = used
        unstored = numbers[lengths.flat[numbers] == 0]
        self._stored = int(unstored[0]) // BLOCK if len(unstored) else len(lengths)  # blocks
        self._made: dict[int, dict[str, tuple[bytes, bytes]]] = {}
        for block, sizes, postings in _blocks_of(table, self._stored):
            lengths[block] = sizes
            self._made[block] = postings
        self._positions = np.full(lengths.shape, -1)  # -1 is gone
        self._positions.flat[numbers] = np.arange(len(numbers))
        self.lengths = lengths.flat[numbers]
        """Words of each passage [N]."""

    def _rows(self, term: str) -> Iterator[tuple[Ints64, UInts8, bytes]]:
        """Yield the positions of passages with a term in each block, its times in them [n], and its places."""
        joined = "blocks CROSS JOIN postings ON block = id AND term = ? WHERE id < ?"
        query = f"SELECT id, value, places FROM {joined}"
        yielded = self._table.execute(query, [term, self._stored])
        made = ((block, *made[term]) for block, made in self._made.items() if term in made)
        for block, value, places in chain(yielded, made):
            values = np.frombuffer(value, np.uint8)
            offsets = values[: 2 * len(values) // 3].view(np.uint16)
            yield self._positions[block, offsets], values[2 * len(offsets) :], places

    def find(self, term: str) -> tuple[Ints64, Floats32]:
        """Return the positions of passages with a stored term, in order, and its times in them [n]."""
        rows = [(positions, times) for positions, times, _ in self._rows(term)]
        positions, times = map(np.concatenate, zip(NOWHERE, *rows, strict=True))
        is_there = positions >= 0
        return positions[is_there], times[is_there].astype(np.float32)

    def find_phrase(self, parts: Sequence[str]) -> tuple[Ints64, Floats32]:
        """Return as `find` the passages with these words one after another."""
        keys = reduce(np.intersect1d, (self._places(word, n) for n, word in enumerate(parts)))
        positions, times = np.unique(keys // PLACES, return_counts=True)
        return positions, times.astype(np.float32)

    def _places(self, word: str, back: int) -> Ints64:
        """Return the places of a word in all passages, moved back; a number for each."""
        keys = [NOWHERE[0]]
        for positions, times, places in self._rows(word):
            moved = np.frombuffer(places, np.uint8) - np.uint8(back % PLACES)  # modulo PLACES
            keys.append(np.repeat(positions, times) * PLACES + moved)
        among_all = np.concatenate(keys)
        return among_all[among_all >= 0]
