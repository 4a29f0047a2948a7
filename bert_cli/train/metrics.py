"""The metrics of a run: metrics.jsonl, the lines of the log, the speed, a progress bar, and trackers.

A run that is resumed removes the lines of steps that it repeats, so metrics.jsonl always reads as one run that was
never interrupted. A tracker (TensorBoard, Weights & Biases) or a progress bar must never stop or delay a run: after a
failure it is left out.
"""

import json
import math
import os
import queue
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic_core import from_json

from bert_cli.files import JSONObject, name_path, write_atomically
from bert_cli.parallel.engine import StopRequested
from bert_cli.parse.load import leaves
from bert_cli.processes import line_stream, print_line
from bert_cli.progress import TerminalBar
from bert_cli.text import format_duration
from bert_cli.train.loop import STOPPING

HELD_OUT = "validation_"
BITS_PER_BYTE = "bits_per_byte"
Metrics = Mapping[str, float]
# Called with a step and its metrics.
Reporter = Callable[[int, Metrics], None]
# Time limit of wandb for the first answer of its server, while the run continues. If the run ends sooner, wandb waits
# for the answer (measured: ten seconds longer than this limit, whether the server refuses or hangs).
START_SECONDS = 20.0
# Time limit for sending the remaining metrics at the end of a run.
FINISH_SECONDS = 12.0
# Time limit until the run ends without a tracker; shorter than the time that other processes wait for rank 0.
LEAVE_SECONDS = 15.0
# A run forecasts its duration from so many micro-batches, or from two that took as many seconds.
FORECAST_TIMES = 10
FORECAST_SECONDS = 2.0


# --- metrics.jsonl


def jsonl_reporter(path: Path, step: int) -> Reporter:
    """Return a reporter that appends a JSON object for each step, after removing the lines of steps beyond `step`."""
    if path.exists():
        rows = [(read_line(line), line) for line in path.read_bytes().splitlines()]
        lines = [line + b"\n" for row, line in rows if row and row[0] <= step]
        write_atomically(path, b"".join(lines))
    path.parent.mkdir(parents=True, exist_ok=True)

    def report(step: int, metrics: Metrics) -> None:
        # JSON has no NaN or infinity: a loss that is not finite is null.
        finite: dict[str, float | None] = {}
        for name, value in metrics.items():
            finite[name] = value if math.isfinite(value) else None
        with name_path(path), open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **finite}) + "\n")

    return report


def read_line(line: bytes) -> tuple[int, JSONObject] | None:
    """Return step and metrics of a line of metrics.jsonl, None for an incomplete or foreign line."""
    try:
        metrics = from_json(line)
        return int(metrics.pop("step")), metrics
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None


# --- the log


def format_step(step: int, total_steps: int, metrics: Metrics) -> str:
    """Return the line of a log for a step."""
    parts = [
        f"step {step:>{len(str(total_steps))}}/{total_steps}",
        format_losses(metrics),
        f"lr {metrics['learning_rate']:.2e}",
        f"gradient {metrics['gradient_norm']:.3g}",
        f"weights {metrics['weight_norm']:.4g}",
        f"scale {metrics['loss_scale']:g}",
        _format_speed(metrics),
    ]
    # Absent after the first step of a process, which is slower than all other steps.
    if "seconds_left" in metrics:
        parts.append(f"{format_duration(metrics['seconds_left'])} left")
    if metrics.get("skipped"):
        parts.append(f"{metrics['skipped']:.0f} skipped")
    return "  ".join(parts)


def in_words(metrics: Metrics) -> str:
    """Return the masked-LM accuracy as `1 of 20 hidden words right`; empty for another task."""
    accuracy = metrics.get("mlm_accuracy")
    if accuracy is None:
        return ""
    return f"{20 * accuracy:.0f} of 20 hidden words right"


def _format_speed(metrics: Metrics) -> str:
    examples = metrics["examples_per_second"]
    tokens = metrics["tokens_per_second"]
    return f"{examples:.1f} examples/s  {tokens:,.0f} tokens/s"


