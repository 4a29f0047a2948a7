"""`bert bench pretrain`: how fast this machine does pre-training, and where its time goes.

Its examples are those of `bench_jobs`, made up or read; how a measurement begins is said in `bench`.
"""

from bert_cli.config.bench import BenchPretrainSettings
from bert_cli.tasks.bench.run import measure


def run(settings: BenchPretrainSettings) -> None:
    """Measure; see `measure` for what it raises."""
    measure(settings)
