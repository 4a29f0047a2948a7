"""Runs with faults have a warning about their masked-LM loss, a healthy one does not; repeated text is found."""

import json
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
    "total-num-train-samples": 64 * 1400,
    "log-every-steps": 1000,
}


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Return folders of records of the sample: its articles, and its sentences each ten times in a line of its own."""
    folder = tmp_path_factory.mktemp("health")
    bert = lambda *words: main([*map(str, words)])  # noqa: E731
    assert bert("extract", SAMPLE, folder / "text") == 0
    sentences = folder / "sentences"
    assert bert("preprocess", folder / "text", sentences, "--sentence-splitter", "sentencex") == 0
    assert bert("vocab", sentences, folder / "vocab", "--size", 1024) == 0
    (folder / "tenfold").mkdir()
    for path in sentences.rglob("wiki*.txt"):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        repeated = "".join(line * 10 if line.strip() else line for line in lines)
        (folder / "tenfold" / path.name).write_text(repeated, encoding="utf-8")
    repeated = folder / "tenfold_sentences"
    assert bert("preprocess", folder / "tenfold", repeated, "--sentence-splitter", "sentencex") == 0
    for text, name, length, masked in ((sentences, "once", 32, 8), (repeated, "tenfold", 128, 20)):
        sizes = ("--sequence-length", length, "--mask-tokens", masked)
        out = folder / f"records_{name}"
        words = ("--vocab", folder / "vocab", *sizes, "--masking", "dynamic", "--no-nsp")
        assert bert("tokenize", text, out, *words) == 0 and bert("index", out) == 0
    return folder


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
    folder = tmp_path / name
    words = ["--dataset-dir", str(records / "records_once"), "--save-ckpt-path", str(folder)]
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


def test_doctor_finds_text_in_which_each_line_is_repeated_and_none_in_the_same_text_once(
    records, capsys
):
    for name, level, length, masked in (("once", "ok", 32, 8), ("tenfold", "warning", 128, 20)):
        flags = FLAGS | {"max-seq-length": length, "max-predictions-per-seq": masked}
        words = ["--dataset-dir", str(records / f"records_{name}"), "--no-build", *flags_of(flags)]
        main(["doctor", *words, "--save-ckpt-path", str(records / "run"), "--json", "-"])
        rows = json.loads(capsys.readouterr().out)["findings"]
        (finding,) = [row for row in rows if row["what"] == "repeated text"]
        assert finding["level"] == level, finding
