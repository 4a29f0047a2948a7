"""The ranking by words: BM25 of all passages, and of 4-grams for the best of them.

Shapes: N passages, n of them with a term.
"""

import json
import sqlite3
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from bert_cli.arrays import Bools, Floats32, Ints64
from bert_cli.data.search import words
from bert_cli.data.search.ngrams import ngram_scores
from bert_cli.data.search.postings import Postings
from bert_cli.data.search.ranking import best_of, bm25, rarity_of, reranked

RECENT = 32  # terms whose passages stay in memory, for the few steps of a question
RERANKED = 100  # passages
NGRAM_WEIGHT = 2.0
"""Weight of the 4-grams beside the words, both in standard deviations of their BM25 among these passages."""


class Lexical:
    """The words of an index, as it is until it changes."""

    def __init__(self, table: sqlite3.Connection, numbers: Ints64, sizes: Ints64) -> None:
        self.table = table
        self._numbers = numbers
        self._postings = Postings(table, numbers)
        self._lengths = sizes / max(1.0, sizes.mean())
        self.find = lru_cache(RECENT)(self._find)
        """Returns the rows of the passages that have a term, and its times in them [n]."""

    def _find(self, term: str) -> tuple[Ints64, Floats32]:
        parts = term.split(" ")
        if len(parts) > 1:
            return self._postings.find_phrase(parts)
        return self._postings.find(term)

    def frequency(self, term: str) -> int:
        """Return how many passages have a term."""
        return len(self.find(term)[0])

    def terms(self, asked: words.Question) -> list[str]:
        """Return the terms of a question, rare ones first, without those to which BM25 gives no weight.

        These are in half of the passages or more; they are returned where no passage has a rarer word.
        """
        terms = sorted(asked.terms, key=self.frequency)
        present = [t for t in terms if self.frequency(t)]
        rare = [t for t in present if 2 * self.frequency(t) < len(self._numbers)]
        return rare or present or terms

    def scores(self, asked: words.Question, is_allowed: Bools) -> Floats32:
        """Return the score of each passage [N]; 0 without a word of the question.

        It is BM25; for the best passages that of 4-grams is added, and they stay the best.
        """
        scores = np.zeros(len(self._numbers), np.float32)
        for term in self.terms(asked):
            rows, times = self.find(term)
            rarity = rarity_of(len(rows), len(scores))
            scores[rows] += bm25(rarity, times, self._lengths[rows])
        scores *= is_allowed
        answers = np.flatnonzero(scores)
        best = answers[best_of(scores[answers], RERANKED)]
        if len(best):
            texts = column_of(self.table, self._numbers[best].tolist(), "text")
            ngrams = ngram_scores(asked.text, texts)
            scores[best] = reranked(scores[best], ngrams, NGRAM_WEIGHT)
        return scores


def column_of(table: sqlite3.Connection, numbers: Sequence[int], column: str) -> list[Any]:
    """Return a column of passages, or of their vectors."""
    joined = "json_each(?) AS asked JOIN passages ON passages.id = asked.value"
    query = f"SELECT {column} FROM {joined} LEFT JOIN vectors USING (hash) ORDER BY key"
    return [value for (value,) in table.execute(query, [json.dumps([*numbers])])]
