"""The training loop: read the batch of a step, run it, call the hooks.

A request to stop (SIGTERM, SIGHUP, Ctrl-C) is checked between micro-batches, so that even a step of an hour stops in
seconds. The step is abandoned, and the last hook saves the state before it.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from bert_cli.parallel.engine import Batch, StoppedBetweenMicroBatchesError
from bert_cli.train.step import State

Hook = Callable[["Info"], None]
# A process gets SIGHUP when its terminal is closed.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
REPEAT_SECONDS = 5.0
"""A SIGTERM so soon after the first request is taken for the same one: SLURM and its srun both send it."""


@dataclass(frozen=True)
class Info:
    """What a hook knows of the step before it."""

    step: int
    """Steps completed."""
    metrics: dict[str, float]
    """Metrics of the step. A hook may add some for the hooks after it."""
    batch: Batch
    """The batch of the step, arrays [M, B, ...]."""
    seconds_waited: float
    """How long the loop waited for the batch."""


class Every:
    """The cadence of a hook: every N steps, every so many minutes, at the last step."""

    def __init__(
        self,
        *,
        steps: int | None = None,
        minutes: float | None = None,
        last_step: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        agreed: Callable[[bool], bool] = bool,
    ) -> None:
        """`agreed` turns this process' decision into that of all processes."""
        self.steps = steps
        self.minutes = minutes
        self.last_step = last_step
        self.clock = clock
        self.agreed = agreed
        self.since = clock()

    def due(self, step: int) -> bool:
        """Return whether the hook is due after this step; if so, the minutes start again."""
        by_steps = self.steps is not None and step % self.steps == 0
        by_time = self.minutes is not None and self.clock() - self.since >= 60 * self.minutes
        if self.agreed(by_steps or by_time or step == self.last_step):
            self.since = self.clock()
            return True
        return False


class StoppedWhileScoringError(Exception):
    """A stop was requested during an evaluation, whose result is discarded."""


class StopRequest:
    """Turns the first SIGTERM, SIGHUP or Ctrl-C into a request to stop, and the second into KeyboardInterrupt.

    Use it as a context, in the main thread; in other threads it leaves signals alone.
    """

    def __init__(self) -> None:
        self.requested = False
        self._requested_at = 0.0
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        self.listen()
        return self

    def listen(self) -> None:
        """Install the handlers, again if something has replaced them: TensorFlow takes SIGTERM for itself."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                before = signal.signal(number, self._note)
                self._handlers.setdefault(number, before)

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._handlers.items():
            # A handler that was not set from Python is None.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def __call__(self) -> bool:
        """Return whether a stop was requested."""
        return self.requested

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.requested:
            if number == signal.SIGTERM and now - self._requested_at < REPEAT_SECONDS:
                return
            raise KeyboardInterrupt
        self.requested, self._requested_at = True, now
        # Not `print`, which the handler may have interrupted.
        name = signal.Signals(number).name
        os.write(2, f"{name}: saving and stopping; once more stops at once\n".encode())


def train(
    state: State,
    batches: Iterable[tuple[int, Batch, float]],
    step: Callable[[Batch], dict[str, float]],
    hooks: Sequence[tuple[Hook, Every]],
    stop_requested: Callable[[], bool],
) -> bool:
    """Run a step for every batch; return False when stopped before the last one.

    `batches` yields (step, batch, seconds waited) from `state.step` on.
    """
    for number, batch, waited in batches:
        assert number == state.step, f"batch of step {number} at step {state.step}"
        try:
            metrics = step(batch)
        except StoppedBetweenMicroBatchesError:
            return False
        info = Info(state.step, metrics, batch, waited)
        for hook, every in hooks:
            if every.due(state.step):
                hook(info)
        if stop_requested():
            return False
    return True
