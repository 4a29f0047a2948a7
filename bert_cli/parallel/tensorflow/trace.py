"""A trace of when each stage worked on which micro-batch, for chrome://tracing or Perfetto.

A row is a stage of a replica, a bar one pass of a micro-batch. On a CPU a bar is as long as the work; on a GPU it is as
long as its submission, since the host does not wait.
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
    """One pass of a micro-batch; times in seconds since the trace began."""

    replica: int
    stage: int
    kind: str
    micro_batch: int
    start: float
    end: float


@dataclass
class Trace:
    """Records the first steps."""

    steps: int
    """Steps that are still to be recorded."""
    bars: list[Bar] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def span(self, replica: int, stage: int, kind: str, micro_batch: int) -> Iterator[None]:
        """Record what is done inside the `with`."""
        start = time.perf_counter() - self.began
        yield
        end = time.perf_counter() - self.began
        with self.lock:
            self.bars.append(Bar(replica, stage, kind, micro_batch, start, end))

    def write(self, path: Path, rank: int) -> None:
        """Write the bars in Chrome's trace format. Raises ConfigError where the file cannot be written."""
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
            problem = f"cannot be written ({error.strerror})"
            raise ConfigError(f"parallel.trace ({path})", problem, "choose another file") from error
