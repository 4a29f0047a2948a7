"""Trackers are told a run's figures and settings; one that is down neither stops a run nor holds it up."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from bert_cli.cli import main
from bert_cli.train import trackers

WANDB = {"entity": None, "project": "p", "name": None, "tags": ["t"]}
SETTINGS = {
    "about": {"what": "a run"},
    "seed": 1,
    "deterministic": True,
    "optimizer_opts": {
        "name": "LAMB",
        "learning_rate": {"max_learning_rate": 0.5},
        "no_weight_decay": ["b"],
    },
    "length_buckets": None,
    "save_ckpt_path": "runs/mine",
}
TINY = [
    "pretrain", "--generated-dataset", "--max-seq-length", "16", "--max-predictions-per-seq", "3",
    "--bert-config.vocab-size", "60", "--bert-config.hidden-size", "16", "--bert-config.num-hidden-layers", "1",
    "--bert-config.num-attention-heads", "2", "--bert-config.intermediate-size", "32",
    "--bert-config.max-position-embeddings", "32", "--global-batch.micro-batch-size", "2",
    "--optimizer-opts.name", "AdamW", "--optimizer-opts.learning-rate.max-learning-rate", "0.001",
    "--total-num-train-samples", "8",
]  # fmt: skip


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)


def test_a_tracker_that_fails_is_said_once_and_left_alone(capsys):
    calls = []

    def fails(step, figures):
        calls.append(step)
        raise OSError("no route to host")

    tell = trackers.guarded("tracker", fails)
    for step in (1, 2, 3):
        tell(step, {})
    assert calls == [1]
    assert capsys.readouterr().out.count("tracker: stopped logging at step 1") == 1


def test_a_tracker_in_the_background_is_told_everything_in_order_and_ended():
    told = []

    def start(own):
        time.sleep(0.3)  # figures come before it is ready
        own.callback(told.append, "end")
        return lambda step, figures: told.append((step, figures["loss"]))

    with ExitStack() as closing:
        tell = trackers.in_background("tracker", start, closing)
        figures = {"loss": 3.0}
        for step in (1, 2, 3):
            tell(step, figures)
            figures["loss"] -= 1.0  # a later hook may change them
    assert told == [(1, 3.0), (2, 2.0), (3, 1.0), "end"]


def test_a_tracker_that_fails_in_the_middle_is_said_once_and_ended(capsys):
    calls, ends = [], []

    def start(own):
        own.callback(ends.append, 1)

        def report(step, figures):
            calls.append(step)
            if step == 2:
                raise ConnectionResetError("gone")

        return report

    with ExitStack() as closing:
        tell = trackers.in_background("tracker", start, closing)
        for step in (1, 2, 3, 4):
            tell(step, {})
            time.sleep(0.05)
    assert calls == [1, 2] and ends == [1]
    told = "tracker: stopped logging at step 2 (ConnectionResetError: gone)\n"
    assert capsys.readouterr().out == told


@pytest.mark.parametrize("where", ["start", "report", "end"])
def test_a_tracker_that_hangs_holds_up_no_step_and_the_end_not_for_long(where, monkeypatch, capsys):
    monkeypatch.setattr(trackers, "LEAVE_SECONDS", 0.5)
    freed = threading.Event()

    def hang_at(here):
        if here == where:
            freed.wait(30)

    def start(own):
        hang_at("start")
        own.callback(hang_at, "end")
        return lambda step, figures: hang_at("report")

    with ExitStack() as closing:
        tell = trackers.in_background("tracker", start, closing)
        began = time.monotonic()
        for step in range(100):
            tell(step, {"loss": 1.0})
        assert time.monotonic() - began < 0.2
    assert 0.4 < time.monotonic() - began < 5.0
    freed.set()
    assert "tracker: does not answer and is left" in capsys.readouterr().out


def records(folder: Path) -> list:
    """What runs that were kept on this machine have written: wandb's messages, in the log that LevelDB has."""
    from wandb.proto import wandb_internal_pb2

    block, head, found = 32_768, 7, []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        data, at, parts = path.read_bytes(), head, b""
        assert data.startswith(b":W&B")
        while at + head <= len(data):
            if block - at % block < head:
                at += block - at % block
                continue
            size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
            if kind == 0 or at + head + size > len(data):  # not written yet
                break
            parts += data[at + head : at + head + size]
            at += head + size
            if kind in (1, 4):  # whole, or the last of several
                found.append(wandb_internal_pb2.Record.FromString(parts))
                parts = b""
    return found


