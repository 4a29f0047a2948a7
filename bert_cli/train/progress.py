"""What a terminal shows while a run runs: how far it is, how fast, how long still, its last figures.

Two lines at the foot that are drawn anew; all that is printed meanwhile goes above them. Where there is
no terminal there is nothing of it, and the log has its lines. It is a comfort: whatever befalls it (a
terminal that is closed, say) ends it and not the run.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

from bert_cli.terminal import console
from bert_cli.train import report
from bert_cli.train.report import Figures, duration, losses

DRAWN_A_SECOND = 2
STOPPING = "saving and stopping; once more stops at once"


class Foot:
    """The lines at the foot of a terminal, for the steps from `done` to `total_steps`.

    Use it with `with`; `shown` says whether there are any. `asked_to_stop` is looked at whenever they
    are drawn: what a signal writes to the terminal itself is drawn over.
    """

    def __init__(self, done: int, total_steps: int, asked_to_stop: Callable[[], bool]) -> None:
        self.done, self.total_steps, self.asked_to_stop = done, total_steps, asked_to_stop
        self.shown = not report.silent and has_terminal()
        self.live: Any = None
        self.bar: Any = None
        self.text: Any = None

    def __enter__(self) -> "Foot":
        if self.shown:
            self._safely(self._start)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.live is not None:
            with suppress(OSError):
                self.live.stop()
        self.shown = False

    def after_step(self, step: int, figures: Figures) -> None:
        """Show a step that has just ended."""
        if self.shown:
            self._safely(lambda: self._show(step, figures))

    def _start(self) -> None:
        from rich.console import Group
        from rich.live import Live
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.text import Text

        where = console()
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:.1f} %"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=where,
            expand=True,
        )
        first = f"step {self.done:,}/{self.total_steps:,}"
        self.bar.add_task(first, total=self.total_steps, completed=self.done, left="")
        self.text = Text(no_wrap=True, overflow="ellipsis")
        stopping = Text(STOPPING)
        self.live = Live(
            get_renderable=lambda: Group(
                self.bar, self.text, *([stopping] if self.asked_to_stop() else [])
            ),
            console=where,
            transient=True,
            refresh_per_second=DRAWN_A_SECOND,
        )
        self.live.start(refresh=True)
        # Who kills the run must not be left without one.
        where.show_cursor(True)

    def _show(self, step: int, figures: Figures) -> None:
        self.bar.update(
            self.bar.task_ids[0],
            completed=step,
            description=f"step {step:,}/{self.total_steps:,}",
            left=f"{duration(figures['seconds_left'])} left" if "seconds_left" in figures else "",
        )
        self.text.plain = in_a_line(figures)

    def _safely(self, draw: Callable[[], None]) -> None:
        try:
            draw()
        except Exception:  # a comfort must never stop a run, whatever it raises
            self.shown = False


def in_a_line(figures: Figures) -> str:
    """The last figures: losses with accuracies, learning rate, gradient, speed."""
    return "  ".join(
        [
            losses(figures),
            f"lr {figures['learning_rate']:.2e}",
            f"gradient {figures['gradient_norm']:.3g}",
            f"{figures['examples_per_second']:.1f} examples/s",
            f"{figures['tokens_per_second']:,.0f} tokens/s",
        ]
    )


def has_terminal() -> bool:
    """Whether standard output is a terminal that lines can be drawn anew on."""
    return sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
