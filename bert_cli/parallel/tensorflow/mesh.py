"""Devices as replicas x stages: which ones this process has, and the runtime that joins processes.

GPUs when there are any; else as many logical CPU devices as the layout needs, so that any layout can
be tried on a laptop. A replica lives in one process, a process may hold several, and all processes
hold the same number. TensorFlow takes devices, threads and cluster only before its first operation,
so a mesh is opened once and first of all.
"""

import ctypes
import itertools
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from bert_cli.config.parallel import Cluster
from bert_cli.config.training import TrainSettings
from bert_cli.errors import ConfigError, DeviceError
from bert_cli.parallel.cluster import Processes
from bert_cli.parallel.rendezvous import (
    REGISTER_SECONDS,
    bind_to_interface,
    find_interface,
    wait_for_processes,
)

# How long a process that is done waits for the others before it leaves.
LEAVE_SECONDS = 20

GLIBC_MALLOC = {
    "M_MMAP_MAX": (-4, 0),  # large pieces come from the heap too
    "M_TRIM_THRESHOLD": (-1, 2**31 - 1),  # and what is free at its end stays
    "M_ARENA_MAX": (-8, 1),  # one heap: what one thread frees another takes
}
"""Options of mallopt(3): number and value."""

FUSES_RESULTS = "xla_cpu_use_multi_output_fusion"
"""Option of XLA's that has no flag of its own."""

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Mesh:
    """The devices of this process, and its place among the processes of the run."""

    replicas: int
    """Copies of the model in the whole run."""
    devices: tuple[tuple[str, ...], ...]
    """Of each replica of this process, the devices that its stages are mapped to."""
    host: str
    """The device that is this process' own memory."""
    processes: Processes
    number: int = 0
    """Number of this mesh among those of the process: what one exchanges is not another's."""

    @property
    def first_replica(self) -> int:
        """Number of this process' first replica in the run."""
        return self.processes.rank * len(self.devices)

    @property
    def kind(self) -> str:
        """GPU or CPU."""
        return "GPU" if ":GPU:" in self.devices[0][0].upper() else "CPU"


def devices_here(processes: Processes) -> tuple[str, int, int]:
    """GPU or CPU; devices of this process; bytes of memory of each.

    Without a GPU the processes of a host share its memory as one device each.
    """
    gpus = _gpus_of(processes)
    if gpus:
        return "GPU", len(gpus), _gpu_memory()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return "CPU", 1, memory // processes.local_processes


def open_mesh(
    settings: TrainSettings,
    processes: Processes,
    asked_to_stop: Callable[[], bool] = lambda: False,
) -> Mesh:
    """Take the devices that the layout needs, and join the other processes.

    Raises StoppedWhileJoiningError when asked to stop before all have come, ConfigError when the replicas
    cannot be divided among the processes, DeviceError when this machine has too few devices or
    TensorFlow was started before with fewer.
    """
    replicas = settings.global_batch.replicas
    if replicas % processes.count:
        raise ConfigError(
            f"global_batch.replicas ({replicas}): cannot be divided among {processes.count} processes; give "
            f"--global-batch.replicas {processes.count} or a multiple of it, and so much less accumulation"
        )
    local = replicas // processes.count
    mapping = settings.parallel.pipeline_device_mapping or [0]
    stages = max(mapping) + 1
    needed = local * stages
    gpus = _gpus_of(processes)
    if gpus and settings.parallel.reduce_precision == "bfloat16":
        raise ConfigError(
            "parallel.reduce_precision (bfloat16): NCCL's sums in TensorFlow are not known to take it; give float16"
        )
    if gpus and len(gpus) < needed:
        raise DeviceError(
            f"layout ({local} replicas x {stages} devices in this process): needs {needed} GPUs, here are "
            f"{len(gpus)}; give --parallel.layout auto to choose one that fits, with the same numbers"
        )
    try:
        _take_devices(gpus[:needed], 1 if gpus else needed)
        keep_freed_memory()
        fuse_results()
        _set_up(settings, bool(gpus), threads=2 + local * len(mapping))
        if processes.count > 1:
            processes, interface = find_interface(processes, settings.cluster.bind_address)
            seconds = settings.cluster.say_waiting_after_seconds
            wait_for_processes(processes, seconds, asked_to_stop, interface)
            _join(processes, settings.cluster)
            if interface is not None:
                port = int(processes.workers[processes.rank].rpartition(":")[2])
                is_required = settings.cluster.bind_address is not None
                bind_to_interface(interface, port, is_required=is_required)
    except RuntimeError as error:
        if len(_names("CPU", processes)) < needed or processes.count > 1:
            raise DeviceError(
                f"devices: TensorFlow was started before they were set ({error}); start a new process"
            ) from error
    names = _names("GPU" if gpus else "CPU", processes)
    rows = tuple(tuple(names[r * stages : (r + 1) * stages]) for r in range(local))
    return Mesh(replicas, rows, _names("CPU", processes)[0], processes, next(_numbers))


def _gpus_of(processes: Processes) -> list[Any]:
    """The GPUs that this process may use: all it sees, or its share when a host's processes see all."""
    gpus = list(tf.config.list_physical_devices("GPU"))
    of = processes.local_processes
    if of == 1 or not gpus or not _sees_all(len(gpus)):
        return gpus
    if len(gpus) % of:
        raise DeviceError(
            f"cluster ({of} processes on this host): {len(gpus)} GPUs cannot be divided among them; choose a "
            "number that divides"
        )
    share = len(gpus) // of
    return gpus[processes.local_rank * share : (processes.local_rank + 1) * share]


