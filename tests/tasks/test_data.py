"""The chain as a person runs it: sample to records to a model."""

import json
from pathlib import Path

import pytest
from support.tiny_models import metrics_of

from bert_cli.cli import main
from bert_cli.data.shards.manifest import read_manifest
from bert_cli.data.text.download import sample_dump
from bert_cli.train.checkpoint import complete_checkpoints


def chain(out: Path, vocab: Path, *more: str) -> int:
    words = ["data", str(sample_dump()), str(out), "--vocab", str(vocab), "--sequence-length", "64"]
    return main([*words, "--mask-tokens", "10", *more])


@pytest.fixture(scope="module")
def vocab(tmp_path_factory) -> Path:
    """A vocabulary trained on the sample."""
    folder = tmp_path_factory.mktemp("vocab")
    assert main(["extract", str(sample_dump()), str(folder / "extracted")]) == 0
    words = ["vocab", str(folder / "extracted"), str(folder / "vocab"), "--size", "1000"]
    assert main([*words, "--input-format", "plain"]) == 0
    return folder / "vocab"


@pytest.fixture(scope="module")
def out(vocab, tmp_path_factory) -> Path:
    """The output folder of the chain, with static and dynamic records."""
    out = tmp_path_factory.mktemp("chain") / "out"
    assert chain(out, vocab) == chain(out, vocab, "--masking", "dynamic") == 0
    return out


def test_a_second_call_of_the_chain_skips_what_is_complete(out, vocab, capsys):
    assert json.loads((out / "64" / "corpus.json").read_text())["records"] > 3000
    assert read_manifest(out / "extracted")["counts"]["documents"] == 75
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.tfrecord")}
    assert {path.parent.name for path in before} == {"64", "64_dynamic"}
    capsys.readouterr()
    assert chain(out, vocab) == 0
    assert capsys.readouterr().out.count("1 of 1 shards were done before") == 4
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.tfrecord")} == before


def test_the_chain_rejects_an_absent_vocabulary_before_its_first_step(tmp_path, capsys):
    assert chain(tmp_path / "out", Path("nowhere.txt")) == 3
    assert "nowhere.txt" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_model_learns_from_the_records_and_is_evaluated(out, tmp_path):
    records, run = out / "64_dynamic", tmp_path / "run"
    words = [
        "pretrain", "--dataset-dir", str(records), "--validation-dir", str(records),
        "--evaluation-examples", "100", "--evaluate-every-steps", "40", "--bert-config.vocab-size", "1000",
        "--total-num-train-samples", "1280", "--save-ckpt-path", str(run), "--log-every-steps", "40",
        "--bert-config.hidden-size", "32", "--bert-config.num-attention-heads", "2",
        "--bert-config.num-hidden-layers", "1", "--bert-config.intermediate-size", "64",
        "--max-seq-length", "64", "--max-predictions-per-seq", "10", "--global-batch.micro-batch-size", "16",
        "--optimizer-opts.name", "AdamW", "--optimizer-opts.learning-rate.max-learning-rate", "0.003",
    ]  # fmt: skip
    assert main(words) == 0
    steps = metrics_of(run)
    assert len(steps) == 80
    assert sum(step["mlm_loss"] for step in steps[-10:]) / 10 < steps[0]["mlm_loss"] - 0.5
    assert [step["step"] for step in steps if "validation_mlm_loss" in step] == [40, 80]
    assert steps[-1]["validation_mlm_loss"] < steps[39]["validation_mlm_loss"] + 0.1
    (checkpoint,) = complete_checkpoints(run)
    assert (checkpoint / "vocab.txt").read_bytes() == (records / "vocab.txt").read_bytes()
