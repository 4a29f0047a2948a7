"""What a run does now and then: measure, save, evaluate, report, keep the best checkpoint, trace.

What is to be scored is saved before it is: an evaluation may take minutes, and a kill in them would
cost all since the last checkpoint. A run that continues scores what was saved and not scored.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

from bert_cli.config.training import TrainSettings
from bert_cli.parallel.engine import Engine, ProcessGroup
from bert_cli.tasks.run.job import Job
from bert_cli.train import report, trackers
from bert_cli.train.best import last_scored, note_best
from bert_cli.train.loop import Every, Hook, Info, StoppedWhileScoringError
from bert_cli.train.progress import Foot
from bert_cli.train.report import say
from bert_cli.train.step import State


def hooks_of(
    settings: TrainSettings,
    job: Job,
    engine: Engine,
    state: State,
    save: Callable[[], None] | None,
    last: int,
    claims: ExitStack,
    foot: Foot,
) -> list[tuple[Hook, Every]]:
    """What is done after a step, in this order, each with when it is due."""
    pace = report.Pace(last)
    group = engine.group
    reports = (
        _reports(settings, state, last, claims) if save is not None and group.rank == 0 else []
    )
    first, every_line = state.step + 1, Every(steps=settings.log_every_steps, last_step=last)

    def measure(info: Info) -> None:
        examples, tokens = info.metrics["examples"], info.metrics["tokens"]
        info.metrics.update(pace.after_step(info.step, examples, tokens))
        info.metrics["seconds_waited"] = info.seconds_waited

    def tell(info: Info) -> None:
        for one in reports:
            one(info.step, info.metrics)
        known = dict(info.metrics)
        if info.step == first:
            del known["seconds_left"]
        foot.after_step(info.step, known)
        # Where the foot of a terminal shows them, lines come as often as someone asked for.
        is_wanted = not foot.shown or "log_every_steps" in settings.model_fields_set
        # The first line too: it says that the run is alive.
        if is_wanted and (every_line.due(info.step) or info.step == first):
            say(report.line(info.step, last, known))

    each = Every(steps=1)
    hooks: list[tuple[Hook, Every]] = [(measure, each)]
    if save is not None and job.evaluate is not None:
        if job.best is not None:
            hooks.append((lambda info: save(), _when_evaluated(job, last)))
        hooks.append((_evaluation(job.evaluate, engine), _when_evaluated(job, last)))
    hooks.append((tell, each))
    if save is not None:
        every = Every(
            steps=settings.checkpoint_every_steps,
            minutes=settings.checkpoint_every_minutes,
            last_step=last,
            # Every process takes part in a save, and their clocks differ.
            agreed=lambda due: bool(group.broadcast([due])[0]),
        )
        hooks.append((lambda info: save(), every))
        hooks += list(_noting_best(settings, job, group, last))
    hooks += _trace_hooks(settings, engine, state.step, last)
    # Saving and evaluating are not the pace of a step.
    hooks.append((lambda info: pace.restart(), each))
    return hooks


def _when_evaluated(job: Job, last: int) -> Every:
    return Every(steps=job.evaluate_every, last_step=last)


def _evaluation(evaluate: Callable[[Engine, int], dict[str, float]], engine: Engine) -> Hook:
    def hook(info: Info) -> None:
        try:
            found = evaluate(engine, info.step)
        except StoppedWhileScoringError:
            say(f"step {info.step}: not scored; the same command does it")
            return
        info.metrics.update({f"validation_{name}": value for name, value in found.items()})
        told = report.losses(found) or "  ".join(f"{name} {found[name]:.4f}" for name in found)
        say(f"step {info.step}: held out, {told}")

    return hook


def _noting_best(
    settings: TrainSettings, job: Job, group: ProcessGroup, last: int
) -> Iterator[tuple[Hook, Every]]:
    """Write down each score, and whose is the highest."""
    best, folder = job.best, settings.save_ckpt_path
    if best is None or job.evaluate is None or folder is None:
        return

    def hook(info: Info) -> None:
        name = f"validation_{best}"
        if group.rank == 0 and name in info.metrics:
            note_best(folder, info.step, best, info.metrics[name])

    yield hook, _when_evaluated(job, last)


def caught_up(settings: TrainSettings, job: Job, engine: Engine, state: State) -> bool:
    """Score the checkpoint that the run continues from, if it should be and was not; False when stopped.

    A run that was killed between a save and its score would have no score of that step, and one that
    was trained without any none at all.
    """
    folder, group, step = settings.save_ckpt_path, engine.group, state.step
    if job.best is None or job.evaluate is None or step == 0:
        return True
    assert folder is not None
    scored = last_scored(folder) if group.rank == 0 else 0
    is_due = _when_evaluated(job, job.plan.total_steps).due(step)
    if not is_due or group.broadcast([scored])[0] >= step:
        return True
    info = Info(step, {}, {}, 0.0)
    _evaluation(job.evaluate, engine)(info)
    for hook, _ in _noting_best(settings, job, group, job.plan.total_steps):
        hook(info)
    if group.rank == 0 and info.metrics and report.last_step(folder / report.METRICS) < step:
        report.jsonl(folder / report.METRICS, step)(step, info.metrics)
    return bool(info.metrics)


def _trace_hooks(
    settings: TrainSettings, engine: Engine, done: int, last: int
) -> list[tuple[Hook, Every]]:
    """Write the trace, when one is asked for, after the steps that it notes."""
    path, group = settings.parallel.trace, engine.group
    if not engine.traced_steps or path is None:
        return []
    if group.world_size > 1:
        path = path.with_stem(f"{path.stem}_rank{group.rank}")

    def write(info: Info) -> None:
        engine.write_trace(path)
        say(f"trace: the first steps are in {path}; open it in https://ui.perfetto.dev")

    return [(write, Every(last_step=min(done + engine.traced_steps, last)))]


def _reports(
    settings: TrainSettings, state: State, last: int, claims: ExitStack
) -> list[report.Report]:
    folder, told = settings.save_ckpt_path, settings.model_dump(mode="json")
    assert folder is not None
    reports = [report.jsonl(folder / report.METRICS, state.step)]
    if settings.tensorboard_dir is not None:
        reports.append(trackers.tensorboard(settings.tensorboard_dir, told, last, claims))
    if settings.wandb.enabled:
        reports.append(trackers.wandb(told["wandb"], told, folder, claims))
    return reports
