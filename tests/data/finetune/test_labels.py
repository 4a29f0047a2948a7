"""Weights, thresholds, temperature and scores of labels match scikit-learn, PyTorch or a full search."""

import re

import numpy as np
import pytest
from scipy.special import softmax
from sklearn.metrics import f1_score, precision_recall_fscore_support
from sklearn.utils.class_weight import compute_class_weight
from support.metrics import values

from bert_cli.data.finetune import labels as of_texts
from bert_cli.data.finetune.labels import Decision, best_thresholds, weights_of
from bert_cli.errors import ConfigError
from bert_cli.statistics import identify

NAMES = ("ham", "spam", "news")
DRAW = np.random.default_rng(0)
ONE = np.array([0] * 90 + [1] * 3 + [2] * 7, np.int32)
SEVERAL = (DRAW.random((100, 3)) < [0.5, 0.03, 0.2]).astype(np.int8)
LOGITS = 3.0 * DRAW.normal(size=(100, 3)) + 2.0 * SEVERAL


def test_balanced_weights_are_those_of_scikit_learn_up_to_their_scale():
    expected = compute_class_weight("balanced", classes=np.arange(3), y=ONE)
    column = weights_of(ONE, NAMES, "balanced")
    assert column == pytest.approx((expected / expected.min())[ONE], rel=1e-6)
    assert column.min() == 1.0 and column.dtype == np.float32
    assert of_texts.label_counts(ONE[:93], 3).tolist() == [90, 3, 0]
    column = weights_of(SEVERAL, NAMES, "balanced")
    for label in range(3):
        has = SEVERAL[:, label]
        absent, present = compute_class_weight("balanced", classes=np.arange(2), y=has)
        ratio = column[has == 1, label] / column[has == 0, label][0]
        assert ratio == pytest.approx(present / absent, rel=1e-6)
    # Every text has the first label, and one the second: weights of 1 / 4, 3 and 1.
    weights = weights_of(np.array([[1, 1], [1, 0], [1, 0], [1, 0]], np.int8), NAMES[:2], "balanced")
    assert weights == pytest.approx(np.array([[1, 12], [1, 4], [1, 4], [1, 4]]), rel=1e-6)


def test_a_table_of_weights_has_1_for_labels_that_it_lacks_and_knows_every_name():
    assert weights_of(ONE, NAMES, {"spam": 4.0})[[0, 90, 99]].tolist() == [1, 4, 1]
    assert weights_of(ONE, NAMES, {"ham": 0.5})[[0, 90, 99]].tolist() == [1, 2, 2]
    for name, remedy in (("Spam", "did you mean 'spam'"), ("x", "the labels are 'ham', 'spam'")):
        with pytest.raises(ConfigError, match=rf"\({name}\): is not a label in .*{remedy}"):
            weights_of(ONE, NAMES, {name: 2.0})


def test_no_threshold_has_a_better_f1_and_one_that_gains_nothing_is_a_half():
    probabilities = np.round(1 / (1 + np.exp(-LOGITS)), 2)  # some are equal
    thresholds = best_thresholds(SEVERAL, probabilities)
    every = np.linspace(0.0, 1.0, 101)
    for label, threshold in enumerate(thresholds):
        column = probabilities[:, label]
        scores = [f1_score(SEVERAL[:, label], column > t, zero_division=0) for t in every]
        best = f1_score(SEVERAL[:, label], column > threshold, zero_division=0)
        assert best == pytest.approx(max(scores)) and best > scores[50]
    none, right = np.zeros((4, 1), np.int8), np.array([[1], [1], [0], [0]], np.int8)
    for labels, column in ((none, [0.9, 0.8, 0.3, 0.1]), (right, [0.9, 0.6, 0.3, 0.1])):
        assert best_thresholds(labels, np.array(column)[:, None]) == [0.5]


def test_scores_of_several_labels_are_those_of_scikit_learn_with_their_intervals():
    predictions = LOGITS > 0.5
    samples = of_texts.several_samples(SEVERAL, predictions, identify(range(100)))
    expected = {f"{n}_f1": f1_score(SEVERAL, predictions, average=n) for n in ("micro", "macro")}
    assert values(samples) == pytest.approx(expected, rel=1e-12)
    _, predicted, *ratios = of_texts.scores_of_labels(SEVERAL, predictions)
    judged = precision_recall_fscore_support(SEVERAL, predictions, zero_division=0)
    assert np.array(ratios) == pytest.approx(np.stack(judged[:3]))
    assert predicted == predictions.sum(0).tolist()
    # On a part of the texts a label that no text has, and none gets, does not count.
    part = np.arange(100) < 20
    assert not SEVERAL[part, 1].any()
    predictions[part, 1] = False
    expected = f1_score(SEVERAL[part], predictions[part], average="macro", zero_division=np.nan)
    samples = of_texts.several_samples(SEVERAL, predictions, identify(range(100)))
    assert samples["macro_f1"].take(part).value == pytest.approx(expected)
    nothing = np.zeros((3, 2), np.int8)
    samples = of_texts.several_samples(nothing, nothing == 1, identify(range(3)))
    assert values(samples) == {"micro_f1": 0.0, "macro_f1": 0.0}


