"""The devices of a layout, and processes that are joined, lost, slow, or fail."""

import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.processes import wait_for

import bert_cli
from bert_cli.errors import DeviceError
from bert_cli.parallel.cluster import Processes, Rendezvous
from bert_cli.parallel.jax import mesh as runtime
from bert_cli.parallel.jax.forward import LOOPS
from bert_cli.parallel.jax.mesh import devices_here, open_mesh
from bert_cli.parallel.runtime import Layout

# Runs a scenario of `{steps}` as rank `{rank}` in place of a command of `bert`.
PROGRAM = """
import os, sys, time
from pathlib import Path
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from bert_cli import cli
from bert_cli.errors import DataError
from bert_cli.parallel.cluster import Rendezvous, find_processes
from bert_cli.parallel.runtime import Layout
from bert_cli.parallel.jax.mesh import JaxProcessGroup, device_grid, open_mesh

rank, scenario, workers, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3:-1], Path(sys.argv[-1])

def run(words):
    global group, grid, total
    layout = Layout(replicas=len(workers), tensor_shape=(2, 1))
    rendezvous = Rendezvous(lost_after_seconds=5)
    mesh = open_mesh(find_processes({}, workers, rank), layout, rendezvous)
    print(mesh.devices, mesh.kind, jax.config.jax_compilation_cache_dir)
    group, grid = JaxProcessGroup(mesh), device_grid(mesh)
    replicated = NamedSharding(grid, PartitionSpec())
    total = jax.jit(lambda x: x.sum(), out_shardings=replicated)
    scenarios[scenario]()

def step():
    divided = NamedSharding(grid, PartitionSpec("replica"))
    with group.collective():
        return float(total(jax.make_array_from_process_local_data(divided, np.ones(3) + rank)))

def ready():
    (folder / f"ready{rank}").write_text(str(os.getpid()))

def normal():
    assert group.all_gather(0.1 + rank) == [0.1, 1.1] and group.broadcast([0.3 + rank]) == [0.3]
    assert step() == 9.0
    group.publish("here")
    group.barrier()
    assert group.published_by(1) == "here"
    if rank == 1:
        time.sleep(40)  # as one that compiles
    print("sum", step())
    group.barrier()
    if rank == 1:  # ends after rank 0, which serves JAX
        time.sleep(3)
        print("late")

def steps():
    step()
    ready()
    while True:
        step()

def sleep():
    ready()
    time.sleep(8)
    step()

def fail():
    step()
    if rank == 1:
        raise DataError("text", "is cut", "fetch it again")
    while True:
        group.barrier()

scenarios = {"normal": normal, "steps": steps, "sleep": sleep, "fail": fail}
cli.dispatch = run
sys.exit(cli.main())
"""


class Ranks:
    def __init__(self, scenario: str, count: int, folder: Path) -> None:
        self.folder, self.texts = folder, []
        with ExitStack() as stack:
            sockets = [socket.create_server(("localhost", 0)) for _ in range(count)]
            ports = [stack.enter_context(one).getsockname()[1] for one in sockets]
        workers = [f"localhost:{port}" for port in ports]
        root = str(Path(bert_cli.__file__).parents[1])
        environment = os.environ | {"PYTHONPATH": root, "HOME": str(folder)}
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(rank), scenario, *workers, str(folder)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
            )
            for rank in range(count)
        ]

    def kill(self, rank: int) -> None:
        ready = [self.folder / f"ready{number}" for number in range(len(self.processes))]
        wait_for(lambda: all(path.exists() for path in ready), self.processes)
        self.processes[rank].send_signal(signal.SIGKILL)

    def end(self) -> list[int]:
        for process in self.processes:
            self.texts.append(process.communicate()[0])
        return [process.returncode for process in self.processes]


@pytest.fixture
def start(tmp_path):
    started: list[Ranks] = []

    def start_ranks(scenario: str, count: int = 2) -> Ranks:
        started.append(Ranks(scenario, count, tmp_path))
        return started[-1]

    yield start_ranks
    for process in (process for ranks in started for process in ranks.processes):
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.slow
def test_two_processes_sum_wait_for_one_that_compiles_and_end_at_different_times(start, tmp_path):
    ranks = start("normal")
    assert ranks.end() == [0, 0], ranks.texts
    for text in ranks.texts:
        names = "(('jax:CPU:0', 'jax:CPU:1'),)"
        assert f"{names} CPU {tmp_path}/.cache/bert/jax\n" in text and "sum 9.0" in text
        assert "[Gloo]" not in text
    assert "late" in ranks.texts[1]


