"""The contract of a task beyond its engine: in every layout a run is that of one device, and continues bit for bit."""

import json
from functools import cache

import numpy as np
import pytest
import tensorflow  # noqa: F401 (before conftest.py cuts the CPU into devices)
from support.metrics import scores_of
from support.runs import continues_bit_for_bit, run_command
from support.tiny_models import OTHERS, metrics_of, write_base
from support.vectors import FLAGS, write_home, write_teachers

from bert_cli.cli import main

pytestmark = pytest.mark.slow

HELD_OUT = "--held-out-fraction 0.2"  # few rows would be tested in folds, each a training
# Command and data -> a change of a setting, and how the message names it. In a folder of `home`.
TASKS = {
    "embed --train-file pairs.tsv": ("--temperature 0.2", "temperature was 0.05, is 0.2"),
    "embed --train-file pairs.tsv --text-column anchor,positive --distillation.teacher wide": (
        "--pooling cls", "pooling was mean, is cls"
    ),
    "classify --train-file train.csv --distillation.teacher teacher --distillation.temperature 3 "
    f"--distillation.unlabelled-file dev.csv {HELD_OUT}": ("--distillation.temperature 2", "temperature 3.0"),
    f"classify --train-file posts.jsonl --class-weights balanced --max-seq-length 8 --doc-stride 4 {HELD_OUT}": (
        "--class-weights null", "class_weights was balanced, is None"
    ),
}  # fmt: skip
PAIRS, *OTHER_TASKS = TASKS
HEADS = {"embed": '"mean_pool","embed_head"', "classify": '"pool","glue_head"'}
STAGES = '[["emb","hid"],["hid",{}]]'
LAYOUTS = {
    "2 replicas": ["--global-batch.replicas", "2"],
    "2 processes": ["--global-batch.replicas", "2"],
    "float16": ["--precision", "mixed_float16", "--optimizer-opts.loss-scaling", "1024"],
    "stages": [
        "--parallel.pipeline-device-mapping", "[0,1]", "--parallel.recompute", "--global-batch.replicas", "2"
    ],
    "jax": ["--engine", "jax", "--global-batch.replicas", "2"],
}  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Models, pairs, reviews with their teacher, and texts with several labels."""
    home = write_teachers(write_home(tmp_path_factory.mktemp("contract")))
    write_base(home / "reviews", train=96, dev=41)
    for name in ("train.csv", "dev.csv"):
        (home / "reviews" / name).rename(home / name)
    words = ["classify", "--train-file", home / "train.csv", "--pretrained-ckpt-path"]
    words += [home / "reviews/model", "--save-ckpt-path", home / "teacher", "--num-epochs", 1]
    words += HELD_OUT.split()
    assert main([*map(str, words), *FLAGS]) == 0
    draw = np.random.default_rng(3)
    rows = [
        {"text": " ".join(draw.choice(OTHERS, 14)), "label": [f"{n % 2}", *["rare"] * (n % 9 == 0)]}
        for n in range(90)
    ]
    (home / "posts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return home


@pytest.fixture(scope="module")
def train(home):
    """A function that trains four steps of 16 rows in micro-batches of 4, in a layout; it returns the exit code."""

    def train_task(task, run, layout="", change=""):
        command, *words = f"{task} --pretrained-ckpt-path model {change}".split()
        words += ["--save-ckpt-path", str(run), "--cache-dir", "null", "--keep-checkpoints", "9"]
        words += ["--total-num-train-samples", "64", "--checkpoint-every-steps", "2"]
        flags = [*LAYOUTS.get(layout, [])]
        if layout == "stages":
            flags += ["--parallel.pipeline-stages", STAGES.format(HEADS[command])]
        accumulation = 2 if "--global-batch.replicas" in flags else 4
        flags += ["--global-batch.grad-acc-steps-per-replica", str(accumulation)]
        flags += ["--global-batch.micro-batch-size", "4"]
        words = [command, *FLAGS, *words, *flags]
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(home)
            if layout == "2 processes":
                return main(["launch", "--processes", "2", "--", *words])
            return run_command(words)

    return train_task


@pytest.fixture(scope="module")
def complete(home, train):
    """A function that trains a task on one device, once, and returns its folder."""

    @cache
    def complete_run(task):
        run = home / f"complete{list(TASKS).index(task)}"
        assert train(task, run) == 0
        return run

    return complete_run


@pytest.mark.parametrize(
    ("task", "layout"),
    [
        *((PAIRS, layout) for layout in LAYOUTS),
        *((task, layout) for task in OTHER_TASKS for layout in ("stages", "jax")),
    ],
)
def test_a_run_has_the_same_numbers_in_every_layout(task, layout, train, complete, tmp_path):
    assert train(task, tmp_path / "run", layout) == 0
    within = 0.02 if layout == "float16" else 1e-5
    expected = complete(task)
    for mine, other in zip(metrics_of(tmp_path / "run"), metrics_of(expected), strict=True):
        assert mine.keys() == other.keys() and "loss" in mine
        for metric in ("loss", "gradient_norm", "weight_norm"):
            assert mine[metric] == pytest.approx(other[metric], rel=within), metric
        accuracies = [metrics.get("accuracy", 0.0) for metrics in (mine, other)]
        assert layout == "float16" or accuracies[0] == pytest.approx(accuracies[1], rel=1e-5)
    if layout != "float16":
        assert scores_of(tmp_path / "run") == pytest.approx(scores_of(expected), abs=1e-6)


@pytest.mark.parametrize("task", TASKS)
def test_a_stopped_run_continues_bit_for_bit_and_not_with_another_setting(
    task, train, complete, capsys
):
    run = continues_bit_for_bit(complete(task), lambda run: train(task, run), 2)
    change, message = TASKS[task]
    assert train(task, run, change=change) == 4
    assert message in capsys.readouterr().err
