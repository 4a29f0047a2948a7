"""`--budget-hours`: the number of examples that fit in the time, from the pace of some steps before the first.

The steps measure an engine of their own, which is then dropped, so nothing of them is in the run. A run that continues
reads the numbers from its newest checkpoint: its plan stays the same.
"""

import gc
import statistics
from time import monotonic

from bert_cli.config.plan import Plan
from bert_cli.config.pretrain import PretrainSettings
from bert_cli.data.stream.reader import ExampleStream
from bert_cli.errors import ConfigError, count
from bert_cli.parallel.engine import Mesh, watchdog
from bert_cli.tasks.run import build, corpora
from bert_cli.train.checkpoint import complete_checkpoints, read_state
from bert_cli.train.metrics import print_line

MEASURED_STEPS = 5
STEPS_FRACTION = 0.97  # of the time; the rest is for checkpoints and evaluations
TRIAL_SAMPLES = 10**6  # of a run without a number of examples, to measure it


def within_budget(
    settings: PretrainSettings, mesh: Mesh, stream: ExampleStream
) -> PretrainSettings:
    """Return the settings with the number of examples that fits budget_hours; a resumed run keeps its numbers.

    Raises ConfigError for a budget in which no step fits, or another one than that of the run.
    """
    hours, run = settings.budget_hours, settings.save_ckpt_path
    if hours is None:
        return settings
    where = f"budget_hours ({hours:g})"
    if run is not None and (complete := complete_checkpoints(run)):
        saved = read_state(complete[-1]).settings
        stages = [saved, *saved.get("stages", [])]
        if (saved.get("budget_hours"), len(stages)) != (hours, 1 + len(settings.stages)):
            planned = f"{saved.get('budget_hours')} hours in {count(len(stages), 'stage')}"
            problem = f"the run in {run} was planned for {planned}"
            raise ConfigError(where, problem, "continue it with that, or give another folder")
        return _with_samples(settings, [one["total_num_train_samples"] for one in stages])
    wanted = [settings.total_num_train_samples or TRIAL_SAMPLES]
    wanted += [one.total_num_train_samples for one in settings.stages]
    trial = _with_samples(settings, wanted)
    plan = corpora.plan_for(trial, stream)
    print_line(f"budget: measuring {MEASURED_STEPS} steps of each length, which are not of the run")
    seconds = [statistics.median(times) for times in seconds_of_examples(trial, mesh, stream, plan)]
    gc.collect()  # the weights of the engine that was measured
    needed = sum(number * each for number, each in zip(wanted, seconds, strict=True))
    samples = [int(STEPS_FRACTION * 3600 * hours / needed * number) for number in wanted]
    steps = [one.global_batch.examples for one in (settings, *settings.later_stages)]
    for number, each, step in zip(samples, seconds, steps, strict=True):
        if number < step * plan.sequences_per_example:
            problem = (
                f"a step of {step:,} examples takes {step * each:.1f} s, and less than one fits"
            )
            raise ConfigError(where, problem, "raise it or take a smaller batch")
    listed = ", ".join(f"{number:,}" for number in samples)
    pace = ", ".join(f"{1 / each:,.1f}" for each in seconds)
    print_line(f"budget: {hours:g} h at {pace} examples/s are {listed} examples")
    return _with_samples(settings, samples)


def _with_samples(settings: PretrainSettings, samples: list[int]) -> PretrainSettings:
    """Return the settings with other numbers of examples of each stage."""
    stages = [
        stage.model_copy(update={"total_num_train_samples": number})
        for stage, number in zip(settings.stages, samples[1:], strict=True)
    ]
    changes = {"total_num_train_samples": samples[0], "num_epochs": None, "stages": stages}
    return settings.model_copy(update=changes)


def seconds_of_examples(
    settings: PretrainSettings, mesh: Mesh, stream: ExampleStream, plan: Plan
) -> list[list[float]]:
    """Return the seconds of an example in some steps of each stage; the same on all processes."""
    parts = build.build_run(settings, mesh, plan)
    group = parts.engine.group
    found: list[float] = []
    last = {one.stage: one.first_step for one in plan.segments}
    with watchdog(group, settings.cluster.report_waiting_after_seconds):
        parts.engine.compile(stream.first_micro_batches(len(mesh.devices)))
        for first in last.values():
            batch, times = stream[first], []
            for _ in range(MEASURED_STEPS + 1):
                began = monotonic()
                parts.state.step = first
                examples = parts.step(batch)["examples"]
                times.append((monotonic() - began) / examples)
            found += times[1:]  # the first compiles
        found = group.broadcast(found)
        return [found[n : n + MEASURED_STEPS] for n in range(0, len(found), MEASURED_STEPS)]
