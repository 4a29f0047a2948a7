"""The process group of a run: its addresses and this rank, and the wait until all processes have started.

Flags come first, then TF_CONFIG (which `bert launch` and schedulers for TensorFlow set), then SLURM inside an `srun`
step of several tasks. TensorFlow's server runs any graph that it receives and always listens on all interfaces, so its
sockets are bound to an interface from outside with SO_BINDTODEVICE.
"""

import itertools
import os
import re
import socket
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import psutil
from pydantic import BaseModel, Field, NonNegativeInt, ValidationError

from bert_cli.errors import ConfigError, DeviceError
from bert_cli.processes import print_error

# Below the ports that Linux gives to a socket without a port (from 32,768 on).
PORTS = range(20_000, 32_000)
# Each step of a job has separate ports, for so many tasks of a step on a host and so many steps.
PORTS_OF_STEP = 64
STEPS_OF_JOB = 8
# A host that is down answers nothing: this bounds a round of attempts.
CONNECT_SECONDS = 2.0
REPORT_SECONDS = 60.0  # after which the ranks that have not started are named
RETRY_SECONDS = 0.5
LOOPBACK = "lo"
ON_ALL = "it listens on all interfaces, so the network must be trusted"


class StoppedWhileJoiningError(Exception):
    """A stop was requested while the processes waited for each other, before the run began."""


@dataclass(frozen=True)
class Processes:
    """Addresses (host:port) by rank, empty for one process; the rank of this process; the source of both."""

    workers: tuple[str, ...]
    rank: int = 0
    source: str = "this process alone"

    @property
    def count(self) -> int:
        """Return the world size."""
        return max(1, len(self.workers))

    @property
    def local_ranks(self) -> list[int]:
        """Return the ranks of the processes on this host."""
        hosts = [address_of(worker)[0] for worker in self.workers] or [""]
        return [rank for rank, host in enumerate(hosts) if host == hosts[self.rank]]

    @property
    def address(self) -> tuple[str, int]:
        """Return the host and the port of this process."""
        return address_of(self.workers[self.rank])


