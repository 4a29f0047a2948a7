"""The hooks of a run: measure, report and score its steps, and forecast its duration."""

import math
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from bert_cli.config.markers import UNTRACKED
from bert_cli.planning import checks
from bert_cli.processes import print_line
from bert_cli.statistics import describe, intervals
from bert_cli.tasks.run.build import Run
from bert_cli.text import count, format_duration
from bert_cli.train import checkpoint, health, history, metrics, scores
from bert_cli.train.checkpoint import METRICS
from bert_cli.train.loop import Every, Hook, Info, StoppedWhileScoringError
from bert_cli.train.metrics import HELD_OUT, Forecast, Pace, ProgressBar

Hooks = list[tuple[Hook, Every]]


def hooks_of(
    run: Run,
    last: int,
    save: Callable[[], None] | None,
    bar: ProgressBar,
    forecast: Forecast,
    stack: ExitStack,
) -> Hooks:
    """Return the hooks to step `last`, measurements before reports; `save` is None for a run without a folder."""
    each = Every(steps=1)
    job = run.job
    pace = Pace(last, work=lambda step: job.plan.micro_batches(step).start)
    scored = Every(steps=job.evaluate_every, last_step=last)
    picks_best = job.evaluate is not None and job.task.best

    def measure(info: Info) -> None:
        examples = info.metrics["examples"]
        tokens = info.metrics["tokens"]
        info.metrics.update(pace.after_step(info.step, examples, tokens))
        forecast.step_ends(pace.recent)
        info.metrics["seconds_waited"] = info.seconds_waited
        if job.unigram_entropy is not None:
            info.metrics[health.ENTROPY] = job.unigram_entropy

    hooks: Hooks = [(measure, each)]
    if save is not None and picks_best:
        hooks.append((lambda info: save(), scored))
    if save is not None and job.evaluate is not None:
        hooks.append((partial(_evaluate, run), scored))
    reporters = [] if save is None else _reporters(run, stack)
    hooks.append((_report(run, last, bar, reporters), each))
    if save is not None:
        saved = Every(
            steps=job.output.checkpoint_every_steps,
            minutes=job.output.checkpoint_every_minutes,
            last_step=last,
            # Every process takes part in a save, and their clocks differ.
            agreed=lambda due: bool(run.engine.group.broadcast([due])[0]),
        )
        hooks.append((lambda info: save(), saved))
        if picks_best:
            hooks.append((partial(_write_score, run), scored))
    # Saving and evaluating do not count as the time of a step.
    hooks.append((lambda info: pace.restart(), each))
    return hooks


def _report(run: Run, last: int, bar: ProgressBar, reporters: list[metrics.Reporter]) -> Hook:
    """Return the hook that writes the metrics, updates the progress bar and prints lines of the log."""
    job = run.job
    first = run.state.step + 1
    cadence = Every(steps=job.output.log_every_steps, last_step=last)
    total = job.plan.total_steps
    tenth = Every(steps=math.ceil(total / 10), last_step=last)
    compared = 2 * health.compared_steps(total)
    before = history.Run(job.folder).tail(compared) if reporters else []
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
        is_wanted = not bar.shown or "log_every_steps" in job.output.model_fields_set
        words = metrics.in_words(shown)
        if is_wanted and words and (tenth.due(info.step) or info.step == first):
            print_line(f"step {info.step}: {words}")
        if is_wanted and (cadence.due(info.step) or info.step == first):
            print_line(metrics.format_step(info.step, last, shown))
        steps.append((info.step, {name: info.metrics.get(name) for name in health.USED}))
        if info.step % health.STEPS or has_warned:
            return
        if warning := health.find_warning(job.record, total, steps):
            has_warned = True
            print_line(f"step {info.step}: {warning}")

    return hook


