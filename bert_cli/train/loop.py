"""The training loop (`train`): read the batch of a step, run it, call the hooks; and the parts of the loop.

`State` has the four values of a run that change; everything else is a function of the settings and the step.
"""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import FrameType
from typing import Any

from bert_cli.arrays import Tensors
from bert_cli.errors import DeviceError
from bert_cli.optim.schedule import LossScale, Rate
from bert_cli.parallel.engine import (
    Batch,
    Engine,
    StoppedBetweenMicroBatchesError,
    StopRequested,
    UpdateRequest,
    Value,
)
from bert_cli.processes import is_repeated, note, on_stop_signals

Hook = Callable[["Info"], None]
Prepare = Callable[[Engine, Batch, UpdateRequest], Batch]
Metrics = dict[str, float]
SKIPPED_STEPS = 20  # in a row, after which a run ends
STOPPING = "saving and stopping; a second request stops at once"


@dataclass
class State:
    """The mutable state of a run."""

    weights: Mapping[str, Value]
    slots: Mapping[str, Value]
    """The slots of the optimizer for each weight, by their names in a checkpoint."""
    loss_scale: LossScale
    step: int = 0
    """Steps completed."""


@dataclass(frozen=True)
class StateCopy:
    """The values of a state at one step."""

    weights: Tensors
    slots: Tensors
    loss_scale: LossScale
    step: int


def copy_state(state: State) -> StateCopy:
    """Return a copy of the state. With sharded values every process has to call this function or `gather_shards`."""
    weights = {name: weight.numpy() for name, weight in state.weights.items()}
    slots = {name: slot.numpy() for name, slot in state.slots.items()}
    return StateCopy(weights, slots, state.loss_scale, state.step)


def gather_shards(state: State) -> None:
    """Send this process' shards to the process that copies the state."""
    for value in (*state.weights.values(), *state.slots.values()):
        if value.is_sharded:
            value.numpy()


@dataclass
class Step:
    """Runs one step: a call with a batch updates the state and returns the metrics."""

    engine: Engine
    state: State
    micro_batches: Callable[[int], range]
    """Return the numbers of a step's micro-batches, counted from the start of the run over all processes."""
    learning_rate: Rate
    max_gradient_norm: float | None
    stop_requested: StopRequested = lambda: False
    prepare: Prepare = lambda engine, batch, request: batch
    """Return the batch with the columns that the task computes for this step; all processes call it."""

    def __call__(self, batch: Batch) -> Metrics:
        """Run a step on this process' part of its batch, arrays [M, B, ...]; return means over the complete step.

        Raises DeviceError after SKIPPED_STEPS non-finite gradients in a row, and whatever `Engine.update`
        raises; the state is then unchanged.
        """
        state = self.state
        scale = self.state.loss_scale
        # Numbered over all steps of the run, so that dropout depends on neither replicas nor processes.
        micro_batches = self.micro_batches(state.step)
        request = UpdateRequest(
            step=state.step,
            # Adam's bias correction counts the updates that happened.
            updates=state.step - scale.skipped,
            micro_batches=len(micro_batches),
            first_micro_batch=micro_batches.start,
            learning_rate=self.learning_rate(state.step),
            loss_scale=scale.value,
            max_gradient_norm=self.max_gradient_norm,
            stop_requested=self.stop_requested,
        )
        batch = self.prepare(self.engine, batch, request)
        result = self.engine.update(batch, request)
        state.loss_scale = scale.after(math.isfinite(result.gradient_norm))
        # A skipped step is complete too, so that the batches that follow stay a function of the step.
        state.step += 1
        in_a_row = state.loss_scale.skipped_in_a_row
        if in_a_row >= SKIPPED_STEPS:
            raise DeviceError(
                f"step {state.step}",
                f"the gradient was not finite in {in_a_row} steps in a row (loss scale {state.loss_scale.value:g})",
                "use the last good checkpoint as --pretrained-ckpt-path of a new run with a lower learning rate, or "
                "with optimizer_opts.loss_scaling lower or dynamic",
            )
        return {
            **self.engine.means(result.sums, result.counts),
            "learning_rate": request.learning_rate,
            "gradient_norm": result.gradient_norm,
            "weight_norm": result.weight_norm,
            "loss_scale": scale.value,
            "skipped": state.loss_scale.skipped,
            "tokens": max(result.counts["tokens"], 1.0),
            "examples": max(result.counts["examples"], 1.0),
        }


