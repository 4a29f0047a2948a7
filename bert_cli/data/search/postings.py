"""Postings: the passages that have a word, and how often.

A word stands under itself with its places, by which phrases are found; one of five letters or more also under its first
five. A block has the postings of as many numbers of passages as 14 bits count. New passages
change the last block, or begin others.

Shapes: N passages, n of them with a term.
"""

import json
import sqlite3
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import chain, count, groupby, pairwise

import numpy as np

from bert_cli.arrays import Floats32, Ints64, UInts8
from bert_cli.data.search import words

BLOCK = 1 << 14  # numbers of passages
MOST = 255  # times that a word is counted in a passage
PLACES = 256
"""Words of a passage that have places of their own in 8 bits. Passages of 1,000 characters have fewer; of one that has
more, words that are 256 words apart count as neighbours."""
NOWHERE = np.zeros(0, np.int64), np.zeros(0, np.uint8)


def write_postings(table: sqlite3.Connection) -> None:
    """Write the blocks of new passages, and remove those whose passages are gone."""
    last = stored_of(table) // BLOCK
    gone = f"SELECT value FROM json_each(?) EXCEPT SELECT id / {BLOCK} FROM passages WHERE id < ?"
    blocks = json.dumps([*range(last + 1)]), last * BLOCK
    table.execute(f"DELETE FROM postings WHERE block IN ({gone})", blocks)
    for block, postings in _blocks_of(table, last):
        rows = ((block, term, *values) for term, values in postings.items())
        table.executemany("INSERT INTO postings VALUES (?, ?, ?, ?)", rows)
    table.execute("INSERT OR REPLACE INTO facts SELECT 'stored', max(id) FROM passages")


def stored_of(table: sqlite3.Connection) -> int:
    """Return the number of the last passage that has postings; 0 if none has."""
    stored = table.execute("SELECT value FROM facts WHERE name = 'stored'").fetchone()
    return (stored and stored[0]) or 0


def _blocks_of(
    table: sqlite3.Connection, first: int
) -> Iterator[tuple[int, dict[str, tuple[bytes, bytes]]]]:
    """Yield each block from the first of these, with the postings of its terms.

    Postings are the offsets in the block (uint16 [n]) of passages and their term frequencies (uint8 [n]); then, for
    words, their places in each of these (uint8).
    """
    query = "SELECT id, size, title, text FROM passages WHERE id >= ? ORDER BY id"
    texts = table.execute(query, [first * BLOCK])
    for block, passages in groupby(texts, lambda row: row[0] // BLOCK):
        owners: list[Ints64] = []
        codes_by_word: defaultdict[str, int] = defaultdict(count().__next__)
        codes = array("q")
        places = array("q")
        for number, size, *fields in passages:
            owners.append(np.full(size, number % BLOCK))
            first = 0
            for field in fields:
                parts = words.all_words_of(field)
                codes.extend(map(codes_by_word.__getitem__, parts))
                places.extend(range(first, first + len(parts)))
                first += len(parts) + 1  # no phrase begins in a title and ends in the text
        stored = np.array([*codes_by_word, *map(words.first_letters, codes_by_word)], np.str_)
        terms, term_of_word = np.unique(stored, return_inverse=True)
        of_words = np.frombuffer(codes, np.int64)
        both = term_of_word[np.concatenate([of_words, of_words + len(codes_by_word)])]
        keys = both * BLOCK + np.tile(np.concatenate(owners), 2)
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
        yield block, postings


class Postings:
    """The postings of an index; those that are not stored are made."""

    def __init__(self, table: sqlite3.Connection, numbers: Ints64) -> None:
        self._table = table
        stored = stored_of(table)
        # A block with a passage that is not stored is made.
        beyond = int(numbers[numbers > stored].min(initial=stored + BLOCK)) // BLOCK
        self._made = dict(_blocks_of(table, beyond))
        self._positions = np.full((numbers.max(initial=0) // BLOCK + 1, BLOCK), -1)  # -1 is gone
        self._positions.flat[numbers] = np.arange(len(numbers))
        self._stored = json.dumps([*range(min(beyond, len(self._positions)))])  # blocks

    def _rows(self, term: str) -> Iterator[tuple[Ints64, UInts8, bytes]]:
        """Yield the positions of passages with a term in each block, its times in them [n], and its places."""
        joined = "json_each(?) AS stored CROSS JOIN postings ON block = stored.value AND term = ?"
        query = f"SELECT block, postings.value, places FROM {joined}"
        yielded = self._table.execute(query, [self._stored, term])
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
