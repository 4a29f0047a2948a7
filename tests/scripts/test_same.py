"""`scripts/same`: its comparison of two folders, its table, and that the tool takes its commands."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save
from support.command_lines import script

same = script("same")


def write_side(folder: Path, number: int) -> None:
    run = folder / "case" / "run"
    run.mkdir(parents=True)
    (run / "wiki_000.tfrecord").write_bytes(bytes(1000))
    (run / "model.safetensors").write_bytes(save({"a": np.zeros(4), "b": np.ones((2, 2))}))
    manifest = {"counts": {"records": 7}, "seconds": 0.1 + number, "versions": {"bert_cli": number}}
    (run / "manifest.json").write_text(json.dumps(manifest))
    rows = [{"step": n, "loss": 8.0 - n, "seconds_per_step": n + number} for n in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "ended.json").write_text(json.dumps({"case": ""}))


@pytest.fixture
def sides(tmp_path):
    write_side(tmp_path / "before", 0)
    write_side(tmp_path / "after", 1)
    return tmp_path


def differences(sides, expected=same.EXPECTED):
    return same.compare(sides, "case", expected)[0]


def test_times_and_versions_are_passed_over_with_their_reason(sides, capsys):
    found, excused = same.compare(sides, "case", same.EXPECTED)
    assert found == []
    assert excused == {"time": 3, "version": 1}
    assert same.report(sides)
    table = capsys.readouterr().out
    assert re.search(r"^case +same$", table, re.MULTILINE)
    assert "time (3), version (1)" in table
    assert len(differences(sides, {})) == 4


def test_a_difference_is_found_and_named(sides, capsys):
    run = sides / "after" / "case" / "run"
    metrics = (run / "metrics.jsonl").read_bytes()
    changed_metric = metrics.replace(b'"loss": 6.0', b'"loss": 6.000000000000001')
    manifest = (sides / "before" / "case" / "run" / "manifest.json").read_bytes()
    tensors = {"a": np.zeros(4), "b": np.array([[1, 1], [1 + 1e-15, 1]])}
    changed_byte = bytes(600) + b"\1" + bytes(399)
    for name, data, text in (
        ("wiki_000.tfrecord", changed_byte, "wiki_000.tfrecord: byte 600 of 1000"),
        ("wiki_000.tfrecord", bytes(1001), "wiki_000.tfrecord: byte 1000 of 1000, now of 1001"),
        ("wiki_000.tfrecord", None, "wiki_000.tfrecord: not in the working tree"),
        ("new", b"", "new: not in REV"),
        ("metrics.jsonl", changed_metric, "metrics.jsonl:step 2/loss: 6.0 -> 6.000000000000001"),
        ("model.safetensors", save(tensors), "model.safetensors:b: byte 16 of 32"),
        ("manifest.json", manifest + b"\n", "manifest.json: byte 71 of 71, now of 72"),
    ):
        before = (run / name).read_bytes() if (run / name).exists() else None
        replace(run / name, data)
        assert differences(sides) == [f"case/run/{text}"]
        assert not same.report(sides)
        assert text in capsys.readouterr().out
        excused = {**same.EXPECTED, f"case/run/{text.partition(': ')[0]}*": "meant"}
        assert differences(sides, excused) == []
        replace(run / name, before)


def replace(path: Path, data: bytes | None) -> None:
    path.unlink() if data is None else path.write_bytes(data)


def test_a_case_that_one_tree_did_not_do_is_not_the_same(sides, capsys):
    for ended, text in (
        ({}, "the working tree: did not get there"),
        ({"case": "ended with 2: no such flag"}, "the working tree: ended with 2"),
    ):
        (sides / "after" / "ended.json").write_text(json.dumps(ended))
        assert not same.report(sides)
        assert text in capsys.readouterr().out
