"""The settings of measurements.

`bench` before the command line of a run measures it: a measurement takes every setting of the run. The standard
benchmarks are shipped configs, `bench_...`, whose examples are synthetic.
"""

from pydantic import NonNegativeInt

from bert_cli.config.training import TrainSettings
from bert_cli.settings.numbers import Positive
from bert_cli.settings.settings import JsonSettings, Settings, Shared, Unless


class BenchSettings(Settings):
    """Measure how fast this machine trains, and how the time is spent.

    Write `bert bench` before the command line of a run. Results of the shipped configs `bench_...` can be compared
    between machines.
    Example: bert bench pretrain --config bench_tiny_128
    Example: bert bench squad --config bench_squad_base
    """


class BenchRunSettings(TrainSettings, JsonSettings, Shared):
    """Measure `bert {command}`: examples, FLOP/s, memory, and the parts of a step's time.

    Takes every setting of `bert {command}`, and saves nothing.
    Example: bert bench {command} {flags} --generated-dataset
    Example: bert bench {command} {flags} --steps 50 --json results.json
    """

    NEEDS = {"dry_run": Unless(lambda _: False, "on a measurement")}
    OPENS_FILES = False
    SAVES = False

    steps: Positive = 20
    """Number of measured steps."""
    warmup_steps: NonNegativeInt = 3
    """Number of steps before the measurement."""
