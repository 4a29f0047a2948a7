"""The folder of a run: its lock, its checkpoints, and the best checkpoint.

A checkpoint `step_00000100/` is a Hugging Face model directory, so other tools open it, with optimizer.safetensors and
state.json: the step, the loss scale, the fixed settings and checksums of each file and of state.json. It is written
under another name, forced to disk and renamed: a folder step_* with a state.json is complete. There is no pickle. An
impossible value (not finite, or a changed byte) is neither saved nor loaded.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import ml_dtypes  # noqa: F401  # by which NumPy knows bfloat16
import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from bert_cli.arrays import Array, Tensors
from bert_cli.data.finetune import embeddings
from bert_cli.errors import CheckpointError, DeviceError
from bert_cli.facts.optimizers import MOMENTS
from bert_cli.files import (
    FORMAT,
    PARTIAL,
    STATE,
    Checksums,
    JSONObject,
    OwnFormat,
    atomic_folder,
    file_crc32c,
    hold_lock,
    read_json,
    report_failure,
    verify_files,
    with_checksum,
    write_json_atomically,
)
from bert_cli.optim.schedule import LossScale
from bert_cli.train import card
from bert_cli.versions import package_versions

if TYPE_CHECKING:  # parts of a run, which a prediction does without
    from bert_cli.parallel.engine import Value
    from bert_cli.train.loop import State, StateCopy

SETTINGS = "settings.json"
METRICS = "metrics.jsonl"
SCORES = "scores.json"
BEST = "best.json"
LOCK = "lock"
MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
# Eight digits, so that names sort like steps up to 99,999,999; more are read too.
CHECKPOINT = re.compile(r"step_\d{8,}")
# The packages that decide the numbers of a run.
PACKAGES = ("tensorflow", "jax", "keras", "numpy", "tokenizers", "safetensors")
# Fixed number -> the settings from which it follows, for messages.
ORIGINS = {
    "examples_per_step": " (of global_batch)",
    "total_steps": " (of the number of examples or epochs, and global_batch)",
    "step_sizes": " (of the growth of global_batch and its replicas)",
    "corpus": " (the examples that are read)",
    "chosen_on_half": " (of validation_file)",
}


@dataclass(frozen=True)
class Format:
    """How a model's weights are written to disk and read."""

    to_disk: Callable[[Tensors], dict[str, Array]]
    """Our names -> Hugging Face's."""
    from_disk: Callable[[Tensors], dict[str, Array]]
    """Hugging Face's names -> ours; raises CheckpointError for leftovers."""
    config: JSONObject
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Other files by name: the tokenizer, and the classes of a model that transformers does not have."""
    epoch_size: int | None = None
    """Examples of an epoch, for the model card; None where there is no end."""


# Below 2^53 every JSON reader reads an integer exactly.
Count = Annotated[int, Field(ge=0, lt=2**53)]


class SavedSettings(BaseModel):
    """The settings in a state.json, also in one that another program wrote."""

    model_config = ConfigDict(strict=True)
    format: OwnFormat = None
    fixed: JSONObject = {}
    settings: JSONObject = {}
    versions: dict[str, str] = {}


def read_settings(folder: Path) -> SavedSettings:
    """Return what state.json of a model's folder says of its settings, nothing where other programs wrote the model."""
    path = folder / STATE
    if not path.is_file():
        return SavedSettings(format=FORMAT)
    return read_json(path, SavedSettings, CheckpointError, "copy it again")


class SavedState(SavedSettings, Checksums):
    """The content of state.json."""

    step: Count
    loss_scale: LossScale
    fixed: JSONObject


class Best(BaseModel):
    """The content of best.json."""

    model_config = ConfigDict(strict=True)
    step: Count
    metric: str
    value: float
    """NaN if no score was a number."""
    scored: Count
    """The last step that was scored."""


# --- the folder


def checkpoint_name(step: int) -> str:
    """Return the name of the folder of a step's checkpoint."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int:
    """Return the step of a checkpoint's folder."""
    return int(path.name.removeprefix("step_"))


