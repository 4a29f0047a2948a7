"""Models on disk and the initial state of a run.

A run starts from its own newest complete checkpoint, else from the weights that the settings name (a checkpoint of
ours, a Hugging Face folder or name, a TensorFlow checkpoint of Google's or Graphcore's example), else from the seed.
Weights are read under Hugging Face's names; a Keras model is refused with the way to convert it. Nothing is unpickled.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from bert_cli.config.load import Loaded, validate
from bert_cli.config.settings import BertConfig
from bert_cli.config.training import BatchShape, PretrainSettings, TrainSettings
from bert_cli.data.records.tokenizer import (
    TOKENIZER_FILE,
    VOCAB_FILE,
    TextTokenizer,
    files_for_model,
    read_tokenizer,
)
from bert_cli.errors import CheckpointError, ConfigError, nearest, needs_extra
from bert_cli.files import read_json
from bert_cli.model import hf, scaling, tensorflow_names
from bert_cli.processes import quiet_imports
from bert_cli.train import checkpoint
from bert_cli.train.checkpoint import best_checkpoint, complete_checkpoints
from bert_cli.train.loop import State

Settings = TypeVar("Settings", bound=TrainSettings)
Tensors = Mapping[str, npt.NDArray[Any]]
TORCH = "pytorch_model.bin"
FILES = (checkpoint.MODEL, f"{checkpoint.MODEL}.index.json", TORCH, f"{TORCH}.index.json")
"""Weights in a Hugging Face folder; the first one that exists is read, as in transformers."""
KERAS = ("*.h5", "*.keras", "saved_model.pb")
TF1_CONFIG = "bert_config.json"
MODEL_FILES = (
    f"a model's folder has config.json and {checkpoint.MODEL}, "
    f"one of Google's {TF1_CONFIG} and bert_model.ckpt.*"
)
ALL_FILES = "keep the .index and all .data files of a TensorFlow checkpoint in one folder"


@dataclass(frozen=True)
class Source:
    """A model on disk."""

    folder: Path
    """The folder of its config and its tokenizer."""
    described: Mapping[str, Any]
    """The content of its config.json."""
    where: str
    """The file that describes it, for messages."""
    weights: Path
    """The file or index of a Hugging Face folder, or the prefix of a TensorFlow checkpoint."""

    @property
    def config(self) -> BertConfig:
        """Return its shape. Raises CheckpointError for a model that is not supported."""
        return hf.config_of(self.described, where=self.where)

    @property
    def label_names(self) -> tuple[str, ...] | None:
        """Return the names of a classifier's labels, None if it has none or is a regression."""
        names = self.described.get("id2label")
        if not names or self.described.get("problem_type") == "regression":
            return None
        return tuple(str(names[number]) for number in sorted(names, key=int))

    @property
    def architecture(self) -> str:
        """Return the name of its class in transformers."""
        return str((self.described.get("architectures") or ["?"])[0])

    def tensors(self) -> Tensors:
        """Return all weights by Hugging Face's names. Raises CheckpointError if they cannot be read."""
        return _read(self.weights)


class ShardIndex(BaseModel):
    """The index of weights in several files."""

    weight_map: dict[str, str]
    """Name of a weight -> name of its file, in the folder of the index."""


# --- find a model


def find_source(name: str, flag: str = "--pretrained-ckpt-path") -> Source:
    """Return the model at a path or with a name on the Hugging Face hub. Raises CheckpointError if there is none.

    A run's folder means its best checkpoint, or the newest if none was scored.
    """
    prefix = _tensorflow_prefix(Path(name).expanduser())
    if prefix is None:
        folder = find_folder(name, flag)
        weights = next((folder / file for file in FILES if (folder / file).is_file()), None)
        if weights is None:
            _refuse_keras(folder)
            weights = folder / FILES[0]
    else:
        folder, weights = prefix.parent, prefix
        with _tensorflow(prefix) as tf:
            shapes = tf.train.load_checkpoint(str(prefix)).get_variable_to_shape_map()
        if not tensorflow_names.is_object_based(shapes):
            config = folder / TF1_CONFIG
            described = tensorflow_names.config_of(_read_config(config))
            described |= tensorflow_names.architecture_of(shapes)
            return Source(folder, described, str(config), prefix)
    config = folder / "config.json"
    if prefix is not None and not config.is_file():
        where, problem = str(prefix), "is a TensorFlow 2 checkpoint without its shape"
        remedy = f"write {config} with its bert_config, and add the tokenizer's vocab.txt"
        raise CheckpointError(where, problem, remedy)
    return Source(folder, _read_config(config), str(config), weights)


