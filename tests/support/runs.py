"""The contract of every command that trains: an interrupted run ends with the bytes of an uninterrupted run."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.tiny_models import metrics_of

from bert_cli.cli import main
from bert_cli.files import STATE
from bert_cli.train.card import CARD
from bert_cli.train.checkpoint import MODEL, OPTIMIZER, complete_checkpoints, step_of

TIMES = {
    "examples_per_second", "tokens_per_second", "seconds_per_step", "seconds_left", "seconds_waited"
}  # fmt: skip


def run_command(words: list[str]) -> int:
    """Run a command line: with JAX in a process of its own, because a process has one engine."""
    if "jax" not in words:
        return main(words)
    return subprocess.run([sys.executable, "-m", "bert_cli", *words], check=False).returncode


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def numbers_of(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run, without those that depend on the clock."""
    return [{name: row[name] for name in row.keys() - TIMES} for row in metrics_of(run)]


def assert_same_end(run: Path, expected: Path) -> None:
    """Assert that the newest checkpoints of two runs have the same step, weights, moments, card, loss scale."""
    ours, theirs = (complete_checkpoints(folder)[-1] for folder in (run, expected))
    assert ours.name == theirs.name
    for file in (MODEL, OPTIMIZER, CARD):
        assert (ours / file).read_bytes() == (theirs / file).read_bytes(), file
    scales = [json.loads((path / STATE).read_text())["loss_scale"] for path in (ours, theirs)]
    assert scales[0] == scales[1]


def continues_bit_for_bit(complete: Path, train: Callable[[Path], int], *steps: int) -> Path:
    """Assert that a run continues from each of these steps to the bytes and metrics of the complete run.

    `train` starts the command in another folder. Return the folder of the last continued run.
    """
    for step in steps:
        again = complete.with_name(f"{complete.name}_from_{step}")
        shutil.copytree(complete, again, ignore=shutil.ignore_patterns("best.json", "scores.json"))
        for folder in complete_checkpoints(again):
            if step_of(folder) > step:
                shutil.rmtree(folder)
        assert train(again) == 0
        assert_same_end(again, complete)
        assert numbers_of(again) == numbers_of(complete)
    return again
