"""The two warnings about the masked-LM loss: measured healthy runs have none, and the others are reported."""

import math

import numpy as np
import pytest
from support.metrics import write_metrics

from bert_cli.data.examples.reader import BLOCK
from bert_cli.train import health
from bert_cli.train.health import FLAT_STEPS, MARGIN, STEPS, find_warning
from bert_cli.train.history import Run

HEALTHY = {
    # Unigram entropy, tokens of a step, warm-up: step -> mean loss of the 50 steps to it; docs/lab/measured.md.
    (6.88, 1590, 330): {50: 8.69, 100: 7.6, 150: 7.07, 300: 6.8, 500: 6.57, 800: 6.01, 1000: 5.63, 1500: 5.24},
    (6.88, 1590, 90): {50: 8.61, 100: 7.29, 200: 6.99, 400: 6.69, 700: 6.51, 1500: 6.32},
    (5.97, 1590, 36): {50: 6.4, 100: 6.02, 200: 5.77, 400: 5.57, 600: 5.51},
    (7.12, 1980, 16): {50: 9.5, 100: 7.64, 150: 7.42, 200: 7.28, 260: 7.25},
}  # fmt: skip
SETTINGS = {"optimizer_opts": {"learning_rate": {"warmup_frac": 0.1}}, "masking": {}}
TOTAL = 5000


def warning(losses, last: int, total: int = TOTAL, tokens: float = 1600.0, **changes) -> str | None:
    """Return the warning of a run whose last steps have these losses; 6.9 is the entropy."""
    row = {"tokens": tokens, "unigram_entropy": 6.9}
    steps = enumerate(losses, last - len(losses) + 1)
    return find_warning(SETTINGS | changes, total, [(n, {"mlm_loss": x, **row}) for n, x in steps])


def test_measured_healthy_runs_have_no_warning():
    for (entropy, tokens, warmup), losses in HEALTHY.items():
        steps = np.arange(1, max(losses) + 1)
        curve = np.interp(steps, [*losses], [*losses.values()])
        rate = {"learning_rate": {"warmup_frac": warmup / max(losses)}}
        row = {"tokens": tokens, "unigram_entropy": entropy}
        rows = [(int(n), {"mlm_loss": x, **row}) for n, x in zip(steps, curve, strict=True)]
        for step in range(STEPS, len(rows) + 1, STEPS):
            assert find_warning(SETTINGS | {"optimizer_opts": rate}, len(rows), rows[:step]) is None


