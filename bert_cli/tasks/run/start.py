"""Models on disk and the initial state of a run.

A run starts from the first of these: its own newest complete checkpoint; the weights that the settings
name (a checkpoint of ours, a Hugging Face folder or name, a TensorFlow checkpoint of Google's or
Graphcore's example); new weights from the seed. The choice is printed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bert_cli.config.load import Loaded, validate
from bert_cli.config.settings import BertConfig
from bert_cli.config.training import TrainSettings
from bert_cli.data.records.tokenizer import TOKENIZER_FILE, VOCAB_FILE, files_for_model
from bert_cli.errors import CheckpointError, nearest
from bert_cli.files import read_json
from bert_cli.model import hf, tf1, tf2
from bert_cli.tasks.run import weight_files
from bert_cli.tasks.run.build import Model
from bert_cli.train import checkpoint
from bert_cli.train.folder import best_checkpoint, complete_checkpoints
from bert_cli.train.step import State

Settings = TypeVar("Settings", bound=TrainSettings)
TF1_CONFIG = "bert_config.json"
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

    def tensors(self) -> weight_files.Tensors:
        """Return all weights by Hugging Face's names. Raises CheckpointError if they cannot be read."""
        return weight_files.read(self.weights)


def find_source(name: str, flag: str = "--pretrained-ckpt-path") -> Source:
    """Return the model at a path or with a name on the Hugging Face hub.

    A run's folder means its best checkpoint, or the newest if none was scored. Raises CheckpointError
    when there is no model.
    """
    path = Path(name).expanduser()
    prefix = weight_files.tensorflow_prefix(path)
    if prefix is not None:
        return _tensorflow_source(prefix)
    path = find_folder(name, flag)
    config = path / "config.json"
    return Source(path, _read_config(config), str(config), weight_files.find_file(path))


def _tensorflow_source(prefix: Path) -> Source:
    """Return a TensorFlow checkpoint with the config in its folder: bert_config.json or config.json."""
    shapes = weight_files.tensorflow_shapes(prefix)
    config = prefix.parent / "config.json"
    if tf2.is_object_based(shapes):
        if not config.is_file():
            raise CheckpointError(
                str(prefix),
                "is a TensorFlow 2 checkpoint without its shape",
                f"write {config} with the bert_config that it was trained with, and the tokenizer's vocab.txt",
            )
        return Source(prefix.parent, _read_config(config), str(config), prefix)
    config = prefix.parent / TF1_CONFIG
    described = {**tf1.config_of(_read_config(config)), **tf1.architecture_of(shapes)}
    return Source(prefix.parent, described, str(config), prefix)


def source_of(settings: TrainSettings) -> Source | None:
    """Return the model that a run starts from: its own checkpoint, else the given one; None for new weights.

    Raises CheckpointError when it is absent or cannot be read.
    """
    run = settings.save_ckpt_path
    if run is not None and complete_checkpoints(run):
        return find_source(str(run), "--save-ckpt-path")
    if settings.pretrained_ckpt_path is not None:
        return find_source(settings.pretrained_ckpt_path)
    return None


def find_folder(name: str, flag: str) -> Path:
    """Return the model's folder for a path, a run's folder or a name on the hub."""
    path = Path(name).expanduser()
    if not path.is_dir():
        return _find_on_hub(name, path, flag)
    if (path / "config.json").is_file():
        return path
    best, complete = best_checkpoint(path), complete_checkpoints(path)
    if best is not None or complete:
        return best or complete[-1]
    weight_files.refuse_keras(path)
    runs = sorted(run for run in path.glob("*/") if complete_checkpoints(run))
    if runs:
        raise CheckpointError(
            f"{flag} ({path})", "is a folder of runs", f"give one of them, as {runs[0]}"
        )
    raise CheckpointError(
        f"{flag} ({path})",
        "has neither a checkpoint nor a model",
        f"a run's folder has step_*/, {MODEL_FILES}",
    )


def _find_on_hub(name: str, path: Path, flag: str) -> Path:
    """Download a model, or raise CheckpointError for a name that is more likely a wrong path."""
    weight_files.refuse_keras(path)
    where = f"{flag} ({name})"
    if path.exists() or name.startswith((".", "/", "~")):
        raise CheckpointError(where, "is no folder", "give a checkpoint or a model's name")
    # A name on the hub is MODEL or OWNER/MODEL.
    if len(name.split()) != 1 or "[" in name:
        raise CheckpointError(where, "is no model's name", "give the model first, then the text")
    if name.count("/") > 1 or (name.count("/") == 1 and path.parent.is_dir()):
        near = nearest(path.name, [folder.name for folder in path.parent.glob("*/")])
        hint = f"did you mean {str(path.with_name(near))!r}?" if near else "check the path"
        raise CheckpointError(where, "no such folder", hint)
    return _download(name, flag)


def find_tokenizer(name: str) -> Path:
    """Return the folder of a tokenizer for a path of a vocabulary or a model, or a name on the hub."""
    path = Path(name).expanduser()
    files = (VOCAB_FILE, TOKENIZER_FILE)
    if any((path / file).is_file() for file in files):
        return path
    if path.name in files and path.is_file():
        return path.parent
    return find_folder(name, "--tokenizer-path")