def told_of(folder: Path) -> tuple[list, dict, list[dict]]:
    """The runs, the settings and the steps that wandb has written."""
    until = time.monotonic() + 30.0
    # Its service closes the file a moment after it has said that a run is finished.
    while not (found := records(folder)) or found[-1].WhichOneof("record_type") != "exit":
        assert time.monotonic() < until, "the file of the run has no end"
        time.sleep(0.05)
    runs = [record.run for record in found if record.WhichOneof("record_type") == "run"]
    config = {one.key: json.loads(one.value_json) for one in runs[0].config.update}
    steps = [
        {
            ".".join(one.nested_key) or one.key: json.loads(one.value_json)
            for one in record.history.item
        }
        for record in found
        if record.WhichOneof("record_type") == "history"
    ]
    return runs, config, steps


def test_wandb_offline_writes_the_figures_and_all_settings_under_one_identity(tmp_path, offline):
    asked = {**WANDB, "entity": "team", "project": "mine", "tags": ["a", "b"]}
    for step in (1, 2):
        with ExitStack() as closing:
            trackers.wandb(asked, SETTINGS, tmp_path, closing)(step, {"mlm_loss": 1.0 / step})
    runs, config, steps = told_of(tmp_path)
    identity = (tmp_path / "wandb_id").read_text()
    assert {one.run_id for one in runs} == {identity} and len(runs) >= 2
    assert (runs[0].entity, runs[0].project, list(runs[0].tags)) == ("team", "mine", ["a", "b"])
    assert runs[0].display_name == tmp_path.name
    assert {name: config[name] for name in SETTINGS} == SETTINGS
    assert [(one["_step"], one["mlm_loss"]) for one in steps] == [(1, 1.0), (2, 0.5)]


def test_runs_after_one_another_in_a_process_are_wandb_runs_of_their_own(tmp_path, offline):
    for name in ("seed_1", "seed_2"):
        with ExitStack() as closing:
            trackers.wandb(WANDB, {}, tmp_path / name, closing)(1, {"loss": 1.0})
        (run,), _, _ = told_of(tmp_path / name)
        assert run.run_id == (tmp_path / name / "wandb_id").read_text()
    assert len({path.read_text() for path in tmp_path.glob("*/wandb_id")}) == 2


def test_a_run_of_a_sweep_has_the_name_that_the_sweep_gave_it(tmp_path, offline, monkeypatch):
    monkeypatch.setenv("WANDB_RUN_ID", "s4mple1d")
    with ExitStack() as closing:
        trackers.wandb(WANDB, {}, tmp_path, closing)(1, {"loss": 1.0})
    (run,), _, _ = told_of(tmp_path)
    assert run.run_id == (tmp_path / "wandb_id").read_text() == "s4mple1d"


def test_a_wandb_that_cannot_start_lets_the_run_go_on(tmp_path, monkeypatch, capsys):
    import wandb

    def refuses(**arguments):
        raise wandb.errors.CommError("no network")

    monkeypatch.setattr(wandb, "init", refuses)
    with ExitStack() as closing:
        trackers.wandb(WANDB, {}, tmp_path, closing)(1, {"mlm_loss": 1.0})
    assert "wandb: not logging (CommError: no network)" in capsys.readouterr().out


