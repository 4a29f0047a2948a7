"""Runs, read from their folders without TensorFlow, and the numbers that summarize them.

The loss of a single step is noisy, so last and best values are means over a window of steps. Values
that are not finite are left out of means and counted.
"""

import json
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bert_cli.config.load import leaves
from bert_cli.errors import DataError, printable
from bert_cli.files import STATE, JSONObject, is_locked, read_json
from bert_cli.text import format_duration
from bert_cli.train.card import command_of
from bert_cli.train.checkpoint import (
    BEST,
    CHECKPOINT,
    LOCK,
    METRICS,
    SCORES,
    SETTINGS,
    checkpoint_name,
    complete_checkpoints,
    step_of,
)
from bert_cli.train.metrics import BITS_PER_BYTE, HELD_OUT, read_line

Metrics = dict[str, float | None]
Array = npt.NDArray[np.float64]
LOSS = "loss"
ACCURACY = "accuracy"
# Settings that name or describe a run: they always differ and are not compared.
NAMES_ONLY = ("save_ckpt_path", "about")
ABSENT = "not set"


@dataclass(frozen=True)
class Run:
    """A run's folder. Everything is read once, when it is first used."""

    folder: Path

    @cached_property
    def settings(self) -> JSONObject:
        """Return settings.json, empty if there is none."""
        return _read_object(self.folder / SETTINGS)

    @cached_property
    def flat_settings(self) -> JSONObject:
        """Return every setting by its dotted name."""
        return dict(leaves(self.settings))

    @property
    def kind(self) -> str:
        """Return the command, with the task if it has several: `pretrain`, `glue mrpc`."""
        command = command_of(self.settings)
        if command == "glue":
            return f"glue {self.settings['glue_task'] or ''}".rstrip()
        return "squad 2.0" if command == "squad" and self.settings.get("version_2") else command

    @cached_property
    def steps(self) -> dict[int, Metrics]:
        """Return step -> its metrics, in order; a value that is not finite is None."""
        steps: dict[int, Metrics] = {}
        for step, metrics in _lines(self.folder / METRICS):
            # A run that started again repeats steps.
            while steps and next(reversed(steps)) >= step:
                steps.popitem()
            steps[step] = metrics
        return steps

    @cached_property
    def last(self) -> tuple[int, Metrics]:
        """Return the last step and its metrics from the end of metrics.jsonl, (0, {}) if there is none."""
        return next(_lines(self.folder / METRICS, 64 * 1024), (0, {}))

    def tail(self, steps: int) -> list[tuple[int, Metrics]]:
        """Return so many steps at the end of metrics.jsonl and their metrics, fewer if the last 4 MB have fewer."""
        return [*islice(_lines(self.folder / METRICS, 4 * 1024 * 1024), steps)][::-1]

    @property
    def step(self) -> int:
        """Return the last step in metrics.jsonl."""
        return self.last[0]

    @cached_property
    def last_evaluated(self) -> Metrics:
        """Return the metrics of the last evaluated step within the last 4 MB, some ten thousand steps."""
        rows = (metrics for _, metrics in _lines(self.folder / METRICS, 4 * 1024 * 1024))
        return next((row for row in rows if any(name.startswith(HELD_OUT) for name in row)), {})

    @cached_property
    def checkpoints(self) -> list[int]:
        """Return the steps of the complete checkpoints."""
        return [step_of(path) for path in complete_checkpoints(self.folder)]

    @cached_property
    def total_steps(self) -> int | None:
        """Return the planned number of steps from a checkpoint, else from the first step; None if unknown."""
        for step in reversed(self.checkpoints):
            fixed = _read_object(self.folder / checkpoint_name(step) / STATE).get("fixed")
            if isinstance(fixed, Mapping) and isinstance(fixed.get("total_steps"), int):
                return int(fixed["total_steps"])
        for step, metrics in _lines(self.folder / METRICS):
            # The first line assumes the duration of its step for all other steps.
            left = metrics.get("seconds_left")
            seconds = metrics.get("seconds_per_step")
            grows = (self.settings.get("global_batch") or {}).get("start_fraction")
            if left is not None and seconds and not grows and not self.settings.get("stages"):
                return step + round(left / seconds)
        return None

    @property
    def state(self) -> str:
        """Return `running`, `done`, `stopped`, `killed` (with steps after its last checkpoint) or `empty`."""
        if is_locked(self.folder / LOCK):
            return "running"
        saved = self.checkpoints[-1] if self.checkpoints else 0
        if not self.step and not saved:
            return "empty"
        if self.total_steps is not None and saved >= self.total_steps:
            return "done"
        return "stopped" if saved >= self.step else "killed"

    @property
    def written(self) -> float:
        """Return when a file was last written, in seconds since 1970."""
        paths = [self.folder / name for name in (METRICS, SETTINGS, SCORES, BEST)]
        paths += [self.folder / checkpoint_name(step) for step in self.checkpoints[-1:]]
        return max((path.stat().st_mtime for path in paths if path.exists()), default=0.0)

    @cached_property
    def scores(self) -> dict[str, float]:
        """Return the held-out scores of scores.json, else the best score of best.json."""
        scores = {name: _finite(v) for name, v in _read_object(self.folder / SCORES).items()}
        if not any(value is not None for value in scores.values()):
            best = _read_object(self.folder / BEST)
            name = best.get("metric", best.get("figure", "score"))  # "figure" in older runs
            scores = {str(name): _finite(best.get("value"))}
        return {name: value for name, value in scores.items() if value is not None}


