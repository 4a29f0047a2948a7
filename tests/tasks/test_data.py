"""The chain as a person runs it: sample to records to a model, and the real fragment of Wikipedia."""

import json
from pathlib import Path

import pytest

from bert_cli.cli import main
from bert_cli.data.shards.manifest import read_manifest
from bert_cli.data.text.download import sample_dump
from bert_cli.train.folder import complete_checkpoints

TINY = [
    "--bert-config.hidden-size", "32", "--bert-config.num-attention-heads", "2",
    "--bert-config.num-hidden-layers", "1", "--bert-config.intermediate-size", "64",
    "--max-seq-length", "64", "--max-predictions-per-seq", "10", "--global-batch.micro-batch-size", "16",
    "--optimizer-opts.name", "AdamW", "--optimizer-opts.learning-rate.max-learning-rate", "0.003",
]  # fmt: skip


@pytest.fixture(scope="module")
def vocab(tmp_path_factory) -> Path:
    """A vocabulary trained on the sample."""
    folder = tmp_path_factory.mktemp("vocab")
    assert main(["extract", str(sample_dump()), str(folder / "extracted")]) == 0
    assert main(["preprocess", str(folder / "extracted"), str(folder / "sentences")]) == 0
    assert main(["vocab", str(folder / "sentences"), str(folder / "vocab"), "--size", "1000"]) == 0
    return folder / "vocab"


def chain(out: Path, vocab: Path, *more: str) -> int:
    words = ["data", str(sample_dump()), str(out), "--vocab", str(vocab), "--sequence-length", "64"]
    return main([*words, "--mask-tokens", "10", *more])


def test_the_chain_leaves_records_a_second_call_skips_and_another_length_reuses(
    vocab, tmp_path, capsys
):
    assert chain(tmp_path / "out", vocab) == 0
    corpus = json.loads((tmp_path / "out" / "64" / "corpus.json").read_text())
    assert corpus["records"] > 3000
    assert read_manifest(tmp_path / "out" / "extracted")["counts"]["documents"] == 75
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.tfrecord")}
    capsys.readouterr()
    assert chain(tmp_path / "out", vocab) == 0
    told = capsys.readouterr().out
    assert told.count("1 of 1 shards were done before") == 4
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.tfrecord")} == before
    assert chain(tmp_path / "out", vocab, "--masking", "dynamic") == 0
    assert (tmp_path / "out" / "64_dynamic" / "corpus.json").exists()


@pytest.mark.parametrize(
    ("more", "code", "told"),
    [
        (["--vocab", "nowhere.txt"], 3, "nowhere.txt"),
        (["--masking", "dynamic", "--duplication-factor", "5"], 2, "has no effect"),
        (["--mask-tokens", "62"], 2, "mask_tokens (62)"),
    ],
)
def test_the_chain_refuses_a_wrong_setting_before_its_first_step(
    more, code, told, vocab, tmp_path, capsys
):
    words = ["data", str(sample_dump()), str(tmp_path / "out"), "--sequence-length", "64"]
    words += ["--vocab", str(vocab)] if "--vocab" not in more else []
    words += ["--mask-tokens", "10"] if "--mask-tokens" not in more else []
    assert main([*words, *more]) == code
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("masking", ["static", "dynamic"])
def test_a_model_learns_from_the_records_and_is_held_out_tested(masking, vocab, tmp_path):
    assert chain(tmp_path / "out", vocab, "--masking", masking) == 0
    records = tmp_path / "out" / ("64" if masking == "static" else "64_dynamic")
    run = tmp_path / "run"
    words = [
        "pretrain", "--dataset-dir", str(records), "--validation-dir", str(records),
        "--evaluation-examples", "100", "--evaluate-every-steps", "40", "--bert-config.vocab-size", "1000",
        "--total-num-train-samples", "1280", "--save-ckpt-path", str(run), "--log-every-steps", "40",
    ]  # fmt: skip
    assert main([*words, *TINY]) == 0
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 80
    assert sum(step["mlm_loss"] for step in steps[-10:]) / 10 < steps[0]["mlm_loss"] - 0.5
    held_out = [step["step"] for step in steps if "validation_mlm_loss" in step]
    assert held_out == [40, 80]
    assert steps[-1]["validation_mlm_loss"] < steps[39]["validation_mlm_loss"] + 0.1
    (checkpoint,) = complete_checkpoints(run)
    assert (checkpoint / "vocab.txt").read_bytes() == (records / "vocab.txt").read_bytes()


def test_a_model_of_another_vocabulary_is_refused_with_the_flag_to_give(vocab, tmp_path, capsys):
    assert chain(tmp_path / "out", vocab) == 0
    words = ["pretrain", "--dataset-dir", str(tmp_path / "out" / "64"), "--save-ckpt-path", "x"]
    words += ["--bert-config.vocab-size", "999"]
    assert main([*words, *TINY, "--total-num-train-samples", "16"]) == 2
    assert "give --bert-config.vocab-size 1000" in capsys.readouterr().err


def test_records_of_another_length_are_refused_with_both_numbers(vocab, tmp_path, capsys):
    assert chain(tmp_path / "out", vocab) == 0
    words = [
        "pretrain",
        "--dataset-dir",
        str(tmp_path / "out" / "64"),
        "--save-ckpt-path",
        "x",
        *TINY,
    ]
    assert main([*words, "--max-seq-length", "128", "--total-num-train-samples", "16"]) == 3
    told = capsys.readouterr().err
    assert "max_seq_length (128)" in told and "64 places" in told


def test_the_chain_on_the_real_fragment_of_english_wikipedia(shared_data, tmp_path):
    (dump,) = shared_data.glob("dumps/enwiki-latest-pages-articles1*")
    words = shared_data / "vocab" / "bert-base-uncased-vocab.txt"
    arguments = [
        "data",
        str(dump),
        str(tmp_path),
        "--vocab",
        str(words),
        "--sequence-length",
        "128",
    ]
    assert main([*arguments, "--mask-tokens", "20"]) == 0
    assert read_manifest(tmp_path / "extracted")["counts"]["documents"] == 106
    counts = read_manifest(tmp_path / "sentences")["counts"]
    assert counts["documents"] == 105
    assert 19_000 < counts["sentences"] < 22_000
    corpus = json.loads((tmp_path / "128" / "corpus.json").read_text())
    assert corpus["vocab_size"] == 30_522
    assert 25_000 < corpus["records"] < 30_000
