"""Schedules of the learning rate: the shape of each and its ends; the rules of static and dynamic loss scales."""

import math
from dataclasses import replace

import pytest

from bert_cli.errors import ConfigError
from bert_cli.optim import schedule
from bert_cli.optim.schedule import MINIMUM, LossScale, first_loss_scale, learning_rate


@pytest.mark.parametrize("name", schedule.FALLS)
def test_every_schedule_has_its_maximum_after_the_warm_up_and_is_never_zero(name):
    value = learning_rate(name, 0.006, 1970, 7039)
    assert max(map(value, range(7039))) == value(1970) == pytest.approx(0.006)
    assert value(985) == pytest.approx(0.003)
    for warmup_frac in (0.0, 0.1, 1.0):
        for total_steps in (1, 2, 10, 999):
            value = learning_rate(name, 0.01, int(warmup_frac * total_steps), total_steps)
            assert all(MINIMUM <= value(step) <= 0.01 for step in range(total_steps + 5))


def test_up_down_falls_as_the_original_does_and_its_last_step_has_the_minimum():
    # (total - step - 1) / (total - warmup) after the maximum; step 9 of 10 is the last.
    value = learning_rate("up_down", 1.0, 2, 10)
    expected = [MINIMUM, 0.5, 1.0, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, MINIMUM, MINIMUM]
    assert [value(step) for step in range(11)] == pytest.approx(expected)


def test_a_warm_up_rises_with_its_power_and_as_before_without_one():
    run = "up_down", 0.012, 988, 7060
    root, plain, default = (learning_rate(*run, *power) for power in ([0.5], [1.0], []))
    assert root(247) == pytest.approx(0.006) and root(0) == MINIMUM
    for step in range(988):
        assert plain(step) == default(step) == max(MINIMUM, 0.012 * step / 988)
    assert all(root(step) == plain(step) for step in range(988, 7060))


def test_constant_stays_and_cosine_falls_along_half_a_cosine():
    # Without a warm-up the first update has the maximum.
    constant = learning_rate("constant", 0.3, 0, 8)
    assert [constant(step) for step in range(9)] == [0.3] * 9
    cosine = learning_rate("cosine", 2.0, 4, 8)
    expected = [1.0 + math.cos(math.pi * step / 4) for step in range(4)]
    assert [cosine(step) for step in range(4, 8)] == pytest.approx(expected)
    assert cosine(8) == cosine(11) == MINIMUM


def test_a_maximum_below_the_minimum_is_refused():
    for rate in (0.0, 9e-8, math.nan, math.inf):
        problem = rf"max_learning_rate \({rate}\): is not a number of at least 1e-07"
        with pytest.raises(ConfigError, match=problem):
            learning_rate("up_down", rate, 1, 10)
    assert learning_rate("up_down", 1e-7, 1, 10)(1) == 1e-7


def test_a_static_scale_stays_and_a_dynamic_one_is_halved_and_doubled():
    scale = first_loss_scale(4096.0).after(False).after(True).after(False)
    assert (scale.value, scale.skipped, scale.skipped_in_a_row) == (4096.0, 2, 1)
    first = scale = first_loss_scale("dynamic")
    assert first.value == 32768.0
    for _ in range(40):
        scale = scale.after(False)
    assert (scale.value, scale.good_steps, scale.skipped_in_a_row) == (1.0, 0, 40)
    # A scale is doubled after 2,000 good steps since it last changed, and up to 2^24.
    before = replace(first, good_steps=1998)
    assert before.after(True).value == first.value
    doubled = before.after(True).after(True)
    assert (doubled.value, doubled.good_steps, doubled.skipped) == (65536.0, 0, 0)
    assert before.after(False).after(True) == LossScale(
        value=16384.0, dynamic=True, good_steps=1, skipped=1
    )
    assert replace(before, value=2.0**24).after(True).after(True).value == 2.0**24


def test_wsd_decays_over_the_last_steps_along_its_curve_to_the_minimum():
    constant = learning_rate("wsd", 1.0, 2, 10)
    half = 1 - math.sqrt(0.5)
    value = schedule.with_decay(constant, 6, 10)
    assert [value(step) for step in range(6)] == [constant(step) for step in range(6)]
    assert constant(2) == 1.0 and value(6) < 1.0
    assert value(7) == pytest.approx(half)  # the second of four steps
    assert value(9) == value(12) == MINIMUM
    to_a_quarter = schedule.with_decay(constant, 6, 10, 0.25)
    assert to_a_quarter(7) == pytest.approx(0.25 + 0.75 * half)
    assert (to_a_quarter(5), to_a_quarter(9)) == (1.0, 0.25)
