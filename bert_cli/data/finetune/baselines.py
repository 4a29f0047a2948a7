"""Baselines: what a person would use instead of a trained model, learned from the training examples alone.

Of more examples than a few seconds allow, a sample is read, which depends on their number and size alone.
Shapes: n training examples, m held-out examples, D size of a vector.
"""

import sqlite3
import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np
import numpy.typing as npt

from bert_cli.data.search import words
from bert_cli.data.search.passages import UNSPACED

WORD = rf"[{UNSPACED}]|(?u:\b\w\w+\b)"  # scikit-learn's, and each letter where words have no spaces
BYTES = 8_000_000  # of training texts with two labels, of more labels fewer: about five seconds
DEPTH = 100  # documents that BM25 ranks
Numbers = npt.NDArray[np.int32]


def most_frequent(labels: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    """Return the most frequent of label numbers [n], or the mean of scores, for each of `size` examples."""
    is_score = labels.dtype.kind == "f"
    return np.full(size, labels.mean() if is_score else np.bincount(labels).argmax(), labels.dtype)


def sample_of(texts: Sequence[str], labels: Numbers) -> npt.NDArray[np.int64]:
    """Return the numbers of the texts [n] that a classifier reads, all if they are few."""
    size = sum(len(text.encode("utf-8", "replace")) for text in texts)
    most = len(texts) * BYTES // max(1, size * (len(np.unique(labels)) - 1))
    return np.sort(np.random.default_rng(0).permutation(len(texts))[: max(1, most)])


def by_regression(inputs: Any, labels: Numbers, held_out: Any) -> Numbers:
    """Return the labels [m] of held-out examples by logistic regression.

    It reads the counts of words of texts [n], or standardised vectors [n, D]. Of examples with one label or without
    a word all have the most frequent label.
    """
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from threadpoolctl import threadpool_limits

    is_text = isinstance(inputs[0], str)
    columns = CountVectorizer(token_pattern=WORD) if is_text else StandardScaler()
    method = make_pipeline(columns, LogisticRegression(max_iter=1000))
    # Several threads would wait for one another: the vectors are short.
    with threadpool_limits(1), warnings.catch_warnings(action="ignore"):
        try:
            method.fit(inputs, labels)
        except ValueError:
            return most_frequent(labels, len(held_out))
        predicted: Numbers = method.predict(held_out)
        return predicted


def by_word(
    sentences: Sequence[Sequence[str]],
    labels: Sequence[Sequence[int]],
    held_out: Sequence[Sequence[str]],
) -> list[list[int]]:
    """Return for each held-out word its most frequent label; for an unknown word, that of all words."""
    counts: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for sentence, numbers in zip(sentences, labels, strict=True):
        for word, number in zip(sentence, numbers, strict=True):
            counts[word][number] += 1
    usual = sum(counts.values(), Counter()).most_common(1)[0][0]
    best = {word: numbers.most_common(1)[0][0] for word, numbers in counts.items()}
    return [[best.get(word, usual) for word in sentence] for sentence in held_out]


def bm25(queries: Sequence[str], documents: Sequence[str]) -> list[list[int]]:
    """Return the numbers of the best documents for each query by SQLite's FTS5; each has a word of the query."""
    table = f'CREATE VIRTUAL TABLE words USING fts5(text, content="", tokenize="{words.TOKENIZER}")'
    best = f"SELECT rowid FROM words WHERE words MATCH ? ORDER BY rank, rowid LIMIT {DEPTH}"
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute(table)
        rows = ((number, words.indexed(text)) for number, text in enumerate(documents))
        connection.executemany("INSERT INTO words(rowid, text) VALUES (?, ?)", rows)
        asked = (words.any_of(words.words_of(query)) for query in queries)
        return [[n for (n,) in connection.execute(best, [q])] if q else [] for q in asked]
