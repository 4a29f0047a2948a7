"""Metrics: known values, nervaluate as a judge of entities, and the official scores of SQuAD."""

import numpy as np
import pytest

from bert_cli.data.finetune.metrics import (
    METRICS,
    EntityScore,
    Gold,
    best_score,
    chunks,
    confusion,
    entity_scores,
    normalize,
    score,
    squad_scores,
)
from bert_cli.errors import DataError

LABELS = np.array([1, 1, 1, 1, 0, 0, 0, 0, 0, 0])
PREDICTED = np.array([1, 1, 1, 0, 1, 0, 0, 0, 0, 0])


def metric(name):
    return lambda labels, predictions: score([name], labels, predictions)[name]


accuracy, f1, macro_f1, matthews, pearson, spearman = map(metric, METRICS)
# 3 hits, 1 miss, 1 false alarm, 5 right rejections.


def test_scores_of_two_classes_are_those_of_their_formulas():
    assert accuracy(LABELS, PREDICTED) == pytest.approx(8 / 10)
    assert f1(LABELS, PREDICTED) == pytest.approx(2 * 3 / (2 * 3 + 1 + 1))
    assert matthews(LABELS, PREDICTED) == pytest.approx((3 * 5 - 1 * 1) / np.sqrt(4 * 4 * 6 * 6))
    assert macro_f1(LABELS, PREDICTED) == pytest.approx((6 / 8 + 10 / 12) / 2)


def test_f1_is_of_label_one():
    assert f1(1 - LABELS, 1 - PREDICTED) == pytest.approx(10 / 12)


def test_macro_f1_counts_the_labels_that_occur():
    labels, result = np.array([0, 0, 2, 2]), np.array([0, 2, 2, 3])
    # 0: 2/3; 2: one hit, one miss, one false alarm; 3: none right; 1 does not occur.
    assert macro_f1(labels, result) == pytest.approx((2 / 3 + 1 / 2 + 0) / 3)


def test_confusion_has_the_labels_as_rows_and_the_predictions_as_columns():
    table = confusion(np.array([0, 0, 1, 3]), np.array([0, 1, 1, 0]), 4)
    assert table == [[1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]]
    assert all(type(count) is int for row in table for count in row)


def test_correlations_are_those_of_their_formulas():
    labels, result = np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 3.0, 2.0, 5.0], np.float32)
    # Deviations -1.5 -.5 .5 1.5 and -1.75 .25 -.75 2.25; ranks 1 3 2 4.
    assert pearson(labels, result) == pytest.approx(5.5 / np.sqrt(5 * 8.75))
    assert spearman(labels, result) == pytest.approx(1 - 6 * 2 / (4 * 15))
    assert spearman(labels, np.array([1, 10, 100, 1000])) == pytest.approx(1)


def test_spearman_gives_equal_values_their_mean_rank():
    # Ranks 1.5 1.5 3 and 1 2 3.
    assert spearman(np.array([0, 0, 1]), np.array([1, 2, 3])) == pytest.approx(np.sqrt(3) / 2)


def test_a_constant_prediction_scores_zero_and_gives_no_warning():
    for correlation in (matthews, pearson, spearman):
        assert correlation(LABELS, np.zeros(10)) == correlation(np.ones(10), PREDICTED) == 0.0


def test_f1_without_positives_is_zero_and_gives_no_warning():
    assert f1(LABELS, np.zeros(10, int)) == 0.0
    assert f1(np.zeros(3, int), np.zeros(3, int)) == 0.0
    assert macro_f1(LABELS, np.zeros(10, int)) == pytest.approx((12 / 16 + 0) / 2)


def test_scores_have_names_and_are_plain_numbers():
    scores = score(("accuracy", "f1"), LABELS, PREDICTED)
    assert scores == {"accuracy": pytest.approx(0.8), "f1": pytest.approx(0.75)}
    assert all(type(value) is float for value in scores.values())


def test_no_examples_and_unequal_lengths_cannot_be_scored():
    for labels, result in (([], []), ([1, 0], [1])):
        with pytest.raises(DataError, match=r"predictions \(\d\): cannot be scored"):
            score(("accuracy",), np.array(labels), np.array(result))


def test_chunks_are_those_of_conlleval():
    for labels, expected in (
        ("O O", []),
        ("B-A I-A O B-B", [("A", 0, 1), ("B", 3, 3)]),
        ("B-A B-A I-A", [("A", 0, 0), ("A", 1, 2)]),
        ("I-A I-A O I-A", [("A", 0, 1), ("A", 3, 3)]),
        ("B-A I-B I-B", [("A", 0, 0), ("B", 1, 2)]),
        ("I-A I-B", [("A", 0, 0), ("B", 1, 1)]),
        ("B-A-x I-A-x B-A", [("A-x", 0, 1), ("A", 2, 2)]),
        ("B I O I", [("_", 0, 1), ("_", 3, 3)]),
    ):
        assert chunks(labels.split()) == expected