def _read_config(path: Path) -> dict[str, Any]:
    return read_json(path, dict[str, Any], CheckpointError, MODEL_FILES)


def _download(name: str, flag: str) -> Path:
    # 1 s to import.
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.txt", "model*.safetensors"]
        folder = Path(snapshot_download(name, allow_patterns=patterns))
        if not any((folder / file).is_file() for file in weight_files.FILES[:2]):
            # Older models have PyTorch's files alone.
            folder = Path(snapshot_download(name, allow_patterns=[*patterns, "pytorch_model*.bin"]))
        return folder
    except Exception as error:  # the hub's client raises a dozen kinds
        raise CheckpointError(
            f"{flag} ({name})",
            "is neither a folder nor a model on the hub",
            "check the name and the network",
        ) from error


def with_shape_of(settings: Settings, source: Source | None) -> Settings:
    """Return the settings with the shape of a model, except for the fields that they set."""
    if source is None:
        return settings
    given = settings.model_dump(exclude_unset=True, by_alias=True)
    shape = source.config.model_dump() | given.get("bert_config", {})
    return validate(type(settings), Loaded({**given, "bert_config": shape}, {}))


def disk_format(
    settings: TrainSettings,
    model: Model,
    tokenizer_folder: Path | None,
    label_names: Sequence[str] | None = None,
) -> checkpoint.Format:
    """Return how a model is written and read: Hugging Face's names, config and tokenizer files."""
    shapes, head = _shapes(model.weights), settings.LAST_BLOCKS[-1]
    positions = settings.bert_config.max_position_embeddings
    return checkpoint.Format(
        to_disk=hf.to_hf,
        from_disk=lambda tensors: hf.from_hf(tensors, shapes)[0],
        config=hf.hf_config(
            settings.bert_config,
            dtype="float16" if settings.precision == "float16" else "float32",
            head=head,
            label_names=label_names,
        ),
        tokenizer_files=files_for_model(tokenizer_folder, positions, fills_masks=head == "heads")
        if tokenizer_folder
        else {},
    )


def load_state(
    settings: TrainSettings, state: State, form: checkpoint.Format, fixed: Mapping[str, Any]
) -> str:
    """Load the initial state of a run and return a description of where it comes from.

    Raises CheckpointError when a checkpoint does not fit.
    """
    folder = settings.save_ckpt_path
    checkpoints = complete_checkpoints(folder) if folder is not None else []
    if checkpoints:
        newest = checkpoints[-1]
        checkpoint.resume(newest, state, form, fixed, settings.model_dump(mode="json"))
        description = f"continues from {newest} (step {state.step:,})"
        version = checkpoint.read_state(newest).versions.get("bert_cli", "")
        schedule = settings.optimizer_opts.learning_rate.schedule_name
        if version.startswith("0.1.") and schedule == "up_down":
            description += f"; it was saved by {version}, and "
            description += "the learning rate falls to 1e-7 on the last step since 0.2.0"
        return description
    if settings.pretrained_ckpt_path is not None:
        source = find_source(settings.pretrained_ckpt_path)
        return load_pretrained(source, settings.bert_config, state, form.config.get("id2label"))
    return f"starts with new weights from seed {settings.seed}"


def load_pretrained(
    source: Source, config: BertConfig, state: State, labels: Mapping[str, str] | None = None
) -> str:
    """Load the weights of a model and return a description; the optimizer stays new.

    A classifier for other `labels` (id2label of a config.json) is left out.
    """
    hf.check_hf_config(source.described, config, where=source.where)
    # Labels of Google's checkpoints have no names to compare.
    is_unnamed = Path(source.where).name == TF1_CONFIG
    same_labels = labels is None or is_unnamed or source.described.get("id2label") == labels
    new, left_out = load_weights(source, state.weights, same_labels=same_labels)
    description = f"starts from the weights in {source.folder} with a fresh optimizer"
    description += f"; new from the seed: {', '.join(new)}" if new else ""
    return description + (f"; left out: {', '.join(left_out)}" if left_out else "")


def load_weights(
    source: Source, weights: Mapping[str, Any], *, same_labels: bool = True
) -> tuple[list[str], list[str]]:
    """Load a model's weights; return the parts that it lacks and those that were left out.

    Raises CheckpointError for values that are not finite or not real numbers.
    """
    shapes = _shapes(weights)
    wanted = {
        name: shape for name, shape in shapes.items() if same_labels or "/classifier/" not in name
    }
    tensors, left_out = hf.fitting(source.tensors(), wanted)
    values, new = hf.from_hf(tensors, shapes, where=str(source.weights))
    for name, value in values.items():
        if fault := checkpoint.find_fault(name, value):
            raise CheckpointError(f"{source.weights}: {name}", fault, "use another checkpoint")
        weights[name].assign(value)
    return new, left_out


def _shapes(weights: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in weights.items()}
