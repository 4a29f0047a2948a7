"""Run a function over many shards, in this process, in worker processes or on a cluster, and report.

A second run skips what is complete and makes the rest again. Worker processes end with this process, even when it
is killed by signal 9. At most twice as many shards as workers are in progress: memory does not grow with the
input.
"""

import shutil
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, as_completed, wait
from concurrent.futures.process import BrokenProcessPool
from concurrent.futures.thread import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from bert_cli.data.io import manifest
from bert_cli.data.io.dask_backend import run_on_cluster
from bert_cli.data.io.manifest import Convert, OutputFolder, Shard, Stats, Step
from bert_cli.errors import DataError
from bert_cli.files import free_bytes, name_path
from bert_cli.processes import die_with_parent, print_error, print_line
from bert_cli.progress import TerminalBar
from bert_cli.text import count, format_bytes, format_duration

Results = Generator[tuple[Shard, Stats], None, None]
Item = TypeVar("Item")
NOTES_SHOWN = 5  # the manifest has all of them
SECONDS_BETWEEN_LINES = 10.0  # where no bar is drawn


@dataclass(frozen=True)
class Workers:
    """The workers that make shards: `processes` of this machine, or the cluster of a dask scheduler."""

    processes: int = 1
    scheduler: str | None = None  # address of the scheduler, or the file that it wrote


def run_shards(
    step: Step,
    shards: Iterable[Shard],
    convert: Convert,
    workers: Workers,
    *,
    total: int | None = None,
    notes: Sequence[str] = (),
    check: Callable[[Stats], None] = lambda _: None,
) -> manifest.Manifest:
    """Make every shard, write the manifest, print one summary line; return the manifest.

    `convert(inputs, output, **shard.arguments)` must be picklable. `total`, the sum of the shards' sizes, and
    `notes`, read at the end, are for a generator of shards. `check(counts)` may refuse the result with a DataError
    before the manifest is written; the shards stay.
    """
    if isinstance(shards, Sequence) and total is None:
        total = sum(shard.size() for shard in shards)
    started = time.monotonic()
    fresh = Stats()
    made = skipped = 0
    with manifest.open_output(step) as output:
        bytes_left = _print_plan(output, shards)

        def missing() -> Iterator[Shard]:
            nonlocal skipped
            for shard in shards:
                if output.is_complete(shard):
                    skipped += 1
                    bar.advance(shard.size())
                else:
                    yield shard

        try:
            results = _results(output, missing(), convert, workers)
            with closing(results), Progress(step.name, total) as bar:
                for shard, stats in results:
                    output.commit(shard, stats)
                    bytes_left -= stats.bytes_out
                    fresh += stats
                    made += 1
                    bar.advance(shard.size())
        except OSError as error:
            shutil.rmtree(output.partial, ignore_errors=True)  # before the free space is measured
            with name_path(output.out, bytes_left):
                raise error
        except KeyboardInterrupt:
            finished = made + skipped
            message = f"interrupted, {finished} shards are finished; the same command continues"
            print_error(f"{step.name}: {message}")
            raise SystemExit(130) from None
        seconds = time.monotonic() - started
        counts = output.total(notes)
        check(counts)
        if fresh == Stats() and (output.out / manifest.MANIFEST).exists():
            # Its times stay the times of the run that did the work.
            record = manifest.read_manifest(output.out)
        else:
            marks = ((name, mark) for name, mark in output.markers.items() if mark)
            record = manifest.write_manifest(
                output.out / manifest.MANIFEST,
                step,
                counts,
                seconds,
                fresh.bytes_in,
                bytes_in_this_run=fresh.bytes_in,
                processes=workers.processes if workers.scheduler is None else None,
                shards=[{"output": name, **mark.stats.counts()} for name, mark in marks],
            )
    _print_notes(step, record["notes"])
    before = f"{skipped} of {made + skipped}" if skipped else ""
    print_line(summary(step.name, counts, seconds, fresh.bytes_in, before))
    return record


def _print_notes(step: Step, notes: Sequence[str]) -> None:
    for note in notes[:NOTES_SHOWN]:
        print_line(f"{step.name}: {note}")
    if (more := len(notes) - NOTES_SHOWN) > 0:
        print_line(f"{step.name}: {more} more notes in {step.out}/{manifest.MANIFEST}")


def _print_plan(output: OutputFolder, shards: Iterable[Shard]) -> int:
    """Print the plan for the disk, and return the estimated bytes that are still to write."""
    expected = output.step.expected_bytes
    if expected is None:
        return 0
    completed, written = output.completed()
    number = len(shards) if isinstance(shards, Sequence) else None
    to_write = 0 if completed == number else max(0, expected - written)
    print_line(plan_disk_space(output.step.name, number, to_write, written, output.out))
    return to_write