def source_of(settings: TrainSettings) -> Source | None:
    """Return the model that a run starts from: its own checkpoint, else the given one; None for new weights."""
    run = settings.save_ckpt_path
    if run is not None and complete_checkpoints(run):
        return find_source(str(run), "--save-ckpt-path")
    if settings.pretrained_ckpt_path is not None:
        return find_source(settings.pretrained_ckpt_path)
    return None


def find_folder(name: str, flag: str) -> Path:
    """Return the model's folder for a path, a run's folder or a name on the hub."""
    path, where = Path(name).expanduser(), f"{flag} ({name})"
    if (path / "config.json").is_file():
        return path
    best, complete = best_checkpoint(path), complete_checkpoints(path)
    if best is not None or complete:
        return best or complete[-1]
    _refuse_keras(path)
    if path.is_dir():
        runs = [str(run) for run in sorted(path.glob("*/")) if complete_checkpoints(run)]
        problem = "is a folder of runs" if runs else "has neither a checkpoint nor a model"
        remedy = f"give one of them, as {runs[0]}" if runs else MODEL_FILES
        raise CheckpointError(where, problem, remedy)
    if len(name.split()) != 1 or "[" in name:
        raise CheckpointError(where, "is no model's name", "give the model first, then the text")
    # A name on the hub is MODEL or OWNER/MODEL.
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if path.exists() or is_path or (name.count("/") == 1 and path.parent.is_dir()):
        near = nearest(path.name, [folder.name for folder in path.parent.glob("*/")])
        hint = f"did you mean {str(path.with_name(near))!r}?" if near else "check the path"
        raise CheckpointError(where, "is no folder", hint)
    return _download(name, where)


def find_tokenizer(name: str) -> Path:
    """Return the folder of a tokenizer for a path of a vocabulary or a model, or a name on the hub."""
    path = Path(name).expanduser()
    files = (VOCAB_FILE, TOKENIZER_FILE)
    if any((path / file).is_file() for file in files):
        return path
    if path.name in files and path.is_file():
        return path.parent
    return find_folder(name, "--tokenizer-path")


def read_tokenizer_for(config: BertConfig, folder: Path) -> TextTokenizer:
    """Return the folder's tokenizer. Raises ConfigError if it has more pieces than the model's vocabulary."""
    tokenizer = read_tokenizer(folder)
    if len(tokenizer.pieces) > config.vocab_size:
        where = f"{folder} (tokenizer of {len(tokenizer.pieces):,} pieces)"
        problem = f"is too large for the model, whose vocabulary has {config.vocab_size:,}"
        raise ConfigError(where, problem, "use the model's own tokenizer")
    return tokenizer


def _read_config(path: Path) -> dict[str, Any]:
    return read_json(path, dict[str, Any], CheckpointError, MODEL_FILES)


def _download(name: str, where: str) -> Path:
    from huggingface_hub import snapshot_download  # takes 1 s

    try:
        patterns = ["*.json", "*.txt", "model*.safetensors"]
        folder = Path(snapshot_download(name, allow_patterns=patterns))
        if not any((folder / file).is_file() for file in FILES[:2]):
            # Older models have PyTorch's files alone.
            folder = Path(snapshot_download(name, allow_patterns=[*patterns, "pytorch_model*.bin"]))
        return folder
    except Exception as error:  # the hub's client raises a dozen kinds
        problem = "is neither a folder nor a model on the hub"
        raise CheckpointError(where, problem, "check the name and the network") from error


def _refuse_keras(path: Path) -> None:
    files = [file for pattern in KERAS for file in sorted(path.glob(pattern))]
    if path.is_file() and any(map(path.match, KERAS)):
        files = [path]
    if files:
        raise CheckpointError(
            str(files[0]),
            "is a Keras model, which cannot be read",
            "load it in the program that wrote it and save a TensorFlow checkpoint with save_weights, or, for "
            "transformers' tf_model.h5, run "
            "AutoModelForPreTraining.from_pretrained(FOLDER, from_tf=True).save_pretrained(FOLDER) where "
            "transformers 4 and TensorFlow are installed",
        )


# --- the initial state


