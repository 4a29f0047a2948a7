"""Wait until all processes of a run have started, and restrict their connections to one interface.

TensorFlow would wait by itself, but without a message and without reacting to a signal: it holds the
interpreter's lock and SIGTERM meanwhile (measured: ten minutes, then kill -9). Its server runs any
graph that it is sent and listens on all interfaces, without an option that says otherwise, so its
sockets are bound to an interface from outside with SO_BINDTODEVICE.
"""

import fcntl
import os
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

from bert_cli.errors import ConfigError, DeviceError
from bert_cli.parallel.cluster import Processes

REGISTER_SECONDS = 300  # until all processes must have started
RETRY_SECONDS = 0.5
CONNECT_SECONDS = 2.0
LOOPBACK, LOOPBACK_ADDRESS = "lo", "127.0.0.1"
SIOCGIFADDR = 0x8915
"""Request of ioctl(2) for an interface's address."""


class StoppedWhileJoiningError(Exception):
    """A stop was requested while processes waited for one another; nothing has begun."""


def wait_for_processes(
    processes: Processes,
    report_after_seconds: float,
    stop_requested: Callable[[], bool] = lambda: False,
    interface: str | None = None,
) -> None:
    """Wait until a connection to every other process can be made, and report those that are missing.

    Nothing is sent. Raises StoppedWhileJoiningError when a stop is requested, DeviceError when this
    process' port is in use or another process does not start within REGISTER_SECONDS.
    """
    missing = dict(enumerate(processes.workers))
    own = missing.pop(processes.rank)
    began = reported = time.monotonic()
    with _listen(own) as listener:
        if interface is not None:
            with suppress(OSError):  # reported by `bind_to_interface`
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())
        while True:
            missing = {rank: at for rank, at in missing.items() if not _is_listening(at)}
            if not missing:
                return
            if stop_requested():
                raise StoppedWhileJoiningError
            names = ", ".join(f"rank {rank} ({at})" for rank, at in missing.items())
            now = time.monotonic()
            if now - began > REGISTER_SECONDS:
                raise DeviceError(
                    f"cluster ({names})",
                    f"did not start within {REGISTER_SECONDS} s",
                    "check that all processes are started and reach one another",
                )
            if now - reported > report_after_seconds:
                reported = now
                _print_line(
                    f"rank {processes.rank} ({own}) has waited {now - began:.0f} s for {names} to start"
                )
            time.sleep(RETRY_SECONDS)


def _listen(worker: str) -> socket.socket:
    """Listen on this process' own port, which TensorFlow's server takes over."""
    port = int(worker.rpartition(":")[2])
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=128)
    except OSError as error:
        raise DeviceError(
            f"cluster ({worker})",
            f"its port cannot be opened ({error.strerror})",
            "end the process that uses it, or choose another port",
        ) from error


def _is_listening(worker: str) -> bool:
    host, _, port = worker.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS):
            return True
    except OSError:
        return False


def find_interface(processes: Processes, bind_address: str | None) -> tuple[Processes, str | None]:
    """Return the processes with the addresses to use, and the interface, None for every interface.

    Processes on one host use its loopback. Raises ConfigError for a `bind_address` that is neither the
    name nor the IPv4 address of an interface here, or on whose interface the others do not find this
    process.
    """
    if bind_address is not None:
        addresses = {name: _address_of(name) for _, name in socket.if_nameindex()}
        for name, address in addresses.items():
            if bind_address in (name, address):
                _check_own_address(processes, name, addresses)
                return processes, name
        known = ", ".join(f"{name} ({address})" for name, address in addresses.items() if address)
        raise ConfigError(
            f"cluster.bind_address ({bind_address})",
            "is no interface of this host",
            f"give one of {known}",
        )
    if processes.local_processes < processes.count:
        return processes, None
    ports = [worker.rpartition(":")[2] for worker in processes.workers]
    workers = tuple(f"{LOOPBACK_ADDRESS}:{port}" for port in ports)
    return replace(processes, workers=workers), LOOPBACK


def _check_own_address(processes: Processes, name: str, addresses: Mapping[str, str]) -> None:
    """Raise ConfigError when this process' own address is on another interface of this host.

    An address of no interface here may be translated on its way (NAT), and a name that cannot be
    resolved here may be known to the others.
    """
    host = processes.workers[processes.rank].rpartition(":")[0]
    try:
        resolved = {str(info[4][0]) for info in socket.getaddrinfo(host, None, socket.AF_INET)}
    except OSError:
        return
    others = {address for other, address in addresses.items() if other != name}

    def is_elsewhere(address: str) -> bool:
        is_loopback = address.startswith("127.")
        return not is_loopback if name == LOOPBACK else is_loopback or address in others

    if all(map(is_elsewhere, resolved)):
        raise ConfigError(
            f"{processes.source} ({host})",
            f"is {', '.join(sorted(resolved))} here, where nothing listens with "
            f"cluster.bind_address {name} ({addresses[name]})",
            f"name this process by {addresses[name]}, or give another bind_address",
        )


def bind_to_interface(interface: str, port: int, *, is_required: bool) -> None:
    """Bind this process' sockets of a port to an interface: connections over another one are refused.

    Where the system does not allow it (Linux before 5.7 without privileges) a message is printed, or
    DeviceError raised if it `is_required`.
    """
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the listing's own descriptor, closed by now
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as candidate:
                    if candidate.getsockname()[1:2] == (port,):
                        _bind(candidate, interface, is_required)
    # NCCL's own sockets, on GPUs.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def _bind(open_socket: socket.socket, interface: str, is_required: bool) -> None:
    try:
        open_socket.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())
    except OSError as error:
        problem = f"cannot take connections on {interface} alone ({error.strerror})"
        if is_required:
            remedy = "leave it out where the network is trusted"
            raise DeviceError("cluster.bind_address", problem, remedy) from error
        _print_line(f"{problem}, so on all interfaces; the network must be trusted")


def _address_of(interface: str) -> str:
    """Return the IPv4 address of an interface, "" if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        request = struct.pack("256s", interface.encode())
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24])
    return ""


def _print_line(text: str) -> None:
    print(f"cluster: {text}", file=sys.stderr, flush=True)
