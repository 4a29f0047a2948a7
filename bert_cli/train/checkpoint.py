"""Save and load the state of a run; every checkpoint is a Hugging Face model directory.

`step_00000100/` holds config.json, model.safetensors with Hugging Face's names and the tokenizer's
files, so other tools open it, and also optimizer.safetensors and state.json with the step, the loss
scale, the fixed settings and a checksum of each file. It is written under another name, forced to disk
and renamed: a folder named step_* is complete. There is no pickle. A value that no run can have (not
finite, or a changed byte) is neither saved nor loaded.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, NonNegativeInt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from bert_cli.data.shards.manifest import file_crc32c
from bert_cli.errors import CheckpointError, DeviceError
from bert_cli.files import InnerPath, fsync_paths, name_path, read_json
from bert_cli.optim.loss_scale import LossScale
from bert_cli.parallel.engine import Value
from bert_cli.train.folder import PARTIAL, STATE, checkpoint_name
from bert_cli.train.step import State

Arrays = Mapping[str, npt.NDArray[Any]]
MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
# Settings that decide the numbers of a run. A checkpoint continues only with the same ones; others
# (replicas, stages, recomputation, cadences, logging) may change between two starts.
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
# The settings that these fixed numbers follow from, for messages.
ORIGINS = {
    "examples_per_step": " (of global_batch)",
    "total_steps": " (of the number of examples or epochs, and global_batch)",
    "corpus": " (the examples that are read)",
}


@dataclass(frozen=True)
class Format:
    """How a model's weights are written to disk and read."""

    to_disk: Callable[[Arrays], dict[str, npt.NDArray[Any]]]
    """Our names -> Hugging Face's."""
    from_disk: Callable[[Arrays], dict[str, npt.NDArray[Any]]]
    """Hugging Face's names -> ours; raises CheckpointError for leftovers."""
    config: Mapping[str, Any]
    """config.json."""
    tokenizer_files: Mapping[str, bytes] = field(default_factory=dict)
    """The tokenizer's files by name."""


class SavedState(BaseModel):
    """The content of state.json."""

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
    """Return what two starts must share to be one run: the settings of FIXED and numbers that follow.

    The micro-batch size is among them, because dropout is a function of the micro-batch.
    """
    return {
        **{STORED_NAMES.get(name, name): settings[name] for name in FIXED if name in settings},
        "micro_batch_size": settings["global_batch"]["micro_batch_size"],
        "examples_per_step": examples_per_step,
        "total_steps": total_steps,
        "corpus": corpus,
    }


def save(
    folder: Path,
    state: State,
    form: Format,
    *,
    fixed: Mapping[str, Any],
    settings: Mapping[str, Any],
    versions: Mapping[str, str],
) -> Path:
    """Write the state as `folder/step_XXXXXXXX` and return that path.

    Raises CheckpointError when it cannot be written, and removes the part that was; DeviceError when a
    value is not finite, and nothing is written.
    """
    path = folder / checkpoint_name(state.step)
    if (path / STATE).is_file():
        return path  # resumed and stopped again before a step
    size = 0
    for name, variable in (*state.weights.items(), *_named_moments(state)):
        value = variable.numpy()
        size += value.nbytes
        if fault := find_fault(name, value):
            raise DeviceError(
                f"step {state.step}: {name}",
                f"{fault}, so it is not saved, and older checkpoints are kept",
                "take the last good one as --pretrained-ckpt-path of a new run with a lower learning rate",
            )
    partial = folder / f"{PARTIAL}{checkpoint_name(state.step)}"
    try:
        with name_path(path, size), _removed_on_failure(partial):
            partial.mkdir(parents=True)
            _write_tensors(partial, state, form)
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
            str(path),
            f"cannot be written ({error.strerror})",
            "make room or choose another save_ckpt_path, then run the same command again",
        ) from error
    return path


@contextmanager
def _removed_on_failure(folder: Path) -> Iterator[None]:
    """Remove a folder before the block and when it fails. A SafetensorError becomes an OSError by its text."""
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


def _write_tensors(partial: Path, state: State, form: Format) -> None:
    weights = {name: weight.numpy() for name, weight in state.weights.items()}
    on_disk = {name: np.ascontiguousarray(value) for name, value in form.to_disk(weights).items()}
    # transformers requires the name of the framework whose layout the tensors have.
    save_file(on_disk, partial / MODEL, metadata={"format": "pt"})
    save_file({name: value.numpy() for name, value in _named_moments(state)}, partial / OPTIMIZER)
    (partial / "config.json").write_text(json.dumps(form.config, indent=2), encoding="utf-8")
    for name in (MODEL, OPTIMIZER):  # safetensors lets only their owner read them
        shutil.copymode(partial / "config.json", partial / name)
    for name, content in form.tokenizer_files.items():
        (partial / name).write_bytes(content)


def _named_moments(state: State) -> Iterator[tuple[str, Value]]:
    for name, pair in state.moments.items():
        for number, moment in enumerate(pair, 1):
            yield f"{name}/moment{number}", moment