def factors_of(settings: TrainSettings) -> scaling.Table:
    """Return the factors of Unit Scaling, none without it."""
    if not isinstance(settings, PretrainSettings) or settings.scaling is None:
        return {}
    sequences, size = settings.max_sequences_per_pack, settings.global_batch.micro_batch_size
    masked = settings.positions_read - sequences
    batch = BatchShape(size, settings.max_seq_length, masked, sequences)
    return scaling.factors(settings.bert_config, settings.scaling, batch)


def with_shape_of(settings: Settings, source: Source | None) -> Settings:
    """Return the settings with the shape of a model, except for the fields that they set."""
    if source is None:
        return settings
    given = settings.model_dump(exclude_unset=True, by_alias=True)
    shape = source.config.model_dump() | given.get("bert_config", {})
    return validate(type(settings), Loaded({**given, "bert_config": shape}, {}))


def disk_format(
    settings: TrainSettings,
    weights: Mapping[str, Any],
    tokenizer: Path | None,
    label_names: Sequence[str] | None = None,
) -> checkpoint.Format:
    """Return how a model is written and read: Hugging Face's names, config and tokenizer files."""
    shapes, head = _shapes(weights), settings.LAST_BLOCKS[-1]
    positions, fills_masks = settings.bert_config.max_position_embeddings, head == "heads"
    table = factors_of(settings)
    dtype = "float16" if settings.precision == "float16" and not table else "float32"
    config = hf.hf_config(settings.bert_config, dtype=dtype, head=head, label_names=label_names)
    if table:
        config["scaling"] = getattr(settings, "scaling", None)
    files = files_for_model(tokenizer, positions, fills_masks=fills_masks) if tokenizer else {}
    return checkpoint.Format(
        to_disk=lambda weights: hf.to_hf(scaling.folded(weights, table)),
        from_disk=lambda tensors: scaling.folded(hf.from_hf(tensors, shapes)[0], table, -1),
        config=config,
        files=files | hf.class_files(settings.bert_config),
    )


def load_state(
    settings: TrainSettings, state: State, form: checkpoint.Format, fixed: Mapping[str, Any]
) -> str:
    """Load the initial state of a run; return where it comes from. Raises CheckpointError if it does not fit."""
    folder = settings.save_ckpt_path
    checkpoints = complete_checkpoints(folder) if folder is not None else []
    if checkpoints:
        checkpoint.resume(checkpoints[-1], state, form, fixed, settings.model_dump(mode="json"))
        return f"continues from {checkpoints[-1]} (step {state.step:,})"
    if settings.pretrained_ckpt_path is not None:
        source = find_source(settings.pretrained_ckpt_path)
        return load_pretrained(source, settings, state, form.config.get("id2label"))
    return f"starts with new weights from seed {settings.seed}"


def load_pretrained(
    source: Source, settings: TrainSettings, state: State, labels: Mapping[str, str] | None = None
) -> str:
    """Load the weights of a model and return a description; the optimizer stays new.

    A classifier for other `labels` (id2label of a config.json) is left out.
    """
    hf.check_hf_config(source.described, settings.bert_config, where=source.where)
    scaling.check_trained_with(source.described, getattr(settings, "scaling", None), source.where)
    # Labels of Google's checkpoints have no names to compare.
    is_unnamed = Path(source.where).name == TF1_CONFIG
    same_labels = labels is None or is_unnamed or source.described.get("id2label") == labels
    table = factors_of(settings)
    new, left_out = load_weights(source, state.weights, same_labels=same_labels, table=table)
    description = f"starts from the weights in {source.folder} with a fresh optimizer"
    trained = source.described.get("scaling")
    description += f"; trained with scaling {trained}" if trained else ""
    description += f"; new from the seed: {', '.join(new)}" if new else ""
    return description + (f"; left out: {', '.join(left_out)}" if left_out else "")


def load_weights(
    source: Source,
    weights: Mapping[str, Any],
    *,
    same_labels: bool = True,
    table: scaling.Table | None = None,
) -> tuple[list[str], list[str]]:
    """Load a model's weights; return the parts that it lacks and those that were left out."""
    shapes = _shapes(weights)
    wanted = {n: shape for n, shape in shapes.items() if same_labels or "/classifier/" not in n}
    tensors, left_out = hf.fitting(source.tensors(), wanted)
    values, new = hf.from_hf(tensors, shapes, where=str(source.weights))
    for name, value in scaling.folded(values, table or {}, -1).items():
        if fault := checkpoint.find_fault(name, value):
            raise CheckpointError(f"{source.weights}: {name}", fault, "use another checkpoint")
        weights[name].assign(value)
    return new, left_out


