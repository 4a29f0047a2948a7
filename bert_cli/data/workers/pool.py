"""Worker processes and threads of a step.

Worker processes end with this process, even when it is killed by signal 9. At most twice as many shards as workers are
in progress: memory does not grow with the input.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, as_completed, wait
from concurrent.futures.process import BrokenProcessPool
from concurrent.futures.thread import ThreadPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

from bert_cli.data.io.manifest import Convert, Results, Stats, Work, make_shard
from bert_cli.errors import DataError
from bert_cli.processes import die_with_parent
from bert_cli.progress import Progress

Item = TypeVar("Item")


def run_in_processes(step: str, works: Iterable[Work], convert: Convert, processes: int) -> Results:
    """Make shards in worker processes; at most twice as many shards as workers are in progress."""
    context = get_context("spawn")  # a forked copy of a process with threads may hang
    read_end, write_end = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(processes, context, die_with_parent, (read_end,))
    running: dict[Future[Stats], Work] = {}

    def finished(limit: int) -> Results:
        """Wait until at most so many shards are in progress."""
        while len(running) > limit:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                stats = future.result()  # raises the exception of `convert`
                yield running.pop(future), stats

    try:
        for work in works:
            future = pool.submit(make_shard, work.prepared, work.folder, convert)
            running[future] = work
            yield from finished(2 * processes - 1)
        yield from finished(0)
        pool.shutdown()
    except BrokenProcessPool:
        started = [work.shard for work in running.values() if (work.folder / "out").exists()]
        names = ", ".join(shard.output.as_posix() for shard in started) or "before the first shard"
        raise DataError(
            f"{step} ({names})",
            "a worker process was killed, usually because memory ran out",
            "run the command again with fewer --processes; it keeps what is finished",
        ) from None
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
