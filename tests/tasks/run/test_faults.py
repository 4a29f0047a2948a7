"""Runs with faults have a warning about their masked-LM loss, a healthy one does not."""

from pathlib import Path

import numpy as np
import pytest
import tensorflow  # noqa: F401 (before the end of the collection, which sets its devices)
from support.tiny_models import flags_of, metrics_of

from bert_cli.cli import main
from bert_cli.data.examples import source
from bert_cli.train import health
from bert_cli.train.health import MARGIN, STEPS
from bert_cli.train.history import Run

pytestmark = pytest.mark.slow
SAMPLE = next((Path(__file__).parents[3] / "data" / "sample").glob("*.bz2"))
FLAGS = {
    "max-seq-length": 32,
    "max-predictions-per-seq": 8,
    "bert-config.vocab-size": 1024,
    "bert-config.hidden-size": 64,
    "bert-config.num-hidden-layers": 2,
    "bert-config.num-attention-heads": 2,
    "bert-config.intermediate-size": 256,
    "bert-config.max-position-embeddings": 128,
    "bert-config.hidden-dropout-prob": 0.0,
    "bert-config.attention-probs-dropout-prob": 0.0,
    "global-batch.micro-batch-size": 64,
    "optimizer-opts.name": "AdamW",
    "optimizer-opts.beta-2": 0.98,
    "optimizer-opts.learning-rate.max-learning-rate": 3e-3,
    "optimizer-opts.learning-rate.warmup-frac": 0.05,
    "total-num-train-samples": 64 * 400,
    "log-every-steps": 200,
}
TOKENS = 5e5
"""Tokens after which a run is judged here: what healthy runs need, a quarter of `health.TOKENS`."""


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Return a folder with records of the sample."""
    folder = tmp_path_factory.mktemp("health")
    bert = lambda *words: main([*map(str, words)])  # noqa: E731
    assert bert("extract", SAMPLE, folder / "text") == 0
    sentences = folder / "sentences"
    assert bert("preprocess", folder / "text", sentences, "--sentence-splitter", "sentencex") == 0
    assert bert("vocab", sentences, folder / "vocab", "--size", 1024) == 0
    out = folder / "records"
    words = ("--vocab", folder / "vocab", "--sequence-length", 32, "--mask-tokens", 8)
    assert bert("tokenize", sentences, out, *words, "--masking", "dynamic", "--no-nsp") == 0
    return out


def shuffled_labels(columns, draw):
    """The labels of a batch, in another order."""
    is_label = columns["masked_lm_weights"] > 0
    columns["masked_lm_ids"][is_label] = draw.permutation(columns["masked_lm_ids"][is_label])


RATE = "optimizer_opts__learning_rate__max_learning_rate"
FAULTS = {
    # What is changed in the examples, and changed flags.
    "healthy": (None, {}),
    "shuffled_labels": (shuffled_labels, {}),
    "rate_of_ten": (None, {RATE: 10.0}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_run_with_a_fault_has_a_warning_and_a_healthy_one_has_none(
    name, records, tmp_path, monkeypatch, capsys
):
    spoil, changes = FAULTS[name]
    draw, masked = np.random.default_rng(1), source.mask_examples

    def mask(*arguments):
        columns = masked(*arguments)
        if spoil is not None:
            spoil(columns, draw)
        return columns

    monkeypatch.setattr(source, "mask_examples", mask)
    monkeypatch.setattr(health, "TOKENS", TOKENS)
    folder = tmp_path / name
    words = ["--dataset-dir", str(records), "--save-ckpt-path", str(folder)]
    assert main(["pretrain", *words, *flags_of(FLAGS, **changes)]) == 0
    printed = [line for line in capsys.readouterr().out.splitlines() if "masked-LM loss" in line]
    warning = health.warning_of(Run(folder))
    rows = metrics_of(folder)
    loss = np.mean([row["mlm_loss"] for row in rows[-STEPS:]])
    if name == "healthy":
        assert printed == [] and warning is None
        assert loss < rows[-1]["unigram_entropy"] - 5 * MARGIN
    else:
        assert len(printed) == 1 and "is not below the unigram entropy" in printed[0]
        assert "is not below the unigram entropy" in str(warning)
