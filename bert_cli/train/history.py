"""What a run left in its folder, read without TensorFlow and without touching it.

settings.json says what the run is, metrics.jsonl how each step went, best.json and scores.json what held-out
examples said, step_* what can be continued; a lock that someone holds says that it is alive. A line of
metrics.jsonl that goes back to an earlier step is the run starting again from there: what the file told
beyond that step before has not happened.
"""

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from bert_cli.config.load import leaves
from bert_cli.errors import DataError
from bert_cli.files import is_locked, read_json
from bert_cli.train.report import METRICS, read_line

Figures = dict[str, float | None]
HELD_OUT = "validation_"
SETTINGS, SCORES, BEST, LOCK, STATE = (
    "settings.json", "scores.json", "best.json", "lock", "state.json",
)  # fmt: skip
CHECKPOINT = re.compile(r"step_\d{8,}")
TAIL = 64 * 1024
"""Bytes at the end of metrics.jsonl that hold the last steps."""
EVALUATED_TAIL = 4 * 1024 * 1024
"""Bytes at its end that hold one that was evaluated: some ten thousand steps."""
# A setting that only one kind of run has -> the command; the first that is there.
MARKS = {
    "max_predictions_per_seq": "pretrain",
    "glue_task": "glue",
    "max_query_length": "squad",
    "text_column": "classify",
    "num_epochs": "ner",
}


def name_of(step: int) -> str:
    """Return the name of the folder of a step's checkpoint."""
    return f"step_{step:08d}"


@dataclass(frozen=True)
class Run:
    """A run's folder. Everything is read when it is first asked for, and not again."""

    folder: Path

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What settings.json says; empty where there is none."""
        return _read_object(self.folder / SETTINGS)

    @cached_property
    def flat_settings(self) -> dict[str, Any]:
        """Every setting by its dotted name."""
        return dict(leaves(self.settings))

    @property
    def kind(self) -> str:
        """The command, with the task where it has several: `pretrain`, `glue mrpc`."""
        command = next((name for mark, name in MARKS.items() if mark in self.settings), "?")
        if command == "glue" and self.settings["glue_task"]:
            return f"glue {self.settings['glue_task']}"
        if command == "squad" and self.settings.get("version_2"):
            return "squad 2.0"
        return command

    @cached_property
    def steps(self) -> dict[int, Figures]:
        """Step -> its figures, all of them in order; what is not finite is None."""
        found: dict[int, Figures] = {}
        last = 0
        for line in _lines(self.folder / METRICS):
            step, figures = line
            if step <= last:
                found = {number: old for number, old in found.items() if number < step}
            found[step], last = figures, step
        return found

    @cached_property
    def last(self) -> tuple[int, Figures]:
        """The last step and its figures, from the end of metrics.jsonl alone; (0, {}) where there is none."""
        return next(_lines(self.folder / METRICS, TAIL), (0, {}))

    @cached_property
    def last_evaluated(self) -> Figures:
        """The figures of the last step that was evaluated, as far back as the end of metrics.jsonl tells."""
        path = self.folder / METRICS
        rows = (figures for _, figures in _lines(path, EVALUATED_TAIL))
        return next((row for row in rows if any(name.startswith(HELD_OUT) for name in row)), {})

    @cached_property
    def checkpoints(self) -> list[int]:
        """The steps of which there is a whole checkpoint."""
        there = (path for path in _entries(self.folder) if CHECKPOINT.fullmatch(path.name))
        return sorted(int(path.name[5:]) for path in there if (path / STATE).is_file())

    @cached_property
    def total_steps(self) -> int | None:
        """The steps that the run is to have, where one can know: from a checkpoint, else from its first line."""
        for step in reversed(self.checkpoints):
            told = _read_object(self.folder / name_of(step) / STATE).get("fixed")
            if isinstance(told, Mapping) and isinstance(told.get("total_steps"), int):
                return int(told["total_steps"])
        for step, figures in _lines(self.folder / METRICS):
            # On its first line a run takes that step for the pace of all that follow.
            left, pace = figures.get("seconds_left"), figures.get("seconds_per_step")
            return step + round(left / pace) if left is not None and pace else None
        return None

    @property
    def state(self) -> str:
        """`running`, `done`, `stopped`, `killed` or `empty`.

        Stopped is who saved where it ended; killed, by whatever, who had steps after its last checkpoint.
        """
        if is_locked(self.folder / LOCK):
            return "running"
        step = self.last[0]
        saved = self.checkpoints[-1] if self.checkpoints else 0
        if not step and not saved:
            return "empty"
        if self.total_steps is not None and saved >= self.total_steps:
            return "done"
        return "stopped" if saved >= step else "killed"

    @property
    def step(self) -> int:
        """Steps done, as far as metrics.jsonl tells."""
        return self.last[0]

    @property
    def written(self) -> float:
        """When something was last written, in seconds since 1970."""
        names = (METRICS, SETTINGS, SCORES, BEST)
        there = [self.folder / name for name in names]
        there += [self.folder / name_of(step) for step in self.checkpoints[-1:]]
        return max((path.stat().st_mtime for path in there if path.exists()), default=0.0)

    @cached_property
    def scores(self) -> dict[str, float]:
        """The held-out scores of the kept checkpoint: scores.json, else the best one of best.json."""
        told = _read_object(self.folder / SCORES)
        found = {name: float(value) for name, value in told.items() if _finite(value) is not None}
        if found:
            return found
        best = _read_object(self.folder / BEST)
        value = _finite(best.get("value"))
        return {} if value is None else {str(best.get("figure", "score")): value}


def runs_below(folder: Path) -> Iterator[Run]:
    """The runs in a folder and in those below it, by their names; a run's own checkpoints are passed over.

    Links and folders whose names begin with a dot are passed over too.
    """
    if is_run(folder):
        yield Run(folder)
    for path in _entries(folder):
        hidden = path.name.startswith(".") or CHECKPOINT.fullmatch(path.name)
        if not hidden and path.is_dir() and not path.is_symlink():
            yield from runs_below(path)


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's: it has figures, or settings and a lock."""
    has_settings = (folder / SETTINGS).is_file() and (folder / LOCK).is_file()
    return has_settings or (folder / METRICS).is_file()