def test_the_coordination_service_ends_with_the_last_rank():
    links = runtime.Links()
    processes = Processes(("127.0.0.1:20000", "127.0.0.1:20001"))
    port = runtime._start_service(processes, "lo", links)
    service = links.service
    try:
        with socket.create_connection(("127.0.0.1", port)):  # that of another rank
            service.stdin.close()  # as rank 0 does by its end
            time.sleep(1.0)
            assert service.poll() is None
        assert service.wait() == 0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
    finally:
        service.kill()
        service.stdout.close()


@pytest.mark.parametrize(
    ("scenario", "rank", "count"),
    [
        ("steps", 0, 2),
        pytest.param("sleep", 0, 3, marks=pytest.mark.slow),
    ],
)
def test_kill_9_of_a_process_ends_the_others_which_name_it(scenario, rank, count, start):
    """Rank 0 serves JAX, whose client aborts a process that cannot reach it."""
    ranks = start(scenario, count)
    ranks.kill(rank)
    codes = ranks.end()
    expected = [-signal.SIGKILL if number == rank else 5 for number in range(count)]
    assert codes == expected, ranks.texts
    del ranks.texts[rank]
    assert all(f"bert: cluster: rank {rank} (" in text for text in ranks.texts), ranks.texts


@pytest.mark.slow
def test_a_process_that_fails_ends_with_its_own_code_and_the_others_name_it(start):
    ranks = start("fail")
    assert ranks.end() == [5, 3], ranks.texts
    assert "bert: text: is cut; fetch it again" in ranks.texts[1]
    assert re.search(r"bert: cluster: rank 1 \([\w.]+:\d+\) is gone", ranks.texts[0])


WORKERS = ("a:1", "b:1", "c:1", "d:1")


@pytest.fixture
def seconds(monkeypatch):
    """A clock that only sleeping moves, from 100 on: a function for each second, and the time."""
    clock = SimpleNamespace(now=100.0, each=lambda: None)

    def sleep(_):
        clock.now += 1.0
        clock.each()

    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(time, "sleep", sleep)
    return clock


@pytest.mark.parametrize(("message", "lost"), [(b"", 2), (b"3\n", 3)])
def test_a_lost_rank_is_told_to_the_others_and_ends_a_process_that_waits_for_it(
    message, lost, seconds, monkeypatch, capsys
):
    links, calls = runtime.Links(5, WORKERS), []
    near, far = zip(*(socket.socketpair() for _ in range(3)), strict=True)
    links.sockets = dict(enumerate(near, 1))
    far[0].close()  # has ended, too
    far[1].sendall(message)
    far[1].shutdown(socket.SHUT_WR)

    def enter_a_collective():
        if seconds.now == 103.0:
            links.waiting_since = seconds.now

    seconds.each = enter_a_collective
    named = [("save", "saved"), ("other", "joined")]
    threads = [SimpleNamespace(name=n, join=partial(calls.append, call)) for n, call in named]
    monkeypatch.setattr(runtime.threading, "enumerate", lambda: threads)
    monkeypatch.setattr(os, "_exit", calls.append)
    links._watch(2, near[1])
    assert (links.lost, seconds.now, calls) == ([lost], 108.0, ["saved", 5])
    assert [far[n].recv(16) for n in (1, 2)] == [b"%d\n" % lost] * 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"bert: cluster: rank {lost} ({WORKERS[lost]}) is gone, so this")
    for one in (*near, *far):
        one.close()


def test_an_error_of_a_collective_names_the_rank_that_the_connections_show_within_seconds(seconds):
    links = runtime.Links(5, WORKERS)
    mesh = SimpleNamespace(processes=Processes(WORKERS, 1), links=links)
    group = runtime.JaxProcessGroup(mesh)

    def failed(error, expected):
        seconds.now = 100.0
        with pytest.raises(expected) as caught, group.naming_lost_process():
            assert links.waiting_since == 100.0
            raise error
        assert links.waiting_since == math.inf  # computes again
        return str(caught.value), seconds.now

    assert failed(RuntimeError("x"), RuntimeError) == ("x", 100.0)  # a process alone
    links.sockets = {0: None}
    assert failed(ValueError("x"), ValueError) == ("x", 103.0)
    assert failed(KeyError("x"), KeyError) == ("'x'", 100.0)
    seconds.each = lambda: links.lost.append(2)
    message, now = failed(RuntimeError("x"), DeviceError)
    assert message.startswith("cluster: rank 2 (c:1) is gone") and now == 101.0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an open socket
