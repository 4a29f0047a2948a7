"""`bert bench squad`: how fast this machine does fine-tuning on questions, and where its time goes.

Nothing heavy is imported before the clock has noted what it took to come here: the imports are a part
of the start, and a sweep, whose processes measure, needs none of them.
"""

from bert_cli.config.bench import BenchSquadSettings
from bert_cli.config.quiet import lightly, quietly
from bert_cli.tasks import sweep
from bert_cli.tasks.timing import Stopwatch, seconds_since_start


def run(settings: BenchSquadSettings) -> None:
    """Measure; raises what `bert squad` itself would raise before its first step."""
    if settings.sweep is not None:
        sweep.run(settings, "squad")
        return
    start = Stopwatch()
    start.add("python_and_settings", seconds_since_start())
    with start.part("imports"), quietly(), lightly():
        from bert_cli.tasks import bench_jobs, measurement
    measurement.run(settings, "squad", bench_jobs.questions, start)
