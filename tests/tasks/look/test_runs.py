"""`bert runs`: a list of the runs below a folder; `bert compare`: the differences between two."""

import html
import json
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest

from bert_cli.statistics import difference, identify, interval, intervals, mean_of, sample_of
from bert_cli.tasks.look.runs import MAX_METRICS
from bert_cli.train import scores


@pytest.fixture
def folder(tmp_path, write_run):
    runs = tmp_path / "runs"
    write_run(runs / "base", 8, total=10, saved=(8,))
    mrpc = write_run(runs / "mrpc" / "seed_1984", 10, saved=(10,), glue_task="mrpc")
    (mrpc / "scores.json").write_text('{"accuracy": 0.8, "f1": 0.86}')
    return runs


@pytest.fixture
def two(tmp_path, write_run):
    first = write_run(tmp_path / "a", 10, saved=(10,))
    return first, write_run(tmp_path / "b", 8, seed=2, precision="float16")


def test_each_run_is_a_line_with_its_step_loss_state_and_age(folder, monkeypatch, bert):
    for path in folder.rglob("*"):
        os.utime(path, (time.time() - 20_000,) * 2)
    monkeypatch.chdir(folder)
    head, base, mrpc = bert("runs").out.splitlines()
    assert " ".join(head.split()) == "run command step of loss held out state last written"
    assert " ".join(base.split()) == "base pretrain 8 10 mlm 4.0000 stopped 5 h ago"
    assert "glue mrpc" in mrpc and "accuracy 0.8000  f1 0.8600" in mrpc and "done" in mrpc
    printed = json.loads(bert("runs", folder, "--json", "-").out)
    assert printed[0].pop("written").startswith("20")
    base = {"run": str(folder / "base"), "what": "pretrain", "step": 8, "total_steps": 10}
    assert printed[0] == {**base, "losses": {"mlm": 4.0}, "held_out": {}, "state": "stopped"}


def test_the_last_evaluation_many_losses_and_values_that_are_not_finite(tmp_path, write_run, bert):
    run = write_run(tmp_path / "runs" / "run", 8, saved=(8,))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[2]["validation_mlm_loss"] = 7.25
    lines[5] |= {"validation_mlm_loss": 6.75, "validation_mlm_accuracy": 0.5}
    lines[7] |= {"mlm_loss": None, "nsp_loss": 1.0, "a_loss": 1.0, "b_loss": 1.0}
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (row,) = json.loads(bert("runs", tmp_path / "runs", "--json", "-").out)
    assert row["step"] == 8 and row["held_out"] == {"mlm_loss": 6.75, "mlm_accuracy": 0.5}
    out = bert("runs", tmp_path / "runs").out
    assert "mlm not finite  nsp 1.0000  a 1.0000  ..." in out
    assert "  mlm 6.7500  " in out and "0.5" not in out


def test_folders_without_runs_and_mistakes_are_messages(folder, tmp_path, bert):
    (tmp_path / "empty").mkdir()
    assert "no runs" in bert("runs", tmp_path / "empty").out
    assert "no such folder" in bert("runs", tmp_path / "absent", code=3).err
    # A run that cannot be read does not hide the others.
    (folder / "base" / "settings.json").write_text("{")
    out = bert("runs", folder).out
    assert "settings.json: Invalid JSON" in out and "glue mrpc" in out
    for text in ('{"global_batch": 3, "bert_config": 5, "max_predictions_per_seq": 1}', "{}"):
        (folder / "base" / "settings.json").write_text(text)
        out = bert("runs", folder).out
        assert "glue mrpc" in out and "base" in out


def test_the_name_of_a_folder_may_hold_a_comma_a_line_end_or_a_formula(tmp_path, write_run, bert):
    names = ("a,b", "c\nd", "$\\evil$", "50$ off", "_x")
    paths = [write_run(tmp_path / name / "run", 8, saved=(8,)).parent for name in names]
    listed = json.loads(bert("runs", *paths, "--json", "-").out)
    assert [row["run"] for row in listed] == [f"{path}/run" for path in paths]
    runs = [path / "run" for path in paths]
    bert("plot", *runs, "--output", tmp_path / "out")
    text = html.unescape((tmp_path / "out" / "loss.svg").read_text())
    assert all(f">{name}/run<" in text for name in ("a,b", "c\\nd", *names[2:]))
    # Of flags a comma still separates paths.
    bert("plot", *runs[:1], "--output", f"{tmp_path}/a\nb")
    assert (tmp_path / "a\nb" / "index.html").is_file()


def test_differing_settings_are_side_by_side(two, bert):
    out = bert("compare", *two).out
    assert "global_batch" not in out and "No score of both" in out
    assert "precision  not set  float16" in re.sub(" {2,}", "  ", out)
    written = json.loads(bert("compare", *two, "--json", "-").out)
    assert written["settings"] == {"seed": [1, 2], "precision": ["not set", "float16"]}
    assert written["runs"] == ["a", "b"]


