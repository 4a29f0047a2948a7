"""The training run that pre-training and fine-tuning share.

Find the processes and devices, build the model and engine, load the state, train with hooks, save. A step that is to
be scored is saved first: an evaluation may take minutes, and a kill during it would lose all steps since the last
checkpoint. Processes that differ would wait for one another forever, or train different weights silently, so they are
compared before they continue.
"""

import hashlib
import json
import math
import os
import time
import zlib
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from bert_cli.config.markers import COLLECTIVE, UNTRACKED, marked
from bert_cli.config.training import TrainSettings
from bert_cli.data.stream.reader import read_ahead
from bert_cli.errors import CheckpointError, ConfigError, DataError, count
from bert_cli.files import write_json_atomically
from bert_cli.parallel.cluster import StoppedWhileJoiningError, find_processes
from bert_cli.parallel.engine import Engine
from bert_cli.parallel.group import ProcessGroup, watchdog
from bert_cli.parallel.runtime import Mesh
from bert_cli.planning import checks, layout
from bert_cli.planning.plan import describe
from bert_cli.tasks.run import build, start
from bert_cli.tasks.run.build import Run, RunSpec, open_mesh
from bert_cli.train import checkpoint, health, history, metrics
from bert_cli.train.checkpoint import METRICS, checkpoint_name
from bert_cli.train.loop import (
    BackgroundWriter,
    Every,
    Hook,
    Info,
    State,
    StateCopy,
    StoppedWhileScoringError,
    StopRequest,
    copy_state,
    gather_shards,
    train,
)
from bert_cli.train.metrics import Forecast, Pace, ProgressBar, format_duration, print_line

Settings = TypeVar("Settings", bound=TrainSettings)
Hooks = list[tuple[Hook, Every]]
Status = Literal["finished", "stopped", "compiled"]


def prepare(settings: Settings, stack: ExitStack) -> tuple[Settings, Mesh, StopRequest]:
    """Handle signals, find the other processes, choose the layout and take the devices."""
    stop = stack.enter_context(StopRequest())
    cluster = settings.cluster
    processes = find_processes(os.environ, cluster.workers, cluster.rank)
    metrics.silent = processes.rank > 0
    if settings.about is not None:
        print_line(f"{settings.about.what}\n{settings.about.expect}")
    is_open = settings.global_batch.examples_per_step is not None
    if settings.parallel.layout != "given" or is_open or settings.require_gpu:
        kind, local_devices, memory = build.find_devices(settings, processes)
    if settings.parallel.layout != "given" or is_open:
        devices = local_devices * processes.count
        settings = start.with_saved_micro_batch(settings)
        settings = layout.choose(settings, kind, devices, memory, processes.count)
        what = f"micro-batch {settings.global_batch.micro_batch_size}" if is_open else "layout"
        lines = [f"{what}: chosen for {devices} x {kind} of {memory / 1e9:.1f} GB"]
        print_line("\n".join([*lines, *layout.idle_memory(settings, kind, memory)]))
    try:
        mesh = open_mesh(settings, processes, stop)
    except StoppedWhileJoiningError:
        print("run: stopped before all processes had started; nothing was done", flush=True)
        raise SystemExit(settings.exit_code_when_stopped) from None
    # Again: TensorFlow's runtime of several processes installs its own handler of SIGTERM.
    stop.listen()
    return settings, mesh, stop


