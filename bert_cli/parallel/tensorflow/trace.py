"""When each stage worked on which micro-batch, as a trace for chrome://tracing or Perfetto.

A row is a stage of a replica, a bar is a forward, a backward or a turn. On a CPU a bar is as long as
the work; on a GPU it is as long as handing the work over, since nothing waits for it.
"""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bert_cli.errors import ConfigError


@dataclass(frozen=True)
class Bar:
    """One piece of work; times in seconds since the trace began."""

    replica: int
    stage: int
    kind: str
    micro_batch: int
    start: float
    end: float


@dataclass
class Trace:
    """Notes the work of the first steps."""

    steps: int
    """How many steps are left to note."""
    bars: list[Bar] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def span(self, replica: int, stage: int, kind: str, micro_batch: int) -> Iterator[None]:
        """Note what is done inside the `with`."""
        start = time.perf_counter() - self.began
        yield
        end = time.perf_counter() - self.began
        with self.lock:
            self.bars.append(Bar(replica, stage, kind, micro_batch, start, end))

    def write(self, path: Path, rank: int) -> None:
        """Write the bars as a trace; raises ConfigError where the file cannot be written."""
        events: list[dict[str, object]] = [
            {
                "name": f"{bar.kind} {bar.micro_batch}",
                "cat": bar.kind,
                "ph": "X",
                "ts": round(1e6 * bar.start, 1),
                "dur": round(1e6 * (bar.end - bar.start), 1),
                "pid": f"rank {rank}",
                "tid": f"replica {bar.replica} stage {bar.stage}",
            }
            for bar in sorted(self.bars, key=lambda bar: bar.start)
        ]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"parallel.trace ({path}): cannot be written ({error.strerror}); choose another file"
            ) from error


def seconds_together(bars: list[Bar]) -> tuple[float, float]:
    """Seconds in which any stage worked, and seconds in which two or more did."""
    marks = sorted([(bar.start, 1) for bar in bars] + [(bar.end, -1) for bar in bars])
    busy = together = 0.0
    working, since = 0, 0.0
    for moment, change in marks:
        busy += (moment - since) * (working >= 1)
        together += (moment - since) * (working >= 2)
        working, since = working + change, moment
    return busy, together
