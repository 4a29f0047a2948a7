"""One run in several processes: the same numbers, and what happens when one is lost, stopped or slow."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow  # noqa: F401 (before the end of the collection, which sets its devices)
from safetensors.numpy import load_file
from support.bert import Process, start_bert
from support.tiny_models import TINY_RUN, flags_of

from bert_cli.cli import main
from bert_cli.train.checkpoint import MODEL, OPTIMIZER, complete_checkpoints, read_state

STEPS = 10
MANY = 400
STAGES = [
    "--parallel.pipeline-stages",
    '[["emb", "hid"], ["hid"], ["enc_out", "pool", "heads"]]',
    "--parallel.pipeline-device-mapping",
    "[0, 1, 0]",
]
FLAGS = {
    **TINY_RUN,
    "bert-config.num-hidden-layers": 2,
    "bert-config.initializer-range": 0.2,
    "cluster.lost-after-seconds": 10,
    "checkpoint-every-steps": 5,
}
SHARDED = {"parallel__replicated_tensor_sharding": None}


def words(
    folder: Path, replicas: int, micro_batches: int, steps: int = STEPS, **flags
) -> list[str]:
    """The command line of a small run with so many micro-batches a step over all replicas."""
    batch = {
        "global-batch.replicas": replicas,
        "global-batch.grad-acc-steps-per-replica": micro_batches // replicas,
        "total-num-train-samples": 2 * micro_batches * steps,
    }
    return ["pretrain", "--save-ckpt-path", str(folder), *flags_of({**FLAGS, **batch}, **flags)]


@pytest.fixture(autouse=True)
def started():
    """The processes of a test, which end with it."""
    processes: list[Process] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("localhost", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def start(folder: Path, commands: list[list[str]], size: int | None = None) -> list[Process]:
    """Start a process for each command, the ranks of a process group; a single one has no group.

    Their output is the text of their file `log`. The group has `size` processes if not all start.
    """
    folder.mkdir(exist_ok=True)
    processes, ports = [], free_ports(size or len(commands))
    for rank, command in enumerate(commands):
        environment = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
        if len(ports) > 1:
            cluster = {"worker": [f"localhost:{port}" for port in ports]}
            task = {"type": "worker", "index": rank}
            environment["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
        log = folder / f"log{rank}"
        with log.open("w") as file:
            process = start_bert(*command, env=environment, stdout=file, stderr=subprocess.STDOUT)
        process.log, process.port = log, ports[rank]
        processes.append(process)
    return processes


def end(processes: list[Process], seconds: float = 120.0) -> list[str]:
    """The output of each, when all have ended."""
    until = time.monotonic() + seconds
    for process in processes:
        process.wait(timeout=until - time.monotonic())
    return [process.log.read_text() for process in processes]


def run(folder: Path, commands: list[list[str]]) -> list[str]:
    processes = start(folder, commands)
    texts = end(processes)
    for process, text in zip(processes, texts, strict=True):
        assert process.returncode == 0, text
    return texts


def wait_until(condition, processes: list[Process], seconds: float = 90.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        for process in processes:
            assert process.poll() is None, process.log.read_text()
        assert time.monotonic() < until, [process.log.read_text() for process in processes]
        time.sleep(0.02)


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def last_saved(folder: Path) -> int:
    return read_state(complete_checkpoints(folder)[-1]).step


def assert_same_run(a: Path, b: Path, tolerance: float) -> None:
    """Same weights and moments, each relative to its norm; see `assert_weights_close` of the layouts."""
    assert last_saved(a) == last_saved(b)
    left, right = (
        {**load_file(newest / MODEL), **load_file(newest / OPTIMIZER)}
        for newest in (complete_checkpoints(a)[-1], complete_checkpoints(b)[-1])
    )
    assert left.keys() == right.keys()
    for name, value in right.items():
        if "key/bias" in name or "key.bias" in name:
            assert np.abs(left[name] - value).max() <= 2 * STEPS * 0.01
            continue
        assert np.linalg.norm(left[name] - value) <= tolerance * np.linalg.norm(value), name


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """The run on one device, with a checkpoint at steps 5 and 10."""
    folder = tmp_path_factory.mktemp("single")
    assert main(words(folder / "run", 1, 8)) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def distributed(tmp_path_factory):
    """The same in two processes of two replicas of two stages, each with a part of the moments; with its outputs."""
    folder = tmp_path_factory.mktemp("distributed")
    command = [*words(folder / "run", 4, 8, **SHARDED), *STAGES]
    return folder / "run", run(folder, [command, command])


def test_two_processes_of_replicas_and_stages_train_the_model_of_one_device(single, distributed):
    folder, (first, second) = distributed
    assert_same_run(folder, single, 1e-5)
    assert [len(metrics(path)) for path in (folder, single)] == [STEPS, STEPS]
    for ours, theirs in zip(metrics(folder), metrics(single), strict=True):
        assert ours["mlm_loss"] == pytest.approx(theirs["mlm_loss"], rel=1e-5)
        assert ours["tokens"] == theirs["tokens"]
    # Only rank 0 prints and writes.
    assert "2 processes from TF_CONFIG" in first and f"step {STEPS}/{STEPS}" in first
    assert second == ""
    names = [path.name for path in complete_checkpoints(folder)]
    assert names == ["step_00000005", "step_00000010"]


def test_a_checkpoint_of_one_layout_continues_in_another(single, distributed, tmp_path, capsys):
    """With two processes each loads its own part of the sharded moments."""
    for source, name in ((single, "two"), (distributed[0], "one")):
        shutil.copytree(source / "step_00000005", tmp_path / name / "step_00000005")
    text = run(tmp_path / "logs", [words(tmp_path / "two", 2, 8, **SHARDED)] * 2)[0]
    assert main(words(tmp_path / "one", 1, 8)) == 0
    for name, output in (("two", text), ("one", capsys.readouterr().out)):
        assert "continues from" in output and "(step 5)" in output
        assert_same_run(tmp_path / name, single, 1e-5)


@pytest.mark.parametrize(("rank", "size"), [(2, 3), (0, 2)])
def test_kill_9_of_a_process_ends_the_run_and_the_same_command_continues(
    rank, size, tmp_path, started, capsys
):
    """Rank 0 coordinates the others."""
    folder = tmp_path / "run"
    command = words(folder, size, size, steps=MANY)
    processes = start(tmp_path, [command] * size)
    started += processes
    wait_until((folder / "step_00000020").exists, processes)
    processes[rank].kill()
    texts = end(processes, 60)
    codes = [-signal.SIGKILL if number == rank else 5 for number in range(size)]
    assert [process.returncode for process in processes] == codes, texts
    assert not any("Traceback" in text for text in texts)
    # A process that hears of it from another may name that one; the first does not.
    assert any(f"rank {rank} is gone" in text for text in texts)
    stopped_at = last_saved(folder)
    assert 20 <= stopped_at < MANY
    assert main([*command, "--dry-run"]) == 0
    assert f"(step {stopped_at})" in capsys.readouterr().out


def test_processes_listen_on_loopback_the_watchdog_names_one_that_hangs_and_sigterm_to_any_ends_all(
    tmp_path, started
):
    flags = {
        "cluster__report_waiting_after_seconds": 1,
        "cluster__lost_after_seconds": 60,
        **SHARDED,
    }
    flags["checkpoint_every_steps"] = 100_000
    folder = tmp_path / "run"
    # Steps of a part of a second: the request to stop is checked between micro-batches.
    processes = start(tmp_path, [words(folder, 2, 100, steps=10_000, **flags)] * 2)
    started += processes
    wait_until((folder / "metrics.jsonl").exists, processes)
    outside = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=True).stdout
    for process in processes:
        socket.create_connection(("127.0.0.1", process.port), timeout=5).close()
        for address in outside.split():
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((address, process.port), timeout=5)
    # A rank publishes its step once a second.
    time.sleep(2.1)
    processes[1].send_signal(signal.SIGSTOP)
    message = re.compile(r"rank 0 has waited \d+ s for rank 1 \(step ")
    wait_until(lambda: message.search(processes[0].log.read_text()), processes[:1], 20)
    # A slow process is not lost.
    processes[1].send_signal(signal.SIGCONT)
    processes[1].send_signal(signal.SIGTERM)
    requested = time.monotonic()
    texts = end(processes)
    assert time.monotonic() - requested < 30
    assert [process.returncode for process in processes] == [0, 0], texts
    assert "stopped at step" in texts[0]
    (checkpoint,) = complete_checkpoints(folder)
    assert (checkpoint / OPTIMIZER).is_file()
    assert not list(folder.glob(".partial*"))


@pytest.mark.parametrize(
    ("replicas", "changes", "message"),
    [
        (2, {"seed": 7}, "rank 1: was started with other settings"),
        (3, {}, "cannot be divided among 2 processes"),
    ],
)
def test_processes_that_cannot_make_one_run_are_an_error_of_all(
    replicas, changes, message, tmp_path, started
):
    commands = [words(tmp_path / "run", replicas, replicas, **more) for more in ({}, changes)]
    started += (processes := start(tmp_path, commands))
    texts = end(processes, 60)
    assert [process.returncode for process in processes] == [2, 2]
    assert all(message in text for text in texts)


def test_a_process_whose_others_never_start_names_them_and_can_be_stopped(tmp_path, started):
    folder, flags = tmp_path / "run", {"cluster__report_waiting_after_seconds": 1}
    (process,) = start(tmp_path, [words(folder, 2, 2, **flags)], size=2)
    started.append(process)
    wait_until(lambda: "to start" in process.log.read_text(), [process])
    process.send_signal(signal.SIGTERM)
    (text,) = end([process], 10)
    assert process.returncode == 0, text
    assert re.search(r"cluster: rank 0 \(127\.0\.0\.1:\d+\) has waited \d+ s for rank 1 \(", text)
    assert "stopped before all processes had started; nothing was done" in text
    assert not folder.exists()
