"""Trackers: who else is told the figures of a run, so that many runs can be compared in one place.

A tracker must never stop a run or hold it up, whatever it does. One that fails is said once and left alone; one that
speaks to a server does so in a thread of its own, which the run waits for at its end, and not for long. What it was
told lies in the run's folder too, in metrics.jsonl.
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
from bert_cli.train.report import Figures, Report, say

WANDB_ID = "wandb_id"
"""File of a run's folder: the id that it has at Weights & Biases."""
START_SECONDS = 20.0
"""A server may take so long to answer at first; the run goes on meanwhile. Not longer, since wandb itself waits for
it where a run ends sooner (measured: ten seconds more than this, whether the server refuses or hangs)."""
FINISH_SECONDS = 12.0
"""What a server was not told yet may take so long at the end of a run."""
LEAVE_SECONDS = 15.0
"""So long a run waits for a tracker at its end, all in all: less than its other processes wait for rank 0."""
NO_CHOICE = (
    "about",
    "save_ckpt_path",
    "tensorboard_dir",
    "wandb",
    "cluster",
    "dry_run",
    "compile_only",
)
"""Settings that say nothing of how good a run can be."""


def tensorboard(
    folder: Path, run_settings: Mapping[str, Any], last: int, closing: ExitStack
) -> Report:
    """Write scalars as TensorBoard event files (TensorFlow writes them itself), and the settings for HParams.

    A run that has reported its step `last` is written down as ended well, when `closing` ends.
    """
    import tensorflow as tf

    try:
        writer = tf.summary.create_file_writer(str(folder))
        _write_hparams(writer, run_settings)
    except Exception as error:  # as below
        say(f"tensorboard: not logging ({type(error).__name__}: {error})")
        return lambda step, figures: None
    done = 0

    def report(step: int, figures: Figures) -> None:
        nonlocal done
        with writer.as_default(step=step):
            for name, value in figures.items():
                tf.summary.scalar(name, value)
        writer.flush()
        done = step

    def end(step: int, figures: Figures) -> None:
        if done >= last:
            _write_end(writer)
        writer.close()

    closing.callback(guarded("tensorboard", end), last, {})
    return guarded("tensorboard", report)


def _write_hparams(writer: Any, run_settings: Mapping[str, Any]) -> None:
    """The settings of a run for the HParams tab; it finds the figures of each run by itself."""
    try:
        from tensorboard.plugins.hparams import api
    except ModuleNotFoundError:
        say(f"tensorboard: writes no settings for HParams, which {needs_extra('tensorboard')}")
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

    told = summary.session_end_pb(api_pb2.STATUS_SUCCESS)
    with writer.as_default(step=0):
        tf.summary.experimental.write_raw_pb(told.SerializeToString(), step=0)


def scalars(run_settings: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """The settings that are one number or word each, by their dotted names."""
    chosen = {name: value for name, value in run_settings.items() if name not in NO_CHOICE}
    return {
        name: value for name, value in leaves(chosen) if isinstance(value, bool | int | float | str)
    }


def wandb(
    settings: Mapping[str, Any], run_settings: Mapping[str, Any], folder: Path, closing: ExitStack
) -> Report:
    """Log to Weights & Biases; the run's id lies beside the checkpoints, so a resumed run is one run.

    `closing` ends it, since a second run of this process would be taken for the same. A start that
    fails (no network, no login) is said and the run goes on without.
    """

    def start(own: ExitStack) -> Report:
        import wandb as client

        folder.mkdir(parents=True, exist_ok=True)
        identity = folder / WANDB_ID
        if not identity.exists():
            # A sweep has named its run already.
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
        return lambda step, figures: run.log(dict(figures), step=step)

    return in_background("wandb", start, closing)


def in_background(name: str, start: Callable[[ExitStack], Report], closing: ExitStack) -> Report:
    """A report whose tracker starts, is told and ends in a thread of its own.

    `start` gives the report of the tracker and leaves to its stack how that ends. When `closing` ends, the
    tracker has LEAVE_SECONDS to be told the rest. Whatever it raises is said once; nothing follows from it.
    """
    untold: queue.SimpleQueue[tuple[int, Figures] | None] = queue.SimpleQueue()
    step, failed = 0, threading.Event()

    def work() -> None:
        nonlocal step
        try:
            with ExitStack() as own:
                report = start(own)
                while (told := untold.get()) is not None:
                    step = told[0]
                    report(*told)
        except Exception as error:  # a tracker must never stop a run, whatever it raises
            failed.set()
            where = f"stopped logging at step {step}" if step else "not logging"
            say(f"{name}: {where} ({type(error).__name__}: {error})")

    def tell(number: int, figures: Figures) -> None:
        # By then nobody takes them, and a run may have millions.
        if not failed.is_set():
            untold.put((number, dict(figures)))

    def end() -> None:
        untold.put(None)
        thread.join(LEAVE_SECONDS)
        if thread.is_alive():
            say(f"{name}: does not answer and is left; the figures are in metrics.jsonl")

    thread = threading.Thread(target=work, daemon=True, name=name)
    thread.start()
    closing.callback(end)
    return tell


def guarded(name: str, report: Report) -> Report:
    """The same report, which after its first failure says so and does nothing any more."""
    alive = True

    def safely(step: int, figures: Figures) -> None:
        nonlocal alive
        if not alive:
            return
        try:
            report(step, figures)
        except Exception as error:  # a tracker must never stop a run, whatever it raises
            alive = False
            say(f"{name}: stopped logging at step {step} ({type(error).__name__}: {error})")

    return safely