def open_runs(folders: Sequence[Path], where: str) -> list[Run]:
    """The runs of folders that were asked for; one that holds runs, as those of several seeds, gives all.

    Raises DataError for a folder that is not there or holds none, and for a run that is given twice.
    """
    found: list[Run] = []
    for folder in folders:
        if not folder.is_dir():
            raise DataError(
                f"{where} ({folder}): is no folder; give a run's, which `bert runs` lists"
            )
        here = [Run(folder)] if is_run(folder) else list(runs_below(folder))
        if not here:
            raise DataError(
                f"{where} ({folder}): is no run's folder, it has no {METRICS}, nor has any below it; give the "
                "--save-ckpt-path of a run, which `bert runs` lists"
            )
        found += here
    places = [run.folder.resolve() for run in found]
    for run, place in zip(found, places, strict=True):
        if places.count(place) > 1:
            raise DataError(f"{where} ({run.folder}): is given twice; give each run once")
    return found


def names_of(runs: Sequence[Run]) -> list[str]:
    """What tells runs apart: as many of the last parts of their paths as that takes, the same for all."""
    parts = [run.folder.resolve().parts[1:] for run in runs]
    for number in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(own[-number:]) for own in parts]
        # The folder of a seed says nothing without the one above it.
        if len(set(names)) == len(names) and not all(name.startswith("seed_") for name in names):
            return names
    return [str(run.folder) for run in runs]


def _lines(path: Path, tail: int | None = None) -> Iterator[tuple[int, Figures]]:
    """Step and figures of each line; with `tail` of that many bytes at the end, the last one first."""
    try:
        file = open(path, "rb")  # noqa: SIM115 (closed by the with below)
    except FileNotFoundError:
        return
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); mend that") from error
    with file:
        if tail is not None and os.fstat(file.fileno()).st_size > tail:
            file.seek(-tail, os.SEEK_END)
            file.readline()
        for line in file if tail is None else reversed(file.readlines()):
            row = read_line(line, path)
            if row is not None:
                yield row[0], {name: _finite(value) for name, value in row[1].items()}


def _finite(value: Any) -> float | None:
    return float(value) if _is_number(value) and abs(value) <= sys.float_info.max else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []  # not ours to read, or gone meanwhile


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is none. Raises DataError where it cannot be read."""
    if not path.is_file():
        return {}
    return read_json(path, dict[str, Any], DataError, "fix it or remove it")
