"""One run in several processes: the same numbers, and what happens when one is lost, stopped or slow."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from bert_cli.train.checkpoint import MODEL, OPTIMIZER, STATE, whole_checkpoints

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


STARTED: list[subprocess.Popen] = []


@pytest.fixture(autouse=True)
def nobody_is_left():
    """End what a failed test has left running."""
    yield
    for process in STARTED:
        process.kill()
        process.wait()
    STARTED.clear()


def start(commands: list[list[str]]) -> list[subprocess.Popen]:
    """A process for each command, which are the ranks of one cluster; one alone has no cluster.

    Each writes to a file, which can be read as its `told`.
    """
    held = [socket.socket() for _ in commands]
    for one in held:
        one.bind(("localhost", 0))
    workers = [f"localhost:{one.getsockname()[1]}" for one in held]
    for one in held:
        one.close()
    processes = []
    for rank, command in enumerate(commands):
        environment = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
        if len(commands) > 1:
            task = {"type": "worker", "index": rank}
            environment["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
        with tempfile.NamedTemporaryFile("w", delete=False) as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "bert_cli", *command],
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        process.told, process.port = Path(file.name), int(workers[rank].rpartition(":")[2])
        processes.append(process)
    STARTED.extend(processes)
    return processes


def end(processes: list[subprocess.Popen], seconds: float = 120.0) -> list[str]:
    """What each wrote, when all have ended."""
    until = time.monotonic() + seconds
    told = []
    for process in processes:
        process.wait(timeout=until - time.monotonic())
        told.append(process.told.read_text())
        process.told.unlink()
    return told


def run(commands: list[list[str]]) -> list[str]:
    processes = start(commands)
    told = end(processes)
    for process, text in zip(processes, told, strict=True):
        assert process.returncode == 0, text
    return told


def wait_for(path: Path, processes: list[subprocess.Popen], seconds: float = 90.0) -> None:
    until = time.monotonic() + seconds
    while not path.exists():
        for process in processes:
            assert process.poll() is None, process.told.read_text()
        assert time.monotonic() < until, f"{path} did not come"
        time.sleep(0.02)


def tensors(folder: Path) -> dict[str, np.ndarray]:
    """Weights and moments of the newest checkpoint of a run."""
    newest = whole_checkpoints(folder)[-1]
    return {**load_file(newest / MODEL), **load_file(newest / OPTIMIZER)}


def step_of(folder: Path) -> int:
    return json.loads((whole_checkpoints(folder)[-1] / STATE).read_text())["step"]


def assert_same_run(a: Path, b: Path, tolerance: float) -> None:
    """Same weights and moments, each relative to its norm; but see `assert_weights_close` of the layouts."""
    assert step_of(a) == step_of(b)
    left, right = tensors(a), tensors(b)
    assert left.keys() == right.keys()
    for name, value in right.items():
        if "key/bias" in name or "key.bias" in name:
            assert np.abs(left[name] - value).max() <= 2 * STEPS * 0.01
            continue
        assert np.linalg.norm(left[name] - value) <= tolerance * np.linalg.norm(value), name


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run on one device, with a checkpoint at steps 5 and 10."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    run([words(folder, 1, 4)])
    return folder


@pytest.fixture(scope="module")
def spread(tmp_path_factory):
    """The same in two processes of two stages each, each with half of the moments."""
    folder = tmp_path_factory.mktemp("spread") / "run"
    flags = {"parallel__replicated_tensor_sharding": None}
    command = [*words(folder, 2, 4, **flags), *STAGES]
    return folder, run([command, command])


def test_two_processes_of_two_stages_train_the_model_of_one_device(alone, spread):
    assert_same_run(spread[0], alone, 1e-5)
    lines = [
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (spread[0], alone)
    ]
    assert [len(found) for found in lines] == [STEPS, STEPS]
    for here, there in zip(*lines, strict=True):
        assert here["mlm_loss"] == pytest.approx(there["mlm_loss"], rel=1e-5)
        assert here["tokens"] == there["tokens"]


def test_two_processes_of_two_replicas_that_compute_again_are_one_device_too(alone, tmp_path):
    """Four replicas with a micro-batch each."""
    command = [*words(tmp_path / "run", 4, 4, parallel__recompute=None), *STAGES]
    run([command, command])
    assert_same_run(tmp_path / "run", alone, 1e-5)


def test_one_rank_speaks_and_writes(spread):
    folder, (first, second) = spread
    assert "2 processes, as TF_CONFIG says" in first and f"step {STEPS}/{STEPS}" in first
    assert second == ""
    assert [path.name for path in whole_checkpoints(folder)] == ["step_00000005", "step_00000010"]


@pytest.mark.parametrize("there", ["alone to spread", "spread to alone"])
def test_a_checkpoint_of_one_layout_continues_in_another(there, alone, spread, tmp_path):
    source = alone if there.startswith("alone") else spread[0]
    folder = tmp_path / "run"
    folder.mkdir()
    subprocess.run(["cp", "-r", source / "step_00000005", folder], check=True)
    if there.endswith("alone"):
        told = run([words(folder, 1, 4)])
    else:
        command = [*words(folder, 2, 4), *STAGES]
        told = run([command, command])
    assert "continues from" in told[0] and "(step 5)" in told[0]
    assert_same_run(folder, alone, 1e-5)


def killed(folder: Path, rank: int) -> list[str]:
    """What three processes said of which one was killed in the middle of a run."""
    processes = start([words(folder, 3, 3, steps=MANY)] * 3)
    wait_for(folder / "step_00000020", processes)
    processes[rank].kill()
    began = time.monotonic()
    told = end(processes, 60)
    assert time.monotonic() - began < 60
    codes = [5, 5, 5]
    codes[rank] = -signal.SIGKILL
    assert [process.returncode for process in processes] == codes, told
    assert not any("Traceback" in text for text in told)
    return told


def test_a_process_killed_ends_the_run_on_all_and_the_same_command_continues(tmp_path):
    folder = tmp_path / "run"
    told = killed(folder, 2)
    # Who hears of it from another process may blame that one; the first to hear does not.
    assert any("rank 2 is gone" in text for text in told)
    stopped_at = step_of(folder)
    assert 20 <= stopped_at < MANY
    processes = start([words(folder, 3, 3, steps=MANY)] * 3)
    wait_for(folder / f"step_{stopped_at + 5:08d}", processes)
    for process in processes:
        process.kill()
    said = end(processes)[0]
    assert f"(step {stopped_at})" in said
    steps = [
        json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps[: stopped_at + 5] == list(range(1, stopped_at + 6))


def test_the_process_that_keeps_the_cluster_killed_ends_the_run_too(tmp_path):
    told = killed(tmp_path / "run", 0)
    assert any("rank 0 is gone" in text for text in told)


def test_sigterm_to_any_rank_saves_one_checkpoint_and_all_leave_well(tmp_path):
    folder = tmp_path / "run"
    flags = {"checkpoint_every_steps": 100_000, "parallel__replicated_tensor_sharding": None}
    # Steps of seconds: the wish is heard between micro-batches.
    command = words(folder, 2, 4000, steps=1000, **flags)
    processes = start([command] * 2)
    wait_for(folder / "settings.json", processes)
    time.sleep(8)
    processes[1].send_signal(signal.SIGTERM)
    asked = time.monotonic()
    told = end(processes)
    assert time.monotonic() - asked < 30
    assert [process.returncode for process in processes] == [0, 0], told
    assert "stopped at step" in told[0]
    (checkpoint,) = whole_checkpoints(folder)
    assert (checkpoint / OPTIMIZER).is_file()
    assert not list(folder.glob(".partial*"))


def addresses_outside() -> list[str]:
    """Addresses of this host on interfaces that are not loopback."""
    found = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=True).stdout
    return found.split()


def test_one_host_listens_on_loopback_and_the_watchdog_says_for_whom_the_others_wait(tmp_path):
    folder = tmp_path / "run"
    flags = {"cluster__report_waiting_after_seconds": 2, "cluster__lost_after_seconds": 60}
    processes = start([words(folder, 2, 2, steps=100_000, **flags)] * 2)
    wait_for(folder / "metrics.jsonl", processes)
    for process in processes:
        socket.create_connection(("127.0.0.1", process.port), timeout=5).close()
        for address in addresses_outside():
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((address, process.port), timeout=5)
    # What it does it tells once a second: stopped sooner, the others know of no step of its.
    time.sleep(3)
    processes[1].send_signal(signal.SIGSTOP)
    time.sleep(7)
    processes[1].send_signal(signal.SIGCONT)
    for process in processes:
        process.send_signal(signal.SIGTERM)
    told = end(processes)
    assert "rank 0 has waited 2 s for rank 1 (step " in told[0]
    # Slow is not lost.
    assert [process.returncode for process in processes] == [0, 0]


def test_a_rank_started_with_other_settings_is_refused_by_name(tmp_path):
    folder = tmp_path / "run"
    processes = start([words(folder, 2, 2), words(folder, 2, 2, seed=7)])
    told = end(processes)
    assert [process.returncode for process in processes] == [2, 2]
    assert all("rank 1: was started with other settings" in text for text in told)


def test_replicas_that_cannot_be_divided_are_refused_before_anyone_waits(tmp_path):
    processes = start([words(tmp_path / "run", 3, 3)] * 2)
    told = end(processes, 60)
    assert [process.returncode for process in processes] == [2, 2]
    assert all("cannot be divided among 2 processes" in text for text in told)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_whose_peers_never_come_says_so_and_can_be_stopped(number, tmp_path):
    folder, waits = tmp_path / "run", {"cluster__report_waiting_after_seconds": 1}
    alone, other = start([words(folder, 2, 2, **waits), ["--version"]])
    other.wait(60)
    until = time.monotonic() + 60
    while "to start" not in alone.told.read_text():
        assert alone.poll() is None and time.monotonic() < until, alone.told.read_text()
        time.sleep(0.1)
    alone.send_signal(number)
    told = end([alone], 10)[0]
    assert alone.returncode == 0, told
    assert re.search(r"cluster: rank 0 \(127\.0\.0\.1:\d+\) has waited \d+ s for rank 1 \(", told)
    assert "stopped before all processes had come; nothing was done" in told
    assert not folder.exists()
