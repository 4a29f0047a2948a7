"""Numbers out: a line to the terminal, and an object a step to metrics.jsonl.

A reporter is called with a step's figures and cannot change them. A run that is resumed drops the
lines of steps that it will do again, so that metrics.jsonl always reads as one run that was never
interrupted.
"""

import errno
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from bert_cli.errors import CheckpointError, DataError
from bert_cli.files import write_atomically

Figures = Mapping[str, float]
Report = Callable[[int, Figures], None]

METRICS = "metrics.jsonl"
NOBODY_READS = (errno.EPIPE, errno.EIO)
"""What it means to write to a pipe whose reader is gone, or to a terminal that is closed."""
silent = False
"""Whether this process has nothing to say: of several that make one run, only rank 0 speaks."""


def jsonl(path: Path, done: int) -> Report:
    """Append an object a step to a file, after dropping the steps beyond `done`."""
    if path.exists():
        rows = [(read_line(line, path), line) for line in path.read_bytes().splitlines()]
        write_atomically(
            path, b"".join(line + b"\n" for row, line in rows if row and row[0] <= done)
        )
    path.parent.mkdir(parents=True, exist_ok=True)

    def report(step: int, figures: Figures) -> None:
        # JSON has no NaN or infinity: a loss that left the finite range is null.
        finite = {name: value if math.isfinite(value) else None for name, value in figures.items()}
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **finite}) + "\n")
        except OSError as error:
            # Where no line can be written no checkpoint can either: better known now.
            raise CheckpointError(
                f"{path}: cannot be written ({error.strerror}); make room, then run the same command again"
            ) from error

    return report


def last_step(path: Path) -> int:
    """The last step that a file of `jsonl` tells of; 0 where there is none."""
    if not path.exists():
        return 0
    rows = (read_line(line, path) for line in path.read_bytes().splitlines())
    return max((row[0] for row in rows if row), default=0)


def read_line(line: bytes, path: Path) -> tuple[int, dict[str, Any]] | None:
    """Return step and metrics of a line of metrics.jsonl; None for one that a kill cut, or that is no step's.

    Raises DataError for bytes that are not UTF-8, which no run writes and no kill leaves.
    """
    try:
        metrics = from_json(line)
        return int(metrics.pop("step")), metrics
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        try:
            line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path} ({line[:20]!r}...): is not UTF-8 ({error.reason}); remove that line, or the file"
            ) from None
    return None


def say(text: str) -> None:
    """Print to the terminal; whoever read it may be gone (`| head`, a closed window), the run is not."""
    if silent:
        return
    try:
        print(text, flush=True)
    except OSError as error:
        if error.errno not in NOBODY_READS:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def line(step: int, total_steps: int, figures: Figures) -> str:
    """A step in one line of a log."""
    parts = [
        f"step {step:>{len(str(total_steps))}}/{total_steps}",
        losses(figures),
        f"lr {figures['learning_rate']:.2e}",
        f"gradient {figures['gradient_norm']:.3g}",
        f"weights {figures['weight_norm']:.4g}",
        f"scale {figures['loss_scale']:g}",
        f"{figures['examples_per_second']:.1f} examples/s",
        f"{figures['tokens_per_second']:,.0f} tokens/s",
    ]
    # Not known after one step, the first of a process, which is slower than all others.
    if "seconds_left" in figures:
        parts.append(f"{duration(figures['seconds_left'])} left")
    if figures.get("skipped"):
        parts.append(f"{figures['skipped']:.0f} skipped")
    return "  ".join(parts)


def losses(figures: Figures, above: str = "") -> str:
    """The losses, each with its accuracies: `mlm 6.9524 (12.1 %)  nsp 0.6931 (50.0 %)`.

    Several accuracies of one loss are named: `loss 2.1 (start 40.0 %, end 41.2 %)`. `above` is what
    the names of an evaluation begin with.
    """
    own = {
        name.removeprefix(above): value for name, value in figures.items() if name.startswith(above)
    }
    if not above:
        own = {name: value for name, value in own.items() if not name.startswith("validation_")}
    parts = []
    for name, value in own.items():
        if not name.endswith("loss"):
            continue
        what = name.removesuffix("loss")
        right = {
            other.removeprefix(what).removesuffix("accuracy").rstrip("_"): own[other]
            for other in own
            if other.startswith(what) and other.endswith("accuracy")
        }
        told = ", ".join(f"{name} {100 * share:.1f} %".lstrip() for name, share in right.items())
        parts.append(f"{what.rstrip('_') or 'loss'} {value:.4f}" + (f" ({told})" if told else ""))
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """Seconds as a person says them: 42 s, 3 min 20 s, 5 h 02 min, 3 d 4 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


class Pace:
    """How fast a run goes: examples and tokens a second over the last steps, and the time left.

    The first step of a process is left out: it holds the tracing.
    """

    def __init__(self, total_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.total_steps = total_steps
        self.clock = clock
        self.last = clock()
        self.recent: deque[float] = deque(maxlen=20)
        self.first = True

    def restart(self) -> None:
        """Begin the next step now: what was done since the last one is not its time."""
        self.last = self.clock()

    def after_step(self, step: int, examples: float, tokens: float) -> dict[str, float]:
        """Figures of the step that has just ended; `tokens` are its real ones, padding left out."""
        now = self.clock()
        took, self.last = max(now - self.last, 1e-9), now
        if not self.first:
            self.recent.append(took)
        self.first = False
        mean = sum(self.recent) / len(self.recent) if self.recent else took
        return {
            "examples_per_second": examples / took,
            "tokens_per_second": tokens / took,
            "seconds_per_step": took,
            "seconds_left": mean * (self.total_steps - step),
        }
