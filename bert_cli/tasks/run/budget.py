"""`--budget-hours`: the number of examples that fit in the time, from the pace of some steps before the first.

The steps measure an engine of their own, which is then dropped, so nothing of them is in the run. What they find is
written to the run's folder, and a run that continues reads it there: its plan stays the same.
"""

import statistics
from time import monotonic

from pydantic import BaseModel, ConfigDict, PositiveInt

from bert_cli.config.plan import Plan
from bert_cli.config.training import PretrainSettings
from bert_cli.data.stream.reader import ExampleStream
from bert_cli.errors import CheckpointError, ConfigError
from bert_cli.files import read_json, write_json_atomically
from bert_cli.parallel.engine import Mesh
from bert_cli.tasks.run import build, corpora
from bert_cli.train.metrics import print_line

FILE = "budget.json"
MEASURED_STEPS = 5
STEPS_SHARE = 0.97  # of the time; the rest is for checkpoints and evaluations
REFERENCE = 10**6  # examples of a run that is planned to measure it


class Budget(BaseModel):
    """The content of budget.json."""

    model_config = ConfigDict(strict=True)
    hours: float
    samples: list[PositiveInt]
    """Examples of each stage; sequences where examples are packs."""


def within_budget(settings: PretrainSettings, mesh: Mesh) -> PretrainSettings:
    """Return the settings with the numbers of examples that `budget_hours` allow, those of its folder if it has them.

    Raises ConfigError for a budget in which no step fits, or another one than that of the folder.
    """
    hours, run = settings.budget_hours, settings.save_ckpt_path
    if hours is None:
        return settings
    path = None if run is None else run / FILE
    where = f"budget_hours ({hours:g})"
    if path is not None and path.exists():
        found = read_json(path, Budget, CheckpointError, "remove it to measure again")
        if found.hours != hours:
            problem = f"the run in {run} was planned for {found.hours:g}"
            raise ConfigError(where, problem, f"give --budget-hours {found.hours:g}")
        return _with_samples(settings, found.samples)
    wanted = [settings.total_num_train_samples or REFERENCE]
    wanted += [one.total_num_train_samples for one in settings.stages]
    trial = _with_samples(settings, wanted)
    stream, plan = corpora.open_run(trial, mesh.processes.rank, mesh.processes.count)
    print_line(f"budget: measuring {MEASURED_STEPS} steps of each length, which are not of the run")
    seconds = _seconds_of_examples(trial, mesh, stream, plan)
    needed = sum(number * each for number, each in zip(wanted, seconds, strict=True))
    samples = [int(STEPS_SHARE * 3600 * hours / needed * number) for number in wanted]
    if min(samples) < settings.global_batch.examples:
        problem = f"a step takes {seconds[0] * settings.global_batch.examples:.1f} s, and less than one fits"
        raise ConfigError(where, problem, "raise it or take a smaller batch")
    listed = ", ".join(f"{number:,}" for number in samples)
    pace = ", ".join(f"{1 / each:,.1f}" for each in seconds)
    print_line(f"budget: {hours:g} h at {pace} examples/s are {listed} examples")
    is_saved = not (settings.dry_run or settings.compile_only)
    if path is not None and is_saved and mesh.processes.rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomically(path, Budget(hours=hours, samples=samples).model_dump())
    return _with_samples(settings, samples)


def _with_samples(settings: PretrainSettings, samples: list[int]) -> PretrainSettings:
    """Return the settings with other numbers of examples of each stage."""
    stages = [
        stage.model_copy(update={"total_num_train_samples": number})
        for stage, number in zip(settings.stages, samples[1:], strict=True)
    ]
    return settings.model_copy(update={"total_num_train_samples": samples[0], "stages": stages})


def _seconds_of_examples(
    settings: PretrainSettings, mesh: Mesh, stream: ExampleStream, plan: Plan
) -> list[float]:
    """Return the seconds of an example of each stage, in complete batches; the same on all processes."""
    parts = build.build_run(settings, mesh, plan)
    parts.engine.compile(stream.first_micro_batches(len(mesh.devices)))
    last = {one.stage: one.first_step for one in plan.segments}
    found = []
    for first in last.values():
        batch, times = stream[first], []
        for _ in range(MEASURED_STEPS + 1):
            began = monotonic()
            parts.state.step = first
            examples = parts.step(batch)["examples"]
            times.append((monotonic() - began) / examples)
        found.append(statistics.median(times[1:]))  # the first compiles
    return parts.engine.group.broadcast(found)