def command(
    folder: Path, *more: str, **variables: str
) -> tuple[subprocess.CompletedProcess, float]:
    """A run as a person starts it, and how long it took."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "bert_cli", *TINY, "--save-ckpt-path", str(folder), *more],
        env={**kept, "WANDB_API_KEY": "a" * 40, "WANDB_DIR": str(folder.parent), **variables},
        capture_output=True,
        text=True,
    )
    return done, time.monotonic() - began


DOWN = ("refuses", "hangs")


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> float:
    """How long the run takes that nobody is told of."""
    done, seconds = command(tmp_path_factory.mktemp("alone") / "run")
    assert done.returncode == 0, done.stderr
    return seconds


def steps_of(folder: Path) -> list[int]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


@pytest.fixture(scope="module")
def unanswered(tmp_path_factory):
    """Runs whose server is down in one way and the other, and how long they took: both wait, so at once."""

    def run(kind: str):
        folder = tmp_path_factory.mktemp(kind) / "run"
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            if kind == "hangs":
                held.listen()  # takes connections and never answers
            server = f"http://127.0.0.1:{held.getsockname()[1]}"
            return folder, *command(folder, "--wandb.enabled", WANDB_BASE_URL=server)

    with ThreadPoolExecutor() as pool:
        return dict(zip(DOWN, pool.map(run, DOWN), strict=True))


@pytest.mark.parametrize("kind", DOWN)
def test_a_server_that_is_down_neither_stops_a_run_nor_holds_it_up(kind, alone, unanswered):
    folder, done, seconds = unanswered[kind]
    assert done.returncode == 0, done.stderr
    assert steps_of(folder) == [1, 2, 3, 4]
    assert "4 steps done" in done.stdout and "wandb: " in done.stdout + done.stderr
    # A run so short ends before wandb has given up, which then is waited for; the machine may be busy otherwise.
    assert seconds < 2 * alone + trackers.START_SECONDS + 20.0


def test_a_run_at_the_command_line_writes_all_its_settings_for_wandb(tmp_path):
    flags = ["--wandb.enabled", "--wandb.project", "mine", "--wandb.tags", "one"]
    done, _ = command(tmp_path / "run", *flags, WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr
    runs, config, steps = told_of(tmp_path / "run")
    settings = json.loads((tmp_path / "run" / "settings.json").read_text())
    assert {name: config[name] for name in settings} == settings
    assert runs[0].project == "mine" and list(runs[0].tags) == ["one"]
    assert [one["_step"] for one in steps] == [1, 2, 3, 4]
    assert {"mlm_loss", "learning_rate", "examples_per_second"} <= set(steps[0])


def test_tensorboard_files_hold_the_figures(tmp_path):
    import tensorflow as tf

    with ExitStack() as closing:
        trackers.tensorboard(tmp_path, {}, 9, closing)(7, {"mlm_loss": 2.5})
    (file,) = tmp_path.glob("events.out.tfevents*")
    found = [
        (event.step, value.tag, float(tf.make_ndarray(value.tensor)))
        for event in map(tf.compat.v1.Event.FromString, _payloads(file))
        for value in event.summary.value
        if value.tag == "mlm_loss"
    ]
    assert found == [(7, "mlm_loss", 2.5)]


def _payloads(path):
    import tensorflow as tf

    return [record.numpy() for record in tf.data.TFRecordDataset(str(path))]


def hparams_tab(folder: Path) -> dict[str, tuple[dict, dict, int]]:
    """Run -> settings, last figures and status, as TensorBoard's HParams tab gets them from its backend."""
    from google.protobuf import json_format
    from tensorboard import context
    from tensorboard.backend.event_processing import data_provider, plugin_event_multiplexer
    from tensorboard.plugins import base_plugin
    from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups

    reader = plugin_event_multiplexer.EventMultiplexer()
    reader.AddRunsFromDirectory(str(folder))
    reader.Reload()
    provider = data_provider.MultiplexerDataProvider(reader, str(folder))
    tab = backend_context.Context(base_plugin.TBContext(data_provider=provider))
    request, experiment = context.RequestContext(), "0"
    runs = tab.hparams_metadata(request, experiment)
    known = tab.experiment_from_metadata(
        request,
        experiment,
        True,
        runs,
        tab.hparams_from_data_provider(request, experiment, limit=100),
    )
    asked = api_pb2.ListSessionGroupsRequest(slice_size=100, start_index=0, include_metrics=True)
    asked.allowed_statuses.extend([api_pb2.STATUS_UNKNOWN, api_pb2.STATUS_SUCCESS])
    for info in known.metric_infos:
        asked.col_params.add(metric=info.name)
    answer = list_session_groups.Handler(request, tab, experiment, asked).run()
    return {
        group.sessions[0].name: (
            {name: json_format.MessageToDict(value) for name, value in group.hparams.items()},
            {one.name.tag: one.value for one in group.sessions[0].metric_values},
            group.sessions[0].status,
        )
        for group in answer.session_groups
    }


