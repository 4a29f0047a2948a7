"""metrics.jsonl, the lines of the log, the speed, and a progress bar that cannot end a run."""

import io
import json
import shutil
import sys
import time

import pytest
from support.terminal import Terminal

from bert_cli.train.checkpoint import Folder
from bert_cli.train.loop import STOPPING
from bert_cli.train.metrics import (
    Forecast,
    Pace,
    ProgressBar,
    format_losses,
    format_step,
    in_words,
    jsonl_reporter,
)

METRICS = {
    "mlm_loss": 7.5,
    "nsp_loss": 0.7,
    "mlm_accuracy": 0.1,
    "nsp_accuracy": 0.5,
    "learning_rate": 1e-4,
    "gradient_norm": 2.0,
    "weight_norm": 80.0,
    "loss_scale": 1.0,
    "skipped": 0,
    "examples_per_second": 123.4,
    "tokens_per_second": 9876.0,
    "seconds_left": 3700.0,
}


def rows(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_step_is_one_object_and_a_resumed_run_removes_those_it_repeats(tmp_path):
    path = tmp_path / "metrics.jsonl"
    report = jsonl_reporter(path, 0)
    for step in (1, 2, 3, 4):
        report(step, {"mlm_loss": 1.0})
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"step": 5, "mlm_l')
    jsonl_reporter(path, 2)(3, {"mlm_loss": float("nan"), "nsp_loss": float("inf"), "lr": 0.1})
    assert rows(path) == [
        {"step": 1, "mlm_loss": 1.0},
        {"step": 2, "mlm_loss": 1.0},
        {"step": 3, "mlm_loss": None, "nsp_loss": None, "lr": 0.1},
    ]


def test_a_full_disk_is_named_and_leaves_metrics_and_best_score_unchanged(small_disk):
    folder = small_disk(16384)
    lines = "".join(f'{{"step": {step}, "mlm_loss": 1.0}}\n' for step in range(300))
    (folder / "metrics.jsonl").write_text(lines)
    Folder(folder).write_best(1, "f1", 0.5)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(OSError, match=r"No space left on device, .* are missing") as error:
        jsonl_reporter(folder / "metrics.jsonl", 299)
    assert error.value.filename == str(folder / "metrics.jsonl")
    (folder / "rest").write_bytes(bytes(shutil.disk_usage(folder).free))
    with pytest.raises(OSError, match=r"No space left on device, .* are missing") as error:
        Folder(folder).write_best(2, "f1", 0.6)
    assert error.value.filename == str(folder / "best.json")
    (folder / "rest").unlink()
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_line_of_the_log_has_losses_speed_and_the_time_left_if_it_is_known():
    assert format_step(12, 1000, METRICS) == (
        "step   12/1000  mlm 7.5000 (10.0 %)  nsp 0.7000 (50.0 %)  lr 1.00e-04  gradient 2  "
        "weights 80  scale 1  123.4 examples/s  9,876 tokens/s  1 h 01 min left"
    )
    shown = {name: value for name, value in METRICS.items() if name != "seconds_left"}
    assert format_step(12, 1000, shown | {"skipped": 3}).endswith(" tokens/s  3 skipped")
    answers = {"loss": 2.1, "start_accuracy": 0.4, "end_accuracy": 0.412, "validation_loss": 1.0}
    assert format_losses(answers) == "loss 2.1000 (start 40.0 %, end 41.2 %)"
    two = {"a_loss": 1.0, "a_accuracy": 0.5, "b_loss": 2.0}
    assert format_losses(two) == "a 1.0000 (50.0 %)  b 2.0000"


def test_the_accuracy_of_a_masked_lm_is_also_a_number_of_words():
    assert in_words(METRICS) == "2 of 20 hidden words right"
    assert in_words({"mlm_accuracy": 0.046}) == "1 of 20 hidden words right"
    assert in_words({"accuracy": 0.5}) == ""


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 0.0

    monkeypatch.setattr(time, "monotonic", lambda: Clock.now)
    return Clock


def test_the_pace_excludes_the_first_step_and_the_time_between_steps(clock):
    pace = Pace(10, lambda step: step)
    for step, seconds in ((1, 30.0), (2, 2.0), (3, 2.0)):  # the first is traced
        clock.now += seconds
        speed = pace.after_step(step, 64.0, 640.0)
        if step == 1:
            assert (speed["seconds_per_step"], speed["seconds_left"]) == (30.0, 9 * 30.0)
        clock.now += 100.0  # a checkpoint
        pace.restart()
    assert (speed["examples_per_second"], speed["tokens_per_second"]) == (32.0, 320.0)
    assert speed["seconds_left"] == 14.0


def test_the_time_left_follows_the_last_20_steps(clock):
    pace = Pace(43, lambda step: step)
    for step in range(1, 42):
        clock.now += 1.0 if step <= 31 else 3.0
        speed = pace.after_step(step, 64.0, 640.0)
    assert speed["seconds_left"] == 2 * (10 * 1.0 + 10 * 3.0) / 20


def test_the_time_left_counts_the_micro_batches_of_each_step(clock):
    """A micro-batch takes a second; steps have 1, 1, 2 and 4."""
    micro_batches = (0, 1, 2, 4, 8)
    pace = Pace(4, micro_batches.__getitem__)
    for step in (1, 2, 3):
        clock.now += micro_batches[step] - micro_batches[step - 1]
        speed = pace.after_step(step, 64.0, 640.0)
    assert speed["seconds_left"] == 4.0


class ClosedTerminal(Terminal):
    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


@pytest.fixture
def bar_on(monkeypatch):
    def make(output, stop=False, term="xterm") -> ProgressBar:
        monkeypatch.setenv("TERM", term)
        monkeypatch.setenv("COLUMNS", "110")
        monkeypatch.setattr(sys, "stdout", output)
        return ProgressBar(10, 2000, lambda: stop)

    return make


def test_the_progress_bar_shows_the_step_the_metrics_and_that_a_stop_was_requested(bar_on):
    with bar_on(Terminal()) as bar:
        bar.after_step(1500, METRICS)
        bar.live.refresh()
        print("a line above")
        screen = bar.live.console.file.getvalue()
    for part in ("step 10/2,000", "step 1,500/2,000", "75.0 %", "1 h 01 min left", "a line above"):
        assert part in screen
    assert screen.index("2 of 20 hidden words right") < screen.index("mlm 7.5")
    assert "lr 1.00e-04  gradient 2  123.4 examples/s  9,876 tokens/s" in screen
    assert STOPPING not in screen
    with bar_on(Terminal(), stop=True) as bar:
        bar.live.refresh()
        screen = bar.live.console.file.getvalue()
    assert STOPPING in screen
    # A run that is killed leaves the cursor visible.
    assert screen.rindex("\x1b[?25h") > screen.rindex("\x1b[?25l")


def test_there_is_no_progress_bar_without_a_terminal(bar_on):
    for output, options in ((io.StringIO(), {}), (Terminal(), {"term": "dumb"})):
        with bar_on(output, **options) as bar:
            bar.after_step(1, METRICS)
        assert output.getvalue() == ""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failure_of_the_progress_bar_ends_the_bar_and_not_the_run(bar_on):
    with bar_on(ClosedTerminal()) as bar:
        bar.after_step(1, METRICS)
        assert not bar.shown


def test_a_duration_is_forecast_from_the_first_micro_batches_of_a_long_step(clock):
    reported = []
    asked = Forecast(lambda *times: reported.append(times)).noting_each_start(lambda: True)
    # The first micro-batch takes 30 s, as it warms up, and is left out.
    for clock.now in (0.0, 30.0, 34.0):
        assert asked()
    assert not reported
    for clock.now in (39.0, 44.0, 90.0):
        asked()
    assert reported == [pytest.approx((0.9 * 4, 1.1 * 5))]


def test_a_duration_is_forecast_from_the_first_steps_where_they_are_short(clock):
    reported = []
    forecast = Forecast(lambda *times: reported.append(times))
    asked = forecast.noting_each_start(lambda: False)
    for step, times in enumerate([None, *[[9.0, 0.1]] * 8, [0.2], [0.1], [0.5]]):
        # The time between steps, in which a checkpoint is saved, is none of a micro-batch.
        clock.now = 100.0 * step
        assert not asked()
        forecast.step_ends(times)
    assert reported == [pytest.approx((0.09, 0.22))]
