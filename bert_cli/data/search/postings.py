"""Postings: the passages that have a word, and how often; arrays from which BM25 is added up.

A word of five letters or more stands under its first five, as a question looks for it. A block has the postings of as
many numbers of passages as 14 bits count. New passages change the last block, or begin others.

Shapes: N passages, n of them with a term.
"""

import sqlite3
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import count, groupby, pairwise

import numpy as np

from bert_cli.arrays import Floats32, Ints32, Ints64
from bert_cli.data.search import words

BLOCK = 1 << 14  # numbers of passages
MOST = 255  # times that a word is counted in a passage
# The usual values of BM25, as SQLite has them.
SATURATION = 1.2
BY_LENGTH = 0.75
LEAST_RARITY = 1e-6


def write_postings(table: sqlite3.Connection) -> None:
    """Write the blocks of new passages, and remove those whose passages are gone."""
    last = table.execute("SELECT ifnull(max(id), 0) FROM blocks").fetchone()[0]
    gone = f"id NOT IN (SELECT id / {BLOCK} FROM passages)"
    table.execute(f"DELETE FROM blocks WHERE id = ? OR {gone}", [last])
    for block, sizes, postings in _blocks_of(table, last):
        used = np.trim_zeros(sizes, "b")
        table.execute("INSERT INTO blocks VALUES (?, ?)", [block, bytes(used)])
        rows = ((block, *row) for row in postings.items())
        table.executemany("INSERT INTO postings VALUES (?, ?, ?)", rows)


def _blocks_of(
    table: sqlite3.Connection, first: int
) -> Iterator[tuple[int, Ints32, dict[str, bytes]]]:
    """Yield each block from the first of these, with the words of its passages [BLOCK] and the postings of its terms.

    Postings are the offsets in the block (uint16 [n]) of passages and their term frequencies (uint8 [n]).
    """
    query = (
        "SELECT id, indexed(title) || ' ' || indexed(text) FROM passages WHERE id >= ? ORDER BY id"
    )
    texts = table.execute(query, [first * BLOCK])
    for block, passages in groupby(texts, lambda row: row[0] // BLOCK):
        sizes = np.zeros(BLOCK, np.int32)
        codes_by_word: defaultdict[str, int] = defaultdict(count().__next__)
        codes = array("q")
        for number, text in passages:
            parts = words.WORD.findall(text)
            sizes[number % BLOCK] = len(parts)
            codes.extend(map(codes_by_word.__getitem__, parts))
        stored = np.array(list(map(words.word_term, codes_by_word)), np.str_)
        terms, word_term = np.unique(stored, return_inverse=True)
        keys = word_term[np.frombuffer(codes, np.int64)] * BLOCK
        keys, times = np.unique(keys + np.repeat(np.arange(BLOCK), sizes), return_counts=True)
        offsets = (keys % BLOCK).astype(np.uint16)
        times = np.minimum(times, MOST).astype(np.uint8)
        ends = pairwise(np.searchsorted(keys, np.arange(len(terms) + 1) * BLOCK).tolist())
        rows = zip(terms.tolist(), ends, strict=True)
        yield (
            block,
            sizes,
            {term: bytes(offsets[a:b]) + bytes(times[a:b]) for term, (a, b) in rows if term},
        )


class Postings:
    """The postings of an index for one question after another; those that are not stored are made."""

    def __init__(self, table: sqlite3.Connection, numbers: Ints64) -> None:
        self._table = table
        self._last: dict[str, tuple[Ints64, Floats32]] = {}  # of the question that is asked
        lengths = np.zeros((numbers.max(initial=0) // BLOCK + 1, BLOCK), np.int32)
        for block, sizes in table.execute("SELECT * FROM blocks WHERE id < ?", [len(lengths)]):
            used = np.frombuffer(sizes, np.int32)
            lengths[block, : len(used)] = used
        unstored = numbers[lengths.flat[numbers] == 0]
        self._stored = int(unstored[0]) // BLOCK if len(unstored) else len(lengths)  # blocks
        self._made: dict[int, dict[str, bytes]] = {}
        for block, sizes, postings in _blocks_of(table, self._stored):
            lengths[block] = sizes
            self._made[block] = postings
        self._positions = np.full(lengths.shape, -1)  # -1 is gone
        self._positions.flat[numbers] = np.arange(len(numbers))
        of_passages = lengths.flat[numbers]
        mean = of_passages.sum() / max(1, len(numbers))
        self._limits = SATURATION * (1 - BY_LENGTH + BY_LENGTH * of_passages / mean)

    def _blobs(self, term: str) -> Iterator[tuple[int, bytes]]:
        joined = "blocks CROSS JOIN postings ON block = id AND term = ? WHERE id < ?"
        yield from self._table.execute(f"SELECT id, value FROM {joined}", [term, self._stored])
        yield from ((block, made[term]) for block, made in self._made.items() if term in made)

    def frequency(self, term: str) -> int:
        """Return how many passages have a term."""
        if term not in self._last:
            positions = [np.zeros(0, np.int64)]
            times = [np.zeros(0, np.uint8)]
            for block, value in self._blobs(term):
                values = np.frombuffer(value, np.uint8)
                offsets = values[: 2 * len(values) // 3].view(np.uint16)
                positions.append(self._positions[block, offsets])
                times.append(values[2 * len(offsets) :])
            among_all = np.concatenate(positions)
            is_there = among_all >= 0
            counts = np.concatenate(times)[is_there].astype(np.float32)
            self._last[term] = among_all[is_there], counts
        return len(self._last[term][0])

    def bm25(self, terms: Iterable[str]) -> Floats32:
        """Return the BM25 of each passage [N] by terms."""
        scores = np.zeros(len(self._limits), np.float32)
        for term in terms:
            size = self.frequency(term)
            positions, times = self._last[term]
            rarity = max(LEAST_RARITY, np.log((len(scores) - size + 0.5) / (size + 0.5)))
            scores[positions] += (
                rarity * times * (SATURATION + 1) / (times + self._limits[positions])
            )
        self._last = {}
        return scores
