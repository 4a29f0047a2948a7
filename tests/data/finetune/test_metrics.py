"""Scores by hand, and entity scores equal to those of the nervaluate package on random labels."""

import numpy as np
import pytest

from bert_cli.data.finetune.metrics import (
    EntityScore,
    accuracy,
    chunks,
    confusion,
    entity_scores,
    f1,
    macro_f1,
    matthews,
    pearson,
    score,
    spearman,
)
from bert_cli.errors import DataError

LABELS = np.array([1, 1, 1, 1, 0, 0, 0, 0, 0, 0])
FOUND = np.array([1, 1, 1, 0, 1, 0, 0, 0, 0, 0])
# 3 hits, 1 miss, 1 false alarm, 5 right rejections.


def test_scores_of_two_classes_are_those_reckoned_by_hand():
    assert accuracy(LABELS, FOUND) == pytest.approx(8 / 10)
    assert f1(LABELS, FOUND) == pytest.approx(2 * 3 / (2 * 3 + 1 + 1))
    assert matthews(LABELS, FOUND) == pytest.approx((3 * 5 - 1 * 1) / np.sqrt(4 * 4 * 6 * 6))
    assert macro_f1(LABELS, FOUND) == pytest.approx((6 / 8 + 10 / 12) / 2)


def test_f1_is_of_label_one():
    assert f1(1 - LABELS, 1 - FOUND) == pytest.approx(10 / 12)


def test_macro_f1_counts_the_labels_that_occur():
    labels, found = np.array([0, 0, 2, 2]), np.array([0, 2, 2, 3])
    # 0: 2/3; 2: one hit, one miss, one false alarm; 3: none right; 1 does not occur.
    assert macro_f1(labels, found) == pytest.approx((2 / 3 + 1 / 2 + 0) / 3)


def test_confusion_has_the_labels_as_rows_and_the_predictions_as_columns():
    table = confusion(np.array([0, 0, 1, 3]), np.array([0, 1, 1, 0]), 4)
    assert table == [[1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]]
    assert all(type(count) is int for row in table for count in row)


def test_correlations_are_those_reckoned_by_hand():
    labels, found = np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 3.0, 2.0, 5.0], np.float32)
    # Deviations -1.5 -.5 .5 1.5 and -1.75 .25 -.75 2.25; ranks 1 3 2 4.
    assert pearson(labels, found) == pytest.approx(5.5 / np.sqrt(5 * 8.75))
    assert spearman(labels, found) == pytest.approx(1 - 6 * 2 / (4 * 15))
    assert spearman(labels, np.array([1, 10, 100, 1000])) == pytest.approx(1)


def test_spearman_gives_equal_values_their_mean_rank():
    # Ranks 1.5 1.5 3 and 1 2 3.
    assert spearman(np.array([0, 0, 1]), np.array([1, 2, 3])) == pytest.approx(np.sqrt(3) / 2)


@pytest.mark.parametrize("metric", [matthews, pearson, spearman])
def test_a_constant_prediction_scores_zero_and_warns_of_nothing(metric):
    assert metric(LABELS, np.zeros(10)) == 0.0
    assert metric(np.ones(10), FOUND) == 0.0


def test_f1_of_nothing_found_is_zero_and_warns_of_nothing():
    assert f1(LABELS, np.zeros(10, int)) == 0.0
    assert f1(np.zeros(3, int), np.zeros(3, int)) == 0.0
    assert macro_f1(LABELS, np.zeros(10, int)) == pytest.approx((12 / 16 + 0) / 2)


def test_scores_are_asked_for_by_name_and_are_plain_numbers():
    told = score(("accuracy", "f1"), LABELS, FOUND)
    assert told == {"accuracy": pytest.approx(0.8), "f1": pytest.approx(0.75)}
    assert all(type(value) is float for value in told.values())


@pytest.mark.parametrize(("labels", "found"), [([], []), ([1, 0], [1])])
def test_nothing_and_other_lengths_cannot_be_scored(labels, found):
    with pytest.raises(DataError, match=r"predictions \(\d\): cannot be scored"):
        score(("accuracy",), np.array(labels), np.array(found))


