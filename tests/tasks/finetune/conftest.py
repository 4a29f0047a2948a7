"""What the tests of fine-tuning share: models and files of vectors, runs in other layouts, another tokenizer."""

import os
import subprocess
import sys

import pytest
from support.metrics import scores_of
from support.runs import run_command
from support.tiny_models import PIECES, metrics_of
from support.vectors import LAYOUTS, pairs, write_home

from bert_cli.cli import main
from bert_cli.data.tokens.tokenizer import Normalization, read_tokenizer, write_vocabulary


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    """A folder of `write_home`."""
    return write_home(tmp_path_factory.mktemp("embed"))


@pytest.fixture
def is_equal_in_every_layout(tmp_path):
    """Asserts that a command has the metrics and scores of a run with replicas, in stages and with JAX."""

    def check(words, expected, head='"pool","glue_head"', within=1e-5):
        stages = f'[["emb"],["hid"],[{head}]]'
        for name, flags in (
            ("replicas", ["--global-batch.replicas", "2", "--global-batch.grad-acc-steps-per-replica", "1"]),
            ("stages", ["--parallel.pipeline-stages", stages, "--parallel.pipeline-device-mapping", "[0,0,0]"]),
            ("jax", ["--engine", "jax"]),
        ):  # fmt: skip
            run = tmp_path / name
            assert run_command([*words, "--save-ckpt-path", str(run), *flags]) == 0
            for metric in ("loss", "accuracy"):
                ours, theirs = ([row[metric] for row in metrics_of(of)] for of in (run, expected))
                assert ours == pytest.approx(theirs, rel=within), (name, metric)
            assert scores_of(run) == pytest.approx(scores_of(expected), abs=1e-6), name

    return check


@pytest.fixture
def train_pairs(home):
    """Trains vectors on pairs in one of LAYOUTS, with 16 pairs a step in micro-batches of 4; returns the exit code."""

    def train(run, *more, layout=""):
        flags = LAYOUTS.get(layout, [])
        accumulation = 2 if "--global-batch.replicas" in flags else 4
        words = pairs(home, run, *more, *flags, micro_batch=4, accumulation=accumulation)
        if "processes" in layout:
            return main(["launch", "--processes", "2", "--", *words])
        if "jax" not in layout:
            return main(words)
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
        devices = {**os.environ, "XLA_FLAGS": flags}
        return subprocess.run([sys.executable, "-m", "bert_cli", *words], env=devices).returncode

    return train


@pytest.fixture
def larger_tokenizer(tmp_path):
    """The tokenizer of the tiny models with one more piece."""
    (tmp_path / "larger").mkdir()
    pieces = "".join(f"{piece}\n" for piece in [*PIECES, "more"])
    write_vocabulary(tmp_path / "larger", pieces.encode(), Normalization())
    return read_tokenizer(tmp_path / "larger")
