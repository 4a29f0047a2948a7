"""`bert plot`: files in a folder, and what it says of what cannot be drawn."""

import pytest

from bert_cli.cli import main

PICTURES = {"loss", "accuracy", "learning_rate", "throughput", "gradient_norm"}


def plot(*words) -> int:
    return main(["plot", *map(str, words)])


def test_pictures_and_the_page_are_files_of_the_folder(tmp_path, write_run, capsys):
    runs = [write_run(tmp_path / name, 90) for name in ("a", "b")]
    assert plot(*runs, "--output", tmp_path / "out") == 0
    there = {path.name for path in (tmp_path / "out").iterdir()}
    assert there == {"index.html", *(f"{name}.png" for name in PICTURES)}
    told = capsys.readouterr().out
    assert told.startswith(f"{tmp_path / 'out' / 'index.html'}: 2 runs, loss.png, ")
    assert told.endswith("smoothed over 2 steps\n")


def test_flags_may_stand_between_runs(tmp_path, write_run, capsys):
    a, b = (write_run(tmp_path / name, 3) for name in ("a", "b"))
    assert plot(a, "--smoothing", "3", "--output", tmp_path / "out", b) == 0
    assert "2 runs" in (told := capsys.readouterr().out) and "smoothed over 3 steps" in told


def test_a_run_without_a_step_is_named_and_the_others_are_drawn(tmp_path, write_run, capsys):
    runs = [write_run(tmp_path / "a", 3), write_run(tmp_path / "b", 0)]
    assert plot(*runs, "--output", tmp_path / "out") == 0
    assert f"{runs[1]}: has no step yet" in capsys.readouterr().out


def test_runs_that_all_have_no_step_are_refused(tmp_path, write_run, capsys):
    run = write_run(tmp_path / "a", 0)
    assert plot(run, "--output", tmp_path / "out") == 3
    assert "have no step in metrics.jsonl yet" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_is_no_run_is_refused_and_nothing_is_written(tmp_path, capsys):
    (tmp_path / "folder").mkdir()
    assert plot(tmp_path / "folder", "--output", tmp_path / "out") == 3
    assert f"runs ({tmp_path / 'folder'}): is no run's folder" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words", [["--output", "out"], ["run"], ["run", "--output", "out", "--smoothing", "0"]]
)
def test_what_lacks_or_cannot_be_is_a_message(words, capsys):
    assert plot(*words) == 2
    assert capsys.readouterr().err.startswith("bert: ")


def test_a_folder_that_cannot_be_written_is_a_message(tmp_path, write_run, capsys):
    assert plot(write_run(tmp_path / "a", 3), "--output", "/proc/nowhere") == 3
    assert "output (/proc/nowhere/loss.png): cannot be written" in capsys.readouterr().err
