"""Where time goes, by a clock that the test moves."""

import subprocess
import sys
from dataclasses import replace

import pytest

from bert_cli.tasks.bench.timing import (
    PARTS,
    Stopwatch,
    Taken,
    figures_of,
    median,
    seconds_since_start,
)


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def step(seconds: float, waited: float = 0.0, played: float = 0.0) -> Taken:
    parts = {"input_wait": waited, "forward_backward": played}
    return Taken(seconds, parts, examples=8, tokens=80, places=100, flops=1000)


def test_the_parts_of_an_update_include_what_the_devices_have_still_to_do():
    clock = Clock()
    watch = Stopwatch(clock)

    def work(seconds: float) -> None:
        clock.now += seconds

    part = watch.parts_until(lambda: work(0.25))
    with part("forward_backward"):
        work(3.0)
    with part("reduction"):
        work(0.5)
    with pytest.raises(ValueError, match="failed"), part("optimizer"):
        work(1.0)
        raise ValueError("failed")
    assert watch.taken() == {"forward_backward": 3.25, "reduction": 0.75, "optimizer": 1.0}
    assert watch.taken() == {}


def test_the_first_steps_are_left_out_of_every_figure():
    told = figures_of([step(100.0, 90.0), step(50.0), step(2.0, 0.5, 1.0), step(2.0, 0.5, 1.0)], 2)
    assert told["steps"] == 2
    assert told["step_seconds"] == {"median": 2.0, "low": 2.0, "high": 2.0}
    assert told["examples_per_second"] == 4.0
    assert told["flops_per_second"] == 500.0
    assert told["input_wait_share"] == 0.25


def test_steps_that_moved_nothing_are_counted_behind_the_first_ones():
    skipped = [replace(step(1.0), skipped=number) for number in (1, 2, 2, 3)]
    assert figures_of(skipped, 2)["skipped_steps"] == 1
    assert figures_of(skipped, 0)["skipped_steps"] == 3


def test_shares_add_up_to_the_whole_with_what_is_in_no_call():
    told = figures_of([step(2.0, 0.5, 1.0), step(4.0, 0.1, 3.0), step(3.0)], 0)
    assert sum(told[f"{name}_share"] for name in PARTS) == pytest.approx(1.0, abs=1e-12)
    assert told["other_share"] == pytest.approx((0.5 + 0.9 + 3.0) / 9.0)


def test_one_slow_step_does_not_move_the_pace():
    told = figures_of([step(2.0), step(2.0), step(200.0)], 0)
    assert told["places_per_second"] == 50.0
    assert told["step_seconds"]["high"] > 100.0


def test_quartiles_stand_below_and_above_the_median():
    assert median([5.0, 1.0, 2.0, 3.0, 4.0]) == {"median": 3.0, "low": 2.0, "high": 4.0}
    assert median([7.0]) == {"median": 7.0, "low": 7.0, "high": 7.0}


def test_the_system_tells_when_a_process_began_and_what_it_holds():
    assert 0.0 < seconds_since_start() < 24 * 3600
    # In a process of its own: this one may take the piece from memory that was freed before.
    code = (
        "from bert_cli.tasks.bench.timing import resident_bytes\n"
        "before = resident_bytes()\n"
        "held = bytearray(b'x') * (64 * 2**20)\n"
        "print(*before, *resident_bytes())"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    now, most, after, most_after = map(int, told.stdout.split())
    assert after - now > 32 * 2**20 and most_after >= max(most, after - 2**20)
