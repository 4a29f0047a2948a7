"""Where the time of a step goes, with a simulated clock, and the facts about this process."""

from dataclasses import replace

import pytest
from support.bert import run_python

from bert_cli.tasks.bench.timing import (
    PARTS,
    StepTime,
    Stopwatch,
    process_age,
    quartiles,
    summarize,
)


class Clock:
    """A clock that only the test advances."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def step(seconds: float, waited: float = 0.0, computed: float = 0.0) -> StepTime:
    parts = {"input_wait": waited, "forward_backward": computed}
    return StepTime(seconds, parts, examples=8, tokens=80, positions=100, flops=1000)


def test_the_parts_of_an_update_include_the_synchronization_of_the_devices():
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
    assert watch.reset() == {"forward_backward": 3.25, "reduction": 0.75, "optimizer": 1.0}
    assert watch.reset() == {}


def test_warm_up_steps_are_left_out_of_every_metric():
    steps = [step(100.0, 90.0), step(50.0), step(2.0, 0.5, 1.0), step(2.0, 0.5, 1.0)]
    metrics = summarize(steps, 2)
    assert metrics["steps"] == 2
    assert metrics["step_seconds"] == {"median": 2.0, "low": 2.0, "high": 2.0}
    assert metrics["examples_per_second"] == 4.0 and metrics["tokens_per_second"] == 40.0
    assert metrics["places_per_second"] == 50.0 and metrics["flops_per_second"] == 500.0
    assert metrics["input_wait_share"] == 0.25
    skipped = [replace(step(1.0), skipped=number) for number in (1, 2, 2, 3)]
    assert summarize(skipped, 2)["skipped_steps"] == 1
    assert summarize(skipped, 0)["skipped_steps"] == 3


def test_shares_add_up_to_one_with_the_time_outside_of_calls():
    metrics = summarize([step(2.0, 0.5, 1.0), step(4.0, 0.1, 3.0), step(3.0)], 0)
    assert sum(metrics[f"{name}_share"] for name in PARTS) == pytest.approx(1.0, abs=1e-12)
    assert metrics["other_share"] == pytest.approx((0.5 + 0.9 + 3.0) / 9.0)


def test_one_slow_step_does_not_change_the_rate():
    metrics = summarize([step(2.0), step(2.0), step(200.0)], 0)
    assert metrics["places_per_second"] == 50.0 and metrics["step_seconds"]["high"] > 100.0
    assert quartiles([5.0, 1.0, 2.0, 3.0, 4.0]) == {"median": 3.0, "low": 2.0, "high": 4.0}
    assert quartiles([7.0]) == {"median": 7.0, "low": 7.0, "high": 7.0}


def test_the_age_and_the_memory_of_a_process_are_measured():
    assert 0.0 < process_age() < 24 * 3600
    # In its own process: this one may use memory again that it has freed.
    code = (
        "from bert_cli.tasks.bench.timing import resident_bytes\n"
        "before = resident_bytes()\n"
        "data = bytearray(b'x') * (64 * 2**20)\n"
        "print(*before, *resident_bytes())"
    )
    printed = run_python(code).stdout
    now, peak, after, peak_after = map(int, printed.split())
    assert after - now > 32 * 2**20 and peak_after >= max(peak, after - 2**20)