def runs_below(folder: Path) -> Iterator[Run]:
    """Yield the runs in a folder and below it by their names, without hidden folders and links."""
    if is_run(folder):
        yield Run(folder)
    paths: list[Path] = []
    with suppress(OSError):  # not readable, or removed meanwhile
        paths = sorted(folder.iterdir())
    for path in paths:
        is_hidden = path.name.startswith(".") or CHECKPOINT.fullmatch(path.name)
        if not is_hidden and path.is_dir() and not path.is_symlink():
            yield from runs_below(path)


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run's: it has metrics, or settings and a lock."""
    has_settings = (folder / SETTINGS).is_file() and (folder / LOCK).is_file()
    return has_settings or (folder / METRICS).is_file()


def open_runs(folders: Sequence[Path], where: str) -> list[Run]:
    """Return the runs of folders; for a folder that is not a run (several seeds), all runs below it.

    Raises DataError for a folder that is absent or has no run, and for a run that is given twice.
    """
    runs: dict[Path, Run] = {}
    for folder in folders:
        below = [Run(folder)] if is_run(folder) else list(runs_below(folder))
        if not below:
            problem = f"nothing below it has {METRICS}" if folder.is_dir() else "no such folder"
            remedy = "give the --save-ckpt-path of a run, which `bert runs` lists"
            raise DataError(f"{where} ({folder})", problem, remedy)
        for run in below:
            if runs.setdefault(run.folder.resolve(), run) is not run:
                raise DataError(f"{where} ({run.folder})", "is given twice", "give each run once")
    return list(runs.values())


def names_of(runs: Sequence[Run]) -> list[str]:
    """Return the shortest ends of the runs' paths that are all different, with the same number of parts."""
    parts = [run.folder.resolve().parts[1:] for run in runs]
    for number in range(1, max(map(len, parts), default=0) + 1):
        names = [printable("/".join(path[-number:])) for path in parts]
        # The folder of a seed says nothing without its parent.
        if len(set(names)) == len(names) and not all(name.startswith("seed_") for name in names):
            return names
    return [printable(str(run.folder)) for run in runs]


def _lines(path: Path, tail: int | None = None) -> Iterator[tuple[int, Metrics]]:
    """Yield step and metrics of each line; with `tail`, only of the last `tail` bytes, the last line first."""
    try:
        with open(path, "rb") as file:
            if tail is not None and os.fstat(file.fileno()).st_size > tail:
                file.seek(-tail, os.SEEK_END)
                file.readline()
            for line in file if tail is None else reversed(file.readlines()):
                if row := read_line(line, path):
                    yield row[0], {name: _finite(value) for name, value in row[1].items()}
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise DataError(str(path), f"cannot be read ({error.strerror})", "fix that") from error