def complete_checkpoints(folder: Path | None) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    paths = folder.glob("step_*") if folder else ()
    complete = (p for p in paths if CHECKPOINT.fullmatch(p.name) and (p / STATE).is_file())
    return sorted(complete, key=step_of)


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Create a run's folder and lock it: two runs in it would remove each other's checkpoints.

    Raises CheckpointError when another process holds the lock, DataError when the folder cannot be written.
    """
    where = f"save_ckpt_path ({folder})"
    remedy = "wait for it or choose another folder"
    busy = CheckpointError(where, "another process is using it", remedy)
    with ExitStack() as stack:
        with report_failure(where, "written", "choose another folder"):
            folder.mkdir(parents=True, exist_ok=True)
            # `bert runs` holds the lock for an instant when it checks it.
            stack.enter_context(hold_lock(folder / LOCK, busy, attempts=5))
        yield


def remove_partial_checkpoints(folder: Path) -> list[str]:
    """Remove the remains of interrupted writes; return the names of the checkpoints among them.

    Raises CheckpointError for a step_* without state.json (an incomplete copy): the save of that step would fail.
    """
    for path in folder.glob("step_*"):
        if CHECKPOINT.fullmatch(path.name) and not (path / STATE).is_file():
            problem = f"is a checkpoint without {STATE}"
            raise CheckpointError(str(path), problem, "move it out of the run's folder")
    for path in folder.glob(".*.part"):
        path.unlink(missing_ok=True)
    partial = sorted(folder.glob(f"{PARTIAL}*"))
    for path in partial:
        shutil.rmtree(path, ignore_errors=True)
    return [path.name.removeprefix(PARTIAL).partition(".")[0] for path in partial]


class Saved:
    """A complete checkpoint. Its state.json is read once, when it is first used, and each file verified once."""

    def __init__(self, path: Path) -> None:
        """Read nothing yet."""
        self.path = path
        self._verified: set[str] = set()

    @cached_property
    def state(self) -> SavedState:
        """The content of state.json. Raises CheckpointError if it is absent, changed or of another checkpoint."""
        path = self.path / STATE
        remedy = _remove(self.path)
        saved = read_json(path, SavedState, CheckpointError, remedy)
        if checkpoint_name(saved.step) != self.path.name:
            problem = f"belongs to another checkpoint than its folder {self.path.name}"
            raise CheckpointError(f"{path} (step {saved.step})", problem, remedy)
        return saved

    def verify(self, *, but: tuple[str, ...] = (), remedy: str = "") -> None:
        """Verify the files, without files whose names end in `but`. Raises CheckpointError for a changed file."""
        checksums = self.state.crc32c.items()
        new = {n: c for n, c in checksums if not n.endswith(but) and n not in self._verified}
        verify_files(self.path, new, remedy)
        self._verified |= new.keys()


class Folder:
    """A run's folder, None for a run that saves nothing. Each of its files is read once: only the run writes them."""

    def __init__(self, path: Path | None) -> None:
        """Read nothing yet."""
        self.path = path
        self._saved: dict[Path, Saved] = {}

    @property
    def newest(self) -> Saved | None:
        """The newest complete checkpoint that is there now."""
        paths = complete_checkpoints(self.path)
        # Asked anew each time, as a save may have added one; what was read of it stays.
        return self._saved.setdefault(paths[-1], Saved(paths[-1])) if paths else None

    @cached_property
    def best(self) -> Best | None:
        """The content of best.json, None if there is none. Raises CheckpointError for a file that is not valid."""
        path = self.path and self.path / BEST
        remedy = "move it out of the run's folder to choose the best checkpoint again"
        return read_json(path, Best, CheckpointError, remedy) if path and path.exists() else None

    @property
    def best_checkpoint(self) -> Path | None:
        """The checkpoint with the best score, None if none was scored."""
        if self.path is None or self.best is None:
            return None
        path = self.path / checkpoint_name(self.best.step)
        return path if (path / STATE).is_file() else None

    def write_best(self, step: int, name: str, value: float) -> None:
        """Write the score of a step, the value of the metric `name`, to best.json if no older checkpoint is as good."""
        assert self.path is not None
        best = Best(step=step, metric=name, value=value, scored=step)
        old = self.best
        # NaN is worse than any number. Of equal scores the older stays, so that a resumed run chooses the same.
        if old and self.best_checkpoint and (value <= old.value or math.isnan(value)):
            best = old.model_copy(update={"scored": step})
        write_json_atomically(self.path / BEST, with_checksum(best.model_dump()))
        self.best = best

    def prune(self, keep: int, keep_every_steps: int | None) -> None:
        """Remove all checkpoints but the newest `keep`, the best, and those whose step `keep_every_steps` divides."""
        best = self.best_checkpoint
        for path in complete_checkpoints(self.path)[:-keep]:
            if path != best and not (keep_every_steps and step_of(path) % keep_every_steps == 0):
                # Renamed first: an interrupted removal must not leave a part under the checkpoint's name.
                renamed = path.rename(path.with_name(f"{PARTIAL}{path.name}"))
                shutil.rmtree(renamed, ignore_errors=True)


