"""The loop: read a step's batch, run it, tell the hooks.

It is the same for every kind of run: batches come from something that reads ahead, `step` moves the
state, hooks do what is done now and then. A request to stop (SIGTERM, Ctrl-C) is looked at between
micro-batches, so that even a step of an hour stops in seconds; the step is given up, the last hook
saves the state as it was before it, and nothing is lost but that step's work.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from bert_cli.parallel.tensorflow.engine import StoppedBetweenMicroBatchesError
from bert_cli.train.step import Batch, State

Hook = Callable[["Info"], None]
# SIGHUP too: it is what a run hears when its terminal is closed.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SAME_WISH_SECONDS = 5.0
"""A scheduler may tell a process the same in two ways, as SLURM by itself and by its srun: a SIGTERM so soon
after the first request is no second one, which would end the run before it has saved."""


@dataclass(frozen=True)
class Info:
    """What a hook is told after a step."""

    step: int
    """Steps done."""
    figures: dict[str, float]
    """The step's figures; a hook may add its own for those after it."""
    batch: Batch
    """The step's batch, arrays [M, B, ...]."""
    seconds_waited: float
    """How long the loop stood still for its input."""


class Every:
    """When a hook is due: after every N steps, after so many minutes, at the last step."""

    def __init__(
        self,
        *,
        steps: int | None = None,
        minutes: float | None = None,
        last_step: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        agreed: Callable[[bool], bool] = bool,
    ) -> None:
        self.steps = steps
        self.minutes = minutes
        self.last_step = last_step
        self.clock = clock
        self.agreed = agreed
        """Own opinion -> that of all processes."""
        self.since = clock()

    def due(self, step: int) -> bool:
        """Whether it is time after this step; asking resets the minutes when it is."""
        by_steps = self.steps is not None and step % self.steps == 0
        by_time = self.minutes is not None and self.clock() - self.since >= 60 * self.minutes
        if self.agreed(by_steps or by_time or step == self.last_step):
            self.since = self.clock()
            return True
        return False


class StoppedWhileScoringError(Exception):
    """Someone asked to stop; what was scored so far is given up."""


class StopRequest:
    """Turns the first SIGTERM, SIGHUP or Ctrl-C into a wish and the second into an end.

    Use it with `with`, in the main thread; elsewhere signals are left alone.
    """

    def __init__(self) -> None:
        self.asked = False
        self._asked_at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        self.listen()
        return self

    def listen(self) -> None:
        """Take the signals; once more when something else has taken them since.

        TensorFlow's runtime of several processes makes SIGTERM a note to itself.
        """
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                before = signal.signal(number, self._note)
                self._before.setdefault(number, before)

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            # None stands for a handler that was not set from Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def __call__(self) -> bool:
        """Whether someone asked to stop."""
        return self.asked

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.asked:
            if number == signal.SIGTERM and now - self._asked_at < SAME_WISH_SECONDS:
                return
            raise KeyboardInterrupt
        self.asked, self._asked_at = True, now
        # Not `print`: a handler may interrupt the very print it would then re-enter.
        name = signal.Signals(number).name
        os.write(2, f"{name}: saving and stopping; once more stops at once\n".encode())


def train(
    state: State,
    batches: Iterable[tuple[int, Batch, float]],
    step: Callable[[Batch], dict[str, float]],
    hooks: Sequence[tuple[Hook, Every]],
    asked_to_stop: Callable[[], bool],
) -> bool:
    """Run a step for every batch; False when it was asked to stop before the last one.

    `batches` yields (step, batch, seconds waited) from `state.step` on.
    """
    for number, batch, waited in batches:
        assert number == state.step, f"batch of step {number} at step {state.step}"
        try:
            figures = step(batch)
        except StoppedBetweenMicroBatchesError:
            return False
        info = Info(state.step, figures, batch, waited)
        for hook, every in hooks:
            if every.due(state.step):
                hook(info)
        if asked_to_stop():
            return False
    return True
