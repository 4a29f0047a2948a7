"""What a terminal shows while a run runs, and that it can never end one."""

import io
import sys

import pytest

from bert_cli.train import progress, report

FIGURES = {
    "mlm_loss": 7.5,
    "mlm_accuracy": 0.1,
    "learning_rate": 1e-4,
    "gradient_norm": 2.0,
    "examples_per_second": 123.4,
    "tokens_per_second": 9876.0,
    "seconds_left": 3700.0,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Closed(Terminal):
    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


def on(monkeypatch, where) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.setattr(report, "silent", False)
    monkeypatch.setattr(sys, "stdout", where)


def test_a_terminal_shows_how_far_a_run_is_with_its_last_figures(monkeypatch):
    on(monkeypatch, Terminal())
    with progress.Foot(10, 2000, lambda: False) as foot:
        foot.after_step(1500, FIGURES)
        foot.live.refresh()
        print("a line above")
        told = foot.live.console.file.getvalue()
    for part in ("step 10/2,000", "step 1,500/2,000", "75.0 %", "1 h 01 min left", "a line above"):
        assert part in told
    assert "mlm 7.5000 (10.0 %)  lr 1.00e-04  gradient 2  123.4 examples/s  9,876 tokens/s" in told
    assert progress.STOPPING not in told


def test_who_asked_a_run_to_stop_sees_that_it_was_heard(monkeypatch):
    on(monkeypatch, Terminal())
    with progress.Foot(0, 10, lambda: True) as foot:
        foot.live.refresh()
        assert progress.STOPPING in foot.live.console.file.getvalue()


def test_the_cursor_is_left_visible_for_who_is_killed(monkeypatch):
    on(monkeypatch, Terminal())
    with progress.Foot(0, 10, lambda: False) as foot:
        told = foot.live.console.file.getvalue()
        assert told.rindex("\x1b[?25h") > told.rindex("\x1b[?25l")


@pytest.mark.parametrize("why", ["no terminal", "dumb", "not rank 0"])
def test_where_there_is_no_terminal_to_draw_on_nothing_is_shown(monkeypatch, why):
    on(monkeypatch, io.StringIO() if why == "no terminal" else Terminal())
    if why == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(report, "silent", why == "not rank 0")
    with progress.Foot(0, 10, lambda: False) as foot:
        assert not foot.shown
        foot.after_step(1, FIGURES)
    assert sys.stdout.getvalue() == ""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_terminal_that_is_closed_ends_the_show_and_not_the_run(monkeypatch):
    on(monkeypatch, Closed())
    with progress.Foot(0, 10, lambda: False) as foot:
        foot.after_step(1, FIGURES)
        assert not foot.shown


def test_a_figure_that_is_lacking_ends_the_show_and_not_the_run(monkeypatch):
    on(monkeypatch, Terminal())
    with progress.Foot(0, 10, lambda: False) as foot:
        foot.after_step(1, {})
        assert not foot.shown
        foot.after_step(2, FIGURES)
