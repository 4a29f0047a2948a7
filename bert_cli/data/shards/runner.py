"""Run one function over many shards, so that a killed run can go on and never lies.

The function writes into a private folder; its files are renamed into place and a marker written
last (`ledger.py`), so a second run skips what is whole and does the rest again. Workers are spawned
in process groups of their own and die with this process, even when it is killed by signal 9; or
they are those of a cluster (`cluster_work.py`). At most twice as many shards as workers are in
flight, so memory does not grow with the input. This is also where the data steps draw their
progress.
"""

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    as_completed,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from bert_cli.data.shards.disk_space import plan_disk_space
from bert_cli.data.shards.manifest import (
    COUNTS,
    Manifest,
    OutputFolder,
    Shard,
    Stats,
    open_output,
)
from bert_cli.errors import DataError
from bert_cli.files import JSON, name_path

Item = TypeVar("Item")
Convert = Callable[[tuple[Path, ...], Path], Stats]
Result = tuple[Shard, Stats | None]  # None: the shard was whole before
Executor = Callable[[OutputFolder, Iterable[Shard], Convert], Generator[Result, None, None]]

PROGRAMS: set[int] = set()
"""Process groups of programs that a shard's function started: they die with its worker."""

NOTES_SHOWN = 5  # the manifest has all of them
SECONDS_BETWEEN_LINES = 10.0  # where the progress is not drawn on a terminal


def run_shards(
    step: str,
    shards: Iterable[Shard],
    convert: Convert,
    *,
    out: Path,
    processes: int,
    settings: Mapping[str, JSON],
    versions: Sequence[str] = (),
    counted: str = "documents",
    total: int | None = None,
    notes: list[str] | None = None,
    own_process: bool = False,
    needs: int | None = None,
    scheduler: str | None = None,
) -> Manifest:
    """Bring every shard to its output, write the manifest last, print one summary line.

    `convert(inputs, output)` must be picklable; it writes `output` and whatever else it wants
    beside it. With one process it is called in this process, unless `own_process`; more are
    spawned. Spawned ones import the main module again, so a script that calls this needs
    `if __name__ == "__main__":` around what it does. `settings` are those that change the bytes
    written, `versions` the packages that do. `total`, the sum of the weights, is needed only when
    `shards` is a generator. `notes` is read at the end, so a generator may still add to it.
    `counted` names the count that must not stay 0. `needs` estimates the bytes of all outputs: a
    disk without room is refused. `scheduler`, a dask scheduler's address or file, has it do them.

    Raises DataError when OUT was made with other settings or from other inputs, when a worker is
    killed, when nothing was produced; SystemExit(130) on Ctrl-C; ConfigError without dask.
    """
    if isinstance(shards, Sequence) and total is None:
        total = sum(map(_weight, shards))
    started = time.monotonic()
    fresh, skipped, finished = Stats(), 0, 0
    with open_output(out, step, settings, versions) as ledger:
        left = _say_plan(ledger, shards, needs)
        work = _executor(processes, own_process, scheduler)(ledger, shards, convert)
        try:
            with closing(work) as results, Progress(step, total) as bar:
                for shard, stats in results:
                    if stats is not None:
                        ledger.commit(shard, stats)
                        left -= stats.bytes_out
                        fresh += stats
                    skipped += stats is None
                    finished += 1
                    bar.advance(_weight(shard))
        except OSError as error:
            shutil.rmtree(ledger.partial, ignore_errors=True)  # and its room is free again
            with name_path(out, left):
                raise error
        except KeyboardInterrupt:
            raise _interrupted(step, finished) from None
        seconds = time.monotonic() - started
        count = processes if scheduler is None else None
        manifest, whole = ledger.close(fresh, seconds, count, counted, notes or [])
    _say_notes(step, manifest["notes"], out)
    before = f"{skipped} of {finished}" if skipped else ""
    print(summary(step, whole, seconds, fresh.bytes_in, before))
    return manifest


