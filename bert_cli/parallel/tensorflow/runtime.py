"""Settings of TensorFlow's runtime, which it takes only before its first operation, and its private interfaces.

What is imported from `tensorflow.python` or `tensorflow.compiler` has no public counterpart in TensorFlow 2.21.
"""

import ctypes
import os
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.eager import context

from bert_cli.config.settings import Cluster
from bert_cli.errors import DeviceError
from bert_cli.parallel.cluster import Processes
from bert_cli.parallel.rendezvous import REGISTER_SECONDS

LEAVE_SECONDS = 20
"""How long a process that has finished waits for the others before it leaves."""
GLIBC_MALLOC = {
    "M_MMAP_MAX": (-4, 0),  # allocate large blocks on the heap too
    "M_TRIM_THRESHOLD": (-1, 2**31 - 1),  # do not return free memory at its end
    "M_ARENA_MAX": (-8, 1),  # one heap, so that threads reuse one another's memory
}
"""Options of mallopt(3): number and value."""
FUSES_RESULTS = "xla_cpu_use_multi_output_fusion"
"""An option of XLA that has no flag."""


def traced(method: Callable[..., Any], compiled: bool = False, any_length: bool = False) -> Any:
    """Return a tf.function of a method, compiled by XLA or not.

    The partial is a new object each time: TensorFlow would take the methods of two objects for one function and
    warn about retracing. With `any_length` one trace serves arguments of all lengths, else each has its own.
    """
    return tf.function(
        partial(method), autograph=False, jit_compile=compiled, reduce_retracing=any_length
    )


def optimization_barrier(*tensors: Any) -> list[Any]:
    """Return the tensors so that XLA computes again what it has computed from them before."""
    return list(xla.optimization_barrier(*tensors))


def abort_collectives() -> None:
    """Make every collective of this process fail, because one of its devices will not enter it."""
    context.context().abort_collective_ops(tf.errors.CANCELLED, "one of the devices failed")


def publish(key: str, text: str) -> None:
    """Store a text for the other processes in the cluster's coordination service."""
    service = context.context()
    service.delete_config_key_value(key)  # a value cannot be overwritten
    service.set_config_key_value(key, text)


def published(key: str) -> str:
    """Return the text that a process has stored under a key, or an empty one."""
    try:
        # The timeout in milliseconds bridges the moment between deleting and setting.
        return str(context.context().get_config_key_value(key, 1000))
    except (tf.errors.DeadlineExceededError, tf.errors.NotFoundError):
        return ""


def gpus_of(processes: Processes) -> list[Any]:
    """Return the GPUs that this process may use: all visible ones, or a part where its host's processes see all."""
    gpus = list(tf.config.list_physical_devices("GPU"))
    count = processes.local_processes
    if count == 1 or not gpus or not _sees_all_gpus(len(gpus)):
        return gpus
    if len(gpus) % count:
        raise DeviceError(
            f"cluster ({count} processes on this host)",
            f"{len(gpus)} GPUs cannot be divided among them",
            "choose a number that divides",
        )
    each = len(gpus) // count
    return gpus[processes.local_rank * each : (processes.local_rank + 1) * each]


def _sees_all_gpus(gpus: int) -> bool:
    """Return whether the host's GPUs are not yet divided: SLURM's `--gres=gpu:4` shows all four to each task."""
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        return True
    return "SLURM_PROCID" in os.environ and os.environ.get("SLURM_GPUS_ON_NODE") == str(gpus)


def gpu_memory() -> int:
    """Return the bytes of the smallest visible GPU, from its driver."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    if os.environ.get("CUDA_VISIBLE_DEVICES"):
        command += ["-i", os.environ["CUDA_VISIBLE_DEVICES"]]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
        return min(int(line) for line in done.stdout.split()) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise DeviceError(
            "nvidia-smi",
            f"does not report the memory of the GPUs ({error})",
            "give pipeline_stages instead of parallel.layout auto",
        ) from error


def take_devices(gpus: Sequence[Any], logical: int) -> None:
    """Make GPUs visible with growing memory, and divide the CPU into logical devices."""
    if gpus:
        tf.config.set_visible_devices(gpus, "GPU")
        for device in gpus:
            tf.config.experimental.set_memory_growth(device, True)
    cpu = tf.config.list_physical_devices("CPU")[0]
    if logical > len(tf.config.get_logical_device_configuration(cpu) or [None]):
        one = tf.config.LogicalDeviceConfiguration()
        tf.config.set_logical_device_configuration(cpu, [one] * logical)


def keep_freed_memory() -> None:
    """Have the C library keep freed memory instead of returning it to the kernel each time.

    A step allocates and frees temporaries of megabytes by the thousand, and the kernel zeroes each new page: 5 % of a
    step of BERT-base on a CPU, a third of the optimizer's update. The process stays as large as it ever was.
    """
    c_library = ctypes.CDLL(None)
    if hasattr(c_library, "gnu_get_libc_version"):
        for option, value in GLIBC_MALLOC.values():
            c_library.mallopt(option, value)


def fuse_results() -> None:
    """Have XLA compute several results in one loop on a CPU, as it does by default on GPUs alone.

    The update of a weight and its two moments is then one pass over memory instead of three. XLA reads its options
    when it first compiles something. XLA_FLAGS with the name of a file is left unchanged.
    """
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if not are_results_fused() and flags[:1] in ("", "-"):
        os.environ["XLA_FLAGS"] = f"{flags} --xla_backend_extra_options={FUSES_RESULTS}".strip()


def are_results_fused() -> bool:
    """Return whether XLA has the option of `fuse_results`."""
    return FUSES_RESULTS in os.environ.get("XLA_FLAGS", "")


def configure(precision: str, deterministic: bool, has_gpu: bool, threads: int) -> None:
    """Set determinism, the graph optimizer's options, and at least so many threads for operations."""
    if deterministic:
        tf.config.experimental.enable_op_determinism()
    if precision == "float16" or (precision == "mixed_float16" and not has_gpu):
        # Grappler fuses a float16 product and its bias into an operation that takes 40 ms a row on a CPU.
        tf.config.optimizer.set_experimental_options({"remapping": False})
    # Stages without a thread each run one after another. The default is one thread per core.
    threads = max(threads, os.cpu_count() or 1)
    if tf.config.threading.get_inter_op_parallelism_threads() < threads:
        tf.config.threading.set_inter_op_parallelism_threads(threads)


def join_cluster(processes: Processes, cluster: Cluster) -> None:
    """Start TensorFlow's runtime for collectives, and its service that knows which processes are alive.

    MultiWorkerMirroredStrategy does it (ring over gRPC on CPUs, NCCL on GPUs), and serves no other purpose here.
    """
    job = coordination_config_pb2.CoordinatedJob(name="worker", num_tasks=processes.count)
    context.context().configure_coordination_service(
        "standalone",
        service_leader="/job:worker/replica:0/task:0",
        heartbeat_timeout_in_ms=1000 * cluster.lost_after_seconds,
        cluster_register_timeout_in_ms=1000 * REGISTER_SECONDS,
        shutdown_barrier_timeout_in_ms=1000 * LEAVE_SECONDS,
        coordinated_jobs=[job],
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
        raise DeviceError(
            f"cluster (rank {processes.rank} of {', '.join(processes.workers)})",
            f"the processes did not connect ({error.message.splitlines()[0]})",
            "check that all are started and the ports are free",
        ) from error
