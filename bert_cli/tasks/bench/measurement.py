"""A run, measured: built as a run is, stepped by the loop of every run, and looked at.

What is measured is the run's own code, with a stopwatch around the calls of its engine. Before the
first step the parts of the start are noted, after the last the memory, the time of a checkpoint and
the rate of matrix products; of several processes rank 0 speaks, and figures are those of all.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tensorflow as tf

from bert_cli.config import layout
from bert_cli.config.bench import BenchPretrainSettings, BenchSquadSettings
from bert_cli.config.plan import describe
from bert_cli.data.stream.prefetch import read_ahead
from bert_cli.errors import CheckpointError, DeviceError
from bert_cli.files import is_stdout, output_json
from bert_cli.parallel.engine import Engine, Mesh
from bert_cli.tasks.bench import flops, jobs, product_rate, table
from bert_cli.tasks.bench.timing import (
    WAITED,
    Stopwatch,
    Taken,
    figures_of,
    resident_bytes,
)
from bert_cli.tasks.run import build
from bert_cli.tasks.run import train as training
from bert_cli.tasks.run.spec import RunSpec
from bert_cli.train import checkpoint
from bert_cli.train.loop import Every, Info, train
from bert_cli.train.metrics import print_line
from bert_cli.train.saving import copy_state, gather_moments
from bert_cli.train.step import State

Settings = BenchPretrainSettings | BenchSquadSettings
STOPPED = 130
"""Exit code of a measurement that was asked to stop: there is nothing to go on with."""
CHECKPOINT = ("checkpoint_wait_seconds", "checkpoint_write_seconds")
"""Seconds that a run waits for a copy of its state, and that writing it takes beside the steps."""


@dataclass(frozen=True)
class Built:
    """A run that is ready for its steps."""

    settings: Settings
    mesh: Mesh
    job: RunSpec
    engine: Engine
    state: State
    step: Any
    form: checkpoint.Format
    watch: Stopwatch
    """Takes the seconds of the engine's calls."""
    start: dict[str, float]
    """Seconds of the start, by part."""
    before: int
    """Memory before the model was built, in bytes."""


def run(settings: Settings, start: Stopwatch) -> None:
    """Measure, print a table, and write the figures where --json says.

    `start` has the seconds since the process began. Raises what the run itself would raise, and
    SystemExit when it is asked to stop.
    """
    alone = is_stdout(settings.json_file)
    with ExitStack() as claims:
        with redirect_stdout(sys.stderr) if alone else nullcontext():
            figures, rank = _measured(settings, start, claims)
        if rank > 0:
            return
        if not alone:
            table.show(figures)
        if settings.json_file is not None:
            output_json(settings.json_file, figures)


def _measured(
    settings: Settings, start: Stopwatch, claims: ExitStack
) -> tuple[dict[str, Any], int]:
    built = _build(settings, start, claims)
    group = built.engine.group
    last = settings.warmup_steps + settings.steps
    print_line(
        f"bench: {settings.warmup_steps} steps of warm-up, then {settings.steps} that are measured"
    )
    taken = _take_steps(built, last)
    built.start["first_step"] = taken[0].seconds
    figures = figures_of(taken, settings.warmup_steps)
    figures |= _memory(built)
    figures |= _checkpoint(built) if settings.checkpoint else dict.fromkeys(CHECKPOINT)
    rate = _product_rate(built)
    figures["matmul_flops_per_second"] = rate
    figures["flops_utilisation"] = figures["flops_per_second"] / rate
    figures["start_seconds"] = {**built.start, "total": sum(built.start.values())}
    figures |= table.described(built.settings, built.job.plan, built.mesh)
    group.barrier()
    return figures, group.rank


def _build(settings: Settings, start: Stopwatch, claims: ExitStack) -> Built:
    """Everything up to the first step, with the seconds of each part."""
    with start.part("devices"):
        settings = jobs.shaped(settings, settings.generated_dataset)
        # What a config promises is of its whole run.
        settings, mesh, stop = training.prepare(settings.model_copy(update={"about": None}), claims)
        # TensorFlow's own first operation.
        tf.zeros([]).numpy()
    before = _memory_now(mesh)
    with start.part("building"):
        job = jobs.job_of(settings, mesh)
        job = replace(job, plan=_long_enough(settings, job))
        laid: list[str] = [f"  {line}" for line in layout.describe_layout(settings)]
        print_line("\n".join(["plan:", describe(job.plan), *laid]))
        model, engine, state, step = build.build_run(settings, mesh, job.plan, stop, job.labels)
        form = job.form(model)
    with start.part("tracing"):
        engine.compile(job.sample)
    watch = Stopwatch()
    engine.record = watch.parts_until(product_rate.settle)
    return Built(settings, mesh, job, engine, state, step, form, watch, start.seconds, before)