def test_the_hparams_tab_compares_runs_by_their_settings_and_last_figures(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.plugins.hparams import api_pb2

    for name, rate, last in (("slow", 0.1, 2), ("fast", 0.5, 9)):
        learning = {"name": "LAMB", "learning_rate": {"max_learning_rate": rate}}
        told = {**SETTINGS, "optimizer_opts": learning}
        with ExitStack() as closing:
            tell = trackers.tensorboard(tmp_path / name, told, last, closing)
            for step in (1, 2):
                tell(step, {"mlm_loss": rate / step})
    tab = hparams_tab(tmp_path)
    assert set(tab) == {"slow", "fast"}
    settings, figures, status = tab["slow"]
    assert settings["optimizer_opts.learning_rate.max_learning_rate"] == 0.1
    assert settings["optimizer_opts.name"] == "LAMB" and settings["deterministic"] is True
    assert "save_ckpt_path" not in settings and "length_buckets" not in settings
    assert figures["mlm_loss"] == pytest.approx(0.05) and status == api_pb2.STATUS_SUCCESS
    # It has not come to its last step: the same command goes on with it.
    assert tab["fast"][2] == api_pb2.STATUS_UNKNOWN


def test_without_its_package_a_run_has_figures_in_tensorboards_files_and_says_what_is_missing(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "tensorboard.plugins.hparams", None)
    with ExitStack() as closing:
        trackers.tensorboard(tmp_path, SETTINGS, 1, closing)(1, {"mlm_loss": 2.5})
    assert "needs the extra 'tensorboard'" in capsys.readouterr().out
    assert list(tmp_path.glob("events.out.tfevents*"))


def test_a_board_that_cannot_be_written_lets_the_run_go_on(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with ExitStack() as closing:
        tell = trackers.tensorboard(tmp_path / "file" / "board", SETTINGS, 2, closing)
        tell(1, {"mlm_loss": 2.5})
        tell(2, {"mlm_loss": 2.5})
    told = capsys.readouterr().out
    assert told.count("tensorboard: ") == 1 and "not logging" in told


def test_a_run_that_goes_on_is_one_run_of_the_hparams_tab(tmp_path):
    pytest.importorskip("tensorboard")
    folder, board = tmp_path / "run", tmp_path / "board"
    words = [*TINY, "--save-ckpt-path", str(folder), "--tensorboard-dir", str(board / "mine")]
    assert main([*words, "--checkpoint-every-steps", "2"]) == 0
    # As one that was killed after its second step.
    for path in (folder / "step_00000004").iterdir():
        path.unlink()
    (folder / "step_00000004").rmdir()
    assert main(words) == 0
    tab = hparams_tab(board)
    assert list(tab) == ["mine"]
    settings, figures, _ = tab["mine"]
    assert settings["seed"] == 1984 and settings["global_batch.micro_batch_size"] == 2
    assert "mlm_loss" in figures