def test_entities_are_right_when_type_and_both_ends_are():
    gold = [["B-PER", "I-PER", "O", "B-LOC", "O", "B-LOC"], ["B-ORG", "I-ORG", "I-ORG"]]
    result = [["B-PER", "I-PER", "O", "B-ORG", "O", "B-LOC"], ["B-ORG", "I-ORG", "O"]]
    total, types = entity_scores(gold, result)
    # Right: PER 0-1 and the second LOC. The first LOC has another type, ORG another end.
    assert total == EntityScore(right=2, predicted=4, support=4)
    assert (total.precision, total.recall, total.f1) == (0.5, 0.5, 0.5)
    assert types == {
        "LOC": EntityScore(1, 1, 2), "ORG": EntityScore(0, 2, 1), "PER": EntityScore(1, 1, 1),
    }  # fmt: skip
    assert types["LOC"].f1 == pytest.approx(2 / 3)
    assert types["ORG"].f1 == 0.0


def test_the_same_chunk_of_another_sentence_is_not_right():
    total, _ = entity_scores([["B-A"], ["O"]], [["O"], ["B-A"]])
    assert total == EntityScore(0, 1, 1)


def test_without_entities_every_ratio_is_zero():
    total, types = entity_scores([["O", "O"]], [["O", "O"]])
    assert (total.precision, total.recall, total.f1, types) == (0.0, 0.0, 0.0, {})


def test_predictions_of_other_lengths_are_refused():
    for result in ([], [["O"]], [["O", "O"], ["O"]]):
        with pytest.raises(DataError, match="have other lengths"):
            entity_scores([["O", "O"]], result)


@pytest.mark.parametrize("seed", range(5))
def test_entity_scores_are_those_of_nervaluate_on_random_labels(seed):
    from nervaluate import Evaluator

    numbers = np.random.default_rng(seed)
    names = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-a-b", "I-a-b"]
    weights = np.array([4, 1, 1, 1, 1, 1, 1])
    lengths = numbers.integers(1, 30, 60)
    gold = [[str(w) for w in numbers.choice(names, n, p=weights / weights.sum())] for n in lengths]
    # Most labels are right, so that some entities are right.
    result = [
        [w if numbers.random() < 0.7 else str(numbers.choice(names)) for w in row] for row in gold
    ]
    total, types = entity_scores(gold, result)
    assert total.right > 20
    kinds = ["LOC", "PER", "a-b"]
    judged = Evaluator(gold, result, tags=kinds, loader="list").evaluate()
    assert list(types) == kinds
    pairs = [(total, judged["overall"]["strict"])]
    pairs += [(types[kind], judged["entities"][kind]["strict"]) for kind in kinds]
    for ours, theirs in pairs:
        counts = (theirs.correct, theirs.actual, theirs.possible)
        assert (ours.right, ours.predicted, ours.support) == counts
        ratios = (theirs.precision, theirs.recall, theirs.f1)
        assert (ours.precision, ours.recall, ours.f1) == pytest.approx(ratios, abs=1e-12)


# --- SQuAD


def one(golds, prediction, *, version_2=False):
    """Return F1 and exact match of one answer."""
    return best_score(golds, prediction, version_2=version_2)


def gold_of(texts):
    """Return gold answers by id; None is an impossible question."""
    rows = [(name, tuple(answers or ())) for name, answers in texts.items()]
    return Gold(rows, any(answers is None for answers in texts.values()))


def test_texts_are_normalized_as_officially():
    for text, normalized in (
        ("The Cat, a dog and an Ape!", "cat dog and ape"),
        ("theatre another ban", "theatre another ban"),  # articles are complete words
        ("U.S.A.", "usa"),  # dots are removed before articles
        ("a-b", "ab"),  # so this is not an article
        ("a b", "b"),
        ("$3,000.50", "300050"),
        ("“Quoted” – ‘text’ …", "“quoted” – ‘text’ …"),  # punctuation is that of ASCII
        ("the“x”", "“x”"),  # a word ends at a quotation mark
        ("  two\tand\n three\u00a0four  ", "two and three four"),
        ("The", ""),
        ("...!", ""),
        ("ÉTÉ Straße", "été straße"),  # lower case, not case folding; accents remain
        ("under_score", "underscore"),
        ("THE the The", ""),
        ("北京 The 大学", "北京 大学"),
    ):
        assert normalize(text) == normalized


def test_f1_counts_common_words_and_exact_match_compares_normalized_texts():
    for golds, prediction, expected in (
        (["the Denver Broncos"], "Denver  broncos.", (1, 1)),
        # precision 2/3, recall 2/4: 2 * (1/3) / (7/6) = 4/7
        (["red green blue black"], "red green white", (4 / 7, 0)),
        # new x1, york x1 (the gold has each once); precision 2/4, recall 2/2: 2*0.5*1/1.5 = 2/3
        (["New York"], "new new york york", (2 / 3, 0)),
        # ha x2; precision 2/2, recall 2/3: 2*1*(2/3)/(5/3) = 4/5
        (["ha ha ha"], "ha ha", (4 / 5, 0)),
        (["blue red"], "red blue", (1, 0)),
        (["12"], "1 2", (0, 0)),
        # words of the prediction: “red, car”; the gold has neither
        (["red car"], "“red car”", (0, 0)),
        (["red car"], '"red car"', (1, 1)),
        (["1,000"], "1000", (1, 1)),
        (["ten"], "10", (0, 0)),
        # F1 against the second: precision 2/2, recall 2/3: 0.8; no gold is equal
        (["blue", "red green white"], "green red", (0.8, 0)),
        (["blue", "green"], "The Green", (1, 1)),
        (["red"], "", (0, 0)),
    ):
        assert one(golds, prediction) == (pytest.approx(expected[0], abs=1e-12), expected[1])


