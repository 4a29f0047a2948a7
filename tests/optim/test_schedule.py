"""Schedules of the learning rate: the shape of each and its ends; the rules of static and dynamic loss scales."""

import math

import pytest

from bert_cli.errors import ConfigError
from bert_cli.optim.schedule import (
    FALLS,
    GROWTH_STEPS,
    MINIMUM,
    LossScale,
    first_loss_scale,
    learning_rate,
)


def test_every_schedule_has_its_maximum_on_the_step_after_the_warm_up():
    for name in FALLS:
        value = learning_rate(name, 0.006, 1970, 7039)
        assert value(1970) == pytest.approx(0.006)
        assert max(value(step) for step in range(7039)) == pytest.approx(0.006)
        assert value(985) == pytest.approx(0.003)


@pytest.mark.parametrize("name", FALLS)
def test_no_step_has_a_learning_rate_of_zero(name):
    for warmup_frac in (0.0, 0.1, 1.0):
        for total_steps in (1, 2, 10, 999):
            value = learning_rate(name, 0.01, int(warmup_frac * total_steps), total_steps)
            assert all(MINIMUM <= value(step) <= 0.01 for step in range(total_steps + 5))


def test_up_down_falls_as_the_original_does_and_its_last_step_has_the_minimum():
    # From (total - step - 1) / (total - warmup), the schedule of the original's configs: the step after
    # the maximum is two eighths below it, and step 9 of 10 is the last.
    value = learning_rate("up_down", 1.0, 2, 10)
    expected = [MINIMUM, 0.5, 1.0, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, MINIMUM, MINIMUM]
    assert [value(step) for step in range(11)] == pytest.approx(expected)
    phase_1 = learning_rate("up_down", 0.006, 1976, 7059)
    assert phase_1(7058) == MINIMUM
    assert phase_1(7057) == pytest.approx(0.006 / (7059 - 1976))
    # Without a warm-up the first update has the maximum.
    assert learning_rate("up_down", 0.5, 0, 100)(0) == 0.5


def test_constant_stays_and_cosine_falls_along_half_a_cosine():
    constant = learning_rate("constant", 0.3, 0, 8)
    assert [constant(step) for step in range(9)] == [0.3] * 9
    cosine = learning_rate("cosine", 2.0, 4, 8)
    expected = [1.0 + math.cos(math.pi * step / 4) for step in range(4)]
    assert [cosine(step) for step in range(4, 8)] == pytest.approx(expected)
    assert cosine(6) == pytest.approx(1.0)


def test_a_maximum_below_the_minimum_is_refused():
    for rate in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="max_learning_rate"):
            learning_rate("up_down", rate, 1, 10)


def test_a_static_scale_stays_and_counts_skipped_updates():
    scale = first_loss_scale(4096.0).after(False).after(True).after(False)
    assert (scale.value, scale.skipped, scale.skipped_in_a_row) == (4096.0, 2, 1)


def test_a_dynamic_scale_is_halved_by_a_gradient_that_is_not_finite_down_to_one():
    first = scale = first_loss_scale("dynamic")
    assert scale.after(False).value == scale.value / 2
    for _ in range(40):
        scale = scale.after(False)
    assert (scale.value, scale.skipped_in_a_row) == (1.0, 40)
    assert LossScale(**scale.as_json()) == scale
    assert first.after(False).after(True).value == first.value / 2


def test_a_dynamic_scale_doubles_after_its_growth_steps_and_not_before():
    first = scale = first_loss_scale("dynamic")
    for _ in range(GROWTH_STEPS - 1):
        scale = scale.after(True)
    assert scale.value == first.value
    assert scale.after(True).value == scale.after(True).after(True).value == 2 * first.value