def test_the_other_ranks_learn_the_port_of_the_service_when_all_have_connected(monkeypatch):
    links = runtime.Links(20)
    monkeypatch.setattr(runtime.threading.Thread, "start", lambda self: None)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        asks, *others = (socket.create_connection(listener.getsockname()) for _ in range(3))
        asks.close()  # as one that waits for this process
        for rank, other in zip((2, 1), others, strict=True):
            other.sendall(b"%d\n" % rank)
        assert runtime._accept_links(listener, 3, 4321, links) is links.sockets[1]
    assert [*links.sockets] == [2, 1] and [other.recv(16) for other in others] == [b"4321"] * 2
    options = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 5, socket.TCP_USER_TIMEOUT: 20_000}
    for link in links.sockets.values():
        assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) and not link.gettimeout()
        assert {n: link.getsockopt(socket.IPPROTO_TCP, n) for n in options} == options
    for one in (*others, *links.sockets.values()):
        one.close()


@pytest.mark.parametrize(("cores", "fewest"), [((8, 3, 5), "3"), ((4, 4, 4), "")])
def test_all_ranks_compute_with_the_threads_of_the_fewest_cores(cores, fewest, monkeypatch, capsys):
    monkeypatch.setenv("PJRT_NPROC", "")
    monkeypatch.setenv("NPROC", str(cores[2]))
    stored = {f"bert_cores_{rank}": str(number) for rank, number in enumerate(cores[:2])}
    get = lambda key, milliseconds: stored[key] if milliseconds == 1500 else None  # noqa: E731
    client = SimpleNamespace(key_value_set=stored.__setitem__, blocking_key_value_get=get)
    runtime._use_equal_threads(client, Processes(WORKERS[:3], 2), 1.5)
    assert os.environ["PJRT_NPROC"] == fewest
    line = "cluster: rank 1 has 3 cores, others up to 8; each rank computes with 3 threads\n"
    assert capsys.readouterr().out == (line if fewest else "")


def test_options_of_xla_follow_those_of_the_user_once(monkeypatch):
    options = [*runtime.FLAGS, "--xla_gpu_deterministic_ops=true"]
    for own, deterministic, added in (
        ("", False, options[:2]),
        ("--a=b", True, ["--a=b", *options]),
        ("flags.txt", True, ["flags.txt"]),
    ):
        monkeypatch.setenv("XLA_FLAGS", own)
        for _ in range(2):
            runtime.configure_runtime("float32", deterministic)
        assert os.environ["XLA_FLAGS"].split() == added


def test_the_memory_of_a_process_is_that_of_its_fullest_accelerator(monkeypatch):
    rows = [(5, 9), (7, 8), (100, 100)]
    memories = [{"bytes_in_use": now, "peak_bytes_in_use": peak} for now, peak in rows]
    devices = [SimpleNamespace(memory_stats=lambda memory=memory: memory) for memory in memories]
    monkeypatch.setattr(runtime.jax, "local_devices", lambda: devices)
    mesh = SimpleNamespace(devices=(("jax:GPU:0",), ("jax:GPU:1",)))
    assert runtime.used_memory(mesh) == (7, 9)
    devices[:] = [SimpleNamespace(memory_stats=lambda: None)] * 2  # as a CPU
    assert runtime.used_memory(mesh) == (0, 0)


def test_a_layout_that_does_not_fit_the_gpus_is_rejected(monkeypatch):
    monkeypatch.setattr(runtime, "_kind", lambda: "GPU")
    monkeypatch.setattr(runtime, "visible_gpus", lambda environment: ["0", "1"])
    with pytest.raises(DeviceError, match=r"needs 4 GPUs, but finds 0; .*parallel.layout auto"):
        open_mesh(Processes(()), Layout(replicas=2, tensor_shape=(2, 1)), Rendezvous())


def test_equal_layers_run_in_a_loop_without_recomputation_on_tpus_alone(monkeypatch):
    platforms = {"cuda": "GPU", "gpu,cpu": "GPU", "tpu": "TPU", "cpu": "CPU", "other": "CPU"}
    for name, kind in platforms.items():
        monkeypatch.setattr(runtime.jax, "config", SimpleNamespace(jax_platforms=name))
        assert runtime._kind() == kind and LOOPS[kind] == (kind == "TPU")


def test_a_machine_without_accelerator_divides_its_memory_among_its_processes():
    kind, devices, memory = devices_here(Processes(()))
    assert (kind, devices) == ("CPU", 1)
    assert devices_here(Processes(("a:1", "a:2", "b:1"))) == ("CPU", 1, memory // 2)
