"""Save and load the four things that change; every checkpoint is a Hugging Face model directory.

`step_00000100/` holds config.json, model.safetensors under Hugging Face's names and the tokenizer's
files, so that any tool opens it; beside them optimizer.safetensors and, written last, state.json
with the step, the loss scale, what the run was and a checksum of each file. A directory is written
under another name, forced to disk and renamed: what is called step_* is complete. There is no pickle.
What cannot be the state of a run (a weight that is not finite, a changed byte) is not saved or loaded.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, NonNegativeInt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from bert_cli.data.shards.checksums import file_crc32c
from bert_cli.errors import CheckpointError, ConfigError, DeviceError
from bert_cli.files import (
    InnerPath,
    LockUnsupportedError,
    fsync_paths,
    lock_file,
    name_path,
    read_json,
)
from bert_cli.optim.loss_scale import LossScale
from bert_cli.parallel.engine import Value
from bert_cli.train.best import best_of
from bert_cli.train.history import CHECKPOINT, LOCK, STATE, name_of
from bert_cli.train.step import State

Arrays = Mapping[str, npt.NDArray[Any]]
PARTIAL = ".partial_"
LOCK_ATTEMPTS = 5
"""`bert runs` holds the lock for an instant when it checks it."""
MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
# Settings that decide the numbers of a run, with the whole numbers of `fixed_settings`. A checkpoint
# goes on only with the same ones; others (replicas, stages, recomputation, cadences, logging) may
# change between two starts.
FIXED = (
    "seed",
    "precision",
    "max_seq_length",
    "max_predictions_per_seq",
    "masking",
    "max_sequences_per_pack",
    "length_buckets",
    "bert_config",
    "optimizer_opts",
    "generated_dataset",
)
# Settings that state.json stores under an earlier name.
STORED_NAMES = {"length_buckets": "length_bins"}
# Of those that nobody sets, what they come from.
MADE_OF = {
    "examples_per_step": " (of global_batch)",
    "total_steps": " (of the number of examples or epochs, and global_batch)",
    "corpus": " (the examples that are read)",
}


@dataclass(frozen=True)
class Format:
    """How a model's weights look on disk, given by whoever knows the model."""

    to_disk: Callable[[Arrays], dict[str, npt.NDArray[Any]]]
    """Our names -> Hugging Face's."""
    from_disk: Callable[[Arrays], dict[str, npt.NDArray[Any]]]
    """Hugging Face's names -> ours; raises CheckpointError for leftovers."""
    config: Mapping[str, Any]
    """config.json."""
    tokenizer_files: Mapping[str, bytes] = field(default_factory=dict)
    """The tokenizer's files by name."""


class SavedState(BaseModel):
    """state.json: what a checkpoint says beside its tensors."""

    model_config = ConfigDict(strict=True)
    step: NonNegativeInt
    loss_scale: LossScale
    fixed: dict[str, Any]
    settings: dict[str, Any] = {}
    versions: dict[str, str] = {}
    crc32c: dict[InnerPath, str] = {}
    """Checksum of each other file of the checkpoint; older checkpoints have none."""


def fixed_settings(
    settings: Mapping[str, Any], examples_per_step: int, total_steps: int, corpus: str
) -> dict[str, Any]:
    """What two starts must share to be one run: the settings of FIXED and the numbers they lead to.

    The micro-batch is among them, because its dropout is drawn as a whole.
    """
    return {
        **{STORED_NAMES.get(name, name): settings[name] for name in FIXED if name in settings},
        "micro_batch_size": settings["global_batch"]["micro_batch_size"],
        "examples_per_step": examples_per_step,
        "total_steps": total_steps,
        "corpus": corpus,
    }


@contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Keep a run's folder for this process alone, until it ends however.

    Two runs in one folder would remove each other's checkpoints; a requeued job is how it happens.
    Raises CheckpointError when another process has it, ConfigError when it cannot be written.
    """
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock_file(folder / LOCK, LOCK_ATTEMPTS))
        except BlockingIOError as error:
            problem, remedy = (
                "another process is at work in it",
                "wait for it or choose another folder",
            )
            raise CheckpointError(f"save_ckpt_path ({folder})", problem, remedy) from error
        except LockUnsupportedError as error:
            print(
                f"save_ckpt_path ({folder}): cannot be locked ({error.strerror}); start one run in it only"
            )
        except OSError as error:
            problem = f"cannot be written ({error.strerror})"
            where = f"save_ckpt_path ({error.filename})"
            raise ConfigError(where, problem, "choose another folder") from error
        yield


def whole_checkpoints(folder: Path) -> list[Path]:
    """The finished checkpoints of a run, oldest first."""
    found = (path for path in folder.glob("step_*") if CHECKPOINT.fullmatch(path.name))
    return sorted((path for path in found if (path / STATE).is_file()), key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def save(
    folder: Path,
    state: State,
    form: Format,
    *,
    fixed: Mapping[str, Any],
    settings: Mapping[str, Any],
    versions: Mapping[str, str],
) -> Path:
    """Write the state as `folder/step_XXXXXXXX`; the path.

    Raises CheckpointError when the disk refuses, and what was written so far does not look complete;
    DeviceError when the state is not one to continue from, and nothing is written.
    """
    path = folder / name_of(state.step)
    if (path / STATE).is_file():
        return path  # resumed and stopped again before a step: the same step of the same run
    size = 0
    for name, variable in (*state.weights.items(), *_named_moments(state)):
        value = variable.numpy()
        size += value.nbytes
        if problem := fault_of(name, value):
            raise DeviceError(
                f"step {state.step}: {name} {problem}; it is not saved, and older checkpoints are kept. Take the last "
                "good one as --pretrained-ckpt-path of a new run with a lower learning rate"
            )
    partial = folder / f"{PARTIAL}{name_of(state.step)}"
    try:
        with name_path(path, size), _removed_on_failure(partial):
            partial.mkdir(parents=True)
            _write(partial, state, form)
            record = {
                "step": state.step,
                "loss_scale": state.loss_scale.as_json(),
                "fixed": fixed,
                "settings": settings,
                "versions": versions,
                "crc32c": {file.name: file_crc32c(file) for file in sorted(partial.iterdir())},
            }
            (partial / STATE).write_text(json.dumps(record, indent=1), encoding="utf-8")
            fsync_paths([*partial.iterdir(), partial])
            os.replace(partial, path)
            fsync_paths([folder])
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be written ({error.strerror}); make room or choose another save_ckpt_path, "
            "then run the same command again"
        ) from error
    return path


@contextmanager
def _removed_on_failure(folder: Path) -> Iterator[None]:
    """Remove a folder before and when the block fails. SafetensorError becomes OSError by the number in its text."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        yield
    except (OSError, SafetensorError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise
        number = re.search(r"os error (\d+)", str(error))
        code = int(number[1]) if number else None
        raise OSError(code, os.strerror(code) if code else str(error)) from error


def _write(partial: Path, state: State, form: Format) -> None:
    weights = {name: weight.numpy() for name, weight in state.weights.items()}
    on_disk = {name: np.ascontiguousarray(value) for name, value in form.to_disk(weights).items()}
    # transformers asks for this mark of the framework whose layout the tensors have.
    save_file(on_disk, partial / MODEL, metadata={"format": "pt"})
    save_file({name: value.numpy() for name, value in _named_moments(state)}, partial / OPTIMIZER)
    (partial / "config.json").write_text(json.dumps(form.config, indent=2), encoding="utf-8")
    for name in (MODEL, OPTIMIZER):  # which safetensors lets only their owner read
        shutil.copymode(partial / "config.json", partial / name)
    for name, content in form.tokenizer_files.items():
        (partial / name).write_bytes(content)


def _named_moments(state: State) -> Iterator[tuple[str, Value]]:
    for name, pair in state.moments.items():
        for number, moment in enumerate(pair, 1):
            yield f"{name}/moment{number}", moment


def fault_of(name: str, value: npt.NDArray[Any], dtype: str = "") -> str:
    """Return why a value is no weight or moment of `dtype` (any real one if not given); "" if it is one.

    NaN is both the least and the greatest of the values that it is among.
    """
    if value.dtype != dtype if dtype else value.dtype.kind in "biuc":
        return f"is {value.dtype}, not {dtype or 'real numbers'}"
    low, high = value.min(), value.max()
    if not (low > -np.inf and high < np.inf):
        return "has values that are not finite"
    is_negative = name.endswith("/moment2") and low < 0
    return "has negative values, being a mean of squares" if is_negative else ""


def give_shares(state: State) -> None:
    """Take part in another process' save: give the parts of the moments that only this one holds."""
    for _, moment in _named_moments(state):
        if moment.is_sharded:
            moment.numpy()


def read_state(path: Path) -> SavedState:
    """Return state.json of a checkpoint. Raises CheckpointError where it is absent or is not of its folder."""
    found = read_json(path / STATE, SavedState, CheckpointError, _older(path))
    if name_of(found.step) != path.name:
        raise CheckpointError(
            f"{path / STATE} (step {found.step}): is of another checkpoint than its folder {path.name}; "
            f"{_older(path)}"
        )
    return found


def _older(path: Path) -> str:
    return f"remove {path} to continue from the checkpoint before it"


def _refuse_changed_files(path: Path, checksums: Mapping[str, str]) -> None:
    for name, saved in checksums.items():
        try:
            found = file_crc32c(path / name)
        except OSError as error:
            found = f"cannot be read: {error.strerror}"
        if found != saved:
            raise CheckpointError(
                f"{path / name}: has changed since it was saved (crc32c {found}; {STATE} says {saved}); "
                f"{_older(path)}"
            )


def resume(
    path: Path, state: State, form: Format, fixed: Mapping[str, Any], settings: Any = None
) -> None:
    """Put a checkpoint of this run into `state`.

    `settings`, all of the run's, say by their names which corpora have changed. Raises
    CheckpointError when the checkpoint is of a run with other numbers, naming each difference, when its
    files are not those that were saved, or when they hold what no run can have come to.
    """
    found = read_state(path)
    before, now = dict(found.fixed), json.loads(json.dumps(fixed))
    corpora = _corpora(found.settings), _corpora(settings)
    if before.get("corpus") != now.get("corpus") and all(corpora) and corpora[0] != corpora[1]:
        before["corpus"], now["corpus"] = corpora
    if differences := _differences(before, now):
        raise CheckpointError(
            f"{path}: belongs to a run with other settings: {'; '.join(differences)}. Use those settings, or "
            "another save_ckpt_path with --pretrained-ckpt-path to start anew from these weights"
        )
    if found.step > now.get("total_steps", found.step):
        raise CheckpointError(
            f"{path / STATE} (step {found.step}): the run has {now['total_steps']} steps; {_older(path)}"
        )
    _refuse_changed_files(path, found.crc32c)
    weights = form.from_disk(read_tensors(path / MODEL))
    _assign(state.weights, weights, path / MODEL, form.config.get("dtype", "float32"))
    _assign(
        dict(_named_moments(state)), read_tensors(path / OPTIMIZER), path / OPTIMIZER, "float32"
    )
    state.loss_scale, state.step = found.loss_scale, found.step


def _corpora(settings: Any) -> str:
    """The folders that settings name and their weights; nothing where they name none."""
    named = settings.get("dataset_dir") if isinstance(settings, Mapping) else None
    try:
        return ", ".join(f"{one['path']} (weight {one['weight']:g})" for one in named or [])
    except (TypeError, KeyError, ValueError):  # one folder, or not ours
        return str(named)


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], above: str = "") -> list[str]:
    found: list[str] = []
    for name in sorted({*old, *new}):
        before, now = old.get(name), new.get(name)
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            found += _differences(before, now, f"{above}{name}.")
        elif before != now and (before, now) != (None, False):  # a switch unknown then was off
            found.append(f"{above}{name}{MADE_OF.get(name, '')} was {before}, is {now}")
    return found


