"""`bert bench`, `bench pretrain` and `bench squad`: list the standard benchmarks, measure a run, or sweep.

Imports are a part of the measured start. A sweep doubles the micro-batch size until one does not fit the memory. Each
size is measured by its own process, so that memory is really refused: by its limit, the device, or the kernel.
"""

import contextlib
import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from bert_cli.config.markers import OF_SWEEP, marked
from bert_cli.config.settings import parse_bytes
from bert_cli.config.tools import (
    BenchPretrainSettings,
    BenchSettings,
    BenchSquadSettings,
    benchmarks,
)
from bert_cli.errors import ConfigError, DeviceError, count
from bert_cli.files import is_stdout, output_json, read_json
from bert_cli.parallel.cluster import find_processes
from bert_cli.planning.layout import size
from bert_cli.processes import print_table, quiet_imports
from bert_cli.tasks.look import machine

Row = dict[str, Any]
OUT_OF_MEMORY = re.compile(
    r"does not fit the device's memory|bad_alloc|MemoryError|Cannot allocate memory|out of memory"
    r"|could not create a memory|RESOURCE_EXHAUSTED|OOM when allocating|pthread_create\(\) failed"
    r"|failed to map segment|can't start new thread|none is left|SystemError",  # SystemError: Python's, of an import
    re.IGNORECASE,
)
"""What a process prints when memory was refused."""


def run(settings: BenchSettings | BenchPretrainSettings | BenchSquadSettings) -> None:
    """List the benchmarks, sweep over micro-batch sizes, or measure a run and print its metrics."""
    if isinstance(settings, BenchSettings):
        rows = [
            (name, one.about, shlex.join(["bert", *one.words]))
            for name, one in benchmarks().items()
        ]
        print_table(("name", "measures", "command"), rows)
        return
    if settings.sweep is not None:
        sweep(settings)
        return
    start = {"python_and_settings": max(0.0, time.time() - psutil.Process().create_time())}
    began = time.perf_counter()
    with quiet_imports():
        from bert_cli.tasks.bench.measure import measure
    start["imports"] = time.perf_counter() - began
    metrics = measure(settings, start)
    if metrics is None:
        return
    if not is_stdout(settings.json_file):
        _print_metrics(metrics)
    if settings.json_file is not None:
        output_json(settings.json_file, metrics)


def format_seconds(value: float) -> str:
    """Return a duration as text: 12.3 s, 456 ms, 78 us."""
    if value >= 1:
        return f"{value:,.2f} s"
    return f"{1e3 * value:.3g} ms" if value >= 1e-3 else f"{1e6 * value:.3g} us"


def format_flops(value: float) -> str:
    """Return operations per second as text: 12.3 GFLOP/s."""
    unit, name = next(((u, n) for u, n in ((1e12, "T"), (1e9, "G")) if value >= u), (1e6, "M"))
    return f"{value / unit:,.1f} {name}FLOP/s"


def _print_metrics(metrics: Mapping[str, Any]) -> None:
    described = metrics["machine"]
    step = metrics["step_seconds"]["median"]
    examples = "synthetic" if metrics["input"] == "made up" else "real"
    print(f"\n{described['processor']}; {size(described['memory_bytes'])} of memory")
    print(
        f"{metrics['what']} on {metrics['settings']['engine']}, {examples} examples, {metrics['precision']}: "
        f"{count(described['replicas'], 'replica')} of "
        f"{count(described['devices_of_a_replica'], described['devices'])}, "
        f"{count(described['processes'], 'process')}\n"
    )
    print_table(("metric", "value", "notes"), _metric_rows(metrics), right=(1,))
    print()
    parts = [
        (
            name.removesuffix("_share").replace("_", " "),
            f"{value:.1%}",
            format_seconds(value * step),
        )
        for name, value in metrics.items()
        if name.endswith("_share")
    ]
    print_table(("part of a step", "share", "time"), parts, right=(1, 2))
    if metrics["settings"]["engine"] == "jax":
        print("forward backward is the complete step, which is one compiled function")
    print()
    start = metrics["start_seconds"].items()
    times = [(name.replace("_", " "), format_seconds(seconds)) for name, seconds in start]
    print_table(("part of the start", "time"), times, right=(1,))