def run_training(
    settings: TrainSettings, mesh: Mesh, spec: RunSpec, stop: StopRequest, stack: ExitStack
) -> tuple[Engine, State, Status]:
    """Train from the state of the run's folder to the last step, or until a stop is requested.

    `stack` keeps the lock of the folder. Raises ConfigError, DataError, CheckpointError or DeviceError.
    """
    began = time.monotonic()
    plan = spec.plan
    lines = [*layout.describe_layout(settings), *layout.without_effect(settings)]
    if (number := mesh.processes.count) > 1:
        lines.append(f"{number} processes from {mesh.processes.source}; this is rank 0")
    lines.append(f"device {mesh.devices[0][0]}, precision {settings.precision}")
    is_cpu = "cpu" in str(mesh.devices[0][0]).lower()
    lines += layout.slow_steps(settings, sum(map(len, mesh.devices)) if is_cpu else 0)
    print_line("\n".join(["plan:", describe(plan), *(f"  {line}" for line in lines)]))
    for check in checks.of_epochs(plan):
        if check.warns:
            print_line(check.warning)
    engine, state, step = build.build_run(settings, mesh, plan, stop, spec.labels)
    step.prepare = spec.prepare
    form = start.disk_format(settings, state.weights, spec.tokenizer, spec.label_names)
    form = replace(form, epoch_size=spec.stream.epoch_size)
    fixed = checkpoint.fixed_settings(
        settings, plan.examples_per_step, plan.total_steps, spec.stream.fingerprint
    )
    if plan.step_sizes is not None:
        fixed["step_sizes"] = plan.step_sizes
    run = Run(settings, spec, engine, state, step, form, fixed)
    stack.enter_context(watchdog(engine.group, settings.cluster.report_waiting_after_seconds))
    _load_state(run, stack)
    ready = time.monotonic()
    if settings.compile_only:
        run.compile()
        print_line(
            f"compiled in {time.monotonic() - ready:.1f} s, after {ready - began:.1f} s of imports, "
            "building and the first batch; nothing was trained"
        )
        engine.group.barrier()
        return engine, state, "compiled"
    if run.saves and not _score_resumed(run):
        return engine, state, "stopped"
    if state.step >= plan.total_steps:
        print_line(f"run: all {plan.total_steps:,} steps are done; nothing to do")
        engine.group.barrier()
        return engine, state, "finished"
    finished = _train(run, stop, stack, ready - began)
    # A process that ends earlier would be taken for lost by those that still save.
    engine.group.barrier()
    duration = format_duration(time.monotonic() - began)
    at = f"step {state.step:,}"
    if settings.dry_run:
        print_line(f"run: dry run ended at {at} after {duration}; nothing was saved")
    elif finished:
        newest = run.folder / checkpoint_name(state.step)
        print_line(f"run: {count(state.step, 'step')} done, {duration}; the model is {newest}")
    else:
        print_line(f"run: stopped at {at} and saved; the same command continues")
    return engine, state, "finished" if finished else "stopped"


def check_output_paths(settings: TrainSettings) -> None:
    """Raise ConfigError when the run has no folder to save in, DataError when its trace cannot be written."""
    trace = settings.parallel.trace
    if trace is not None and not is_writable(trace):
        remedy = "choose another file, in an existing folder"
        raise DataError(f"parallel.trace ({trace})", "cannot be written", remedy)
    if not settings.dry_run and not settings.compile_only and settings.save_ckpt_path is None:
        remedy = "give --save-ckpt-path, the folder of this run"
        raise ConfigError("save_ckpt_path", "is not given", remedy)


def is_writable(path: Path) -> bool:
    """Return whether a file can be written there: checked before the first step, not after the last."""
    folder = next((parent for parent in path.absolute().parents if parent.exists()), path)
    return not path.is_dir() and folder.is_dir() and os.access(folder, os.W_OK)


# --- the state


def _load_state(run: Run, stack: ExitStack) -> None:
    settings = run.settings
    group = run.engine.group
    state = run.state
    if run.saves:
        if run.is_first_rank:
            stack.enter_context(checkpoint.lock_run(run.folder))
            text = f"run: writes into {run.folder.absolute()}: checkpoints step_*/, {METRICS}"
            if settings.tensorboard_dir is not None:
                text += f"; TensorBoard's files into {settings.tensorboard_dir.absolute()}"
            print_line(text)
            if removed := checkpoint.remove_partial_checkpoints(run.folder):
                print_line(f"run: removed incomplete {', '.join(removed)}")
        group.barrier()
    collective = settings.model_dump(mode="json", include=marked(type(settings), COLLECTIVE))
    parallel = {**settings.parallel.model_dump(mode="json"), "trace": None}
    shared = {**run.fixed, **collective, "parallel": parallel, "held_out": run.spec.held_out}
    digest = hashlib.blake2b(json.dumps(shared, sort_keys=True).encode(), digest_size=6).digest()
    if other := _first_difference(group, int.from_bytes(digest, "little")):
        problem = "was started with other settings, has another layout, or reads another corpus than rank 0"
        remedy = "start every process with the same command and the same files"
        raise ConfigError(f"rank {other[0]}", problem, remedy)
    print_line(f"run: {start.load_state(settings, state, run.form, run.fixed, run.spec.tokenizer)}")
    if other := _first_difference(group, state.step):
        rank, step, first = other
        problem = (
            f"rank {rank} finds a checkpoint of step {step:.0f}, rank 0 one of step {first:.0f}"
        )
        remedy = "the folder must be on a file system that all hosts share"
        raise CheckpointError("save_ckpt_path", problem, remedy)
    _check_same_weights(group, state)


def _check_same_weights(group: ProcessGroup, state: State) -> None:
    if group.world_size == 1:
        return
    digest = 0
    for weight in state.weights.values():
        if weight.is_sharded:  # there is one for all
            continue
        digest = zlib.crc32(np.ascontiguousarray(weight.numpy()).tobytes(), digest)
    if other := _first_difference(group, digest):
        problem = f"the weights of rank {other[0]} are not those of rank 0"
        remedy = "start all processes from the same files, on machines of the same kind"
        raise CheckpointError(f"step {state.step}", problem, remedy)


