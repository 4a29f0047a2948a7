"""Models on disk or on the hub: find one by its path or name, and read its shape, tokenizer and weights.

A model is a checkpoint of ours, a Hugging Face folder or name, or a TensorFlow checkpoint of Google's or Graphcore's
example. Weights are read under Hugging Face's names; a Keras model is refused with the way to convert it. Nothing is
unpickled.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from pydantic import PositiveInt, field_validator

from bert_cli.arrays import Shape
from bert_cli.data.finetune.embeddings import read_embedding
from bert_cli.data.finetune.features import Features
from bert_cli.data.finetune.labels import read_decision
from bert_cli.data.finetune.squad_windows import WindowSizes, read_window_sizes
from bert_cli.data.tokens import hub
from bert_cli.data.tokens.notation import TOKENIZER_FILE, WORDPIECE
from bert_cli.data.tokens.tokenizer import VOCAB_FILE, TextTokenizer, TokenizerFolder, has_tokenizer
from bert_cli.disk import size_of
from bert_cli.errors import CheckpointError, ConfigError, nearest
from bert_cli.facts.bert import BertConfig
from bert_cli.facts.heads import SEVERAL_LABELS
from bert_cli.files import JSONObject, read_json, verify_checkpoint
from bert_cli.model.arithmetic import scaling
from bert_cli.model.names import hf, published
from bert_cli.model.names import tensorflow as tensorflow_names
from bert_cli.parallel.engine import Weight
from bert_cli.tasks.model.weight_files import (
    FILES,
    Tensors,
    read_weights,
    reading_tensorflow,
    tensorflow_prefix,
)
from bert_cli.train import checkpoint
from bert_cli.train.checkpoint import Folder, Saved, complete_checkpoints

KERAS = ("*.h5", "*.keras", "saved_model.pb")
GRAPH = "model.onnx"
EXPORTS = (GRAPH, "model.tflite")
TF1_CONFIG = "bert_config.json"
LARGE_FILES = (checkpoint.MODEL, checkpoint.OPTIMIZER)
MODEL_FILES = (
    f"use a folder with config.json and {checkpoint.MODEL}, "
    f"or one of Google's with {TF1_CONFIG} and bert_model.ckpt.*"
)


class ModelClass(WindowSizes):
    """The entries of a config.json that name a model's class, its outputs and its windows."""

    model_type: str = "bert"
    architectures: list[str] | None = None
    problem_type: str | None = None
    num_labels: PositiveInt | None = None
    id2label: dict[int, object] | None = None
    text_column: list[str] | None = None
    """Columns of the table on which an export was trained."""

    @field_validator("id2label")
    @classmethod
    def _is_complete(cls, labels: dict[int, object] | None) -> dict[int, object] | None:
        names = {str(name) for name in (labels or {}).values()}
        if {*(labels or {})} != {*range(len(names))}:
            raise ValueError(f"{labels} are not different names with the numbers 0, 1, 2 and so on")
        return labels


