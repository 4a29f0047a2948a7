"""Save and load the four things that change; every checkpoint is a Hugging Face model directory.

`step_00000100/` holds config.json, model.safetensors under Hugging Face's names and the tokenizer's
files, so that any tool opens it; beside them optimizer.safetensors and, written last, state.json
with the step, the loss scale and what the run was. A directory is written under another name,
forced to disk and renamed: what is called step_* is whole. There is no pickle anywhere.
"""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from bert_cli.errors import CheckpointError, ConfigError
from bert_cli.optim.loss_scale import LossScale
from bert_cli.parallel.copies import Shares
from bert_cli.train.history import BEST, CHECKPOINT, LOCK, STATE
from bert_cli.train.step import State

Arrays = Mapping[str, npt.NDArray[Any]]
PARTIAL = ".partial_"
LOOKS = 4
"""How often a lock is tried again before a run is said to hold it: `bert runs` looks at it too."""
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
    "length_bins",
    "bert_config",
    "optimizer_opts",
    "generated_dataset",
)
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


def fixed_settings(
    settings: Mapping[str, Any], examples_per_step: int, total_steps: int, corpus: str
) -> dict[str, Any]:
    """What two starts must share to be one run: the settings of FIXED and the numbers they lead to.

    The micro-batch is among them, because its dropout is drawn as a whole.
    """
    return {
        **{name: settings[name] for name in FIXED if name in settings},
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
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / LOCK, "w")  # noqa: SIM115 (closed below, when the claim ends)
    except OSError as error:
        raise ConfigError(
            f"save_ckpt_path ({folder}): cannot be written ({error.strerror}); choose another folder"
        ) from error
    with lock:
        try:
            _take(lock)
        except BlockingIOError as error:
            raise CheckpointError(
                f"save_ckpt_path ({folder}): another process is at work in it; wait for it or choose another folder"
            ) from error
        except OSError as error:
            # A file system without locks (some network ones): nothing can be claimed there.
            print(
                f"save_ckpt_path ({folder}): cannot be locked ({error.strerror}); start one run in it only"
            )
        yield


def _take(lock: TextIO) -> None:
    """Lock a file, or raise what the system says; who only looks holds it for an instant, a run for good."""
    for again in range(LOOKS, -1, -1):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not again:
                raise
            time.sleep(0.05)


def name_of(step: int) -> str:
    """The directory of a step's checkpoint."""
    return f"step_{step:08d}"


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

    Raises CheckpointError when the disk refuses; what was written so far does not look whole.
    """
    path = folder / name_of(state.step)
    if (path / STATE).is_file():
        return path  # resumed and stopped again before a step: the same step of the same run
    partial = folder / f"{PARTIAL}{name_of(state.step)}"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write(partial, state, form)
        record = {
            "step": state.step,
            "loss_scale": state.loss_scale.as_json(),
            "fixed": fixed,
            "settings": settings,
            "versions": versions,
        }
        (partial / STATE).write_text(json.dumps(record, indent=1), encoding="utf-8")
        for file in partial.iterdir():
            _force_to_disk(file)
        _force_to_disk(partial)
        os.replace(partial, path)
        _force_to_disk(folder)
    except (OSError, SafetensorError) as error:
        # What is there of it would only keep a full disk full.
        shutil.rmtree(partial, ignore_errors=True)
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"{path}: cannot be written ({why}); make room or choose another save_ckpt_path, then run the "
            "same command again"
        ) from error
    return path


def _write(partial: Path, state: State, form: Format) -> None:
    weights = {name: weight.numpy() for name, weight in state.weights.items()}
    on_disk = {name: np.ascontiguousarray(value) for name, value in form.to_disk(weights).items()}
    # transformers asks for this mark of the framework whose layout the tensors have.
    save_file(on_disk, partial / MODEL, metadata={"format": "pt"})
    save_file(dict(_moments(state)), partial / OPTIMIZER)
    (partial / "config.json").write_text(json.dumps(form.config, indent=2), encoding="utf-8")
    for name in (MODEL, OPTIMIZER):  # which safetensors lets only their owner read
        shutil.copymode(partial / "config.json", partial / name)
    for name, content in form.tokenizer_files.items():
        (partial / name).write_bytes(content)


def _moments(state: State) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    for name, pair in state.moments.items():
        for number, moment in enumerate(pair, 1):
            yield f"{name}/moment{number}", moment.numpy()


def give_shares(state: State) -> None:
    """Take part in another process' save: give the parts of the moments that only this one holds."""
    for pair in state.moments.values():
        for moment in pair:
            if isinstance(moment, Shares):
                moment.numpy()


