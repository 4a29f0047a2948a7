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
    text, sentences, vocab = (folder / name for name in ("text", "sentences", "vocab"))
    recipe = ["--sequence-length", 32, "--mask-tokens", 8, "--masking", "dynamic", "--no-nsp"]
    for words in (
        ["extract", SAMPLE, text],
        ["preprocess", text, sentences, "--sentence-splitter", "sentencex"],
        ["vocab", sentences, vocab, "--size", 1024],
        ["tokenize", sentences, folder / "records", "--vocab", vocab, *recipe],
    ):
        assert main([*map(str, words)]) == 0
    return folder / "records"


def shuffled_labels(columns, draw):
    """The labels of a batch, in another order."""
    is_label = columns["masked_lm_weights"] > 0
    columns["masked_lm_ids"][is_label] = draw.permutation(columns["masked_lm_ids"][is_label])


@pytest.mark.parametrize("name", ["healthy", "shuffled_labels", "rate_of_ten"])
def test_a_run_with_a_fault_has_a_warning_and_a_healthy_one_has_none(
    name, records, tmp_path, monkeypatch, capsys
):
    draw, masked = np.random.default_rng(1), source.mask_examples

    def mask(*arguments):
        columns = masked(*arguments)
        if name == "shuffled_labels":
            shuffled_labels(columns, draw)
        return columns

    monkeypatch.setattr(source, "mask_examples", mask)
    monkeypatch.setattr(health, "TOKENS", TOKENS)
    rate = {"optimizer-opts.learning-rate.max-learning-rate": 10.0} if name == "rate_of_ten" else {}
    folders = {"dataset-dir": records, "save-ckpt-path": tmp_path}
    assert main(["pretrain", *flags_of(FLAGS | folders | rate)]) == 0
    printed = [line for line in capsys.readouterr().out.splitlines() if "masked-LM loss" in line]
    warning = health.warning_of(Run(tmp_path))
    if name == "healthy":
        rows = metrics_of(tmp_path)
        assert printed == [] and warning is None
        loss = np.mean([row["mlm_loss"] for row in rows[-STEPS:]])
        assert loss < rows[-1]["unigram_entropy"] - 5 * MARGIN
    else:
        assert len(printed) == 1 and "is not below the unigram entropy" in printed[0]
        assert "is not below the unigram entropy" in str(warning)
