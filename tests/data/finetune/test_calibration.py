"""The temperature and the calibration error, against a grid, PyTorch's optimizer and scikit-learn."""

import re

import numpy as np
import pytest
from scipy.special import log_softmax, softmax

from bert_cli.data.finetune import labels as calibration
from bert_cli.statistics import identify, sample_of


def answers(size, labels=4, too_sure=2.5, seed=0):
    """Return logits that are too sure of themselves, and labels."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(0, 2, (size, labels))
    drawn = softmax(logits, 1).cumsum(1) > draw.random((size, 1))
    return (too_sure * logits).astype(np.float32), drawn.argmax(1).astype(np.int32)


def loss_at(temperature, logits, labels):
    return -log_softmax(logits / temperature, 1)[np.arange(len(labels)), labels].mean()


@pytest.mark.parametrize("too_sure", [0.3, 1.0, 2.5, 9.0])
def test_the_temperature_is_that_of_a_fine_grid_and_of_pytorch(too_sure):
    import torch

    logits, labels = answers(400, too_sure=too_sure)
    best = calibration.best_temperature(logits, labels)
    values = logits.astype(np.float64)
    grid = np.exp(np.linspace(*calibration.BOUNDS, 4_001))
    by_grid = grid[np.argmin([loss_at(t, values, labels) for t in grid])]
    assert best == pytest.approx(by_grid, rel=2e-3)
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


def test_texts_are_computed_a_few_at_a_time_with_equal_results(monkeypatch):
    logits, labels = answers(400)

    def results():
        return calibration.best_temperature(logits, labels), *calibration.confidences(logits, 1.7)

    at_once = results()
    monkeypatch.setattr(calibration, "CELLS_AT_ONCE", 28)
    assert results() == at_once


def test_few_texts_or_texts_without_an_error_choose_no_temperature():
    logits, labels = answers(calibration.LEAST)
    assert calibration.best_temperature(logits, labels) != 1.0
    assert calibration.best_temperature(logits[1:], labels[1:]) == 1.0
    assert calibration.best_temperature(logits, logits.argmax(1)) == 1.0


def test_the_calibration_error_is_that_of_scikit_learns_bins():
    from sklearn.calibration import calibration_curve

    logits, labels = answers(700)
    probability, right = softmax(logits.astype(np.float64), 1).max(1), logits.argmax(1) == labels
    sample = sample_of(identify(range(700)), "calibration_error", probability, right)
    accuracy, mean = calibration_curve(right, probability, n_bins=15)
    counts, _ = np.histogram(probability, 15, (0.0, 1.0))
    expected = np.sum(np.abs(accuracy - mean) * counts[counts > 0]) / 700
    assert sample.value == pytest.approx(expected, abs=1e-12) and sample.value > 0.1


def test_the_report_has_the_error_before_and_after_and_what_is_answered_how_well():
    logits, labels = answers(900)
    examples = identify(range(900))
    reported = np.arange(900) >= 400
    temperature = calibration.best_temperature(logits[~reported], labels[~reported])

    def described(rows):
        right = logits.argmax(1) == labels
        sides = (calibration.confidences(logits, each) for each in (temperature, 1.0))
        samples = (sample_of(examples, "calibration_error", side, right) for side in sides)
        return calibration.describe_calibration(temperature, *(each.take(rows) for each in samples))

    text = described(reported)
    first, _, *rows = text.splitlines()
    after, *_, before, _, _, _ = map(float, re.findall(r"\d[\d.]*", first))
    assert after < 0.06 < 0.12 < before and first.endswith("without; n 500")
    table = np.array([[float(cell.strip("%")) for cell in row.split()] for row in rows])
    probability = softmax(logits[reported] / temperature, 1).max(1)
    right = logits[reported].argmax(1) == labels[reported]
    for level, answered, accuracy in table:
        is_sure = probability >= level
        assert answered == pytest.approx(100 * is_sure.mean(), abs=0.051)
        assert accuracy == pytest.approx(right[is_sure].mean(), abs=5e-5)
    reported[449:] = False
    few = described(reported)
    assert re.fullmatch(r"calibration error .* at temperature [\d.]+; n 49", few)
    assert table[0, 1] == 100 and table[-1, 1] < 50 and table[-1, 2] > table[0, 2]
