"""Runs, read from their folders without TensorFlow."""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from bert_cli.errors import DataError
from bert_cli.files import STATE, JSONObject, check_format, is_locked, read_json, report_failure
from bert_cli.parse.load import leaves
from bert_cli.statistics import Score
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
from bert_cli.train.metrics import HELD_OUT, read_line
from bert_cli.train.scores import INTERVALS

Metrics = dict[str, float | None]
AGAIN = "copy it again, or move it away"


class _Rate(BaseModel):
    warmup_frac: float


class _Optimizer(BaseModel):
    learning_rate: _Rate


class _Groups(BaseModel):
    """The groups of settings that are read here and by `health`."""

    global_batch: JSONObject | None = None
    masking: JSONObject | None = None
    optimizer_opts: _Optimizer | None = None


@dataclass(frozen=True)
class Run:
    """A run's folder. Everything is read once, when it is first used."""

    folder: Path

    @cached_property
    def settings(self) -> JSONObject:
        """Return settings.json, empty if there is none. Raises ConfigError for one of another format."""
        path = self.folder / SETTINGS
        settings = _read_object(path)
        if settings:
            check_format(str(path), settings.pop("format", None))
            read_json(path, _Groups, DataError, AGAIN)
        return settings

    @cached_property
    def flat_settings(self) -> JSONObject:
        """Return every setting by its dotted name."""
        return dict(leaves(self.settings))

    @property
    def kind(self) -> str:
        """Return the command, with the task if it has several: `pretrain`, `glue mrpc`."""
        command = str(self.settings.get("command", "?"))
        if command == "glue":
            return f"glue {self.settings.get('glue_task') or ''}".rstrip()
        if command == "squad" and self.settings.get("version_2"):
            return "squad 2.0"
        return command

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
            grows = self.flat_settings.get("global_batch.start_fraction")
            if left is not None and seconds and not grows:
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
        if (self.total_steps is not None and saved >= self.total_steps) or self._ended_early:
            return "done"
        if saved >= self.step:
            return "stopped"
        return "killed"

    @property
    def _ended_early(self) -> bool:
        """Return whether as many evaluations as `early_stop` followed the best one."""
        evaluations = self.settings.get("early_stop")
        best = _read_object(self.folder / BEST)
        if not isinstance(evaluations, int) or not isinstance(best.get("step"), int):
            return False
        # Steps without an evaluation have no held-out metric and do not count.
        later = (metrics for step, metrics in self.steps.items() if step > best["step"])
        return sum(f"{HELD_OUT}{best.get('metric')}" in metrics for metrics in later) >= evaluations

    @property
    def written(self) -> float:
        """Return when a file was last written, in seconds since 1970."""
        paths = [self.folder / name for name in (METRICS, SETTINGS, SCORES, BEST)]
        paths += [self.folder / checkpoint_name(step) for step in self.checkpoints[-1:]]
        return max((path.stat().st_mtime for path in paths if path.exists()), default=0.0)

    @cached_property
    def scores(self) -> dict[str, float]:
        """Return the held-out scores of scores.json, else the best score of best.json."""
        best = _read_object(self.folder / BEST)
        name = str(best.get("metric", "score"))
        for rows in (_read_object(self.folder / SCORES), {name: best.get("value")}):
            values = {name: _finite(value) for name, value in rows.items()}
            scores = {name: value for name, value in values.items() if value is not None}
            if scores:
                return scores
        return {}

    @cached_property
    def intervals(self) -> dict[str, Score]:
        """Return the scores with their intervals."""
        stored = _read_object(self.folder / SCORES).get(INTERVALS, {})
        scores = self.scores
        return {name: Score.of(scores[name], stored[name]) for name in stored if name in scores}


def held_out(metrics: Metrics) -> dict[str, float]:
    """Return the finite held-out metrics of a step, by their names without the prefix."""
    names = {name: name.removeprefix(HELD_OUT) for name in metrics if name.startswith(HELD_OUT)}
    return {names[n]: value for n, value in metrics.items() if n in names and value is not None}


def runs_below(folder: Path) -> Iterator[Run]:
    """Yield the runs in a folder and below it by their names, without hidden folders and links."""
    for path, folders, _ in os.walk(folder):  # skips what is not readable, or removed meanwhile
        folders[:] = sorted(n for n in folders if n[0] != "." and not CHECKPOINT.fullmatch(n))
        if is_run(Path(path)):
            yield Run(Path(path))


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run's: it has metrics, or settings and a lock."""
    has_settings = (folder / SETTINGS).is_file() and (folder / LOCK).is_file()
    return has_settings or (folder / METRICS).is_file()


def open_runs(folders: Sequence[Path], where: str) -> list[Run]:
    """Return each run of folders once; for a folder that is not a run (several seeds), all runs below it.

    Raises DataError for a folder that is absent or has no run.
    """
    runs: dict[Path, Run] = {}
    for folder in folders:
        if is_run(folder):
            below = [Run(folder)]
        else:
            below = list(runs_below(folder))
        if not below:
            problem = "no such folder"
            if folder.is_dir():
                problem = f"contains no run with {METRICS}"
            raise DataError(
                f"{where} ({folder})",
                problem,
                "use the --save-ckpt-path of a run, which `bert runs` lists",
            )
        for run in below:
            runs.setdefault(run.folder.resolve(), run)
    return list(runs.values())


def _lines(path: Path, tail: int | None = None) -> Iterator[tuple[int, Metrics]]:
    """Yield step and metrics of each line; with `tail`, only of the last `tail` bytes, the last line first."""
    absent = suppress(FileNotFoundError, NotADirectoryError)
    with (
        report_failure(str(path), "read", "check its permissions"),
        absent,
        open(path, "rb") as file,
    ):
        if tail is not None and os.fstat(file.fileno()).st_size > tail:
            file.seek(-tail, os.SEEK_END)
            file.readline()
        # From the end: who asks for a tail needs its newest lines.
        lines: Iterable[bytes] = file
        if tail is not None:
            lines = reversed(file.readlines())
        for line in lines:
            row = read_line(line)
            if row:
                yield row[0], {name: _finite(value) for name, value in row[1].items()}


def _finite(value: Any) -> float | None:
    # In Python True is an integer.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and abs(value) <= sys.float_info.max:
        return float(value)
    return None


def _read_object(path: Path) -> JSONObject:
    """Return a JSON object, empty if the file is absent."""
    if not path.is_file():
        return {}
    return read_json(path, JSONObject, DataError, AGAIN)
