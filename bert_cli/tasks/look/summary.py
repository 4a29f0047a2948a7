"""Runs in numbers and as text, for `bert plot` and `bert compare`.

The loss of a single step is noisy, so last and best values are means over a window of steps. Values that are not
finite are left out and counted.
"""

import json
import os
from collections.abc import Sequence

import numpy as np

from bert_cli.arrays import Floats64
from bert_cli.errors import printable
from bert_cli.files import JSONObject
from bert_cli.text import format_duration
from bert_cli.train.history import Run
from bert_cli.train.metrics import BITS_PER_BYTE, HELD_OUT

LOSS = "loss"
ACCURACY = "accuracy"
# Settings that name or describe a run: they always differ and are not compared.
# Two runs with equal settings otherwise would differ in their folder alone.
NAMES_ONLY = ("save_ckpt_path", "about")
ABSENT = "not set"


def series(run: Run, name: str) -> tuple[Floats64, Floats64]:
    """Return the steps that have a metric, and its values; NaN where it was not finite."""
    values = {step: metrics[name] for step, metrics in run.steps.items() if name in metrics}
    # None becomes NaN.
    return np.array([*values], np.float64), np.array([*values.values()], np.float64)


def smoothed(values: Floats64, window: int) -> Floats64:
    """Return the mean of each value and the `window - 1` values before it; values that are not finite are left out."""
    is_finite = np.isfinite(values)
    sums = np.cumsum(np.where(is_finite, values, 0.0))
    counts = np.cumsum(is_finite)
    for totals in (sums, counts):
        # From running sums to the sums of a window.
        totals[window:] -= totals[:-window].copy()
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def window_for(runs: Sequence[Run]) -> int:
    """Return the steps of a mean: 1, 2 or 5 times a power of ten, a fortieth of the longest run."""
    # A curve of forty windows is smooth and still shows its bends.
    limit = max((len(run.steps) for run in runs), default=0) / 40
    return max((n * 10**e for e in range(9) for n in (1, 2, 5) if n * 10**e <= limit), default=1)


def metric_names(runs: Sequence[Run], ending: str = "", *, held_out: bool = False) -> list[str]:
    """Return the metrics of runs whose names have this ending, in their order: held-out metrics or the others."""
    rows = (metrics for run in runs for metrics in run.steps.values())
    names = dict.fromkeys(name for metrics in rows for name in metrics)
    names_of_kind = [name for name in names if name.startswith(HELD_OUT) == held_out]
    return [n for n in names_of_kind if ending in ("", n) or n.endswith(f"_{ending}")]


def summary_of(run: Run, window: int) -> dict[str, str]:
    """Return a run's last and best metrics, losses and accuracies over `window` steps, its scores and its speed."""
    smooth = [*metric_names([run], LOSS), *metric_names([run], ACCURACY)]
    summary = {"steps": f"{run.step:,}"}
    if run.total_steps is not None:
        summary["of steps"] = f"{run.total_steps:,}"
    for name in (*smooth, *metric_names([run], held_out=True)):
        steps, values = series(run, name)
        end = "last"
        if name in smooth and window > 1:
            values = smoothed(values, window)
            end = f"mean of the last {window:,}"
        if not np.isfinite(values).any():
            continue
        best = np.nanargmax(values)
        if name.endswith((LOSS, BITS_PER_BYTE)):
            best = np.nanargmin(values)
        label = name.replace(HELD_OUT, "held-out ").replace("_", " ")
        summary[f"{label}, {end}"] = f"{values[np.isfinite(values)][-1]:.4f}"
        summary[f"{label}, best"] = f"{values[best]:.4f} in step {steps[best]:,.0f}"
    for name, score in run.scores.items():
        summary[f"score {name.replace('_', ' ')}"] = f"{score:.4f}"
    speeds = series(run, "examples_per_second")[1]
    if np.isfinite(speeds).any():
        summary["examples per second, median"] = f"{np.nanmedian(speeds):,.1f}"
    summary["time in steps"] = format_duration(np.nansum(series(run, "seconds_per_step")[1]))
    return summary


def differing_settings(settings: Sequence[JSONObject]) -> dict[str, list[object]]:
    """Return the settings that differ between flat settings: dotted name -> each value, or `ABSENT`."""
    names = dict.fromkeys(name for row in settings for name in row)
    values_by_name = {name: [row.get(name, ABSENT) for row in settings] for name in names}
    return {
        name: values
        for name, values in values_by_name.items()
        if name.partition(".")[0] not in NAMES_ONLY and any(value != values[0] for value in values)
    }


def window_in_words(window: int) -> str:
    """Return the description of a smoothed metric."""
    if window > 1:
        return f"means over {window:,} steps"
    return "values of single steps"


def value_in_words(value: object) -> str:
    """Return a setting's value as in a config, and strings without quotes."""
    if isinstance(value, str):
        return value
    return json.dumps(value)


def names_of(runs: Sequence[Run]) -> list[str]:
    """Return the paths of the runs below the last folder that holds all of them."""
    folders = [run.folder.resolve() for run in runs]
    top = os.path.commonpath([folder.parent for folder in folders])
    return [printable(str(folder.relative_to(top))) for folder in folders]
