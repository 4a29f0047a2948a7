"""Runs are read back from their folders without changing them."""

import fcntl
import time

import pytest
from support.metrics import write_metrics

from bert_cli.commands import COMMANDS
from bert_cli.errors import DataError
from bert_cli.train.history import Run, runs_below


def test_incomplete_and_foreign_lines_are_ignored_and_values_that_are_not_finite_are_none(tmp_path):
    junk = ['{"step": 3, "mlm_l', "", "[1, 2]", '{"mlm_loss": 1.0}', '"step"', '{"step": 1e999}']
    lines = ['{"step": 1, "a": null, "b": NaN, "c": Infinity, "d": 1}', *junk]
    lines.append('{"step": 2, "e": 1' + "0" * 400 + "}")
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    run = Run(tmp_path)
    assert run.steps == {1: {"a": None, "b": None, "c": None, "d": 1.0}, 2: {"e": None}}
    assert run.step == 2


def test_a_long_run_is_read_from_the_end_of_its_file(tmp_path):
    run = write_metrics(tmp_path, [(step, {"loss": 1.0}) for step in range(1, 100_001)])
    began = time.process_time()
    assert run.step == 100_000
    assert time.process_time() - began < 0.1


def test_a_run_whose_lock_is_held_runs_and_reading_changes_nothing(tmp_path, write_run):
    write_run(tmp_path / "a", 10, saved=(5, 10))
    with open(tmp_path / "a" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert Run(tmp_path / "a").state == "running"
    folder = write_run(tmp_path / "runs" / "e", 7, saved=(5, 7))
    (folder / "step_00000007" / "state.json").unlink()
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    (run,) = runs_below(tmp_path / "runs")
    assert (run.state, len(run.steps), run.checkpoints) == ("killed", 7, [5])
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_the_settings_of_a_training_command_have_its_name():
    names = {command.training for command in COMMANDS.values()} - {""}
    assert names == {"pretrain", "squad", "glue", "ner", "classify", "embed"}
    for name in names:
        assert name == COMMANDS[name].settings_class().COMMAND


def test_a_file_that_cannot_be_read_is_an_error_that_names_it(tmp_path, write_run):
    folder = write_run(tmp_path / "run", 3, saved=(3,))
    (folder / "best.json").write_text('{"step": 2, "metric": "f1", "value": 0.8}')
    assert Run(folder).scores == {"f1": 0.8}
    # Fields of another type are ignored.
    (folder / "step_00000003/state.json").write_text('{"fixed": {"total_steps": "ten"}}')
    (folder / "best.json").write_text('{"value": 1e999, "metric": []}')
    assert (Run(folder).total_steps, Run(folder).scores) == (10, {})
    for name in ("settings.json", "best.json", "step_00000003/state.json"):
        (folder / name).write_bytes(b"[1]")
    for name, read in (
        ("settings.json", lambda: Run(folder).kind),
        ("best.json", lambda: Run(folder).scores),
        ("step_00000003/state.json", lambda: Run(folder).total_steps),
    ):
        with pytest.raises(DataError) as error:
            read()
        assert str(error.value).startswith(f"{folder / name}")