def _interrupted(step: str, finished: int) -> SystemExit:
    print(
        f"{step}: interrupted, {finished} shards are finished; the same command continues",
        file=sys.stderr,
    )
    return SystemExit(130)


def _say_notes(step: str, notes: Sequence[str], out: Path) -> None:
    for note in notes[:NOTES_SHOWN]:
        print(f"{step}: {note}")
    if len(notes) > NOTES_SHOWN:
        print(f"{step}: {len(notes) - NOTES_SHOWN} more notes in {out}/manifest.json")


def summary(step: str, stats: Stats, seconds: float, bytes_read: int, skipped: str = "") -> str:
    """Say in one line what a step did: only the counts it has; MB/s is that of this run."""
    counted = [(getattr(stats, name), name) for name in COUNTS]
    parts = [f"{n:,} {name if n > 1 else name[:-1]}" for n, name in counted if n]
    parts += [f"{stats.bytes_in / 1e6:.1f} MB in", f"{stats.bytes_out / 1e6:.1f} MB out"]
    if bytes_read:
        parts.append(f"{bytes_read / 1e6 / max(seconds, 1e-9):.1f} MB/s")
    parts.append(f"{seconds:.1f} s")
    note = f" ({skipped} shards were done before)" if skipped else ""
    return f"{step}: {', '.join(parts)}{note}"


def _executor(processes: int, own_process: bool, scheduler: str | None) -> Executor:
    if scheduler is not None:
        from bert_cli.data.shards.dask_backend import on_cluster  # which is made of what is here

        return partial(on_cluster, scheduler=scheduler)
    if processes > 1 or own_process:
        return partial(_in_workers, processes=processes)
    return _in_this_process


def _say_plan(ledger: OutputFolder, shards: Iterable[Shard], needs: int | None) -> int:
    """Print the disk plan of a step, from its estimate and its markers; return the bytes to write."""
    if needs is None:
        return 0
    whole, written = ledger.completed()
    count = len(shards) if isinstance(shards, Sequence) else None
    to_write = 0 if whole == count else max(0, needs - written)
    print(plan_disk_space(ledger.step, count, to_write, written, ledger.out), flush=True)
    return to_write


def _weight(shard: Shard) -> int:
    if shard.weight is not None:
        return shard.weight
    return sum(path.stat().st_size for path in shard.inputs)


def prepare_shard(ledger: OutputFolder, shard: Shard) -> tuple[Path, ...]:
    """Write what a shard's work is to read, where it has to be written; return the inputs."""
    if shard.prepare is None:
        return shard.inputs
    room = ledger.work_folder(shard) / "in"
    room.mkdir(parents=True)
    return shard.prepare(room)


def convert_shard(convert: Convert, inputs: tuple[Path, ...], room: Path, name: str) -> Stats:
    """One shard's work, in whichever process: convert, force the files to disk, count bytes."""
    target = room / "out" / name
    target.parent.mkdir(parents=True)
    stats = convert(inputs, target)
    if not target.exists():
        raise RuntimeError(f"{name}: the step wrote no such file")
    made = list(target.parent.iterdir())
    for path in made:
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
    read = stats.bytes_in or sum(path.stat().st_size for path in inputs)
    written = stats.bytes_out or sum(path.stat().st_size for path in made)
    return Stats(
        stats.documents, stats.sentences, stats.records, read, written, stats.extra, stats.notes
    )


def _in_this_process(
    ledger: OutputFolder, shards: Iterable[Shard], convert: Convert
) -> Generator[Result, None, None]:
    for shard in shards:
        if ledger.is_complete(shard):
            yield shard, None
            continue
        inputs = prepare_shard(ledger, shard)
        yield shard, convert_shard(convert, inputs, ledger.work_folder(shard), shard.output.name)


