"""Measure a training run: its steps, memory, the time of a checkpoint, and the rate of matrix products.

The run is built and stepped by the code of every run; only the calls of its engine are timed. With several
processes rank 0 prints, and the metrics are those of all processes.
"""

import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from bert_cli.config import layout
from bert_cli.config.tools import BenchPretrainSettings, BenchSquadSettings
from bert_cli.config.training import PretrainSettings, describe, make_plan
from bert_cli.data.finetune.features import Features
from bert_cli.data.records.tokenizer import read_tokenizer
from bert_cli.data.shards.manifest import package_versions
from bert_cli.data.stream.reader import read_ahead
from bert_cli.data.stream.synthetic import synthetic_features
from bert_cli.errors import CheckpointError, ConfigError, DeviceError
from bert_cli.files import is_stdout
from bert_cli.parallel.engine import Mesh
from bert_cli.tasks.bench.flops import Product, model_flops, products, shape_of
from bert_cli.tasks.bench.timing import (
    INPUT_WAIT,
    StepTime,
    Stopwatch,
    resident_bytes,
    summarize,
)
from bert_cli.tasks.finetune import squad
from bert_cli.tasks.look import machine
from bert_cli.tasks.run import build, corpora, finetune, start
from bert_cli.tasks.run import train as training
from bert_cli.tasks.run.build import RunSpec
from bert_cli.train import checkpoint
from bert_cli.train.loop import Every, Info, copy_state, gather_moments, train
from bert_cli.train.metrics import print_line

Settings = BenchPretrainSettings | BenchSquadSettings
STOPPED = 130
"""Exit code of a measurement that was asked to stop: nothing can be continued."""
VERSIONS = ("tensorflow", "keras", "numpy", "tokenizers")
CHECKPOINT = ("checkpoint_wait_seconds", "checkpoint_write_seconds")
"""Seconds that a run waits while its state is copied, and seconds of writing it in the background."""
FAILED = [-1.0, -1.0]

ROUNDS, ROUND_SECONDS = 7, 0.05
"""A round repeats a product for at least so long: a shorter one measures the clock."""
PRODUCT_FLOPS = {"CPU": (2e9, 2e10), "GPU": (2e11, 2e12)}
"""Operations of one product, at least and at most: tens of milliseconds on a few cores, and on a GPU much more
than the tens of microseconds that a call takes."""
PRODUCT_ELEMENTS = {"CPU": 2**24, "GPU": 2**27}
"""Elements of input and output, at most: less than a step has used, so that they fit."""
LARGEST_PRODUCTS = 3


@dataclass(frozen=True)
class Run:
    """A run that is ready for its first step."""

    settings: Settings
    mesh: Mesh
    spec: RunSpec
    parts: build.Parts
    format: checkpoint.Format
    watch: Stopwatch
    """Measures the calls of the engine."""
    bytes_before: int
    """Memory before the model was built."""


def measure(settings: Settings, start: Stopwatch) -> dict[str, Any] | None:
    """Measure a run and return its metrics; None on ranks above 0.

    `start` has the seconds since the process began. Raises what the run itself raises, and SystemExit when
    it is asked to stop.
    """
    json_only = is_stdout(settings.json_file)
    with ExitStack() as locks, redirect_stdout(sys.stderr) if json_only else nullcontext():
        run = _build(settings, start, locks)
        group = run.parts.engine.group
        warmup, steps = settings.warmup_steps, settings.steps
        print_line(f"bench: {warmup} warm-up steps, then {steps} measured steps")
        times = _take_steps(run, warmup + steps)
        start.seconds["first_step"] = times[0].seconds
        metrics = summarize(times, warmup) | _memory(run)
        metrics |= _checkpoint(run) if settings.checkpoint else dict.fromkeys(CHECKPOINT)
        rate = _product_rate(run)
        metrics["matmul_flops_per_second"] = rate
        metrics["flops_utilisation"] = metrics["flops_per_second"] / rate
        metrics["start_seconds"] = {**start.seconds, "total": sum(start.seconds.values())}
        group.barrier()
        return {**metrics, **_description(run)} if group.rank == 0 else None