def format_losses(metrics: Metrics) -> str:
    """Return losses with their accuracies: `mlm 6.9524 (12.1 %)`, `loss 2.1 (start 40.0 %, end 41.2 %)`.

    Held-out metrics are left out.
    """
    parts = []
    of_training = {n: value for n, value in metrics.items() if not n.startswith(HELD_OUT)}
    for head in (name.removesuffix("loss") for name in of_training if name.endswith("loss")):
        accuracies = [
            f"{name[len(head) :].removesuffix('accuracy').rstrip('_')} {100 * value:.1f} %".lstrip()
            for name, value in of_training.items()
            if name.startswith(head) and name.endswith("accuracy")
        ]
        text = f" ({', '.join(accuracies)})" if accuracies else ""
        parts.append(f"{head.rstrip('_') or 'loss'} {metrics[f'{head}loss']:.4f}{text}")
    return "  ".join(parts)


class Pace:
    """Examples and tokens per second, and the time left, from the duration of the last 20 steps.

    The first step of a process is left out: it includes tracing. `work` returns the work of all steps before a step.
    """

    def __init__(self, total_steps: int, work: Callable[[int], int]) -> None:
        self.total_steps = total_steps
        self.started = time.monotonic()
        self.work = work
        self.recent: deque[float] | None = None

    def restart(self) -> None:
        """Start the clock of the next step."""
        self.started = time.monotonic()

    def after_step(self, step: int, examples: float, tokens: float) -> dict[str, float]:
        """Return the speed metrics of the step that has just ended; `tokens` exclude padding."""
        now = time.monotonic()
        # Two readings of a clock may be equal.
        seconds = max(now - self.started, 1e-9)
        self.started = now
        seconds_each = seconds / (self.work(step) - self.work(step - 1))
        if self.recent is None:
            # A mean over more steps would hide that the machine has become slower.
            self.recent = deque(maxlen=20)
        else:
            self.recent.append(seconds_each)
        mean = seconds_each
        if self.recent:
            mean = sum(self.recent) / len(self.recent)
        return {
            "examples_per_second": examples / seconds,
            "tokens_per_second": tokens / seconds,
            "seconds_per_step": seconds,
            "seconds_left": mean * (self.work(self.total_steps) - self.work(step)),
        }


class Forecast:
    """Calls `report` once, with the shortest and the longest expected time of a micro-batch.

    Measured in the first micro-batches of a long step, if they run one after another, or in the first steps, with a
    margin of 10 % on both sides. The first micro-batch is left out, because it still warms up.
    """

    def __init__(self, report: Callable[[float, float], None]) -> None:
        self.report = report
        self.is_reported = False
        self.starts: list[float] = []
        self.times: list[float] = []

    def noting_each_start(self, stop_requested: StopRequested) -> StopRequested:
        """Return a `stop_requested` that also notes the time; it is called before each micro-batch."""

        def asked() -> bool:
            self.starts.append(time.monotonic())
            if len(self.starts) > 2:
                self._add(self.starts[-1] - self.starts[-2])
            return stop_requested()

        return asked

    def step_ends(self, times: Sequence[float] | None) -> None:
        """Note the mean time of a micro-batch in the last step, the last of `times`; the first step has none."""
        self.starts.clear()
        if times:
            self._add(times[-1])

    def _add(self, seconds: float) -> None:
        self.times.append(seconds)
        is_enough = len(self.times) > 1 and sum(self.times) > FORECAST_SECONDS
        if not self.is_reported and (is_enough or len(self.times) >= FORECAST_TIMES):
            self.is_reported = True
            self.report(0.9 * min(self.times), 1.1 * max(self.times))


class ProgressBar(TerminalBar):
    """The progress of a run from step `done` to `total_steps`, and a line of metrics.

    `stop_requested` is checked at each refresh, because the message of the signal handler is overwritten.
    """

    def __init__(self, done: int, total_steps: int, stop_requested: StopRequested) -> None:
        super().__init__(line_stream(), f"step {done:,}/{total_steps:,}", total_steps, done)
        self.total_steps = total_steps
        self.stop_requested = stop_requested
        self.metrics: tuple[str, ...] = ("",)

    def lines(self) -> Sequence[str]:
        """Return the metrics, and the message about the end of the run."""
        if self.stop_requested():
            return (*self.metrics, STOPPING)
        return self.metrics

    def after_step(self, step: int, metrics: Metrics) -> None:
        """Show a step that has just ended."""
        seconds = metrics.get("seconds_left")
        left = ""
        if seconds is not None:
            left = f"{format_duration(seconds)} left"
        parts = [f"lr {metrics['learning_rate']:.2e}", f"gradient {metrics['gradient_norm']:.3g}"]
        columns = "  ".join([format_losses(metrics), *parts, _format_speed(metrics)])
        self.metrics = (*filter(None, [in_words(metrics)]), columns)
        percentage = f"{100 * step / self.total_steps:.1f} %"
        self.show(f"step {step:,}/{self.total_steps:,}  {percentage}", step, left)