def _in_workers(
    ledger: OutputFolder, shards: Iterable[Shard], convert: Convert, processes: int
) -> Generator[Result, None, None]:
    context = get_context("spawn")  # a forked copy of a process with threads may hang
    watched, held = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(processes, context, die_with_parent, (watched,))
    flying: dict[Future[Stats], Shard] = {}
    try:
        for shard in shards:
            if ledger.is_complete(shard):
                yield shard, None
                continue
            inputs, room = prepare_shard(ledger, shard), ledger.work_folder(shard)
            flying[pool.submit(convert_shard, convert, inputs, room, shard.output.name)] = shard
            while len(flying) >= 2 * processes:
                yield from _landed(flying)
        while flying:
            yield from _landed(flying)
        pool.shutdown()
    except BrokenProcessPool:
        begun = [s for s in flying.values() if (ledger.work_folder(s) / "out").exists()]
        names = ", ".join(shard.output.as_posix() for shard in begun) or "before the first shard"
        raise DataError(
            f"{ledger.step} ({names}): a worker process was killed, most often for want of memory; "
            "run the command again with fewer --processes, it keeps what is finished"
        ) from None
    finally:
        held.close()  # whatever still works now stops: see die_with_parent
        pool.shutdown(cancel_futures=True)
        watched.close()


def _landed(flying: dict[Future[Stats], Shard]) -> Iterator[Result]:
    done, _ = wait(flying, return_when=FIRST_COMPLETED)
    for future in done:
        stats = future.result()  # raises what convert raised; the shard stays in `flying`
        yield flying.pop(future), stats


def die_with_parent(watched: Connection) -> None:
    """Tie this worker, and every program it starts, to the life of the process that spawned it.

    The parent alone holds the other end of the pipe: when it closes it or is killed, the read below
    ends. Being a process group also keeps Ctrl-C in the terminal from the worker.
    """
    os.setpgid(0, 0)

    def watch() -> None:
        try:
            watched.recv_bytes()
        except (EOFError, OSError):
            for group in (*PROGRAMS, 0):  # 0 is this worker's own: last
                with suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def run_in_threads(
    step: str, size: int, work: Callable[[Item], int], items: Sequence[Item], threads: int
) -> int:
    """Do something with every item, drawn as progress through `size` bytes; return the bytes it made.

    `work` returns its bytes. The first error ends it: what has not begun is left.
    """
    with Progress(step, size) as bar, ThreadPoolExecutor(threads) as pool:
        running = [pool.submit(work, item) for item in items]
        try:
            for done in as_completed(running):
                bar.advance(done.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return bar.bytes


class Progress:
    """A bar of megabytes on a terminal, a plain line every ten seconds elsewhere; on stderr.

    Use it with `with`; `total` in bytes, None when unknown (it may be set later); `done` bytes
    were there before.
    """

    def __init__(self, step: str, total: int | None, done: int = 0) -> None:
        self.step, self.total = step, total
        self.bytes = self.before = done
        self.started = self.told = time.monotonic()
        self.bar: Any = None

    def __enter__(self) -> "Progress":
        self.started = self.told = time.monotonic()
        if sys.stderr.isatty():
            self._draw()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def _draw(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
        from rich.progress import Progress as Bar

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        self.bar = Bar(*columns, console=Console(stderr=True), transient=True)
        self.task = self.bar.add_task(self.step, total=self.total, completed=self.before)
        self.bar.start()

    def advance(self, count: int) -> None:
        """Add `count` bytes (they may be negative when a download starts over)."""
        self.bytes += count
        if self.bar is not None:
            self.bar.update(self.task, advance=count, total=self.total)
            return
        now = time.monotonic()
        if now - self.told >= SECONDS_BETWEEN_LINES:
            self.told = now
            share = f" of {self.total / 1e6:.1f}" if self.total else ""
            percent = f" ({100 * self.bytes / self.total:.0f} %)" if self.total else ""
            speed = (self.bytes - self.before) / 1e6 / (now - self.started)
            print(
                f"{self.step}: {self.bytes / 1e6:.1f}{share} MB{percent}, {speed:.1f} MB/s",
                file=sys.stderr,
                flush=True,
            )