# --- save


def save(
    folder: Path, state: "StateCopy", form: Format, *, fixed: JSONObject, settings: JSONObject
) -> Path:
    """Write the state as `folder/step_XXXXXXXX` and return that path.

    Raises DataError if the folder cannot be written, and removes the partial folder. Raises DeviceError for a
    value that is not finite; then nothing is written.
    """
    path = folder / checkpoint_name(state.step)
    if (path / STATE).is_file():
        return path  # resumed and stopped again before a step
    values = {**state.weights, **state.slots}
    for name, value in values.items():
        if fault := find_fault(value, name=name):
            raise DeviceError(
                f"step {state.step}: {name}",
                f"{fault}, so it is not saved, and older checkpoints are kept",
                "use the last good checkpoint as --pretrained-ckpt-path of a new run with a lower learning rate",
            )
    remedy = "make room or choose another save_ckpt_path, then run the same command again"
    size = sum(value.nbytes for value in values.values())
    with report_failure(str(path), "written", remedy), atomic_folder(path, size) as partial:
        record = {
            "format": FORMAT,
            "step": state.step,
            "loss_scale": asdict(state.loss_scale),
            "fixed": fixed,
            "settings": settings,
            "epoch_size": form.epoch_size,
            "versions": package_versions(PACKAGES),
        }
        _write_model(partial, state, form, record)
        files = sorted(filter(Path.is_file, partial.rglob("*")))
        record["crc32c"] = {f.relative_to(partial).as_posix(): file_crc32c(f) for f in files}
        text = json.dumps(with_checksum(record), indent=1)
        (partial / STATE).write_text(text, encoding="utf-8")
    return path


def _write_model(partial: Path, state: "StateCopy", form: Format, record: JSONObject) -> None:
    (partial / "config.json").write_text(json.dumps(form.config, indent=2), encoding="utf-8")
    weights = form.to_disk(state.weights)
    write_tensors(partial / MODEL, weights)
    write_tensors(partial / OPTIMIZER, state.slots)
    files = dict(form.files)
    if "architectures" in form.config:
        parameters = sum(value.size for value in weights.values())
        is_embedding = embeddings.MODULES in files
        sections = [card.training_section(record)]
        text = card.model_card(form.config, parameters, sections, is_embedding=is_embedding)
        files[card.CARD] = text.encode()
    for name, content in files.items():
        (partial / name).parent.mkdir(exist_ok=True)
        (partial / name).write_bytes(content)


def write_tensors(path: Path, tensors: Tensors) -> None:
    """Write a safetensors file. Raises OSError if it cannot be written."""
    # transformers requires the name of the framework whose layout the weights have.
    about = {"format": "pt"} if path.name == MODEL else None
    # Made here, with the rights that the user's umask allows.
    path.touch()
    mode = path.stat().st_mode
    # save_file writes the bytes of a transposed array as they lie in memory.
    in_order = {name: np.asarray(value, order="C") for name, value in tensors.items()}
    try:
        save_file(in_order, path, metadata=about)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        code = int(number[1]) if number else None
        raise OSError(code, os.strerror(code) if code else str(error)) from error
    path.chmod(mode)  # safetensors lets only the owner read its files


