"""Simple methods: what a person would use instead of a trained model, learned from the training examples alone.

Shapes: n training examples, m held-out examples, D size of a vector.
"""

import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.special import logit

from bert_cli.arrays import Array
from bert_cli.data.search import ranking, words
from bert_cli.data.search.passages import UNSPACED

WORD = rf"[{UNSPACED}]|(?u:\b\w\w+\b)"  # scikit-learn's, and each letter where words have no spaces
BYTES = 40_000_000  # of training texts for one regression: some minutes
DEPTH = 100  # documents that BM25 ranks


def most_frequent(labels: Array, size: int) -> Array:
    """Return the most frequent of label numbers [n], or the mean of scores, for each of `size` examples.

    Of several labels [n, L] return the log odds of the frequency of each [size, L].
    """
    if labels.ndim == 2:
        # A label that all texts have, or none, would have an infinite logit.
        return np.tile(logit(labels.mean(0).clip(1e-6, 1 - 1e-6)), (size, 1))
    usual = labels.mean() if labels.dtype.kind == "f" else np.bincount(labels).argmax()
    return np.full(size, usual, labels.dtype)


def takes_long(texts: Sequence[str], labels: Array) -> bool:
    """Return whether a regression on the words of texts [n] is too large for a baseline."""
    models = labels.shape[1] if labels.ndim == 2 else 1
    return models * sum(map(len, texts)) > BYTES


def by_regression(inputs: Any, labels: Array, held_out: Any, weights: Array | None = None) -> Array:
    """Return labels [m] by logistic regression on one and two words of texts (tf-idf), or on vectors [n, D].

    Sublinear term frequencies and C = 10 are as good as any simple pipeline of scikit-learn on short and on long texts.
    More than two labels of texts have a linear support vector machine. For 5,191 questions about 30 articles it takes a
    thirtieth of the time, and labels 0.791 correctly instead of 0.761. Vectors are scaled as by `bert classify --few`.
    Examples with one label, or without a word, have the most frequent label. Of several labels [n, L] return log odds
    [m, L], each by a regression of its own. `weights` are shaped as labels; their ratio to the mean counts.
    """
    from sklearn import feature_extraction, linear_model, svm  # takes a second
    from threadpoolctl import threadpool_limits

    usual = most_frequent(labels, len(held_out))
    is_text = isinstance(inputs[0], str)
    # Vectors have the mean square 1, where scikit-learn's own value of 1 fits.
    inverse_penalty = 10.0 if is_text else 1.0
    method = linear_model.LogisticRegression(C=inverse_penalty, max_iter=1000)
    if is_text and labels.ndim == 1 and len(np.unique(labels)) > 2:
        method = svm.LinearSVC(random_state=0)
    # Of mean 1: C weighs the penalty against the sum over examples.
    if weights is None:
        weights = np.ones(labels.shape)
    else:
        weights = weights / weights.mean(0)
    # Several threads would wait for one another: the vectors are short.
    with threadpool_limits(1), warnings.catch_warnings(action="ignore"):
        try:
            if is_text:
                columns = feature_extraction.text.TfidfVectorizer(
                    token_pattern=WORD, ngram_range=(1, 2), sublinear_tf=True
                )
                known = columns.fit_transform(inputs)
                asked = columns.transform(held_out)
            else:
                scale = unit_scale(inputs)
                known = scale * inputs
                asked = scale * held_out
            if labels.ndim == 1:
                predicted: Array = method.fit(known, labels, weights).predict(asked)
                return predicted
        # Of scikit-learn, for one label alone or texts without a word of two letters.
        except ValueError:
            return usual
        for label in np.flatnonzero(labels.any(0) & ~labels.all(0)):
            method.fit(known, labels[:, label], weights[:, label])
            usual[:, label] = method.decision_function(asked)
        return usual


def unit_scale(vectors: Array) -> np.floating[Any]:
    """Return the number that makes the mean square of the lengths of vectors [n, D] 1."""
    scale: np.floating[Any] = np.mean(np.sum(np.square(vectors), 1)) ** -0.5
    return scale


def by_word(
    sentences: Sequence[Sequence[str]],
    labels: Sequence[Sequence[int]],
    held_out: Sequence[Sequence[str]],
) -> list[list[int]]:
    """Return for each held-out word its most frequent label; for an unknown word, that of all words."""
    sides = zip(sentences, labels, strict=True)
    pairs: list[tuple[str, int]] = []
    for sentence, numbers in sides:
        pairs += zip(sentence, numbers, strict=True)
    usual = Counter(number for _, number in pairs).most_common(1)[0][0]
    # The most frequent label of a word comes last, and stays.
    best = {word: number for (word, number), _ in reversed(Counter(pairs).most_common())}
    return [[best.get(word, usual) for word in sentence] for sentence in held_out]


def bm25(queries: Sequence[str], documents: Sequence[str]) -> list[list[int]]:
    """Return the numbers of the best documents for each query; each has a word of the query."""
    # Of scripts without spaces the letters and the pairs of neighbours: a query of one letter has no pair.
    known = [
        Counter(words.words_of(text)) | Counter(words.all_words_of(text)) for text in documents
    ]
    lengths = np.array([counts.total() for counts in known])
    lengths = lengths / max(1.0, lengths.mean())
    documents_of: defaultdict[str, list[int]] = defaultdict(list)
    for number, counts in enumerate(known):
        for word in counts:
            documents_of[word].append(number)
    best: list[list[int]] = []
    for query in queries:
        scores = np.zeros(len(documents), np.float32)
        for word in filter(documents_of.__contains__, dict.fromkeys(words.words_of(query))):
            having = documents_of[word]
            times = np.array([known[number][word] for number in having])
            rarity = ranking.rarity_of(len(having), len(documents))
            scores[having] += ranking.bm25(rarity, times, lengths[having])
        best.append([number for number in ranking.best_of(scores, DEPTH) if scores[number]])
    return best
