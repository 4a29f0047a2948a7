"""Trackers get the metrics and settings of a run; one that is down neither stops a run nor delays it."""

import json
import shutil
import sys
import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from support.tiny_models import TINY_RUN, flags_of

from bert_cli.cli import main
from bert_cli.train import metrics as trackers

WANDB = {"entity": "team", "project": "p", "name": None, "tags": ["t"]}
TINY = ["pretrain", *flags_of(TINY_RUN, total_num_train_samples=8)]


@pytest.fixture
def wandb_runs(monkeypatch):
    """The runs of the real client, which is offline, each with the metrics that it has taken."""
    import wandb

    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    init, runs = wandb.init, []

    def recorded(**options):
        run, steps = init(**options), []
        runs.append((run, steps))

        def log(metrics, step):
            run.log(metrics, step=step)
            steps.append({"step": step, **metrics})

        return SimpleNamespace(log=log, finish=run.finish)

    monkeypatch.setattr(wandb, "init", recorded)
    return runs


def test_a_tracker_in_the_background_gets_all_metrics_in_order_and_is_ended():
    calls, reported = [], threading.Event()

    def start(own):
        assert reported.wait()  # metrics are reported before it is ready
        own.callback(calls.append, "end")
        return lambda step, metrics: calls.append((step, metrics["loss"]))

    with ExitStack() as closing:
        report = trackers.in_background("tracker", start, closing)
        metrics = {"loss": 3.0}
        for step in (1, 2, 3):
            report(step, metrics)
            metrics["loss"] -= 1.0  # as a later hook may do
        reported.set()
    assert calls == [(1, 3.0), (2, 2.0), (3, 1.0), "end"]


def test_a_background_tracker_that_fails_prints_one_message_and_is_ended(capsys):
    calls, ended = [], threading.Event()

    def start(own):
        own.callback(ended.set)

        def report(step, metrics):
            calls.append(step)
            if step == 2:
                raise ConnectionResetError("gone")

        return report

    with ExitStack() as closing:
        report = trackers.in_background("tracker", start, closing)
        for step in (1, 2):
            report(step, {})
        assert ended.wait()
        report(3, {})
    assert calls == [1, 2]
    message = "tracker: stopped logging at step 2 (ConnectionResetError: gone)\n"
    assert capsys.readouterr().out == message
    with ExitStack() as closing:
        trackers.in_background("tracker", lambda own: 1 / 0, closing)(1, {})
    message = "tracker: not logging (ZeroDivisionError: division by zero)\n"
    assert capsys.readouterr().out == message


@pytest.mark.parametrize("where", ["start", "report", "end"])
def test_a_tracker_that_hangs_delays_no_step_and_the_end_only_for_a_limited_time(
    where, monkeypatch, capsys
):
    monkeypatch.setattr(trackers, "LEAVE_SECONDS", 0.2)
    freed = threading.Event()

    def hang_at(here):
        if here == where:
            freed.wait()

    def start(own):
        hang_at("start")
        own.callback(hang_at, "end")
        return lambda step, metrics: hang_at("report")

    with ExitStack() as closing:
        report = trackers.in_background("tracker", start, closing)
        for step in range(100):  # without waiting: nothing frees the tracker yet
            report(step, {"loss": 1.0})
        began = time.monotonic()
    assert time.monotonic() - began > 0.15
    freed.set()
    assert "tracker: does not respond; the run ends without waiting" in capsys.readouterr().out


# --- wandb


def test_wandb_runs_have_names_and_ids_of_their_own_or_of_the_sweep(
    tmp_path, wandb_runs, monkeypatch
):
    for name, given in (("seed_1", None), ("sweep", "mine")):
        if name == "sweep":
            monkeypatch.setenv("WANDB_RUN_ID", "s4mple1d")
        with ExitStack() as closing:
            settings = {"wandb": WANDB | {"name": given}}
            trackers.wandb(settings, tmp_path / name, closing)(1, {"a": 1.0})
        run, steps = wandb_runs.pop()
        assert run.id == (tmp_path / name / "wandb_id").read_text()
        assert (run.id == "s4mple1d") == (name == "sweep")
        assert (run.entity, run.name, run.tags) == ("team", given or name, ("t",))
        assert steps == [{"step": 1, "a": 1.0}]


def test_a_run_without_the_extra_of_its_tracker_does_not_start(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main([*TINY, "--save-ckpt-path", str(tmp_path / "run"), "--wandb.enabled"]) == 2
    assert "bert: wandb.enabled: needs the extra 'wandb'; pip install" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# --- TensorBoard


@pytest.mark.slow
def test_a_resumed_run_is_one_run_of_both_trackers_with_all_its_settings(tmp_path, wandb_runs):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata

    folder, board = tmp_path / "run", tmp_path / "board"
    words = [*TINY, "--save-ckpt-path", str(folder), "--tensorboard-dir", str(board)]
    words += ["--wandb.enabled", "--wandb.project", "mine", "--wandb.tags", "one"]
    assert main([*words, "--checkpoint-every-steps", "2"]) == 0
    # As one that was killed after its second step.
    shutil.rmtree(folder / "step_00000004")
    assert main(words) == 0
    reader = EventAccumulator(str(board)).Reload()
    tags = reader.PluginTagToContent("hparams")
    start = metadata.parse_session_start_info_plugin_data(tags[metadata.SESSION_START_INFO_TAG])
    chosen = {n: getattr(v, v.WhichOneof("kind")) for n, v in start.hparams.items()}
    assert chosen["seed"] == 1984 and chosen["global_batch.micro_batch_size"] == 2
    assert chosen["optimizer_opts.name"] == "LAMB" and chosen["generated_dataset"] is True
    # Null is no value to compare.
    assert chosen["save_ckpt_path"] == str(folder) and "validation_dir" not in chosen
    assert "mlm_loss" in reader.PluginTagToContent("scalars")
    (first, steps), (second, more) = wandb_runs
    settings = json.loads((folder / "settings.json").read_text())
    for name in ("checkpoint_every_steps", "own_crc32c", "format"):
        del settings[name]
    assert {name: first.config[name] for name in settings} == settings
    assert first.id == second.id == (folder / "wandb_id").read_text()
    assert first.project == "mine" and list(first.tags) == ["one"]
    assert [row["step"] for row in steps + more] == [1, 2, 3, 4, 3, 4]
    assert {"mlm_loss", "learning_rate", "examples_per_second"} <= set(steps[0])