@pytest.mark.parametrize(
    ("labels", "there"),
    [
        ("O O", []),
        ("B-A I-A O B-B", [("A", 0, 1), ("B", 3, 3)]),
        ("B-A B-A I-A", [("A", 0, 0), ("A", 1, 2)]),
        ("I-A I-A O I-A", [("A", 0, 1), ("A", 3, 3)]),
        ("B-A I-B I-B", [("A", 0, 0), ("B", 1, 2)]),
        ("I-A I-B", [("A", 0, 0), ("B", 1, 1)]),
        ("B-A-x I-A-x B-A", [("A-x", 0, 1), ("A", 2, 2)]),
        ("B I O I", [("_", 0, 1), ("_", 3, 3)]),
    ],
)
def test_chunks_are_those_of_conlleval(labels, there):
    assert chunks(labels.split()) == there


def test_entities_are_right_when_type_and_both_ends_are():
    gold = [["B-PER", "I-PER", "O", "B-LOC", "O", "B-LOC"], ["B-ORG", "I-ORG", "I-ORG"]]
    found = [["B-PER", "I-PER", "O", "B-ORG", "O", "B-LOC"], ["B-ORG", "I-ORG", "O"]]
    whole, types = entity_scores(gold, found)
    # Right: PER 0-1 and the second LOC. The first LOC has another type, ORG another end.
    assert whole == EntityScore(right=2, predicted=4, support=4)
    assert (whole.precision, whole.recall, whole.f1) == (0.5, 0.5, 0.5)
    assert types == {
        "LOC": EntityScore(1, 1, 2), "ORG": EntityScore(0, 2, 1), "PER": EntityScore(1, 1, 1),
    }  # fmt: skip
    assert types["LOC"].f1 == pytest.approx(2 / 3)
    assert types["ORG"].f1 == 0.0


def test_the_same_chunk_of_another_sentence_is_not_right():
    whole, _ = entity_scores([["B-A"], ["O"]], [["O"], ["B-A"]])
    assert whole == EntityScore(0, 1, 1)


def test_without_entities_every_ratio_is_zero():
    whole, types = entity_scores([["O", "O"]], [["O", "O"]])
    assert (whole.precision, whole.recall, whole.f1, types) == (0.0, 0.0, 0.0, {})


@pytest.mark.parametrize("found", [[], [["O"]], [["O", "O"], ["O"]]])
def test_predictions_of_other_lengths_are_refused(found):
    with pytest.raises(DataError, match="have other lengths"):
        entity_scores([["O", "O"]], found)


@pytest.mark.parametrize("seed", range(5))
def test_entity_scores_are_those_of_nervaluate_on_random_labels(seed):
    from nervaluate import Evaluator

    numbers = np.random.default_rng(seed)
    names = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-a-b", "I-a-b"]
    weights = np.array([4, 1, 1, 1, 1, 1, 1])
    lengths = numbers.integers(1, 30, 60)
    gold = [[str(w) for w in numbers.choice(names, n, p=weights / weights.sum())] for n in lengths]
    # Most labels are kept, so that some entities are right.
    found = [
        [w if numbers.random() < 0.7 else str(numbers.choice(names)) for w in row] for row in gold
    ]
    whole, types = entity_scores(gold, found)
    assert whole.right > 20
    kinds = ["LOC", "PER", "a-b"]
    judged = Evaluator(gold, found, tags=kinds, loader="list").evaluate()
    assert list(types) == kinds
    pairs = [(whole, judged["overall"]["strict"])]
    pairs += [(types[kind], judged["entities"][kind]["strict"]) for kind in kinds]
    for ours, theirs in pairs:
        counts = (theirs.correct, theirs.actual, theirs.possible)
        assert (ours.right, ours.predicted, ours.support) == counts
        ratios = (theirs.precision, theirs.recall, theirs.f1)
        assert (ours.precision, ours.recall, ours.f1) == pytest.approx(ratios, abs=1e-12)
