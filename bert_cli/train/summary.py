"""Runs in a few numbers: figures over the steps, smoothed; last, best, speed; what differs in settings.

A single step's loss says little, so what is called last or best is a mean over a window of steps, and
whoever shows it says how many. Steps whose figure is not finite are left out of a mean and counted.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bert_cli.train.history import HELD_OUT, Run
from bert_cli.train.report import duration

Array = npt.NDArray[np.float64]
SHARE_OF_A_RUN = 40
LOSS, ACCURACY = "loss", "accuracy"
# What a run is called, and what it says about itself: they differ always and mean nothing.
NAMES_ONLY = ("save_ckpt_path", "about")
ABSENT = "not set"


def series(run: Run, name: str) -> tuple[Array, Array]:
    """The steps that have a figure, and the figure; NaN where it was not finite."""
    found = [(step, figures[name]) for step, figures in run.steps.items() if name in figures]
    steps = np.array([step for step, _ in found], np.float64)
    values = np.array([np.nan if value is None else value for _, value in found], np.float64)
    return steps, values


def smoothed(values: Array, window: int) -> Array:
    """The mean of each value and the `window - 1` before it, of those that are finite; NaN where none is.

    It looks back only, so that a point of the curve does not know what came after it.
    """
    there = np.isfinite(values)
    sums = np.cumsum(np.concatenate([[0.0], np.where(there, values, 0.0)]))
    counts = np.cumsum(np.concatenate([[0], there]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    number = counts[ends] - counts[starts]
    means = (sums[ends] - sums[starts]) / np.maximum(number, 1)
    return np.where(number > 0, means, np.nan)


def window_for(runs: Sequence[Run], asked: int | None) -> int:
    """The window that was asked for; else 1, 2 or 5 times a power of ten, a fortieth of the longest run."""
    if asked is not None:
        return asked
    room = max((len(run.steps) for run in runs), default=0) / SHARE_OF_A_RUN
    fitting = [n * 10**e for e in range(9) for n in (1, 2, 5) if n * 10**e <= room]
    return max(fitting, default=1)


def figure_names(runs: Sequence[Run], ending: str = "") -> list[str]:
    """The figures of some runs' steps whose names end so, held-out ones left out, in their order."""
    names = (name for run in runs for figures in run.steps.values() for name in figures)
    return [
        name
        for name in dict.fromkeys(names)
        if (name.endswith(f"_{ending}") or ending in ("", name)) and not name.startswith(HELD_OUT)
    ]


def held_out_names(runs: Sequence[Run]) -> list[str]:
    """The held-out figures of some runs, with the mark that they begin with, in their order."""
    names = (name for run in runs for figures in run.steps.values() for name in figures)
    return [name for name in dict.fromkeys(names) if name.startswith(HELD_OUT)]


def summary_of(run: Run, window: int) -> dict[str, float]:
    """A run's figures by name: the last and best of each loss and accuracy, held-out scores, speed, time.

    What is last or best is a mean over `window` steps. A figure that the run does not have is absent.
    """
    told: dict[str, float] = {"steps": float(run.step)}
    if run.total_steps is not None:
        told["of steps"] = float(run.total_steps)
    for ending in (LOSS, ACCURACY):
        for name in figure_names([run], ending):
            steps, values = series(run, name)
            means = smoothed(values, window)
            told |= _last_and_best(name.replace("_", " "), steps, means, ending == LOSS)
    for name in held_out_names([run]):
        steps, values = series(run, name)
        less_is_better = name.endswith(LOSS)
        what = f"held-out {name.removeprefix(HELD_OUT).replace('_', ' ')}"
        told |= _last_and_best(what, steps, values, less_is_better)
    for name, value in run.scores.items():
        told[f"score {name.replace('_', ' ')}"] = value
    for name in ("examples_per_second", "tokens_per_second"):
        values = series(run, name)[1]
        if np.isfinite(values).any():
            told[f"{name.replace('_', ' ')}, median"] = float(np.nanmedian(values))
    told |= _course(run, window)
    return told


def _last_and_best(
    what: str, steps: Array, values: Array, less_is_better: bool
) -> dict[str, float]:
    if not np.isfinite(values).any():
        return {}
    best = int(np.nanargmin(values) if less_is_better else np.nanargmax(values))
    last = values[np.isfinite(values)][-1]
    return {
        f"{what}, last": float(last),
        f"{what}, best": float(values[best]),
        f"{what}, step of the best": float(steps[best]),
    }


def _course(run: Run, window: int) -> dict[str, float]:
    """How the run went: its gradient, the time in its steps, what was skipped or not finite."""
    told: dict[str, float] = {}
    gradient = smoothed(series(run, "gradient_norm")[1], window)
    if np.isfinite(gradient).any():
        told["gradient norm, last"] = float(gradient[np.isfinite(gradient)][-1])
    seconds = series(run, "seconds_per_step")[1]
    if len(seconds):
        told["seconds in steps"] = float(np.nansum(seconds))
    skipped = series(run, "skipped")[1]
    if np.nansum(skipped):
        told["steps skipped"] = float(np.nanmax(skipped))
    losses = figure_names([run], LOSS)
    broken = sum(
        any(figures.get(name, 0.0) is None for name in losses) for figures in run.steps.values()
    )
    if broken:
        told["steps whose loss is not finite"] = float(broken)
    return told


def spread(summaries: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, float | None]]:
    """Mean and standard deviation of each figure that all have; of one alone the figure and None."""
    shared = [name for name in summaries[0] if all(name in other for other in summaries)]
    found: dict[str, tuple[float, float | None]] = {}
    for name in shared:
        values = [summary[name] for summary in summaries]
        deviation = statistics.stdev(values) if len(values) > 1 else None
        found[name] = statistics.mean(values), deviation
    return found


def differing_settings(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Dotted name of each setting that is not the same in all runs -> its value in each.

    `ABSENT` stands where a run does not have it: it was of another kind, or of an earlier version.
    """
    names = dict.fromkeys(name for run in runs for name in run.flat_settings)
    found = {name: [run.flat_settings.get(name, ABSENT) for run in runs] for name in names}
    return {
        name: values
        for name, values in found.items()
        if name.partition(".")[0] not in NAMES_ONLY and any(value != values[0] for value in values)
    }


def window_in_words(window: int) -> str:
    """Return what a metric that was smoothed over so many steps is."""
    return f"means over {window:,} steps" if window > 1 else "those of single steps"


def label_of(name: str) -> str:
    """A figure's name before a value `in_words`, which has units of its own."""
    return name.replace("seconds in", "time in")


def in_words(name: str, value: float | None) -> str:
    """A figure of `summary_of` as a person reads it; empty where there is none."""
    if value is None:
        return ""
    if name.startswith("seconds"):
        return duration(value)
    if "step" in name:
        return f"{value:,.0f}"
    if "accuracy" in name:
        return f"{100 * value:.2f} %"
    return f"{value:,.1f}" if "per second" in name else f"{value:.4f}"


def value_in_words(value: Any) -> str:
    """A setting's value as it stands in a config; text without its quotes."""
    return value if isinstance(value, str) else json.dumps(value)
