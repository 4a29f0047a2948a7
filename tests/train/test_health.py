"""The expected band of the masked-LM loss: measured healthy runs are in it, and a run outside of it is reported."""

import json
import math

import numpy as np
import pytest

from bert_cli.cli import main
from bert_cli.train import health
from bert_cli.train.health import ENTROPY, EXCESS, LOWEST, STEPS, band, check, checker
from bert_cli.train.history import Run

MEASURED = {
    # Vocabulary size, weights of the layers, tokens of a step, warm-up: step -> mean loss of the 50 steps to it.
    (8192, 3.1e6, 1590, 330): {50: 8.69, 100: 7.6, 150: 7.07, 300: 6.8, 500: 6.57, 800: 6.01, 1000: 5.63},
    (8192, 3.9e5, 1590, 90): {50: 8.61, 100: 7.29, 200: 6.99, 400: 6.69, 700: 6.51, 1500: 6.32},
    (1024, 9.8e4, 1590, 36): {50: 6.4, 100: 6.02, 200: 5.77, 400: 5.57, 600: 5.51},
    (30522, 3.9e5, 1980, 16): {50: 9.5, 100: 7.64, 150: 7.42, 200: 7.28, 260: 7.25},
}  # fmt: skip
"""Healthy runs; docs/measured.md has their commands."""
SETTINGS = {
    "bert_config": {"vocab_size": 8192, "num_hidden_layers": 4, "hidden_size": 256},
    "optimizer_opts": {"learning_rate": {"warmup_frac": 0.1}},
}


def mean_losses(loss: float, step: int, settings: dict = SETTINGS, tokens: float = 1600) -> list:
    """Return the warnings of STEPS steps with a loss that end at this step of 5,000."""
    after_step = checker(settings, 5000)
    metrics = {"mlm_loss": loss, "tokens": tokens}
    return [after_step(one, metrics) for one in range(step - STEPS + 1, step + 1)]


def test_measured_healthy_runs_stay_in_the_band():
    for (size, weights, tokens, warmup), losses in MEASURED.items():
        for step, loss in losses.items():
            updated = max(0, step - warmup) * min(tokens, health.TOKENS_OF_A_STEP)
            expected = band(size, step * tokens, weights, updated)
            assert check(loss, step * tokens, expected) is None, (size, step, loss, expected)


@pytest.mark.parametrize("size", [1024, 8192, 30522, 250_000])
def test_the_band_starts_around_ln_v_falls_with_the_tokens_and_ends_above_any_text(size):
    assert band(size, 1, 1e8, 0)[1] == pytest.approx(math.log(size) + EXCESS)
    tokens = np.geomspace(1, 1e13, 100)
    for weights in (1e4, 3e6, 1e9):
        bands = [band(size, seen, weights, seen) for seen in tokens]
        assert all(low < high for low, high in bands)
        for side in zip(*bands, strict=True):
            assert all(np.diff(side) <= 0)
        assert bands[-1][0] >= min(LOWEST, bands[0][0])
    # Whatever was seen, the frequencies alone are not enough after many updates, and are not too much before.
    entropy = np.interp(math.log(size), np.log([*ENTROPY]), [*ENTROPY.values()])
    assert band(size, 1e10, 1e8, 4e5)[1] > entropy > band(size, 1e7, 1e8, 1e7)[1]


def test_a_warning_has_the_numbers_and_the_remedy_of_its_side():
    low, high = check(3.0, 1.5e6, (4.0, 6.0)), check(7.0, 1.5e6, (4.0, 6.0))
    assert "3.00 after 1.5 million tokens is below the expected 4.0 to 6.0" in low
    assert "7.00 after 1.5 million tokens is above the expected 4.0 to 6.0" in high
    assert "repeats" in low and "rate" in high and "bert inspect" in low and "bert inspect" in high


def test_a_mean_is_compared_not_single_steps_and_not_an_incomplete_one():
    after_step = checker(SETTINGS, 5000)
    assert after_step(1, {"mlm_loss": 9.03, "tokens": 1600.0}) is None
    assert after_step(2, {"mlm_loss": 30.0, "tokens": 1600.0}) is not None
    *before, last = mean_losses(6.9, 4000)
    assert last is not None and not any(before)
    outlier = checker(SETTINGS, 5000)
    losses = [6.0] * (STEPS - 1) + [9.0, math.nan, None]
    steps = range(4000, 4000 + len(losses))
    assert not any(
        outlier(n, {"mlm_loss": x, "tokens": 1600}) for n, x in zip(steps, losses, strict=True)
    )


def test_the_ceiling_counts_neither_the_warm_up_nor_all_tokens_of_large_steps():
    assert mean_losses(7.0, 500)[-1] is None  # all warm-up
    assert mean_losses(7.0, 700, tokens=8e6)[-1] is None
    assert mean_losses(7.0, 1200, tokens=8e6)[-1] is not None


def test_a_run_from_trained_weights_is_held_to_the_limits_of_any_text():
    trained = SETTINGS | {"pretrained_ckpt_path": "model"}
    assert [mean_losses(loss, STEPS, trained)[-1] is None for loss in (0.4, 1.4, 8.0, 11.0)] == [
        False, True, True, False,
    ]  # fmt: skip
    assert mean_losses(1.4, STEPS)[-1] is not None


def test_synthetic_examples_and_other_losses_are_not_checked():
    assert not any(mean_losses(0.1, STEPS, SETTINGS | {"generated_dataset": True}))
    assert checker(SETTINGS, None)(1, {"loss": 30.0, "tokens": 1600}) is None


@pytest.fixture
def stuck(tmp_path, write_run):
    """A run whose loss is that of the frequencies after 3,000 steps."""
    folder = write_run(tmp_path / "runs" / "stuck", 10, total=3000, **SETTINGS)
    lines = [{"step": n, "mlm_loss": 6.95, "tokens": 1600.0} for n in range(2900, 3001)]
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def test_bert_runs_prints_the_warning_of_the_last_steps(stuck, capsys):
    assert "above the expected" in str(health.warning_of(Run(stuck)))
    assert main(["runs", str(stuck.parent)]) == 0
    assert (
        f"{stuck}: masked-LM loss 6.95 after 4.8 million tokens is above" in capsys.readouterr().out
    )
    assert main(["runs", str(stuck.parent), "--json", "-"]) == 0
    assert "above the expected" in json.loads(capsys.readouterr().out)[0]["warning"]


def test_a_run_without_what_the_check_needs_has_no_warning(stuck):
    (stuck / "settings.json").write_text(json.dumps({"max_predictions_per_seq": 20}))
    assert health.warning_of(Run(stuck)) is None
    (stuck / "metrics.jsonl").unlink()
    assert health.warning_of(Run(stuck)) is None
