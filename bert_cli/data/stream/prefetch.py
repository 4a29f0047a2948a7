"""Read the batches of the next steps in a thread."""

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from bert_cli.data.records.columns import Batch
from bert_cli.data.stream.reader import Stream


def read_ahead(
    stream: Stream, first_step: int, end_step: int, depth: int = 2
) -> Iterator[tuple[int, Batch, float]]:
    """Yield (step, batch, seconds waited for it) for first_step <= step < end_step.

    One thread reads up to `depth` steps ahead. Its errors are raised here, at their step; closing
    the iterator ends it after the batch that it is reading.
    """
    pool = ThreadPoolExecutor(1, "read-ahead")
    pending: deque[Future[Batch]] = deque()
    try:
        for step in range(first_step, min(first_step + depth, end_step)):
            pending.append(pool.submit(stream.__getitem__, step))
        for step in range(first_step, end_step):
            started = time.monotonic()
            batch = pending.popleft().result()
            waited = time.monotonic() - started
            if step + depth < end_step:
                pending.append(pool.submit(stream.__getitem__, step + depth))
            yield step, batch, waited
    finally:
        pool.shutdown(cancel_futures=True)
