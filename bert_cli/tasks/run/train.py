"""The training run that pre-training and fine-tuning share: build it, load its state, train, save.

A step that is to be scored is saved first: an evaluation may take minutes, and a kill during it would lose all steps
since the last checkpoint.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Literal

from bert_cli.data.examples.reader import read_ahead
from bert_cli.errors import DeviceError
from bert_cli.facts.heads import SEVERAL_LABELS
from bert_cli.parallel.group import watchdog
from bert_cli.planning import checks, layout
from bert_cli.planning.plan import describe
from bert_cli.processes import print_line
from bert_cli.tasks.run import build, hooks, saving, start
from bert_cli.tasks.run.build import Run
from bert_cli.tasks.run.job import Job
from bert_cli.text import count, format_duration
from bert_cli.train.checkpoint import checkpoint_name
from bert_cli.train.loop import BackgroundWriter, Every, Hook, train
from bert_cli.train.metrics import ProgressBar

Status = Literal["finished", "stopped"]
Timer = Callable[[Run, float, float], Hook]
"""Returns a hook that is called first after each step, for a run that took so many seconds to build and to trace."""


def run_training(job: Job, stack: ExitStack, timer: Timer | None = None) -> tuple[Run, Status]:
    """Train from the state of the run's folder to the last step, or until a stop is requested.

    `stack` holds the lock of the folder. Raises ConfigError, DataError, CheckpointError or DeviceError.
    """
    began = time.monotonic()
    plan = job.plan
    saves = job.output.saves
    _describe(job)
    run = _built(job)
    state = run.state
    group = run.engine.group
    stack.enter_context(watchdog(group, job.output.cluster.report_waiting_after_seconds))
    saving.load_state(run, stack)
    seconds_built = time.monotonic() - began
    if saves and not hooks.score_resumed(run):
        return run, "stopped"
    if state.step >= plan.total_steps or hooks.stops_early(run):
        _check_updates(run)
        if state.step >= plan.total_steps:
            print_line(f"run: all {plan.total_steps:,} steps are done; nothing to do")
        else:
            where = f"step {state.step:,} of {plan.total_steps:,}"
            print_line(f"run: ended early at {where}; a larger --early-stop continues")
        group.barrier()
        return run, "finished"
    finished = _train(run, stack, seconds_built, timer)
    # Processes that still save would treat a process that ends earlier as lost.
    group.barrier()
    duration = format_duration(time.monotonic() - began)
    at = f"step {state.step:,}"
    if not saves:
        kind = "dry run" if timer is None else "measurement"
        print_line(f"run: {kind} ended at {at} after {duration}; nothing was saved")
    elif finished:
        _check_updates(run)
        if state.step < plan.total_steps:
            evaluations = count(job.early_stop or 0, "evaluation")
            print_line(f"run: ends early: {evaluations} without a better score (early_stop)")
        newest = job.folder / checkpoint_name(state.step)
        print_line(f"run: {count(state.step, 'step')} done, {duration}; the model is {newest}")
    else:
        print_line(f"run: stopped at {at} and saved; the same command continues")
    return run, "finished" if finished else "stopped"


def _check_updates(run: Run) -> None:
    """Raise DeviceError if no step of a complete run changed the weights."""
    scale = run.state.loss_scale
    if 0 < run.state.step == scale.skipped:
        problem = (
            f"no gradient was finite, so no step changed the weights (loss scale {scale.value:g})"
        )
        remedy = "start a new run with optimizer_opts.loss_scaling lower or dynamic, or with a lower learning rate"
        raise DeviceError(f"run ({count(scale.skipped, 'step')})", problem, remedy)


def _describe(job: Job) -> None:
    """Print the plan of the run and its warnings."""
    mesh = job.mesh
    lines = layout.describe_layout(job.work, mesh.kind)
    if (number := mesh.processes.count) > 1:
        lines.append(f"{number} processes from {mesh.processes.source}; this is rank 0")
    lines.append(f"device {mesh.devices[0][0]}, precision {job.work.precision}")
    is_cpu = "cpu" in str(mesh.devices[0][0]).lower()
    lines += layout.slow_steps(
        job.work, sum(map(len, mesh.devices)) if is_cpu else 0, is_dry_run=job.output.dry_run
    )
    print_line("\n".join(["plan:", describe(job.plan), *(f"  {line}" for line in lines)]))
    for check in checks.of_epochs(job.plan):
        if check.warns:
            print_line(check.warning)


def _built(job: Job) -> Run:
    engine, state, step = build.build_run(job.work, job.mesh, job.plan, job.task.labels)
    step.prepare = job.task.prepare
    step.stop_requested = job.stop
    pooling = job.output.pools_by
    form = start.disk_format(
        job.work, state.weights, job.tokenizer, job.task.label_names, pooling, job.stream.epoch_size
    )
    if job.task.has_several_labels:
        form.config["problem_type"] = SEVERAL_LABELS
    return Run(job, engine, state, step, form)


# --- the steps


def _train(run: Run, stack: ExitStack, seconds_built: float, timer: Timer | None) -> bool:
    job = run.job
    state = run.state
    engine = run.engine
    stop = job.stop
    last = job.plan.total_steps
    last = last if job.output.saves else min(state.step + job.unsaved_steps, last)
    writer = stack.enter_context(BackgroundWriter())
    save = saving.saver(run, writer) if job.output.saves else None
    seconds_traced = 0.0
    traced = "tracing is part of the first step"
    if not engine.compiles_in_first_step:
        began = time.monotonic()
        run.compile()
        seconds_traced = time.monotonic() - began
        traced = f"traced in {seconds_traced:.1f} s"
    print_line(f"built in {seconds_built:.1f} s; {traced}")
    if save is not None and job.output.pretrained_ckpt_path and state.step == 0:
        hooks.score_start(run)
    batches = read_ahead(job.stream, state.step, last)
    forecast = hooks.forecast(run)
    if engine.asks_before_each_micro_batch:
        run.step.stop_requested = forecast.noting_each_start(stop)
    with ProgressBar(state.step, last, stop) as bar:
        each = Every(steps=1)
        called = hooks.hooks_of(run, last, save, bar, forecast, stack)
        first = state.step
        called.insert(0, (lambda info: saving.compare_weights(run, info.step - first), each))
        called.append((lambda info: writer.check(), each))
        if timer is not None:
            called.insert(0, (timer(run, seconds_built, seconds_traced), each))

        def stops() -> bool:
            # All processes stop at the same step.
            is_requested = bool(engine.group.all_reduce([stop()])[0])
            return hooks.stops_early(run) or is_requested

        finished = train(state, batches, run.step, called, stops) or hooks.stops_early(run)
    if save is not None and not finished:
        save()
    writer.wait()
    return finished
