"""`bert bench --list`: the standard benchmarks, and how the measurement of a run begins.

A name behind `bert bench` is written out to its command line by the door, so all that is left here is
to tell which names there are. Nothing heavy is imported before the clock has noted what it took to
come here: the imports are a part of the start, and a sweep, whose processes measure, needs none.
"""

import shlex

from bert_cli.config.bench import (
    BenchPretrainSettings,
    BenchSettings,
    BenchSquadSettings,
    benchmarks,
)
from bert_cli.imports import quiet_imports
from bert_cli.tasks.bench import sweep
from bert_cli.tasks.bench.timing import Stopwatch, seconds_since_start
from bert_cli.terminal import print_table


def run(settings: BenchSettings) -> None:
    """Print each benchmark with what it is for and the command line that it stands for."""
    assert settings.listed
    rows = [
        (name, one.about, shlex.join(["bert", *one.words])) for name, one in benchmarks().items()
    ]
    print_table(("name", "what", "stands for"), rows)


def measure(settings: BenchPretrainSettings | BenchSquadSettings) -> None:
    """Measure a run, or sweep; raises what the run itself would raise before its first step."""
    if settings.sweep is not None:
        sweep.run(settings)
        return
    start = Stopwatch()
    start.add("python_and_settings", seconds_since_start())
    with start.part("imports"), quiet_imports():
        from bert_cli.tasks.bench import measurement
    measurement.run(settings, start)
