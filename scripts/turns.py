"""Compare two or more programs by running them alternately, each in its own process on given cores.

The speed of a machine drifts over minutes, so the programs run A B A B. The results are medians over all rounds:
of wall-clock time, and of processor time, which other programs on the machine disturb less. A program is a command
whose last line is JSON.
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


def in_a_process(words: Sequence[str], cores: str, **environment: str) -> Any:
    """Run a command on these cores and return the JSON of its last line; exit if it fails."""
    done = subprocess.run(
        ["taskset", "--cpu-list", cores, *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    if done.returncode:
        sys.exit(f"{' '.join(words)}: {done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def in_turn(
    sides: Mapping[str, Callable[[], Pairs]], rounds: int, describe: Callable[[float, float], str]
) -> dict[str, tuple[float, float]]:
    """Return the medians of each side over all rounds; print those so far after each round."""
    taken: dict[str, Pairs] = {side: [] for side in sides}
    for number, (side, measure) in itertools.product(range(rounds), sides.items()):
        taken[side] += measure()
        print(f"round {number + 1}, {side}: {describe(*_medians(taken[side]))}", flush=True)
    return {side: _medians(pairs) for side, pairs in taken.items()}


def _medians(pairs: Pairs) -> tuple[float, float]:
    clock, processor = zip(*pairs, strict=True)
    return statistics.median(clock), statistics.median(processor)
