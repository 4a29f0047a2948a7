"""TensorFlow's runtime: the devices of a mesh, replicas x stages, the processes of a run, and their collectives.

The devices are GPUs if there are any, else as many logical CPU devices as the layout needs. Every collective is
TensorFlow's own operation (ring on CPUs, NCCL on GPUs), one to a tf.function, so that all devices issue them in one
order. Imports from `tensorflow.python` or `tensorflow.compiler` are not public in TensorFlow 2.21.
"""

import itertools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf.coordination_config_pb2 import CoordinatedJob
from tensorflow.python.eager import context

from bert_cli.arrays import Floats64
from bert_cli.errors import DeviceError
from bert_cli.parallel.cluster import (
    Processes,
    Rendezvous,
    bind_to_interface,
    find_interface,
    not_connected,
    wait_for_processes,
)
from bert_cli.parallel.devices import device_memory, keep_freed_memory, part_of_gpus
from bert_cli.parallel.engine import Tensor
from bert_cli.parallel.group import ProcessGroup, lost_process
from bert_cli.parallel.runtime import Devices, Layout, Mesh, divide_devices

LEAVE_SECONDS = 20  # that a finished process waits for the others
FUSES_RESULTS = "xla_cpu_use_multi_output_fusion"  # an option of XLA that has no flag
# TensorFlow identifies a collective, and the shape of its tensors, by a key; the keys of its own collectives
# count up from 1. Each mesh has a million keys, each device 10,000 of its mesh's keys.
KEYS_OF_MESH = 1_000_000
KEYS_OF_DEVICE = 10_000
# Lengths of vectors in an all-reduce of processes: a few numbers, or a part of an array (8 MB).
FRAMES = (64, 1_000_000)
# Errors of a collective that lacks a process.
SIGNS_OF_LOSS = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.FailedPreconditionError,
    tf.errors.InternalError,
    tf.errors.UnknownError,
)

# A tf.function.
Function: TypeAlias = tf.types.experimental.PolymorphicFunction
_numbers = itertools.count(1)


def traced(
    method: Callable[..., Tensor], compiled: bool = False, any_length: bool = False
) -> Function:
    """Return a tf.function of a method; with `any_length` one trace serves arguments of all lengths."""
    # A new object each time: TensorFlow would treat the methods of two objects as the same function, and warn.
    return tf.function(
        partial(method), autograph=False, jit_compile=compiled, reduce_retracing=any_length
    )


def abort_collectives() -> None:
    """Make every collective of this process fail, because one of its devices will not enter it."""
    context.context().abort_collective_ops(tf.errors.CANCELLED, "one of the devices failed")


@dataclass(frozen=True)
class DeviceGroup:
    """Collectives of one device of a replica with the same device of all others; `number` identifies a collective."""

    key: int
    size: int
    rank: int
    device: str

    def all_reduce(self, tensor: Tensor, number: int) -> Tensor:
        """Return the sum of the tensors of all replicas."""
        operation = tf.raw_ops.CollectiveReduceV2
        merge = {"merge_op": "Add", "final_op": "Id", "ordering_token": []}
        return self._collective(operation, number, input=tensor, **merge)

    def broadcast(self, tensor: Tensor, number: int, root: int) -> Tensor:
        """Return the tensor of the replica `root`; all replicas pass one of the same shape."""
        if self.rank == root:
            return self._collective(tf.raw_ops.CollectiveBcastSendV2, number, input=tensor)
        receive = tf.raw_ops.CollectiveBcastRecvV2
        return self._collective(receive, number, shape=tensor.shape, T=tensor.dtype)

    def _collective(self, operation: Callable[..., Tensor], number: int, **inputs: Any) -> Tensor:
        with tf.device(self.device):
            hint = "nccl" if ":GPU:" in self.device.upper() else "ring"
            return operation(
                group_size=self.size,
                group_key=self.key,
                instance_key=self.key + 1 + number,
                communication_hint=hint,
                **inputs,
            )


def device_group(mesh: Mesh, replica: int, device: int) -> DeviceGroup:
    """Return the group of one device of a local replica."""
    key = (mesh.number + 1) * KEYS_OF_MESH + (device + 1) * KEYS_OF_DEVICE
    # Ranks of a group are replicas of the run, not processes.
    rank = mesh.first_replica + replica
    return DeviceGroup(key, mesh.replicas, rank, mesh.devices[replica][device])


