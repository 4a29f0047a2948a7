"""`bert runs`: a list of the runs below a folder; `bert compare`: the differences between two."""

import html
import json
from pathlib import Path

import numpy as np
import pytest

from bert_cli.statistics import difference, identify, interval, intervals, mean_of, sample_of
from bert_cli.train import scores


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
    written = (tmp_path / "run" / "scores.json").read_text()
    assert 'b_loss": null' in written
    (tmp_path / "run" / "scores.json").write_text(written.replace("0.375", "0.875"))
    out, err = bert("runs", tmp_path)
    assert "scores.json: has changed since it was saved" in out + err and "0.8750" not in out


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
    (a / "examples.npz").write_bytes(b"?")
    assert "examples.npz: is damaged" in bert("compare", a, b, code=3).err
