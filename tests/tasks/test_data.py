"""The chain as a person runs it: sample to records."""

import json
from pathlib import Path

from bert_cli.cli import main
from bert_cli.config.data import DataChainSettings, ExtractSettings
from bert_cli.data.io.manifest import read_manifest
from bert_cli.data.text.download import sample_dump
from bert_cli.tasks.data import step_settings


def chain(out: Path, vocab: Path, *more: str) -> int:
    words = ["data", str(sample_dump()), str(out), "--vocab", str(vocab), "--sequence-length", "64"]
    return main([*words, "--mask-tokens", "10", *more])


def test_a_second_call_of_the_chain_skips_what_is_complete(tmp_path, capsys):
    vocab, out = tmp_path / "vocab", tmp_path / "out"
    assert main(["extract", str(sample_dump()), str(tmp_path / "extracted")]) == 0
    assert main(["preprocess", str(tmp_path / "extracted"), str(tmp_path / "text")]) == 0
    assert main(["vocab", str(tmp_path / "text"), str(vocab), "--size", "1000"]) == 0
    assert chain(out, vocab) == chain(out, vocab, "--masking", "dynamic") == 0
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


def test_the_chain_extracts_with_the_program_that_it_is_given(tmp_path):
    given = {"dump": tmp_path, "out": tmp_path, "vocab": "v", "with": "wicket -o -"}
    settings = DataChainSettings.model_validate(given)
    step = step_settings(ExtractSettings, settings, dump=tmp_path, out=tmp_path)
    assert isinstance(step, ExtractSettings) and step.with_program == "wicket -o -"
