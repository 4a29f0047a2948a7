"""What a run left in its folder, read back without touching it."""

import fcntl
import json
import os
import time
from pathlib import Path

import pytest

from bert_cli.commands import COMMANDS
from bert_cli.config.load import load
from bert_cli.errors import DataError
from bert_cli.train.history import Run, is_locked, names_of, open_runs, runs_below
from bert_cli.train.report import Pace, jsonl


def test_a_run_that_went_back_is_read_as_if_it_had_never_been_further(tmp_path):
    lines = [(1, 8.0), (2, 7.0), (3, 6.0), (4, 5.0), (2, 7.5), (3, 6.5)]
    text = "".join(f'{{"step": {step}, "mlm_loss": {loss}}}\n' for step, loss in lines)
    (tmp_path / "metrics.jsonl").write_text(text)
    run = Run(tmp_path)
    assert {step: figures["mlm_loss"] for step, figures in run.steps.items()} == {
        1: 8.0,
        2: 7.5,
        3: 6.5,
    }
    assert run.last == (3, {"mlm_loss": 6.5})


def test_what_is_not_finite_is_none_however_it_was_written(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "a": null, "b": NaN, "c": Infinity, "d": 1}\n'
    )
    assert Run(tmp_path).steps == {1: {"a": None, "b": None, "c": None, "d": 1.0}}


@pytest.mark.parametrize(
    "junk", ['{"step": 3, "mlm_l', "", "[1, 2]", '{"mlm_loss": 1.0}', '"step"']
)
def test_a_line_that_is_cut_or_is_no_step_is_passed_over(tmp_path, write_run, junk):
    folder = write_run(tmp_path / "run", 2)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(junk + "\n")
    assert list(Run(folder).steps) == [1, 2]
    assert Run(folder).step == 2


def test_the_last_step_of_a_long_run_is_read_from_the_end_of_its_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tell = "".join(f'{{"step": {step}, "mlm_loss": 1.0}}\n' for step in range(1, 200_001))
    path.write_text(tell)
    began = time.process_time()
    assert Run(tmp_path).step == 200_000
    assert time.process_time() - began < 0.1


def test_states_are_told_apart(tmp_path, write_run):
    assert Run(write_run(tmp_path / "a", 10, saved=(5, 10))).state == "done"
    assert Run(write_run(tmp_path / "b", 7, saved=(5, 7))).state == "stopped"
    assert Run(write_run(tmp_path / "c", 7, saved=(5,))).state == "killed"
    assert Run(write_run(tmp_path / "d", 7)).state == "killed"
    assert Run(write_run(tmp_path / "e", 0)).state == "empty"


def test_a_run_is_running_while_its_lock_is_held(tmp_path, write_run):
    folder = write_run(tmp_path / "run", 10, saved=(10,))
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert Run(folder).state == "running"
    assert Run(folder).state == "done"
    assert not is_locked(tmp_path / "absent")


def test_looking_at_a_run_changes_nothing_in_its_folder(tmp_path, write_run):
    folder = write_run(tmp_path / "run", 7, saved=(5,))
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    (run,) = runs_below(tmp_path)
    assert (run.state, run.kind, run.step, len(run.steps)) == ("killed", "pretrain", 7, 7)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_checkpoint_without_its_state_is_none(tmp_path, write_run):
    folder = write_run(tmp_path / "run", 7, saved=(5, 7))
    (folder / "step_00000007" / "state.json").unlink()
    assert Run(folder).checkpoints == [5]


def test_before_its_first_checkpoint_a_run_tells_its_steps_by_its_first_line(tmp_path):
    now = 0.0
    pace = Pace(1000, clock=lambda: now)
    tell = jsonl(tmp_path / "metrics.jsonl", 0)
    for step in (1, 2, 3):
        now += 30.0 if step == 1 else 2.0
        tell(step, pace.after_step(step, 64.0, 640.0))
    assert Run(tmp_path).total_steps == 1000
    assert Run(tmp_path / "absent").total_steps is None


TRAINING = {
    "pretrain": ["--config", "pretrain_tiny_128_phase1", "--generated-dataset"],
    "squad": [],
    "glue": ["--glue-task", "mrpc"],
    "ner": [],
    "classify": [],
}


@pytest.mark.parametrize("name", TRAINING)
def test_what_a_run_is_follows_from_its_settings(name, tmp_path):

    settings, _ = load(COMMANDS[name].settings_class(), TRAINING[name], f"bert {name}")
    (tmp_path / "settings.json").write_text(json.dumps(settings.model_dump(mode="json")))
    assert Run(tmp_path).kind == ("glue mrpc" if name == "glue" else name)


def test_scores_are_those_of_the_kept_checkpoint(tmp_path, write_run):
    folder = write_run(tmp_path / "run", 3)
    assert Run(folder).scores == {}
    (folder / "best.json").write_text('{"step": 2, "figure": "f1", "value": 0.8}')
    assert Run(folder).scores == {"f1": 0.8}
    (folder / "scores.json").write_text('{"f1": 0.8, "accuracy": 0.7}')
    assert Run(folder).scores == {"f1": 0.8, "accuracy": 0.7}


