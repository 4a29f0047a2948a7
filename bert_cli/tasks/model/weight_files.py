"""Read the weights of a model's files: safetensors, PyTorch files, and TensorFlow 1 checkpoints.

Nothing is unpickled, and PyTorch and TensorFlow are imported only for their own files.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

from bert_cli.arrays import Tensors
from bert_cli.errors import CheckpointError, needs_extra
from bert_cli.files import read_json
from bert_cli.model.names import tensorflow as tensorflow_names
from bert_cli.processes import quiet_imports
from bert_cli.train import checkpoint

TORCH = "pytorch_model.bin"
# Weight files in a Hugging Face folder; the first existing file is read, as in transformers.
FILES = (checkpoint.MODEL, f"{checkpoint.MODEL}.index.json", TORCH, f"{TORCH}.index.json")
PARALLEL = "module."  # prefix of all names in a file that PyTorch's DataParallel wrote
ALL_FILES = "keep the .index and all .data files of a TensorFlow checkpoint in one folder"


class ShardIndex(BaseModel):
    """The index of weights in several files."""

    weight_map: dict[str, str]
    """Name of a weight -> name of its file, in the folder of the index."""


def read_weights(path: Path) -> Tensors:
    """Return the weights of a file or index, or of a TensorFlow checkpoint's prefix, by Hugging Face's names.

    Raises CheckpointError for a file that cannot be read or a weight that is not finite.
    """
    if path.suffix == ".json":
        return _read_shards(path)
    readers = {".bin": _read_torch, ".safetensors": checkpoint.read_tensors}
    tensors = readers.get(path.suffix, _read_tensorflow)(path)
    # Only if all have it: `module.` may be a name of its own in a model.
    if all(name.startswith(PARALLEL) for name in tensors):
        tensors = {name.removeprefix(PARALLEL): value for name, value in tensors.items()}
    for name, value in tensors.items():
        # Integer tensors are buffers of transformers, such as position_ids.
        is_weight = value.size and value.dtype.kind not in "biuc"
        fault = checkpoint.find_fault(value) if is_weight else ""
        if fault:
            raise CheckpointError(f"{path}: {name}", fault, "use another checkpoint")
    return tensors


def _read_shards(index: Path) -> Tensors:
    remedy = "copy all files of the model again"
    files = read_json(index, ShardIndex, CheckpointError, remedy).weight_map
    shards = {}
    for file in sorted(set(files.values())):
        path = index.parent / file
        if Path(file).name != file or path.suffix not in (".safetensors", ".bin"):
            problem = "is not a weight file in the folder of the index"
            raise CheckpointError(f"{index} ({file!r})", problem, remedy)
        if not path.is_file():
            raise CheckpointError(str(path), "is missing", remedy)
        shards[file] = read_weights(path)
    for name, file in files.items():
        if name not in shards[file]:
            raise CheckpointError(str(index.parent / file), f"lacks the weight {name}", remedy)
    return {name: shards[file][name] for name, file in files.items()}


def _read_torch(path: Path) -> Tensors:
    """Read PyTorch's file with its loader for tensors, which executes nothing in it."""
    try:
        import torch
    except ImportError as error:
        raise CheckpointError(
            str(path),
            f"is a PyTorch file, and reading it {needs_extra('export')}",
            "or convert it where PyTorch and transformers are installed: "
            "AutoModelForPreTraining.from_pretrained(FOLDER).save_pretrained(FOLDER)",
        ) from error
    try:
        tensors: Any = torch.load(path, map_location="cpu", weights_only=True)
        # A checkpoint of training has the weights in an entry, such as state_dict, beside the optimizer's state.
        nested = [
            entry
            for entry in (tensors, *tensors.values())
            if isinstance(entry, dict) and any(hasattr(of, "numpy") for of in entry.values())
        ]
        if len(nested) != 1:
            raise ValueError(f"{len(nested)} of its entries are weights by name: {[*tensors][:8]}")
        # NumPy has no bfloat16; float32 holds all its values.
        weights = {}
        for name, value in nested[0].items():
            if hasattr(value, "numpy"):
                if value.dtype == torch.bfloat16:
                    value = value.float()
                weights[str(name)] = value.numpy()
        return weights
    except Exception as error:  # the loader has no common exception
        problem = f"cannot be read as weights only ({_first_line(error)})"
        remedy = f"convert it to {checkpoint.MODEL} where it was written"
        raise CheckpointError(str(path), problem, remedy) from error


def tensorflow_prefix(path: Path) -> Path | None:
    """Return the prefix of the TensorFlow checkpoint that the path is or contains. Raises CheckpointError for an index.

    Of several checkpoints, the one named in TensorFlow's file `checkpoint`.
    """
    if path.is_file():
        with path.open("rb") as file:
            is_index = file.read(16) == b"SQLite format 3\0"
        if is_index:
            problem = "is an index of `bert search make`, not a model"
            raise CheckpointError(str(path), problem, "ask it with `bert search ask`")
    if not path.is_dir():
        # Users name the file that they see; TensorFlow wants the prefix.
        bare = path
        if path.suffix == ".index":
            bare = path.with_suffix("")
        if not bare.with_name(f"{bare.name}.index").is_file():
            return None
        return bare
    if (path / "config.json").is_file() and any((path / name).is_file() for name in FILES):
        return None
    prefixes = [
        index.with_suffix("")
        for index in sorted(path.glob("*.index"))
        if ".ckpt" in index.name or any(path.glob(f"{index.stem}.data-*-of-*"))
    ]
    if len(prefixes) < 2:
        if not prefixes:
            return None
        return prefixes[0]
    state = path / "checkpoint"
    try:
        text = ""
        if state.is_file():
            text = state.read_text(encoding="utf-8")
    except ValueError as error:
        raise CheckpointError(str(state), f"cannot be read ({error})", "move it away") from error
    match = re.search(r'^model_checkpoint_path: "(.*)"$', text, re.MULTILINE)
    if match:
        newest = path / Path(match[1]).name
        if newest in prefixes:
            return newest
    names = ", ".join(prefix.name for prefix in prefixes)
    problem = f"holds {len(prefixes)} checkpoints ({names})"
    raise CheckpointError(str(path), problem, "use one of them")


def _read_tensorflow(prefix: Path) -> Tensors:
    with reading_tensorflow(prefix) as tf:
        reader = tf.train.load_checkpoint(str(prefix))
        names = reader.get_variable_to_shape_map()
        # Moments are twice the size of the weights. Variables of other models are read and then refused.
        is_training = tensorflow_names.is_training
        tensors = {n: np.asarray(reader.get_tensor(n)) for n in names if not is_training(n)}
    return tensorflow_names.from_tf1(tensors, where=str(prefix))


@contextmanager
def reading_tensorflow(prefix: Path) -> Iterator[Any]:
    """Import TensorFlow, and raise its errors for damaged files as CheckpointError."""
    try:
        with quiet_imports():
            import tensorflow as tf
    except ImportError:
        problem = "is a TensorFlow checkpoint, and TensorFlow is not installed"
        remedy = "run `bert export --format hf` where TensorFlow is installed, and use that folder"
        raise CheckpointError(str(prefix), problem, remedy) from None
    try:
        yield tf
    # LookupError: raised by TensorFlow for a truncated data file.
    except (tf.errors.OpError, ValueError, RuntimeError, LookupError) as error:
        problem = f"cannot be read ({_first_line(error)})"
        raise CheckpointError(str(prefix), problem, ALL_FILES) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
