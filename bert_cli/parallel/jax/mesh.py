"""JAX's runtime: the devices of a mesh, replicas x tensor parallelism, and the processes of a run.

JAX's coordination service runs in a separate process that outlives rank 0, because JAX aborts every process that loses
the service. A lost process is detected by its socket to rank 0: the kernel closes it however the process ends.
Imports from `jax._src` are not public in JAX 0.10.2.
"""

import itertools
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil
from jax._src import distributed, xla_bridge
from jax._src.lib import _jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh as Grid
from jax.sharding import PartitionSpec

from bert_cli.arrays import Floats64
from bert_cli.errors import DeviceError
from bert_cli.parallel.cluster import (
    Processes,
    Rendezvous,
    address_of,
    addresses_of,
    find_interface,
    not_connected,
    wait_for_processes,
)
from bert_cli.parallel.devices import device_memory, keep_freed_memory, part_of_gpus, visible_gpus
from bert_cli.parallel.group import ProcessGroup, lost_process
from bert_cli.parallel.runtime import Devices, Layout, Mesh, divide_devices
from bert_cli.processes import print_error, print_line
from bert_cli.text import count

AXES = ("replica", "tensor", "tensor_2")
# JAX's own limits are switched off: `Links` notices a lost process and names it.
FOREVER = 10**6  # seconds
NOTICE_SECONDS = 3.0  # from the error of a collective until the connections show its cause
FLAGS = (
    # Else XLA computes all chunks of the vocabulary at once on a CPU, in 1.7 times the memory.
    "--xla_cpu_enable_concurrency_optimized_scheduler=false",
    # A weight and its moments are updated in one loop on a CPU (docs/ideas/speed.md).
    "--xla_backend_extra_options=xla_cpu_use_multi_output_fusion",
)
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
SERVICE = """
import psutil, signal, sys, time
from jax._src.lib import _jax
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
service = _jax.get_distributed_runtime_service(
    sys.argv[1], int(sys.argv[2]), heartbeat_timeout=10**6, recoverable=True
)
print(flush=True)
sys.stdin.read()  # until rank 0 has ended
# JAX aborts a process that loses the service: it waits for the other ranks, whose ends close their connections.
until, port = time.monotonic() + 60, int(sys.argv[1].rpartition(":")[2])
while time.monotonic() < until and any(
    link.status == "ESTABLISHED" and link.laddr.port == port for link in psutil.net_connections("tcp")
):
    time.sleep(0.1)
"""