@dataclass(frozen=True)
class Source:
    """A model on disk."""

    folder: Path
    """The folder with config.json and the tokenizer."""
    described: JSONObject
    """The content of config.json, as BERT's for a model type that is read as a BERT."""
    where: str
    """The file that describes the model, for messages."""
    weights: Path
    """The file or index of a Hugging Face folder, or the prefix of a TensorFlow checkpoint."""
    replaced: Sequence[Sequence[int]] = ()
    """The rows whose mean initializes each new row of an extended vocabulary."""
    first_new: int = 0
    """Number of the first new row; rows after the new rows are padding."""
    temperature: float = 1.0
    """Divisor of a classifier's logits, and so of the weights of its last layer."""
    stored: JSONObject = field(default_factory=dict)
    """The content of config.json as its owner wrote it, if it is a Hugging Face folder."""

    @cached_property
    def tokenizer(self) -> TokenizerFolder:
        """The tokenizer of the model."""
        return TokenizerFolder(self.folder)

    @property
    def config(self) -> BertConfig:
        """Return the shape of the model. Raises CheckpointError for a model that is not supported."""
        return hf.config_of(self.described, where=self.where)

    @property
    def fingerprint(self) -> str:
        """Return a digest of all weights."""
        digest = hashlib.sha256()
        for name, values in sorted(self.tensors().items()):
            digest.update(name.encode() + np.ascontiguousarray(values).tobytes())
        return digest.hexdigest()[:16]

    @property
    def label_names(self) -> tuple[str, ...] | None:
        """Return the names of a classifier's labels, None if it has none or is a regression."""
        names = self.described.get("id2label")
        if not names or self.described.get("problem_type") == "regression":
            return None
        return tuple(str(names[number]) for number in sorted(names, key=int))

    @property
    def window_sizes(self) -> dict[str, int]:
        """Return the sizes of the windows in which the model reads long texts, empty if it was trained without."""
        if "doc_stride" not in self.described:
            return {}
        return {n: self.described[n] for n in WindowSizes.model_fields if n in self.described}

    @property
    def has_several_labels(self) -> bool:
        """Return whether a text may have several of a classifier's labels."""
        return self.described.get("problem_type") == SEVERAL_LABELS

    @property
    def architecture(self) -> str:
        """Return the name of the model's class in transformers."""
        return str(self.described["architectures"][0])

    @property
    def exported(self) -> Path | None:
        """Return the file of an export for another runtime, if there is one instead of weights."""
        files: Iterable[Path] = ()
        if not self.weights.is_file():
            files = map(self.folder.joinpath, EXPORTS)
        return next(filter(Path.is_file, files), None)

    def read_weights(self) -> Tensors:
        """Return the weights of the files, by Hugging Face's names for a BERT."""
        return published.bert_tensors(read_weights(self.weights), self.stored)

    def tensors(self) -> Tensors:
        """Return all weights by Hugging Face's names. Raises CheckpointError if they cannot be read."""
        path = self.exported
        if path:
            problem = "is an export, which only its runtime can run, and for its task alone"
            raise CheckpointError(str(path), problem, "use the model that it was exported from")
        verify_checkpoint(self.folder, but=(checkpoint.OPTIMIZER,))
        tensors = dict(self.read_weights())
        if self.temperature != 1.0:
            for name in ("classifier.weight", "classifier.bias"):
                tensors[name] = (tensors[name] / self.temperature).astype(tensors[name].dtype)
        if not self.replaced:
            return tensors
        ends = hf.vocabulary_tensors(self.config)
        for name in (name for name in tensors if name.endswith(ends)):
            old = tensors[name]
            first = self.first_new
            means = [old[list(rows)].mean(0, dtype=np.float32) for rows in self.replaced]
            # Rows that the model had beyond its pieces keep their number; the new pieces take the first of them.
            padding = old[first + len(means) :]
            tensors[name] = np.concatenate([old[:first], np.array(means, old.dtype), padding])
        return tensors


def as_trained(source: Source) -> Source:
    """Return a model with what its folder and its run's say of its use: the temperature, the sizes of its windows."""
    folder = source.folder  # that of an average has the settings of its run
    described = {
        **source.described,
        **(read_window_sizes(folder) or read_window_sizes(folder.parent)),
    }
    temperature = read_decision(source.folder).temperature
    return replace(source, described=described, temperature=temperature)


def check_segments(config: BertConfig, examples: Features) -> None:
    """Raise ConfigError for examples of two texts and a model with one segment type."""
    has_one = "type_vocab_size" in type(config).model_fields and config.type_vocab_size == 1
    if has_one and examples.segments.any():
        problem = "a pair of texts, or a question with its context, needs two segment types"
        remedy = "use another model, or join the texts of a pair into one"
        raise ConfigError("bert_config.type_vocab_size (1)", problem, remedy)


def labels_problem(source: Source, *, several: bool) -> str:
    """Return what is wrong with a model of one label per text for rows with several, or with the reverse, else ""."""
    if source.has_several_labels == several:
        return ""
    if several:
        return "was trained for one label per text, but these rows have several labels"
    return "was trained for several labels per text, but these rows have one label"


