"""The script that runs the phases and SQuAD continues where it was, and stops at an unfinished phase."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.tiny_models import PIECES, write_model, write_questions

from bert_cli.train.checkpoint import complete_checkpoints, read_state

SCRIPT = Path(__file__).parents[3] / "scripts" / "pretrain_distributed.sh"
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
    """Questions, and the tokenizer that a run on synthetic examples does not save."""
    folder = tmp_path_factory.mktemp("squad")
    write_model(folder / "model")
    write_questions(folder / "train-v1.1.json", 16, 1)
    write_questions(folder / "dev-v1.1.json", 8, 2)
    return folder


def start(runs: Path, squad: Path, **more: str) -> subprocess.Popen:
    extra = " ".join(f"--{name} {value}" for name, value in FLAGS.items())
    fine = f"--dataset-dir {squad} --tokenizer-path {squad / 'model'} --cache-dir {squad} --num-epochs 1"
    variables = {
        "MODEL": "tiny",
        "RUNS": str(runs),
        "EXTRA": extra,
        "SQUAD_EXTRA": fine,
        "DATASETS_DIR": "/nowhere",
    }
    alone = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    return subprocess.Popen(
        [SCRIPT],
        env={**alone, **variables, "PYTHON": sys.executable, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def step_of(run: Path) -> int:
    return read_state(complete_checkpoints(run)[-1]).step


def test_the_script_stops_in_a_phase_and_then_continues_it_and_skips_finished_ones(tmp_path, squad):
    first, second = tmp_path / "tiny_128_phase1", tmp_path / "tiny_384_phase2"

    with start(tmp_path, squad) as stopped:
        for line in stopped.stdout:
            if line.startswith("[0] step ") and first.is_dir() and second.is_dir():
                stopped.send_signal(signal.SIGTERM)
                break
        text = stopped.stdout.read()
    assert stopped.returncode == 130, text
    assert text.splitlines()[-1].startswith(f"pretrain_distributed: {second} is stopped")
    assert step_of(first) == STEPS and 0 < step_of(second) < STEPS

    with start(tmp_path, squad) as again:
        text = again.stdout.read()
    assert again.returncode == 0, text
    assert f"all {STEPS} steps are done; nothing to do" in text and "continues from" in text
    assert step_of(second) == STEPS
    assert step_of(tmp_path / "tiny_squad") == 1
    scores = json.loads((tmp_path / "tiny_squad" / "scores.json").read_text())
    assert f"[0] {json.dumps(scores)}" in text


def test_a_mistake_ends_the_script_with_the_code_of_the_command(tmp_path, squad):
    with start(tmp_path, squad, EXTRA="--seeed 1") as wrong:
        text = wrong.stdout.read()
    assert wrong.returncode == 2 and "did you mean '--seed'?" in text, text
    assert not any(tmp_path.iterdir())
