"""The processes of a run by flags, TF_CONFIG and SLURM, and how they wait for one another on one interface."""

import json
import os
import socket
import threading
import time

import psutil
import pytest

from bert_cli.config.settings import Cluster
from bert_cli.errors import ConfigError, DeviceError
from bert_cli.parallel import cluster
from bert_cli.parallel.cluster import (
    Processes,
    StoppedWhileJoiningError,
    _expand_counts,
    _expand_hosts,
    bind_to_interface,
    find_interface,
    find_processes,
    wait_for_processes,
)

UNSET = Cluster()
ADDRESSES = [
    entry for name, entries in psutil.net_if_addrs().items() if name != "lo" for entry in entries
]
OUTSIDE = next((one.address for one in ADDRESSES if one.family == socket.AF_INET), "")


def tf_config(jobs: dict, kind: str = "worker", index: object = 0) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": jobs, "task": {"type": kind, "index": index}})}


def slurm(rank: int, nodes: str = "n1,n2", per_node: str = "2,1", **more: str) -> dict[str, str]:
    """Variables of task `rank` of three in a step of job 77 on hosts n1 (two tasks) and n2 (one)."""
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


def test_flags_come_before_tf_config_and_tf_config_before_slurm():
    environment = {**tf_config({"worker": ["a:1", "b:1"]}, index=1), **slurm(2)}
    by_flags = find_processes(Cluster(workers=["x:5", "y:5", "y:6"], rank=1), environment)
    assert (by_flags.workers, by_flags.source) == (("x:5", "y:5", "y:6"), "--cluster.workers")
    by_tf_config = find_processes(UNSET, environment)
    assert (by_tf_config.workers, by_tf_config.rank) == (("a:1", "b:1"), 1)
    del environment["TF_CONFIG"]
    assert find_processes(UNSET, environment).source == "SLURM"


def test_an_empty_environment_and_a_list_of_one_are_a_single_process():
    single = find_processes(UNSET, {})
    assert (single.count, single.rank, single.workers) == (1, 0, ())
    assert (single.local_processes, single.local_rank) == (1, 0)
    assert single.source == "this process alone"
    for text in ("", " ", "{}", '{"cluster": {}}', '{"environment": "cloud"}'):
        assert find_processes(UNSET, {"TF_CONFIG": text}) == single
    assert find_processes(UNSET, tf_config({"worker": ["a:1"]})) == single
    assert find_processes(Cluster(workers=["a:1"], rank=0), {}) == single


def test_the_chief_is_rank_0_and_workers_follow():
    jobs = {"worker": ["b:1", "c:1"], "chief": ["a:1"]}
    assert find_processes(UNSET, tf_config(jobs, "chief")).rank == 0
    found = find_processes(UNSET, tf_config(jobs, "worker", "1"))
    assert (found.rank, found.workers) == (2, ("a:1", "b:1", "c:1"))