# --- trackers


def tensorboard(
    folder: Path, hyperparameters: Mapping[str, object], closing: ExitStack
) -> Reporter:
    """Return a reporter that writes TensorBoard's event files, with hyperparameters."""

    def start(stack: ExitStack) -> Reporter:
        # TensorBoard's own switch: it imports TensorFlow unless there is a module of this name.
        sys.modules.setdefault("tensorboard.compat.notf", ModuleType("notf"))
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.plugins.scalar.summary_v2 import scalar_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        writer = EventFileWriter(str(folder))
        stack.callback(writer.close)

        def write(step: int, summary: Any) -> None:
            writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))

        def report(step: int, metrics: Metrics) -> None:
            for name, value in metrics.items():
                write(step, scalar_pb(name, value))
            writer.flush()

        kinds = (bool, str, int, float)
        values = {name: value for name, value in leaves(hyperparameters) if type(value) in kinds}
        write(0, hparams_pb(values, trial_id=str(folder)))
        return report

    return in_background("tensorboard", start, closing)


def wandb(run_settings: JSONObject, folder: Path, closing: ExitStack) -> Reporter:
    """Return a reporter for Weights & Biases; the run's id is in its folder, so a resumed run is one run."""
    settings = run_settings["wandb"]

    def start(stack: ExitStack) -> Reporter:
        import wandb as client

        folder.mkdir(parents=True, exist_ok=True)
        # Kept with the run, since a resumed run is another process.
        identity = folder / "wandb_id"
        if not identity.exists():
            # A sweep sets the id.
            identity.write_text(os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4))
        run = client.init(
            entity=settings["entity"],
            project=settings["project"],
            name=settings["name"] or folder.name,
            tags=list(settings["tags"]),
            config=run_settings,
            dir=str(folder),
            id=identity.read_text(),
            resume="allow",
            settings=client.Settings(init_timeout=START_SECONDS, finish_timeout=FINISH_SECONDS),
        )
        stack.callback(run.finish)
        return lambda step, metrics: run.log(dict(metrics), step=step)

    return in_background("wandb", start, closing)


def in_background(
    name: str, start: Callable[[ExitStack], Reporter], closing: ExitStack
) -> Reporter:
    """Return a reporter whose tracker starts, reports and ends in a thread; its exception is only printed.

    `start` returns the tracker's reporter and registers its end, which gets LEAVE_SECONDS when `closing` ends.
    """
    waiting: queue.SimpleQueue[tuple[int, Metrics] | None] = queue.SimpleQueue()
    last = 0
    failed = threading.Event()

    def work() -> None:
        nonlocal last
        try:
            with ExitStack() as stack:
                report = start(stack)
                while (item := waiting.get()) is not None:
                    last = item[0]
                    report(*item)
        except Exception as error:
            failed.set()
            state = "not logging"
            if last:
                state = f"stopped logging at step {last}"
            print_line(f"{name}: {state} ({type(error).__name__}: {error})")

    def report(step: int, metrics: Metrics) -> None:
        # After a failure nothing takes the metrics from the queue, and a run may have millions of steps.
        if not failed.is_set():
            waiting.put((step, dict(metrics)))

    def end() -> None:
        waiting.put(None)
        # Then the run ends; the thread is a daemon.
        thread.join(LEAVE_SECONDS)
        if thread.is_alive():
            print_line(f"{name}: does not respond; the run ends without waiting")

    thread = threading.Thread(target=work, daemon=True, name=name)
    thread.start()
    closing.callback(end)
    return report