def find_fault(name: str, value: npt.NDArray[Any], dtype: str = "") -> str:
    """Return why a value is no weight or moment of `dtype` (of any real one by default), "" if it is one."""
    if value.dtype != dtype if dtype else value.dtype.kind in "biuc":
        return f"is {value.dtype}, not {dtype or 'real numbers'}"
    # NaN is both the minimum and the maximum of the values that it is among.
    low, high = value.min(), value.max()
    if not (low > -np.inf and high < np.inf):
        return "has values that are not finite"
    is_negative = name.endswith("/moment2") and low < 0
    return "has negative values, being a mean of squares" if is_negative else ""


def read_state(path: Path) -> SavedState:
    """Return state.json of a checkpoint. Raises CheckpointError if it is absent or of another checkpoint."""
    saved = read_json(path / STATE, SavedState, CheckpointError, _remove(path))
    if checkpoint_name(saved.step) != path.name:
        raise CheckpointError(
            f"{path / STATE} (step {saved.step})",
            f"is of another checkpoint than its folder {path.name}",
            _remove(path),
        )
    return saved


def _remove(path: Path) -> str:
    return f"remove {path} to continue from the checkpoint before it"


def _check_files(path: Path, checksums: Mapping[str, str]) -> None:
    """Raise CheckpointError for a file that is not the one that was saved."""
    for name, saved in checksums.items():
        try:
            checksum = file_crc32c(path / name)
        except OSError as error:
            checksum = f"cannot be read: {error.strerror}"
        if checksum != saved:
            problem = f"has changed since it was saved (crc32c {checksum}; {STATE} has {saved})"
            raise CheckpointError(str(path / name), problem, _remove(path))


def resume(
    path: Path, state: State, form: Format, fixed: Mapping[str, Any], settings: Any = None
) -> None:
    """Load a checkpoint of this run into `state`.

    `settings`, all of the run's, name the corpora that have changed. Raises CheckpointError when the
    checkpoint is of a run with other fixed settings, naming each difference, when a file has changed
    since it was saved, or when it holds values that no run can have.
    """
    saved = read_state(path)
    before, now = dict(saved.fixed), json.loads(json.dumps(fixed))
    corpora = _corpora(saved.settings), _corpora(settings)
    if before.get("corpus") != now.get("corpus") and all(corpora) and corpora[0] != corpora[1]:
        before["corpus"], now["corpus"] = corpora
    if differences := _differences(before, now):
        raise CheckpointError(
            str(path),
            f"belongs to a run with other settings: {'; '.join(differences)}",
            "use those settings, or another save_ckpt_path with --pretrained-ckpt-path to start anew from these "
            "weights",
        )
    if saved.step > now.get("total_steps", saved.step):
        where = f"{path / STATE} (step {saved.step})"
        raise CheckpointError(where, f"the run has {now['total_steps']} steps", _remove(path))
    _check_files(path, saved.crc32c)
    weights = form.from_disk(read_tensors(path / MODEL))
    _assign(state.weights, weights, path / MODEL, form.config.get("dtype", "float32"))
    moments = read_tensors(path / OPTIMIZER)
    _assign(dict(_named_moments(state)), moments, path / OPTIMIZER, "float32")
    state.loss_scale, state.step = saved.loss_scale, saved.step


def _corpora(settings: Any) -> str:
    """Return the folders of a mixture with their weights, "" if the settings have none."""
    folders = settings.get("dataset_dir") if isinstance(settings, Mapping) else None
    try:
        return ", ".join(f"{one['path']} (weight {one['weight']:g})" for one in folders or [])
    except (TypeError, KeyError, ValueError):  # a single folder, or not our settings
        return str(folders)


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for name in sorted({*old, *new}):
        before, now = old.get(name), new.get(name)
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            found += _differences(before, now, f"{prefix}{name}.")
        elif before != now and (before, now) != (
            None,
            False,
        ):  # a switch that did not exist was off
            found.append(f"{prefix}{name}{ORIGINS.get(name, '')} was {before}, is {now}")
    return found


def read_tensors(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Return all tensors of a safetensors file. Raises CheckpointError if it is absent or incomplete."""
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            str(path), f"cannot be read ({error})", "use another checkpoint"
        ) from error


def _assign(targets: Mapping[str, Any], values: Arrays, path: Path, dtype: str) -> None:
    missing, extra = sorted({*targets} - {*values}), sorted({*values} - {*targets})
    if missing or extra:
        problem = f"lacks {missing[:3]} and has {extra[:3]} too many"
        raise CheckpointError(str(path), problem, "use a checkpoint of this model")
    for name, target in targets.items():
        value = values[name]
        fault = find_fault(name, value, dtype)
        if tuple(value.shape) != tuple(target.shape):
            fault = f"has shape {value.shape}, the model {tuple(target.shape)}"
        if fault:
            raise CheckpointError(f"{path}: {name}", fault, _remove(path.parent))
        target.assign(value)
