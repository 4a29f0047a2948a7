"""Measure where the time of a start and of a step goes, and format the results.

An engine reports the parts of its update to a `Stopwatch`. The rest of a step is `other`, so that the fractions add up
to 1.
"""

import re
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

INPUT_WAIT = "input_wait"
OTHER = "other"
PARTS = (INPUT_WAIT, "forward_backward", "reduction", "optimizer", OTHER)


class Stopwatch:
    """Seconds by name."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the duration of the block to the seconds of this name."""
        began = self.clock()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self.clock() - began

    def parts_until(
        self, synchronize: Callable[[], None]
    ) -> Callable[[str], AbstractContextManager[None]]:
        """Return `part` with a call of `synchronize` at the end of each part.

        It waits for the devices. A GPU works asynchronously: without waiting, the end of the backward pass
        would be counted as a part of what follows it.
        """

        @contextmanager
        def part(name: str) -> Iterator[None]:
            with self.part(name):
                yield
                synchronize()

        return part

    def reset(self) -> dict[str, float]:
        """Return the seconds so far and start again at zero."""
        seconds, self.seconds = self.seconds, {}
        return seconds


@dataclass(frozen=True)
class StepTime:
    """The duration of a step and what it processed."""

    seconds: float
    """From the end of the previous step to the end of this one."""
    parts: Mapping[str, float]
    """Seconds by part, without `other`."""
    examples: float
    tokens: float
    positions: float
    flops: float
    skipped: float = 0.0
    """Steps so far that were skipped because the gradient was not finite."""


def summarize(steps: Sequence[StepTime], warmup_steps: int) -> dict[str, Any]:
    """Return the metrics of the steps after the warm-up.

    A rate is the median over the steps, so that one step that something else delayed does not count.
    """
    measured = steps[warmup_steps:]
    skipped_before = steps[warmup_steps - 1].skipped if warmup_steps else 0.0
    amounts = {
        "examples_per_second": [one.examples for one in measured],
        "tokens_per_second": [one.tokens for one in measured],
        "places_per_second": [one.positions for one in measured],
        "flops_per_second": [one.flops for one in measured],
    }
    seconds = [one.seconds for one in measured]
    rates = {
        name: statistics.median(a / s for a, s in zip(values, seconds, strict=True))
        for name, values in amounts.items()
    }
    total = sum(seconds)
    fractions = {
        f"{name}_share": sum(one.parts.get(name, 0.0) for one in measured) / total
        for name in PARTS
        if name != OTHER
    }
    return {
        "steps": len(measured),
        "warmup_steps": warmup_steps,
        "skipped_steps": round(measured[-1].skipped - skipped_before),
        "step_seconds": quartiles(seconds),
        **rates,
        **fractions,
        f"{OTHER}_share": 1.0 - sum(fractions.values()),
    }


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Return the median and the quartiles below and above it."""
    if len(values) == 1:
        return dict.fromkeys(("median", "low", "high"), values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high}


def process_age() -> float:
    """Return the seconds since this process was started."""
    return max(0.0, time.time() - psutil.Process().create_time())


def resident_bytes() -> tuple[int, int]:
    """Return the memory of this process: now and at its peak.

    The peak is VmHWM where there is /proc: that of getrusage includes the parent's before exec.
    """
    now = psutil.Process().memory_info().rss
    status = Path("/proc/self/status")
    if status.exists():
        peak = re.search(r"^VmHWM:\s*(\d+) kB", status.read_text(), re.MULTILINE)
        return now, 1024 * int(peak[1]) if peak else now
    # Bytes on macOS, the only other system that the tool runs on.
    return now, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def format_seconds(value: float) -> str:
    """Return a duration as text: 12.3 s, 456 ms, 78 us."""
    if value >= 1:
        return f"{value:,.2f} s"
    return f"{1e3 * value:.3g} ms" if value >= 1e-3 else f"{1e6 * value:.3g} us"


def format_flops(value: float) -> str:
    """Return operations per second as text: 12.3 GFLOP/s."""
    for unit, name in ((1e12, "T"), (1e9, "G")):
        if value >= unit:
            return f"{value / unit:,.1f} {name}FLOP/s"
    return f"{value / 1e6:,.1f} MFLOP/s"