TWO = ["a:1", "b:1"]
WRONG = [
    ({"TF_CONFIG": "{broken"}, "Invalid JSON"),
    ({"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}}'}, "worker 0"),
    (tf_config({"worker": TWO}, index=2), "one of the 2 of that kind"),
    (tf_config({"worker": ["a:1"], "ps": ["b:1"]}), "cluster.ps"),
    (tf_config({"worker": ["a:1", "a:1"]}), "named twice"),
    (tf_config({"worker": ["a:1", "b:70000"]}), "is no host:port"),
    (slurm(1, SLURM_DISTRIBUTION="plane"), "--distribution=block"),
    (slurm(1, SLURM_NODEID="1", SLURM_LOCALID="0"), "task 1 is number 0 on host 1"),
    (slurm(1, SLURM_PROCID="3"), "is not one of 3"),
    (slurm(1, SLURM_STEP_TASKS_PER_NODE="2;1"), "does not describe the tasks"),
    (slurm(1, SLURM_STEP_TASKS_PER_NODE="2(x2)"), "run 4 of the step's 3 tasks"),
    (slurm(1, SLURM_STEP_TASKS_PER_NODE="3"), "names 2 hosts"),
    ({"SLURM_STEP_NODELIST": "n1,n2", "SLURM_NTASKS": "3"}, "SLURM_PROCID"),
]


def test_a_wrong_description_is_an_error_that_names_its_source():
    for environment, message in WRONG:
        with pytest.raises(ConfigError) as error:
            find_processes(UNSET, environment)
        source = "TF_CONFIG" if "TF_CONFIG" in environment else "SLURM"
        assert str(error.value).startswith(source) and message in str(error.value), message
    with pytest.raises(ConfigError, match=r"--cluster.workers \(b\): is no host:port"):
        find_processes(Cluster(workers=["a:1", "b"], rank=0), {})


def test_the_tasks_of_a_step_agree_on_ranks_hosts_and_ports():
    found = [find_processes(UNSET, slurm(rank)) for rank in range(3)]
    assert len({one.workers for one in found}) == 1
    assert hosts(found[0]) == ["n1", "n1", "n2"]
    assert len(set(found[0].workers)) == 3
    assert [one.local_rank for one in found] == [0, 1, 0]
    assert [one.local_processes for one in found] == [2, 2, 1]
    of_job = slurm(2, SLURM_TASKS_PER_NODE="2,1")
    del of_job["SLURM_STEP_NUM_TASKS"], of_job["SLURM_STEP_TASKS_PER_NODE"]
    assert hosts(find_processes(UNSET, of_job)) == ["n1", "n1", "n2"]
    # Linux gives ports from 32,768 on to sockets without one.
    assert all(20_000 <= int(worker.rpartition(":")[2]) < 32_768 for worker in found[0].workers)


def test_two_jobs_and_two_steps_on_a_host_have_different_ports():
    found = [
        find_processes(UNSET, slurm(0, SLURM_JOB_ID=job, SLURM_STEP_ID=step)).workers
        for job in ("77", "78")
        for step in ("0", "1")
    ]
    assert len({worker for workers in found for worker in workers}) == 12


def test_a_batch_script_a_shell_and_a_step_of_one_task_are_single_processes():
    script = {
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "4",
        "SLURM_PROCID": "0",
        "SLURM_JOB_NODELIST": "n[1-4]",
        "SLURM_TASKS_PER_NODE": "1(x4)",
    }
    step = {**script, "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_NUM_TASKS": "1"}
    for environment in (script, step):
        assert find_processes(UNSET, environment).count == 1


def test_distributions_other_than_block():
    cyclic = slurm(1, SLURM_DISTRIBUTION="cyclic:block", SLURM_NODEID="1", SLURM_LOCALID="0")
    assert hosts(find_processes(UNSET, cyclic)) == ["n1", "n2", "n1"]
    # Any is the same with one task a host.
    arbitrary = slurm(2, "n1,n2,n3", "1(x3)", SLURM_DISTRIBUTION="arbitrary")
    assert hosts(find_processes(UNSET, arbitrary)) == ["n1", "n2", "n3"]


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
def _short_waits(monkeypatch):
    monkeypatch.setattr(cluster, "RETRY_SECONDS", 0.01)


@pytest.mark.timeout(30)
@pytest.mark.usefixtures("_short_waits")
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


@pytest.mark.usefixtures("_short_waits")
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


@pytest.mark.usefixtures("_short_waits")
def test_a_process_that_does_not_start_and_a_port_in_use_are_errors(monkeypatch):
    here, absent = free_ports(2)
    monkeypatch.setattr(cluster, "REGISTER_SECONDS", 0.1)
    with pytest.raises(
        DeviceError, match=rf"rank 0 \({absent}\)\): cannot be reached within 0.1 s; check"
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


@pytest.mark.skipif(not OUTSIDE, reason="this host has no interface but loopback")
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


@pytest.mark.skipif(not OUTSIDE, reason="this host has no interface but loopback")
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
    monkeypatch.setattr(cluster.socket, "SO_BINDTODEVICE", 10_000)
    with socket.create_server(("", 0)) as listener:
        port = listener.getsockname()[1]
        bind_to_interface("lo", port, is_required=False)
        assert "so on all interfaces; the network must be trusted" in capsys.readouterr().err
        with pytest.raises(DeviceError, match="cannot take connections on lo alone"):
            bind_to_interface("lo", port, is_required=True)
