"""A progress bar at the bottom of a terminal. It must never stop the work: after an error it is left out."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Self, TextIO

from bert_cli.processes import console, print_error
from bert_cli.text import format_duration

SECONDS_BETWEEN_LINES = 10.0  # where no bar is drawn


class TerminalBar:
    """A line with description, bar, elapsed time and time left; lines of text may follow. Use it as a context.

    `shown` is False if the stream is no terminal, and after an error of the bar. `done` of `total` is complete at the
    start; a bar without a total pulses.
    """

    def __init__(self, stream: TextIO, description: str, total: int | None, done: int) -> None:
        self.stream = stream
        self.description = description
        self.total = total
        self.done = done
        # A dumb terminal, such as that of an editor, cannot move its cursor.
        self.shown = stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
        self.live: Any = None

    def __enter__(self) -> Self:
        self._safely(self._start)
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            with suppress(Exception):
                self.live.stop()
        self.shown = False

    def lines(self) -> Sequence[str]:
        """Return the lines below the bar; called at each refresh."""
        return ()

    def show(self, description: str, done: int, left: str = "") -> None:
        """Show that `done` of the total are complete."""

        def draw() -> None:
            task = self.bar.task_ids[0]
            # A download learns its total late.
            self.bar.update(
                task, description=description, completed=done, total=self.total, left=left
            )

        self._safely(draw)

    def _safely(self, draw: Callable[[], None]) -> None:
        if self.shown:
            try:
                draw()
            except Exception:
                self.shown = False

    def _start(self) -> None:
        from rich.console import Group
        from rich.live import Live
        from rich.progress import BarColumn, Progress, TimeElapsedColumn
        from rich.text import Text

        columns = "{task.description}", BarColumn(None), TimeElapsedColumn(), "{task.fields[left]}"
        terminal = console(stream=self.stream)
        self.bar = Progress(*columns, console=terminal, expand=True)
        self.bar.add_task(self.description, total=self.total, completed=self.done, left="")

        def screen() -> Group:
            texts = (Text(line, no_wrap=True, overflow="ellipsis") for line in self.lines())
            return Group(self.bar, *texts)

        self.live = Live(
            get_renderable=screen, console=terminal, transient=True, refresh_per_second=2
        )
        self.live.start(refresh=True)
        # A killed run must not leave the terminal without a cursor.
        terminal.show_cursor(True)


class Progress(TerminalBar):
    """Bytes of a step: a progress bar on a terminal, a line every ten seconds elsewhere, on standard error.

    `total` in bytes may be None, and may be set later. `done` bytes are complete at the start.
    """

    def __init__(self, step: str, total: int | None, done: int = 0) -> None:
        super().__init__(sys.stderr, step, total, done)
        self.bytes = done
        self.started = self.printed = time.monotonic()

    def advance(self, number: int) -> None:
        """Add a number of bytes, which is negative when a download starts over."""
        self.bytes += number
        now = time.monotonic()
        if not self.shown and now - self.printed < SECONDS_BETWEEN_LINES:
            return
        total = f" of {self.total / 1e6:.1f}" if self.total else ""
        percent = f" ({100 * self.bytes / self.total:.0f} %)" if self.total else ""
        speed = (self.bytes - self.done) / 1e6 / max(now - self.started, 1e-9)
        text = f"{self.description}: {self.bytes / 1e6:.1f}{total} MB{percent}, {speed:.1f} MB/s"
        if self.shown:
            left = 0.0
            if self.total and speed > 0:
                left = (self.total - self.bytes) / 1e6 / speed
            left_in_words = f"{format_duration(left)} left" if left else ""
            self.show(text, self.bytes, left_in_words)
        else:
            self.printed = now
            print_error(text)
