"""The training run that pre-training and fine-tuning share: build it, load its state, train with its hooks, save.

A step that is to be scored is saved first: an evaluation may take minutes, and a kill during it would lose all steps
since the last checkpoint.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from bert_cli import statistics
from bert_cli.data.examples.reader import read_ahead
from bert_cli.errors import DeviceError
from bert_cli.facts.heads import SEVERAL_LABELS
from bert_cli.parallel.engine import UpdateRequest
from bert_cli.parallel.group import watchdog
from bert_cli.planning import checks, layout
from bert_cli.planning.plan import describe
from bert_cli.processes import print_line
from bert_cli.tasks.run import build, saving, start
from bert_cli.tasks.run.build import Run
from bert_cli.tasks.run.job import Job
from bert_cli.text import count, format_duration
from bert_cli.train import health, history, metrics, scores
from bert_cli.train.checkpoint import METRICS, checkpoint_name
from bert_cli.train.loop import BackgroundWriter, Every, Hook, Info, StoppedError, train
from bert_cli.train.metrics import HELD_OUT, Forecast, Pace, ProgressBar

# Returns a hook that is called first after each step of a run.
Timer = Callable[[Run], Hook]


def run_training(
    job: Job, stack: ExitStack, timer: Timer | None = None, steps: int = 2
) -> tuple[Run, bool]:
    """Train from the state of the run's folder to the last step; the flag is False if a request has stopped it.

    A run that saves nothing, a measurement or a dry run, takes at most `steps` steps. `stack` holds the lock of the
    folder. Raises ConfigError, DataError, CheckpointError or DeviceError.
    """
    began = time.monotonic()
    plan = job.plan
    saves = job.order.saves
    engine, state, step = build.build_run(job.order, job.mesh, job.plan, job.task.labels)
    step.prepare = job.task.prepare
    step.stop_requested = job.stop
    form = start.disk_format(
        job.order, state.weights, job.tokenizer, job.task.label_names, job.stream.epoch_size
    )
    if job.task.has_several_labels:
        form.config["problem_type"] = SEVERAL_LABELS
    run = Run(job, engine, state, step, form)
    group = engine.group
    stack.enter_context(watchdog(group))
    saving.load_state(run, stack)
    seconds_built = time.monotonic() - began
    if saves and not _score_start(run):
        return run, False
    if state.step >= plan.total_steps or _stops_early(run):
        _check_updates(run)
        if state.step >= plan.total_steps:
            print_line(f"run: all {plan.total_steps:,} steps are done; nothing to do")
        else:
            where = f"step {state.step:,} of {plan.total_steps:,}"
            print_line(f"run: ended early at {where}; a larger --early-stop continues")
        group.barrier()
        return run, True
    last = plan.total_steps if saves else min(state.step + steps, plan.total_steps)
    finished = _train(run, last, stack, seconds_built, timer)
    # Processes that still save would treat a process that ends earlier as lost.
    group.barrier()
    duration = format_duration(time.monotonic() - began)
    at = f"step {state.step:,}"
    if not saves:
        purpose = "dry run" if timer is None else "measurement"
        print_line(f"run: {purpose} ended at {at} after {duration}; nothing was saved")
    elif finished:
        _check_updates(run)
        if state.step < plan.total_steps:
            evaluations = count(job.early_stop or 0, "evaluation")
            print_line(f"run: ends early: {evaluations} without a better score (early_stop)")
        newest = job.folder / checkpoint_name(state.step)
        print_line(f"run: {count(state.step, 'step')} done, {duration}; the model is {newest}")
    else:
        print_line(f"run: stopped at {at} and saved; the same command continues")
    return run, finished


def _check_updates(run: Run) -> None:
    """Raise DeviceError if no step of a complete run changed the weights."""
    scale = run.state.loss_scale
    if 0 < run.state.step == scale.skipped:
        problem = (
            f"no gradient was finite, so no step changed the weights (loss scale {scale.value:g})"
        )
        remedy = "start a new run with optimizer_opts.loss_scaling lower or dynamic, or with a lower learning rate"
        raise DeviceError(f"run ({count(scale.skipped, 'step')})", problem, remedy)


def describe_run(job: Job) -> None:
    """Print the plan of the run and its warnings."""
    mesh = job.mesh
    lines = layout.describe_layout(job.order)
    number = mesh.processes.count
    if number > 1:
        lines.append(f"{number} processes from {mesh.processes.source}; this is rank 0")
    lines.append(f"device {mesh.devices[0][0]}, precision {job.order.precision}")
    devices = sum(map(len, mesh.devices))
    if mesh.kind == "CPU" and devices > 1:
        lines.append(f"{layout.simulated(devices)}; {layout.AUTO}")
    if job.order.dry_run:
        micro_batches = count(job.order.global_batch.grad_acc_steps_per_replica, "micro-batch")
        lines.append(
            f"dry run: two complete steps, {micro_batches} of each replica; shorter with a smaller "
            "--global-batch.grad-acc-steps-per-replica, which changes the plan above"
        )
    print_line("\n".join(["plan:", describe(job.plan), *(f"  {line}" for line in lines)]))
    for check in checks.of_epochs(job.plan):
        if check.warns:
            print_line(check.warning)


# --- the steps and their hooks


def _train(run: Run, last: int, stack: ExitStack, built: float, timer: Timer | None) -> bool:
    job = run.job
    state = run.state
    engine = run.engine
    stop = job.stop
    writer = stack.enter_context(BackgroundWriter())
    save = saving.saver(run, writer) if job.order.saves else None
    traced = "tracing is part of the first step"
    if not engine.compiles_in_first_step:
        began = time.monotonic()
        engine.compile(job.task.prepare(engine, job.sample, UpdateRequest()))
        traced = f"traced in {time.monotonic() - began:.1f} s"
    print_line(f"built in {built:.1f} s; {traced}")
    batches = read_ahead(job.stream, state.step, last)
    forecast = _forecast(run)
    if engine.asks_before_each_micro_batch:
        run.step.stop_requested = forecast.noting_each_start(stop)
    with ProgressBar(state.step, last, stop) as bar:
        hooks = _hooks(run, last, save, bar, forecast, stack)
        # A checkpoint that failed ends the run at the next step, not at its end.
        hooks.append((lambda info: writer.check(), Every(steps=1)))
        if timer is not None:
            hooks.insert(0, (timer(run), Every(steps=1)))

        def stops() -> bool:
            # All processes stop at the same step.
            is_requested = bool(engine.group.all_reduce([stop()])[0])
            return _stops_early(run) or is_requested

        finished = train(state, batches, run.step, hooks, stops) or _stops_early(run)
    if save is not None and not finished:
        save()
    writer.wait()
    return finished


def _hooks(
    run: Run,
    last: int,
    save: Callable[[], None] | None,
    bar: ProgressBar,
    forecast: Forecast,
    stack: ExitStack,
) -> list[tuple[Hook, Every]]:
    """Return the hooks to step `last`, measurements before reports; `save` is None for a run without a folder."""
    each_step = Every(steps=1)
    job = run.job
    first = run.state.step
    pace = Pace(last, work=lambda step: job.plan.micro_batches(step).start)
    scored = Every(steps=job.evaluate_every, last_step=last)

    def measure(info: Info) -> None:
        examples = info.metrics["examples"]
        tokens = info.metrics["tokens"]
        info.metrics.update(pace.after_step(info.step, examples, tokens))
        forecast.step_ends(pace.recent)
        info.metrics["seconds_waited"] = info.seconds_waited
        if job.task.unigram_entropy is not None:
            info.metrics[health.ENTROPY] = job.task.unigram_entropy

    hooks: list[tuple[Hook, Every]] = [
        (lambda info: saving.compare_weights(run, info.step - first), each_step),
        (measure, each_step),
    ]
    if save is not None and job.evaluate is not None:
        if job.task.best:
            hooks.append((lambda info: save(), scored))
        hooks.append((partial(_evaluate, run), scored))
    hooks.append((_report(run, last, bar, None if save is None else stack), each_step))
    if save is not None:
        saved = Every(
            steps=job.order.checkpoint_every_steps,
            minutes=job.order.checkpoint_every_minutes,
            last_step=last,
            # Every process takes part in a save, and their clocks differ.
            agreed=lambda due: bool(run.engine.group.broadcast([due])[0]),
        )
        hooks += [(lambda info: save(), saved), (partial(_write_score, run), scored)]
    # Saving and evaluating do not count as the time of a step.
    hooks.append((lambda info: pace.restart(), each_step))
    return hooks


def _report(run: Run, last: int, bar: ProgressBar, stack: ExitStack | None) -> Hook:
    """Return the hook that updates the progress bar, prints lines of the log and writes the metrics, if there is a
    stack, which ends the writers.
    """
    job = run.job
    order = job.order
    reporters = []
    if stack is not None and run.is_first_rank:
        reporters.append(metrics.jsonl_reporter(job.folder / METRICS, run.state.step))
        if order.tensorboard_dir is not None:
            reporters.append(metrics.tensorboard(order.tensorboard_dir, job.record, stack))
        if order.wandb.enabled:
            reporters.append(metrics.wandb(job.record, job.folder, stack))
    first = run.state.step + 1
    cadence = Every(steps=order.log_every_steps, last_step=last)
    total = job.plan.total_steps
    # Ten lines in words for a reader who watches the log, whatever the length of the run.
    tenth = Every(steps=math.ceil(total / 10), last_step=last)
    compared = 2 * health.compared_steps(total)
    # A resumed run compares with the steps before, so that its warning is that of an uninterrupted run.
    before = []
    if reporters:
        before = history.Run(job.folder).tail(compared)
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
        if not bar.shown or "log_every_steps" in order.model_fields_set:
            words = metrics.in_words(shown)
            if words and (info.step == first or tenth.due(info.step)):
                print_line(f"step {info.step}: {words}")
            if info.step == first or cadence.due(info.step):
                print_line(metrics.format_step(info.step, last, shown))
        steps.append((info.step, {name: info.metrics.get(name) for name in health.USED}))
        if info.step % health.STEPS == 0 and not has_warned:
            warning = health.find_warning(job.record, total, steps)
            has_warned = bool(warning)
            if warning:
                print_line(f"step {info.step}: {warning}")

    return hook


def _evaluate(run: Run, info: Info) -> None:
    evaluate = run.job.evaluate
    assert evaluate is not None
    try:
        samples = evaluate(run.engine, info.step)
    except StoppedError:
        return
    scored = statistics.intervals(samples)
    info.metrics.update({f"{HELD_OUT}{name}": score.value for name, score in scored.items()})
    print_line(f"step {info.step}: held out, {statistics.describe(scored)}")
    if run.is_first_rank and not run.job.task.best:
        scores.write(run.job.folder, samples, scored)


def _write_score(run: Run, info: Info) -> None:
    best = run.job.task.best
    value = info.metrics.get(f"{HELD_OUT}{best}")
    if run.is_first_rank and value is not None:
        run.job.start.folder.write_best(info.step, best, value)


def _stops_early(run: Run) -> bool:
    """Return whether the evaluation of this step is the last of `early_stop` in a row without a better score.

    Rank 0 decides by best.json, so that a resumed run stops where an uninterrupted run does.
    """
    job = run.job
    step = run.state.step
    interval = job.evaluate_every
    if job.early_stop is None or not job.order.saves or step % interval:
        return False
    best = job.start.folder.best if run.is_first_rank else None
    worse_steps = step - best.step if best and best.scored == step else 0
    return bool(run.engine.group.broadcast([worse_steps >= job.early_stop * interval])[0])


def _score_start(run: Run) -> bool:
    """Score the state from which the run starts if that is due; return False when stopped.

    Pre-training scores the model that it trains further. The checkpoint that fine-tuning continues from has no score if
    the run was killed between the save and the score, or was trained without scores.
    """
    job = run.job
    step = run.state.step
    if job.task.best:
        best = job.start.folder.best if run.is_first_rank else None
        scored = run.engine.group.broadcast([best.scored if best else 0])[0]
        cadence = Every(steps=job.evaluate_every, last_step=job.plan.total_steps)
        is_due = step > scored and cadence.due(step)
    else:
        is_due = step == 0 and job.order.pretrained_ckpt_path is not None
    if job.evaluate is None or not is_due:
        return True
    info = Info(step, {}, {}, 0.0)
    _evaluate(run, info)
    _write_score(run, info)
    if run.is_first_rank and info.metrics:
        # The step may have a line without its score, which a request to stop had interrupted.
        trained = history.Run(job.folder).steps.get(step, {})
        values = {name: math.nan if value is None else value for name, value in trained.items()}
        metrics.jsonl_reporter(job.folder / METRICS, step - 1)(step, values | info.metrics)
    return bool(info.metrics)


def _forecast(run: Run) -> Forecast:
    """Return the forecast that prints the duration of the rest of the run after its first micro-batches or steps."""
    job = run.job
    plan = job.plan
    step = run.state.step
    left = plan.micro_batches(plan.total_steps).start - plan.micro_batches(step).start
    size = plan.micro_batch_size
    steps = count(plan.total_steps - step, "step")
    if step:
        steps += " that are left"
    if job.evaluate:
        steps += ", besides evaluations"

    def report(shortest: float, longest: float) -> None:
        times = " to ".join(format_duration(left * seconds) for seconds in (shortest, longest))
        pace = f"{size / longest:,.1f} to {size / shortest:,.1f} examples/s"
        print_line(f"pace: {pace} on this machine, so {times} for {steps}")
        check = checks.of_duration(left * longest)
        if check.warns:
            print_line(check.warning)

    return Forecast(report)