def _build(settings: Settings, start_watch: Stopwatch, locks: ExitStack) -> Run:
    """Prepare everything up to the first step and measure each part."""
    with start_watch.part("devices"):
        # The settings of the run: `about` describes the complete run, not the measured steps.
        settings, mesh, stop = training.prepare(
            with_model_shape(settings.model_copy(update={"about": None})), locks
        )
        # TensorFlow initializes its devices with the first operation.
        tf.zeros([]).numpy()
    bytes_before = _device_memory(mesh, "current")
    with start_watch.part("building"):
        spec = spec_of(settings, mesh)
        # A shorter run is extended, so that the learning rate is defined for all measured steps.
        last = settings.warmup_steps + settings.steps
        plan = replace(spec.plan, total_steps=max(spec.plan.total_steps, last))
        spec = replace(spec, plan=plan)
        lines = [f"  {line}" for line in layout.describe_layout(settings)]
        print_line("\n".join(["plan:", describe(plan), *lines]))
        parts = build.build_run(settings, mesh, plan, stop, spec.labels)
        format_ = spec.form(parts.model)
    with start_watch.part("tracing"):
        parts.engine.compile(spec.sample)
    watch = Stopwatch()
    parts.engine.record = watch.parts_until(synchronize)
    return Run(settings, mesh, spec, parts, format_, watch, bytes_before)


# --- the examples and the plan


def with_model_shape(settings: Settings) -> Settings:
    """Return the settings with the shape of the model that the run starts from, and the packs of its records.

    Weights are always initialized: their values do not change how long anything takes.
    """
    name = settings.pretrained_ckpt_path
    synthetic = settings.generated_dataset
    if name is not None and not (synthetic and "bert_config" in settings.model_fields_set):
        settings = start.with_shape_of(settings, start.find_source(name))
    if isinstance(settings, PretrainSettings):
        return corpora.with_sizes_of_records(settings)
    return settings


def spec_of(settings: Settings, mesh: Mesh) -> RunSpec:
    """Return what a run of these settings trains on. Raises what the run raises for its input."""
    if isinstance(settings, BenchSquadSettings):
        synthetic = settings.generated_dataset
        features = synthetic_windows(settings) if synthetic else _real_windows(settings)
        plan, windows, sample = finetune.open_features(settings, features, mesh)
        return RunSpec(
            plan, windows, sample, lambda model: start.disk_format(settings, model, None)
        )
    part = mesh.processes.rank, mesh.processes.count
    stream = corpora.open_stream(settings, make_plan(settings, None).examples_per_step, *part)
    plan = make_plan(settings, stream.epoch_size, stream.sequences_per_example)
    sample, folder = stream.first_micro_batches(len(mesh.devices)), stream.folder
    return RunSpec(plan, stream, sample, lambda model: start.disk_format(settings, model, folder))


def _real_windows(settings: BenchSquadSettings) -> Features:
    name = settings.tokenizer_path or settings.pretrained_ckpt_path
    if name is None:
        raise ConfigError(
            "tokenizer_path",
            "real questions need a tokenizer, and none is given",
            "give --tokenizer-path or --pretrained-ckpt-path",
        )
    tokenizer = read_tokenizer(start.find_tokenizer(name))
    vocab_size = settings.bert_config.vocab_size
    if len(tokenizer.pieces) > vocab_size:
        raise ConfigError(
            f"{name} (tokenizer)",
            f"has {len(tokenizer.pieces):,} tokens, but the model has a vocabulary of {vocab_size:,}",
            "give another --tokenizer-path, or --bert-config.vocab-size",
        )
    task = squad.build(settings.model_copy(update={"do_validation": False}), tokenizer, None)
    assert task.train is not None
    return task.train


def synthetic_windows(settings: BenchSquadSettings) -> Features:
    """Return the synthetic windows of one step."""
    batch = settings.global_batch
    return synthetic_features(
        settings.LAST_BLOCKS[-1],
        batch.micro_batch_size * batch.replicas * batch.grad_acc_steps_per_replica,
        labels=2,
        vocab_size=settings.bert_config.vocab_size,
        sequence_length=settings.max_seq_length,
        seed=settings.seed,
    )


