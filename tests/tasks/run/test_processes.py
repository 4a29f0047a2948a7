"""One run in several processes, of which one is lost, stopped or slow; several runs by a script."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow  # noqa: F401 (before the end of the collection, which sets its devices)
from safetensors.numpy import load_file
from support.bert import Process, start_bert
from support.processes import wait_for
from support.tiny_models import PIECES, TINY_RUN, flags_of, metrics_of, write_model, write_questions

from bert_cli.cli import main
from bert_cli.train.checkpoint import MODEL, OPTIMIZER, Saved, complete_checkpoints

STEPS = 6
MANY = 400
FLAGS = {
    **TINY_RUN,
    "bert-config.initializer-range": 0.2,
    "cluster.lost-after-seconds": 10,
    "checkpoint-every-steps": 2,
}
SHARDED = {"parallel__replicated_tensor_sharding": None}
JAX = {"engine": "jax", "parallel__shard_weights": None}
STAGES = {
    "parallel__pipeline_stages": '[["emb"], ["hid"], ["enc_out", "pool", "heads"]]',
    "parallel__pipeline_device_mapping": "[0, 1, 0]",
}


def words(folder: Path, replicas: int, micro: int, steps: int = STEPS, **flags) -> list[str]:
    """The command line of a small run with so many micro-batches a step over all replicas."""
    batch = {
        "global-batch.replicas": replicas,
        "global-batch.grad-acc-steps-per-replica": micro // replicas,
        "total-num-train-samples": 2 * micro * steps,
    }
    return ["pretrain", "--save-ckpt-path", str(folder), *flags_of({**FLAGS, **batch}, **flags)]


@pytest.fixture
def start(tmp_path):
    """Start a process for each command, the ranks of a process group; they end with the test.

    Their output is the text of their file `log`.
    """
    started: list[Process] = []

    def start_all(*commands: list[str]) -> list[Process]:
        with ExitStack() as stack:
            sockets = [socket.create_server(("localhost", 0)) for _ in commands]
            ports = [stack.enter_context(one).getsockname()[1] for one in sockets]
        cluster = {"worker": [f"localhost:{port}" for port in ports]}
        for rank, command in enumerate(commands):
            group = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})
            log = tmp_path / f"log{rank}"
            with log.open("w") as file:
                streams: dict[str, Any] = {"stdout": file, "stderr": subprocess.STDOUT}
                streams["env"] = os.environ | {"TF_CONFIG": group}
                if "jax" in command:  # the server of `start_bert` has imported TensorFlow's Keras
                    words = [sys.executable, "-m", "bert_cli", *command]
                    process: Any = subprocess.Popen(words, **streams)
                else:
                    process = start_bert(*command, **streams)
            process.log, process.port = log, ports[rank]
            started.append(process)
        return started

    yield start_all
    for process in started:
        process.kill()
        process.wait()


def end(processes: list[Process]) -> tuple[list[int], list[str]]:
    codes = [process.wait() for process in processes]
    return codes, [process.log.read_text() for process in processes]


def step_of(run: Path) -> int:
    return Saved(complete_checkpoints(run)[-1]).state.step


def assert_same_run(a: Path, b: Path) -> None:
    """Same weights and moments, each relative to its norm; the bias of a key wanders."""
    newest = [complete_checkpoints(folder)[-1] for folder in (a, b)]
    assert newest[0].name == newest[1].name
    left, right = ({**load_file(one / MODEL), **load_file(one / OPTIMIZER)} for one in newest)
    assert left.keys() == right.keys()
    for name, value in right.items():
        if "key/bias" in name or "key.bias" in name:
            assert np.abs(left[name] - value).max() <= 2 * STEPS * 0.01
        else:
            assert np.linalg.norm(left[name] - value) <= 1e-5 * np.linalg.norm(value), name


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    folder = tmp_path_factory.mktemp("single") / "run"
    assert main(words(folder, 1, 8)) == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "layout"),
    [(2, {**SHARDED, **STAGES}), (4, {**SHARDED, **STAGES}), (2, JAX)],
)
def test_a_run_continues_in_processes_and_back(replicas, layout, single, tmp_path, start, capsys):
    """Two processes with sharded values, of three stages or on JAX, and one device of TensorFlow."""
    group, back = tmp_path / "group", tmp_path / "back"
    shutil.copytree(single / "step_00000002", group / "step_00000002")
    command = words(group, replicas, 8, **layout)
    codes, (first, second) = end(start(command, command))
    assert codes == [0, 0], first
    assert_same_run(group, single)
    ours, theirs = metrics_of(group), metrics_of(single)[2:]
    assert len(ours) == len(theirs) == STEPS - 2
    for line, expected in zip(ours, theirs, strict=True):
        assert line["mlm_loss"] == pytest.approx(expected["mlm_loss"], rel=1e-5)
        assert line["tokens"] == expected["tokens"]
    # Only rank 0 prints and writes.
    assert "2 processes from TF_CONFIG" in first and f"step {STEPS}/{STEPS}" in first
    assert second == ""
    names = [path.name for path in complete_checkpoints(group)]
    assert names == [f"step_{step:08d}" for step in (2, 4, 6)]
    shutil.copytree(group / "step_00000004", back / "step_00000004")
    capsys.readouterr()
    assert main(words(back, 1, 8)) == 0
    for output, step in ((first, 2), (capsys.readouterr().out, 4)):
        assert "continues from" in output and f"(step {step})" in output
    assert_same_run(back, single)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "size", "layout"), [(0, 2, {}), (2, 3, {}), (0, 2, JAX)])
def test_kill_9_of_a_process_ends_a_run_that_continues(rank, size, layout, tmp_path, start, bert):
    """Rank 0 coordinates the others."""
    folder = tmp_path / "run"
    command = words(folder, size, size, steps=MANY, checkpoint_every_steps=5, **layout)
    processes = start(*[command] * size)
    wait_for((folder / "step_00000020").exists, processes)
    processes[rank].kill()
    codes, texts = end(processes)
    assert codes == [-signal.SIGKILL if number == rank else 5 for number in range(size)], texts
    assert not any("Traceback" in text for text in texts)
    # A process that hears of it from another may name that one; the first does not.
    assert any(f"cluster: rank {rank} (" in text for text in texts)
    stopped_at = step_of(folder)
    assert 20 <= stopped_at < MANY
    assert f"(step {stopped_at})" in bert(*words(folder, 1, size, steps=MANY), "--dry-run").out


@pytest.mark.slow
def test_a_process_that_hangs_is_named_and_sigterm_to_any_ends_all(tmp_path, start):
    flags = {"cluster__lost_after_seconds": 180}
    flags |= {"checkpoint_every_steps": 100_000, **SHARDED}
    folder = tmp_path / "run"
    # Steps of a part of a second: the request to stop is checked between micro-batches.
    processes = start(*[words(folder, 2, 100, steps=10_000, **flags)] * 2)
    wait_for((folder / "metrics.jsonl").exists, processes)
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
    wait_for(lambda: message.search(processes[0].log.read_text()), processes[:1])
    # A slow process is not lost.
    processes[1].send_signal(signal.SIGCONT)
    processes[1].send_signal(signal.SIGTERM)
    codes, texts = end(processes)
    assert codes == [0, 0], texts
    assert "stopped at step" in texts[0]
    (checkpoint,) = complete_checkpoints(folder)
    assert (checkpoint / OPTIMIZER).is_file()
    assert not list(folder.glob(".partial*"))


def test_processes_with_other_settings_are_an_error_of_all(tmp_path, start):
    commands = (words(tmp_path / "run", 2, 2, keep_checkpoints=number) for number in (3, 4))
    codes, texts = end(start(*commands))
    assert codes == [2, 2]
    assert all("rank 1: was started with other settings" in text for text in texts)


@pytest.mark.slow
def test_ranks_with_other_numbers_of_cores_train_the_same_weights(tmp_path, start):
    """On JAX, whose sums depend on the number of threads: rank 0 has one core."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs two cores")
    sizes = {"bert_config__hidden_size": 128, "bert_config__vocab_size": 8000, "engine": "jax"}
    command = words(tmp_path / "run", 2, 2, steps=4, **sizes)
    processes = start(command, command)
    os.sched_setaffinity(processes[0].pid, cores[:1])
    codes, (first, _) = end(processes)
    assert codes == [0, 0], first
    numbers = f"rank 0 has 1 core, others up to {len(cores)}"
    assert f"cluster: {numbers}; each rank computes with 1 thread" in first