def _force_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_state(path: Path) -> dict[str, Any]:
    """state.json of a checkpoint of ours. Raises CheckpointError where it is absent or not JSON."""
    try:
        found: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path / STATE}: cannot be read ({error}); use an older checkpoint"
        ) from error
    absent = [name for name in ("step", "loss_scale", "fixed") if name not in found]
    if absent:
        raise CheckpointError(
            f"{path / STATE}: lacks {', '.join(absent)}; remove {path} to use an older checkpoint"
        )
    return found


def resume(
    path: Path, state: State, form: Format, fixed: Mapping[str, Any], settings: Any = None
) -> None:
    """Put a checkpoint of this run into `state`.

    `settings`, all of the run's, say by their names which corpora have changed. Raises
    CheckpointError when the checkpoint is of a run with other numbers, naming each difference, or
    when its files are not what its state says.
    """
    found = read_state(path)
    before, now = dict(found["fixed"]), json.loads(json.dumps(fixed))
    corpora = _corpora(found.get("settings")), _corpora(settings)
    if before.get("corpus") != now.get("corpus") and all(corpora) and corpora[0] != corpora[1]:
        before["corpus"], now["corpus"] = corpora
    differences = _differences(before, now)
    if differences:
        raise CheckpointError(
            f"{path}: belongs to a run with other settings: {'; '.join(differences)}. Use those settings, or "
            "another save_ckpt_path with --pretrained-ckpt-path to start anew from these weights"
        )
    _assign(state.weights, form.from_disk(read_tensors(path / MODEL)), path)
    moments = read_tensors(path / OPTIMIZER)
    flat = {
        f"{name}/moment{number}": moment
        for name, pair in state.moments.items()
        for number, moment in enumerate(pair, 1)
    }
    _assign(flat, moments, path)
    try:
        state.loss_scale, state.step = LossScale(**found["loss_scale"]), int(found["step"])
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path / STATE}: is not a state ({error}); remove {path} to use an older checkpoint"
        ) from error


def _corpora(settings: Any) -> str:
    """The folders that settings name and their weights; nothing where they name none."""
    named = settings.get("dataset_dir") if isinstance(settings, Mapping) else None
    if not isinstance(named, list):
        return str(named or "")
    return ", ".join(f"{one['path']} (weight {one['weight']:g})" for one in named)


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


def _assign(targets: Mapping[str, Any], values: Arrays, path: Path) -> None:
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
        target.assign(value)


def clear_half_written(folder: Path) -> list[str]:
    """Remove what an interrupted save left; the names of what was removed.

    Raises CheckpointError for a step_* without its state, which is not ours to remove: a save
    leaves none, but half a copy or half a removal by hand does, and the save of that step would
    find its place taken hours later.
    """
    for path in folder.glob("step_*"):
        if CHECKPOINT.fullmatch(path.name) and not (path / STATE).is_file():
            raise CheckpointError(f"{path}: is a checkpoint without {STATE}; remove or rename it")
    removed = []
    for path in folder.glob(f"{PARTIAL}*"):
        shutil.rmtree(path, ignore_errors=True)
        removed.append(path.name.removeprefix(PARTIAL))
    return sorted(removed)


def note_best(folder: Path, step: int, name: str, value: float) -> bool:
    """Write down a step's score, and that its checkpoint is the best one unless an older one is as good.

    `value` is the figure `name` of an evaluation; more is better. Returns whether it is the best now.
    """
    old = _read_best(folder)
    is_better = old is None or value > old["value"] or not (folder / name_of(old["step"])).is_dir()
    best = {"step": step, "value": value} if old is None or is_better else old
    told = {"step": best["step"], "figure": name, "value": best["value"], "scored": step}
    beside = folder / f".{BEST}"
    beside.write_text(json.dumps(told), encoding="utf-8")
    os.replace(beside, folder / BEST)
    return is_better


def last_scored(folder: Path) -> int:
    """The last step that was scored; 0 where none was."""
    found = _read_best(folder)
    return found["scored"] if found else 0


def best_of(folder: Path) -> Path | None:
    """The checkpoint that an evaluation found to be the best, where one did."""
    found = _read_best(folder)
    path = folder / name_of(found["step"]) if found else None
    return path if path is not None and (path / STATE).is_file() else None


def best_value(folder: Path) -> float | None:
    """The figure of the best checkpoint."""
    found = _read_best(folder)
    return found["value"] if found else None


def _read_best(folder: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((folder / BEST).read_text(encoding="utf-8"))
        step = int(found["step"])
        return {
            "step": step,
            "value": float(found["value"]),
            "scored": int(found.get("scored", step)),
        }
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder / BEST}: cannot be read ({error}); remove it to choose the best checkpoint anew"
        ) from error


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
