"""Postings: the passages that have a word, how often, and its positions in them.

Phrases are found by these positions. The forms of a word are the words that begin as it does. A block has the
postings of as many numbers of passages as 14 bits count. New passages change the last block, or begin others.

Shapes: N passages, n of them with a word.
"""

import json
import sqlite3
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import count, groupby, pairwise

import numpy as np

from bert_cli.arrays import Floats32, Ints64, UInts8
from bert_cli.data.search import words

BLOCK = 1 << 14  # numbers of passages
MOST = 255  # times that a word is counted in a passage
WORD_POSITIONS = 256
"""Word positions are stored modulo this number, in 8 bits. Most passages of 1,000 characters have fewer words;
in a longer one, words with a multiple of 256 words between them count as neighbours."""
NO_POSTING = 0, b"", b"", b""
LAST = "\U0010ffff"  # after every word that begins equally
Posting = tuple[bytes, bytes, bytes]
"""The offsets in the block (uint16 [n]) of passages with a word, its times in them (uint8 [n]), and its positions in
each of these (uint8 [sum of the times])."""


def write_postings(table: sqlite3.Connection) -> None:
    """Write the blocks of new passages, and remove those whose passages are gone."""
    last = stored_of(table) // BLOCK
    gone = f"SELECT value FROM json_each(?) EXCEPT SELECT id / {BLOCK} FROM passages WHERE id < ?"
    blocks = json.dumps([*range(last + 1)]), last * BLOCK
    table.execute(f"DELETE FROM postings WHERE block IN ({gone})", blocks)
    for block, postings in _blocks_of(table, last):
        rows = ((block, word, *posting) for word, posting in postings.items())
        table.executemany("INSERT INTO postings VALUES (?, ?, ?, ?, ?)", rows)
    table.execute("INSERT OR REPLACE INTO facts SELECT 'stored', max(id) FROM passages")


def stored_of(table: sqlite3.Connection) -> int:
    """Return the number of the last passage that has postings; 0 if none has."""
    stored = table.execute("SELECT value FROM facts WHERE name = 'stored'").fetchone()
    return (stored and stored[0]) or 0


def _blocks_of(table: sqlite3.Connection, first: int) -> Iterator[tuple[int, dict[str, Posting]]]:
    """Yield each block from the first of these, with the postings of its words."""
    query = "SELECT id, title, text FROM passages WHERE id >= ? ORDER BY id"
    texts = table.execute(query, [first * BLOCK])
    for block, passages in groupby(texts, lambda row: row[0] // BLOCK):
        owners: list[Ints64] = []
        codes_by_word: defaultdict[str, int] = defaultdict(count().__next__)
        codes = array("q")
        positions = array("q")
        for number, *fields in passages:
            before = len(codes)
            start = 0
            for field in fields:
                parts = words.all_words_of(field)
                codes.extend(map(codes_by_word.__getitem__, parts))
                positions.extend(range(start, start + len(parts)))
                start += len(parts) + 1  # no phrase begins in a title and ends in the text
            owners.append(np.full(len(codes) - before, number % BLOCK))
        keys = np.frombuffer(codes, np.int64) * BLOCK + np.concatenate(owners)
        keys = np.sort(keys * WORD_POSITIONS + np.frombuffer(positions, np.int64) % WORD_POSITIONS)
        starts = np.flatnonzero(np.diff(keys // WORD_POSITIONS, prepend=-1))
        ranks = np.arange(len(keys)) - np.repeat(starts, np.diff(starts, append=len(keys)))
        keys = keys[ranks < MOST]
        starts = np.flatnonzero(np.diff(keys // WORD_POSITIONS, prepend=-1, append=-1))
        pairs = keys[starts[:-1]] // WORD_POSITIONS
        offsets = (pairs % BLOCK).astype(np.uint16)
        times = np.diff(starts).astype(np.uint8)
        kept = (keys % WORD_POSITIONS).astype(np.uint8)
        ends = pairwise(np.searchsorted(pairs, np.arange(len(codes_by_word) + 1) * BLOCK).tolist())
        postings: dict[str, Posting] = {}
        for word, (a, b) in zip(codes_by_word, ends, strict=True):
            postings[word] = (
                bytes(offsets[a:b]),
                bytes(times[a:b]),
                bytes(kept[starts[a] : starts[b]]),
            )
        yield block, postings


class Postings:
    """The postings of an index; those that are not stored are made."""

    def __init__(self, table: sqlite3.Connection, numbers: Ints64) -> None:
        self._table = table
        stored = stored_of(table)
        # A block with a passage that is not stored is made.
        beyond = int(numbers[numbers > stored].min(initial=stored + BLOCK)) // BLOCK
        self._made = dict(_blocks_of(table, beyond))
        self._row_of = np.full((numbers.max(initial=0) // BLOCK + 1, BLOCK), -1)  # -1 is gone
        self._row_of.flat[numbers] = np.arange(len(numbers))
        self._stored = json.dumps([*range(min(beyond, len(self._row_of)))])  # blocks

    def _read(self, term: str) -> tuple[Ints64, UInts8, UInts8]:
        """Return the rows of passages with a term, -1 for one that is gone, its times in them, and its word positions.

        A passage stands in it once for each word that the term has.
        """
        first = term.removesuffix("*")
        last = first + LAST
        if first == term:
            last = term
        joined = "json_each(?) AS stored CROSS JOIN postings ON block = stored.value"
        query = f"SELECT block, offsets, times, positions FROM {joined} AND word BETWEEN ? AND ?"
        postings = self._table.execute(query, [self._stored, first, last]).fetchall()
        for block, made in self._made.items():
            postings += [(block, *made[word]) for word in made if first <= word <= last]
        blocks, *columns = zip(NO_POSTING, *postings, strict=True)
        offsets, times, positions = (
            np.frombuffer(b"".join(column), np.uint8) for column in columns
        )
        block_of_posting = np.repeat(blocks, list(map(len, columns[1])))
        return self._row_of[block_of_posting, offsets.view(np.uint16)], times, positions

    def find(self, term: str) -> tuple[Ints64, Floats32]:
        """Return the rows of passages with a word, or with one that begins as before a star, and its times [n]."""
        rows, times, _ = self._read(term)
        times_of_all = np.bincount(rows + 1, times)[1:]  # without those that are gone
        present = np.flatnonzero(times_of_all)
        return present, times_of_all[present].astype(np.float32)

    def find_phrase(self, parts: Sequence[str]) -> tuple[Ints64, Floats32]:
        """Return as `find` the passages with these words one after another."""
        keys = [self._positions_of(word) for word in parts]
        rarest = int(np.argmin([len(positions) for positions in keys]))
        # The positions of the rarest word are looked up among the positions of "the", which can be millions.
        starts = keys[rarest]
        for number, among in enumerate(keys):
            sought = starts - starts % WORD_POSITIONS + (starts + number - rarest) % WORD_POSITIONS
            at = np.searchsorted(among, sought)
            starts = starts[among.take(at, mode="clip") == sought]
        rows, times = np.unique(starts // WORD_POSITIONS, return_counts=True)
        return rows, times.astype(np.float32)

    def _positions_of(self, word: str) -> Ints64:
        """Return the positions of a word in all passages, in order; a number for each."""
        rows, times, positions = self._read(word)
        keys = np.repeat(rows, times) * WORD_POSITIONS + positions
        return keys[keys >= 0]