def address_of(worker: str) -> tuple[str, int]:
    """Return the host and the port of host:port; an IPv6 address has brackets there."""
    host, _, port = worker.rpartition(":")
    return host.strip("[]"), int(port)


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Settings for joining the processes, and for the detection of lost processes."""

    lost_after_seconds: int = 20
    register_seconds: float = 300.0
    """Time within which all processes must have started."""
    stop_requested: Callable[[], bool] = lambda: False


def find_processes(
    environment: Mapping[str, str], workers: Sequence[str] = (), rank: int | None = None
) -> Processes:
    """Return the processes that flags, TF_CONFIG or SLURM describe, without connecting to them.

    Raises ConfigError for a description that is incomplete or contradicts itself.
    """
    if workers:
        assert rank is not None
        return _checked(workers, rank, "--cluster.workers")
    if environment.get("TF_CONFIG", "").strip():
        return _from_tf_config(environment["TF_CONFIG"])
    # Only `srun` sets this variable: an allocation's shell and a job's script are single processes.
    if environment.get("SLURM_STEP_NODELIST"):
        return _from_slurm(environment)
    return Processes(())


def _checked(workers: Sequence[str], rank: int, source: str) -> Processes:
    for worker in workers:
        where = f"{source} ({worker})"
        # A name or an IPv4 address, or an IPv6 address in brackets, whose colons would end it.
        match = re.fullmatch(r"(?:[^\s:/\[\]]+|\[[^\s\[\]]+\]):(\d{1,5})", worker)
        if not match or not 0 < int(match[1]) < 65_536:
            raise ConfigError(where, "is not host:port", "write one such address for each process")
        if list(workers).count(worker) > 1:
            raise ConfigError(where, "occurs twice", "use another port for each process")
    if not 0 <= rank < len(workers):
        problem = f"is not a rank of {len(workers)} processes"
        raise ConfigError(f"{source} (rank {rank})", problem, "ranks count from 0")
    # One process communicates with none, so it needs no address.
    if len(workers) == 1:
        return Processes(())
    return Processes(tuple(workers), rank, source)


class _Jobs(BaseModel, extra="forbid"):
    chief: Annotated[list[str], Field(max_length=1)] = []
    worker: list[str] = []


class _Task(BaseModel):
    type: Literal["chief", "worker"]
    index: NonNegativeInt


class _TFConfig(BaseModel):
    cluster: _Jobs = _Jobs()
    task: _Task | None = None


def _from_tf_config(text: str) -> Processes:
    remedy = 'set {"cluster": {"worker": [...]}, "task": {"type": "worker", "index": 0}}'
    try:
        config = _TFConfig.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or text[:60]
        raise ConfigError(f"TF_CONFIG ({where})", first["msg"], remedy) from error
    jobs = config.cluster
    task = config.task
    workers = [*jobs.chief, *jobs.worker]
    if not workers:
        return Processes(())
    if task is None or task.index >= len(getattr(jobs, task.type)):
        raise ConfigError(f"TF_CONFIG (task: {task})", "is not a task of this cluster", remedy)
    # The chief is rank 0, as in TensorFlow, and the workers follow.
    rank = len(jobs.chief) + task.index
    if task.type == "chief":
        rank = task.index
    return _checked(workers, rank, "TF_CONFIG")


def _from_slurm(environment: Mapping[str, str]) -> Processes:
    # TensorFlow's SlurmClusterResolver sorts hosts by name (n10 before n2), assumes the block distribution and uses the
    # same port for all steps.
    try:
        tasks = int(environment.get("SLURM_STEP_NUM_TASKS") or environment["SLURM_NTASKS"])
        if tasks == 1:
            return Processes(())
        rank = int(environment["SLURM_PROCID"])
        per_node = environment.get("SLURM_STEP_TASKS_PER_NODE")
        counts = _expand_counts(per_node or environment["SLURM_TASKS_PER_NODE"])
        job = int(environment["SLURM_JOB_ID"])
        step = int(environment.get("SLURM_STEP_ID", "0"))
        hosts = _expand_hosts(environment["SLURM_STEP_NODELIST"])
        if len(hosts) != len(counts) or sum(counts) != tasks:
            raise ValueError(f"{len(hosts)} hosts, tasks per host {counts}, {tasks} tasks")
        # The host of each rank, and the number of the rank on that host.
        ranks: list[tuple[int, int]] = []
        for host, count in enumerate(counts):
            ranks += [(host, number) for number in range(count)]
        distribution = re.split("[:,]", environment.get("SLURM_DISTRIBUTION", "block").lower())[0]
        if distribution == "cyclic":
            ranks.sort(key=lambda pair: pair[::-1])
        has_one_order = len(counts) == 1 or max(counts) == 1
        is_known = distribution in ("block", "*", "cyclic") or has_one_order
        # What SLURM says of this task must agree with the order that was computed: else two tasks would take one
        # rank's port.
        place = environment.get("SLURM_NODEID"), environment.get("SLURM_LOCALID")
        differs = rank < tasks and None not in place and place != tuple(map(str, ranks[rank]))
        if not is_known or differs:
            number = f"task {rank} is number {place[1]} on host {place[0]}"
            raise ValueError(f"with distribution {distribution}, {number}")
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"SLURM ({type(error).__name__}: {error})",
            "does not describe the host of each task",
            "start the run with `srun --distribution=block bert ...`, or set TF_CONFIG",
        ) from error
    # Each task computes the ports of its step alone, and neighbouring jobs on a host get others.
    offset = (job * STEPS_OF_JOB + step) * PORTS_OF_STEP
    first = PORTS[offset % (len(PORTS) - max(counts))]
    return _checked([f"{hosts[host]}:{first + number}" for host, number in ranks], rank, "SLURM")


def _expand_counts(text: str) -> list[int]:
    """Expand `2(x3),1` to [2, 2, 2, 1]."""
    matches = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(",")]
    if None in matches:
        raise ValueError(f"tasks per node {text!r}")
    counts: list[int] = []
    for match in filter(None, matches):
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _expand_hosts(nodes: str) -> list[str]:
    """Expand `a,n[08-10,12]` to a, n08, n09, n10, n12, and `r[1-2]n[1-2]` to r1n1, r1n2, r2n1, r2n2."""
    hosts: list[str] = []
    for name in re.findall(r"(?:[^,\[\]]|\[[\d,-]+\])+", nodes):
        parts: list[list[str]] = []
        for text, numbers in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", name):
            ranges = [part.partition("-") for part in numbers.split(",")] if numbers else []
            members: list[str] = []
            for first, _, last in ranges:
                span = range(int(first), int(last or first) + 1)
                # `n[08-10]` keeps its zeros: n08, n09, n10.
                members += [f"{number:0{len(first)}}" for number in span]
            parts.append(members or [text])
        hosts += map("".join, itertools.product(*parts))
    return hosts


def wait_for_processes(
    processes: Processes, rendezvous: Rendezvous, interface: str | None = None
) -> socket.socket:
    """Wait until every other process accepts connections; return the socket that listens for their connections.

    Reports the missing processes and sends nothing. TensorFlow would wait by itself, without a message, and blocks
    SIGTERM meanwhile. Raises StoppedWhileJoiningError when a stop is requested, DeviceError when this process' port is
    in use or another process does not start within `register_seconds`.
    """
    missing = dict(enumerate(processes.workers))
    address = missing.pop(processes.rank)
    began = reported = time.monotonic()
    with ExitStack() as stack:
        # Before the others are asked: who connects to this process sees that it has started.
        listener = stack.enter_context(_listen(address))
        if interface is not None:
            with suppress(OSError):  # reported by `bind_to_interface`
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())
        while True:
            problems = {rank: _problem_of(at) for rank, at in missing.items()}
            missing = {rank: at for rank, at in missing.items() if problems[rank]}
            if not missing:
                stack.pop_all()
                return listener
            if rendezvous.stop_requested():
                raise StoppedWhileJoiningError
            reasons = (f"rank {rank} ({at}: {problems[rank]})" for rank, at in missing.items())
            names = ", ".join(reasons)
            now = time.monotonic()
            if now - began > rendezvous.register_seconds:
                raise DeviceError(
                    f"cluster ({names})",
                    f"cannot be reached within {rendezvous.register_seconds:g} s",
                    "check that all processes are started and listen on the interface of their addresses; "
                    "--cluster.start-within-seconds sets the time",
                )
            if now - reported > REPORT_SECONDS:
                reported = now
                waited = f"rank {processes.rank} ({address}) has waited {now - began:.0f} s"
                print_error(f"cluster: {waited} for {names} to start")
            time.sleep(RETRY_SECONDS)


def not_connected(processes: Processes, reason: object) -> DeviceError:
    """Return the error of processes that have started and do not connect."""
    return DeviceError(
        f"cluster (rank {processes.rank} of {', '.join(processes.workers)})",
        f"the processes did not connect ({reason})",
        "check that all processes are started and their ports are free",
    )


def _listen(worker: str) -> socket.socket:
    """Listen on the port of this process."""
    _, port = address_of(worker)
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        # On all interfaces, since the address of a name may be on any; `bind_to_interface` limits it.
        return socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=128)
    except OSError as error:
        problem = f"its port cannot be opened ({error.strerror})"
        remedy = "end the process that uses it, or choose another port"
        raise DeviceError(f"cluster ({worker})", problem, remedy) from error


def _problem_of(worker: str) -> str:
    """Return why a process does not accept a connection, or an empty text if it does."""
    try:
        socket.create_connection(address_of(worker), CONNECT_SECONDS).close()
    except OSError as error:
        return error.strerror or repr(error)
    return ""


def find_interface(processes: Processes) -> tuple[Processes, str | None]:
    """Return the processes with the addresses to use, and the interface of this process, None for every interface.

    Processes on one host use its loopback. Of several hosts, each uses the interface that has the address of its name.
    """
    if len(processes.local_ranks) == processes.count:
        workers = tuple(f"127.0.0.1:{address_of(worker)[1]}" for worker in processes.workers)
        return replace(processes, workers=workers), LOOPBACK
    host, _ = processes.address
    resolved = addresses_of(host)
    # The interface that has the address of this host's name: the other hosts reach it by that name.
    for name, entries in psutil.net_if_addrs().items():
        # Debian's /etc/hosts has the own name with 127.0.1.1, which other hosts cannot reach.
        if name != LOOPBACK and any(entry.address in resolved for entry in entries):
            return processes, name
    addresses = ", ".join(resolved) or "nothing"
    print_error(f"cluster: {host} resolves to {addresses}, on no network of this host; {ON_ALL}")
    return processes, None


def addresses_of(host: str) -> list[str]:
    """Return the addresses of a host's name, none if it does not resolve."""
    with suppress(OSError):
        return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, None)})
    return []


def bind_to_interface(interface: str, port: int) -> None:
    """Bind this process' sockets of a port to an interface: connections over other interfaces are refused.

    Linux before 5.7 allows it only to root: then a message is printed.
    """
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the listing's own descriptor, closed by now
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as candidate:
                    if candidate.getsockname()[1:2] == (port,):
                        _bind(candidate, interface)
    # For the sockets of NCCL, on GPUs.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def _bind(open_socket: socket.socket, interface: str) -> None:
    try:
        open_socket.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())
    except OSError as error:
        print_error(
            f"cluster: cannot limit connections to {interface} ({error.strerror}); {ON_ALL}"
        )
