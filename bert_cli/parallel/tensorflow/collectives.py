"""Collectives over replicas and processes.

Every all-reduce and all-gather is TensorFlow's own operation (ring on CPUs, NCCL on GPUs), one to a tf.function, so
that all devices issue them in one order. A `DeviceGroup` is the same device of every replica and exchanges gradients;
the process group exchanges the few numbers that all processes must agree on.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from bert_cli.errors import DeviceError
from bert_cli.parallel.engine import Mesh, ProcessGroup
from bert_cli.parallel.tensorflow import runtime

# TensorFlow identifies a collective, and the shape of its tensors, by a key; the keys of its own collectives
# count up from 1. Each mesh has a million keys, each device 10,000 of those.
KEYS_OF_MESH = 1_000_000
KEYS_OF_DEVICE = 10_000
FRAMES = (64, 1_000_000)
"""Lengths of the vectors that processes add up: a few numbers, or a part of an array (8 MB)."""
SIGNS_OF_LOSS = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.FailedPreconditionError,
    tf.errors.InternalError,
    tf.errors.UnknownError,
)
"""Errors of a collective that lacks a process."""


@dataclass(frozen=True)
class DeviceGroup:
    """The same device of all replicas, and the rank of one replica among them.

    Methods take a `number` that identifies the collective among those of the device.
    """

    key: int
    size: int
    rank: int
    device: str

    def all_reduce(self, tensor: tf.Tensor, number: int) -> tf.Tensor:
        """Return the sum of the tensors of all replicas."""
        operation = tf.raw_ops.CollectiveReduceV2
        return self._collective(operation, tensor, number, merge_op="Add", final_op="Id")

    def all_gather(self, tensor: tf.Tensor, number: int) -> tf.Tensor:
        """Return the tensors of all replicas, concatenated along the first axis."""
        return self._collective(tf.raw_ops.CollectiveGatherV2, tensor, number)

    def _collective(
        self, operation: Any, tensor: tf.Tensor, number: int, **options: str
    ) -> tf.Tensor:
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


def device_group(mesh: Mesh, replica: int, device: int) -> DeviceGroup:
    """Return the group of one device of a local replica."""
    key = (mesh.number + 1) * KEYS_OF_MESH + (device + 1) * KEYS_OF_DEVICE
    rank = mesh.first_replica + replica
    return DeviceGroup(key, mesh.replicas, rank, mesh.devices[replica][device])


class TensorFlowProcessGroup(ProcessGroup):
    """The processes of a mesh."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh.processes.rank, mesh.processes.count)
        key = (mesh.number + 1) * KEYS_OF_MESH
        group = DeviceGroup(key, self.world_size, self.rank, mesh.host)
        self._functions = [
            runtime.traced(lambda tensor, number=number: group.all_reduce(tensor, number))
            for number in range(len(FRAMES))
        ]

    def publish(self, text: str) -> None:
        """Store a text in the cluster's coordination service."""
        runtime.publish(f"bert_rank_{self.rank}", text)

    def published_by(self, rank: int) -> str:
        """Return the last text of a rank, or an empty one."""
        return runtime.published(f"bert_rank_{rank}")

    def _sum(self, numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        which = int(numbers.size > FRAMES[0])
        sums = [np.zeros(0)]
        for start in range(0, numbers.size, FRAMES[which]):
            part = numbers[start : start + FRAMES[which]]
            frame = np.zeros(FRAMES[which])
            frame[: part.size] = part
            sums.append(self._functions[which](tf.constant(frame)).numpy()[: part.size])
        return np.concatenate(sums)

    @contextmanager
    def _naming_lost_process(self) -> Iterator[None]:
        try:
            yield
        except SIGNS_OF_LOSS as error:
            raise lost_process(str(error), self.rank) from error


def lost_process(message: str, rank: int) -> DeviceError:
    """Return the error of process `rank` for TensorFlow's message about a lost one."""
    # The first one named is where it began; the others passed the error on.
    ranks = [name for name in re.findall(r"task:(\d+)", message) if int(name) != rank]
    which = f"rank {ranks[0]}" if ranks else "another process"
    return DeviceError(
        "cluster",
        f"{which} is gone, so this process ends too",
        "read its last message, then start the same command again to continue from the last checkpoint",
    )