def extended(source: Source, tokenizer: TokenizerFolder) -> Source:
    """Return the model with rows for the pieces that a tokenizer has after the model's pieces.

    A new row of the word embeddings, and of the bias of the masked-LM head, is the mean of the rows of the pieces into
    which the model's tokenizer splits the new piece. Without new pieces the model is returned unchanged.
    """
    if not has_tokenizer(source.folder):
        return source
    theirs = source.tokenizer.tokenizer
    known = theirs.pieces
    pieces = tokenizer.tokenizer.pieces
    if len(pieces) <= len(known) or pieces[: len(known)] != known:
        return source
    new = pieces[len(known) :]
    if theirs.notation is WORDPIECE:
        split = theirs.library.model.tokenize  # a piece with its ##
        replaced = [[token.id for token in split(piece)] for piece in new]
    else:
        texts = [theirs.notation.shown(piece) for piece in new]
        encodings = theirs.library.encode_batch_fast(texts, add_special_tokens=False)
        replaced = [encoding.ids for encoding in encodings]
    rows = max(len(pieces), source.config.vocab_size)
    described = {**source.described, "vocab_size": rows}
    return replace(source, described=described, replaced=replaced, first_new=len(known))


def load_weights(
    source: Source,
    weights: Mapping[str, Weight],
    *,
    same_labels: bool = True,
    table: scaling.Table | None = None,
) -> tuple[list[str], list[str]]:
    """Load a model's weights; return the parts that it lacks and the parts that were left out."""
    shapes = shapes_of(weights)
    needed = {n: shape for n, shape in shapes.items() if same_labels or "/classifier/" not in n}
    config = source.config
    tensors, left_out = hf.fitting(source.tensors(), needed, config)
    values, new = hf.from_hf(tensors, shapes, config, where=str(source.weights))
    for name, value in scaling.folded(values, table or {}, -1).items():
        fault = checkpoint.find_fault(value)  # such as integers
        if fault:
            raise CheckpointError(f"{source.weights}: {name}", fault, "use another checkpoint")
        weights[name].assign(value)
    return new, left_out


def shapes_of(weights: Mapping[str, Weight]) -> dict[str, Shape]:
    """Return the shape of each weight."""
    return {name: tuple(weight.shape) for name, weight in weights.items()}


# --- find a model


def find_source(
    name: str, flag: str = "--pretrained-ckpt-path", saved: Saved | None = None
) -> Source:
    """Return the model at a path or with a name on the Hugging Face hub.

    Raises CheckpointError if there is none, or if its files mean more than this tool applies.

    A run's folder means its best checkpoint, or the newest checkpoint if none was scored; what `saved` has read of it
    is not read again.
    """
    prefix = tensorflow_prefix(Path(name))
    folder = find_folder(name, flag) if prefix is None else prefix.parent
    if prefix is None:
        # Weights are verified when they are read.
        if saved is not None and saved.path == folder:
            saved.verify(but=LARGE_FILES)
        else:
            verify_checkpoint(folder, but=LARGE_FILES)
        weights = next((folder / file for file in FILES if (folder / file).is_file()), None)
        if weights is None:
            _refuse_keras(folder)
            weights = folder / FILES[0]
        where = folder / "config.json"
        read_json(where, ModelClass, CheckpointError, "copy it from the model again")
        stored = _read_config(where)
        described = published.bert_config(stored)
    else:
        with reading_tensorflow(prefix) as tf:
            shapes = tf.train.load_checkpoint(str(prefix)).get_variable_to_shape_map()
        if tensorflow_names.is_object_based(shapes):
            problem = "is an object checkpoint of TensorFlow 2"
            remedy = "export it to Hugging Face's format with the tool that wrote it"
            raise CheckpointError(str(prefix), problem, remedy)
        where = folder / TF1_CONFIG
        weights = prefix
        stored = {}
        described = tensorflow_names.config_of(_read_config(where))
        described |= tensorflow_names.architecture_of(shapes)
    source = Source(folder, described, str(where), weights, stored=stored)
    config = source.config  # raises an error for sizes that do not fit each other
    # At a byte a weight, less than any format takes: a config.json of another model is noticed before gigabytes are
    # allocated.
    least = config.embedding_weights + config.num_hidden_layers * config.layer_weights
    size = size_of(filter(Path.is_file, source.folder.iterdir()))
    if least > size:
        problem = f"describes {least:,} weights, but all files beside it have only {size:,} bytes"
        raise CheckpointError(source.where, problem, "copy the model again")
    read_embedding(source.folder)
    if not source.described.get("architectures"):
        entries = hf.class_of(source.read_weights(), config)
        source = replace(source, described={**source.described, **entries})
    return source