# --- the measurements


def _take_steps(run: Run, last: int) -> list[StepTime]:
    """Run the steps with the loop of every run and return their times."""
    times: list[StepTime] = []
    began = time.perf_counter()
    config, blocks = run.settings.bert_config, run.settings.LAST_BLOCKS

    def record(info: Info) -> None:
        nonlocal began
        now = time.perf_counter()
        seconds, began = now - began, now
        shape = shape_of(info.batch)
        parts = {INPUT_WAIT: info.seconds_waited, **run.watch.reset()}
        counts = info.metrics["examples"], info.metrics["tokens"]
        positions = shape.examples * shape.positions
        operations = model_flops(config, blocks, shape)
        skipped = info.metrics["skipped"]
        times.append(StepTime(seconds, parts, *counts, positions, operations, skipped))

    group, step = run.parts.engine.group, run.parts.step
    batches = read_ahead(run.spec.stream, 0, last)

    def stop() -> bool:
        return bool(group.all_reduce([step.stop_requested()])[0])

    if not train(run.parts.state, batches, step, [(record, Every(steps=1))], stop):
        print_line("bench: stopped before its last step; nothing was measured")
        raise SystemExit(STOPPED)
    # Examples and tokens are sums over all processes already.
    totals = group.all_reduce([[one.positions, one.flops] for one in times])
    return [
        replace(one, positions=float(positions), flops=float(operations))
        for one, (positions, operations) in zip(times, totals, strict=True)
    ]


def _memory(run: Run) -> dict[str, Any]:
    """Return the peak memory and its growth since the model was built, of the process with the most."""
    peak, group = _device_memory(run.mesh, "peak"), run.parts.engine.group
    return {
        "peak_memory_bytes": int(max(group.all_gather(peak))),
        # Clamped at zero: Linux updates the current and the peak size at different times.
        "memory_growth_bytes": int(max(0, *group.all_gather(peak - run.bytes_before))),
        "host_peak_memory_bytes": int(max(group.all_gather(resident_bytes()[1]))),
    }


def _device_memory(mesh: Mesh, kind: str) -> int:
    """Return the `current` or `peak` memory of this process, or of its GPU that uses the most."""
    if mesh.kind == "CPU":
        now, peak = resident_bytes()
        return now if kind == "current" else peak
    gpus = (name.rpartition(":")[2] for row in mesh.devices for name in row)
    return max(tf.config.experimental.get_memory_info(f"GPU:{number}")[kind] for number in gpus)


def _checkpoint(run: Run) -> dict[str, float | None]:
    """Return the seconds of a checkpoint; None, with a message, if the disk refuses it."""
    group, plan = run.parts.engine.group, run.spec.plan
    values = run.settings.model_dump(mode="json")
    fixed = checkpoint.fixed_settings(
        values, plan.examples_per_step, plan.total_steps, run.spec.stream.fingerprint
    )
    group.barrier()
    seconds = FAILED
    if group.rank > 0:
        gather_moments(run.parts.state)
    else:
        seconds = save(run.parts, run.format, values, fixed, run.settings.checkpoint_dir)
    seconds = [float(one) for one in group.broadcast(seconds)]
    return dict(zip(CHECKPOINT, seconds if seconds[0] >= 0 else (None, None), strict=True))


def save(
    parts: build.Parts,
    format_: checkpoint.Format,
    settings: Mapping[str, Any],
    fixed: Mapping[str, Any],
    folder: Path | None,
) -> list[float]:
    """Write a checkpoint and remove it; return the seconds of the copy and of the writing, or `FAILED`."""
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".bench_", dir=folder) as inner:
            began = time.perf_counter()
            state = copy_state(parts.state)
            copied_at = time.perf_counter()
            checkpoint.save(
                Path(inner),
                state,
                format_,
                fixed=dict(fixed),
                settings=dict(settings),
                versions=build.versions(),
            )
            return [copied_at - began, time.perf_counter() - copied_at]
    except (OSError, CheckpointError, DeviceError) as error:
        if parts.engine.group.world_size > 1:
            raise  # the other processes wait inside the save
        print_line(f"checkpoint: not measured ({error})")
        return FAILED