def find_fault(value: Array, dtype: str = "", name: str = "") -> str:
    """Return why a value is not a valid weight or slot of `dtype` (by default any real dtype), "" if it is valid."""
    if value.dtype != dtype if dtype else value.dtype.kind in "biuc":
        return f"is {value.dtype}, not {dtype or 'real numbers'}"
    # The minimum and the maximum of values with a NaN are NaN.
    # Two passes over the values and no copy: a mask of finite values would take a byte for each weight.
    low = value.min()
    high = value.max()
    if not (low > -np.inf and high < np.inf):
        return "has values that are not finite"
    # The next update would take its square root, which is NaN.
    if name.endswith(f"/{MOMENTS[1]}") and low < 0:
        return "has negative values, although it is a mean of squares"
    return ""


# --- load


def _remove(path: Path) -> str:
    return f"move {path} out of the run's folder to continue from the checkpoint before it"


def resume(
    saved: Saved,
    state: "State",
    form: Format,
    fixed: JSONObject,
    settings: JSONObject | None = None,
) -> None:
    """Load a checkpoint of this run into `state`; messages name changed corpora by all `settings` of the run.

    Raises CheckpointError if the checkpoint belongs to a run with other fixed settings (each difference is named), if a
    file has changed since it was saved, or if it has impossible values.
    """
    path = saved.path
    refuse_another_run(saved, fixed, settings)
    saved.verify(remedy=_remove(path))
    weights = form.from_disk(read_tensors(path / MODEL))
    _assign(state.weights, weights, path / MODEL, form.config.get("dtype", "float32"))
    _assign(state.slots, read_tensors(path / OPTIMIZER), path / OPTIMIZER, "float32")
    state.loss_scale = saved.state.loss_scale
    state.step = saved.state.step


def refuse_another_run(saved: Saved, fixed: JSONObject, settings: JSONObject | None = None) -> None:
    """Raise CheckpointError if a checkpoint belongs to a run with other fixed settings, as in `resume`."""
    stored = saved.state
    before = dict(stored.fixed)
    now = json.loads(json.dumps(fixed))
    if before.get("corpus") != now.get("corpus"):
        before["dataset_dir"] = stored.settings.get("dataset_dir")
        now["dataset_dir"] = (settings or {}).get("dataset_dir")
    differences = _differences(before, now)
    if differences:
        problem = f"belongs to a run with other settings: {'; '.join(differences)}"
        remedy = "use those settings, or start a new run in another save_ckpt_path with --pretrained-ckpt-path"
        raise CheckpointError(str(saved.path), problem, remedy)


def _differences(old: JSONObject, new: JSONObject, prefix: str = "") -> list[str]:
    differences: list[str] = []
    for name in sorted({*old, *new}):
        before = old.get(name)
        now = new.get(name)
        if isinstance(before, dict) and isinstance(now, dict):
            differences += _differences(before, now, f"{prefix}{name}.")
        elif before != now:
            differences.append(f"{prefix}{name}{ORIGINS.get(name, '')} was {before}, is {now}")
    return differences


def read_tensors(path: Path) -> dict[str, Array]:
    """Return all tensors of a safetensors file.

    Raises CheckpointError if it is absent or incomplete, or has a dtype that NumPy lacks.
    """
    tensors: dict[str, Array] = {}
    try:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                dtype = file.get_slice(name).get_dtype()
                tensors[name] = file.get_tensor(name)
    except (AttributeError, TypeError) as error:
        problem = f"has weights of the type {dtype}, which NumPy lacks"
        raise CheckpointError(str(path), problem, "use another checkpoint") from error
    except (OSError, SafetensorError) as error:
        problem = f"cannot be read ({error})"
        raise CheckpointError(str(path), problem, "use another checkpoint") from error
    return tensors


def _assign(targets: Mapping[str, "Value"], values: Tensors, path: Path, dtype: str) -> None:
    missing = sorted(targets.keys() - values.keys())
    extra = sorted(values.keys() - targets.keys())
    if missing or extra:
        problem = f"lacks {missing[:3]} and has {extra[:3]} too many"
        raise CheckpointError(str(path), problem, "use a checkpoint of this model")
    for name, target in targets.items():
        value = values[name]
        fault = find_fault(value, dtype, name)
        if tuple(value.shape) != tuple(target.shape):
            fault = f"has shape {value.shape}, the model {tuple(target.shape)}"
        if fault:
            raise CheckpointError(f"{path}: {name}", fault, _remove(path.parent))
        target.assign(value)
