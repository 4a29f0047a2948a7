"""The interface of an engine, what a run needs from its framework, and a watchdog that names the ranks it waits for.

This file imports no framework. A second engine is a folder next to `tensorflow/` with subclasses of `ProcessGroup` and
`Engine`, and functions `devices_here` and `open_mesh`.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from bert_cli.errors import DeviceError
from bert_cli.parallel.cluster import Processes

POLL_SECONDS = 1.0  # of the watchdog
Batch = Mapping[str, npt.NDArray[Any]]
"""Columns of examples, arrays [M, B, ...] of M micro-batches."""


class StoppedBetweenMicroBatchesError(Exception):
    """A stop was requested during a step. The weights are those of the step before."""


class Value(Protocol):
    """A complete weight or optimizer moment, wherever its parts are stored."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""

    @property
    def is_sharded(self) -> bool:
        """Whether each process stores a part: then all of them must read it, in the same order."""

    def numpy(self) -> npt.NDArray[Any]:
        """Return the value."""

    def assign(self, value: npt.NDArray[Any]) -> None:
        """Set the value."""


class Head(Protocol):
    """The last block of a model: the loss, and the sums that metrics are computed from.

    COUNTS has the column whose sum a loss is divided by, MEANS the sum and the count whose ratio a metric is.
    """

    COUNTS: Mapping[str, str]
    MEANS: Mapping[str, tuple[str, str]]


@dataclass(frozen=True)
class Mesh:
    """The replicas of a run, the devices of each of this process' replicas, and the device of the host's memory.

    `number` is unique in the process, so that two meshes never share a collective key.
    """

    replicas: int
    devices: tuple[tuple[str, ...], ...]
    host: str
    processes: Processes
    number: int = 0

    @property
    def first_replica(self) -> int:
        """Number of this process' first replica in the run."""
        return self.processes.rank * len(self.devices)

    @property
    def kind(self) -> str:
        """GPU, TPU or CPU."""
        return self.devices[0][0].upper().split(":")[-2]


def lost_process(rank: int | None) -> DeviceError:
    """Return the error of a process that has lost another one, None for an unknown one."""
    which = "another process" if rank is None else f"rank {rank}"
    remedy = "read its last message, then start the same command again to continue from the last checkpoint"
    return DeviceError("cluster", f"{which} is gone, so this process ends too", remedy)


class ProcessGroup(ABC):
    """The processes of a run. Methods that communicate must be called by every process, in the same order."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.activity = "starting"
        """What this process is doing. The watchdog publishes it."""
        self.collectives = 0  # entered by this process
        self.is_waiting = threading.Event()  # set while it is in one

    def all_reduce(self, numbers: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Return the sum over all processes. Raises DeviceError when a process is lost."""
        array = np.asarray(numbers, np.float64)
        if self.world_size == 1:
            return array
        with self.collective():
            return self._sum(array.reshape(-1)).reshape(array.shape)

    def all_gather(self, number: float) -> list[float]:
        """Return the number of every process, ordered by rank."""
        numbers = np.zeros(self.world_size)
        numbers[self.rank] = number
        return self.all_reduce(numbers).tolist()

    def broadcast(self, numbers: Sequence[float]) -> list[float]:
        """Return the numbers that rank 0 passes, bit for bit."""
        array = np.asarray(numbers, np.float64)
        return self.all_reduce(array if self.rank == 0 else np.zeros_like(array)).tolist()

    def barrier(self) -> None:
        """Wait until every process has called this."""
        self.all_reduce([0.0])

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Count and flag a collective while it runs. Raises DeviceError, with the rank, when a process is lost."""
        self.collectives += 1
        self.is_waiting.set()
        try:
            with self._naming_lost_process():
                yield
        finally:
            self.is_waiting.clear()

    @abstractmethod
    def publish(self, text: str) -> None:
        """Store a text that other processes can read with `published_by`, without a collective."""

    @abstractmethod
    def published_by(self, rank: int) -> str:
        """Return the last text that a rank has published, or an empty one."""

    @abstractmethod
    def _sum(self, numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the sum of a vector over at least two processes."""

    @abstractmethod
    def _naming_lost_process(self) -> AbstractContextManager[None]:
        """Return a context manager that turns the framework's error about a lost process into DeviceError."""


@contextmanager
def watchdog(group: ProcessGroup, report_after_seconds: float) -> Iterator[None]:
    """Print from a thread which ranks this process waits for; with one process nothing is done.

    Each process publishes once a second how many collectives it has entered and what it is doing. Whether a process is
    lost is decided by the cluster's heartbeats.
    """
    ended = threading.Event()
    thread = threading.Thread(target=_watch, args=(group, report_after_seconds, ended), daemon=True)
    if group.world_size > 1:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if thread.is_alive():
            thread.join(timeout=10 * POLL_SECONDS)


def _watch(group: ProcessGroup, report_after_seconds: float, ended: threading.Event) -> None:
    published = ""
    since = time.monotonic()
    reported = 0.0
    # The store ends with the rank that holds it; the error of the run says so.
    with suppress(Exception):
        while not ended.wait(POLL_SECONDS):
            progress = f"{group.collectives} {group.activity}"
            if progress != published:
                group.publish(progress)
                published = progress
                since = time.monotonic()
                reported = 0.0
            waited = time.monotonic() - since
            if group.is_waiting.is_set() and waited - reported >= report_after_seconds:
                reported = waited
                missing = " and ".join(_late_ranks(group)) or "the network"
                print(f"rank {group.rank} has waited {waited:.0f} s for {missing}", flush=True)


