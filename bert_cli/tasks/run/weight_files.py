"""Read a model's weights from every kind of file that a BERT is published in.

A Hugging Face folder holds safetensors or PyTorch's files, each whole or in shards with an index; Google
and the original write TensorFlow checkpoints. Everything is returned under Hugging Face's names. A Keras
model is recognised and refused with the way to convert it. Nothing here unpickles anything.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from google.protobuf.message import DecodeError
from pydantic import BaseModel
from tensorflow.core.protobuf.trackable_object_graph_pb2 import TrackableObjectGraph

from bert_cli.errors import CheckpointError, needs_extra
from bert_cli.files import read_json
from bert_cli.model import tf1, tf2
from bert_cli.train import checkpoint

Tensors = Mapping[str, npt.NDArray[Any]]
TORCH = "pytorch_model.bin"
FILES = (checkpoint.MODEL, f"{checkpoint.MODEL}.index.json", TORCH, f"{TORCH}.index.json")
"""Weights in a Hugging Face folder; the first one that exists is read, as in transformers."""
KERAS = ("*.h5", "*.keras", "saved_model.pb")
# LookupError: TensorFlow's for a data file that ends too early, and ours for an object that is not there.
TENSORFLOW_ERRORS = (tf.errors.OpError, ValueError, RuntimeError, LookupError, DecodeError)


class ShardIndex(BaseModel):
    """The index of weights in several files."""

    weight_map: dict[str, str]
    """Name of a weight -> name of the file beside the index that holds it."""


def find_file(folder: Path) -> Path:
    """Return the file with the weights of a Hugging Face folder.

    Raises CheckpointError when only a Keras model is there.
    """
    found = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if found is None:
        refuse_keras(folder)
    return found or folder / checkpoint.MODEL


def refuse_keras(path: Path) -> None:
    """Raise CheckpointError when the path is a Keras model or a folder that holds one."""
    if path.is_dir():
        found = next((file for pattern in KERAS for file in sorted(path.glob(pattern))), None)
    else:
        found = path if path.is_file() and any(map(path.match, KERAS)) else None
    if found is not None:
        raise CheckpointError(
            f"{found}: is a Keras model, which is not read here; load it in the program that wrote it and save a "
            "TensorFlow checkpoint with save_weights, or, for transformers' tf_model.h5, run "
            "AutoModelForPreTraining.from_pretrained(FOLDER, from_tf=True).save_pretrained(FOLDER) where "
            "transformers 4 and TensorFlow are installed"
        )


def read(path: Path) -> Tensors:
    """Return all weights of a file, an index or a TensorFlow prefix under Hugging Face's names.

    Raises CheckpointError for what cannot be read, naming the file and, of an index, the weight.
    """
    if path.suffix == ".json":
        return _read_shards(path)
    if path.suffix == ".bin":
        return _read_torch(path)
    if path.suffix == ".safetensors":
        return checkpoint.read_tensors(path)
    return _read_tensorflow(path)


def _read_shards(index: Path) -> Tensors:
    remedy = "copy all files of the model again"
    files = read_json(index, ShardIndex, CheckpointError, remedy).weight_map
    shards: dict[str, Tensors] = {}
    for file in sorted(set(files.values())):
        if Path(file).name != file or Path(file).suffix not in (".safetensors", ".bin"):
            raise CheckpointError(
                f"{index} ({file!r}): is no file of weights in the index's own folder; {remedy}"
            )
        if not (index.parent / file).is_file():
            raise CheckpointError(f"{index.parent / file}: is missing; {remedy}")
        shards[file] = read(index.parent / file)
    for name, file in files.items():
        if name not in shards[file]:
            raise CheckpointError(f"{index.parent / file}: lacks the weight {name}; {remedy}")
    return {name: shards[file][name] for name, file in files.items()}


def _read_torch(path: Path) -> Tensors:
    """Read PyTorch's file with its loader for tensors alone, which executes nothing of it."""
    try:
        import torch
    except ImportError as error:
        raise CheckpointError(
            f"{path}: is a file of PyTorch's, and reading it {needs_extra('export')}, or convert it where PyTorch "
            "and transformers are installed: "
            "AutoModelForPreTraining.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        ) from error
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
        # NumPy has no bfloat16; float32 holds all its values.
        return {
            name: (value.float() if value.dtype == torch.bfloat16 else value).numpy()
            for name, value in found.items()
        }
    except Exception as error:  # the loader raises what lies below it raises
        raise CheckpointError(
            f"{path}: cannot be read as weights alone ({_first_line(error)}); convert it to "
            f"{checkpoint.MODEL} where it was written"
        ) from error


# --- TensorFlow


def tensorflow_prefix(path: Path) -> Path | None:
    """Return the prefix of the TensorFlow checkpoint that the path is or that lies in it.

    Of several the one that TensorFlow's file `checkpoint` names, else the newest of `STEP.ckpt`, as
    Graphcore's example writes them. Raises CheckpointError for others.
    """
    if path.is_dir():
        if (path / "config.json").is_file() and any((path / name).is_file() for name in FILES):
            return None
        found = [
            index
            for index in sorted(path.glob("*.index"))
            if ".ckpt" in index.name or any(path.glob(f"{index.stem}.data-*-of-*"))
        ]
        return _newest(path, [index.with_suffix("") for index in found]) if found else None
    bare = path.with_suffix("") if path.suffix == ".index" else path
    return bare if bare.with_name(f"{bare.name}.index").is_file() else None


def _newest(folder: Path, prefixes: list[Path]) -> Path:
    if len(prefixes) == 1:
        return prefixes[0]
    try:
        state = tf.train.get_checkpoint_state(str(folder))
    except TENSORFLOW_ERRORS as error:
        raise CheckpointError(
            f"{folder / 'checkpoint'}: cannot be read ({_first_line(error)}); remove it"
        ) from error
    # By its name alone: the folder may have been moved since.
    named = folder / Path(state.model_checkpoint_path).name if state else None
    if named in prefixes:
        return named
    if all(re.fullmatch(r"\d+\.ckpt", prefix.name) for prefix in prefixes):
        return max(prefixes, key=lambda prefix: int(prefix.stem))
    names = ", ".join(prefix.name for prefix in prefixes)
    raise CheckpointError(
        f"{folder}: holds {len(prefixes)} checkpoints ({names}); give one of them"
    )


def tensorflow_shapes(prefix: Path) -> dict[str, list[int]]:
    """Return the shape of each variable. Raises CheckpointError when it cannot be read."""
    shapes: dict[str, list[int]] = _open(prefix).get_variable_to_shape_map()
    return shapes


def _open(prefix: Path) -> Any:
    try:
        return tf.train.load_checkpoint(str(prefix))
    except TENSORFLOW_ERRORS as error:
        raise _unreadable(prefix, error) from error


def _read_tensorflow(prefix: Path) -> Tensors:
    reader = _open(prefix)
    names = reader.get_variable_to_shape_map()
    is_tf2 = tf2.is_object_based(names)
    try:
        if is_tf2:
            graph = TrackableObjectGraph.FromString(reader.get_tensor(tf2.GRAPH))
            return tf2.to_hf_names(_nodes(graph), reader.get_tensor, where=str(prefix))
        # Moments are twice the size of the weights; variables of other models are read to be named.
        found = {
            name: np.asarray(reader.get_tensor(name))
            for name in names
            if not tf1.BESIDE.fullmatch(name)
        }
    except TENSORFLOW_ERRORS as error:
        raise _unreadable(prefix, error) from error
    return tf1.to_hf_names(found, where=str(prefix))


def _nodes(graph: TrackableObjectGraph) -> list[tf2.Node]:
    return [
        tf2.Node(
            {child.local_name: child.node_id for child in node.children},
            next((found.checkpoint_key for found in node.attributes), None),
            next((found.full_name for found in node.attributes), ""),
        )
        for node in graph.nodes
    ]


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _unreadable(prefix: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{prefix}: cannot be read ({_first_line(error)}); a TensorFlow checkpoint has "
        "its .index and all its .data files side by side"
    )
