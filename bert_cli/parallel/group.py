"""The processes of a run: what they exchange, and a watchdog that names the ranks it waits for."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress

import numpy as np
import numpy.typing as npt

from bert_cli.arrays import Floats64
from bert_cli.errors import DeviceError
from bert_cli.processes import print_error

POLL_SECONDS = 1.0  # of the watchdog
REPORT_SECONDS = 60.0  # that this process waits before it names the late ranks


def lost_process(rank: int | None, workers: Sequence[str]) -> DeviceError:
    """Return the error of a process that lost one of `workers` (host:port), of unknown rank if `rank` is None."""
    which = "another process"
    if rank is not None:
        which = f"rank {rank} ({workers[rank]})"
    remedy = "read its last message, then start the same command again to continue from the last checkpoint"
    return DeviceError("cluster", f"{which} is gone, so this process ends too", remedy)


class ProcessGroup(ABC):
    """The processes of a run. Methods that communicate must be called by every process, in the same order."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.activity = "starting"
        """The current operation of this process, which the watchdog publishes."""
        self.collectives = 0  # entered by this process
        self.is_waiting = threading.Event()  # set while this process is in a collective

    def all_reduce(self, numbers: npt.ArrayLike) -> Floats64:
        """Return the sum over all processes. Raises DeviceError when a process is lost."""
        array = np.asarray(numbers, np.float64)
        if self.world_size == 1:
            return array
        with self.collective():
            return self._sum(array.reshape(-1)).reshape(array.shape)

    def all_gather(self, number: float) -> list[float]:
        """Return the number of every process, ordered by rank."""
        # A gather is a sum of vectors with one entry each: one collective serves for all exchanges.
        numbers = np.zeros(self.world_size)
        numbers[self.rank] = number
        return self.all_reduce(numbers).tolist()

    def gather_texts(self, text: str) -> list[str]:
        """Return the text of every process, ordered by rank."""
        data = np.frombuffer(text.encode(), np.uint8)
        # A float64 for each byte: the texts are short.
        rows = np.zeros((self.world_size, int(max(self.all_gather(data.size)))))
        rows[self.rank, : data.size] = data
        return [bytes(row.astype(np.uint8)).rstrip(b"\0").decode() for row in self.all_reduce(rows)]

    def broadcast(self, numbers: Sequence[float]) -> list[float]:
        """Return the numbers that rank 0 passes, bit for bit."""
        array = np.asarray(numbers, np.float64)
        # The sum of one array and zeros is that array, bit for bit.
        if self.rank != 0:
            array = np.zeros_like(array)
        return self.all_reduce(array).tolist()

    def barrier(self) -> None:
        """Wait until every process has called this method."""
        self.all_reduce([0.0])

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Count and flag a collective while it runs. Raises DeviceError, with the rank, when a process is lost."""
        self.collectives += 1
        self.is_waiting.set()
        try:
            with self.naming_lost_process():
                yield
        finally:
            self.is_waiting.clear()

    @abstractmethod
    def publish(self, text: str) -> None:
        """Store a text that other processes can read with `published_by`, without a collective."""

    @abstractmethod
    def published_by(self, rank: int) -> str:
        """Return the last text that a rank has published, or an empty text."""

    @abstractmethod
    def _sum(self, numbers: Floats64) -> Floats64:
        """Return the sum of a vector over at least two processes."""

    @abstractmethod
    def naming_lost_process(self) -> AbstractContextManager[None]:
        """Return a context manager that turns the framework's error about a lost process into DeviceError."""


@contextmanager
def watchdog(group: ProcessGroup) -> Iterator[None]:
    """Start a thread that prints the ranks for which this process waits; does nothing for a single process."""
    # Each process publishes its number of collectives and its activity once a second.
    ended = threading.Event()
    thread = threading.Thread(target=_watch, args=(group, ended), daemon=True)
    if group.world_size > 1:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if thread.is_alive():
            # It may be in a call to a store whose rank has ended; it is a daemon, so the process ends without it.
            thread.join(timeout=10 * POLL_SECONDS)


def _watch(group: ProcessGroup, ended: threading.Event) -> None:
    published = ""
    since = time.monotonic()
    reported = 0.0
    # The store ends with the rank that holds it; the run raises its own error for that.
    with suppress(Exception):
        while not ended.wait(POLL_SECONDS):
            progress = f"{group.collectives} {group.activity}"
            if progress != published:
                group.publish(progress)
                published = progress
                since = time.monotonic()
                reported = 0.0
            waited = time.monotonic() - since
            if group.is_waiting.is_set() and waited - reported >= REPORT_SECONDS:
                reported = waited
                missing = " and ".join(_late_ranks(group)) or "the network"
                print_error(f"rank {group.rank} has waited {waited:.0f} s for {missing}")


def _late_ranks(group: ProcessGroup) -> Iterator[str]:
    """Yield the ranks that have not entered this collective; if all have, the sum itself takes long."""
    for rank in range(group.world_size):
        collectives, _, activity = group.published_by(rank).partition(" ")
        if rank != group.rank and int(collectives or 0) < group.collectives:
            yield f"rank {rank} ({activity or 'nothing published yet'})"
