"""`bert compare`: what differs between two runs."""

import json

import pytest

from bert_cli.cli import main


@pytest.fixture
def two(tmp_path, write_run):
    return write_run(tmp_path / "a", 10, saved=(10,)), write_run(
        tmp_path / "b", 8, seed=2, precision="float16"
    )


def compare(*words) -> int:
    return main(["compare", *map(str, words)])


def test_settings_and_results_that_differ_are_told_side_by_side(two, capsys):
    assert compare(*two, "--smoothing", "1") == 0
    out = capsys.readouterr().out
    told = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line}
    assert told["seed"] == ["1", "2"]
    assert told["precision"] == ["not", "set", "float16"]
    assert told["state"] == ["done", "killed"]
    assert "global_batch" not in out


def test_a_difference_is_what_the_second_has_more(two, capsys):
    assert compare(*two, "--smoothing", "1") == 0
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    cells = {row[0]: [cell.strip() for cell in row[1:] if cell.strip()] for row in lines}
    assert cells["mlm loss, last"] == ["3.0000", "4.0000", "+1.0000"]
    assert cells["mlm accuracy, best"] == ["10.00 %", "8.00 %", "-2.00 %"]
    assert cells["time in steps"] == ["20 s", "16 s", "-4 s"]
    assert cells["gradient norm, last"] == ["1.0000", "1.0000", "0.0000"]


def test_it_is_json_too(two, capsys):
    assert compare(*two, "--smoothing", "2", "--json", "-") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["settings"] == {"seed": [1, 2], "precision": ["not set", "float16"]}
    assert [run["name"] for run in told["runs"]] == ["a", "b"]
    assert told["results"]["mlm loss, last"][0] == {"mean": 3.25, "standard_deviation": None}
    assert told["smoothed_over_steps"] == 2


def test_single_steps_are_not_called_means(two, capsys):
    for window, words in (("1", "those of single steps"), ("2", "means over 2 steps")):
        assert main(["compare", *map(str, two), "--smoothing", window]) == 0
        last = capsys.readouterr().out.splitlines()[-1]
        assert last == f"losses, accuracies and gradient norms are {words}"


def test_runs_of_the_same_settings_say_so(tmp_path, write_run, capsys):
    a, b = (write_run(tmp_path / name / "run", 3) for name in "ab")
    assert compare(a, b) == 0
    told = capsys.readouterr().out
    assert "settings: the same" in told
    assert "a/run" in told and "b/run" in told


def test_seeds_stand_together_with_mean_and_deviation(tmp_path, write_run, capsys):
    for rate in ("low", "high"):
        for seed in (1, 2):
            write_run(tmp_path / rate / f"seed_{seed}", 2 + seed, seed=seed, rate=rate)
    assert compare(tmp_path / "low", tmp_path / "high", "--smoothing", "1") == 0
    told = capsys.readouterr().out
    assert "low (2 seeds)" in told and "high (2 seeds)" in told
    assert "6.2500 +- 0.3536" in told
    assert "\nseed " not in told  # the same two on both sides


def test_one_run_beside_seeds_shows_their_seeds(tmp_path, write_run, capsys):
    write_run(tmp_path / "one", 3, seed=7)
    for seed in (1, 2):
        write_run(tmp_path / "more" / f"seed_{seed}", 3, seed=seed)
    assert compare(tmp_path / "one", tmp_path / "more") == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("seed ")]
    assert line.split() == ["seed", "7", "[1,", "2]"]


@pytest.mark.parametrize("case", ["absent", "no run", "several", "empty", "twice"])
def test_what_cannot_be_compared_is_refused_with_what_to_give(
    case, two, tmp_path, write_run, capsys
):
    other = {
        "absent": tmp_path / "absent",
        "no run": tmp_path / "folder",
        "several": tmp_path,
        "empty": tmp_path / "empty",
        "twice": two[0],
    }[case]
    (tmp_path / "folder").mkdir()
    if case == "empty":
        write_run(other, 0)
    assert compare(two[0], other) == 3
    said = {
        "absent": "is no folder; give a run's",
        "no run": "is no run's folder",
        "several": "holds 2 runs; give one of them",
        "empty": "has no step in metrics.jsonl yet",
        "twice": "is the first one again; give another run",
    }[case]
    assert f"second ({other}" in (told := capsys.readouterr().err) and said in told
