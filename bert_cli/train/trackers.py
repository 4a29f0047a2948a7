"""Trackers: TensorBoard and Weights & Biases get the metrics of a run.

A tracker must never stop a run or hold it up. One that fails prints a message and is left out from then
on; one with a server works in a thread, for which the run waits a limited time at its end. All metrics
are in metrics.jsonl too.
"""

import os
import queue
import secrets
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bert_cli.config.load import leaves
from bert_cli.errors import needs_extra
from bert_cli.train.metrics import Metrics, Reporter, print_line

WANDB_ID = "wandb_id"
"""File of a run's folder with its id at Weights & Biases."""
START_SECONDS = 20.0
"""Until the server must have answered first; the run continues meanwhile. If the run ends sooner, wandb itself
waits for it (measured: ten seconds more than this, whether the server refuses or hangs)."""
FINISH_SECONDS = 12.0
"""For sending the rest at the end of a run."""
LEAVE_SECONDS = 15.0
"""Until the run ends without a tracker: less than its other processes wait for rank 0."""
NOT_COMPARED = (
    "about",
    "save_ckpt_path",
    "tensorboard_dir",
    "wandb",
    "cluster",
    "dry_run",
    "compile_only",
)
"""Settings that do not influence how good a run is."""


def tensorboard(
    folder: Path, run_settings: Mapping[str, Any], last: int, closing: ExitStack
) -> Reporter:
    """Return a reporter that writes TensorBoard's event files; the settings go to HParams.

    If step `last` was reported when `closing` ends, the run is marked as successful.
    """
    import tensorflow as tf

    try:
        writer = tf.summary.create_file_writer(str(folder))
        _write_hparams(writer, run_settings)
    except Exception as error:  # a tracker must never stop a run
        print_line(f"tensorboard: not logging ({type(error).__name__}: {error})")
        return lambda step, metrics: None
    done = 0

    def report(step: int, metrics: Metrics) -> None:
        nonlocal done
        with writer.as_default(step=step):
            for name, value in metrics.items():
                tf.summary.scalar(name, value)
        writer.flush()
        done = step

    def end(step: int, metrics: Metrics) -> None:
        if done >= last:
            _write_end(writer)
        writer.close()

    closing.callback(guarded("tensorboard", end), last, {})
    return guarded("tensorboard", report)


def _write_hparams(writer: Any, run_settings: Mapping[str, Any]) -> None:
    """Write the settings for the HParams tab, which finds the metrics of each run by itself."""
    try:
        from tensorboard.plugins.hparams import api
    except ModuleNotFoundError:
        print_line(
            f"tensorboard: writes no settings for HParams, which {needs_extra('tensorboard')}"
        )
        return
    with writer.as_default(step=0):
        api.hparams(scalars(run_settings))
    writer.flush()


def _write_end(writer: Any) -> None:
    try:
        from tensorboard.plugins.hparams import api_pb2, summary
    except ModuleNotFoundError:
        return
    import tensorflow as tf

    success = summary.session_end_pb(api_pb2.STATUS_SUCCESS)
    with writer.as_default(step=0):
        tf.summary.experimental.write_raw_pb(success.SerializeToString(), step=0)


def scalars(run_settings: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Return the settings that are a number or a string, by their dotted names."""
    chosen = {name: value for name, value in run_settings.items() if name not in NOT_COMPARED}
    return {
        name: value for name, value in leaves(chosen) if isinstance(value, bool | int | float | str)
    }


def wandb(
    settings: Mapping[str, Any], run_settings: Mapping[str, Any], folder: Path, closing: ExitStack
) -> Reporter:
    """Return a reporter for Weights & Biases; the run's id is in its folder, so a resumed run is one run.

    `closing` ends it, because a second run of this process would be taken for the same.
    """

    def start(own: ExitStack) -> Reporter:
        import wandb as client

        folder.mkdir(parents=True, exist_ok=True)
        identity = folder / WANDB_ID
        if not identity.exists():
            # A sweep sets the id.
            new = os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
            identity.write_text(new, encoding="utf-8")
        run = client.init(
            entity=settings["entity"],
            project=settings["project"],
            name=settings["name"] or folder.name,
            tags=list(settings["tags"]),
            config=dict(run_settings),
            dir=str(folder),
            id=identity.read_text(encoding="utf-8"),
            resume="allow",
            settings=client.Settings(init_timeout=START_SECONDS, finish_timeout=FINISH_SECONDS),
        )
        own.callback(run.finish)
        return lambda step, metrics: run.log(dict(metrics), step=step)

    return in_background("wandb", start, closing)


def in_background(
    name: str, start: Callable[[ExitStack], Reporter], closing: ExitStack
) -> Reporter:
    """Return a reporter whose tracker starts, reports and ends in a thread.

    `start` returns the tracker's reporter and registers its end. When `closing` ends, the tracker has
    LEAVE_SECONDS for the rest. An exception of the tracker is printed once and has no other effect.
    """
    waiting: queue.SimpleQueue[tuple[int, Metrics] | None] = queue.SimpleQueue()
    last, failed = 0, threading.Event()

    def work() -> None:
        nonlocal last
        try:
            with ExitStack() as own:
                report = start(own)
                while (item := waiting.get()) is not None:
                    last = item[0]
                    report(*item)
        except Exception as error:
            failed.set()
            state = f"stopped logging at step {last}" if last else "not logging"
            print_line(f"{name}: {state} ({type(error).__name__}: {error})")

    def report(step: int, metrics: Metrics) -> None:
        # After a failure nobody takes them, and a run may have millions.
        if not failed.is_set():
            waiting.put((step, dict(metrics)))

    def end() -> None:
        waiting.put(None)
        thread.join(LEAVE_SECONDS)
        if thread.is_alive():
            print_line(
                f"{name}: does not answer, so the run ends without it; the metrics are in metrics.jsonl"
            )

    thread = threading.Thread(target=work, daemon=True, name=name)
    thread.start()
    closing.callback(end)
    return report


def guarded(name: str, report: Reporter) -> Reporter:
    """Return a reporter that prints the first exception of `report` and then does nothing."""
    is_alive = True

    def guarded_report(step: int, metrics: Metrics) -> None:
        nonlocal is_alive
        if not is_alive:
            return
        try:
            report(step, metrics)
        except Exception as error:  # a tracker must never stop a run
            is_alive = False
            print_line(f"{name}: stopped logging at step {step} ({type(error).__name__}: {error})")

    return guarded_report
