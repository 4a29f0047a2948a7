"""The processes of a run by flags, TF_CONFIG and SLURM, and how they wait for one another on one interface."""

import json
import os
import socket

import psutil
import pytest

from bert_cli.errors import ConfigError, DeviceError
from bert_cli.parallel import cluster
from bert_cli.parallel.cluster import (
    Processes,
    Rendezvous,
    StoppedWhileJoiningError,
    _expand_counts,
    _expand_hosts,
    bind_to_interface,
    find_interface,
    find_processes,
    wait_for_processes,
)

ADDRESSES = [
    entry for name, entries in psutil.net_if_addrs().items() if name != "lo" for entry in entries
]
OUTSIDE = next((one.address for one in ADDRESSES if one.family == socket.AF_INET), "")


def tf_config(jobs: dict, kind: str = "worker", index: object = 0) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": jobs, "task": {"type": kind, "index": index}})}


def slurm(rank: int, nodes: str = "n1,n2", per_node: str = "2,1", **more: str) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": "3",
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": per_node,
        **more,
    }


def hosts(found: Processes) -> list[str]:
    return [worker.rpartition(":")[0] for worker in found.workers]


def test_flags_come_before_tf_config_whose_chief_is_rank_0_and_that_before_slurm():
    environment = {**tf_config({"worker": ["b:1"], "chief": ["a:1"]}), **slurm(2)}
    by_flags = find_processes(environment, ["x:5", "y:5", "y:6"], 1)
    assert (by_flags.workers, by_flags.source) == (("x:5", "y:5", "y:6"), "--cluster.workers")
    by_tf_config = find_processes(environment)
    assert (by_tf_config.workers, by_tf_config.rank) == (("a:1", "b:1"), 1)
    environment |= tf_config({"worker": ["b:1"], "chief": ["a:1"]}, "chief")
    assert find_processes(environment).rank == 0
    del environment["TF_CONFIG"]
    assert find_processes(environment).source == "SLURM"


def test_an_empty_environment_a_list_of_one_and_a_step_of_one_task_are_a_single_process():
    single = find_processes({})
    assert (single.count, single.rank, single.workers, single.local_ranks) == (1, 0, (), [0])
    for text in (" ", "{}", '{"environment": "cloud"}'):
        assert find_processes({"TF_CONFIG": text}) == single
    assert find_processes(tf_config({"worker": ["a:1"]})) == single
    assert find_processes({}, ["a:1"], 0) == single
    # A batch script or a shell has no step, and a step may have one task.
    script = slurm(0, nodes="")
    assert find_processes(script) == find_processes(slurm(0, SLURM_STEP_NUM_TASKS="1")) == single