def _finite(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= sys.float_info.max else None


def _read_object(path: Path) -> JSONObject:
    """Return a JSON object, empty if the file is absent."""
    if not path.is_file():
        return {}
    return read_json(path, JSONObject, DataError, "fix it or remove it")


# --- summaries


def series(run: Run, name: str) -> tuple[Array, Array]:
    """Return the steps that have a metric, and its values; NaN where it was not finite."""
    values = {step: metrics[name] for step, metrics in run.steps.items() if name in metrics}
    # None becomes NaN.
    return np.array([*values], np.float64), np.array([*values.values()], np.float64)


def smoothed(values: Array, window: int) -> Array:
    """Return the mean of each value and the `window - 1` values before it; values that are not finite are left out."""
    is_finite = np.isfinite(values)
    sums = np.cumsum(np.where(is_finite, values, 0.0))
    counts = np.cumsum(is_finite)
    for totals in (sums, counts):
        totals[window:] -= totals[:-window].copy()
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def window_for(runs: Sequence[Run], window: int | None) -> int:
    """Return `window`, or by default 1, 2 or 5 times a power of ten, a fortieth of the longest run."""
    if window is not None:
        return window
    limit = max((len(run.steps) for run in runs), default=0) / 40
    return max((n * 10**e for e in range(9) for n in (1, 2, 5) if n * 10**e <= limit), default=1)


def metric_names(runs: Sequence[Run], ending: str = "", *, held_out: bool = False) -> list[str]:
    """Return the metrics of runs whose names have this ending, in their order: held-out metrics or the others."""
    rows = (metrics for run in runs for metrics in run.steps.values())
    names = dict.fromkeys(name for metrics in rows for name in metrics)
    names_of_kind = [name for name in names if name.startswith(HELD_OUT) == held_out]
    return [n for n in names_of_kind if ending in ("", n) or n.endswith(f"_{ending}")]


def summary_of(run: Run, window: int) -> dict[str, float]:
    """Return a run's last and best losses and accuracies over `window` steps, its scores and its speed, by name."""
    losses = metric_names([run], LOSS)
    rows = run.steps.values()
    speeds = ("examples_per_second", "tokens_per_second")
    names = ("gradient_norm", "seconds_per_step", "skipped", *speeds)
    values = {name: series(run, name)[1] for name in names}
    summary: dict[str, float] = {"steps": run.step}
    if run.total_steps is not None:
        summary["of steps"] = run.total_steps
    for name in (*losses, *metric_names([run], ACCURACY)):
        summary |= _last_and_best(run, name, name, window)
    for name in metric_names([run], held_out=True):
        summary |= _last_and_best(run, name, f"held-out {name.removeprefix(HELD_OUT)}", None)
    summary |= {f"score {name.replace('_', ' ')}": value for name, value in run.scores.items()}
    for name in speeds:
        if np.isfinite(values[name]).any():
            summary[f"{name.replace('_', ' ')}, median"] = np.nanmedian(values[name])
    gradient = smoothed(values["gradient_norm"], window)
    if np.isfinite(gradient).any():
        summary["gradient norm, last"] = gradient[np.isfinite(gradient)][-1]
    if len(values["seconds_per_step"]):
        summary["seconds in steps"] = np.nansum(values["seconds_per_step"])
    if np.nansum(values["skipped"]):
        summary["steps skipped"] = np.nanmax(values["skipped"])
    if count := sum(any(row.get(name, 0.0) is None for name in losses) for row in rows):
        summary["steps whose loss is not finite"] = count
    return {name: float(value) for name, value in summary.items()}


def _last_and_best(run: Run, name: str, label: str, window: int | None) -> dict[str, float]:
    steps, values = series(run, name)
    values = values if window is None else smoothed(values, window)
    if not np.isfinite(values).any():
        return {}
    is_low = name.endswith((LOSS, BITS_PER_BYTE))
    best = int(np.nanargmin(values) if is_low else np.nanargmax(values))
    label = label.replace("_", " ")
    return {
        f"{label}, last": values[np.isfinite(values)][-1],
        f"{label}, best": values[best],
        f"{label}, step of the best": steps[best],
    }


def spread(summaries: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, float | None]]:
    """Return mean and standard deviation of each metric that all summaries have; None for one summary."""
    spreads: dict[str, tuple[float, float | None]] = {}
    for name in summaries[0]:
        row = [summary[name] for summary in summaries if name in summary]
        if len(row) == len(summaries):
            spreads[name] = statistics.mean(row), statistics.stdev(row) if len(row) > 1 else None
    return spreads


def differing_settings(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return dotted name -> value in each run, or `ABSENT`, of the settings that are not the same in all."""
    names = dict.fromkeys(name for run in runs for name in run.flat_settings)
    values_by_name = {name: [run.flat_settings.get(name, ABSENT) for run in runs] for name in names}
    return {
        name: values
        for name, values in values_by_name.items()
        if name.partition(".")[0] not in NAMES_ONLY and any(value != values[0] for value in values)
    }


def window_in_words(window: int) -> str:
    """Return the description of a smoothed metric."""
    return f"means over {window:,} steps" if window > 1 else "those of single steps"


def label_of(name: str) -> str:
    """Return a metric's name before a value of `in_words`, which has its own unit."""
    return name.replace("seconds in", "time in")


def in_words(name: str, value: float | None) -> str:
    """Return a value of `summary_of` as text, "" for None."""
    if value is None:
        return ""
    if name.startswith("seconds"):
        return format_duration(value)
    if "step" in name:
        return f"{value:,.0f}"
    if "accuracy" in name:
        return f"{100 * value:.2f} %"
    return f"{value:,.1f}" if "per second" in name else f"{value:.4f}"


def value_in_words(value: Any) -> str:
    """Return a setting's value as in a config, and strings without quotes."""
    return value if isinstance(value, str) else json.dumps(value)