def _metric_rows(metrics: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    step = metrics["step_seconds"]
    checkpoint = metrics["checkpoint_wait_seconds"]
    low, median, high = (format_seconds(step[name]) for name in ("low", "median", "high"))
    flops, products = (metrics[f"{name}_per_second"] for name in ("flops", "matmul_flops"))
    utilisation = f"{metrics['flops_utilisation']:.1%} of the matrix products'"
    device = "GPU" if metrics["machine"]["devices"] == "GPU" else "process"
    peak = size(metrics["peak_memory_bytes"])
    growth = size(metrics["memory_growth_bytes"])
    rows = [
        ("step", median, f"median of {metrics['steps']} steps; quartiles {low} and {high}"),
        ("examples/s", f"{metrics['examples_per_second']:,.1f}", "sequences, also inside packs"),
        ("tokens/s", f"{metrics['tokens_per_second']:,.0f}", "without padding"),
        ("positions/s", f"{metrics['places_per_second']:,.0f}", "with padding"),
        ("FLOP/s", format_flops(flops), f"{utilisation} (model FLOPs utilisation)"),
        ("FLOP/s of matrix products", format_flops(products), "the fastest of the model, alone"),
        ("memory", peak, f"peak of the fullest {device}; {growth} since the model was built"),
    ]
    if metrics["skipped_steps"]:
        why = "their gradient was not finite, so the optimizer did not run and seems cheaper"
        rows.append(("skipped steps", f"{metrics['skipped_steps']}", why))
    if checkpoint is not None:
        write = format_seconds(metrics["checkpoint_write_seconds"])
        notes = f"the run waits for the copy; writing it takes {write} in the background"
        every = 60 * metrics["checkpoint_every_minutes"]
        if every:
            part = checkpoint / (checkpoint + every)
            notes += f"; {part:.2%} of the time with a checkpoint every {every / 60:g} min"
        rows.append(("checkpoint", format_seconds(checkpoint), notes))
    return rows


# --- sweeps


def sweep(settings: BenchPretrainSettings | BenchSquadSettings) -> None:
    """Print a line for each micro-batch size, the fastest and the largest that fits; DeviceError if none does."""
    if find_processes(settings.cluster, os.environ).count > 1:
        remedy = "run it without `bert launch`"
        raise ConfigError("sweep (micro-batch)", "starts its own processes", remedy)
    json_only = is_stdout(settings.json_file)
    of_sweep = marked(type(settings), OF_SWEEP)
    config = settings.model_dump(mode="json", exclude=of_sweep, exclude_unset=True)
    config["generated_dataset"] = settings.generated_dataset
    limit = None if settings.memory is None else parse_bytes(settings.memory)
    rows: list[Row] = []
    number = settings.sweep_from
    most = settings.most
    while (most is None or number <= most) and (not rows or rows[-1]["fits"]):
        rows.append(_measure_size(settings.WHAT, config, number, rows, limit))
        output = sys.stderr if json_only else sys.stdout
        print(f"micro-batch {number:,}: {_describe_size(rows[-1])}", file=output, flush=True)
        number *= 2
    fitting = [row for row in rows if row["fits"]]
    if not fitting:
        raise DeviceError(
            f"global_batch.micro_batch_size ({settings.sweep_from})",
            rows[0]["why"],
            "start with a lower --from, set --parallel.recompute, or look for a layout with `bert plan`",
        )
    fastest = max(fitting, key=lambda row: float(row["examples_per_second"]))
    metrics = {
        "what": settings.WHAT,
        "sweep": "micro-batch",
        "fastest": fastest["micro_batch_size"],
        "largest": fitting[-1]["micro_batch_size"],
        "limit_found": not rows[-1]["fits"],
        "rows": rows,
    }
    if not json_only:
        tried = "" if metrics["limit_found"] else " of those tried"
        print(
            f"\nfastest: {metrics['fastest']:,}; largest that fits{tried}: {metrics['largest']:,}"
        )
    if settings.json_file is not None:
        output_json(settings.json_file, metrics)


def _measure_size(
    command: str, config: Mapping[str, Any], number: int, rows: Sequence[Row], limit: int | None
) -> Row:
    """Return the metrics of one micro-batch size, or a row that says why it does not fit.

    `rows` are those of the smaller sizes. Without a limit, a size that would need more than is free is not started.
    """
    free = machine.memory()[1]
    if limit is None and len(rows) >= 2:
        before, last = (int(row["host_peak_memory_bytes"]) for row in rows[-2:])
        # The growth doubles with the micro-batch.
        needed = last + 2 * max(0, last - before)
        if needed > free:
            why = f"not tried, because it would need about {size(needed)} of {size(free)}"
            return {"micro_batch_size": number, "fits": False, "why": why}
    limit = free if limit is None else limit
    batch = {**config["global_batch"], "micro_batch_size": number}
    code, errors, metrics = _run_process(command, {**config, "global_batch": batch}, limit)
    if metrics is not None:
        return {"fits": True, **metrics}
    if code == -signal.SIGKILL:
        why = "killed, as the kernel does when memory is short"
    elif OUT_OF_MEMORY.search(errors):
        why = f"memory was refused (limit: {size(limit)} of the host's memory)"
    else:
        lines = "\n".join(errors.strip().splitlines()[-5:])
        raise DeviceError(f"micro-batch {number}", f"the process ended with {code}:\n{lines}")
    return {"micro_batch_size": number, "fits": False, "why": why}


def _run_process(
    command: str, config: Mapping[str, Any], limit: int
) -> tuple[int, str, dict[str, Any] | None]:
    """Return the exit code, standard error and, on success, the metrics of a measurement."""

    def limit_memory() -> None:
        # RLIMIT_DATA limits what is filled: TensorFlow and CUDA reserve far more than they fill.
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        # The kernel's out-of-memory killer ends this process before all others.
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")

    with tempfile.TemporaryDirectory(prefix="bench_") as folder:
        config_file = Path(folder, "config.json")
        output = Path(folder, "metrics.json")
        config_file.write_text(json.dumps(config), encoding="utf-8")
        words = [sys.executable, "-m", "bert_cli", "bench", command, "--config", str(config_file)]
        done = subprocess.run(
            [*words, "--no-checkpoint", "--json", str(output)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            preexec_fn=limit_memory,  # safe, because this process has no threads
        )
        metrics = None
        if done.returncode == 0:
            metrics = read_json(output, dict[str, Any], DeviceError, "run the same command again")
        return done.returncode, done.stderr, metrics


def _describe_size(row: Row) -> str:
    if not row["fits"]:
        return f"does not fit: {row['why']}"
    return (
        f"{row['examples_per_second']:,.1f} examples/s, {row['tokens_per_second']:,.0f} tokens/s, "
        f"step {format_seconds(row['step_seconds']['median'])}, {format_flops(row['flops_per_second'])} "
        f"({row['flops_utilisation']:.1%}), {size(row['peak_memory_bytes'])}"
    )