def _shapes(weights: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in weights.items()}


# --- read weights


def _read(path: Path) -> Tensors:
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
            problem = "is no file of weights in the folder of the index"
            raise CheckpointError(f"{index} ({file!r})", problem, remedy)
        if not path.is_file():
            raise CheckpointError(str(path), "is missing", remedy)
        shards[file] = _read(path)
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
        problem = f"cannot be read as weights only ({_first_line(error)})"
        remedy = f"convert it to {checkpoint.MODEL} where it was written"
        raise CheckpointError(str(path), problem, remedy) from error


def _tensorflow_prefix(path: Path) -> Path | None:
    """Return the prefix of the TensorFlow checkpoint that the path is or contains.

    Of several the one that has the name in TensorFlow's file `checkpoint`, else the newest of Graphcore's `STEP.ckpt`.
    """
    if not path.is_dir():
        bare = path.with_suffix("") if path.suffix == ".index" else path
        return bare if bare.with_name(f"{bare.name}.index").is_file() else None
    if (path / "config.json").is_file() and any((path / name).is_file() for name in FILES):
        return None
    prefixes = [
        index.with_suffix("")
        for index in sorted(path.glob("*.index"))
        if ".ckpt" in index.name or any(path.glob(f"{index.stem}.data-*-of-*"))
    ]
    if len(prefixes) < 2:
        return prefixes[0] if prefixes else None
    state = path / "checkpoint"
    try:
        text = state.read_text(encoding="utf-8") if state.is_file() else ""
    except ValueError as error:
        raise CheckpointError(str(state), f"cannot be read ({error})", "remove it") from error
    match = re.search(r'^model_checkpoint_path: "(.*)"$', text, re.MULTILINE)
    if match and (named := path / Path(match[1]).name) in prefixes:
        return named
    if all(re.fullmatch(r"\d+\.ckpt", prefix.name) for prefix in prefixes):
        return max(prefixes, key=lambda prefix: int(prefix.stem))
    names = ", ".join(prefix.name for prefix in prefixes)
    problem = f"holds {len(prefixes)} checkpoints ({names})"
    raise CheckpointError(str(path), problem, "give one of them")


def _read_tensorflow(prefix: Path) -> Tensors:
    with _tensorflow(prefix) as tf:
        reader = tf.train.load_checkpoint(str(prefix))
        names = reader.get_variable_to_shape_map()
        if tensorflow_names.is_object_based(names):
            from tensorflow.core.protobuf.trackable_object_graph_pb2 import TrackableObjectGraph

            graph = TrackableObjectGraph.FromString(reader.get_tensor(tensorflow_names.GRAPH))
            nodes = [
                tensorflow_names.Node(
                    {child.local_name: child.node_id for child in node.children},
                    next((attribute.checkpoint_key for attribute in node.attributes), None),
                    next((attribute.full_name for attribute in node.attributes), ""),
                )
                for node in graph.nodes
            ]
            return tensorflow_names.from_tf2(nodes, reader.get_tensor, where=str(prefix))
        # Moments are twice the size of the weights. Variables of other models are read and then refused.
        is_training = tensorflow_names.TRAINING.fullmatch
        tensors = {n: np.asarray(reader.get_tensor(n)) for n in names if not is_training(n)}
    return tensorflow_names.from_tf1(tensors, where=str(prefix))


@contextmanager
def _tensorflow(prefix: Path) -> Iterator[Any]:
    """Import TensorFlow and turn what it raises for damaged files into a CheckpointError."""
    try:
        with quiet_imports():
            import tensorflow as tf
        from google.protobuf.message import DecodeError
    except ImportError:
        problem = "is a TensorFlow checkpoint, and TensorFlow is not installed"
        remedy = "run `bert export` with --format hf on it where it is, and give that folder"
        raise CheckpointError(str(prefix), problem, remedy) from None
    try:
        yield tf
    # LookupError: TensorFlow's for a truncated data file, and ours for a missing object.
    except (tf.errors.OpError, ValueError, RuntimeError, LookupError, DecodeError) as error:
        problem = f"cannot be read ({_first_line(error)})"
        raise CheckpointError(str(prefix), problem, ALL_FILES) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
