"""`bert bench squad`: how fast this machine does fine-tuning on questions, and where its time goes.

Its windows are those of `bench_jobs`, made up or read; how a measurement begins is said in `bench`.
"""

from bert_cli.config.bench import BenchSquadSettings
from bert_cli.tasks.bench.run import measure


def run(settings: BenchSquadSettings) -> None:
    """Measure; see `measure` for what it raises."""
    measure(settings)