class TensorFlowProcessGroup(ProcessGroup):
    """The processes of a mesh, which exchange the few numbers on which all must agree."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh.processes.rank, mesh.processes.count)
        self._workers = mesh.processes.workers
        self._published = 0  # texts
        key = (mesh.number + 1) * KEYS_OF_MESH
        group = DeviceGroup(key, self.world_size, self.rank, mesh.host)
        # One function for each length of frames: a collective has a key, and with it one shape.
        self._functions = [
            traced(lambda tensor, number=number: group.all_reduce(tensor, number))
            for number in range(len(FRAMES))
        ]

    def publish(self, text: str) -> None:
        """Store a text in the cluster's coordination service."""
        # A value cannot be overwritten. The text before stays under the other key, wherever this process stops.
        self._published += 1
        key = f"bert_rank_{self.rank}_{self._published % 2}"
        service = context.context()
        service.delete_config_key_value(key)
        service.set_config_key_value(key, f"{self._published} {text}")

    def published_by(self, rank: int) -> str:
        """Return the last text of a rank, or an empty text."""
        texts = {0: ""}  # by their numbers
        for key in range(2):
            with suppress(tf.errors.DeadlineExceededError, tf.errors.NotFoundError):
                value = str(context.context().get_config_key_value(f"bert_rank_{rank}_{key}", 1000))
                number, _, text = value.partition(" ")
                texts[int(number)] = text
        return texts[max(texts)]

    def _sum(self, numbers: Floats64) -> Floats64:
        which = int(numbers.size > FRAMES[0])
        length = FRAMES[which]
        # Padded with zeros, which a sum does not change.
        frames = np.pad(numbers, (0, -numbers.size % length)).reshape(-1, length)
        sums = [self._functions[which](tf.constant(frame)).numpy() for frame in frames]
        return np.concatenate([np.zeros(0), *sums])[: numbers.size]

    @contextmanager
    def naming_lost_process(self) -> Iterator[None]:
        """Turn TensorFlow's error about a lost process into DeviceError."""
        try:
            yield
        except SIGNS_OF_LOSS as error:
            raise lost_process(rank_in(str(error), self.rank), self._workers) from error


group_of = TensorFlowProcessGroup


def rank_in(message: str, rank: int) -> int | None:
    """Return the rank of the lost process in TensorFlow's message to process `rank`, None without one."""
    # The error began at the first rank in the message; the others passed it on.
    return next((int(n) for n in re.findall(r"task:(\d+)", message) if int(n) != rank), None)


def devices_here(processes: Processes) -> Devices:
    """Return the GPUs of this process, or its CPU."""
    gpus = gpus_of(processes)
    kind = "GPU" if gpus else "CPU"
    return Devices(kind, len(gpus) or 1, device_memory(kind, processes))


def used_memory(mesh: Mesh) -> tuple[int, int]:
    """Return the most bytes that a GPU of this process uses now, and has used."""
    names = chain.from_iterable(mesh.devices)
    gpus = [f"GPU:{name.rpartition(':')[2]}" for name in names]
    used = [tf.config.experimental.get_memory_info(gpu) for gpu in gpus]
    return max(memory["current"] for memory in used), max(memory["peak"] for memory in used)


def synchronize() -> None:
    """Wait until the GPUs have finished; a CPU computes synchronously."""
    if tf.config.list_logical_devices("GPU"):
        tf.test.experimental.sync_devices()


def device_names() -> list[str]:
    """Return the names of the GPUs."""
    return [
        str(tf.config.experimental.get_device_details(gpu).get("device_name", gpu.name))
        for gpu in tf.config.list_physical_devices("GPU")
    ]


def configure_runtime(precision: str, deterministic: bool) -> None:
    """Set determinism and the options of the graph optimizer."""
    if deterministic:
        tf.config.experimental.enable_op_determinism()
    has_gpu = bool(tf.config.list_physical_devices("GPU"))
    if precision == "float16" or (precision != "float32" and not has_gpu):
        # Grappler fuses a float16 product and its bias into an operation that takes 40 ms a row on a CPU. In bfloat16
        # it finds nothing to fuse, and takes 1 s of the first step of BERT-base.
        tf.config.optimizer.set_experimental_options({"remapping": False})