def test_a_model_without_a_decision_has_the_usual_thresholds(tmp_path):
    assert of_texts.read_decision(tmp_path) == Decision()
    assert Decision().thresholds_of(3) == [0.5, 0.5, 0.5]
    # A threshold belongs to an output, so a label that config.json renames keeps it.
    chosen = Decision(thresholds={"a": 0.5, "b": 0.2, "c": 0.9})
    assert chosen.answers(np.zeros((1, 3)), several=True).tolist() == [[False, True, False]]


# --- the temperature


def drawn_answers(size, labels=4, too_sure=2.5, seed=0):
    """Return logits that are too sure of themselves, and labels."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(0, 2, (size, labels))
    drawn = softmax(logits, 1).cumsum(1) > draw.random((size, 1))
    return (too_sure * logits).astype(np.float32), drawn.argmax(1).astype(np.int32)


@pytest.mark.parametrize("too_sure", [0.3, 1.0, 2.5, 9.0])
def test_the_temperature_is_that_of_pytorch(too_sure):
    import torch

    logits, labels = drawn_answers(400, too_sure=too_sure)
    best = of_texts.best_temperature(logits, labels)
    values = logits.astype(np.float64)
    logarithm = torch.zeros((), dtype=torch.float64, requires_grad=True)
    exact = {"tolerance_grad": 1e-14, "tolerance_change": 1e-16, "max_iter": 200}
    optimizer = torch.optim.LBFGS([logarithm], line_search_fn="strong_wolfe", **exact)

    def step():
        optimizer.zero_grad()
        scaled = torch.from_numpy(values) / torch.exp(logarithm)
        loss = torch.nn.functional.cross_entropy(scaled, torch.from_numpy(labels).long())
        loss.backward()
        return loss

    optimizer.step(step)
    assert best == pytest.approx(float(torch.exp(logarithm.detach())), rel=1e-5)


def test_few_texts_or_texts_without_an_error_choose_no_temperature():
    logits, labels = drawn_answers(of_texts.LEAST)
    assert of_texts.best_temperature(logits, labels) != 1.0
    assert of_texts.best_temperature(logits[1:], labels[1:]) == 1.0
    assert of_texts.best_temperature(logits, logits.argmax(1)) == 1.0


def test_the_calibration_error_is_that_of_scikit_learns_bins_without_what_chance_adds():
    from sklearn.calibration import calibration_curve

    logits, labels = drawn_answers(700)
    probability, right = softmax(logits.astype(np.float64), 1).max(1), logits.argmax(1) == labels
    counts, _ = np.histogram(probability, 15, (0.0, 1.0))
    accuracy, mean = calibration_curve(right, probability, n_bins=15)
    used = counts[counts > 0] > 1
    accuracy, mean, counts = accuracy[used], mean[used], counts[counts > 1]
    by_chance = accuracy * (1 - accuracy) / (counts - 1)
    expected = np.average((accuracy - mean) ** 2 - by_chance, weights=counts) ** 0.5
    found = of_texts.calibration_error(probability, right)
    assert found == pytest.approx(expected, abs=1e-12) and found > 0.1


def test_a_temperature_is_kept_only_if_it_lowers_the_error_where_it_was_not_chosen():
    logits, labels = drawn_answers(400)
    for temperature, kept in ((2.5, 2.5), (0.5, 1.0), (40.0, 1.0), (1.0, 1.0)):
        decision = of_texts.kept_decision(Decision(temperature=temperature), logits, labels)
        assert decision.temperature == kept


def test_the_report_has_the_error_before_and_after_and_what_is_answered_how_well():
    logits, labels = drawn_answers(900)
    temperature = of_texts.best_temperature(logits[:400], labels[:400])
    logits, labels = logits[400:], labels[400:]
    text = of_texts.describe_calibration(Decision(temperature=temperature), logits, labels)
    first, _, *rows = text.splitlines()
    after, _, before, _ = map(float, re.findall(r"\d[\d.]*", first))
    assert after < 0.06 < 0.12 < before and first.endswith("without; n 500")
    table = np.array([[float(cell.strip("%")) for cell in row.split()] for row in rows])
    probability = softmax(logits / temperature, 1).max(1)
    right = logits.argmax(1) == labels
    for level, answered, accuracy in table:
        is_sure = probability >= level
        assert answered == pytest.approx(100 * is_sure.mean(), abs=0.051)
        assert accuracy == pytest.approx(right[is_sure].mean(), abs=5e-5)
    few = of_texts.describe_calibration(Decision(), logits[:49], labels[:49])
    assert re.fullmatch(r"calibration error .* at temperature [\d.]+; n 49", few)
    assert table[0, 1] == 100 and table[-1, 1] < 50 and table[-1, 2] > table[0, 2]