@pytest.fixture
def scored(tmp_path, write_run):
    """Two runs that have scored the same 60 texts, and one that has scored others."""
    right = np.random.default_rng(0).random(60) < 0.8
    better = right | (np.arange(60) < 12)
    texts = [f"text {number}" for number in range(60)]
    runs = {"a": (right, texts), "b": (better, texts), "c": (better, texts[::-1])}
    for name, (column, keys) in runs.items():
        # Each row stands for two examples.
        samples = {"f1": sample_of(identify(keys, size=120), "ratio", column, 1.0)}
        scores.write(write_run(tmp_path / name, 4), samples, intervals(samples))
    return right, better


def test_the_list_has_losses_and_bits_per_byte_of_finite_scores_with_intervals(
    tmp_path, write_run, bert
):
    finite = ["mlm_accuracy", "mlm_loss", "bits_per_byte", "a_loss"]
    samples = {name: mean_of([0.25, 0.5]) for name in finite} | {"b_loss": mean_of([np.nan] * 2)}
    scores.write(write_run(tmp_path / "run", 4), samples, intervals(samples))
    (row,) = json.loads(bert("runs", tmp_path, "--json", "-").out)
    assert row["held_out"] == dict.fromkeys(finite, 0.375)
    assert row["intervals"] == {name: interval(samples[name]).bounds for name in finite}
    out = bert("runs", tmp_path).out
    cells = re.findall(r"([a-z][a-z ]+) 0\.3750 \[", out)
    assert cells == ["mlm", "bits per byte"]
    assert "; n 2  killed" in out
    written = (tmp_path / "run" / "scores.json").read_text()
    assert 'b_loss": null' in written
    (tmp_path / "run" / "scores.json").write_text(written.replace("0.375", "0.875"))
    out, err = bert("runs", tmp_path)
    assert "scores.json: has changed since it was saved" in out + err and "0.8750" not in out


@pytest.mark.parametrize("number", [1, MAX_METRICS, MAX_METRICS + 1])
@pytest.mark.parametrize("ending", ["loss", "accuracy"])
def test_a_cell_has_as_many_scores_as_fit_and_says_that_there_are_others(
    tmp_path, write_run, bert, number, ending
):
    names = [f"{letter}_{ending}" for letter in "abcd"[:number]]
    shown = [name.removesuffix("_loss") for name in names[:MAX_METRICS]]
    rest = "..." if number > MAX_METRICS else ""
    samples = {name: mean_of([0.25, 0.5]) for name in names}
    scores.write(write_run(tmp_path / "tested" / "run", 4), samples, intervals(samples))
    row = bert("runs", tmp_path / "tested").out.splitlines()[1]
    assert re.findall(r"(\w+) 0\.3750 \[", row) == shown
    assert f"; n 2{rest and '  ...'}  killed" in row
    # Of an evaluation while it trains, which has no interval.
    run = write_run(tmp_path / "trains" / "run", 1)
    line = dict.fromkeys((f"validation_{name}" for name in names), 0.375)
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 0.5, **line}))
    row = bert("runs", tmp_path / "trains").out.splitlines()[1]
    cells = re.split(" {2,}", row)
    expected = [f"{name} 0.3750" for name in shown]
    assert cells[4:-2] == ["0.5000", *expected, *[rest] * bool(rest)]


def test_two_runs_on_the_same_examples_are_compared_by_the_interval_of_the_difference(
    tmp_path, scored, bert, write_run
):
    right, better = scored
    a, b, c = (tmp_path / name for name in "abc")
    found = difference([mean_of(better)], [mean_of(right)])

    def differences(*pair: Path) -> object:
        return json.loads(bert("compare", *pair, "--json", "-").out)["differences"]

    assert differences(a, b) == {"f1": found.as_json | {"n": 120}}
    # Each alone has an interval that has the other's score.
    assert found.low > 0 and interval(mean_of(right)).high > interval(mean_of(better)).low
    assert f"\nf1: {found:+.4f}, n 120\n" in bert("compare", a, b).out
    # A run without the score, such as one that still trains, has no interval.
    unscored = write_run(tmp_path / "unscored", 4)
    for pair in ((a, c), (a, unscored), (unscored, a)):
        assert differences(*pair) == {}, "other examples"
    assert "No score of both" in bert("compare", a, c).out
    (a / "examples.npz").write_bytes(b"?")
    assert "examples.npz: is damaged" in bert("compare", a, b, code=3).err


def test_seeds_are_one_side(tmp_path, write_run, bert):
    for rate in ("low", "high"):
        for seed in (1, 2):
            write_run(tmp_path / rate / f"seed_{seed}", 2 + seed, seed=seed, rate=rate)
    out = bert("compare", tmp_path / "low", tmp_path / "high").out
    assert "low (2 seeds)" in out and "high (2 seeds)" in out
    assert "\nseed " not in out  # equal on both sides
    out = bert("compare", write_run(tmp_path / "one", 3, seed=7), tmp_path / "low").out
    (line,) = [row for row in out.splitlines() if row.startswith("seed ")]
    assert line.split() == ["seed", "7", "[1,", "2]"]
    first, second = (write_run(tmp_path / name / "run", 3) for name in "ab")
    assert "Both have the same settings." in bert("compare", first, second).out
