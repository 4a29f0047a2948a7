"""The functions of an engine besides its steps: devices, processes, memory.

An engine is a folder of this package: its `mesh.py` has the functions of `Runtime`, its `engine.py` has `build_engine`,
of the type `BuildEngine`. This file imports no framework.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from bert_cli.errors import DeviceError
from bert_cli.parallel.cluster import Processes, Rendezvous
from bert_cli.parallel.engine import Engine
from bert_cli.parallel.group import ProcessGroup
from bert_cli.text import count

if TYPE_CHECKING:
    from bert_cli.model.arithmetic.parts import Block
    from bert_cli.optim.optimizer import Optimizer, RandomBits


class Devices(NamedTuple):
    """The devices of a process."""

    kind: str
    """GPU, TPU or CPU."""
    number: int
    memory: int
    """Bytes of each device."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Layout of a step over devices. Settings refuse values that the engine does not support."""

    replicas: int = 1
    accumulation: int = 1
    """Micro-batches of a replica in a step."""
    stage_lengths: Sequence[int] | None = None
    """The number of blocks in each stage of a pipeline; one stage by default."""
    stage_devices: Sequence[int] = (0,)
    """The device of each stage, in its replica."""
    tensor_shape: tuple[int, int] = (1, 1)
    """Devices of a replica along the two axes of tensor parallelism."""
    recomputes: bool = False
    """Whether only the inputs of blocks are saved for the backward pass."""
    shard_weights: bool = False
    shard_moments: bool = False
    offload_moments: bool = False
    compile: str = "auto"

    @property
    def devices_of_replica(self) -> int:
        """Return the number of devices of a replica."""
        return (max(self.stage_devices) + 1) * math.prod(self.tensor_shape)


@dataclass(frozen=True)
class Mesh:
    """The layout of a run, the devices of this process' replicas, and the device of the host's memory."""

    layout: Layout
    devices: tuple[tuple[str, ...], ...]
    host: str
    processes: Processes
    number: int = 0
    """Unique in the process, so that two meshes never share a collective key."""
    links: Any = None
    """The connections of the processes, where the engine has its own."""

    @property
    def replicas(self) -> int:
        """Number of replicas of the run."""
        return self.layout.replicas

    @property
    def first_replica(self) -> int:
        """Number of this process' first replica in the run."""
        return self.processes.rank * len(self.devices)

    @property
    def kind(self) -> str:
        """GPU, TPU or CPU."""
        # Both engines name devices ...:KIND:NUMBER.
        return self.devices[0][0].upper().split(":")[-2]


class Runtime(Protocol):
    """The module of an engine's devices and processes."""

    def devices_here(self, processes: Processes) -> Devices:
        """Return the devices of this process."""

    def device_names(self) -> list[str]:
        """Return the names of the accelerators."""

    def configure_runtime(self, precision: str, deterministic: bool) -> None:
        """Set the options of the framework, before the first computation."""

    def open_mesh(self, processes: Processes, layout: Layout, rendezvous: Rendezvous) -> Mesh:
        """Take the devices of a layout and join the other processes; all have the same number of replicas.

        Raises StoppedWhileJoiningError if a stop is requested before all have joined, ConfigError or DeviceError for a
        layout that does not fit the processes or devices.
        """

    def group_of(self, mesh: Mesh) -> ProcessGroup:
        """Return the processes of a mesh."""

    def used_memory(self, mesh: Mesh) -> tuple[int, int]:
        """Return the current and the peak memory in bytes, each of the fullest accelerator of this process."""

    def synchronize(self) -> None:
        """Wait until the accelerators have finished."""


class Model(NamedTuple):
    """The model of an engine, and how it is trained."""

    blocks: "Callable[[], Iterator[tuple[str, Block]]]"
    """Builds its blocks, each on the current device: their names and blocks in running order, the head last."""
    seed: int
    make_optimizer: "Callable[[Sequence[str], RandomBits], Optimizer] | None"
    """Returns the optimizer of the weights with these names; None for an engine without steps."""


BuildEngine = Callable[[Model, Mesh], Engine]


def divide_devices(
    names: Sequence[str], kind: str, processes: Processes, layout: Layout
) -> tuple[tuple[str, ...], ...]:
    """Return the devices of each replica of this process. Raises DeviceError if there are too few."""
    local = layout.replicas // processes.count
    each = layout.devices_of_replica
    if len(names) < local * each:
        raise DeviceError(
            f"layout ({count(local, 'replica')} x {count(each, 'device')} in this process)",
            f"needs {count(local * each, kind)}, but finds {len(names)}",
            "pass --parallel.layout auto to choose one that fits, with the same numbers",
        )
    return tuple(tuple(names[r * each : (r + 1) * each]) for r in range(local))
