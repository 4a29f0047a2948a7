"""What a step prints: the plan for the disk, the progress, the summary line."""

import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, TypeVar

from bert_cli.data.shards.shard import COUNTS, Stats
from bert_cli.errors import DataError
from bert_cli.files import format_bytes, free_bytes

Item = TypeVar("Item")
SECONDS_BETWEEN_LINES = 10.0  # where no bar is drawn


def plan_disk_space(
    step: str, count: int | None, to_write: int, written: int, out: Path, unit: str = "shard"
) -> str:
    """Return the plan of a step in one line: shards, bytes to write, bytes free in OUT.

    `to_write` is an estimate; `written` are the bytes of complete shards; `count` is None where the
    number of shards is not known. Raises DataError when the disk has less space than `to_write`.
    """
    free = free_bytes(out)
    if to_write > free:
        raise DataError(
            f"out ({out})",
            f"{step} is to write about {format_bytes(to_write)} and {format_bytes(free)} are free there",
            "make room or choose a folder on another disk",
        )
    parts = [] if count is None else [f"{count:,} {unit}{'' if count == 1 else 's'}"]
    rest = "nothing" if to_write == 0 else f"about {format_bytes(to_write)}"
    before = f" ({format_bytes(written)} are there)" if written else ""
    parts += [f"{rest} to write{before}", f"{format_bytes(free)} free in {out}"]
    return f"{step}: plan: {', '.join(parts)}"


def summary(step: str, stats: Stats, seconds: float, bytes_read: int, skipped: str = "") -> str:
    """Return one line with the counts of a step that are not 0, and the speed of this run."""
    counts = [(getattr(stats, name), name) for name in COUNTS]
    parts = [f"{n:,} {name if n > 1 else name[:-1]}" for n, name in counts if n]
    parts += [f"{stats.bytes_in / 1e6:.1f} MB in", f"{stats.bytes_out / 1e6:.1f} MB out"]
    if bytes_read:
        parts.append(f"{bytes_read / 1e6 / max(seconds, 1e-9):.1f} MB/s")
    parts.append(f"{seconds:.1f} s")
    note = f" ({skipped} shards were done before)" if skipped else ""
    return f"{step}: {', '.join(parts)}{note}"


def run_in_threads(
    step: str, size: int, work: Callable[[Item], int], items: Sequence[Item], threads: int
) -> int:
    """Call `work` for every item in threads, with a progress bar of `size` bytes; return the sum.

    `work` returns the bytes that it processed. After an error no further item is started.
    """
    with Progress(step, size) as bar, ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            for future in as_completed(futures):
                bar.advance(future.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return bar.bytes


class Progress:
    """A progress bar on a terminal, a line every ten seconds elsewhere; on standard error.

    Use it with `with`. `total` in bytes may be None, and may be set later. `done` bytes are complete
    at the start.
    """

    def __init__(self, step: str, total: int | None, done: int = 0) -> None:
        self.step, self.total = step, total
        self.bytes = self.before = done
        self.bar: Any = None

    def __enter__(self) -> "Progress":
        self.started = self.printed = time.monotonic()
        if sys.stderr.isatty():
            self._start_bar()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def _start_bar(self) -> None:
        from rich import progress
        from rich.console import Console

        self.bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self.task = self.bar.add_task(self.step, total=self.total, completed=self.before)
        self.bar.start()

    def advance(self, count: int) -> None:
        """Add `count` bytes, which are negative when a download starts over."""
        self.bytes += count
        if self.bar is not None:
            self.bar.update(self.task, advance=count, total=self.total)
            return
        now = time.monotonic()
        if now - self.printed >= SECONDS_BETWEEN_LINES:
            self.printed = now
            total = f" of {self.total / 1e6:.1f}" if self.total else ""
            percent = f" ({100 * self.bytes / self.total:.0f} %)" if self.total else ""
            speed = (self.bytes - self.before) / 1e6 / (now - self.started)
            print(
                f"{self.step}: {self.bytes / 1e6:.1f}{total} MB{percent}, {speed:.1f} MB/s",
                file=sys.stderr,
                flush=True,
            )
