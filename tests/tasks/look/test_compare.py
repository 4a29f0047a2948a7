"""`bert compare`: the differences between two runs."""

import json

import pytest

from bert_cli.cli import main


@pytest.fixture
def two(tmp_path, write_run):
    first = write_run(tmp_path / "a", 10, saved=(10,))
    return first, write_run(tmp_path / "b", 8, seed=2, precision="float16")


def compare(*words) -> int:
    return main(["compare", *map(str, words)])


def test_differing_settings_and_results_are_side_by_side(two, capsys):
    assert compare(*two, "--smoothing", "1") == 0
    out = capsys.readouterr().out
    lines = [line.split("  ") for line in out.splitlines()]
    cells = {row[0]: [cell.strip() for cell in row[1:] if cell.strip()] for row in lines}
    assert cells["seed"] == ["1", "2"]
    assert cells["precision"] == ["not set", "float16"]
    assert cells["state"] == ["done", "killed"]
    assert "global_batch" not in out
    # The difference is second minus first.
    assert cells["mlm loss, last"] == ["3.0000", "4.0000", "+1.0000"]
    assert cells["mlm accuracy, best"] == ["10.00 %", "8.00 %", "-2.00 %"]
    assert cells["time in steps"] == ["20 s", "16 s", "-4 s"]
    assert cells["gradient norm, last"] == ["1.0000", "1.0000", "0.0000"]
    assert out.endswith("\nLosses, accuracies and gradient norms are those of single steps.\n")


def test_the_same_is_written_as_json(two, capsys):
    assert compare(*two, "--smoothing", "2", "--json", "-") == 0
    written = json.loads(capsys.readouterr().out)
    assert written["settings"] == {"seed": [1, 2], "precision": ["not set", "float16"]}
    assert [run["name"] for run in written["runs"]] == ["a", "b"]
    assert written["results"]["mlm loss, last"][0] == {"mean": 3.25, "standard_deviation": None}
    assert written["smoothed_over_steps"] == 2


def test_equal_settings_are_stated_and_equal_names_get_their_folder(tmp_path, write_run, capsys):
    assert compare(*(write_run(tmp_path / name / "run", 3) for name in "ab")) == 0
    out = capsys.readouterr().out
    assert "Both have the same settings." in out and "a/run" in out and "b/run" in out


def test_seeds_are_one_side_with_mean_and_deviation(tmp_path, write_run, capsys):
    for rate in ("low", "high"):
        for seed in (1, 2):
            write_run(tmp_path / rate / f"seed_{seed}", 2 + seed, seed=seed, rate=rate)
    assert compare(tmp_path / "low", tmp_path / "high", "--smoothing", "1") == 0
    out = capsys.readouterr().out
    assert "low (2 seeds)" in out and "high (2 seeds)" in out and "6.2500 +- 0.3536" in out
    assert "\nseed " not in out  # equal on both sides
    assert compare(write_run(tmp_path / "one", 3, seed=7), tmp_path / "low") == 0
    (line,) = [row for row in capsys.readouterr().out.splitlines() if row.startswith("seed ")]
    assert line.split() == ["seed", "7", "[1,", "2]"]


def test_a_folder_that_cannot_be_compared_is_refused(two, tmp_path, write_run, capsys):
    (tmp_path / "folder").mkdir()
    empty = write_run(tmp_path / "empty", 0)
    for other, message in {
        tmp_path / "absent": "is no folder",
        tmp_path / "folder": "is no run's folder",
        tmp_path: "contains 3 runs; give one of them",
        empty: "has no step in metrics.jsonl yet",
        two[0]: "is the same run as the first; give another run",
    }.items():
        assert compare(two[0], other) == 3
        error = capsys.readouterr().err
        assert f"second ({other}" in error and message in error