def _first_difference(group: ProcessGroup, number: int) -> tuple[int, float, float] | None:
    """Return the first rank with another number than rank 0, its number and that of rank 0."""
    numbers = group.all_gather(float(number))
    different = [rank for rank, other in enumerate(numbers) if other != numbers[0]]
    return (different[0], numbers[different[0]], numbers[0]) if different else None


# --- the steps


def _train(run: Run, stop: StopRequest, stack: ExitStack, seconds_built: float) -> bool:
    state = run.state
    engine = run.engine
    last = run.spec.plan.total_steps
    last = last if run.saves else min(state.step + 2, last)
    writer = stack.enter_context(BackgroundWriter())
    save = _saver(run, writer) if run.saves else None
    began = time.monotonic()
    run.compile()
    print_line(f"built in {seconds_built:.1f} s, traced in {time.monotonic() - began:.1f} s")
    if save is not None and run.settings.pretrained_ckpt_path and state.step == 0:
        _score_start(run)
    batches = read_ahead(run.spec.stream, state.step, last)
    forecast = build.forecast(run)
    if engine.asks_before_each_micro_batch:
        run.step.stop_requested = forecast.noting_each_start(stop)
    with ProgressBar(state.step, last, stop) as bar:
        hooks = [
            *_hooks(run, last, save, bar, forecast, stack),
            (lambda info: writer.check(), Every(steps=1)),
        ]
        # All processes stop at the same step.
        finished = train(
            state, batches, run.step, hooks, lambda: bool(engine.group.all_reduce([stop()])[0])
        )
    if save is not None and not finished:
        save()
    writer.wait()
    return finished


def _saver(run: Run, writer: BackgroundWriter) -> Callable[[], None]:
    """Return the function that saves a step once: rank 0 writes, other ranks send their shards."""
    settings = run.settings
    state = run.state
    group = run.engine.group
    folder = run.folder
    dumped = settings.model_dump(mode="json")
    # The step that a run continues from has a checkpoint, which rank 0 has seen.
    exists = (folder / checkpoint_name(state.step)).exists()
    saved = state.step if group.broadcast([exists])[0] else -1

    def write(copied: StateCopy) -> None:
        checkpoint.save(folder, copied, run.form, fixed=run.fixed, settings=dumped)
        checkpoint.prune(folder, settings.keep_checkpoints, settings.keep_every_steps)

    def save() -> None:
        # Decided without looking at files, which may appear later on another host.
        nonlocal saved
        if saved == state.step:
            return
        _check_same_weights(group, state)
        if run.is_first_rank:
            writer.start(partial(write, copy_state(state)))
        else:
            gather_shards(state)
        saved = state.step

    if run.is_first_rank:
        # Only now: a start that fails must not leave its settings in another run's folder.
        write_json_atomically(folder / checkpoint.SETTINGS, dumped)
    return save


def _hooks(
    run: Run,
    last: int,
    save: Callable[[], None] | None,
    bar: ProgressBar,
    forecast: Forecast,
    stack: ExitStack,
) -> Hooks:
    """Return the hooks to step `last`, measurements before reports; `save` is None for a run without a folder."""
    each = Every(steps=1)
    spec = run.spec
    settings = run.settings
    pace = Pace(last, work=lambda step: spec.plan.micro_batches(step).start)
    scored = Every(steps=spec.evaluate_every, last_step=last)
    picks_best = spec.evaluate is not None and spec.best is not None

    def measure(info: Info) -> None:
        examples = info.metrics["examples"]
        tokens = info.metrics["tokens"]
        info.metrics.update(pace.after_step(info.step, examples, tokens))
        forecast.step_ends(pace.recent)
        info.metrics["seconds_waited"] = info.seconds_waited
        if spec.unigram_entropy is not None:
            info.metrics[health.ENTROPY] = spec.unigram_entropy

    hooks: Hooks = [(measure, each)]
    reporters: list[metrics.Reporter] = []
    if save is not None:
        if picks_best:
            hooks.append((lambda info: save(), scored))
        if spec.evaluate is not None:
            hooks.append((partial(_evaluate, run), scored))
        reporters = _reporters(run, last, stack)
    hooks.append((_report(run, last, bar, reporters), each))
    if save is not None:
        saved = Every(
            steps=settings.checkpoint_every_steps,
            minutes=settings.checkpoint_every_minutes,
            last_step=last,
            # Every process takes part in a save, and their clocks differ.
            agreed=lambda due: bool(run.engine.group.broadcast([due])[0]),
        )
        hooks.append((lambda info: save(), saved))
        if picks_best:
            hooks.append((partial(_write_score, run), scored))
    traced = run.engine.traced_steps
    trace = settings.parallel.trace
    if traced and trace is not None:
        hooks.append(
            (partial(_write_trace, run, trace), Every(last_step=min(run.state.step + traced, last)))
        )
    # Saving and evaluating do not count as the time of a step.
    hooks.append((lambda info: pace.restart(), each))
    return hooks