# --- the script that runs the phases and SQuAD

SCRIPT = Path(__file__).parents[3] / "scripts" / "pretrain_distributed.sh"
PHASE_STEPS = 200
PHASE_FLAGS = {
    "generated-dataset": None, "total-num-train-samples": 2 * PHASE_STEPS, "global-batch.grad-acc-steps-per-replica": 1,
    "bert-config.vocab-size": len(PIECES), "bert-config.hidden-size": 16,
    "bert-config.num-attention-heads": 2, "bert-config.intermediate-size": 32,
}  # fmt: skip


def run_script(runs: Path, squad: Path, extra: str, stop_in: Path | None = None):
    """Run the script, with SIGTERM at a step of a run; return its exit code and what it printed."""
    fine = f"--dataset-dir {squad} --tokenizer-path {squad / 'model'} --cache-dir {squad} --num-epochs 1"
    variables = {"MODEL": "tiny", "RUNS": str(runs), "EXTRA": extra, "SQUAD_EXTRA": fine}
    variables |= {"DATASETS_DIR": "/nowhere", "PYTHON": sys.executable}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    lines = []
    with subprocess.Popen([SCRIPT], env=os.environ | variables, **streams) as process:
        for line in process.stdout:
            lines.append(line)
            if stop_in and line.startswith("[0] step ") and stop_in.is_dir():
                process.send_signal(signal.SIGTERM)
                stop_in = None
    return process.returncode, "".join(lines)


