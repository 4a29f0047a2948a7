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
from safetensors.numpy import load_file
from support.bert import Process, start_bert

from bert_cli.train.checkpoint import MODEL, OPTIMIZER, read_state
from bert_cli.train.folder import complete_checkpoints

STEPS = 10
MANY = 400
STAGES = [
    "--parallel.pipeline-stages",
    '[["emb", "hid"], ["hid"], ["enc_out", "pool", "heads"]]',
    "--parallel.pipeline-device-mapping",
    "[0, 1, 0]",
]
FLAGS = {
    "max-seq-length": 16,
    "max-predictions-per-seq": 3,
    "bert-config.vocab-size": 60,
    "bert-config.hidden-size": 16,
    "bert-config.num-hidden-layers": 2,
    "bert-config.num-attention-heads": 2,
    "bert-config.intermediate-size": 32,
    "bert-config.max-position-embeddings": 32,
    "bert-config.initializer-range": 0.2,
    "global-batch.micro-batch-size": 2,
    "optimizer-opts.name": "LAMB",
    "optimizer-opts.learning-rate.max-learning-rate": 0.01,
    "cluster.lost-after-seconds": 10,
    "checkpoint-every-steps": 5,
    "keep-checkpoints": 100,
}
SHARDED = {"parallel__replicated_tensor_sharding": None}


def words(
    folder: Path, replicas: int, micro_batches: int, steps: int = STEPS, **flags
) -> list[str]:
    """The command line of a small run with so many micro-batches a step over all replicas."""
    found = ["pretrain", "--generated-dataset", "--save-ckpt-path", str(folder)]
    changed = {name.replace("__", ".").replace("_", "-"): value for name, value in flags.items()}
    batch = {
        "global-batch.replicas": replicas,
        "global-batch.grad-acc-steps-per-replica": micro_batches // replicas,
        "total-num-train-samples": 2 * micro_batches * steps,
    }
    for name, value in {**FLAGS, **batch, **changed}.items():
        found += [f"--{name}"] if value is None else [f"--{name}", str(value)]
    return found


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
    run(folder, [words(folder / "run", 1, 4)])
    return folder / "run"


@pytest.fixture(scope="module")
def distributed(tmp_path_factory):
    """The same in two processes of two stages each, each with half of the moments; with its outputs."""
    folder = tmp_path_factory.mktemp("distributed")
    command = [*words(folder / "run", 2, 4, **SHARDED), *STAGES]
    return folder / "run", run(folder, [command, command])


def test_two_processes_of_two_stages_train_the_model_of_one_device(single, distributed):
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


def test_two_processes_of_two_replicas_with_recomputation_train_it_too(single, tmp_path):
    """Four replicas with a micro-batch each."""
    command = [*words(tmp_path / "run", 4, 4, parallel__recompute=None), *STAGES]
    run(tmp_path, [command, command])
    assert_same_run(tmp_path / "run", single, 1e-5)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_checkpoint_of_one_layout_continues_in_another(processes, single, distributed, tmp_path):
    """With two processes each loads its own part of the sharded moments."""
    source = single if processes == 2 else distributed[0]
    shutil.copytree(source / "step_00000005", tmp_path / "run" / "step_00000005")
    sharded = [*words(tmp_path / "run", 2, 4, **SHARDED), *STAGES]
    texts = run(tmp_path, [sharded] * 2 if processes == 2 else [words(tmp_path / "run", 1, 4)])
    assert "continues from" in texts[0] and "(step 5)" in texts[0]
    assert_same_run(tmp_path / "run", single, 1e-5)


def kill(folder: Path, rank: int, started: list[Process]) -> list[str]:
    """Kill one of three processes in the middle of a run and return what they printed."""
    command = words(folder / "run", 3, 3, steps=MANY)
    processes = start(folder, [command] * 3)
    started += processes
    wait_until((folder / "run" / "step_00000020").exists, processes)
    processes[rank].kill()
    texts = end(processes, 60)
    codes = [5, 5, 5]
    codes[rank] = -signal.SIGKILL
    assert [process.returncode for process in processes] == codes, texts
    assert not any("Traceback" in text for text in texts)
    return texts