ABOVE, BELOW = 6.9 - MARGIN + 0.01, 6.9 - MARGIN - 0.01
ENTROPY = "is not below the unigram entropy of the records"
FLAT = [4.0] * 2 * FLAT_STEPS
CASES = {
    # Name -> the last losses, the last step, other values, and a part of the warning, None for no warning.
    "fewer than two million tokens": ([ABOVE] * STEPS, 1749, {}, None),
    "two million tokens": ([ABOVE] * STEPS, 1750, {}, f"6.86 after 2.8 million tokens {ENTROPY}, 6.90"),
    "a remedy": ([ABOVE] * STEPS, 1750, {}, "try a third of the rate, and run `bert inspect`"),
    "a loss below the entropy": ([BELOW] * STEPS, 1750, {}, None),
    "976 large steps": ([7.0] * STEPS, 1476, {"tokens": 8e6}, None),
    "977 large steps": ([7.0] * STEPS, 1477, {"tokens": 8e6}, "is not below"),
    "an incomplete mean": ([7.0] * (STEPS - 1), 4000, {}, None),
    "one large loss": ([6.8] * (STEPS - 1) + [8.0], 4000, {}, None),
    "good losses and some that are not finite": ([6.7] * STEPS + [math.nan, None], 4000, {}, None),
    "bad losses and some that are not finite": ([7.0] * STEPS + [math.nan, None], 4000, {}, "7.00 after"),
    "flat for a thousand steps": (FLAT, TOTAL, {}, "4.00 has not fallen for 1,000 steps, from 4.00"),
    "flat for fewer steps": (FLAT[1:], TOTAL, {}, None),
    "a loss that falls": ([4.01] * FLAT_STEPS + [4.0] * FLAT_STEPS, TOTAL, {}, None),
    "a loss that rises": ([4.0] * FLAT_STEPS + [4.5] * FLAT_STEPS, TOTAL, {}, "4.50 has not fallen"),
    "less than a tenth of a long run": ([4.0] * 5999, 30_000, {"total": 30_000}, None),
    "a tenth of a long run": ([4.0] * 6000, 30_000, {"total": 30_000}, "for 3,000 steps"),
    "flat with a step of the warm-up": (FLAT, 2499, {}, None),
    "flat after the warm-up": (FLAT, 2500, {}, "has not fallen"),
    "masks that change": (FLAT, TOTAL, {"masking": {"start_probability": 0.3}}, None),
    "synthetic examples": ([8.0] * TOTAL, TOTAL, {"generated_dataset": True}, None),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_only_a_loss_that_shows_a_fault_has_a_warning(case):
    losses, last, changes, text = CASES[case]
    found = warning(losses, last, **changes)
    assert found is None if text is None else text in found


def test_the_loss_of_a_task_has_no_warning():
    rows = [(step, {"loss": 30.0, "tokens": 1600}) for step in range(1, TOTAL)]
    assert find_warning(SETTINGS, TOTAL, rows) is None


class Zipf:
    """A stream of labels whose probabilities are known; each example has four and a slot without one."""

    def __init__(self, probabilities, examples=10**9):
        self.probabilities, self.epoch_size, self.last = probabilities, examples, 0

    def rows(self, sample_indices):
        self.last = int(sample_indices[-1])
        draw = np.random.default_rng(self.last)
        labels = draw.choice(
            len(self.probabilities), (len(sample_indices), 5), p=self.probabilities
        )
        weights = np.tile(np.float32([1, 1, 1, 1, 0]), (len(labels), 1))
        return {"masked_lm_ids": np.where(weights > 0, labels, 7), "masked_lm_weights": weights}


def test_the_unigram_entropy_is_that_of_the_labels_whatever_the_vocabulary():
    for size in (1024, 30522):
        probabilities = 1 / (np.arange(size) + 3.0)
        probabilities /= probabilities.sum()
        stream = Zipf(probabilities)
        exact = -(probabilities * np.log(probabilities)).sum()
        assert health.unigram_entropy(stream) == pytest.approx(exact, abs=0.03)
        assert stream.last + 1 == math.ceil(250_000 / (4 * BLOCK)) * BLOCK  # no more is read
    few = Zipf(np.full(100, 0.01), examples=BLOCK // 2)
    assert health.unigram_entropy(few) == pytest.approx(math.log(100), abs=0.01)
    assert few.last + 1 == health.EPOCHS * BLOCK // 2
    synthetic = Zipf(probabilities, examples=None)
    assert health.unigram_entropy(synthetic) == health.unigram_entropy(Zipf(probabilities))


@pytest.fixture
def stuck(tmp_path, write_run):
    """A run whose loss is that of the frequencies after 3,000 steps."""
    folder = write_run(tmp_path / "runs" / "stuck\nfor long", 10, total=3000, **SETTINGS)
    row = {"mlm_loss": 6.95, "tokens": 1600.0, "unigram_entropy": 6.9}
    write_metrics(folder, ((n, row) for n in range(2900, 3001)), mode="a")
    return folder


def test_bert_runs_finds_a_loss_that_does_not_fall_in_the_metrics_of_the_run(stuck):
    line = {"mlm_loss": 4.0, "tokens": 1600.0, "learning_rate": 1e-4, "seconds_per_step": 2.0}
    write_metrics(stuck, ((n, line | {"seconds_left": 2.0 * (3000 - n)}) for n in range(1, 3001)))
    assert "has not fallen for 1,000 steps" in str(health.warning_of(Run(stuck)))


def test_a_run_of_unknown_length_has_no_warning(stuck):
    """How long its warm-up is cannot be known."""
    lines = (stuck / "metrics.jsonl").read_text().splitlines()[-100:]
    (stuck / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert Run(stuck).total_steps is None and health.warning_of(Run(stuck)) is None


def test_a_run_without_what_the_check_needs_has_no_warning(stuck):
    (stuck / "settings.json").unlink()
    assert health.warning_of(Run(stuck)) is None
    (stuck / "metrics.jsonl").unlink()
    assert health.warning_of(Run(stuck)) is None
