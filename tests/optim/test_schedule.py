"""Schedules: the shape of each, its ends, and refused numbers."""

import math

import pytest

from bert_cli.errors import ConfigError
from bert_cli.optim.schedule import FALLS, MINIMUM, learning_rate


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


def test_impossible_numbers_are_refused_by_name():
    for arguments, words in (
        (("up_dwn", 0.1, 1, 10), "did you mean 'up_down'"),
        (("zigzag", 0.1, 1, 10), "choose one of up_down, constant, cosine"),
        *(
            (("up_down", rate, 1, 10), "max_learning_rate")
            for rate in (0.0, -1.0, math.nan, math.inf)
        ),
        (("up_down", 0.1, 11, 10), "warmup_frac"),
        (("up_down", 0.1, -1, 10), "warmup_frac"),
        (("up_down", 0.1, 0, 0), "total steps"),
    ):
        with pytest.raises(ConfigError, match=words):
            learning_rate(*arguments)
