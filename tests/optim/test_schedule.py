"""Schedules: the shape of each, its ends, and what is refused."""

import math
import subprocess
import sys

import pytest

from bert_cli.errors import ConfigError
from bert_cli.optim.schedule import FALLS, FLOOR, learning_rate


@pytest.mark.parametrize("name", FALLS)
def test_the_maximum_is_reached_on_the_step_after_the_warm_up(name: str) -> None:
    value = learning_rate(name, 0.006, 1970, 7039)
    assert value(1970) == pytest.approx(0.006)
    assert max(value(step) for step in range(7039)) == pytest.approx(0.006)
    assert value(985) == pytest.approx(0.003)


@pytest.mark.parametrize("name", FALLS)
@pytest.mark.parametrize("warmup_frac", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("total_steps", [1, 2, 10, 999])
def test_no_step_has_a_learning_rate_of_zero(
    name: str, warmup_frac: float, total_steps: int
) -> None:
    value = learning_rate(name, 0.01, int(warmup_frac * total_steps), total_steps)
    for step in range(total_steps + 5):
        assert FLOOR <= value(step) <= 0.01


def test_up_down_falls_as_the_original_does_and_its_last_step_has_the_floor() -> None:
    # Worked out by hand from (total - step - 1) / (total - warmup), the schedule of the original's
    # configs: the step after the maximum is two eighths below it, and step 9 of 10 is the last.
    value = learning_rate("up_down", 1.0, 2, 10)
    got = [value(step) for step in range(11)]
    assert got == pytest.approx(
        [FLOOR, 0.5, 1.0, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, FLOOR, FLOOR]
    )
    phase_1 = learning_rate("up_down", 0.006, 1976, 7059)
    assert phase_1(7058) == FLOOR
    assert phase_1(7057) == pytest.approx(0.006 / (7059 - 1976))


def test_the_first_update_sees_the_floor_with_warm_up_and_the_maximum_without() -> None:
    assert learning_rate("up_down", 0.5, 50, 100)(0) == FLOOR
    assert learning_rate("up_down", 0.5, 0, 100)(0) == 0.5


def test_constant_stays_and_cosine_falls_along_half_a_cosine() -> None:
    constant = learning_rate("constant", 0.3, 0, 8)
    assert [constant(step) for step in range(9)] == [0.3] * 9
    cosine = learning_rate("cosine", 2.0, 4, 8)
    expected = [1.0 + math.cos(math.pi * step / 4) for step in range(4)]
    assert [cosine(step) for step in range(4, 8)] == pytest.approx(expected)
    assert cosine(6) == pytest.approx(1.0)


def test_the_same_step_always_has_the_same_value_in_any_order() -> None:
    value = learning_rate("cosine", 0.1, 15, 50)
    forwards = [value(step) for step in range(50)]
    backwards = [value(step) for step in reversed(range(50))]
    assert forwards == backwards[::-1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("up_dwn", 0.1, 1, 10), "did you mean 'up_down'"),
        (("zigzag", 0.1, 1, 10), "choose one of up_down, constant, cosine"),
        (("up_down", 0.0, 1, 10), "max_learning_rate"),
        (("up_down", -1.0, 1, 10), "max_learning_rate"),
        (("up_down", math.nan, 1, 10), "max_learning_rate"),
        (("up_down", math.inf, 1, 10), "max_learning_rate"),
        (("up_down", 0.1, 11, 10), "warmup_frac"),
        (("up_down", 0.1, -1, 10), "warmup_frac"),
        (("up_down", 0.1, 0, 0), "total steps"),
    ],
)
def test_impossible_numbers_are_refused_by_name(
    arguments: tuple[str, float, int, int], words: str
) -> None:
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        learning_rate(*arguments)


def test_schedules_load_neither_a_framework_nor_numpy() -> None:
    code = (
        "import sys, bert_cli.optim.schedule; "
        "print([m for m in ('tensorflow', 'keras', 'numpy', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
