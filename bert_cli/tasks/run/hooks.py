"""What a run does after its steps: measure, evaluate, report, save, note the best checkpoint, trace.

A step that is to be scored is saved first: an evaluation may take minutes, and a kill during it would
lose all steps since the last checkpoint. A run that continues scores a step that was saved and not scored.
"""

from collections.abc import Callable
from contextlib import ExitStack

from bert_cli.tasks.run.spec import Run
from bert_cli.train import trackers
from bert_cli.train.folder import METRICS, last_scored_step, write_best
from bert_cli.train.loop import Every, Hook, Info, StoppedWhileScoringError
from bert_cli.train.metrics import (
    Pace,
    ProgressBar,
    Reporter,
    format_losses,
    format_step,
    jsonl_reporter,
    last_step,
    print_line,
)

Hooks = list[tuple[Hook, Every]]


def make_hooks(
    run: Run, last: int, save: Callable[[], None] | None, bar: ProgressBar, stack: ExitStack
) -> Hooks:
    """Return the hooks of a run to step `last` in the order in which they are called.

    Measurements come before the reports that contain them. `save` is None for a run without a folder.
    """
    pace, each = Pace(last), Every(steps=1)
    hooks: Hooks = [(_measure(pace), each)]
    if save is not None:
        hooks += _evaluation_hooks(run, last, save)
    hooks.append((_report(run, last, bar, _reporters(run, last, stack) if save else []), each))
    if save is not None:
        hooks.append((lambda info: save(), _save_cadence(run, last)))
        if run.spec.evaluate is not None and run.spec.best is not None:
            hooks.append((_write_score(run), _evaluation_cadence(run, last)))
    hooks += _trace_hooks(run, last)
    # Saving and evaluating do not count as the time of a step.
    hooks.append((lambda info: pace.restart(), each))
    return hooks


def _measure(pace: Pace) -> Hook:
    """Add the speed and the time that the step waited for its batch."""

    def hook(info: Info) -> None:
        examples, tokens = info.metrics["examples"], info.metrics["tokens"]
        info.metrics.update(pace.after_step(info.step, examples, tokens))
        info.metrics["seconds_waited"] = info.seconds_waited

    return hook


def _report(run: Run, last: int, bar: ProgressBar, reporters: list[Reporter]) -> Hook:
    """Write the metrics, update the progress bar and print lines of the log."""
    settings, first = run.settings, run.state.step + 1
    cadence = Every(steps=settings.log_every_steps, last_step=last)

    def hook(info: Info) -> None:
        for report in reporters:
            report(info.step, info.metrics)
        shown = dict(info.metrics)
        if info.step == first:
            del shown["seconds_left"]
        bar.after_step(info.step, shown)
        # With a progress bar, lines are printed only as often as the settings explicitly ask for.
        is_wanted = not bar.shown or "log_every_steps" in settings.model_fields_set
        if is_wanted and (cadence.due(info.step) or info.step == first):
            print_line(format_step(info.step, last, shown))

    return hook


def _reporters(run: Run, last: int, stack: ExitStack) -> list[Reporter]:
    """Return the files and trackers that rank 0 reports to."""
    if run.rank > 0:
        return []
    settings, dumped = run.settings, run.settings.model_dump(mode="json")
    reporters = [jsonl_reporter(run.folder / METRICS, run.state.step)]
    if settings.tensorboard_dir is not None:
        reporters.append(trackers.tensorboard(settings.tensorboard_dir, dumped, last, stack))
    if settings.wandb.enabled:
        reporters.append(trackers.wandb(dumped["wandb"], dumped, run.folder, stack))
    return reporters


def _save_cadence(run: Run, last: int) -> Every:
    group = run.engine.group
    return Every(
        steps=run.settings.checkpoint_every_steps,
        minutes=run.settings.checkpoint_every_minutes,
        last_step=last,
        # Every process takes part in a save, and their clocks differ.
        agreed=lambda due: bool(group.broadcast([due])[0]),
    )


def _evaluation_cadence(run: Run, last: int) -> Every:
    return Every(steps=run.spec.evaluate_every, last_step=last)


def _evaluation_hooks(run: Run, last: int, save: Callable[[], None]) -> Hooks:
    if run.spec.evaluate is None:
        return []
    hooks: Hooks = [(_evaluate(run), _evaluation_cadence(run, last))]
    if run.spec.best is not None:
        hooks.insert(0, (lambda info: save(), _evaluation_cadence(run, last)))
    return hooks


def _evaluate(run: Run) -> Hook:
    """Add the metrics on held-out examples and print them."""
    evaluate = run.spec.evaluate
    assert evaluate is not None

    def hook(info: Info) -> None:
        try:
            found = evaluate(run.engine, info.step)
        except StoppedWhileScoringError:
            print_line(f"step {info.step}: not scored; the same command does it")
            return
        info.metrics.update({f"validation_{name}": value for name, value in found.items()})
        text = format_losses(found) or "  ".join(f"{name} {found[name]:.4f}" for name in found)
        print_line(f"step {info.step}: held out, {text}")

    return hook


def _write_score(run: Run) -> Hook:
    """Write the score of a step to best.json."""
    best = run.spec.best
    assert best is not None

    def hook(info: Info) -> None:
        name = f"validation_{best}"
        if run.rank == 0 and name in info.metrics:
            write_best(run.folder, info.step, best, info.metrics[name])

    return hook


def score_resumed(run: Run) -> bool:
    """Score the checkpoint that the run continues from if that is due; return False when stopped.

    A run that was killed between a save and its score has no score of that step, and one that was
    trained without scores has none at all.
    """
    group, step, total = run.engine.group, run.state.step, run.spec.plan.total_steps
    if run.spec.best is None or run.spec.evaluate is None or step == 0:
        return True
    scored = last_scored_step(run.folder) if run.rank == 0 else 0
    if not _evaluation_cadence(run, total).due(step) or group.broadcast([scored])[0] >= step:
        return True
    info = Info(step, {}, {}, 0.0)
    _evaluate(run)(info)
    _write_score(run)(info)
    path = run.folder / METRICS
    if run.rank == 0 and info.metrics and last_step(path) < step:
        jsonl_reporter(path, step)(step, info.metrics)
    return bool(info.metrics)


def _trace_hooks(run: Run, last: int) -> Hooks:
    """Write the trace after the steps that it records."""
    engine, path = run.engine, run.settings.parallel.trace
    if not engine.traced_steps or path is None:
        return []
    if engine.group.world_size > 1:
        path = path.with_stem(f"{path.stem}_rank{run.rank}")

    def hook(info: Info) -> None:
        engine.write_trace(path)
        print_line(f"trace: the first steps are in {path}; open it in https://ui.perfetto.dev")

    return [(hook, Every(last_step=min(run.state.step + engine.traced_steps, last)))]
