"""The baselines of a run: computed once, kept in its folder, printed, and compared with the model."""

import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from bert_cli.files import atomic_folder
from bert_cli.processes import print_line
from bert_cli.statistics import describe, difference
from bert_cli.tasks.run.task import Result, Task
from bert_cli.train import card, scores


def kept(task: Task, folder: Path, trained_on: str) -> dict[str, Result]:
    """Return the baselines of a task, which the run's folder keeps; `trained_on` and the task name the examples."""
    parts = [trained_on, task.held_out, *(part.fingerprint for part in task.development.values())]
    place = folder / f"baselines_{zlib.crc32(' '.join(parts).encode()):08x}"
    if not place.is_dir():
        assert task.baselines is not None
        computed = task.baselines()
        with atomic_folder(place, 0) as partial:
            for name, result in computed.items():
                (partial / name).mkdir()
                scores.write(partial / name, result.samples, result.intervals)
    return {path.name: Result(scores.read_samples(path)) for path in sorted(place.iterdir())}


def compare(
    models: Sequence[Result], baselines: Mapping[str, Result], best: str, saved: Sequence[Path] = ()
) -> str:
    """Print baselines, and write them into the cards of the `saved` checkpoints.

    Return a warning if the mean of the models does not beat the best of them by a score, otherwise "".
    """
    for name, result in baselines.items():
        print_line(f"baseline, {name}: {describe(result.intervals)}")
    sign = -1 if best.endswith("loss") else 1
    scored = [name for name in baselines if best in baselines[name].samples]
    ranked = sorted(scored, key=lambda name: sign * baselines[name].intervals[best].value)
    if not ranked:
        return ""
    sides = [[each.samples[best] for each in side] for side in (models, [baselines[ranked[-1]]])]
    first, second = sides[::sign]
    gain = difference(first, second)
    if math.isnan(gain.low):
        print_line("the model and the baselines cannot be compared: all examples are one group")
        return ""
    beats = "beats" if gain.low > 0 else "does not beat"
    model = f"the mean of {len(models)} seeds" if len(models) > 1 else "the model"
    verdict = f"{model} {beats} the baseline '{ranked[-1]}': its gain in {best} is {gain:.4f}"
    rows = {name: f"{best} {baselines[name].intervals[best]:.4f}" for name in ranked}
    for path in saved:
        card.add_section(path, f"{card.table(card.BASELINES, rows)}\n\nResult: {verdict}.\n")
    if gain.low > 0:
        print_line(verdict)
        return ""
    return f"warning: {verdict}"
