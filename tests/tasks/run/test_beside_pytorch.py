"""Pre-training and fine-tuning compared with PyTorch, by the functions of the scripts that compare them.

`scripts/parity` compares losses; here with fewer examples a step. `scripts/beside_pytorch` compares
scores; here without dropout, so that both sides reach the same ones.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.bert import run_bert
from support.command_lines import script
from support.tiny_models import OTHERS, write_model

ROOT = Path(__file__).parents[3]
MICRO_BATCH_SIZE = 4


@pytest.fixture(scope="module")
def parity():
    return script("parity")


@pytest.fixture(scope="module")
def records(parity, tmp_path_factory):
    def run(words, **_):
        done = run_bert(*words[3:])
        assert done.returncode == 0, done.stderr

    parity.subprocess = SimpleNamespace(run=run)
    return parity.make_records(tmp_path_factory.mktemp("sample"))


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "steps", "fall"), [("AdamW", 100, 1.0), ("LAMB", 30, 0.3)])
def test_the_losses_are_those_of_pytorch_at_every_step(optimizer, steps, fall, parity, records):
    ours, theirs = parity.compare(records, optimizer, steps, MICRO_BATCH_SIZE)
    assert ours.shape == theirs.shape == (steps,)
    assert np.abs(ours - theirs).max() <= parity.LIMIT
    assert ours[-5:].mean() < ours[0] - fall


def write_sentiment(folder, rows):
    folder.mkdir(parents=True)
    for name, seed in (("train", 1), ("dev", 2)):
        draw, text = np.random.default_rng(seed), "sentence\tlabel\n"
        for label in draw.integers(2, size=rows):
            words = draw.choice(OTHERS, draw.integers(4, 20))
            # Half of the examples show their label, so that both sides make mistakes to compare.
            words[0] = draw.choice([words[0], ("bad", "good")[label]])
            text += f"{' '.join(words)}\t{label}\n"
        (folder / f"{name}.tsv").write_text(text)


FLAGS = [
    "--max-seq-length", "64", "--global-batch.micro-batch-size", "8", "--bert-config.hidden-dropout-prob", "0",
    "--bert-config.attention-probs-dropout-prob", "0",
    "--optimizer-opts.learning-rate.max-learning-rate", "0.003", "--num-epochs", "3",
]  # fmt: skip


@pytest.mark.slow
def test_fine_tuning_without_dropout_reaches_the_scores_of_pytorch(tmp_path, monkeypatch, capsys):
    write_model(tmp_path / "model")
    write_sentiment(tmp_path / "glue" / "SST-2", 200)
    words = ["sst2", "--data", str(tmp_path / "glue"), "--model", str(tmp_path / "model")]
    words += ["--out", str(tmp_path / "out"), *FLAGS]
    monkeypatch.setattr(sys, "argv", ["beside_pytorch", *words])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    script("beside_pytorch").main()
    scores = json.loads((tmp_path / "out" / "beside.json").read_text())
    (ours,), (theirs,) = scores["ours"], scores["theirs"]
    assert ours["accuracy"] == pytest.approx(theirs["accuracy"], abs=1e-9)
    assert 0.6 < ours["accuracy"] < 0.95
    assert "sst2 accuracy pytorch" in capsys.readouterr().out
