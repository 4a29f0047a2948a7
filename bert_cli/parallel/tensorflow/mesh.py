"""Opens the mesh of devices, replicas x stages, and joins the processes of a run.

The devices are GPUs if there are any, else as many logical CPU devices as the layout needs, so that any layout can be
tried on a laptop. A replica belongs to one process, and all processes hold the same number of replicas.
"""

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from bert_cli.config.settings import Cluster
from bert_cli.errors import ConfigError, DeviceError
from bert_cli.parallel.cluster import Processes
from bert_cli.parallel.engine import Mesh
from bert_cli.parallel.rendezvous import bind_to_interface, find_interface, wait_for_processes
from bert_cli.parallel.tensorflow import runtime

_numbers = itertools.count(1)


@dataclass(frozen=True, kw_only=True)
class RuntimeOptions:
    """What TensorFlow's runtime has to be configured for."""

    precision: str = "float32"
    reduce_precision: str = "float32"
    deterministic: bool = False
    cluster: Cluster = field(default_factory=Cluster)


def devices_here(processes: Processes) -> tuple[str, int, int]:
    """Return GPU or CPU, the number of devices of this process, and the bytes of memory of each.

    Without a GPU the processes of a host divide its memory as one device each.
    """
    gpus = runtime.gpus_of(processes)
    if gpus:
        return "GPU", len(gpus), runtime.gpu_memory()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return "CPU", 1, memory // processes.local_processes


def open_mesh(
    processes: Processes,
    replicas: int,
    device_mapping: Sequence[int],
    options: RuntimeOptions,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Mesh:
    """Take the devices of a layout and join the other processes; `device_mapping` has a device for each stage.

    Raises StoppedWhileJoiningError when a stop is requested before all processes have joined, ConfigError when the
    replicas cannot be divided among the processes, DeviceError when this machine has too few devices or TensorFlow has
    been started before with fewer.
    """
    if replicas % processes.count:
        raise ConfigError(
            f"global_batch.replicas ({replicas})",
            f"cannot be divided among {processes.count} processes",
            f"give --global-batch.replicas {processes.count} or a multiple of it, and so much less accumulation",
        )
    local, stages = replicas // processes.count, max(device_mapping) + 1
    needed = local * stages
    gpus = runtime.gpus_of(processes)
    if gpus and options.reduce_precision == "bfloat16":
        raise ConfigError(
            "parallel.reduce_precision (bfloat16)",
            "NCCL's sums in TensorFlow are not known to support it",
            "give float16",
        )
    if gpus and len(gpus) < needed:
        raise DeviceError(
            f"layout ({local} replicas x {stages} devices in this process)",
            f"needs {needed} GPUs, here are {len(gpus)}",
            "give --parallel.layout auto to choose one that fits, with the same numbers",
        )
    try:
        runtime.take_devices(gpus[:needed], 1 if gpus else needed)
        runtime.keep_freed_memory()
        runtime.fuse_results()
        threads = 2 + local * len(device_mapping)
        runtime.configure(options.precision, options.deterministic, bool(gpus), threads)
        if processes.count > 1:
            processes = _join(processes, options.cluster, stop_requested)
    except RuntimeError as error:
        if len(_names("CPU", processes)) < needed or processes.count > 1:
            raise DeviceError(
                "devices",
                f"TensorFlow was started before they were set ({error})",
                "start a new process",
            ) from error
    names = _names("GPU" if gpus else "CPU", processes)
    rows = tuple(tuple(names[r * stages : (r + 1) * stages]) for r in range(local))
    return Mesh(replicas, rows, _names("CPU", processes)[0], processes, next(_numbers))


def _join(processes: Processes, cluster: Cluster, stop_requested: Callable[[], bool]) -> Processes:
    """Join the other processes; return them with the addresses of their rendezvous."""
    processes, interface = find_interface(processes, cluster.bind_address)
    wait_for_processes(processes, cluster.report_waiting_after_seconds, stop_requested, interface)
    runtime.join_cluster(processes, cluster)
    if interface is not None:
        port = int(processes.workers[processes.rank].rpartition(":")[2])
        bind_to_interface(interface, port, is_required=cluster.bind_address is not None)
    return processes


def _names(kind: str, processes: Processes) -> list[str]:
    """Return the names of this process' logical devices; a cluster lists those of all processes."""
    names = [device.name for device in tf.config.list_logical_devices(kind)]
    if processes.count == 1:
        return names
    return [name for name in names if f"/task:{processes.rank}/" in name]
