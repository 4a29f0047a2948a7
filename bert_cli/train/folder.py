"""The folder of a run: names of its files, its lock, its complete checkpoints and the best of them.

A checkpoint is a folder `step_00000100` whose state.json is written last and renamed with the folder,
so a folder without it was not written by a run.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict, NonNegativeInt

from bert_cli.errors import CheckpointError, ConfigError
from bert_cli.files import (
    JSON,
    LockUnsupportedError,
    lock_file,
    read_json,
    write_json_atomically,
)

SETTINGS, METRICS, SCORES = "settings.json", "metrics.jsonl", "scores.json"
BEST, LOCK, STATE = "best.json", "lock", "state.json"
CHECKPOINT = re.compile(r"step_\d{8,}")
PARTIAL = ".partial_"
LOCK_ATTEMPTS = 5
"""`bert runs` holds the lock for an instant when it checks it."""


def checkpoint_name(step: int) -> str:
    """Return the name of the folder of a step's checkpoint."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int:
    """Return the step of a checkpoint's folder."""
    return int(path.name.removeprefix("step_"))


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    paths = (path for path in folder.glob("step_*") if CHECKPOINT.fullmatch(path.name))
    return sorted((path for path in paths if (path / STATE).is_file()), key=step_of)


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Create a run's folder and lock it until this process ends.

    Two runs in one folder, as from a requeued job, would remove each other's checkpoints. Raises
    CheckpointError when another process holds the lock, ConfigError when the folder cannot be written.
    """
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock_file(folder / LOCK, LOCK_ATTEMPTS))
        except BlockingIOError as error:
            raise CheckpointError(
                f"save_ckpt_path ({folder})",
                "another process is at work in it",
                "wait for it or choose another folder",
            ) from error
        except LockUnsupportedError as error:
            print(
                f"save_ckpt_path ({folder}): cannot be locked ({error.strerror}); start one run in it only"
            )
        except OSError as error:
            where = f"save_ckpt_path ({error.filename})"
            problem = f"cannot be written ({error.strerror})"
            raise ConfigError(where, problem, "choose another folder") from error
        yield


def remove_partial_checkpoints(folder: Path) -> list[str]:
    """Remove what interrupted writes left; return the names of the checkpoints among it.

    Raises CheckpointError for a step_* without its state.json. No save leaves one, but copying or
    removing files may, and the save of that step would fail hours later.
    """
    for path in folder.glob("step_*"):
        if CHECKPOINT.fullmatch(path.name) and not (path / STATE).is_file():
            raise CheckpointError(
                str(path), f"is a checkpoint without {STATE}", "remove or rename it"
            )
    for path in folder.glob(".*.part"):
        path.unlink(missing_ok=True)
    partial = sorted(folder.glob(f"{PARTIAL}*"))
    for path in partial:
        shutil.rmtree(path, ignore_errors=True)
    return [path.name.removeprefix(PARTIAL) for path in partial]


def prune(folder: Path, keep: int, keep_every_steps: int | None) -> None:
    """Remove all checkpoints but the newest `keep`, the best, and those whose step `keep_every_steps` divides."""
    best = best_checkpoint(folder)
    for path in complete_checkpoints(folder)[:-keep]:
        if path == best or (keep_every_steps and step_of(path) % keep_every_steps == 0):
            continue
        # Renamed first: an interrupted removal must not leave a part under the checkpoint's name.
        renamed = path.with_name(f"{PARTIAL}{path.name}")
        os.replace(path, renamed)
        shutil.rmtree(renamed, ignore_errors=True)


class Best(BaseModel):
    """The content of best.json."""

    model_config = ConfigDict(strict=True)
    step: NonNegativeInt
    figure: str = ""
    """Name of the metric; more of it is better."""
    value: float
    scored: NonNegativeInt | None = None
    """The last step that was scored; older files have none."""


def read_best(folder: Path) -> Best | None:
    """Return best.json of a run, None if there is none. Raises CheckpointError for a file that is not valid."""
    path = folder / BEST
    remedy = "remove it to choose the best checkpoint anew"
    return read_json(path, Best, CheckpointError, remedy) if path.exists() else None


def write_best(folder: Path, step: int, name: str, value: float) -> bool:
    """Write a step's score to best.json and return whether its checkpoint is now the best one.

    `value` is the metric `name` of an evaluation; more is better, and an older checkpoint that is as
    good stays the best.
    """
    old = read_best(folder)
    is_better = (
        old is None or value > old.value or not (folder / checkpoint_name(old.step)).is_dir()
    )
    best = Best(step=step, value=value) if old is None or is_better else old
    record: JSON = {"step": best.step, "figure": name, "value": best.value, "scored": step}
    write_json_atomically(folder / BEST, record)
    return is_better


def last_scored_step(folder: Path) -> int:
    """Return the last step that was scored, 0 if none was."""
    best = read_best(folder)
    return 0 if best is None else best.step if best.scored is None else best.scored


def best_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint with the best score, None if none was scored."""
    best = read_best(folder)
    path = folder / checkpoint_name(best.step) if best else None
    return path if path is not None and (path / STATE).is_file() else None
