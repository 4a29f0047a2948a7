"""Compare programs by running them alternately, each in its own process on a fixed set of cores.

The speed of a machine drifts over minutes, so the programs run in the order A B A B. The results are medians over all
rounds: of wall-clock time, and of processor time, which other programs on the machine disturb less. A program is a
command whose last line of output is JSON.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Pairs = list[tuple[float, float]]
"""Wall-clock and processor time of each repetition."""


def first_cores(number: int) -> str:
    """Return the first cores that this process may use, in the format of `taskset --cpu-list`."""
    return ",".join(map(str, sorted(os.sched_getaffinity(0))[:number]))


def in_a_process(command: Sequence[str], cores: str) -> Any:
    """Run a command on these cores and return the JSON of its last line; exit if it fails."""
    process = subprocess.run(
        ["taskset", "--cpu-list", cores, *command],
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        sys.exit(f"{' '.join(command)}: {process.stderr}")
    return json.loads(process.stdout.strip().splitlines()[-1])


def run_alternately(
    sides: Mapping[str, Callable[[], Pairs]], rounds: int, describe: Callable[[float, float], str]
) -> dict[str, tuple[float, float]]:
    """Return the medians of each side over all rounds; print the current medians after each round."""
    times: dict[str, Pairs] = {side: [] for side in sides}
    for number, (side, measure) in itertools.product(range(rounds), sides.items()):
        times[side] += measure()
        print(f"round {number + 1}, {side}: {describe(*_medians(times[side]))}", flush=True)
    return {side: _medians(pairs) for side, pairs in times.items()}


def _medians(pairs: Pairs) -> tuple[float, float]:
    clock, processor = zip(*pairs, strict=True)
    return statistics.median(clock), statistics.median(processor)