@pytest.mark.slow
def test_the_script_stops_in_a_phase_and_then_continues_it(tmp_path, tmp_path_factory):
    # Questions, and the tokenizer that a run on synthetic examples does not save.
    squad = tmp_path_factory.mktemp("squad")
    write_model(squad / "model")
    write_questions(squad / "train-v1.1.json", 16, 1)
    write_questions(squad / "dev-v1.1.json", 8, 2)
    first, second = tmp_path / "tiny_128_phase1", tmp_path / "tiny_384_phase2"
    extra = " ".join(flags_of(PHASE_FLAGS))
    code, text = run_script(tmp_path, squad, extra, stop_in=second)
    assert code == 130, text
    assert text.splitlines()[-1].startswith(f"pretrain_distributed: {second} is stopped")
    assert step_of(first) == PHASE_STEPS and 0 < step_of(second) < PHASE_STEPS
    code, text = run_script(tmp_path, squad, extra)
    assert code == 0, text
    assert f"all {PHASE_STEPS} steps are done; nothing to do" in text and "continues from" in text
    assert step_of(second) == PHASE_STEPS
    assert step_of(tmp_path / "tiny_squad") == 1
    scores = json.loads((tmp_path / "tiny_squad" / "scores.json").read_text())
    del scores["intervals"], scores["own_crc32c"]
    assert f"[0] {json.dumps(scores)}" in text


def test_a_mistake_ends_the_script_with_the_code_of_the_command(tmp_path):
    code, text = run_script(tmp_path, tmp_path, "--seeed 1")
    assert code == 2 and "did you mean '--seed'?" in text, text
    assert not any(tmp_path.iterdir())
