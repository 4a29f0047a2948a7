"""Processes wait for one another with a message, an end and a stop; connections come by one interface."""

import os
import socket
import threading
import time

import pytest

from bert_cli.errors import ConfigError, DeviceError
from bert_cli.parallel import rendezvous
from bert_cli.parallel.cluster import Processes
from bert_cli.parallel.rendezvous import (
    StoppedWhileJoiningError,
    _address_of,
    bind_to_interface,
    find_interface,
    wait_for_processes,
)

OUTSIDE = next(
    (_address_of(name) for _, name in socket.if_nameindex() if name != "lo" and _address_of(name)),
    "",
)
needs_outside = pytest.mark.skipif(not OUTSIDE, reason="this host has no interface but loopback")


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    monkeypatch.setattr(rendezvous, "RETRY_SECONDS", 0.01)


def free_ports(number: int) -> list[str]:
    sockets = [socket.create_server(("localhost", 0)) for _ in range(number)]
    addresses = [f"localhost:{one.getsockname()[1]}" for one in sockets]
    for one in sockets:
        one.close()
    return addresses


@pytest.mark.timeout(30)
def test_no_process_continues_before_all_have_started():
    workers = tuple(free_ports(3))
    started: list[int] = []
    continued: list[tuple[int, int]] = []
    all_continued = threading.Barrier(3)

    def process(rank: int) -> None:
        started.append(rank)
        wait_for_processes(Processes(workers, rank), 60)
        continued.append((rank, len(started)))
        # TensorFlow's server listens on the port from now on.
        host, _, port = workers[rank].rpartition(":")
        with socket.create_server((host, int(port))):
            all_continued.wait()

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(3)]
    for thread in threads[:2]:
        thread.start()
    time.sleep(0.2)
    assert continued == []
    threads[2].start()
    for thread in threads:
        thread.join()
    assert sorted(continued) == [(0, 3), (1, 3), (2, 3)]


def test_missing_processes_are_named_with_their_addresses_and_a_stop_request_ends_the_wait(capsys):
    here, absent, other = free_ports(3)
    requests = iter([False] * 6 + [True])
    listens = socket.create_server(("localhost", int(other.rpartition(":")[2])))
    with listens, pytest.raises(StoppedWhileJoiningError):
        wait_for_processes(Processes((here, absent, other), 0), 0.02, lambda: next(requests))
    printed = capsys.readouterr().err
    assert f"cluster: rank 0 ({here}) has waited " in printed
    assert f" s for rank 1 ({absent}) to start" in printed
    assert other not in printed


def test_a_process_that_does_not_start_and_a_port_in_use_are_errors(monkeypatch):
    here, absent = free_ports(2)
    monkeypatch.setattr(rendezvous, "REGISTER_SECONDS", 0.1)
    with pytest.raises(
        DeviceError, match=rf"rank 0 \({absent}\)\): did not start within 0.1 s; check"
    ):
        wait_for_processes(Processes((absent, here), 1), 60)
    uses = socket.create_server(("", int(here.rpartition(":")[2])))
    with uses, pytest.raises(DeviceError, match=rf"cluster \({here}\): its port cannot be opened"):
        wait_for_processes(Processes((here, absent), 0), 60)


def test_processes_on_one_host_use_its_loopback_and_those_of_several_every_interface():
    here = Processes(("node1:20000", "node1:20001"), 1, "SLURM")
    found, name = find_interface(here, None)
    assert (found.workers, found.rank, name) == (("127.0.0.1:20000", "127.0.0.1:20001"), 1, "lo")
    several = Processes(("node1:20000", "node2:20000"), 0, "SLURM")
    assert find_interface(several, None) == (several, None)


def test_an_interface_is_chosen_by_its_name_or_its_address():
    several = Processes(("node1:20000", "node2:20000"), 0)
    assert find_interface(several, "lo") == find_interface(several, "127.0.0.1") == (several, "lo")
    with pytest.raises(ConfigError, match=r"cluster.bind_address \(ib7\): .* lo \(127\.0\.0\.1\)"):
        find_interface(several, "ib7")


@needs_outside
def test_an_own_address_on_another_interface_is_an_error():
    for host in ("127.0.1.1", "localhost"):
        several = Processes((f"{host}:20000", "node2:20000"), 0, "TF_CONFIG")
        with pytest.raises(
            ConfigError, match=rf"TF_CONFIG \({host}\): is 127.* by {OUTSIDE}, or give"
        ):
            find_interface(several, OUTSIDE)
        assert find_interface(several, "lo") == (several, "lo")
    several = Processes((f"{OUTSIDE}:20000", "node2:20000"), 0, "TF_CONFIG")
    assert find_interface(several, OUTSIDE)[0] == several
    with pytest.raises(ConfigError, match=r"where nothing listens with cluster\.bind_address lo"):
        find_interface(several, "lo")


def connect(address: str, port: int) -> socket.socket:
    return socket.create_connection((address, port), timeout=5)


@needs_outside
def test_a_bound_port_takes_connections_on_its_interface_alone(monkeypatch):
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    other = socket.create_server(("", 0))
    with listener, other:
        port = listener.getsockname()[1]
        with connect(OUTSIDE, port) as early, listener.accept()[0] as served:
            bind_to_interface("lo", port, is_required=True)
            assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"
            with connect("127.0.0.1", port) as client, listener.accept()[0] as server:
                client.sendall(b"here")
                assert server.recv(4) == b"here"
            with pytest.raises(ConnectionRefusedError):
                connect(OUTSIDE, port)
            # An earlier connection is cut too.
            served.settimeout(0.2)
            early.sendall(b"from outside")
            with pytest.raises(OSError):
                served.recv(4)
        connect(OUTSIDE, other.getsockname()[1]).close()


def test_a_system_that_cannot_bind_to_an_interface_prints_a_message_or_is_an_error(
    monkeypatch, capsys
):
    # Stands for Linux before 5.7 without privileges.
    monkeypatch.setattr(rendezvous.socket, "SO_BINDTODEVICE", 10_000)
    with socket.create_server(("", 0)) as listener:
        port = listener.getsockname()[1]
        bind_to_interface("lo", port, is_required=False)
        assert "so on all interfaces; the network must be trusted" in capsys.readouterr().err
        with pytest.raises(DeviceError, match="cannot take connections on lo alone"):
            bind_to_interface("lo", port, is_required=True)
