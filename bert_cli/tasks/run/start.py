"""Models on disk and the initial state of a run.

A run starts from its own newest complete checkpoint, else from the weights that the settings name (a checkpoint of
ours, a Hugging Face folder or name, a TensorFlow checkpoint of Google's or Graphcore's example), else from the seed.
Weights are read under Hugging Face's names; a Keras model is refused with the way to convert it. Nothing is unpickled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from bert_cli.config.embed import EmbedSettings
from bert_cli.config.load import changed
from bert_cli.config.pretrain import PretrainSettings
from bert_cli.config.settings import BertConfig
from bert_cli.config.training import BatchShape, LearningRate, TrainSettings
from bert_cli.data.finetune.embeddings import embedding_files
from bert_cli.data.records.encoder import split_word
from bert_cli.data.records.tokenizer import (
    TOKENIZER_FILE,
    VOCAB_FILE,
    TextTokenizer,
    files_for_model,
    has_tokenizer,
    read_tokenizer,
)
from bert_cli.errors import CheckpointError, ConfigError, count, nearest
from bert_cli.files import read_json, verify_checkpoint
from bert_cli.model import hf, scaling, tensorflow_names
from bert_cli.planning.layout import with_micro_batch
from bert_cli.planning.plan import decay_step
from bert_cli.tasks.run.weight_files import (
    FILES,
    Tensors,
    read_weights,
    reading_tensorflow,
    tensorflow_prefix,
)
from bert_cli.train import checkpoint
from bert_cli.train.checkpoint import best_checkpoint, checkpoint_name, complete_checkpoints
from bert_cli.train.loop import State

Settings = TypeVar("Settings", bound=TrainSettings)
# Ends of the names of tensors with a row for each piece of the vocabulary.
BY_PIECE = ("word_embeddings.weight", "predictions.bias", "decoder.weight", "decoder.bias")
KERAS = ("*.h5", "*.keras", "saved_model.pb")
TF1_CONFIG = "bert_config.json"
LARGE_FILES = (checkpoint.MODEL, checkpoint.OPTIMIZER)
MODEL_FILES = (
    f"a model's folder has config.json and {checkpoint.MODEL}, "
    f"one of Google's {TF1_CONFIG} and bert_model.ckpt.*"
)


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
    replaced: Sequence[Sequence[int]] = ()
    """For each new row of an extended vocabulary, the rows of which it is the mean."""
    first_new: int = 0
    """The first of these rows; rows after them are padding."""

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
        verify_checkpoint(self.folder, but=(checkpoint.OPTIMIZER,))
        tensors = dict(read_weights(self.weights))
        if not self.replaced:
            return tensors
        for name in (name for name in tensors if name.endswith(BY_PIECE)):
            old = tensors[name]
            first = self.first_new
            means = [old[list(rows)].mean(0, dtype=np.float32) for rows in self.replaced]
            padding = old[first + len(means) :]
            tensors[name] = np.concatenate([old[:first], np.array(means, old.dtype), padding])
        return tensors


def extended(source: Source, tokenizer: Path | None) -> Source:
    """Return the model with rows for the pieces that a folder's tokenizer has after the model's own.

    A new row of the word embeddings, and of the bias of the masked-LM head, is the mean of the rows of the pieces into
    which the model's tokenizer splits the new piece. The model is returned as it is where nothing extends it.
    """
    if tokenizer is None or not has_tokenizer(source.folder):
        return source
    own = read_tokenizer(source.folder).pieces
    pieces = read_tokenizer(tokenizer).pieces
    if len(pieces) <= len(own) or pieces[: len(own)] != own:
        return source
    ids = {piece: number for number, piece in enumerate(own)}
    longest = max(map(len, own))
    replaced = [split_word(piece, ids, longest) for piece in pieces[len(own) :]]
    rows = max(len(pieces), source.config.vocab_size)
    described = {**source.described, "vocab_size": rows}
    return replace(source, described=described, replaced=replaced, first_new=len(own))


# --- find a model


def find_source(name: str, flag: str = "--pretrained-ckpt-path") -> Source:
    """Return the model at a path or with a name on the Hugging Face hub. Raises CheckpointError if there is none.

    A run's folder means its best checkpoint, or the newest if none was scored.
    """
    prefix = tensorflow_prefix(Path(name))
    if prefix is None:
        folder = find_folder(name, flag)
        verify_checkpoint(folder, but=LARGE_FILES)  # weights are verified when they are read
        weights = next((folder / file for file in FILES if (folder / file).is_file()), None)
        if weights is None:
            _refuse_keras(folder)
            weights = folder / FILES[0]
    else:
        folder = prefix.parent
        weights = prefix
        with reading_tensorflow(prefix) as tf:
            shapes = tf.train.load_checkpoint(str(prefix)).get_variable_to_shape_map()
        if not tensorflow_names.is_object_based(shapes):
            config = folder / TF1_CONFIG
            described = tensorflow_names.config_of(_read_config(config))
            described |= tensorflow_names.architecture_of(shapes)
            return Source(folder, described, str(config), prefix)
    config = folder / "config.json"
    if prefix is not None and not config.is_file():
        where = str(prefix)
        problem = "is a TensorFlow 2 checkpoint without its shape"
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


def known_rows(settings: PretrainSettings, tokenizer: Path | None) -> int:
    """Return the rows of the word embeddings that a run's model had before its vocabulary was extended.

    Raises ConfigError where it was not.
    """
    run = settings.save_ckpt_path
    if run is not None and (checkpoints := complete_checkpoints(run)):
        return int(checkpoint.read_state(checkpoints[-1]).fixed.get("known_rows", 0))
    model = extended(find_source(str(settings.pretrained_ckpt_path)), tokenizer)
    if not model.replaced:
        problem = "has no effect on examples with the vocabulary of the model"
        raise ConfigError("new_rows_only_steps", problem, "leave it out")
    return model.first_new


def find_folder(name: str, flag: str) -> Path:
    """Return the model's folder for a path, a run's folder or a name on the hub."""
    path = Path(name)
    where = f"{flag} ({name})"
    if (path / "config.json").is_file():
        return path
    best = best_checkpoint(path)
    complete = complete_checkpoints(path)
    if best is not None or complete:
        return best or complete[-1]
    _refuse_keras(path)
    if path.is_dir():
        runs = [str(run) for run in sorted(path.glob("*/")) if complete_checkpoints(run)]
        problem = "is a folder of runs" if runs else "has neither a checkpoint nor a model"
        remedy = f"give one of them, such as {runs[0]}" if runs else MODEL_FILES
        begun = any((path / name).is_file() for name in (checkpoint.METRICS, checkpoint.SETTINGS))
        if begun and not runs:
            problem = "the run has saved no checkpoint yet"
            remedy = f"wait, or see bert runs {path}"
        raise CheckpointError(where, problem, remedy)
    if len(name.split()) != 1 or "[" in name:
        raise CheckpointError(where, "is no model's name", "give the model first, then the text")
    # A name on the hub is MODEL or OWNER/MODEL.
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if path.exists() or is_path or (name.count("/") == 1 and path.parent.is_dir()):
        near = nearest(path.name, [folder.name for folder in path.parent.glob("*/")])
        hint = f"did you mean {str(path.with_name(near))!r}?" if near else "check the path"
        raise CheckpointError(where, "no such folder", hint)
    return _download(name, where)


def find_tokenizer(name: str) -> Path:
    """Return the folder of a tokenizer for a path of a vocabulary or a model, or a name on the hub."""
    path = Path(name)
    is_file = path.name in (VOCAB_FILE, TOKENIZER_FILE) and path.is_file()
    folder = path.parent if is_file else path
    if not has_tokenizer(folder):
        folder = find_folder(name, "--tokenizer-path")
    verify_checkpoint(folder, but=LARGE_FILES)
    return folder


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
    sequences = settings.max_sequences_per_pack
    size = settings.global_batch.micro_batch_size
    masked = settings.positions_read - sequences
    batch = BatchShape(size, settings.max_seq_length, masked, sequences)
    return scaling.factors(settings.bert_config, settings.scaling, batch)


def with_shape_of(settings: Settings, source: Source | None) -> Settings:
    """Return the settings with the shape of a model, except for the fields that they set."""
    if source is None:
        return settings
    shape = source.config.model_dump() | settings.bert_config.model_dump(exclude_unset=True)
    return changed(settings, bert_config=shape)


def with_saved_micro_batch(settings: Settings) -> Settings:
    """Return settings that leave the micro-batch open with that of the run that they continue, if there is one."""
    folder = settings.save_ckpt_path
    is_open = settings.global_batch.examples_per_step is not None
    checkpoints = complete_checkpoints(folder) if folder is not None and is_open else []
    if not checkpoints:
        return settings
    # Dropout is a function of the micro-batch.
    return with_micro_batch(
        settings, checkpoint.read_state(checkpoints[-1]).fixed["micro_batch_size"]
    )


def disk_format(
    settings: TrainSettings,
    weights: Mapping[str, Any],
    tokenizer: Path | None,
    label_names: Sequence[str] | None = None,
) -> checkpoint.Format:
    """Return how a model is written and read: Hugging Face's names, config and tokenizer files."""
    shapes = _shapes(weights)
    head = settings.last_blocks[-1]
    positions = settings.bert_config.max_position_embeddings
    fills_masks = head == "heads"
    table = factors_of(settings)
    dtype = "float16" if settings.precision == "float16" and not table else "float32"
    config = hf.hf_config(settings.bert_config, dtype=dtype, head=head, label_names=label_names)
    if table:
        config["scaling"] = getattr(settings, "scaling", None)
    files = files_for_model(tokenizer, positions, fills_masks=fills_masks) if tokenizer else {}
    if isinstance(settings, EmbedSettings):
        size = settings.bert_config.hidden_size
        files |= embedding_files(settings.pooling, size, settings.max_seq_length)
    return checkpoint.Format(
        to_disk=lambda weights: hf.to_hf(scaling.folded(weights, table)),
        from_disk=lambda tensors: scaling.folded(hf.from_hf(tensors, shapes)[0], table, -1),
        config=config,
        files=files | hf.class_files(settings.bert_config),
    )


