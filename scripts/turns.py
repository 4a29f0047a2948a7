"""The sides of a measurement take turns, each a process of its own on the cores that it is given.

The pace of a machine drifts over minutes, so what is compared runs A B A B, and what is told are
medians of all rounds so far: by the clock, and by the processor's own time, which others on the
machine disturb less. A side is a command whose last line is JSON, mostly the same script once more.
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
"""Figures by the clock and by the processor, of each repetition."""


def first_cores(number: int) -> str:
    """So many of the cores that this process may use, as `taskset --cpu-list` takes them."""
    return ",".join(map(str, sorted(os.sched_getaffinity(0))[:number]))


def in_a_process(words: Sequence[str], cores: str, **environment: str) -> Any:
    """What the last line of a command says, run on these cores; the script ends where the command fails."""
    told = subprocess.run(
        ["taskset", "--cpu-list", cores, *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    if told.returncode:
        sys.exit(f"{' '.join(words)}: {told.stderr}")
    return json.loads(told.stdout.strip().splitlines()[-1])


def in_turn(
    sides: Mapping[str, Callable[[], Pairs]], rounds: int, tell: Callable[[float, float], str]
) -> dict[str, tuple[float, float]]:
    """Medians of what each side found in all rounds, told after each of its turns."""
    taken: dict[str, Pairs] = {side: [] for side in sides}
    for number, (side, measure) in itertools.product(range(rounds), sides.items()):
        taken[side] += measure()
        print(f"round {number + 1}, {side}: {tell(*_medians(taken[side]))}", flush=True)
    return {side: _medians(pairs) for side, pairs in taken.items()}


def _medians(pairs: Pairs) -> tuple[float, float]:
    clock, processor = zip(*pairs, strict=True)
    return statistics.median(clock), statistics.median(processor)
