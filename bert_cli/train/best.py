"""Reads and writes best.json of a run's folder: the best checkpoint by its evaluations, and the last one scored.

The best checkpoint is never pruned, and is the one that a folder of a run stands for as a model.
"""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, NonNegativeInt

from bert_cli.errors import CheckpointError
from bert_cli.files import JSON, read_json, write_json_atomically
from bert_cli.train.history import BEST, STATE, name_of


class Best(BaseModel):
    """What best.json holds."""

    model_config = ConfigDict(strict=True)
    step: NonNegativeInt
    figure: str = ""
    """Name of the metric; more of it is better."""
    value: float
    scored: NonNegativeInt | None = None
    """The last step that was scored; older files have none."""


def read_best(folder: Path) -> Best | None:
    """Return best.json of a run's folder, None where there is none. Raises CheckpointError for another file."""
    path = folder / BEST
    remedy = "remove it to choose the best checkpoint anew"
    return read_json(path, Best, CheckpointError, remedy) if path.exists() else None


def note_best(folder: Path, step: int, name: str, value: float) -> bool:
    """Write down a step's score, and that its checkpoint is the best one unless an older one is as good.

    `value` is the metric `name` of an evaluation; more is better. Returns whether it is the best now.
    """
    old = read_best(folder)
    is_better = old is None or value > old.value or not (folder / name_of(old.step)).is_dir()
    best = Best(step=step, value=value) if old is None or is_better else old
    record: JSON = {"step": best.step, "figure": name, "value": best.value, "scored": step}
    write_json_atomically(folder / BEST, record)
    return is_better


def last_scored(folder: Path) -> int:
    """Return the last step that was scored; 0 where none was."""
    found = read_best(folder)
    return 0 if found is None else found.step if found.scored is None else found.scored


def best_of(folder: Path) -> Path | None:
    """Return the checkpoint that an evaluation found to be the best, where one did."""
    found = read_best(folder)
    path = folder / name_of(found.step) if found else None
    return path if path is not None and (path / STATE).is_file() else None
