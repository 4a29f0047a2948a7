"""The training run that pre-training and fine-tuning share.

Find the processes and devices, build the model and engine, load the state, train with hooks, save.
The same command with the same folder continues a run.
"""

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TypeVar

from bert_cli.config import layout
from bert_cli.config.training import TrainSettings, describe
from bert_cli.data.stream.prefetch import read_ahead
from bert_cli.errors import ConfigError
from bert_cli.files import write_json_atomically
from bert_cli.parallel.cluster import Processes, find_processes
from bert_cli.parallel.engine import Mesh
from bert_cli.parallel.rendezvous import StoppedWhileJoiningError
from bert_cli.parallel.tensorflow.mesh import devices_here
from bert_cli.parallel.watchdog import Watchdog
from bert_cli.tasks.run import agreement, build, hooks, start
from bert_cli.tasks.run.spec import Run, RunResult, RunSpec
from bert_cli.train import checkpoint, metrics
from bert_cli.train.folder import (
    METRICS,
    SETTINGS,
    checkpoint_name,
    lock_run,
    prune,
    remove_partial_checkpoints,
)
from bert_cli.train.loop import Every, StopRequest, train
from bert_cli.train.metrics import ProgressBar, format_duration, print_line
from bert_cli.train.saving import BackgroundWriter, copy_state, gather_moments
from bert_cli.train.step import State

DRY_RUN_STEPS = 2
Settings = TypeVar("Settings", bound=TrainSettings)


def prepare(settings: Settings, stack: ExitStack) -> tuple[Settings, Mesh, StopRequest]:
    """Handle signals, find the other processes, choose the layout and take the devices."""
    stop = stack.enter_context(StopRequest())
    processes = find_processes(settings.cluster, os.environ)
    metrics.silent = processes.rank > 0
    if settings.about is not None:
        print_line(f"{settings.about.what}\n{settings.about.expect}")
    settings = _with_layout(settings, processes)
    try:
        mesh = build.open_mesh(settings, processes, stop)
    except StoppedWhileJoiningError:
        print("run: stopped before all processes had started; nothing was done", flush=True)
        raise SystemExit(settings.exit_code_when_stopped) from None
    # Again: TensorFlow's runtime of several processes installs its own handler of SIGTERM.
    stop.listen()
    return settings, mesh, stop


def run_training(
    settings: TrainSettings, mesh: Mesh, spec: RunSpec, stop: StopRequest, stack: ExitStack
) -> RunResult:
    """Train from the state of the run's folder to the last step, or until a stop is requested.

    `stack` keeps the lock of the folder. Raises ConfigError, DataError, CheckpointError or DeviceError.
    """
    began = time.monotonic()
    print_line(f"plan:\n{describe(spec.plan)}\n{_describe_layout(settings, mesh)}")
    run = _build(settings, mesh, spec, stop)
    engine, state, total = run.engine, run.state, spec.plan.total_steps
    report_after = settings.cluster.report_waiting_after_seconds
    stack.enter_context(Watchdog(engine.group, report_after))
    _load_state(run, stack)
    ready = time.monotonic()
    if settings.compile_only:
        engine.compile(spec.sample)
        print_line(
            f"compiled in {time.monotonic() - ready:.1f} s, after {ready - began:.1f} s of imports, "
            "building and the first batch; nothing was trained"
        )
        engine.group.barrier()
        return RunResult(engine, state, "compiled")
    if run.saves and not hooks.score_resumed(run):
        return RunResult(engine, state, "stopped")
    if state.step >= total:
        print_line(f"run: all {total:,} steps are done; nothing to do")
        engine.group.barrier()
        return RunResult(engine, state, "finished")
    finished = _train(run, stop, stack, ready - began)
    # A process that ends earlier would be taken for lost by those that still save.
    engine.group.barrier()
    print_line(_last_message(run, time.monotonic() - began, finished))
    return RunResult(engine, state, "finished" if finished else "stopped")


def exit_stopped(settings: TrainSettings) -> None:
    """End with the exit code that the settings choose for a run that is stopped and saved."""
    if settings.exit_code_when_stopped:
        raise SystemExit(settings.exit_code_when_stopped)


def check_output_paths(settings: TrainSettings) -> None:
    """Raise ConfigError when the run has no folder to save in, or its trace cannot be written."""
    trace = settings.parallel.trace
    if trace is not None and not is_writable(trace):
        raise ConfigError(
            f"parallel.trace ({trace})",
            "cannot be written",
            "choose another file, in an existing folder",
        )
    if not settings.dry_run and not settings.compile_only and settings.save_ckpt_path is None:
        raise ConfigError(
            "save_ckpt_path", "is not given", "give --save-ckpt-path, the folder of this run"
        )


def is_writable(path: Path) -> bool:
    """Return whether a file can be written there: checked before the first step, not after the last."""
    folder = next((parent for parent in path.absolute().parents if parent.exists()), path)
    return not path.is_dir() and folder.is_dir() and os.access(folder, os.W_OK)


