"""On which network interface the processes of a run take connections.

Whoever reaches the port of a process can have TensorFlow's server run any graph: connections are
not authenticated. The server listens on all interfaces, and no option of it says otherwise: the address is written in
its source. So its sockets are bound to one interface from outside, with SO_BINDTODEVICE, which holds
for a socket that listens already: a connection to another address of the host is refused.
"""

import fcntl
import os
import socket
import stat
import struct
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from bert_cli.errors import ConfigError, DeviceError
from bert_cli.parallel.cluster import Processes

LOOPBACK, LOOPBACK_ADDRESS = "lo", "127.0.0.1"
SIOCGIFADDR = 0x8915
"""Request of ioctl(2) for an interface's address."""


def find_interface(processes: Processes, bind_address: str | None) -> tuple[Processes, str | None]:
    """Return the processes with the addresses of their rendezvous, and the interface; None for all of them.

    Processes on one host use its loopback for their rendezvous. Raises ConfigError for a `bind_address`
    that is neither the name nor the IPv4 address of an interface here, or on whose interface the others
    do not find this process.
    """
    if bind_address is not None:
        here = {name: _address_of(name) for _, name in socket.if_nameindex()}
        for name, address in here.items():
            if bind_address in (name, address):
                _check_own_address(processes, name, here)
                return processes, name
        known = ", ".join(f"{name} ({address})" for name, address in here.items() if address)
        raise ConfigError(
            f"cluster.bind_address ({bind_address}): is no interface of this host; give one of {known}"
        )
    if processes.local_processes < processes.count:
        return processes, None
    ports = [worker.rpartition(":")[2] for worker in processes.workers]
    workers = tuple(f"{LOOPBACK_ADDRESS}:{port}" for port in ports)
    return replace(processes, workers=workers), LOOPBACK


def _check_own_address(processes: Processes, name: str, here: Mapping[str, str]) -> None:
    """Raise ConfigError where this process' own address is on another interface of this host.

    An address of no interface here may be translated on its way (NAT), and a name that is not known
    here may be known to the others.
    """
    host = processes.workers[processes.rank].rpartition(":")[0]
    try:
        found = {str(one[4][0]) for one in socket.getaddrinfo(host, None, socket.AF_INET)}
    except OSError:
        return
    others = {address for other, address in here.items() if other != name}

    def is_elsewhere(address: str) -> bool:
        is_loopback = address.startswith("127.")
        return not is_loopback if name == LOOPBACK else is_loopback or address in others

    if all(map(is_elsewhere, found)):
        raise ConfigError(
            f"{processes.source} ({host}): is {', '.join(sorted(found))} here, where nothing listens with "
            f"cluster.bind_address {name} ({here[name]}); name this process by {here[name]}, or give another "
            "bind_address"
        )


def listen_only_on(interface: str, port: int, *, is_required: bool) -> None:
    """Bind this process' sockets of a port to an interface; connections over another one are cut.

    Where the system refuses (Linux before 5.7 without privileges) a message says so. Raises DeviceError
    instead if it `is_required`.
    """
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the listing's own descriptor, closed by now
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as one:
                    if one.getsockname()[1:2] == (port,):
                        _bind(one, interface, is_required)
    # NCCL's own sockets, on GPUs.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def _bind(one: socket.socket, interface: str, is_required: bool) -> None:
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())
    except OSError as error:
        problem = f"cannot take connections on {interface} alone ({error.strerror})"
        if is_required:
            raise DeviceError(
                f"cluster.bind_address: {problem}; leave it out where the network is trusted"
            ) from error
        print(
            f"cluster: {problem}, so on all interfaces; the network must be trusted",
            file=sys.stderr,
            flush=True,
        )


def _address_of(interface: str) -> str:
    """Return the IPv4 address of an interface; nothing where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        request = struct.pack("256s", interface.encode())
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24])
    return ""
