"""What replicas and processes say to one another: sums over all of them, and nothing else.

Every sum is TensorFlow's own collective operation (ring on CPUs, NCCL on GPUs), one operation to a
function, so that no two can overtake each other. A `Group` is the same device of every replica, for
gradients; `Peers` are the processes, for the few numbers that all must agree on. When a process is
lost TensorFlow ends what the others wait for with an error; here it becomes one that names the rank.
"""

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from bert_cli.errors import DeviceError
from bert_cli.parallel.tensorflow.mesh import Mesh

# Keys tell collectives apart. The runtime's own count up from 1; each mesh has a million of ours and
# each device 10,000 of those, two for every bucket. A key that was used keeps its shape for ever.
KEYS_OF_MESH = 1_000_000
KEYS_OF_DEVICE = 10_000
# Lengths of what the processes add up: a few numbers, or a piece of an array (8 MB).
FRAMES = (64, 1_000_000)

Function = Any
"""A traced function of one tensor."""


@dataclass(frozen=True)
class Group:
    """The same device of all replicas, and the place of one of them in it."""

    key: int
    size: int
    place: int
    """Number of the replica this belongs to."""
    device: str

    def summing(self, number: int) -> Function:
        """A function that adds up a tensor over the group; `number` tells its operations apart."""
        return self._collective(
            tf.raw_ops.CollectiveReduceV2, number, merge_op="Add", final_op="Id"
        )

    def gathering(self, number: int) -> Function:
        """A function that puts the pieces of all replicas behind one another, along the first axis."""
        return self._collective(tf.raw_ops.CollectiveGatherV2, number)

    def _collective(self, operation: Any, number: int, **options: str) -> Function:
        def collect(tensor: tf.Tensor) -> tf.Tensor:
            if self.size == 1:
                return tensor
            with tf.device(self.device):
                return operation(
                    input=tensor,
                    group_size=self.size,
                    group_key=self.key,
                    instance_key=self.key + 1 + number,
                    ordering_token=[],
                    communication_hint="nccl" if ":GPU:" in self.device.upper() else "ring",
                    **options,
                )

        return tf.function(collect, autograph=False)


def group_of(mesh: Mesh, replica: int, device: int) -> Group:
    """The group of one device of a local replica."""
    key = (mesh.number + 1) * KEYS_OF_MESH + (device + 1) * KEYS_OF_DEVICE
    return Group(key, mesh.replicas, mesh.first_replica + replica, mesh.devices[replica][device])


class Peers:
    """The processes of a run, in the eyes of one of them. Alone, everything is immediate."""

    def __init__(self, mesh: Mesh) -> None:
        self.rank, self.count = mesh.processes.rank, mesh.processes.count
        key = (mesh.number + 1) * KEYS_OF_MESH
        group = Group(key, self.count, self.rank, mesh.host)
        # A collective has one shape for ever, so numbers travel in frames of two sizes.
        self._sums = {size: group.summing(number) for number, size in enumerate(FRAMES)}
        self.arrived = 0
        """How often this process has come to where all meet."""
        self.doing = "starting"
        """What it does, for the others to read."""
        self.waiting = threading.Event()

    def total(self, numbers: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """The sum over all processes; each gives the same shape, in the same order of calls.

        Raises DeviceError, naming the rank, when a process is lost.
        """
        mine = np.asarray(numbers, np.float64)
        if self.count == 1:
            return mine
        with self.meeting():
            return self._in_frames(mine.reshape(-1)).reshape(mine.shape)

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Around whatever needs all processes, for the watchdog to see and for losses to be named."""
        self.arrived += 1
        self.waiting.set()
        try:
            with naming_the_lost(self.rank):
                yield
        finally:
            self.waiting.clear()

    def _in_frames(self, flat: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        size = FRAMES[flat.size > FRAMES[0]]
        found = [np.zeros(0)]
        for start in range(0, flat.size, size):
            part = flat[start : start + size]
            frame = np.zeros(size)
            frame[: part.size] = part
            found.append(self._sums[size](tf.constant(frame)).numpy()[: part.size])
        return np.concatenate(found)

    def each(self, number: float) -> list[float]:
        """The number of every process, in the order of ranks."""
        mine = np.zeros(self.count)
        mine[self.rank] = number
        return [float(value) for value in self.total(mine)]

    def of_rank_0(self, numbers: Sequence[float]) -> list[float]:
        """What rank 0 gives, on every process: the same bits for all."""
        mine = np.asarray(numbers, np.float64)
        return [
            float(value) for value in self.total(mine if self.rank == 0 else np.zeros_like(mine))
        ]

    def meet(self) -> None:
        """Wait until every process is here."""
        self.total([0.0])


def end_collectives() -> None:
    """Let everyone in this process who waits in a sum fail, because one will not come to it."""
    from tensorflow.python.eager import context

    context.context().abort_collective_ops(tf.errors.CANCELLED, "one of the devices failed")


SIGNS_OF_LOSS = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.FailedPreconditionError,
    tf.errors.InternalError,
    tf.errors.UnknownError,
)
"""What TensorFlow calls it when those who should be in a sum are gone."""


@contextmanager
def naming_the_lost(rank: int) -> Iterator[None]:
    """Turn the runtime's error about a lost process into ours; `rank` is the one that is here."""
    try:
        yield
    except SIGNS_OF_LOSS as error:
        raise lost(str(error), rank) from error


def lost(message: str, rank: int) -> DeviceError:
    """The error for what TensorFlow says when a process is gone."""
    # The first one is where it began; others only passed the news on.
    found = [name for name in re.findall(r"task:(\d+)", message) if int(name) != rank]
    who = f"rank {found[0]}" if found else "another process"
    return DeviceError(
        f"cluster: {who} is gone, so this process ends too; what it said last is why. Start the same "
        "command again to continue from the last checkpoint"
    )