def load_state(
    settings: TrainSettings,
    state: State,
    form: checkpoint.Format,
    fixed: Mapping[str, Any],
    tokenizer: Path | None = None,
) -> str:
    """Load the initial state of a run; return where it comes from. Raises CheckpointError if it does not fit."""
    folder = settings.save_ckpt_path
    checkpoints = complete_checkpoints(folder) if folder is not None else []
    if checkpoints:
        checkpoint.resume(checkpoints[-1], state, form, fixed, settings.model_dump(mode="json"))
        return f"continues from {checkpoints[-1]} (step {state.step:,})"
    if isinstance(settings, PretrainSettings) and settings.decay_from:
        path = branch_point(settings)
        dumped = settings.model_dump(mode="json")
        checkpoint.resume(path, state, form, fixed, dumped, is_branch=True)
        return f"continues {path} with a decaying learning rate"
    if settings.pretrained_ckpt_path is not None:
        source = extended(find_source(settings.pretrained_ckpt_path), tokenizer)
        return load_pretrained(source, settings, state, form.config.get("id2label"))
    return f"starts with new weights from seed {settings.seed}"


def branch_point(settings: PretrainSettings) -> Path:
    """Return the checkpoint from which `decay_from` continues. Raises CheckpointError if there is none to decay."""
    step = int(settings.decay_from or 0)
    run = Path(str(settings.pretrained_ckpt_path))
    where = f"decay_from ({step})"
    path = run / checkpoint_name(step)
    checkpoints = complete_checkpoints(run)
    if path not in checkpoints:
        kept = ", ".join(str(checkpoint.step_of(one)) for one in checkpoints) or "no step"
        problem = f"the run in {run} has kept {kept}"
        remedy = "give its folder and such a step (keep_checkpoints and keep_every_steps keep more)"
        raise CheckpointError(where, problem, remedy)
    before = checkpoint.read_state(path).fixed
    rate = LearningRate.model_validate(before["optimizer_opts"]["learning_rate"])
    end = before.get("decay_from") or decay_step(rate, before["total_steps"])
    first = 0 if "decay_from" in before else int(rate.warmup_frac * before["total_steps"])
    if not first <= step <= end:
        problem = (
            f"the learning rate of the run in {run} is constant from step {first:,} to {end:,}"
        )
        raise CheckpointError(where, problem, "decay from such a step")
    return path


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
    new_pieces = count(len(source.replaced), "new piece")
    description += (
        f"; {new_pieces}, each starts as the mean of the pieces it replaces"
        if source.replaced
        else ""
    )
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