def test_runs_are_found_below_a_folder_and_their_checkpoints_are_none(tmp_path, write_run):
    write_run(tmp_path / "b" / "seed_1", 3, saved=(3,))
    write_run(tmp_path / "a", 3, saved=(3,))
    write_run(tmp_path / ".hidden" / "run", 3)
    (tmp_path / "notes").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "step_00000003" / "metrics.jsonl").touch()
    found = [str(run.folder.relative_to(tmp_path)) for run in runs_below(tmp_path)]
    assert found == ["a", "b/seed_1"]


def test_a_hundred_runs_are_found_and_told_within_a_second_of_work(tmp_path, write_run):
    for number in range(100):
        folder = write_run(tmp_path / f"run_{number}", 2000, total=5000, saved=(1000, 2000))
    began = time.process_time()
    found = [(run.state, run.step, run.total_steps) for run in runs_below(tmp_path)]
    assert time.process_time() - began < 1.0
    assert found == [("stopped", 2000, 5000)] * 100
    assert folder.is_dir()


def test_what_is_no_run_is_refused_with_what_to_give(tmp_path):
    with pytest.raises(DataError, match=r"runs \(.*absent\): is no folder; give a run's"):
        open_runs([tmp_path / "absent"], "runs")
    with pytest.raises(DataError, match=r"is no run's folder, it has no metrics.jsonl"):
        open_runs([tmp_path], "runs")


def test_a_run_that_is_given_twice_is_refused(tmp_path, write_run, monkeypatch):
    folder = write_run(tmp_path / "run", 3)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="is given twice"):
        open_runs([folder, Path("run")], "runs")


def test_a_folder_of_seeds_gives_all_its_runs(tmp_path, write_run):
    for seed in (1, 2):
        write_run(tmp_path / "mrpc" / f"seed_{seed}", 3)
    found = open_runs([tmp_path / "mrpc"], "runs")
    assert [run.folder.name for run in found] == ["seed_1", "seed_2"]
    assert names_of(found) == ["mrpc/seed_1", "mrpc/seed_2"]


def test_names_are_as_long_as_it_takes_to_tell_runs_apart():
    def names(*paths):
        return names_of([Run(Path(path)) for path in paths])

    assert names("/x/a", "/x/b") == ["a", "b"]
    assert names("/x/run", "/y/run") == ["x/run", "y/run"]
    assert names("/x/one/run", "/y/one/run", "/y/two/b") == ["x/one/run", "y/one/run", "y/two/b"]
    assert names("/x/a") == ["a"]


def test_settings_that_are_no_json_are_an_error_that_names_the_file(tmp_path, write_run):
    folder = write_run(tmp_path / "run", 3)
    (folder / "settings.json").write_text("{")
    with pytest.raises(DataError, match=r"settings.json: Invalid JSON"):
        _ = Run(folder).settings


@pytest.mark.parametrize("content", [b"[1]", b"\xff{}", b"[" * 100_000])
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("settings.json", lambda run: run.kind),
        ("scores.json", lambda run: run.scores),
        ("best.json", lambda run: run.scores),
        ("step_00000003/state.json", lambda run: run.total_steps),
    ],
)
def test_json_that_no_run_writes_is_an_error_that_names_the_file(
    name, read, content, tmp_path, write_run
):
    folder = write_run(tmp_path / "run", 3, saved=(3,))
    (folder / name).write_bytes(content)
    with pytest.raises(DataError) as refused:
        read(Run(folder))
    assert str(refused.value).startswith(f"{folder / name}: ")


def test_fields_of_another_type_are_no_traceback(tmp_path, write_run):
    folder = write_run(tmp_path / "run", 3, saved=(3,))
    (folder / "step_00000003/state.json").write_text('{"fixed": {"total_steps": "ten"}}')
    (folder / "best.json").write_text('{"value": 1e999, "figure": []}')
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 1e999}\n{"step": 4, "mlm_loss": 1' + "0" * 400 + "}\n")
    run = Run(folder)
    assert (run.total_steps, run.scores, run.step) == (10, {}, 4)
    assert run.steps[4] == {"mlm_loss": None}


def test_figures_that_are_not_utf_8_are_an_error_that_names_the_file(tmp_path, write_run):
    folder = write_run(tmp_path / "run", 3)
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 4, "mlm_loss\xff": 1}\n')
    for read in (
        lambda: Run(folder).steps,
        lambda: Run(folder).last,
        lambda: jsonl(folder / "metrics.jsonl", 3),
    ):
        with pytest.raises(DataError, match=r"metrics.jsonl .*: is not UTF-8"):
            read()


def test_a_lock_that_is_a_link_is_not_followed(tmp_path, write_run):
    folder = write_run(tmp_path / "run", 10, saved=(10,))
    (folder / "lock").unlink()
    other = tmp_path / "other"
    other.write_text("kept")
    (folder / "lock").symlink_to(other)
    with open(other) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert Run(folder).state == "done"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_figures_that_may_not_be_read_are_an_error_that_names_the_file(tmp_path, write_run):
    folder = write_run(tmp_path / "run", 3)
    (folder / "metrics.jsonl").chmod(0)
    with pytest.raises(DataError, match=r"metrics.jsonl: cannot be read"):
        _ = Run(folder).steps
