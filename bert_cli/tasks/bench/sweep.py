"""A sweep: the same measurement with one micro-batch after the other, each twice the one before.

Each is a process of its own, so that memory is really asked for and really refused: by the limit that
the process is started with, by the device, or by the kernel, to which it offers itself first. What
would need more than is free, by the growth so far, is not started. No TensorFlow here: on a GPU its
memory would be missing in the processes that are measured.
"""

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_cli.config.bench import BenchPretrainSettings, BenchSquadSettings, Measuring
from bert_cli.config.layout import size
from bert_cli.config.settings import parse_bytes
from bert_cli.errors import ConfigError, DeviceError
from bert_cli.files import is_stdout, output_json, read_json
from bert_cli.parallel.cluster import find_processes
from bert_cli.tasks.bench import table
from bert_cli.tasks.look import machine

Figures = dict[str, Any]
# What a process says, or how it ends, when memory was refused.
OUT_OF_MEMORY = re.compile(
    r"does not fit the device's memory|bad_alloc|MemoryError|Cannot allocate memory|out of memory"
    r"|could not create a memory|RESOURCE_EXHAUSTED|OOM when allocating|pthread_create\(\) failed"
    r"|failed to map segment|can't start new thread",
    re.IGNORECASE,
)
KILLED = {signal.SIGKILL: "killed, as the kernel does when memory is short"}
LAST_LINES = 5


def run(settings: BenchPretrainSettings | BenchSquadSettings) -> None:
    """Print a row for each micro-batch, and which is the fastest and which the largest that fits.

    Raises DeviceError where not even the first fits, and for a process that fails by something else.
    """
    if find_processes(settings.cluster, os.environ).count > 1:
        raise ConfigError(
            "sweep (micro-batch): starts processes of its own; run it without `bert launch`"
        )
    alone = is_stdout(settings.json_file)
    rows: list[Figures] = []
    for number in _doubling(settings.sweep_from, settings.most):
        row = _unless_too_large(number, rows, settings) or _measured(settings, number)
        rows.append(row)
        print(_line(row), file=sys.stderr if alone else sys.stdout, flush=True)
        if not row["fits"]:
            break
    fitting = [row for row in rows if row["fits"]]
    if not fitting:
        raise DeviceError(
            f"global_batch.micro_batch_size ({settings.sweep_from}): {rows[0]['why']}; start with a lower --from, set "
            "--parallel.recompute, or ask `bert plan` for a layout"
        )
    fastest = max(fitting, key=lambda row: float(row["examples_per_second"]))
    found = {
        "what": settings.WHAT,
        "sweep": "micro-batch",
        "fastest": fastest["micro_batch_size"],
        "largest": fitting[-1]["micro_batch_size"],
        "limit_found": not rows[-1]["fits"],
        "rows": rows,
    }
    if not alone:
        print()
        table.show_sweep(rows)
        least = "" if found["limit_found"] else " of those tried"
        print(f"\nfastest: {found['fastest']:,}; largest that fits{least}: {found['largest']:,}")
    if settings.json_file is not None:
        output_json(settings.json_file, found)


def _doubling(first: int, most: int | None) -> Any:
    number = first
    while most is None or number <= most:
        yield number
        number *= 2


def _line(row: Figures) -> str:
    if not row["fits"]:
        return f"micro-batch {row['micro_batch_size']:,}: does not fit: {row['why']}"
    return (
        f"micro-batch {row['micro_batch_size']:,}: {row['examples_per_second']:,.1f} examples/s, "
        f"{size(row['peak_memory_bytes'])}"
    )


def _limit(settings: Measuring) -> int:
    """Bytes that a process may fill."""
    return parse_bytes(settings.memory) if settings.memory is not None else machine.memory()[1]


def _unless_too_large(number: int, rows: Sequence[Figures], settings: Measuring) -> Figures | None:
    """A row that says so, where the growth so far says that the host's memory cannot hold it."""
    if settings.memory is not None or len(rows) < 2:
        return None
    needs, free = expected(rows), machine.memory()[1]
    if needs <= free:
        return None
    return refused(number, f"not tried, since it would need about {size(needs)} of {size(free)}")


def expected(rows: Sequence[Mapping[str, Any]]) -> int:
    """Memory of the next process: what grows with the micro-batch grows by twice as much again."""
    before, last = (int(row["host_peak_memory_bytes"]) for row in rows[-2:])
    return last + 2 * max(0, last - before)


def refused(number: int, why: str) -> Figures:
    """The row of a micro-batch that does not fit."""
    return {"micro_batch_size": number, "fits": False, "why": why}


def _measured(settings: Measuring, number: int) -> Figures:
    """The figures of a process of its own, or that it does not fit."""
    with tempfile.TemporaryDirectory(prefix="bench_") as home:
        config, figures = Path(home, "config.json"), Path(home, "figures.json")
        config.write_text(json.dumps(_as_config(settings, number)), encoding="utf-8")
        words = [sys.executable, "-m", "bert_cli", "bench", settings.WHAT, "--config", str(config)]
        words += ["--no-checkpoint", "--json", str(figures)]
        # Safe: this process has no threads.
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            preexec_fn=_limiting(_limit(settings)),
        )
        try:
            _, said = process.communicate()
        except BaseException:
            process.kill()
            process.wait()
            raise
        if process.returncode == 0:
            measured = read_json(figures, Figures, DeviceError, "run the same command again")
            return {"fits": True, **measured}
    why = why_not(process.returncode, said, _limit(settings))
    if why is None:
        last = "\n".join(said.strip().splitlines()[-LAST_LINES:])
        raise DeviceError(
            f"micro-batch {number}: the process ended with {process.returncode}:\n{last}"
        )
    return refused(number, why)


def _as_config(settings: Measuring, number: int) -> dict[str, Any]:
    """The settings of the process: all but those of the sweep."""
    left_out = {"sweep", "sweep_from", "most", "memory", "json_file", "checkpoint"}
    told = settings.model_dump(mode="json", exclude=left_out, exclude_unset=True)
    told["generated_dataset"] = settings.generated_dataset
    return {**told, "global_batch": {**told["global_batch"], "micro_batch_size": number}}


def why_not(code: int, said: str, limit: int) -> str | None:
    """Why a process that failed did not fit the memory; None where it failed by something else."""
    found = OUT_OF_MEMORY.search(said)
    if code == -signal.SIGKILL:
        return KILLED[signal.SIGKILL]
    if found:
        return f"memory was refused ({size(limit)} of the host's at most)"
    return None


def _limiting(limit: int) -> Callable[[], None]:
    """What ties a process to a limit of memory, and offers it to the kernel before all others."""

    def tie() -> None:
        # What it fills, not what it reserves: TensorFlow and CUDA reserve far more than they fill.
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")

    return tie