class Links:
    """The connections between rank 0 and the other ranks, and the ranks that are lost."""

    def __init__(self, lost_after_seconds: int = 0, workers: Sequence[str] = ()) -> None:
        self.lost_after_seconds = lost_after_seconds
        self.workers = workers
        self.sockets: dict[int, socket.socket] = {}
        self.lost: list[int] = []
        self.waiting_since = math.inf  # in a collective
        self.service: subprocess.Popen[bytes] | None = None  # ends some time after this process

    def add(self, rank: int, link: socket.socket) -> None:
        """Watch the connection to a rank."""
        # Four probes within the time, so that one lost packet does not count as a lost process.
        probe = max(1, self.lost_after_seconds // 4)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * self.lost_after_seconds)
        link.settimeout(None)
        self.sockets[rank] = link
        threading.Thread(target=self._watch, args=(rank, link), daemon=True).start()

    def _watch(self, rank: int, link: socket.socket) -> None:
        with suppress(OSError):
            # Rank 0 sends the number of a lost rank.
            rank = int((link.recv(16) or b"%d" % rank).split()[0])
        self.lost.append(rank)
        for connection in self.sockets.values():
            with suppress(OSError):
                connection.sendall(b"%d\n" % rank)
        # A collective of JAX may wait forever for a lost process; only the end of this process ends it.
        while time.monotonic() - self.waiting_since < self.lost_after_seconds:
            time.sleep(0.1)
        for thread in threading.enumerate():
            if thread.name == "save":  # a checkpoint
                thread.join()
        print_error(f"bert: {lost_process(self.lost[0], self.workers)}")
        os._exit(DeviceError.exit_code)


class JaxProcessGroup(ProcessGroup):
    """The processes of a mesh."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh.processes.rank, mesh.processes.count)
        self.links: Links = mesh.links or Links()

    def publish(self, text: str) -> None:
        """Store a text in the coordination service."""
        _client().key_value_set(f"bert_rank_{self.rank}", text, allow_overwrite=True)

    def published_by(self, rank: int) -> str:
        """Return the last text of a rank, or an empty text."""
        with suppress(jax.errors.JaxRuntimeError):
            return str(_client().key_value_try_get(f"bert_rank_{rank}"))
        return ""

    def _sum(self, numbers: Floats64) -> Floats64:
        # As integers: JAX would round to float32.
        parts = multihost_utils.process_allgather(np.ascontiguousarray(numbers).view(np.uint32))
        total: Floats64 = np.asarray(parts).view(np.float64).sum(0)
        return total

    @contextmanager
    def naming_lost_process(self) -> Iterator[None]:
        """Turn JAX's error about a lost process into DeviceError, as soon as the connections show which one it is."""
        self.links.waiting_since = time.monotonic()
        try:
            yield
        except (RuntimeError, ValueError) as error:  # JAX raises either
            until = time.monotonic() + NOTICE_SECONDS
            while self.links.sockets and not self.links.lost and time.monotonic() < until:
                time.sleep(0.1)
            if not self.links.lost:
                raise
            raise lost_process(self.links.lost[0], self.links.workers) from error
        finally:
            self.links.waiting_since = math.inf


group_of = JaxProcessGroup


def _client() -> Any:
    return distributed.global_state.client


def devices_here(processes: Processes) -> Devices:
    """Return the accelerators of this process, or its CPU."""
    kind = _kind()
    if kind == "TPU":
        devices = jax.local_devices()
        return Devices(kind, len(devices), devices[0].memory_stats()["bytes_limit"])
    number = 1
    if kind == "GPU":
        number = len(_gpus(processes))
    return Devices(kind, number, device_memory(kind, processes))


def used_memory(mesh: Mesh) -> tuple[int, int]:
    """Return the most bytes that an accelerator of this process uses now, and has used."""
    devices = jax.local_devices()[: sum(map(len, mesh.devices))]
    used = [device.memory_stats() or {} for device in devices]
    now = max(memory.get("bytes_in_use", 0) for memory in used)
    peak = max(memory.get("peak_bytes_in_use", 0) for memory in used)
    return now, peak


def synchronize() -> None:
    """Do nothing: a step waits for its results."""


def device_names() -> list[str]:
    """Return the names of the accelerators."""
    return [device.device_kind for device in jax.local_devices() if device.platform != "cpu"]


def configure_runtime(precision: str, deterministic: bool) -> None:
    """Set the options of XLA, after the options of the user. They do not depend on the precision."""
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if flags[:1] in ("", "-") and FLAGS[0] not in flags:  # not the name of a file
        added = list(FLAGS)
        if deterministic:
            added.append(DETERMINISTIC)
        os.environ["XLA_FLAGS"] = " ".join([flags, *added])


def open_mesh(processes: Processes, layout: Layout, rendezvous: Rendezvous) -> Mesh:
    """Take the devices of a layout and join the other processes; see `Runtime`."""
    kind = _kind()
    # Replicas of this process, each with all its devices.
    needed = layout.replicas // processes.count * layout.devices_of_replica
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
    if platforms and "cpu" not in platforms:
        jax.config.update("jax_platforms", f"{platforms},cpu")  # where weights are made
    if not jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(Path("~/.cache/bert/jax").expanduser()))
        # JAX's own limit is 1 s; many of our functions compile faster than that, and together they take long.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    if kind == "CPU":
        # If JAX has started already, too few devices are an error below.
        with suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", needed)
        keep_freed_memory()
    elif kind == "GPU":
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, _gpus(processes)[:needed])))
    links = Links(rendezvous.lost_after_seconds, processes.workers)
    if processes.count > 1:
        processes = _join(processes, rendezvous, links)
    is_cpu = kind == "CPU"
    # Beside a GPU there is always a CPU, on which weights are made.
    devices = [device for device in jax.local_devices() if (device.platform == "cpu") == is_cpu]
    names = [f"jax:{kind}:{number}" for number in range(min(needed, len(devices)))]
    rows = divide_devices(names, kind, processes, layout)
    mesh = Mesh(layout, rows, "", processes, links=links)
    if processes.count > 1:
        with JaxProcessGroup(mesh).collective():
            _connect_devices(device_grid(mesh))
    return mesh


def device_grid(mesh: Mesh) -> Grid:
    """Return the devices of all processes; each process has consecutive replicas."""
    each = mesh.replicas // mesh.processes.count * mesh.layout.devices_of_replica
    of_process: dict[int, list[jax.Device]] = defaultdict(list)
    for device in jax.devices(mesh.kind.lower()):
        of_process[device.process_index].append(device)
    devices: list[jax.Device] = []
    for rank in sorted(of_process):
        devices += of_process[rank][:each]
    return Grid(np.array(devices).reshape(mesh.replicas, *mesh.layout.tensor_shape), AXES)


def _kind() -> str:
    """Return the kind of device that JAX will choose, without starting it."""
    if platforms := jax.config.jax_platforms:  # type: ignore[attr-defined]
        return {"cuda": "GPU", "gpu": "GPU", "tpu": "TPU"}.get(platforms.split(",")[0], "CPU")
    if find_spec("jax_plugins") and visible_gpus(os.environ):
        return "GPU"
    if find_spec("libtpu") and os.path.exists("/dev/accel0"):
        return "TPU"
    return "CPU"


def _gpus(processes: Processes) -> list[int]:
    """Return the numbers of this process' GPUs among the visible GPUs."""
    return part_of_gpus(list(range(len(visible_gpus(os.environ)))), processes)


