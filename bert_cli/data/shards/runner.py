"""Run a function over many shards, in this process, in worker processes or on a cluster.

The function writes into a folder of its shard alone; the files are renamed to their final paths and a
marker is written last (`manifest.py`). So a second run skips what is complete and makes the rest again.
Worker processes end with this process, even when it is killed by signal 9. At most twice as many shards
as workers are in progress, so memory does not grow with the input.
"""

import shutil
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from multiprocessing import get_context

from bert_cli.data.shards.dask_backend import run_on_cluster
from bert_cli.data.shards.manifest import (
    MANIFEST,
    Manifest,
    OutputFolder,
    Step,
    open_output,
    read_manifest,
)
from bert_cli.data.shards.progress import Progress, plan_disk_space, summary
from bert_cli.data.shards.shard import Convert, Shard, Stats
from bert_cli.errors import DataError
from bert_cli.files import name_path
from bert_cli.processes import die_with_parent

Results = Generator[tuple[Shard, Stats | None], None, None]
"""Shards in the order in which they end; without Stats a shard that was complete before."""
NOTES_SHOWN = 5  # the manifest has all of them


@dataclass(frozen=True)
class Workers:
    """Where shards are made: in `processes` of this machine, or by the cluster of a dask scheduler."""

    processes: int = 1
    scheduler: str | None = None
    """Address of the scheduler, or the file that it wrote."""


def run_shards(
    step: Step,
    shards: Iterable[Shard],
    convert: Convert,
    workers: Workers,
    *,
    total: int | None = None,
    notes: Sequence[str] = (),
) -> Manifest:
    """Make every shard, write the manifest, print one summary line; return the manifest.

    `convert(inputs, output, **shard.arguments)` must be picklable. With one process it is called in
    this process. More processes import the main module again, so a script that calls this needs
    `if __name__ == "__main__":`. `total`, the sum of the shards' sizes, is needed when `shards` is a
    generator. `notes` is read at the end, so a generator may still add to it.

    Raises DataError when OUT was made with other settings or from other inputs, when a worker is
    killed, when nothing was produced; SystemExit(130) on Ctrl-C; ConfigError without dask.
    """
    if isinstance(shards, Sequence) and total is None:
        total = sum(shard.size() for shard in shards)
    started = time.monotonic()
    fresh, skipped, finished = Stats(), 0, 0
    with open_output(step) as output:
        bytes_left = _print_plan(output, shards)
        try:
            results = _results(output, shards, convert, workers)
            with closing(results), Progress(step.name, total) as bar:
                for shard, stats in results:
                    if stats is None:
                        skipped += 1
                    else:
                        output.commit(shard, stats)
                        bytes_left -= stats.bytes_out
                        fresh += stats
                    finished += 1
                    bar.advance(shard.size())
        except OSError as error:
            shutil.rmtree(
                output.partial, ignore_errors=True
            )  # free its space before it is measured
            with name_path(output.out, bytes_left):
                raise error
        except KeyboardInterrupt:
            message = f"interrupted, {finished} shards are finished; the same command continues"
            print(f"{step.name}: {message}", file=sys.stderr)
            raise SystemExit(130) from None
        seconds = time.monotonic() - started
        sum_of_all = output.total(notes)
        if fresh == Stats() and (output.out / MANIFEST).exists():
            manifest = read_manifest(output.out)  # with the times of the run that did the work
        else:
            count = workers.processes if workers.scheduler is None else None
            manifest = output.write_manifest(
                sum_of_all, seconds, fresh.bytes_in, output.shards(), processes=count
            )
    _print_notes(step, manifest["notes"])
    before = f"{skipped} of {finished}" if skipped else ""
    print(summary(step.name, sum_of_all, seconds, fresh.bytes_in, before))
    return manifest


def _print_plan(output: OutputFolder, shards: Iterable[Shard]) -> int:
    """Print the plan for the disk, and return the estimated bytes that are still to write."""
    expected = output.step.expected_bytes
    if expected is None:
        return 0
    completed, written = output.completed()
    count = len(shards) if isinstance(shards, Sequence) else None
    to_write = 0 if completed == count else max(0, expected - written)
    print(plan_disk_space(output.step.name, count, to_write, written, output.out), flush=True)
    return to_write


def _print_notes(step: Step, notes: Sequence[str]) -> None:
    for note in notes[:NOTES_SHOWN]:
        print(f"{step.name}: {note}")
    if len(notes) > NOTES_SHOWN:
        print(f"{step.name}: {len(notes) - NOTES_SHOWN} more notes in {step.out}/{MANIFEST}")


def _results(
    output: OutputFolder, shards: Iterable[Shard], convert: Convert, workers: Workers
) -> Results:
    if workers.scheduler is not None:
        return run_on_cluster(output, shards, convert, workers.scheduler)
    if workers.processes > 1:
        return _run_in_processes(output, shards, convert, workers.processes)
    return _run_here(output, shards, convert)


def _run_here(output: OutputFolder, shards: Iterable[Shard], convert: Convert) -> Results:
    for shard in shards:
        is_complete = output.is_complete(shard)
        yield shard, None if is_complete else output.job(shard).run(convert)


def _run_in_processes(
    output: OutputFolder, shards: Iterable[Shard], convert: Convert, processes: int
) -> Results:
    context = get_context("spawn")  # a forked copy of a process with threads may hang
    read_end, write_end = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(processes, context, die_with_parent, (read_end,))
    running: dict[Future[Stats], Shard] = {}
    try:
        for shard in shards:
            if output.is_complete(shard):
                yield shard, None
                continue
            running[pool.submit(output.job(shard).run, convert)] = shard
            while len(running) >= 2 * processes:
                yield from _finished(running)
        while running:
            yield from _finished(running)
        pool.shutdown()
    except BrokenProcessPool:
        started = [s for s in running.values() if (output.work_folder(s) / "out").exists()]
        names = ", ".join(shard.output.as_posix() for shard in started) or "before the first shard"
        raise DataError(
            f"{output.step.name} ({names})",
            "a worker process was killed, most often for want of memory",
            "run the command again with fewer --processes; it keeps what is finished",
        ) from None
    finally:
        write_end.close()  # kills the workers that are still busy
        pool.shutdown(cancel_futures=True)
        read_end.close()


def _finished(running: dict[Future[Stats], Shard]) -> Iterator[tuple[Shard, Stats]]:
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    for future in done:
        stats = future.result()  # raises the exception of `convert`; the shard stays in `running`
        yield running.pop(future), stats
