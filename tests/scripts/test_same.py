"""`scripts/same`: its comparison of two folders, its table, and that the tool takes its commands."""

import itertools
import json
import re
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.stand_in import ROOT, load_command

LOADER = SourceFileLoader("same", str(ROOT / "scripts" / "same"))
same = module_from_spec(spec_from_loader(LOADER.name, LOADER))
LOADER.exec_module(same)


@pytest.fixture
def sides(tmp_path):
    """Two folders as both trees leave them: only the times differ."""
    for number, side in enumerate(("before", "after")):
        run = tmp_path / side / "case" / "run"
        run.mkdir(parents=True)
        (run / "wiki_000.tfrecord").write_bytes(bytes(1000))
        save_file({"a": np.zeros(4), "b": np.ones((2, 2))}, run / "model.safetensors")
        manifest = {
            "counts": {"records": 7},
            "seconds": 0.1 + number,
            "versions": {"bert_cli": str(number)},
        }
        (run / "manifest.json").write_text(json.dumps(manifest))
        rows = [
            {"step": step, "loss": 8.0 - step, "seconds_per_step": step + number} for step in (1, 2)
        ]
        (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        (tmp_path / side / "ended.json").write_text(json.dumps({"case": ""}))
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


def change_byte(run):
    (run / "wiki_000.tfrecord").write_bytes(bytes(600) + b"\1" + bytes(399))


def add_byte(run):
    (run / "wiki_000.tfrecord").write_bytes(bytes(1001))


def change_metric(run):
    path = run / "metrics.jsonl"
    path.write_text(path.read_text().replace('"loss": 6.0', '"loss": 6.000000000000001'))


def change_tensor(run):
    save_file(
        {"a": np.zeros(4), "b": np.array([[1, 1], [1 + 1e-15, 1]])}, run / "model.safetensors"
    )


def change_layout_of_json(run):
    path = run / "manifest.json"
    path.write_text(
        json.dumps(
            json.loads(path.read_text()) | {"seconds": 0.1, "versions": {"bert_cli": "0"}}, indent=1
        )
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (change_byte, "case/run/wiki_000.tfrecord: byte 600 of 1000"),
        (lambda run: (run / "wiki_000.tfrecord").unlink(), "case/run/wiki_000.tfrecord: not in the working tree"),
        (lambda run: (run / "new").touch(), "case/run/new: not in REV"),
        (change_metric, "case/run/metrics.jsonl:step 2/loss: 6.0 -> 6.000000000000001"),
        (change_tensor, "case/run/model.safetensors:b: byte 16 of 32"),
        (change_layout_of_json, "case/run/manifest.json: byte 1 of 73, now of 88"),
        (add_byte, "case/run/wiki_000.tfrecord: byte 1000 of 1000, now of 1001"),
    ],
)  # fmt: skip
def test_a_difference_is_found_and_named(sides, change, text, capsys):
    change(sides / "after" / "case" / "run")
    assert differences(sides) == [text]
    assert not same.report(sides)
    assert text in capsys.readouterr().out
    assert differences(sides, {**same.EXPECTED, f"{text.partition(': ')[0]}*": "meant"}) == []


def test_a_case_that_one_tree_did_not_do_is_not_the_same(sides, capsys):
    for ended, text in (
        ({}, "the working tree: did not get there"),
        (
            {"case": "pretrain ended with 2: no such flag"},
            "the working tree: pretrain ended with 2",
        ),
    ):
        (sides / "after" / "ended.json").write_text(json.dumps(ended))
        assert not same.report(sides)
        assert text in capsys.readouterr().out


def test_the_tool_takes_every_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    document = "\n".join(f"The Sun of day {number} shines on all." for number in range(5))
    text = tmp_path / "text" / "sentences" / "AA" / "wiki_00.txt"
    text.parent.mkdir(parents=True)
    text.write_text("\n\n".join([document] * 75))
    same.write_inputs()
    commands = [line for lines in same.cases().values() for line in lines if line not in same.STEPS]
    for line in commands:
        load_command(line.split())
    assert {line.split()[0] for line in commands} >= {"pack", "index", "launch", "squad", "export"}


def test_training_covers_every_pair_of_layout_precision_and_batch():
    rows = [line.split(maxsplit=3)[:3] for line in same.TRAINING.strip().splitlines()]
    axes = [
        ("1x1", "2x1", "1x2", "2x2"),
        ("float32", "float16", "mixed_bfloat16"),
        ("static", "packs", "buckets", "mixture"),
    ]
    for one, other in itertools.combinations(range(3), 2):
        pairs = {(row[one], row[other]) for row in rows}
        assert pairs >= set(itertools.product(axes[one], axes[other]))
