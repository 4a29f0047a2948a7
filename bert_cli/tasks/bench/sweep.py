"""Measure a run with doubling micro-batch sizes until one does not fit the memory.

Each measurement is its own process, so that memory is really requested and really refused: by the limit
that the process is started with, by the device, or by the kernel. A size whose expected memory is more
than what is free is not started. TensorFlow is not loaded here: on a GPU the memory that it takes would
be missing in the measured processes.
"""

import contextlib
import itertools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_cli.config.layout import size
from bert_cli.config.settings import parse_bytes
from bert_cli.config.tools import BenchPretrainSettings, BenchSquadSettings
from bert_cli.errors import ConfigError, DeviceError
from bert_cli.files import is_stdout, output_json, read_json
from bert_cli.parallel.cluster import find_processes
from bert_cli.processes import print_table
from bert_cli.tasks.bench.timing import format_flops, format_seconds
from bert_cli.tasks.look import machine

Row = dict[str, Any]
OUT_OF_MEMORY = re.compile(
    r"does not fit the device's memory|bad_alloc|MemoryError|Cannot allocate memory|out of memory"
    r"|could not create a memory|RESOURCE_EXHAUSTED|OOM when allocating|pthread_create\(\) failed"
    r"|failed to map segment|can't start new thread",
    re.IGNORECASE,
)
"""What a process prints when memory was refused."""
LAST_LINES = 5
"""Lines of a failed process that the error repeats."""
SWEEP_SETTINGS = {"sweep", "sweep_from", "most", "memory", "json_file", "checkpoint"}


def run(settings: BenchPretrainSettings | BenchSquadSettings) -> None:
    """Print a row for each micro-batch size, the fastest size and the largest that fits.

    Raises DeviceError when the first size does not fit, or when a process fails for another reason.
    """
    if find_processes(settings.cluster, os.environ).count > 1:
        raise ConfigError(
            "sweep (micro-batch)", "starts its own processes", "run it without `bert launch`"
        )
    json_only = is_stdout(settings.json_file)
    config = settings.model_dump(mode="json", exclude=SWEEP_SETTINGS, exclude_unset=True)
    config["generated_dataset"] = settings.generated_dataset
    memory = None if settings.memory is None else parse_bytes(settings.memory)
    rows: list[Row] = []
    for number in _sizes(settings.sweep_from, settings.most):
        row = measure_size(settings.WHAT, config, number, rows, memory)
        rows.append(row)
        print(_line(row), file=sys.stderr if json_only else sys.stdout, flush=True)
        if not row["fits"]:
            break
    fitting = [row for row in rows if row["fits"]]
    if not fitting:
        raise DeviceError(
            f"global_batch.micro_batch_size ({settings.sweep_from})",
            rows[0]["why"],
            "start with a lower --from, set --parallel.recompute, or look for a layout with `bert plan`",
        )
    result = {
        "what": settings.WHAT,
        "sweep": "micro-batch",
        "fastest": max(fitting, key=lambda row: float(row["examples_per_second"]))[
            "micro_batch_size"
        ],
        "largest": fitting[-1]["micro_batch_size"],
        "limit_found": not rows[-1]["fits"],
        "rows": rows,
    }
    if not json_only:
        _print_table(rows)
        tried = "" if result["limit_found"] else " of those tried"
        print(f"\nfastest: {result['fastest']:,}; largest that fits{tried}: {result['largest']:,}")
    if settings.json_file is not None:
        output_json(settings.json_file, result)


def _sizes(first: int, last: int | None) -> Any:
    doubled = (first * 2**n for n in itertools.count())
    return itertools.takewhile(lambda number: last is None or number <= last, doubled)


def measure_size(
    command: str,
    config: Mapping[str, Any],
    micro_batch_size: int,
    rows: Sequence[Row],
    memory: int | None,
) -> Row:
    """Return the metrics of one micro-batch size, or a row that says why it does not fit.

    `rows` are those of the smaller sizes. `memory` limits the process in bytes; without it, the free
    memory does, and a size that is expected to need more is not started.
    """
    free = machine.memory()[1]
    why: str | None = None
    if memory is None and len(rows) >= 2 and (needed := expected_memory(rows)) > free:
        why = f"not tried, because it would need about {size(needed)} of {size(free)}"
    else:
        batch = {**config["global_batch"], "micro_batch_size": micro_batch_size}
        limit = free if memory is None else memory
        code, errors, metrics = _run_process(command, {**config, "global_batch": batch}, limit)
        if metrics is not None:
            return {"fits": True, **metrics}
        why = out_of_memory(code, errors, limit)
        if why is None:
            last = "\n".join(errors.strip().splitlines()[-LAST_LINES:])
            where = f"micro-batch {micro_batch_size}"
            raise DeviceError(where, f"the process ended with {code}:\n{last}")
    return {"micro_batch_size": micro_batch_size, "fits": False, "why": why}


def expected_memory(rows: Sequence[Row]) -> int:
    """Return the memory of the next size: the growth doubles with the micro-batch."""
    previous, last = (int(row["host_peak_memory_bytes"]) for row in rows[-2:])
    return last + 2 * max(0, last - previous)


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
        config_file, output = Path(folder, "config.json"), Path(folder, "metrics.json")
        config_file.write_text(json.dumps(config), encoding="utf-8")
        words = [sys.executable, "-m", "bert_cli", "bench", command, "--config", str(config_file)]
        words += ["--no-checkpoint", "--json", str(output)]
        done = subprocess.run(
            words,
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


def out_of_memory(code: int, errors: str, limit: int) -> str | None:
    """Return why a failed process did not fit the memory; None if it failed for another reason."""
    if code == -signal.SIGKILL:
        return "killed, as the kernel does when memory is short"
    if OUT_OF_MEMORY.search(errors):
        return f"memory was refused (limit: {size(limit)} of the host's memory)"
    return None


def _line(row: Row) -> str:
    if not row["fits"]:
        return f"micro-batch {row['micro_batch_size']:,}: does not fit: {row['why']}"
    return (
        f"micro-batch {row['micro_batch_size']:,}: {row['examples_per_second']:,.1f} examples/s, "
        f"{size(row['peak_memory_bytes'])}"
    )


def _print_table(rows: Sequence[Row]) -> None:
    shown = []
    for row in rows:
        cells = ["", "", "", "", "", "", f"does not fit: {row.get('why')}"]
        if row["fits"]:
            cells = [
                f"{row['examples_per_second']:,.1f}",
                f"{row['tokens_per_second']:,.0f}",
                format_seconds(row["step_seconds"]["median"]),
                format_flops(row["flops_per_second"]),
                f"{row['flops_utilisation']:.1%}",
                size(row["peak_memory_bytes"]),
                "",
            ]
        shown.append((f"{row['micro_batch_size']:,}", *cells))
    names = ("micro-batch", "examples/s", "tokens/s", "step", "FLOP/s", "utilisation", "memory", "")
    print()
    print_table(names, shown, right=range(7))
