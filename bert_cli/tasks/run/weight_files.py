"""Read a model's weights from every kind of file that a BERT is published in.

A Hugging Face folder holds safetensors or PyTorch's files, each one file or shards with an index; Google
and the original write TensorFlow checkpoints. Weights are returned under Hugging Face's names. A Keras
model is refused with the way to convert it. Nothing is unpickled.
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
# LookupError: TensorFlow's for a truncated data file, and ours for a missing object.
TENSORFLOW_ERRORS = (tf.errors.OpError, ValueError, RuntimeError, LookupError, DecodeError)


class ShardIndex(BaseModel):
    """The index of weights in several files."""

    weight_map: dict[str, str]
    """Name of a weight -> name of its file, in the folder of the index."""


def find_file(folder: Path) -> Path:
    """Return the file with the weights of a Hugging Face folder.

    Raises CheckpointError when there is only a Keras model.
    """
    for name in FILES:
        if (folder / name).is_file():
            return folder / name
    refuse_keras(folder)
    return folder / checkpoint.MODEL


def refuse_keras(path: Path) -> None:
    """Raise CheckpointError when the path is a Keras model or a folder that holds one."""
    if path.is_dir():
        files = [file for pattern in KERAS for file in sorted(path.glob(pattern))]
    else:
        files = [path] if path.is_file() and any(map(path.match, KERAS)) else []
    if files:
        raise CheckpointError(
            str(files[0]),
            "is a Keras model, which cannot be read",
            "load it in the program that wrote it and save a TensorFlow checkpoint with save_weights, or, for "
            "transformers' tf_model.h5, run "
            "AutoModelForPreTraining.from_pretrained(FOLDER, from_tf=True).save_pretrained(FOLDER) where "
            "transformers 4 and TensorFlow are installed",
        )


def read(path: Path) -> Tensors:
    """Return all weights of a file, an index or a TensorFlow prefix under Hugging Face's names.

    Raises CheckpointError for files that cannot be read, with the file and, of an index, the weight.
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
        path = index.parent / file
        if Path(file).name != file or path.suffix not in (".safetensors", ".bin"):
            raise CheckpointError(
                f"{index} ({file!r})", "is no file of weights in the folder of the index", remedy
            )
        if not path.is_file():
            raise CheckpointError(str(path), "is missing", remedy)
        shards[file] = read(path)
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
            f"is a file of PyTorch's, and reading it {needs_extra('export')}",
            "or convert it where PyTorch and transformers are installed: "
            "AutoModelForPreTraining.from_pretrained(FOLDER).save_pretrained(FOLDER)",
        ) from error
    try:
        tensors: Any = torch.load(path, map_location="cpu", weights_only=True)
        # NumPy has no bfloat16; float32 holds all its values.
        return {
            name: (value.float() if value.dtype == torch.bfloat16 else value).numpy()
            for name, value in tensors.items()
        }
    except Exception as error:  # the loader has no common exception
        raise CheckpointError(
            str(path),
            f"cannot be read as weights only ({_first_line(error)})",
            f"convert it to {checkpoint.MODEL} where it was written",
        ) from error


# --- TensorFlow


def tensorflow_prefix(path: Path) -> Path | None:
    """Return the prefix of the TensorFlow checkpoint that the path is or contains.

    Of several the one that TensorFlow's file `checkpoint` names, else the newest of `STEP.ckpt`, as in
    Graphcore's example. Raises CheckpointError for several other ones.
    """
    if path.is_dir():
        if (path / "config.json").is_file() and any((path / name).is_file() for name in FILES):
            return None
        prefixes = [
            index.with_suffix("")
            for index in sorted(path.glob("*.index"))
            if ".ckpt" in index.name or any(path.glob(f"{index.stem}.data-*-of-*"))
        ]
        return _newest(path, prefixes) if prefixes else None
    bare = path.with_suffix("") if path.suffix == ".index" else path
    return bare if bare.with_name(f"{bare.name}.index").is_file() else None


def _newest(folder: Path, prefixes: list[Path]) -> Path:
    if len(prefixes) == 1:
        return prefixes[0]
    try:
        state = tf.train.get_checkpoint_state(str(folder))
    except TENSORFLOW_ERRORS as error:
        raise CheckpointError(
            str(folder / "checkpoint"), f"cannot be read ({_first_line(error)})", "remove it"
        ) from error
    # By its name: the folder may have been moved.
    named = folder / Path(state.model_checkpoint_path).name if state else None
    if named in prefixes:
        return named
    if all(re.fullmatch(r"\d+\.ckpt", prefix.name) for prefix in prefixes):
        return max(prefixes, key=lambda prefix: int(prefix.stem))
    names = ", ".join(prefix.name for prefix in prefixes)
    raise CheckpointError(
        str(folder), f"holds {len(prefixes)} checkpoints ({names})", "give one of them"
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
    try:
        if tf2.is_object_based(names):
            graph = TrackableObjectGraph.FromString(reader.get_tensor(tf2.GRAPH))
            return tf2.to_hf_names(_nodes(graph), reader.get_tensor, where=str(prefix))
        # Moments are twice the size of the weights. Variables of other models are read and then refused.
        tensors = {
            name: np.asarray(reader.get_tensor(name))
            for name in names
            if not tf1.TRAINING.fullmatch(name)
        }
    except TENSORFLOW_ERRORS as error:
        raise _unreadable(prefix, error) from error
    return tf1.to_hf_names(tensors, where=str(prefix))


def _nodes(graph: TrackableObjectGraph) -> list[tf2.Node]:
    return [
        tf2.Node(
            {child.local_name: child.node_id for child in node.children},
            next((attribute.checkpoint_key for attribute in node.attributes), None),
            next((attribute.full_name for attribute in node.attributes), ""),
        )
        for node in graph.nodes
    ]


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _unreadable(prefix: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        str(prefix),
        f"cannot be read ({_first_line(error)})",
        "keep the .index and all .data files of a TensorFlow checkpoint in one folder",
    )
