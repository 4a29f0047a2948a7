"""Where the time of a start and of steps goes, as it is noted and as it is told.

A `Stopwatch` adds up seconds by name, also those of the parts of an engine's update. The rest of a step is `other`, so
that the shares add up to 1.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WAITED = "input_wait"
OTHER = "other"
PARTS = (WAITED, "forward_backward", "reduction", "optimizer", OTHER)


class Stopwatch:
    """Seconds by name."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add what is done inside to the seconds of this name."""
        began = self.clock()
        try:
            yield
        finally:
            self.add(name, self.clock() - began)

    def parts_until(
        self, settle: Callable[[], None]
    ) -> Callable[[str], AbstractContextManager[None]]:
        """Return `part` with a call of `settle` at the end of each part.

        It waits for the devices: a GPU lags behind its program, and the end of the backward pass would count as the
        part after it.
        """

        @contextmanager
        def part(name: str) -> Iterator[None]:
            with self.part(name):
                yield
                settle()

        return part

    def add(self, name: str, seconds: float) -> None:
        """Add seconds to those of a name."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def taken(self) -> dict[str, float]:
        """The seconds so far, which then begin again at none."""
        found, self.seconds = self.seconds, {}
        return found


@dataclass(frozen=True)
class Taken:
    """A step that was taken."""

    seconds: float
    """From the end of the step before to its own."""
    parts: dict[str, float]
    """Seconds by part, without `other`."""
    examples: float
    tokens: float
    places: float
    flops: float
    skipped: float = 0.0
    """Steps until here whose gradient was not finite, so that nothing was moved."""


def median(values: Sequence[float]) -> dict[str, float]:
    """Median, and the quartiles below and above it."""
    if len(values) == 1:
        return dict.fromkeys(("median", "low", "high"), values[0])
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": middle, "low": low, "high": high}


def figures_of(steps: Sequence[Taken], warmup_steps: int) -> dict[str, Any]:
    """Pace and shares of the steps behind the first ones.

    A pace is the median over the steps, so that one that something else held up does not count.
    """
    kept = steps[warmup_steps:]
    before = steps[warmup_steps - 1].skipped if warmup_steps else 0.0
    paces = {
        f"{name}_per_second": statistics.median(getattr(one, name) / one.seconds for one in kept)
        for name in ("examples", "tokens", "places", "flops")
    }
    return {
        "steps": len(kept),
        "warmup_steps": warmup_steps,
        "skipped_steps": round(kept[-1].skipped - before),
        "step_seconds": median([one.seconds for one in kept]),
        **paces,
        **{f"{name}_share": share for name, share in shares(kept).items()},
    }


def shares(steps: Sequence[Taken]) -> dict[str, float]:
    """What share of the steps' whole time each part has; together they are 1."""
    whole = sum(one.seconds for one in steps)
    found = {
        name: sum(one.parts.get(name, 0.0) for one in steps) / whole
        for name in PARTS
        if name != OTHER
    }
    return found | {OTHER: 1.0 - sum(found.values())}


def seconds_since_start() -> float:
    """How long ago this process was started; 0 where the system does not tell."""
    try:
        told = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        began = int(told[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began
    except (OSError, AttributeError, IndexError, ValueError):
        return 0.0


def resident_bytes() -> tuple[int, int]:
    """Memory of this process, now and at most."""
    import resource

    most = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        rows = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return most, most
    told = {row.partition(":")[0]: row.partition(":")[2].split() for row in rows}
    found = [int(told[name][0]) * 1024 if name in told else most for name in ("VmRSS", "VmHWM")]
    return found[0], found[1]
