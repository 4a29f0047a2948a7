"""Simple methods: equal to scikit-learn called directly, or to a case counted by hand."""

import math

import numpy as np
import pytest
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.svm import LinearSVC
from sklearn.utils import compute_sample_weight

from bert_cli.data.finetune import simple
from bert_cli.data.finetune.labels import weights_of

WORDS = ["good", "fine", "bad", "poor", "film", "plot", "song", "a", "i", "the"]


def texts_of(number, seed):
    drawn = np.random.default_rng(seed).choice(WORDS, (number, 5))
    return [" ".join(row) for row in drawn]


TEXTS = texts_of(120, 0)
LABELS = np.array([1 + np.sign(t.count("good") - t.count("bad")) for t in TEXTS], np.int32)


def test_the_majority_and_the_mean_are_those_of_scikit_learn():
    for labels, judge in (
        (LABELS, DummyClassifier(strategy="most_frequent")),
        (np.array([1.5, 4.0, 2.0], np.float32), DummyRegressor(strategy="mean")),
    ):
        inputs = np.zeros((len(labels), 1))
        expected = judge.fit(inputs, labels).predict(np.zeros((4, 1)))
        assert simple.most_frequent(labels, 4) == pytest.approx(expected)


def test_a_regression_on_vectors_is_that_of_scikit_learn():
    vectors = np.random.default_rng(0).normal(size=(180, 8)) + np.arange(8)
    vectors[:120, 0] += LABELS
    scale = np.sqrt(120 / np.sum(vectors[:120] ** 2))
    judge = LogisticRegression(max_iter=1000).fit(scale * vectors[:120], LABELS)
    expected = judge.predict(scale * vectors[120:])
    assert (simple.by_regression(vectors[:120], LABELS, vectors[120:]) == expected).all()


def test_each_of_several_labels_has_a_regression_and_labels_have_weights_as_in_scikit_learn():
    held_out = texts_of(60, 1)
    several = np.stack([[word in t for t in TEXTS] for word in ("good", "bad", "the")], 1)
    several = np.append(several, np.zeros((120, 1), bool), axis=1).astype(np.int8)
    names = ("a", "b", "c", "d")
    tfidf = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    for class_weight in (None, "balanced"):
        method = LogisticRegression(C=10, max_iter=1000, class_weight=class_weight)
        judge = make_pipeline(tfidf, OneVsRestClassifier(method))
        expected = judge.fit(TEXTS, several[:, :3]).decision_function(held_out)
        weights = weights_of(several, names, "balanced") if class_weight else None
        answers = simple.by_regression(TEXTS, several, held_out, weights)
        assert answers[:, :3] == pytest.approx(expected, abs=1e-3)
        assert (answers[:, 3] < -10).all()  # the label of no text
        # Of a label's weight, LinearSVC itself would weigh only its own texts against the others.
        balance = compute_sample_weight(class_weight, LABELS)
        method = LinearSVC(random_state=0)
        judge = make_pipeline(tfidf, method).fit(TEXTS, LABELS, linearsvc__sample_weight=balance)
        weights = weights_of(LABELS, names[:3], "balanced") if class_weight else None
        predicted = simple.by_regression(TEXTS, LABELS, held_out, weights)
        assert (predicted == judge.predict(held_out)).all() and len({*predicted}) == 3
    usual = simple.most_frequent(several, 2)
    assert 1 / (1 + np.exp(-usual)) == pytest.approx(np.tile(several.mean(0), (2, 1)), abs=1e-5)


def test_letters_of_scripts_without_spaces_are_words():
    texts = ["很好的电影", "好看", "很差的电影", "太差了"] * 5
    labels = np.array([1, 1, 0, 0] * 5, np.int32)
    assert simple.by_regression(texts, labels, ["真好", "真差"]).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("texts", "labels"), [(["a b", "c d"], [1, 0]), (["good film", "bad film"], [1, 1])]
)
def test_examples_without_words_or_of_one_label_have_the_most_frequent_label(texts, labels):
    usual = max(labels, key=labels.count) if len({*labels}) == 1 else 0
    predicted = simple.by_regression(texts, np.array(labels, np.int32), ["good", "a"])
    assert predicted.tolist() == [usual, usual]


@pytest.mark.parametrize(
    ("size", "labels", "expected"), [(9, 1, False), (8, 1, True), (9, 2, True)]
)
def test_a_regression_is_left_out_where_there_are_many_letters_for_each_label(
    size, labels, expected, monkeypatch
):
    monkeypatch.setattr(simple, "BYTES", size)
    column = np.ones((3, labels), np.int8) if labels > 1 else np.ones(3, np.int32)
    assert simple.takes_long(["one", "two", "six"], column) == expected


def test_a_word_has_its_most_frequent_label_and_an_unknown_word_that_of_all_words():
    sentences = [["Ada", "met", "May"], ["in", "May"], ["may", "May"]]
    labels = [[1, 0, 1], [0, 0], [0, 0]]
    predicted = simple.by_word(sentences, labels, [["May", "Ada", "Bob"], ["met"]])
    assert predicted == [[0, 1, 0], [0]]


def test_bm25_ranks_as_its_formula_does():
    documents = ["the cat sat", "the dog and the cat ran far", "a bird", "cat cat dog", ""]
    split = [text.split() for text in documents]
    mean = sum(map(len, split)) / len(split)

    def score(query, words):
        total = 0.0
        for word in query.split():
            having = sum(word in other for other in split)
            weight = max(1e-6, math.log((len(split) - having + 0.5) / (having + 0.5)))
            times = words.count(word)
            total += weight * times * 2.2 / (times + 1.2 * (0.25 + 0.75 * len(words) / mean))
        return total

    queries = ["dog bird", "the far bird", "dog", "unknown", "?"]
    ranked = simple.bm25(queries, documents)
    for query, numbers in zip(queries, ranked, strict=True):
        scores = [score(query, words) for words in split]
        expected = sorted((n for n, s in enumerate(scores) if s > 0), key=lambda n: -scores[n])
        assert numbers == expected, query
    assert ranked[3:] == [[], []]
    # Of scripts without spaces a query has pairs of letters, or one letter.
    assert simple.bm25(["黒猫", "猫"], ["黒猫がいる", "犬と白猫"]) == [[0], [1, 0]]


def test_bm25_adds_words_in_the_order_of_the_query():
    words = [[f"{letter}{n}" for n in range(9)] for letter in "abcdefghij"]
    shared = [word for row in words for n, word in enumerate(row) for _ in range(n)]
    documents = [" ".join(row) for row in words]
    assert simple.bm25([" ".join(documents)], documents + shared)[0][:10] == [*range(10)]
