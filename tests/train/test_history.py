"""Runs are read back from their folders without changing them."""

import fcntl
import json
import time
from pathlib import Path

import pytest
from support.metrics import write_metrics

from bert_cli.commands import COMMANDS
from bert_cli.errors import DataError
from bert_cli.files import FORMAT
from bert_cli.tasks.look.summary import names_of
from bert_cli.train.history import Run, open_runs, runs_below


def test_a_run_that_started_again_is_read_as_one_that_was_never_further(tmp_path):
    lines = [(1, 8.0), (2, 7.0), (3, 6.0), (4, 5.0), (2, 7.5), (3, 6.5)]
    run = write_metrics(tmp_path, [(step, {"mlm_loss": loss}) for step, loss in lines])
    assert {step: row["mlm_loss"] for step, row in run.steps.items()} == {1: 8.0, 2: 7.5, 3: 6.5}
    assert run.last == (3, {"mlm_loss": 6.5})


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


def test_the_state_follows_from_lock_metrics_and_checkpoints_unchanged(tmp_path, write_run):
    assert Run(write_run(tmp_path / "a", 10, saved=(5, 10))).state == "done"
    assert Run(write_run(tmp_path / "b", 7, saved=(5, 7))).state == "stopped"
    run = Run(write_run(tmp_path / "c", 7))
    assert (run.state, run.total_steps) == ("killed", 10)
    run = Run(write_run(tmp_path / "d", 0))
    assert (run.state, run.total_steps) == ("empty", None)
    with open(tmp_path / "a" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert Run(tmp_path / "a").state == "running"
    folder = write_run(tmp_path / "runs" / "e", 7, saved=(5, 7))
    (folder / "step_00000007" / "state.json").unlink()
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    (run,) = runs_below(tmp_path / "runs")
    assert (run.state, run.kind, len(run.steps), run.checkpoints) == ("killed", "pretrain", 7, [5])
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.mark.parametrize(("evaluated", "state"), [((3, 5), "stopped"), ((3, 5, 7), "done")])
def test_a_run_ends_early_after_so_many_evaluations_behind_the_best(
    evaluated, state, tmp_path, write_run
):
    folder = write_run(tmp_path / "a", 7, saved=(3, 7), early_stop=2)
    (folder / "best.json").write_text(json.dumps({"step": 3, "metric": "mlm_loss", "value": 1.0}))
    scored = {step: {"validation_mlm_loss": 1.0} for step in evaluated}
    write_metrics(
        folder, [(step, {"mlm_loss": 1.0, **scored.get(step, {})}) for step in range(1, 8)]
    )
    assert Run(folder).state == state


def test_the_command_of_a_run_is_in_its_settings(tmp_path):
    assert write_metrics(tmp_path / "none", []).kind == "?"
    for values, kind in (
        ({"command": "ner"}, "ner"),
        ({"command": "glue", "glue_task": "mrpc"}, "glue mrpc"),
        ({"command": "squad", "version_2": True}, "squad 2.0"),
    ):
        run = write_metrics(tmp_path / kind, [])
        (run.folder / "settings.json").write_text(json.dumps({"format": FORMAT} | values))
        assert run.kind == kind


def test_the_settings_of_a_training_command_have_its_name():
    names = {command.training for command in COMMANDS.values()} - {""}
    assert names == {"pretrain", "squad", "glue", "ner", "classify", "embed"}
    for name in names:
        assert name == COMMANDS[name].settings_class().COMMAND


def test_runs_are_found_below_a_folder_but_not_in_checkpoints_hidden_folders_and_links(
    tmp_path, write_run, monkeypatch
):
    write_run(tmp_path / "b" / "seed_1", 3, saved=(3,))
    write_run(tmp_path / "a", 3, saved=(3,))
    write_run(tmp_path / ".hidden" / "run", 3)
    (tmp_path / "notes").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "step_00000003" / "metrics.jsonl").touch()
    found = open_runs([tmp_path], "runs")
    assert [run.folder for run in found] == [tmp_path / "a", tmp_path / "b" / "seed_1"]
    assert names_of(found) == ["a", "b/seed_1"]
    monkeypatch.chdir(tmp_path)
    assert names_of(open_runs([tmp_path, Path("a")], "runs")) == ["a", "b/seed_1"]


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