def _results(
    output: OutputFolder, shards: Iterable[Shard], convert: Convert, workers: Workers
) -> Results:
    if workers.scheduler is not None:
        yield from run_on_cluster(output, shards, convert, workers.scheduler)
    elif workers.processes > 1:
        yield from _run_in_processes(output, shards, convert, workers.processes)
    else:
        for shard in shards:
            prepared = output.prepare(shard)
            yield shard, manifest.make_shard(prepared, output.work_folder(shard), convert)


def _run_in_processes(
    output: OutputFolder, shards: Iterable[Shard], convert: Convert, processes: int
) -> Results:
    context = get_context("spawn")  # a forked copy of a process with threads may hang
    read_end, write_end = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(processes, context, die_with_parent, (read_end,))
    running: dict[Future[Stats], Shard] = {}

    def finished(limit: int) -> Results:
        """Wait until at most so many shards are in progress."""
        while len(running) > limit:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                stats = future.result()  # raises the exception of `convert`
                yield running.pop(future), stats

    try:
        for shard in shards:
            folder = output.work_folder(shard)
            future = pool.submit(manifest.make_shard, output.prepare(shard), folder, convert)
            running[future] = shard
            yield from finished(2 * processes - 1)
        yield from finished(0)
        pool.shutdown()
    except BrokenProcessPool:
        started = [s for s in running.values() if (output.work_folder(s) / "out").exists()]
        names = ", ".join(shard.output.as_posix() for shard in started) or "before the first shard"
        problem = "a worker process was killed, usually because memory ran out"
        remedy = "run the command again with fewer --processes; it keeps what is finished"
        raise DataError(f"{output.step.name} ({names})", problem, remedy) from None
    finally:
        write_end.close()  # kills the workers that are still busy
        pool.shutdown(cancel_futures=True)
        read_end.close()


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


def plan_disk_space(
    step: str, number: int | None, to_write: int, written: int, out: Path, unit: str = "shard"
) -> str:
    """Return the plan of a step in one line; `written` are the bytes of complete shards, `number` their number."""
    free = free_bytes(out)
    if to_write > free:
        problem = f"{step} will write about {format_bytes(to_write)}, but only {format_bytes(free)} are free there"
        raise DataError(f"out ({out})", problem, "make room or choose a folder on another disk")
    parts = [] if number is None else [count(number, unit)]
    rest = "nothing" if to_write == 0 else f"about {format_bytes(to_write)}"
    before = f" ({format_bytes(written)} are there)" if written else ""
    parts += [f"{rest} to write{before}", f"{format_bytes(free)} free in {out}"]
    return f"{step}: plan: {', '.join(parts)}"


def summary(step: str, stats: Stats, seconds: float, bytes_read: int, skipped: str = "") -> str:
    """Return one line with the counts of a step that are not 0, and the speed of this run."""
    counts = [(getattr(stats, name), name.removesuffix("s")) for name in manifest.COUNTS[:3]]
    parts = [count(number, what) for number, what in counts if number]
    parts += [f"{stats.bytes_in / 1e6:.1f} MB in", f"{stats.bytes_out / 1e6:.1f} MB out"]
    if bytes_read:
        parts.append(f"{bytes_read / 1e6 / max(seconds, 1e-9):.1f} MB/s")
    parts.append(f"{seconds:.1f} s")
    note = f" ({skipped} shards were done before)" if skipped else ""
    return f"{step}: {', '.join(parts)}{note}"


class Progress(TerminalBar):
    """Bytes of a step: a progress bar on a terminal, a line every ten seconds elsewhere, on standard error.

    `total` in bytes may be None, and may be set later. `done` bytes are complete at the start.
    """

    def __init__(self, step: str, total: int | None, done: int = 0) -> None:
        super().__init__(sys.stderr, step, total, done)
        self.bytes = done
        self.started = self.printed = time.monotonic()

    def advance(self, number: int) -> None:
        """Add a number of bytes, which is negative when a download starts over."""
        self.bytes += number
        now = time.monotonic()
        if not self.shown and now - self.printed < SECONDS_BETWEEN_LINES:
            return
        total = f" of {self.total / 1e6:.1f}" if self.total else ""
        percent = f" ({100 * self.bytes / self.total:.0f} %)" if self.total else ""
        speed = (self.bytes - self.done) / 1e6 / max(now - self.started, 1e-9)
        text = f"{self.description}: {self.bytes / 1e6:.1f}{total} MB{percent}, {speed:.1f} MB/s"
        if self.shown:
            left = (self.total - self.bytes) / 1e6 / speed if self.total and speed > 0 else 0.0
            self.show(text, self.bytes, f"{format_duration(left)} left" if left else "")
        else:
            self.printed = now
            print_error(text)
