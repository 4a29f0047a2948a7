"""The settings of a run, completed once: from its model, from the run that it continues, and from the devices."""

import os
import sys
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import TypeVar

from bert_cli.config.load import changed
from bert_cli.config.training import TrainSettings
from bert_cli.errors import ConfigError, DataError
from bert_cli.parallel.cluster import StoppedWhileJoiningError, find_processes
from bert_cli.parallel.runtime import Devices, Mesh
from bert_cli.planning import layout
from bert_cli.tasks.run.build import find_devices, open_mesh
from bert_cli.tasks.run.models import Source, find_source
from bert_cli.train import checkpoint
from bert_cli.train.loop import StopRequest
from bert_cli.train.metrics import print_line

Settings = TypeVar("Settings", bound=TrainSettings)


def check_output_paths(settings: TrainSettings) -> None:
    """Raise ConfigError when the run has no folder to save in, DataError when its trace cannot be written."""
    trace = settings.parallel.trace
    if trace is not None and not is_writable(trace):
        remedy = "choose another file, in an existing folder"
        raise DataError(f"parallel.trace ({trace})", "cannot be written", remedy)
    if settings.saves and settings.save_ckpt_path is None:
        remedy = "give --save-ckpt-path, the folder of this run"
        raise ConfigError("save_ckpt_path", "is not given", remedy)


def is_writable(path: Path) -> bool:
    """Return whether a file can be written, for a check before the first step instead of after the last."""
    folder = next((parent for parent in path.absolute().parents if parent.exists()), path)
    return not path.is_dir() and folder.is_dir() and os.access(folder, os.W_OK)


def source_of(settings: TrainSettings, continued: Path | None) -> Source | None:
    """Return the model of the run's own checkpoint, else the pretrained one; None for new weights."""
    if continued is not None:
        return find_source(str(settings.save_ckpt_path), "--save-ckpt-path")
    name = settings.pretrained_ckpt_path
    return None if name is None else find_source(name)


def with_shape_of(settings: Settings, source: Source | None) -> Settings:
    """Return the settings with the shape of a model, except for the fields that they set."""
    if source is None:
        return settings
    shape = source.config.model_dump() | settings.bert_config.model_dump(exclude_unset=True)
    return changed(settings, bert_config=shape)


def is_open(settings: TrainSettings) -> bool:
    """Return whether the settings leave the layout or the micro-batch to the devices."""
    leaves_micro_batch = settings.global_batch.examples_per_step is not None
    return settings.parallel.layout == "auto" or leaves_micro_batch


def with_layout(
    settings: Settings, devices: Devices, processes: int, continued: Path | None
) -> Settings:
    """Return the settings with the layout and the micro-batch that they leave open.

    `devices` belong to one process. Dropout depends on the micro-batch, so a continued run has that of its checkpoint.
    """
    kind, number, memory = devices
    if continued is not None and settings.global_batch.examples_per_step is not None:
        size = checkpoint.read_state(continued).fixed["micro_batch_size"]
        settings = layout.with_micro_batch(settings, size)
    return layout.choose(settings, kind, processes * number, memory, processes)


def take_devices(
    settings: Settings, continued: Path | None, stack: ExitStack
) -> tuple[Settings, Mesh, StopRequest]:
    """Handle signals, find the other processes, choose the layout and take the devices.

    Of several processes only rank 0 prints, as long as `stack` is open.
    """
    stop = stack.enter_context(StopRequest())
    cluster = settings.cluster
    processes = find_processes(os.environ, cluster.workers, cluster.rank)
    if processes.rank > 0:
        stack.enter_context(redirect_stdout(open(os.devnull, "w", encoding="utf-8")))  # noqa: SIM115
    if settings.about is not None:
        print_line(f"{settings.about.what}\n{settings.about.expect}")
    if is_open(settings) or settings.require_gpu:
        devices = find_devices(settings.engine, processes, require_gpu=settings.require_gpu)
    if is_open(settings):
        kind, number, memory = devices
        is_auto = settings.global_batch.examples_per_step is not None
        settings = with_layout(settings, devices, processes.count, continued)
        what = f"micro-batch {settings.global_batch.micro_batch_size}" if is_auto else "layout"
        chosen_for = f"{processes.count * number} x {kind} of {memory / 1e9:.1f} GB"
        lines = [f"{what}: chosen for {chosen_for}", *layout.idle_memory(settings, kind, memory)]
        print_line("\n".join(lines))
    try:
        mesh = open_mesh(settings, processes, stop)
    except StoppedWhileJoiningError:
        text = "run: stopped before all processes had started; nothing was done"
        print(text, file=sys.stderr, flush=True)
        raise SystemExit(settings.exit_code_when_stopped) from None
    # Again: TensorFlow's runtime of several processes installs its own handler of SIGTERM.
    stop.listen()
    return settings, mesh, stop