def open_mesh(processes: Processes, layout: Layout, rendezvous: Rendezvous) -> Mesh:
    """Take the devices of a layout and join the other processes; see `Runtime`."""
    local = layout.replicas // processes.count
    needed = local * layout.devices_of_replica
    gpus = gpus_of(processes)
    if gpus:
        divide_devices(list(map(str, gpus)), "GPU", processes, layout)  # before the join
    try:
        if gpus:
            tf.config.set_visible_devices(gpus[:needed], "GPU")
            for device in gpus[:needed]:
                # Else TensorFlow takes all memory of a GPU at once, also what other processes need.
                tf.config.experimental.set_memory_growth(device, True)
        else:
            cpu = tf.config.list_physical_devices("CPU")[0]
            # Logical devices can be made once, before the first operation.
            if needed > len(tf.config.get_logical_device_configuration(cpu) or [None]):
                # A CPU is divided in name only: its devices share cores and memory, so that layouts run on a laptop.
                device = tf.config.LogicalDeviceConfiguration()
                tf.config.set_logical_device_configuration(cpu, [device] * needed)
            keep_freed_memory()
        fuse_results()
        # With fewer threads than stages, stages would run one after another. The default is a thread per core.
        threads = max(2 + local * len(layout.stage_devices), os.cpu_count() or 1)
        if tf.config.threading.get_inter_op_parallelism_threads() < threads:
            tf.config.threading.set_inter_op_parallelism_threads(threads)
        if processes.count > 1:
            processes = _join(processes, rendezvous)
    except RuntimeError as error:
        if len(_names("CPU", processes)) < needed or processes.count > 1:
            problem = f"TensorFlow was started before they were set ({error})"
            raise DeviceError("devices", problem, "start a new process") from error
    kind = "GPU" if gpus else "CPU"
    rows = divide_devices(_names(kind, processes), kind, processes, layout)
    return Mesh(layout, rows, _names("CPU", processes)[0], processes, next(_numbers))


def _names(kind: str, processes: Processes) -> list[str]:
    """Return the names of this process' logical devices; a cluster lists the devices of all processes."""
    task = "" if processes.count == 1 else f"/task:{processes.rank}/"
    names = [device.name for device in tf.config.list_logical_devices(kind)]
    return [name for name in names if task in name]


def gpus_of(processes: Processes) -> list[tf.config.PhysicalDevice]:
    """Return the GPUs that this process may use."""
    return part_of_gpus(list(tf.config.list_physical_devices("GPU")), processes)


def fuse_results() -> None:
    """Make XLA compute several results in one loop on a CPU; by default it does so only on GPUs."""
    # The update of a weight and its two moments is then one pass over memory instead of three. XLA reads its options
    # when it first compiles something. XLA_FLAGS with the name of a file is left unchanged.
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if not are_results_fused() and flags[:1] in ("", "-"):
        os.environ["XLA_FLAGS"] = f"{flags} --xla_backend_extra_options={FUSES_RESULTS}".strip()


def are_results_fused() -> bool:
    """Return whether XLA has the option of `fuse_results`."""
    return FUSES_RESULTS in os.environ.get("XLA_FLAGS", "")


def _join(processes: Processes, rendezvous: Rendezvous) -> Processes:
    """Join the other processes; return them with the addresses of their rendezvous."""
    # MultiWorkerMirroredStrategy only starts TensorFlow's runtime for collectives (ring over gRPC on CPUs, NCCL on
    # GPUs) and its service that tracks which processes are alive.
    processes, interface = find_interface(processes)
    # TensorFlow's server takes the port over.
    wait_for_processes(processes, rendezvous, interface).close()
    context.context().configure_coordination_service(
        "standalone",
        service_leader="/job:worker/replica:0/task:0",
        heartbeat_timeout_in_ms=1000 * rendezvous.lost_after_seconds,
        cluster_register_timeout_in_ms=int(1000 * rendezvous.register_seconds),
        shutdown_barrier_timeout_in_ms=1000 * LEAVE_SECONDS,
        coordinated_jobs=[CoordinatedJob(name="worker", num_tasks=processes.count)],
    )
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": list(processes.workers)}),
        task_type="worker",
        task_id=processes.rank,
        rpc_layer="grpc",
    )
    # A proxy is for connections to the internet, not to the next host.
    hosts = ",".join(worker.rpartition(":")[0] for worker in processes.workers)
    os.environ.setdefault("no_grpc_proxy", hosts)
    try:
        tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
    except tf.errors.OpError as error:
        raise not_connected(processes, error.message.splitlines()[0]) from error
    if interface is not None:
        bind_to_interface(interface, processes.address[1])
    return processes