def _reporters(run: Run, stack: ExitStack) -> list[metrics.Reporter]:
    if not run.is_first_rank:
        return []
    job = run.job
    record = job.record
    reporters = [metrics.jsonl_reporter(job.folder / METRICS, run.state.step)]
    if job.output.tensorboard_dir is not None:
        untracked = job.marked(UNTRACKED)
        hparams = {name: value for name, value in record.items() if name not in untracked}
        reporters.append(metrics.tensorboard(job.output.tensorboard_dir, hparams, stack))
    if record["wandb"]["enabled"]:
        reporters.append(metrics.wandb(record["wandb"], record, job.folder, stack))
    return reporters


def _evaluate(run: Run, info: Info) -> None:
    evaluate = run.job.evaluate
    assert evaluate is not None
    try:
        samples = evaluate(run.engine, info.step)
    except StoppedWhileScoringError:
        print_line(f"step {info.step}: not scored; the same command scores it")
        return
    scored = intervals(samples)
    info.metrics.update({f"{HELD_OUT}{name}": score.value for name, score in scored.items()})
    print_line(f"step {info.step}: held out, {describe(scored)}")
    if run.is_first_rank and not run.job.task.best:
        scores.write(run.job.folder, samples, scored)


def _write_score(run: Run, info: Info) -> None:
    best = run.job.task.best
    name = f"validation_{best}"
    if run.is_first_rank and name in info.metrics:
        checkpoint.write_best(run.job.folder, info.step, best, info.metrics[name])


def stops_early(run: Run) -> bool:
    """Return whether the evaluation of this step is the last of `early_stop` in a row without a better score.

    Rank 0 decides by best.json, so that a resumed run stops where an uninterrupted run does.
    """
    job = run.job
    step = run.state.step
    every = job.evaluate_every
    if job.early_stop is None or every is None or not job.output.saves or step % every:
        return False
    best = checkpoint.read_best(job.folder) if run.is_first_rank else None
    is_scored = best is not None and best.scored == step
    worse_steps = step - best.step if best and is_scored else 0
    return bool(run.engine.group.broadcast([worse_steps >= job.early_stop * every])[0])


def score_start(run: Run) -> None:
    """Score a model that is pre-trained further before its first step."""
    if run.job.evaluate is None or run.job.task.best:
        return
    info = Info(0, {}, {}, 0.0)
    _evaluate(run, info)
    if run.is_first_rank:
        metrics.jsonl_reporter(run.job.folder / METRICS, -1)(0, info.metrics)


def score_resumed(run: Run) -> bool:
    """Score the checkpoint that the run continues from if that is due; return False when stopped.

    It has no score if the run was killed between the save and the score, or was trained without scores.
    """
    job = run.job
    step = run.state.step
    last = job.plan.total_steps
    if not job.task.best or job.evaluate is None or step == 0:
        return True
    best = checkpoint.read_best(job.folder) if run.is_first_rank else None
    # Older files name only the best step.
    scored = run.engine.group.broadcast([(best.scored or best.step) if best else 0])[0]
    if not Every(steps=job.evaluate_every, last_step=last).due(step) or scored >= step:
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


def forecast(run: Run) -> Forecast:
    """Return the forecast that prints the duration of the rest of the run after its first micro-batches or steps."""
    job = run.job
    plan = job.plan
    step = run.state.step
    of_two = 2 * len(plan.micro_batches(step))
    left = plan.micro_batches(plan.total_steps).start - plan.micro_batches(step).start
    size = plan.segment(step).micro_batch_size
    steps = f"{count(plan.total_steps - step, 'step')}{' that are left' if step else ''}"
    more = "" if job.evaluate is None else ", besides evaluations"

    def report(shortest: float, longest: float) -> None:
        times = " to ".join(format_duration(left * each) for each in (shortest, longest))
        pace = f"{size / longest:,.1f} to {size / shortest:,.1f} examples/s"
        print_line(f"pace: {pace} on this machine, so {times} for {steps}{more}")
        check = checks.of_duration(left * longest)
        if check.warns:
            print_line(check.warning)
        if job.output.dry_run:
            print_line(f"dry run: its two steps take up to {format_duration(of_two * longest)}")

    return Forecast(report)