@dataclass(frozen=True)
class Info:
    """The step number, metrics and batch passed to each hook."""

    step: int
    """Steps completed."""
    metrics: Metrics
    """Metrics of the step; a hook may add metrics for the hooks after it."""
    batch: Batch
    seconds_waited: float
    """Seconds that the loop waited for the batch."""


@dataclass(kw_only=True)
class Every:
    """The cadence of a hook: every N steps, every so many minutes, at the last step."""

    steps: int | None = None
    minutes: float | None = None
    last_step: int | None = None
    agreed: Callable[[bool], bool] = bool
    """Return the common decision of all processes for this process' decision."""

    def __post_init__(self) -> None:
        self.since = time.monotonic()

    def due(self, step: int) -> bool:
        """Return whether the hook is due after this step; if so, the minutes start again."""
        by_steps = self.steps is not None and step % self.steps == 0
        by_time = self.minutes is not None and time.monotonic() - self.since >= 60 * self.minutes
        is_due = self.agreed(by_steps or by_time or step == self.last_step)
        if is_due:
            self.since = time.monotonic()
        return is_due


class StoppedError(Exception):
    """A request to stop ended a training, which is saved, or an evaluation, whose result is discarded."""


class StopRequest:
    """Turns the first SIGTERM, SIGHUP or Ctrl-C into a request to stop, and the second into KeyboardInterrupt.

    Use it as a context, in the main thread; in other threads it leaves signals alone, as it leaves those that are
    ignored at the start (`nohup`). A repeated SIGTERM or SIGHUP counts as the same request, by `is_repeated`.
    """

    def __init__(self) -> None:
        self._requested_at: float | None = None
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        self.listen()
        return self

    def listen(self) -> None:
        """Install the handlers, again if something has replaced them: TensorFlow takes SIGTERM for itself."""
        if threading.current_thread() is threading.main_thread():
            self._handlers = on_stop_signals(self._note) | self._handlers

    def __exit__(self, *exception: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Install the handlers that were there before."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def __call__(self) -> bool:
        """Return whether a stop was requested."""
        return self._requested_at is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._requested_at is not None:
            if is_repeated(number, self._requested_at):
                return
            raise KeyboardInterrupt
        self._requested_at = time.monotonic()
        note(f"{signal.Signals(number).name}: {STOPPING}")


def train(
    state: State,
    batches: Iterable[tuple[int, Batch, float]],
    step: Callable[[Batch], Metrics],
    hooks: Sequence[tuple[Hook, Every]],
    stop_requested: StopRequested,
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
        for hook, cadence in hooks:
            if cadence.due(state.step):
                hook(info)
        if stop_requested():
            return False
    return True


class BackgroundWriter:
    """Runs one write at a time in a thread. As a context it waits for the last write."""

    def __init__(self) -> None:
        self._write: Future[None] = Future()
        self._write.set_result(None)

    def start(self, write: Callable[[], None]) -> None:
        """Start a write when the previous write has ended. Raises the error of the previous write."""
        self.wait()
        future = self._write = Future()

        def run() -> None:
            try:
                write()
                future.set_result(None)
            except BaseException as error:
                future.set_exception(error)

        # A daemon: a run that is killed by a second request to stop does not wait for a disk.
        threading.Thread(target=run, name="save", daemon=True).start()

    def check(self) -> None:
        """Raise the error of a write that has failed."""
        if self._write.done():
            self._write.result()

    def wait(self) -> None:
        """Wait until everything is written. Raises the error of a write that failed."""
        self._write.result()

    def __enter__(self) -> "BackgroundWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait, also after an error of the run, but not after KeyboardInterrupt."""
        if kind is None:
            self.wait()
        elif issubclass(kind, Exception):
            self._write.exception()
