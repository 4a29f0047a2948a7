"""Which network interface processes take connections on: real sockets, real interfaces."""

import os
import socket

import pytest

from bert_cli.errors import ConfigError, DeviceError
from bert_cli.parallel import engine
from bert_cli.parallel.cluster import Processes
from bert_cli.parallel.engine import _address_of, find_interface, listen_only_on

OUTSIDE = next(
    (_address_of(name) for _, name in socket.if_nameindex() if name != "lo" and _address_of(name)),
    "",
)


def connect(address: str, port: int) -> socket.socket:
    return socket.create_connection((address, port), timeout=5)


def test_processes_on_one_host_meet_on_its_loopback():
    here = Processes(("node1:20000", "node1:20001"), 1, "SLURM")
    found, name = find_interface(here, None)
    assert (found.workers, found.rank, name) == (("127.0.0.1:20000", "127.0.0.1:20001"), 1, "lo")


def test_processes_on_several_hosts_keep_their_addresses_and_every_interface():
    there = Processes(("node1:20000", "node2:20000"), 0, "SLURM")
    assert find_interface(there, None) == (there, None)


@pytest.mark.parametrize("host", ["127.0.1.1", "localhost"])
@pytest.mark.skipif(not OUTSIDE, reason="this host has no interface but loopback")
def test_an_own_address_that_the_interface_does_not_have_is_refused(host):
    there = Processes((f"{host}:20000", "node2:20000"), 0, "TF_CONFIG")
    with pytest.raises(ConfigError, match=rf"TF_CONFIG \({host}\): is 127.* by {OUTSIDE}, or give"):
        find_interface(there, OUTSIDE)
    assert find_interface(there, "lo") == (there, "lo")
    there = Processes((f"{OUTSIDE}:20000", "node2:20000"), 0, "TF_CONFIG")
    assert find_interface(there, OUTSIDE)[0] == there
    with pytest.raises(ConfigError, match=r"where nothing listens with cluster\.bind_address lo"):
        find_interface(there, "lo")


@pytest.mark.parametrize("given", ["lo", "127.0.0.1"])
def test_an_interface_is_given_by_its_name_or_its_address(given):
    there = Processes(("node1:20000", "node2:20000"), 0)
    assert find_interface(there, given) == (there, "lo")


def test_an_interface_that_is_not_there_is_refused_naming_those_that_are():
    with pytest.raises(ConfigError, match=r"cluster.bind_address \(ib7\): .* lo \(127\.0\.0\.1\)"):
        find_interface(Processes(("a:1", "b:1"), 0), "ib7")


@pytest.mark.skipif(not OUTSIDE, reason="this host has no interface but loopback")
def test_a_bound_port_takes_connections_on_its_interface_alone(monkeypatch):
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    other = socket.create_server(("", 0))
    with listener, other:
        port = listener.getsockname()[1]
        with connect(OUTSIDE, port) as early, listener.accept()[0] as served:
            listen_only_on("lo", port, is_required=True)
            assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"
            with connect("127.0.0.1", port) as client, listener.accept()[0] as server:
                client.sendall(b"here")
                assert server.recv(4) == b"here"
            with pytest.raises(ConnectionRefusedError):
                connect(OUTSIDE, port)
            # Who came before is cut off too.
            served.settimeout(0.5)
            early.sendall(b"from outside")
            with pytest.raises(OSError):
                served.recv(4)
        connect(OUTSIDE, other.getsockname()[1]).close()


def test_a_system_that_refuses_is_a_message_or_an_error(monkeypatch, capsys):
    # What Linux before 5.7 says to who is not root; no such system is at hand.
    monkeypatch.setattr(engine.socket, "SO_BINDTODEVICE", 10_000)
    with socket.create_server(("", 0)) as listener:
        port = listener.getsockname()[1]
        listen_only_on("lo", port, is_required=False)
        assert "so on all interfaces; the network must be trusted" in capsys.readouterr().err
        with pytest.raises(DeviceError, match="cannot take connections on lo alone"):
            listen_only_on("lo", port, is_required=True)
