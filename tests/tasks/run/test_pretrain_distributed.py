"""The script that chains the phases and SQuAD: it goes on where it was, never past a phase that is not done."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.tiny_models import PIECES, write_model, write_questions

from bert_cli.train.checkpoint import read_state, whole_checkpoints

SCRIPT = Path(__file__).parents[2] / "scripts" / "pretrain_distributed.sh"
STEPS = 200
FLAGS = {
    "generated-dataset": "",
    "bert-config.vocab-size": len(PIECES),
    "bert-config.hidden-size": 16,
    "bert-config.num-attention-heads": 2,
    "bert-config.intermediate-size": 32,
    "global-batch.grad-acc-steps-per-replica": 1,
    "total-num-train-samples": 2 * STEPS,
}


@pytest.fixture(scope="module")
def squad(tmp_path_factory) -> Path:
    """Questions, and the tokenizer that made-up examples do not leave in a checkpoint."""
    folder = tmp_path_factory.mktemp("squad")
    write_model(folder / "model")
    write_questions(folder / "train-v1.1.json", 16, 1)
    write_questions(folder / "dev-v1.1.json", 8, 2)
    return folder


def start(runs: Path, squad: Path, **more: str) -> subprocess.Popen:
    extra = " ".join(f"--{name} {value}" for name, value in FLAGS.items())
    fine = f"--dataset-dir {squad} --tokenizer-path {squad / 'model'} --cache-dir {squad} --num-epochs 1"
    given = {
        "MODEL": "tiny",
        "RUNS": str(runs),
        "EXTRA": extra,
        "SQUAD_EXTRA": fine,
        "DATASETS_DIR": "/nowhere",
    }
    alone = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    return subprocess.Popen(
        [SCRIPT],
        env={**alone, **given, "PYTHON": sys.executable, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def step_of(run: Path) -> int:
    return read_state(whole_checkpoints(run)[-1]).step


def test_the_script_stops_in_a_phase_goes_on_with_it_and_passes_those_that_are_done(
    tmp_path, squad
):
    first, second = tmp_path / "tiny_128_phase1", tmp_path / "tiny_384_phase2"

    with start(tmp_path, squad) as stopped:
        for line in stopped.stdout:
            if line.startswith("[0] step ") and first.is_dir() and second.is_dir():
                stopped.send_signal(signal.SIGTERM)
                break
        told = stopped.stdout.read()
    assert stopped.returncode == 130, told
    assert told.splitlines()[-1].startswith(f"pretrain_distributed: {second} is stopped")
    assert step_of(first) == STEPS and 0 < step_of(second) < STEPS

    with start(tmp_path, squad) as again:
        told = again.stdout.read()
    assert again.returncode == 0, told
    assert f"all {STEPS} steps are done; nothing to do" in told and "continues from" in told
    assert step_of(second) == STEPS
    assert step_of(tmp_path / "tiny_squad") == 1
    scores = json.loads((tmp_path / "tiny_squad" / "scores.json").read_text())
    assert f"[0] {json.dumps(scores)}" in told


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"MODEL": "huge"}, "pretrain_huge_128_phase1"),
        ({"EXTRA": "--seeed 1"}, "did you mean '--seed'?"),
        ({"PROCESSES": "0"}, "processes (--processes)"),
    ],
)
def test_a_mistake_ends_the_script_with_the_code_of_the_command(given, told, tmp_path, squad):
    with start(tmp_path, squad, **given) as wrong:
        text = wrong.stdout.read()
    assert wrong.returncode == 2 and told in text, text
    assert not any(tmp_path.iterdir())