def _late_ranks(group: ProcessGroup) -> Iterator[str]:
    """Yield the ranks that are not in this collective; if all are, the sum itself takes long."""
    for rank in range(group.world_size):
        collectives, _, activity = group.published_by(rank).partition(" ")
        if rank != group.rank and int(collectives or 0) < group.collectives:
            yield f"rank {rank} ({activity or 'nothing published yet'})"


@dataclass(frozen=True, kw_only=True)
class UpdateRequest:
    """The arguments of an update besides its batch.

    `step` counts the completed steps, and with the sample index of a micro-batch decides dropout and rounding;
    `updates` lacks those that were skipped. `micro_batches` are those of the step over all processes, and
    `first_micro_batch` is the number of those before them.
    """

    step: int = 0
    updates: int = 0
    micro_batches: int = 1
    first_micro_batch: int = 0
    learning_rate: float = 0.0
    loss_scale: float = 1.0
    max_gradient_norm: float | None = None


class UpdateResult(NamedTuple):
    """The head's sums, what they are divided by (see `count`), and norms, of the complete step over all processes.

    The norm of the gradient is that before clipping and without loss scale. If not finite, the update was skipped.
    """

    sums: dict[str, float]
    counts: dict[str, float]
    gradient_norm: float
    weight_norm: float


class Engine(ABC):
    """Computes steps, evaluations and predictions of one model on the devices of a mesh."""

    group: ProcessGroup
    seed: int
    """That of the run, for dropout and whatever else is drawn in a step."""
    head: Head
    weights: Mapping[str, Value]
    asks_before_each_micro_batch = False
    """Whether `update` calls `stop_requested` when the micro-batch before has been computed."""
    traced_steps = 0
    """Steps that are still to be recorded by the trace, if there is one."""

    def __init__(self) -> None:
        self.record: Callable[[str], AbstractContextManager[None]] = lambda part: nullcontext()
        """Entered around each part of an update: `forward_backward`, `reduction`, `optimizer`."""

    @property
    @abstractmethod
    def moments(self) -> Mapping[str, tuple[Value, Value]]:
        """The optimizer's two float32 moments of each weight, for checkpoints."""

    @abstractmethod
    def compile(self, batch: Batch) -> None:
        """Trace and compile everything that a step needs, on one micro-batch for each local replica."""

    @abstractmethod
    def gather_weights(self) -> None:
        """Make the weights of `evaluate` and `predict` complete in each process; all processes must call it."""

    @abstractmethod
    def update(
        self,
        batch: Batch,
        request: UpdateRequest,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> UpdateResult:
        """Update the weights with the gradient of a step, of which `batch` is this process' part.

        All processes skip the update when the gradient is not finite. Raises StoppedBetweenMicroBatchesError when a
        stop is requested on any, DeviceError when a micro-batch does not fit the memory or a process is lost.
        """

    @abstractmethod
    def forward(self, batch: Batch, request: UpdateRequest) -> npt.NDArray[np.float32]:
        """Return the head's logits [M, ...] of this process' micro-batches with the dropout of `update`."""

    @abstractmethod
    def evaluate(self, micro_batch: Batch) -> dict[str, float]:
        """Return the head's sums for examples [B, ...], on this process alone, without dropout."""

    @abstractmethod
    def predict(self, examples: Batch) -> Any:
        """Return the head's logits for examples [B, ...], on this process alone, as NumPy arrays."""

    def _all_reduced(self, numbers: Mapping[str, float]) -> dict[str, float]:
        totals = self.group.all_reduce(list(numbers.values()))
        return dict(zip(numbers, map(float, totals), strict=True))

    def write_trace(self, path: Path) -> None:
        """Write when each stage worked on which micro-batch. Only for an engine that has `traced_steps`."""
        raise NotImplementedError


def kind_of(block: Any) -> Hashable:
    """Return a key that is equal for blocks that may share one trace."""
    return type(block), len(getattr(block, "weights", ())), *getattr(block, "factors", {}).items()


def out_of_memory() -> DeviceError:
    """Return the error of a micro-batch that does not fit."""
    remedy = "lower it and raise grad_acc_steps_per_replica, set --parallel.recompute, or ask `bert plan` for a layout"
    return DeviceError(
        "global_batch.micro_batch_size", "the run does not fit the device's memory", remedy
    )


def count(batch: Batch, columns: Mapping[str, str]) -> dict[str, float]:
    """Return the counts of a batch [..., B, S]: `examples`, non-padding `tokens`, and sums of columns by name.

    Each sequence of a pack is an example. A column of weights that is absent counts 1 for each example.
    """
    # The attention mask numbers the sequences of a pack from 1.
    examples = float(np.sum(np.max(batch["input_mask"], axis=-1)))
    sums = {
        name: float(np.sum(batch[column])) if column in batch else examples
        for name, column in columns.items()
    }
    tokens = float(np.count_nonzero(batch["input_mask"]))
    return {**sums, "examples": examples, "tokens": tokens}


def scaled_for_accumulation(loss_scale: float, micro_batches: int) -> float:
    """Return the factor of a micro-batch's loss in a step of `micro_batches` micro-batches.

    The loss is divided by the counts of the complete step. Multiplied by the number of micro-batches (the power of two
    below it, so that nothing rounds), float16 gradients are as large as in a step of one. Measured at 2,040
    micro-batches and a loss scale of 4096: a gradient is off by 13 % without the factor and by 0.1 % with it.
    """
    return loss_scale * 2 ** (micro_batches.bit_length() - 1)