def _long_enough(settings: Settings, job: RunSpec) -> Any:
    """The run's plan with steps enough for the measurement, so that its rates are those of a run."""
    last = settings.warmup_steps + settings.steps
    return replace(job.plan, total_steps=max(job.plan.total_steps, last))


def _take_steps(built: Built, last: int) -> list[Taken]:
    """Take the steps by the loop of every run; what each was."""
    taken: list[Taken] = []
    clock, began = time.perf_counter, time.perf_counter()
    config, blocks = built.settings.bert_config, built.settings.LAST_BLOCKS

    def note(info: Info) -> None:
        nonlocal began
        seconds, began = clock() - began, clock()
        shape = flops.shape_of(info.batch)
        own = {WAITED: info.seconds_waited, **built.watch.taken()}
        counts = info.metrics["examples"], info.metrics["tokens"]
        places = shape.examples * shape.places
        work = flops.model_flops(config, blocks, shape)
        taken.append(Taken(seconds, own, *counts, places, work, info.metrics["skipped"]))

    group = built.engine.group
    batches = read_ahead(built.job.stream, 0, last)
    asked: Callable[[], bool] = lambda: bool(group.all_reduce([built.step.stop_requested()])[0])  # noqa: E731
    if not train(built.state, batches, built.step, [(note, Every(steps=1))], asked):
        print_line("bench: stopped before its last step; nothing was measured")
        raise SystemExit(STOPPED)
    # Examples and tokens are counted over all processes already.
    totals = group.all_reduce([[one.places, one.flops] for one in taken])
    return [
        replace(one, places=float(places), flops=float(work))
        for one, (places, work) in zip(taken, totals, strict=True)
    ]


def _memory(built: Built) -> dict[str, Any]:
    """The most memory of a device, and by how much it grew with the model: of the fullest process."""
    most, group = _memory_at_most(built.mesh), built.engine.group
    return {
        "peak_memory_bytes": int(max(group.all_gather(most))),
        # Linux counts what is there and the most apart, some pages off from one another.
        "memory_growth_bytes": int(max(0, *group.all_gather(most - built.before))),
        "host_peak_memory_bytes": int(max(group.all_gather(resident_bytes()[1]))),
    }


def _memory_now(mesh: Mesh) -> int:
    if mesh.kind == "CPU":
        return resident_bytes()[0]
    return max(_of_gpu(name)["current"] for row in mesh.devices for name in row)


def _memory_at_most(mesh: Mesh) -> int:
    if mesh.kind == "CPU":
        return resident_bytes()[1]
    return max(_of_gpu(name)["peak"] for row in mesh.devices for name in row)


def _of_gpu(name: str) -> dict[str, int]:
    number = name.rpartition(":")[2]
    return dict(tf.config.experimental.get_memory_info(f"GPU:{number}"))


def _checkpoint(built: Built) -> dict[str, float | None]:
    """How long a run waits for a save and how long it is written; None, with a word why, where the disk refuses."""
    group, settings, job = built.engine.group, built.settings, built.job
    told = settings.model_dump(mode="json")
    plan = job.plan
    fixed = checkpoint.fixed_settings(
        told, plan.examples_per_step, plan.total_steps, job.stream.fingerprint
    )
    took = [-1.0, -1.0]
    group.barrier()
    if group.rank > 0:
        gather_moments(built.state)
    else:
        took = _save(built, told, fixed)
    took = [float(seconds) for seconds in group.broadcast(took)]
    return dict(zip(CHECKPOINT, took if took[0] >= 0 else (None, None), strict=True))


def _save(built: Built, told: dict[str, Any], fixed: dict[str, Any]) -> list[float]:
    where = built.settings.checkpoint_dir
    try:
        if where is not None:
            where.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".bench_", dir=where) as folder:
            began = time.perf_counter()
            held = copy_state(built.state)
            waited = time.perf_counter()
            checkpoint.save(
                Path(folder),
                held,
                built.form,
                fixed=fixed,
                settings=told,
                versions=build.versions(),
            )
            return [waited - began, time.perf_counter() - waited]
    except (OSError, CheckpointError, DeviceError) as error:
        if built.engine.group.world_size > 1:
            raise  # the others wait within it
        print_line(f"checkpoint: not measured ({error})")
        return [-1.0, -1.0]


def _product_rate(built: Built) -> float:
    """Operations a second of products on all devices of the run: of a host's cores only once."""
    mesh, group, settings = built.mesh, built.engine.group, built.settings
    batch = {name: column[0] for name, column in built.job.sample.items()}
    shape = flops.shape_of(batch)
    known = flops.products(settings.bert_config, settings.LAST_BLOCKS, shape)
    group.barrier()
    rate = product_rate.product_rate(known, settings.precision, mesh.devices[0][0])
    devices = 1 if mesh.kind == "CPU" else sum(map(len, mesh.devices))
    return float(group.all_reduce([rate * devices])[0])