def _sees_all(gpus: int) -> bool:
    """Whether nobody has divided the host's GPUs: SLURM's `--gres=gpu:4` shows all four to each task."""
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        return True
    return "SLURM_PROCID" in os.environ and os.environ.get("SLURM_GPUS_ON_NODE") == str(gpus)


def _gpu_memory() -> int:
    """Bytes of the smallest visible GPU, as its driver says."""
    asked = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    if os.environ.get("CUDA_VISIBLE_DEVICES"):
        asked += ["-i", os.environ["CUDA_VISIBLE_DEVICES"]]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30).stdout
        return min(int(line) for line in told.split()) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise DeviceError(
            f"nvidia-smi: does not tell the memory of the GPUs ({error}); give pipeline_stages instead of "
            "parallel.layout auto"
        ) from error


def _take_devices(gpus: Sequence[Any], logical: int) -> None:
    if gpus:
        tf.config.set_visible_devices(gpus, "GPU")
        for device in gpus:
            tf.config.experimental.set_memory_growth(device, True)
    cpu = tf.config.list_physical_devices("CPU")[0]
    if logical > len(tf.config.get_logical_device_configuration(cpu) or [None]):
        one = tf.config.LogicalDeviceConfiguration()
        tf.config.set_logical_device_configuration(cpu, [one] * logical)


def keep_freed_memory() -> None:
    """Have the C library keep what is freed instead of giving it back to the kernel each time.

    Temporaries of megabytes come and go by the thousand in a step, and each new page of each is zeroed
    by the kernel first: 5 % of a step of BERT-base on a CPU, a third of the optimizer's update. The
    process keeps the size that it had at its largest.
    """
    c_library = ctypes.CDLL(None)
    if hasattr(c_library, "gnu_get_libc_version"):
        for option, value in GLIBC_MALLOC.values():
            c_library.mallopt(option, value)


def fuse_results() -> None:
    """Have XLA compute several results in one loop on a processor, which by default it does on GPUs alone.

    An update that puts down a weight and two moments can then be one pass over memory instead of three
    (see `moves`). XLA reads its options once, when it first compiles something. Where they are in a file,
    whose name is then the whole variable, it is left as it is.
    """
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if not are_results_fused() and flags[:1] in ("", "-"):
        os.environ["XLA_FLAGS"] = f"{flags} --xla_backend_extra_options={FUSES_RESULTS}".strip()


def are_results_fused() -> bool:
    """Whether XLA was told so."""
    return FUSES_RESULTS in os.environ.get("XLA_FLAGS", "")


def _set_up(settings: TrainSettings, has_gpu: bool, threads: int) -> None:
    if settings.deterministic:
        tf.config.experimental.enable_op_determinism()
    if settings.precision == "float16" or (settings.precision == "mixed_float16" and not has_gpu):
        # Grappler fuses a float16 matmul and its bias into an operation that takes 40 ms a row on a
        # CPU: a step that looks like a hang.
        tf.config.optimizer.set_experimental_options({"remapping": False})
    # Stages that have no thread of their own run one after the other. By default there is one a core.
    threads = max(threads, os.cpu_count() or 1)
    if tf.config.threading.get_inter_op_parallelism_threads() < threads:
        tf.config.threading.set_inter_op_parallelism_threads(threads)


def _join(processes: Processes, cluster: Cluster) -> None:
    """Bring up TensorFlow's runtime for collectives, and its service that knows who is alive.

    MultiWorkerMirroredStrategy does it (RING over gRPC on CPUs, NCCL on GPUs) and nothing else here.
    """
    from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2 as proto
    from tensorflow.python.eager import context

    context.context().configure_coordination_service(
        "standalone",
        service_leader="/job:worker/replica:0/task:0",
        heartbeat_timeout_in_ms=1000 * cluster.lost_after_seconds,
        cluster_register_timeout_in_ms=1000 * REGISTER_SECONDS,
        shutdown_barrier_timeout_in_ms=1000 * LEAVE_SECONDS,
        coordinated_jobs=[proto.CoordinatedJob(name="worker", num_tasks=processes.count)],
    )
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": list(processes.workers)}),
        task_type="worker",
        task_id=processes.rank,
        rpc_layer="grpc",
    )
    # A proxy of the site is for the way out, not for the way to the next host.
    hosts = ",".join(worker.rpartition(":")[0] for worker in processes.workers)
    os.environ.setdefault("no_grpc_proxy", hosts)
    try:
        tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
    except tf.errors.OpError as error:
        raise DeviceError(
            f"cluster (rank {processes.rank} of {', '.join(processes.workers)}): the processes did not find "
            f"one another ({error.message.splitlines()[0]}); check that all are started and the ports are free"
        ) from error


def _names(kind: str, processes: Processes) -> list[str]:
    """Names of this process' own logical devices; a cluster lists everyone's."""
    names = [device.name for device in tf.config.list_logical_devices(kind)]
    if processes.count == 1:
        return names
    return [name for name in names if f"/task:{processes.rank}/" in name]