def test_1_1_and_2_0_differ_where_nothing_remains_of_a_text():
    assert one(["The"], "a") == (0.0, 1.0)
    assert one(["The"], "a", version_2=True) == one(["The"], "", version_2=True) == (1.0, 1.0)
    assert one(["red"], "", version_2=True) == (0.0, 0.0)
    assert one(["The", "red"], "a", version_2=True) == (0.0, 0.0)
    assert one(["The", "red"], "a") == (0.0, 1.0)
    assert one([], "", version_2=True) == one([], "the", version_2=True) == (1.0, 1.0)
    assert one([], "red", version_2=True) == (0.0, 0.0)


def test_squad_scores_are_per_cent_of_all_gold_questions_and_a_missing_answer_is_0():
    # F1: 1, 4/7 and 0 of 3; exact: 1 of 3
    gold = gold_of({"x": ["red"], "y": ["red green blue black"], "z": ["blue"]})
    scores = squad_scores(gold, {"x": "Red", "y": "red green white", "foreign": "blue"})
    assert scores == {
        "f1": pytest.approx(100 * (1 + 4 / 7) / 3, abs=1e-10),
        "exact_match": pytest.approx(100 / 3, abs=1e-10),
    }
    twice = Gold([("x", ("red",)), ("y", ("blue",)), ("x", ("red",))], version_2=False)
    assert squad_scores(twice, {"x": "red", "y": "no"})["f1"] == pytest.approx(200 / 3, abs=1e-10)


def test_2_0_has_scores_of_questions_with_and_without_answers():
    # with: F1 1, 2/3 (precision 1, recall 1/2), 0 (missing); without: 1 and 0
    gold = gold_of({"a": ["red"], "b": ["red car"], "c": ["x"], "d": None, "e": None})
    scores = squad_scores(gold, {"a": "red", "b": "car", "d": "", "e": "car"})
    assert scores == {
        "exact": pytest.approx(40.0),
        "f1": pytest.approx(100 * (1 + 2 / 3 + 1) / 5, abs=1e-10),
        "total": 5,
        "HasAns_f1": pytest.approx(100 * (1 + 2 / 3) / 3, abs=1e-10),
        "HasAns_exact": pytest.approx(100 / 3, abs=1e-10),
        "HasAns_total": 3,
        "NoAns_f1": pytest.approx(50.0),
        "NoAns_exact": pytest.approx(50.0),
        "NoAns_total": 2,
    }
    only_impossible = squad_scores(gold_of({"a": None}), {"a": ""})
    assert only_impossible["NoAns_total"] == 1 and "HasAns_total" not in only_impossible


def test_an_answer_is_empty_above_the_threshold_and_the_best_thresholds_are_reported():
    gold = gold_of({"a": ["red"], "b": ["red car"], "c": ["x"], "d": None, "e": None})
    given = {"a": "red", "b": "car", "c": "no", "d": "", "e": "car"}
    odds = {"a": 0.1, "b": 0.4, "c": 0.6, "d": 0.5, "e": 0.9}
    # At 0.3 all but a are empty: F1 and exact 1 of three with answers, and both of those without.
    scores = squad_scores(gold, given, odds, 0.3)
    assert (scores["exact"], scores["f1"], scores["total"]) == (60.0, 60.0, 5)
    assert (scores["HasAns_f1"], scores["NoAns_exact"]) == (pytest.approx(100 / 3), 100.0)
    # With only a answered: 3 of 5 are right. With b as well F1 has 2/3 more, and nothing comes after it.
    assert list(scores)[-4:] == ["best_exact", "best_exact_thresh", "best_f1", "best_f1_thresh"]
    assert (scores["best_exact"], scores["best_exact_thresh"]) == (60.0, 0.1)
    assert scores["best_f1"] == pytest.approx(100 * (3 + 2 / 3) / 5, abs=1e-10)
    assert scores["best_f1_thresh"] == 0.4
    # The default does not empty any answer, not even one whose probability is 1.
    everything = squad_scores(gold, given, odds | {"a": 1.0})["exact"]
    assert everything == squad_scores(gold, given)["exact"] == 40.0
    # A missing answer is wrong whatever its probability.
    other = squad_scores(gold, given | {"x": ""}, odds | {"e": 0.2}, 0.3)
    del given["d"]
    assert other["NoAns_exact"] == squad_scores(gold, given, odds, 0.3)["NoAns_exact"] == 50.0
