"""What every run that trains walks through, whatever it trains.

Find the processes and devices, build, find where to start, loop with hooks, save. A kind of run gives
a `Job`: its examples, its plan, what it evaluates. Whoever starts the same command again with the same
folder continues the run.
"""

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from bert_cli.config import layout
from bert_cli.config.plan import describe
from bert_cli.config.training import TrainSettings
from bert_cli.data.stream.prefetch import read_ahead
from bert_cli.errors import ConfigError
from bert_cli.files import write_json_atomically
from bert_cli.parallel.cluster import Processes, find_processes
from bert_cli.parallel.engine import Batch, Engine, Mesh, ProcessGroup
from bert_cli.parallel.rendezvous import StoppedWhileJoiningError
from bert_cli.parallel.tensorflow.mesh import devices_here
from bert_cli.parallel.watchdog import Watchdog
from bert_cli.tasks.run import agreement, build, hooks, start
from bert_cli.tasks.run.job import Job
from bert_cli.train import checkpoint, history, report
from bert_cli.train.loop import Every, StopRequest, train
from bert_cli.train.progress import Foot
from bert_cli.train.report import say
from bert_cli.train.saving import Writer, copied
from bert_cli.train.step import State

DRY_RUN_STEPS = 2
Asked = TypeVar("Asked", bound=TrainSettings)


@dataclass(frozen=True)
class Walked:
    """What is there when a run has come to its end."""

    engine: Engine
    state: State
    form: checkpoint.Format
    finished: bool
    """False when it was asked to stop before."""


def prepare(settings: Asked, claims: ExitStack) -> tuple[Asked, Mesh, StopRequest]:
    """Listen to signals, find the other processes, choose the layout and take the devices."""
    stop = claims.enter_context(StopRequest())
    processes = find_processes(settings.cluster, os.environ)
    report.silent = processes.rank > 0
    if settings.about is not None:
        say(f"{settings.about.what}\n{settings.about.expect}")
    settings = _laid_out(settings, processes)
    try:
        mesh = build.open_mesh(settings, processes, stop)
    except StoppedWhileJoiningError:
        print("run: stopped before all processes had come; nothing was done", flush=True)
        raise SystemExit(settings.exit_code_when_stopped) from None
    # Once more: TensorFlow's runtime of several processes takes SIGTERM for itself.
    stop.listen()
    return settings, mesh, stop


def walk(
    settings: TrainSettings,
    mesh: Mesh,
    job: Job,
    stop: StopRequest,
    claims: ExitStack,
) -> Walked | None:
    """Train from wherever the run stands to its end; None when it was only to be compiled.

    `claims` holds on to the run's folder. Raises ConfigError, DataError, CheckpointError or
    DeviceError; a request to stop saves and returns.
    """
    began = time.monotonic()
    plan, reader = job.plan, job.reader
    say(f"plan:\n{describe(plan)}\n{_where(settings, mesh)}")
    model, engine, state, step = build.build_run(settings, mesh, plan, stop, job.labels)
    group = engine.group
    claims.enter_context(Watchdog(group, settings.cluster.report_waiting_after_seconds))
    form = job.form(model)
    fixed = checkpoint.fixed_settings(
        settings.model_dump(mode="json"),
        plan.examples_per_step,
        plan.total_steps,
        reader.fingerprint,
    )
    saves = not settings.dry_run and not settings.compile_only
    if saves:
        _claim(settings, group, claims)
    _start(settings, group, state, form, fixed, {"held_out": job.held_out})
    if settings.compile_only:
        _compile(engine, job.sample, began)
        group.barrier()
        return None
    if saves and not hooks.caught_up(settings, job, engine, state):
        return Walked(engine, state, form, finished=False)
    if state.step >= plan.total_steps:
        say(f"run: all {plan.total_steps:,} steps are done; nothing to do")
        group.barrier()
        return Walked(engine, state, form, finished=True)
    writer = claims.enter_context(Writer())
    save = _saving(settings, state, form, fixed, group, writer) if saves else None
    last = plan.total_steps if saves else min(state.step + DRY_RUN_STEPS, plan.total_steps)
    built = time.monotonic()
    engine.compile(job.sample)
    say(f"built in {built - began:.1f} s, traced in {time.monotonic() - built:.1f} s")
    batches, wish = read_ahead(reader, state.step, last), _wish(group, stop)
    with Foot(state.step, last, stop) as foot:
        doing = hooks.hooks_of(settings, job, engine, state, save, last, claims, foot)
        doing.append((lambda info: writer.look(), Every(steps=1)))
        finished = train(state, batches, step, doing, wish)
    if save is not None and not finished:
        save()
    writer.wait()
    # Whoever leaves early is taken for lost by those who still save.
    group.barrier()
    say(_last_words(settings, state, began, finished))
    return Walked(engine, state, form, finished)


def leave_stopped(settings: TrainSettings) -> None:
    """End with the code that was asked for a run that is stopped and saved."""
    if settings.exit_code_when_stopped:
        raise SystemExit(settings.exit_code_when_stopped)