def _description(run: Run) -> dict[str, Any]:
    """Return what was measured, and on which machine."""
    settings, plan, mesh = run.settings, run.spec.plan, run.mesh
    values = settings.model_dump(mode="json")
    real = {name: values[name] for name in settings.REAL_EXAMPLES}
    return {
        "what": settings.WHAT,
        "input": "made up" if settings.generated_dataset else real,
        "examples_per_step": plan.examples_per_step,
        "micro_batch_size": plan.micro_batch_size,
        "micro_batches_per_step": plan.micro_batches_per_step,
        "precision": settings.precision,
        "checkpoint_every_minutes": settings.checkpoint_every_minutes,
        "machine": {
            **machine.description(),
            "devices": mesh.kind,
            "devices_of_a_replica": len(mesh.devices[0]),
            "replicas": mesh.replicas,
            "processes": mesh.processes.count,
        },
        "versions": package_versions(VERSIONS),
        "settings": values,
    }


# --- the rate of matrix products


def synchronize() -> None:
    """Wait until the GPUs have finished; a CPU computes synchronously."""
    if tf.config.list_logical_devices("GPU"):
        tf.test.experimental.sync_devices()


def _product_rate(run: Run) -> float:
    """Return the operations per second of products on all devices of the run; a host's cores count once."""
    mesh, group, settings = run.mesh, run.parts.engine.group, run.settings
    batch = {name: column[0] for name, column in run.spec.sample.items()}
    known = products(settings.bert_config, settings.LAST_BLOCKS, shape_of(batch))
    dtype = str(keras.DTypePolicy(settings.precision).compute_dtype)
    group.barrier()
    rate = product_rate(known, dtype, mesh.devices[0][0])
    devices = 1 if mesh.kind == "CPU" else sum(map(len, mesh.devices))
    return float(group.all_reduce([rate * devices])[0])


def product_rate(known: Iterable[Product], dtype: str, device: str) -> float:
    """Return the operations per second of the fastest of the model's largest products on a device.

    No datasheet has this rate for a virtual machine or a container, so it is measured: in the process, with
    the threads and in the dtype of the run. Products get enough rows that the rate does not depend on the
    micro-batch size.
    """
    kind = "GPU" if ":GPU:" in device.upper() else "CPU"
    sized = {resize(one, *PRODUCT_FLOPS[kind], PRODUCT_ELEMENTS[kind]) for one in largest(known)}
    return max(_rate(one, dtype, device) for one in sized)


def largest(known: Iterable[Product]) -> list[Product]:
    """Return the product with the most rows for each of the largest matrices."""
    by_matrix = {(one.width, one.outputs): one for one in sorted(known)}
    return sorted(by_matrix.values(), key=lambda one: -one.width * one.outputs)[:LARGEST_PRODUCTS]


def resize(product: Product, least: float, most: float, elements: int) -> Product:
    """Return the product with between `least` and `most` operations and at most so many elements."""
    flops_per_row = product.flops / product.rows
    rows = min(max(product.rows, math.ceil(least / flops_per_row)), math.ceil(most / flops_per_row))
    limit = elements // (product.width + product.outputs)
    return product._replace(rows=max(1, min(rows, limit)))


def _rate(product: Product, dtype: str, device: str) -> float:
    with tf.device(device):
        left = tf.cast(tf.random.stateless_normal([product.rows, product.width], [0, 1]), dtype)
        right = tf.cast(tf.random.stateless_normal([product.width, product.outputs], [0, 2]), dtype)
        multiply = tf.function(tf.matmul, autograph=False)

        def repeat(times: int) -> float:
            began = time.perf_counter()
            for _ in range(times):
                multiply(left, right)
            synchronize()
            return time.perf_counter() - began

        return product.flops / _median_seconds(repeat)


def _median_seconds(repeat: Callable[[int], float]) -> float:
    """Return the median seconds of one repetition."""
    repeat(1)
    times = max(1, round(ROUND_SECONDS / max(repeat(1), 1e-6)))
    return statistics.median(repeat(times) / times for _ in range(ROUNDS))
