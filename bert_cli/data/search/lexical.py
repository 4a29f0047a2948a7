"""The ranking by words: BM25 of all passages, and of 4-grams for the best of them.

Words come from the postings; what only FTS5 knows, such as phrases, it scores itself.

Shapes: N passages.
"""

import json
import sqlite3
from collections.abc import Sequence

import numpy as np

from bert_cli.arrays import Bools, Floats32, Ints64
from bert_cli.data.search import words
from bert_cli.data.search.ngrams import ngram_scores
from bert_cli.data.search.postings import Postings
from bert_cli.data.search.ranking import best_of, reranked

CANDIDATES = 10_000
"""Passages that FTS5 ranks, about: those with the rarest of its terms. It takes a microsecond for each."""
RERANKED = 100  # passages
NGRAM_WEIGHT = 2.0
"""Weight of the 4-grams beside the words, both in standard deviations of their BM25 among these passages."""


class Lexical:
    """The words of an index, as it is until it changes."""

    def __init__(self, table: sqlite3.Connection, numbers: Ints64) -> None:
        self.table = table
        self._numbers = numbers
        self._postings = Postings(table, numbers)
        self._frequencies: dict[str, int] = {}

    def frequency(self, term: str) -> int:
        """Return how many passages have a term."""
        if term not in self._frequencies:
            if stored := words.term_of(term):
                frequency = self._postings.frequency(stored)
            else:
                counted = "SELECT count(*) FROM words WHERE words MATCH ?"
                frequency = self.table.execute(counted, [term]).fetchone()[0]
            self._frequencies[term] = frequency
        return self._frequencies[term]

    def terms(self, asked: words.Question) -> list[str]:
        """Return the terms of a question, rare ones first, without those to which BM25 gives no weight.

        These are in half of the passages or more; they are returned where no passage has a rarer word.
        """
        terms = sorted(asked.terms, key=self.frequency)
        present = [t for t in terms if self.frequency(t)]
        rare = [t for t in present if 2 * self.frequency(t) < len(self._numbers)]
        return rare or present or terms

    def scores(self, asked: words.Question, is_allowed: Bools | np.bool) -> Floats32:
        """Return the score of each passage [N]; 0 without a word of the question.

        It is BM25; for the best passages that of 4-grams is added, and they stay the best.
        """
        stored = {term: words.term_of(term) for term in self.terms(asked)}
        scores = self._postings.bm25(filter(None, stored.values()))
        self._add_fts5(scores, [term for term in stored if not stored[term]])
        scores *= is_allowed
        answers = np.flatnonzero(scores)
        best = answers[best_of(scores[answers], RERANKED)]
        if len(best):
            texts = texts_of(self.table, self._numbers[best].tolist())
            ngrams = ngram_scores(asked.text, texts)
            scores[best] = reranked(scores[best], ngrams, NGRAM_WEIGHT)
        return scores

    def _add_fts5(self, scores: Floats32, terms: Sequence[str]) -> None:
        """Add the scores of terms of FTS5; in a large index only to passages with a rare one."""
        sizes = np.cumsum([self.frequency(term) for term in terms])
        rare = max(1, int(np.searchsorted(sizes, CANDIDATES, "right")))
        first = words.any_of(terms[:rare])
        others = words.any_of(terms[rare:])
        for operator in ("NOT", "AND"):  # each passage once, with all of its words
            query = f"({first}) {operator} ({others})"
            ranking = "SELECT rowid, -bm25(words) FROM words WHERE words MATCH ?"
            if rows := self.table.execute(ranking, [query]).fetchall():
                numbers, values = zip(*rows, strict=True)
                scores[np.searchsorted(self._numbers, numbers)] += np.array(values, np.float32)


def texts_of(table: sqlite3.Connection, numbers: Sequence[int]) -> list[str]:
    """Return the texts of passages."""
    joined = "FROM json_each(?) AS asked JOIN passages ON passages.id = asked.value"
    rows = table.execute(f"SELECT text {joined} ORDER BY key", [json.dumps([*numbers])])
    return [text for (text,) in rows]