def needs_a_folder(settings: TrainSettings) -> None:
    """Raise ConfigError when the run should save and does not know where, or cannot write its trace."""
    trace = settings.parallel.trace
    if trace is not None and not can_be_written(trace):
        raise ConfigError(
            f"parallel.trace ({trace}): cannot be written; choose another file, in a folder that is there"
        )
    if not settings.dry_run and not settings.compile_only and settings.save_ckpt_path is None:
        raise ConfigError(
            "save_ckpt_path: is not given; give --save-ckpt-path, the folder of this run"
        )


def can_be_written(path: Path) -> bool:
    """Return whether a file can be written there: known before the first step, not after the last."""
    folder = next((above for above in path.absolute().parents if above.exists()), path)
    return not path.is_dir() and folder.is_dir() and os.access(folder, os.W_OK)


def _laid_out(settings: Asked, processes: Processes) -> Asked:
    """The settings with a layout for the devices there are, when they ask for one."""
    if settings.parallel.layout == "given":
        return settings
    kind, here, memory = devices_here(processes)
    devices = here * processes.count
    chosen = layout.propose(settings, devices, memory, processes.count)
    say(f"layout: chosen for {devices} x {kind} of {memory / 1e9:.1f} GB")
    return chosen


def _where(settings: TrainSettings, mesh: Mesh) -> str:
    lines = [*layout.describe_layout(settings), *layout.without_effect(settings)]
    processes = mesh.processes
    if processes.count > 1:
        lines.append(f"{processes.count} processes, as {processes.source} says; this is rank 0")
    lines.append(f"device {mesh.devices[0][0]}, precision {settings.precision}")
    return "\n".join(f"  {line}" for line in lines)


def _claim(settings: TrainSettings, group: ProcessGroup, claims: ExitStack) -> None:
    """Rank 0 takes the run's folder; the others wait until it is in order."""
    assert settings.save_ckpt_path is not None
    if group.rank == 0:
        claims.enter_context(checkpoint.claim(settings.save_ckpt_path))
        say(_whereto(settings))
        removed = checkpoint.clear_half_written(settings.save_ckpt_path)
        if removed:
            say(f"run: removed half-written {', '.join(removed)}")
    group.barrier()


def _whereto(settings: TrainSettings) -> str:
    """Where everything is written, in one line."""
    assert settings.save_ckpt_path is not None
    told = f"run: writes into {settings.save_ckpt_path.absolute()}: checkpoints step_*/, {report.METRICS}"
    if settings.tensorboard_dir is not None:
        told += f"; TensorBoard's files into {settings.tensorboard_dir.absolute()}"
    return told


def _start(
    settings: TrainSettings,
    group: ProcessGroup,
    state: State,
    form: checkpoint.Format,
    fixed: dict[str, Any],
    also: dict[str, Any],
) -> None:
    """Put the first values into the state, the same on all processes."""
    agreement.refuse_differences(group, {**fixed, **agreement.meetings(settings), **also})
    say(f"run: {start.start(settings, state, form, fixed)}")
    agreement.refuse_other_starts(group, state)
    agreement.refuse_other_weights(group, state)


def _wish(group: ProcessGroup, stop: Callable[[], bool]) -> Callable[[], bool]:
    """Whether any process was asked to stop; all get the same answer."""
    return lambda: bool(group.all_reduce([stop()])[0])


def _saving(
    settings: TrainSettings,
    state: State,
    form: checkpoint.Format,
    fixed: dict[str, Any],
    group: ProcessGroup,
    writer: Writer,
) -> Callable[[], None]:
    """How this process saves: rank 0 writes, beside the steps to come, the others give what they alone hold."""
    folder, told = settings.save_ckpt_path, settings.model_dump(mode="json")
    assert folder is not None
    # Of the step that a run continues from there is a checkpoint; rank 0 has seen it.
    there = (folder / checkpoint.name_of(state.step)).exists()
    saved = state.step if group.broadcast([there])[0] else -1

    def save() -> None:
        # Decided by what every process knows: a file may show later on another host.
        nonlocal saved
        if saved == state.step:
            return
        agreement.refuse_other_weights(group, state)
        if group.rank == 0:
            writer.start(partial(write, copied(state)))
        else:
            checkpoint.give_shares(state)
        saved = state.step

    if group.rank > 0:
        return save
    # Only now: a start that was refused must not leave its settings beside another run's steps.
    write_json_atomically(folder / history.SETTINGS, told)

    def write(held: State) -> None:
        checkpoint.save(folder, held, form, fixed=fixed, settings=told, versions=build.versions())
        checkpoint.prune(folder, settings.keep_checkpoints, settings.keep_every_steps)

    return save


def _compile(engine: Engine, batch: Batch, began: float) -> None:
    ready = time.monotonic()
    engine.compile(batch)
    say(
        f"compiled in {time.monotonic() - ready:.1f} s, after {ready - began:.1f} s of imports, "
        "building and the first batch; nothing was trained"
    )


def _last_words(settings: TrainSettings, state: State, began: float, finished: bool) -> str:
    took = report.duration(time.monotonic() - began)
    if settings.dry_run:
        return f"run: dry run ended at step {state.step:,} after {took}; nothing was saved"
    assert settings.save_ckpt_path is not None
    newest = settings.save_ckpt_path / checkpoint.name_of(state.step)
    if finished:
        return f"run: {state.step:,} steps done, {took}; the model is {newest}"
    return f"run: stopped at step {state.step:,} and saved; the same command continues"