WRONG = [
    ({"TF_CONFIG": "{broken"}, "Invalid JSON"),
    ({"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}}'}, "is not a task of this cluster"),
    (tf_config({"chief": ["a:1"], "worker": ["b:1"]}, "chief", 1), "is not a task of this cluster"),
    (tf_config({"worker": ["a:1"], "ps": ["b:1"]}), "cluster.ps"),
    (tf_config({"worker": ["a:1", "a:1"]}), "occurs twice"),
    (slurm(1, SLURM_DISTRIBUTION="plane"), "--distribution=block"),
    (slurm(1, SLURM_NODEID="1", SLURM_LOCALID="0"), "task 1 is number 0 on host 1"),
    (slurm(1, SLURM_PROCID="3"), "is not a rank of 3"),
    (slurm(1, SLURM_STEP_TASKS_PER_NODE="2;1"), "tasks per node '2;1'"),
    (slurm(1, SLURM_STEP_TASKS_PER_NODE="3"), "2 hosts, tasks per host [3]"),
    ({"SLURM_STEP_NODELIST": "n1,n2", "SLURM_NTASKS": "3"}, "SLURM_PROCID"),
]


def test_a_wrong_description_is_an_error_that_names_its_source():
    for environment, message in WRONG:
        with pytest.raises(ConfigError) as error:
            find_processes(environment)
        source = "TF_CONFIG" if "TF_CONFIG" in environment else "SLURM"
        assert str(error.value).startswith(source) and message in str(error.value), message
    for worker in ("b", "b:70000"):
        with pytest.raises(ConfigError, match=rf"--cluster.workers \({worker}\): is not host:port"):
            find_processes({}, ["a:1", worker], 0)


def test_the_tasks_of_a_step_agree_on_ranks_hosts_and_ports():
    found = [find_processes(slurm(rank)) for rank in range(3)]
    assert len({one.workers for one in found}) == 1
    assert hosts(found[0]) == ["n1", "n1", "n2"]
    assert [one.local_ranks for one in found] == [[0, 1], [0, 1], [2]]
    of_job = slurm(2, SLURM_TASKS_PER_NODE="2,1", SLURM_STEP_NUM_TASKS="", per_node="")
    assert hosts(find_processes(of_job)) == ["n1", "n1", "n2"]
    # Linux gives ports from 32,768 on to sockets without one.
    assert all(20_000 <= int(worker.rpartition(":")[2]) < 32_768 for worker in found[0].workers)
    # Two jobs, or two steps of a job, on a host have different ones.
    of = [{"SLURM_JOB_ID": job, "SLURM_STEP_ID": step} for job in ("77", "78") for step in "01"]
    workers = [find_processes(slurm(0, **names)).workers for names in of]
    assert len({worker for of_step in workers for worker in of_step}) == 12


def test_distributions_other_than_block():
    cyclic = slurm(1, SLURM_DISTRIBUTION="cyclic:block", SLURM_NODEID="1", SLURM_LOCALID="0")
    assert hosts(find_processes(cyclic)) == ["n1", "n2", "n1"]
    # Any is the same with one task a host.
    arbitrary = slurm(2, "n1,n2,n3", "1(x3)", SLURM_DISTRIBUTION="arbitrary")
    assert hosts(find_processes(arbitrary)) == ["n1", "n2", "n3"]


def test_host_lists_are_expanded_as_tensorflow_does():
    from tensorflow.python.distribute.cluster_resolver import slurm_cluster_resolver as theirs

    for nodes in ("n1", "n[1-2],m5,o[3-4,6,7-9]", "a,b-x[008-011]", "gpu[1,3],gpu[5-6]"):
        assert _expand_hosts(nodes) == theirs.expand_hostlist(nodes)
    assert _expand_hosts("r[1-2]n[08-09]") == ["r1n08", "r1n09", "r2n08", "r2n09"]
    for counts in ("1", "3(x2),2,1", "2(x10)"):
        assert _expand_counts(counts) == theirs.expand_tasks_per_node(counts)


def free_ports(number: int) -> list[str]:
    sockets = [socket.create_server(("localhost", 0)) for _ in range(number)]
    addresses = [f"localhost:{one.getsockname()[1]}" for one in sockets]
    for one in sockets:
        one.close()
    return addresses


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(cluster, "REPORT_SECONDS", 0.02)
    monkeypatch.setattr(cluster, "RETRY_SECONDS", 0.01)


def test_missing_processes_are_named_with_their_addresses_and_a_stop_request_ends_the_wait(
    soon, capsys
):
    here, absent, other = free_ports(3)
    requests = iter([False] * 6 + [True])
    listens = socket.create_server(("localhost", int(other.rpartition(":")[2])))
    with listens, pytest.raises(StoppedWhileJoiningError):
        rendezvous = Rendezvous(stop_requested=lambda: next(requests))
        wait_for_processes(Processes((here, absent, other), 0), rendezvous)
    printed = capsys.readouterr().err
    assert f" s for rank 1 ({absent}: Connection refused) to start" in printed
    assert other not in printed


def test_a_process_that_does_not_start_and_a_port_in_use_are_errors(soon):
    here, absent = free_ports(2)
    rendezvous = Rendezvous(register_seconds=0.1)
    with pytest.raises(DeviceError, match=rf"rank 0 \({absent}: .*\)\): cannot be reached"):
        wait_for_processes(Processes((absent, here), 1), rendezvous)
    uses = socket.create_server(("", int(here.rpartition(":")[2])))
    with uses, pytest.raises(DeviceError, match=rf"cluster \({here}\): its port cannot be opened"):
        wait_for_processes(Processes((here, absent), 0), rendezvous)


def test_one_host_uses_its_loopback():
    found, name = find_interface(Processes(("node1:20000", "node1:20001"), 1, "SLURM"))
    assert (found.workers, found.rank, name) == (("127.0.0.1:20000", "127.0.0.1:20001"), 1, "lo")


@pytest.mark.skipif(not OUTSIDE, reason="this host has no interface but loopback")
def test_several_hosts_use_the_interface_of_their_own_address(monkeypatch):
    (here,) = [n for n, at in psutil.net_if_addrs().items() if OUTSIDE in [a.address for a in at]]
    for host in (OUTSIDE, "me"):
        monkeypatch.setattr(cluster, "addresses_of", lambda name: ["127.0.1.1", OUTSIDE])
        several = Processes(("node1:20000", f"{host}:20000"), 1)
        assert find_interface(several) == (several, here)


@pytest.mark.parametrize(
    ("host", "addresses"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("no-such-host.invalid", "nothing"),
        # Other hosts cannot reach it.
        ("127.0.0.1", "127.0.0.1"),
    ],
)
def test_a_host_whose_address_no_interface_has_listens_on_all_and_says_so(host, addresses, capsys):
    several = Processes(("node1:20000", f"{host}:20000"), 1)
    assert find_interface(several) == (several, None)
    printed = f"cluster: {host} resolves to {addresses}, on no network of this host; it listens on"
    assert capsys.readouterr().err.startswith(printed)


def connect(address: str, port: int) -> socket.socket:
    return socket.create_connection((address, port), timeout=5)


@pytest.mark.skipif(not OUTSIDE, reason="this host has no interface but loopback")
def test_a_bound_port_takes_connections_on_its_interface_alone(monkeypatch):
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    other = socket.create_server(("", 0))
    with listener, other:
        port = listener.getsockname()[1]
        with connect(OUTSIDE, port) as early, listener.accept()[0] as served:
            bind_to_interface("lo", port)
            served.settimeout(0.2)
            early.sendall(b"an earlier connection is cut too")
            with pytest.raises(OSError):
                served.recv(4)
        assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"
        connect("127.0.0.1", port).close()
        with pytest.raises(ConnectionRefusedError):
            connect(OUTSIDE, port)
        connect(OUTSIDE, other.getsockname()[1]).close()


def test_a_system_that_cannot_bind_prints_a_message(monkeypatch, capsys):
    # Stands for Linux before 5.7 without privileges.
    monkeypatch.setattr(cluster.socket, "SO_BINDTODEVICE", 10_000)
    with socket.create_server(("", 0)) as listener:
        bind_to_interface("lo", listener.getsockname()[1])
    printed = capsys.readouterr().err
    assert "cannot limit connections to lo" in printed
    assert "listens on all interfaces, so the network must be trusted" in printed