def _report(run: Run, last: int, bar: ProgressBar, reporters: list[metrics.Reporter]) -> Hook:
    """Return the hook that writes the metrics, updates the progress bar and prints lines of the log."""
    settings = run.settings
    first = run.state.step + 1
    cadence = Every(steps=settings.log_every_steps, last_step=last)
    dumped = settings.model_dump(mode="json")
    total = run.spec.plan.total_steps
    compared = 2 * health.compared_steps(total)
    before = history.Run(run.folder).tail(compared) if reporters else []
    steps = deque(before, compared)
    has_warned = False

    def hook(info: Info) -> None:
        nonlocal has_warned
        for report in reporters:
            report(info.step, info.metrics)
        shown = dict(info.metrics)
        if info.step == first:
            del shown["seconds_left"]
        bar.after_step(info.step, shown)
        # With a progress bar, lines are printed only as often as the settings explicitly ask for.
        is_wanted = not bar.shown or "log_every_steps" in settings.model_fields_set
        if is_wanted and (cadence.due(info.step) or info.step == first):
            print_line(metrics.format_step(info.step, last, shown))
        steps.append((info.step, {name: info.metrics.get(name) for name in health.USED}))
        if info.step % health.STEPS or has_warned:
            return
        if warning := health.find_warning(dumped, total, steps):
            has_warned = True
            print_line(f"step {info.step}: {warning}")

    return hook


def _reporters(run: Run, last: int, stack: ExitStack) -> list[metrics.Reporter]:
    if not run.is_first_rank:
        return []
    settings = run.settings
    dumped = run.settings.model_dump(mode="json")
    reporters = [metrics.jsonl_reporter(run.folder / METRICS, run.state.step)]
    if settings.tensorboard_dir is not None:
        hparams = settings.model_dump(mode="json", exclude=marked(type(settings), UNTRACKED))
        reporters.append(metrics.tensorboard(settings.tensorboard_dir, hparams, last, stack))
    if settings.wandb.enabled:
        reporters.append(metrics.wandb(dumped["wandb"], dumped, run.folder, stack))
    return reporters


def _evaluate(run: Run, info: Info) -> None:
    assert run.spec.evaluate is not None
    try:
        values = run.spec.evaluate(run.engine, info.step)
    except StoppedWhileScoringError:
        print_line(f"step {info.step}: not scored; the same command scores it")
        return
    info.metrics.update({f"validation_{name}": value for name, value in values.items()})
    scores = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
    print_line(f"step {info.step}: held out, {metrics.format_losses(values) or scores}")


def _write_score(run: Run, info: Info) -> None:
    best = str(run.spec.best)
    name = f"validation_{run.spec.best}"
    if run.is_first_rank and name in info.metrics:
        checkpoint.write_best(run.folder, info.step, best, info.metrics[name])


def _score_start(run: Run) -> None:
    """Score a model that is pre-trained further before its first step."""
    if run.spec.evaluate is None or run.spec.best is not None:
        return
    info = Info(0, {}, {}, 0.0)
    _evaluate(run, info)
    if run.is_first_rank:
        metrics.jsonl_reporter(run.folder / METRICS, -1)(0, info.metrics)


def _score_resumed(run: Run) -> bool:
    """Score the checkpoint that the run continues from if that is due; return False when stopped.

    It has no score if the run was killed between the save and the score, or was trained without scores.
    """
    spec = run.spec
    step = run.state.step
    last = run.spec.plan.total_steps
    if spec.best is None or spec.evaluate is None or step == 0:
        return True
    best = checkpoint.read_best(run.folder) if run.is_first_rank else None
    # Older files name only the best step.
    scored = run.engine.group.broadcast([(best.scored or best.step) if best else 0])[0]
    if not Every(steps=spec.evaluate_every, last_step=last).due(step) or scored >= step:
        return True
    info = Info(step, {}, {}, 0.0)
    _evaluate(run, info)
    _write_score(run, info)
    if run.is_first_rank and info.metrics:
        # The step may have a line without its score, which a request to stop had interrupted.
        trained = history.Run(run.folder).steps.get(step, {})
        values = {name: math.nan if value is None else value for name, value in trained.items()}
        metrics.jsonl_reporter(run.folder / METRICS, step - 1)(step, values | info.metrics)
    return bool(info.metrics)


def _write_trace(run: Run, path: Path, info: Info) -> None:
    group = run.engine.group
    if group.world_size > 1:
        path = path.with_stem(f"{path.stem}_rank{group.rank}")
    run.engine.write_trace(path)
    print_line(f"trace: the first steps are in {path}; open it in https://ui.perfetto.dev")
