"""What a step is of the stream of examples, and reading steps before they are asked for.

Step and row give a position in the endless stream, part and parts say whose row it is: a batch is a
function of its step, so it can be read ahead in a thread and by each process on its own.
"""

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import numpy.typing as npt

from bert_cli.data.records.columns import Batch
from bert_cli.errors import ConfigError


class Batches(Protocol):
    """What can be asked for the batch of any step."""

    def __getitem__(self, step: int) -> Batch:
        """Return the step's batch, [M, B, ...]."""


def read_ahead(
    reader: Batches, first_step: int, end_step: int, depth: int = 2
) -> Iterator[tuple[int, Batch, float]]:
    """Yield (step, batch, seconds waited for it) for first_step <= step < end_step.

    One thread reads up to `depth` steps ahead. Its errors are raised here, at their step; closing
    the iterator ends it as soon as the batch it is at is read.
    """
    pool = ThreadPoolExecutor(1, "read-ahead")
    ahead: deque[Future[Batch]] = deque()
    try:
        for step in range(first_step, min(first_step + depth, end_step)):
            ahead.append(pool.submit(reader.__getitem__, step))
        for step in range(first_step, end_step):
            asked = time.monotonic()
            batch = ahead.popleft().result()
            waited = time.monotonic() - asked
            if step + depth < end_step:
                ahead.append(pool.submit(reader.__getitem__, step + depth))
            yield step, batch, waited
    finally:
        pool.shutdown(cancel_futures=True)


def check_step(examples_per_step: int, micro_batch_size: int, parts: int) -> None:
    """Raise ConfigError unless a step is a whole number of micro-batches in each part."""
    if examples_per_step < 1 or examples_per_step % micro_batch_size:
        raise ConfigError(
            f"global_batch ({examples_per_step} examples a step): is no multiple of "
            f"micro_batch_size {micro_batch_size}; change one of them"
        )
    if (examples_per_step // micro_batch_size) % parts:
        raise ConfigError(
            f"global_batch ({examples_per_step // micro_batch_size} micro-batches a step): cannot be "
            f"divided among {parts} processes; change one of the two numbers"
        )


def positions_of(step: int, examples_per_step: int, part: int, parts: int) -> npt.NDArray[np.int64]:
    """Places in the stream of the examples of a step, or of part `part` of `parts` of it."""
    each = examples_per_step // parts
    first = step * examples_per_step + part * each
    return np.arange(first, first + each)


def micro_batches(rows: Batch, micro_batch_size: int) -> Batch:
    """Rows [n, ...] cut into micro-batches [M, B, ...]."""
    return {name: a.reshape(-1, micro_batch_size, *a.shape[1:]) for name, a in rows.items()}