def read_tensors(path: Path) -> dict[str, npt.NDArray[Any]]:
    """All tensors of a safetensors file. Raises CheckpointError where it is absent or cut."""
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error}); use another checkpoint"
        ) from error


def _assign(targets: Mapping[str, Any], values: Arrays, path: Path, dtype: str) -> None:
    missing, extra = sorted({*targets} - {*values}), sorted({*values} - {*targets})
    if missing or extra:
        raise CheckpointError(
            f"{path}: lacks {missing[:3]} and has {extra[:3]} too many; it is of another model"
        )
    for name, target in targets.items():
        value = values[name]
        if tuple(value.shape) != tuple(target.shape):
            raise CheckpointError(
                f"{path}: {name} has shape {value.shape}, the model {tuple(target.shape)}"
            )
        if problem := fault_of(name, value, dtype):
            raise CheckpointError(f"{path}: {name} {problem}; {_older(path.parent)}")
        target.assign(value)


def clear_half_written(folder: Path) -> list[str]:
    """Remove what interrupted writes left; return the names of the checkpoints among it.

    Raises CheckpointError for a step_* without its state, which no save leaves but half a copy or half
    a removal by hand does: the save of that step would find its name taken hours later.
    """
    for path in folder.glob("step_*"):
        if CHECKPOINT.fullmatch(path.name) and not (path / STATE).is_file():
            raise CheckpointError(f"{path}: is a checkpoint without {STATE}; remove or rename it")
    for path in folder.glob(".*.part"):
        path.unlink(missing_ok=True)
    removed = sorted(folder.glob(f"{PARTIAL}*"))
    for path in removed:
        shutil.rmtree(path, ignore_errors=True)
    return [path.name.removeprefix(PARTIAL) for path in removed]


def prune(folder: Path, keep: int, keep_every_steps: int | None) -> None:
    """Remove all but the newest `keep` checkpoints, the best, and those whose step `keep_every_steps` divides."""
    best = best_of(folder)
    for path in whole_checkpoints(folder)[:-keep]:
        if path == best or (keep_every_steps and _step_of(path) % keep_every_steps == 0):
            continue
        # Renamed first: a removal that is interrupted must not leave half a checkpoint by its name.
        gone = path.with_name(f"{PARTIAL}{path.name}")
        os.replace(path, gone)
        shutil.rmtree(gone, ignore_errors=True)