def _with_layout(settings: Settings, processes: Processes) -> Settings:
    """Return the settings with a layout for the devices, when they ask for one."""
    if settings.parallel.layout == "given":
        return settings
    kind, local_devices, memory = devices_here(processes)
    devices = local_devices * processes.count
    chosen = layout.propose(settings, devices, memory, processes.count)
    print_line(f"layout: chosen for {devices} x {kind} of {memory / 1e9:.1f} GB")
    return chosen


def _describe_layout(settings: TrainSettings, mesh: Mesh) -> str:
    lines = [*layout.describe_layout(settings), *layout.without_effect(settings)]
    processes = mesh.processes
    if processes.count > 1:
        lines.append(f"{processes.count} processes from {processes.source}; this is rank 0")
    lines.append(f"device {mesh.devices[0][0]}, precision {settings.precision}")
    return "\n".join(f"  {line}" for line in lines)


def _build(settings: TrainSettings, mesh: Mesh, spec: RunSpec, stop: StopRequest) -> Run:
    model, engine, state, step = build.build_run(settings, mesh, spec.plan, stop, spec.labels)
    fixed = checkpoint.fixed_settings(
        settings.model_dump(mode="json"),
        spec.plan.examples_per_step,
        spec.plan.total_steps,
        spec.stream.fingerprint,
    )
    return Run(settings, spec, engine, state, step, spec.form(model), fixed)


def _load_state(run: Run, stack: ExitStack) -> None:
    """Lock the run's folder and load the same state on all processes."""
    settings, group = run.settings, run.engine.group
    if run.saves:
        if run.rank == 0:
            stack.enter_context(lock_run(run.folder))
            print_line(_describe_outputs(run))
            if removed := remove_partial_checkpoints(run.folder):
                print_line(f"run: removed incomplete {', '.join(removed)}")
        group.barrier()
    shared = {**run.fixed, **agreement.collective_settings(settings), "held_out": run.spec.held_out}
    agreement.check_same_settings(group, shared)
    print_line(f"run: {start.load_state(settings, run.state, run.form, run.fixed)}")
    agreement.check_same_step(group, run.state)
    agreement.check_same_weights(group, run.state)


def _describe_outputs(run: Run) -> str:
    text = f"run: writes into {run.folder.absolute()}: checkpoints step_*/, {METRICS}"
    if run.settings.tensorboard_dir is not None:
        text += f"; TensorBoard's files into {run.settings.tensorboard_dir.absolute()}"
    return text


def _train(run: Run, stop: StopRequest, stack: ExitStack, seconds_built: float) -> bool:
    """Run the steps and save; return whether all were run."""
    state, engine = run.state, run.engine
    last = run.spec.plan.total_steps
    last = last if run.saves else min(state.step + DRY_RUN_STEPS, last)
    writer = stack.enter_context(BackgroundWriter())
    save = _saver(run, writer) if run.saves else None
    began = time.monotonic()
    engine.compile(run.spec.sample)
    print_line(f"built in {seconds_built:.1f} s, traced in {time.monotonic() - began:.1f} s")
    batches = read_ahead(run.spec.stream, state.step, last)
    with ProgressBar(state.step, last, stop) as bar:
        chosen = hooks.make_hooks(run, last, save, bar, stack)
        chosen.append((lambda info: writer.check(), Every(steps=1)))
        # All processes stop at the same step.
        finished = train(
            state, batches, run.step, chosen, lambda: bool(engine.group.all_reduce([stop()])[0])
        )
    if save is not None and not finished:
        save()
    writer.wait()
    return finished


def _saver(run: Run, writer: BackgroundWriter) -> Callable[[], None]:
    """Return the function that saves a step once: rank 0 writes, other ranks send their shards."""
    settings, state, group, folder = run.settings, run.state, run.engine.group, run.folder
    dumped = settings.model_dump(mode="json")
    # The step that a run continues from has a checkpoint, which rank 0 has seen.
    exists = (folder / checkpoint_name(state.step)).exists()
    saved = state.step if group.broadcast([exists])[0] else -1

    def write(copied: State) -> None:
        versions = build.versions()
        checkpoint.save(
            folder, copied, run.form, fixed=run.fixed, settings=dumped, versions=versions
        )
        prune(folder, settings.keep_checkpoints, settings.keep_every_steps)

    def save() -> None:
        # Decided without looking at files, which may appear later on another host.
        nonlocal saved
        if saved == state.step:
            return
        agreement.check_same_weights(group, state)
        if run.rank == 0:
            writer.start(partial(write, copy_state(state)))
        else:
            gather_moments(state)
        saved = state.step

    if run.rank == 0:
        # Only now: a start that fails must not leave its settings in another run's folder.
        write_json_atomically(folder / SETTINGS, dumped)
    return save


def _last_message(run: Run, seconds: float, finished: bool) -> str:
    duration = format_duration(seconds)
    if run.settings.dry_run:
        return f"run: dry run ended at step {run.state.step:,} after {duration}; nothing was saved"
    if finished:
        newest = run.folder / checkpoint_name(run.state.step)
        return f"run: {run.state.step:,} steps done, {duration}; the model is {newest}"
    return f"run: stopped at step {run.state.step:,} and saved; the same command continues"
