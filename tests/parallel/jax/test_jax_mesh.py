"""The devices of a layout, and processes that are joined, lost, slow, or fail."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
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