def _join(processes: Processes, rendezvous: Rendezvous, links: Links) -> Processes:
    """Join the other processes; return them with the addresses of their rendezvous."""
    processes, interface = find_interface(processes)
    rank = processes.rank
    host, _, _ = processes.workers[0].rpartition(":")
    try:
        with wait_for_processes(processes, rendezvous, interface) as listener:
            if rank == 0:
                listener.settimeout(rendezvous.register_seconds)
                service = _start_service(processes, interface, links)
                # The port of the service is chosen by the system, so the others learn it by their connection to rank
                # 0.
                link = _accept_links(listener, processes.count, service, links)
            else:
                address = address_of(processes.workers[0])
                link = socket.create_connection(address, rendezvous.register_seconds)
                link.sendall(b"%d\n" % rank)
                service = int(link.recv(16))
                links.add(0, link)
        os.environ.setdefault("no_grpc_proxy", host)  # a proxy is not for the next host
        options = {"heartbeat_timeout": FOREVER, "shutdown_on_destruction": False}
        client = _jax.get_distributed_runtime_client(f"{host}:{service}", rank, **options)
        client.connect()
        if _kind() == "CPU":
            _use_equal_threads(client, processes, rendezvous.register_seconds)
    except (OSError, RuntimeError, ValueError) as error:
        raise not_connected(processes, error) from error
    state = distributed.global_state
    state.client = client
    state.process_id = rank
    state.num_processes = processes.count
    # By default gloo listens on the address of this host's name, which may be loopback.
    address = link.getsockname()[0].removeprefix("::ffff:")
    gloo = _jax.make_gloo_tcp_collectives(client, address, interface)
    make_client = partial(xla_bridge.make_cpu_client, collectives=gloo)
    xla_bridge.register_backend_factory("cpu", make_client, fail_quietly=False)
    return processes


def _use_equal_threads(client: Any, processes: Processes, seconds: float) -> None:
    """Make XLA use as many threads on each rank as the fewest cores of a rank: it divides sums among threads."""
    cores = os.environ.get("PJRT_NPROC") or os.environ.get("NPROC") or len(os.sched_getaffinity(0))
    client.key_value_set(f"bert_cores_{processes.rank}", str(cores))
    keys = (f"bert_cores_{rank}" for rank in range(processes.count))
    numbers = [int(client.blocking_key_value_get(key, int(1000 * seconds))) for key in keys]
    fewest = min(numbers)
    if fewest < max(numbers):
        os.environ["PJRT_NPROC"] = str(fewest)  # XLA reads it when it starts
        where = f"rank {numbers.index(fewest)} has {count(fewest, 'core')}"
        threads = f"each rank computes with {count(fewest, 'thread')}"
        print_line(f"cluster: {where}, others up to {max(numbers)}; {threads}")


def _start_service(processes: Processes, interface: str | None, links: Links) -> int:
    """Start JAX's coordination service on this host's address, or on all interfaces, and return its port."""
    resolved = addresses_of(processes.address[0])
    entries = psutil.net_if_addrs().get(interface or "", ())
    host = next(
        (at.address for at in entries if at.family == socket.AF_INET and at.address in resolved),
        "0.0.0.0",
    )
    # A free port, closed again for the service, which takes it a moment later.
    with socket.create_server((host, 0)) as free:
        port = int(free.getsockname()[1])
    words = [sys.executable, "-c", SERVICE, f"{host}:{port}", str(processes.count)]
    pipe = subprocess.PIPE
    # Its standard input stays open as long as this process lives.
    process = links.service = subprocess.Popen(
        words, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True
    )
    assert process.stdout is not None
    if not process.stdout.readline():
        raise OSError(f"JAX's coordination service did not start at {host}:{port}")
    return port


def _accept_links(listener: socket.socket, count: int, service: int, links: Links) -> socket.socket:
    """Accept a connection from each other rank and send the port of the service; return the last connection."""
    while len(links.sockets) < count - 1:
        link = listener.accept()[0]
        link.settimeout(listener.gettimeout())
        if rank := link.recv(16):  # a connection of `wait_for_processes` sends nothing
            links.add(int(rank), link)
    # After all have connected: a rank that has the port no longer listens for the others.
    for link in links.sockets.values():
        link.sendall(b"%d" % service)
    return link


def _connect_devices(grid: Grid) -> None:
    """Connect the devices along all axes now: later JAX waits only 30 s for a process that still compiles."""
    axes = [name for name, size in grid.shape.items() if size > 1]
    subsets: list[tuple[str, ...]] = []
    for size in range(1, len(axes) + 1):
        subsets += itertools.combinations(axes, size)

    def sums(number: Any) -> list[Any]:
        return [jax.lax.psum(number, subset) for subset in subsets]

    same = PartitionSpec()
    run = jax.shard_map(sums, mesh=grid, in_specs=same, out_specs=same, check_vma=False)
    # Of the process, since gloo is C++ and knows nothing of Python's streams.
    standard_output = os.dup(1)
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), 1)  # gloo prints a line for each connection
    try:
        jax.block_until_ready(jax.jit(run)(np.float32(1.0)))
    finally:
        os.dup2(standard_output, 1)
        os.close(standard_output)