def test_kill_9_of_a_process_ends_the_run_and_the_same_command_continues(tmp_path, started):
    texts = kill(tmp_path, 2, started)
    # A process that hears of it from another may name that one; the first does not.
    assert any("rank 2 is gone" in text for text in texts)
    folder = tmp_path / "run"
    stopped_at = last_saved(folder)
    assert 20 <= stopped_at < MANY
    processes = start(tmp_path, [words(folder, 3, 3, steps=MANY)] * 3)
    started += processes
    wait_until((folder / f"step_{stopped_at + 5:08d}").exists, processes)
    for process in processes:
        process.kill()
    assert f"(step {stopped_at})" in end(processes)[0]
    steps = [row["step"] for row in metrics(folder)]
    assert steps[: stopped_at + 5] == list(range(1, stopped_at + 6))


def test_kill_9_of_the_process_that_coordinates_the_others_ends_the_run_too(tmp_path, started):
    assert any("rank 0 is gone" in text for text in kill(tmp_path, 0, started))


def test_sigterm_to_any_rank_saves_one_checkpoint_and_ends_all(tmp_path, started):
    flags = {"checkpoint_every_steps": 100_000, **SHARDED}
    # Steps of seconds: the request is checked between micro-batches.
    processes = start(tmp_path, [words(tmp_path / "run", 2, 4000, steps=1000, **flags)] * 2)
    started += processes
    wait_until(lambda: "traced in" in processes[0].log.read_text(), processes)
    time.sleep(0.5)
    processes[1].send_signal(signal.SIGTERM)
    requested = time.monotonic()
    texts = end(processes)
    assert time.monotonic() - requested < 30
    assert [process.returncode for process in processes] == [0, 0], texts
    assert "stopped at step" in texts[0]
    (checkpoint,) = complete_checkpoints(tmp_path / "run")
    assert (checkpoint / OPTIMIZER).is_file()
    assert not list((tmp_path / "run").glob(".partial*"))


def test_one_host_listens_on_loopback_and_the_watchdog_names_a_rank_that_hangs(tmp_path, started):
    flags = {"cluster__report_waiting_after_seconds": 1, "cluster__lost_after_seconds": 60}
    folder = tmp_path / "run"
    processes = start(tmp_path, [words(folder, 2, 2, steps=100_000, **flags)] * 2)
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
    processes[1].send_signal(signal.SIGCONT)
    for process in processes:
        process.send_signal(signal.SIGTERM)
    end(processes)
    # A slow process is not lost.
    assert [process.returncode for process in processes] == [0, 0]


def test_a_rank_with_other_settings_is_named(tmp_path, started):
    folder = tmp_path / "run"
    processes = start(tmp_path, [words(folder, 2, 2), words(folder, 2, 2, seed=7)])
    started += processes
    texts = end(processes)
    assert [process.returncode for process in processes] == [2, 2]
    assert all("rank 1: was started with other settings" in text for text in texts)


def test_replicas_that_cannot_be_divided_are_an_error_before_any_process_waits(tmp_path, started):
    processes = start(tmp_path, [words(tmp_path / "run", 3, 3)] * 2)
    started += processes
    texts = end(processes, 60)
    assert [process.returncode for process in processes] == [2, 2]
    assert all("cannot be divided among 2 processes" in text for text in texts)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_process_whose_others_never_start_names_them_and_can_be_stopped(
    number, tmp_path, started
):
    folder, flags = tmp_path / "run", {"cluster__report_waiting_after_seconds": 1}
    (process,) = start(tmp_path, [words(folder, 2, 2, **flags)], size=2)
    started.append(process)
    wait_until(lambda: "to start" in process.log.read_text(), [process])
    process.send_signal(number)
    (text,) = end([process], 10)
    assert process.returncode == 0, text
    assert re.search(r"cluster: rank 0 \(127\.0\.0\.1:\d+\) has waited \d+ s for rank 1 \(", text)
    assert "stopped before all processes had started; nothing was done" in text
    assert not folder.exists()