def find_folder(name: str, flag: str) -> Path:
    """Return the model's folder for a path, a run's folder or a name on the hub."""
    path = Path(name)
    where = f"{flag} ({name})"
    if (path / "config.json").is_file():
        return path
    run = Folder(path)
    newest = run.newest
    if newest:
        return run.best_checkpoint or newest.path
    _refuse_keras(path)
    if path.is_dir():
        runs = [str(run) for run in sorted(path.glob("*/")) if complete_checkpoints(run)]
        problem = "has neither a checkpoint nor a model"
        remedy = MODEL_FILES
        if runs:
            problem = "is a folder of runs"
            remedy = f"name one of them, such as {runs[0]}"
        begun = any((path / name).is_file() for name in (checkpoint.METRICS, checkpoint.SETTINGS))
        if begun and not runs:
            problem = "the run has saved no checkpoint yet"
            remedy = f"wait, or see bert runs {path}"
        raise CheckpointError(where, problem, remedy)
    if len(name.split()) != 1 or "[" in name:
        raise CheckpointError(where, "is not a model name", "write the model first, then the text")
    # A name on the hub is MODEL or OWNER/MODEL.
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if path.exists() or is_path or (name.count("/") == 1 and path.parent.is_dir()):
        near = nearest(path.name, [folder.name for folder in path.parent.glob("*/")])
        hint = "check the path"
        if near:
            hint = f"did you mean {str(path.with_name(near))!r}?"
        raise CheckpointError(where, "no such folder", hint)
    return _download(name, where)


def find_tokenizer(name: str) -> Path:
    """Return the folder of a tokenizer for a path of a vocabulary or a model, or a name on the hub."""
    path = Path(name)
    is_file = path.name in (VOCAB_FILE, TOKENIZER_FILE) and path.is_file()
    folder = path
    if is_file:
        folder = path.parent
    if not has_tokenizer(folder):
        folder = find_folder(name, "--tokenizer-path")
    verify_checkpoint(folder, but=LARGE_FILES)
    return folder


def read_tokenizer_for(config: BertConfig, folder: TokenizerFolder) -> TextTokenizer:
    """Return the folder's tokenizer. Raises ConfigError if it has more pieces than the model's vocabulary."""
    tokenizer = folder.tokenizer
    if len(tokenizer.pieces) > config.vocab_size:
        where = f"{folder.folder} (tokenizer of {len(tokenizer.pieces):,} pieces)"
        problem = f"is too large for the model, whose vocabulary has {config.vocab_size:,}"
        raise ConfigError(where, problem, "use the model's own tokenizer")
    return tokenizer


def _read_config(path: Path) -> JSONObject:
    return read_json(path, JSONObject, CheckpointError, MODEL_FILES)


def _download(name: str, where: str) -> Path:
    def has_weights(folder: Path, files: Sequence[str] = FILES) -> bool:
        return any((folder / file).is_file() for file in files)

    try:
        patterns = ["*.json", "*.txt", "model*.safetensors"]
        folder = hub.download(name, patterns, has_weights)
        if not has_weights(folder, FILES[:2]):
            # Older models have PyTorch's files alone.
            folder = hub.download(name, [*patterns, "pytorch_model*.bin"], has_weights)
        return folder
    except ConnectionError as error:
        problem = "is neither a folder nor in the hub's cache, and the hub cannot be reached"
        raise CheckpointError(
            where, problem, "check the path, the network and HF_HUB_OFFLINE"
        ) from error
    except Exception as error:  # the hub's client raises a dozen kinds
        problem = "is neither a folder nor a model on the hub"
        raise CheckpointError(where, problem, "check the path or name, and the network") from error


def _refuse_keras(path: Path) -> None:
    files: list[Path] = []
    for pattern in KERAS:
        files += sorted(path.glob(pattern))
    if path.is_file() and any(map(path.match, KERAS)):
        files = [path]
    if files:
        raise CheckpointError(
            str(files[0]),
            "is a model of Keras or TensorFlow, which cannot be read",
            "use the model that it was exported from, or load it in the program that wrote it and save a TensorFlow "
            "checkpoint with save_weights, or, for "
            "transformers' tf_model.h5, run "
            "AutoModelForPreTraining.from_pretrained(FOLDER, from_tf=True).save_pretrained(FOLDER) where "
            "transformers 4 and TensorFlow are installed",
        )
