"""Where a run starts: one ordered list, and the choice is printed.

A whole checkpoint of this run, else the weights it was told to start from (a checkpoint of ours, a
Hugging Face folder or name, a TensorFlow checkpoint of Google's or Graphcore's example), else new weights
from the seed. Also what a model looks like on disk, since whatever is started is saved one day.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bert_cli.config.load import Loaded, validate
from bert_cli.config.model import BertConfig
from bert_cli.config.training import TrainSettings
from bert_cli.data.records.tokenizer import TOKENIZER_FILE, VOCAB_FILE, files_for_model
from bert_cli.errors import CheckpointError, nearest
from bert_cli.files import read_json
from bert_cli.model import hf, tf1, tf2
from bert_cli.tasks.run import weight_files
from bert_cli.tasks.run.build import Model
from bert_cli.train import checkpoint
from bert_cli.train.best import best_of
from bert_cli.train.step import State

Asked = TypeVar("Asked", bound=TrainSettings)
TF1_CONFIG = "bert_config.json"
NO_MODEL = (
    f"holds neither a checkpoint nor a model; a run's folder has step_*/, a model's its config.json and "
    f"{checkpoint.MODEL}, one of Google's {TF1_CONFIG} and bert_model.ckpt.*"
)


@dataclass(frozen=True)
class Source:
    """A model on disk that a run can start from, or a command can use."""

    folder: Path
    """Where its config and its tokenizer are."""
    described: Mapping[str, Any]
    """Its config.json."""
    where: str
    """The file that describes it, for messages."""
    weights: Path
    """The file or index of a Hugging Face folder, or the prefix of a TensorFlow checkpoint."""

    @property
    def config(self) -> BertConfig:
        """Its shape. Raises CheckpointError for a model that cannot be run here."""
        return hf.config_of(self.described, where=self.where)

    @property
    def label_names(self) -> tuple[str, ...] | None:
        """The names of a classifier's labels; None where there are none, or for regression."""
        named = self.described.get("id2label")
        if not named or self.described.get("problem_type") == "regression":
            return None
        return tuple(str(named[number]) for number in sorted(named, key=int))

    @property
    def architecture(self) -> str:
        """Transformers' name of the class."""
        return str((self.described.get("architectures") or ["?"])[0])

    def tensors(self) -> weight_files.Tensors:
        """All weights under Hugging Face's names. Raises CheckpointError where they cannot be read."""
        return weight_files.read(self.weights)


def find_source(name: str, flag: str = "--pretrained-ckpt-path") -> Source:
    """The model that a path or a name on the Hugging Face hub stands for.

    A run's folder stands for its best checkpoint, or the newest where none was chosen. Raises
    CheckpointError when there is no model.
    """
    path = Path(name).expanduser()
    prefix = weight_files.tensorflow_prefix(path)
    if prefix is not None:
        return _tensorflow_source(prefix)
    path = find_folder(name, flag)
    found = path / "config.json"
    return Source(path, _read_config(found), str(found), weight_files.find_file(path))


def _tensorflow_source(prefix: Path) -> Source:
    """A TensorFlow checkpoint with the config beside it: Google's bert_config.json or a config.json."""
    shapes = weight_files.tensorflow_shapes(prefix)
    found = prefix.parent / "config.json"
    if tf2.is_object_based(shapes):
        if not found.is_file():
            raise CheckpointError(
                f"{prefix}: is a TensorFlow 2 checkpoint without its shape; write {found} beside it, with the "
                "bert_config that it was trained with, and the tokenizer's vocab.txt"
            )
        return Source(prefix.parent, _read_config(found), str(found), prefix)
    found = prefix.parent / TF1_CONFIG
    described = {**tf1.config_of(_read_config(found)), **tf1.architecture_of(shapes)}
    return Source(prefix.parent, described, str(found), prefix)


def source_of(settings: TrainSettings) -> Source | None:
    """The model that a run starts from: what it has come to itself, else what it was given, if anything.

    Raises CheckpointError when it is not there or cannot be read.
    """
    run = settings.save_ckpt_path
    if run is not None and checkpoint.whole_checkpoints(run):
        return find_source(str(run), "--save-ckpt-path")
    if settings.pretrained_ckpt_path is not None:
        return find_source(settings.pretrained_ckpt_path)
    return None


def find_folder(name: str, flag: str) -> Path:
    """The model's folder that a path, a run's folder or a name on the hub stands for."""
    path = Path(name).expanduser()
    if not path.is_dir():
        weight_files.refuse_keras(path)
        if path.exists() or name.startswith((".", "/", "~")):
            raise CheckpointError(
                f"{flag} ({name}): is no folder; give a checkpoint or a model's name"
            )
        # A name on the hub is a word, or an owner's and a word.
        if len(name.split()) != 1 or "[" in name:
            raise CheckpointError(
                f"{flag} ({name}): is no model's name; the model is given first, then the text"
            )
        if name.count("/") > 1 or (name.count("/") == 1 and path.parent.is_dir()):
            there = [folder.name for folder in path.parent.glob("*/")]
            near = nearest(path.name, there)
            hint = f"did you mean {str(path.with_name(near))!r}?" if near else "check the path"
            raise CheckpointError(f"{flag} ({name}): no such folder; {hint}")
        return _from_hub(name, flag)
    if (path / "config.json").is_file():
        return path
    best, whole = best_of(path), checkpoint.whole_checkpoints(path)
    if best is not None or whole:
        return best or whole[-1]
    weight_files.refuse_keras(path)
    runs = sorted(run for run in path.glob("*/") if checkpoint.whole_checkpoints(run))
    told = f"is a folder of runs; give one of them, as {runs[0]}" if runs else NO_MODEL
    raise CheckpointError(f"{flag} ({path}): {told}")


def find_tokenizer(name: str) -> Path:
    """The folder of the tokenizer that `--tokenizer-path` stands for: a vocabulary's, a model's, or a name."""
    path = Path(name).expanduser()
    own = (VOCAB_FILE, TOKENIZER_FILE)
    if any((path / file).is_file() for file in own):
        return path
    return (
        path.parent
        if path.name in own and path.is_file()
        else find_folder(name, "--tokenizer-path")
    )


def _read_config(path: Path) -> dict[str, Any]:
    remedy = (
        f"a model's folder has its config.json and {checkpoint.MODEL}, one of Google's {TF1_CONFIG} and "
        "bert_model.ckpt.*"
    )
    return read_json(path, dict[str, Any], CheckpointError, remedy)


def _from_hub(name: str, flag: str) -> Path:
    # 1 s to import, so only where a model has to come from the hub.
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.txt", "model*.safetensors"]
        folder = Path(snapshot_download(name, allow_patterns=patterns))
        if not any((folder / file).is_file() for file in weight_files.FILES[:2]):
            # Older models have PyTorch's files alone.
            folder = Path(snapshot_download(name, allow_patterns=[*patterns, "pytorch_model*.bin"]))
        return folder
    except Exception as error:  # the hub's client raises a dozen kinds; all mean the same here
        raise CheckpointError(
            f"{flag} ({name}): is neither a folder nor to be had from the hub; check the name and the network"
        ) from error


def with_shape_of(settings: Asked, source: Source | None) -> Asked:
    """The settings with the shape of the model they start from, but for what they say of it themselves."""
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
    """How this model is written and read: Hugging Face's names, config and tokenizer files."""
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


def start(
    settings: TrainSettings, state: State, form: checkpoint.Format, fixed: Mapping[str, Any]
) -> str:
    """Put the first values into the state; the sentence that says where they came from.

    Raises CheckpointError when a checkpoint does not fit.
    """
    folder = settings.save_ckpt_path
    found = checkpoint.whole_checkpoints(folder) if folder is not None else []
    if found:
        checkpoint.resume(found[-1], state, form, fixed, settings.model_dump(mode="json"))
        told = f"continues from {found[-1]} (step {state.step:,})"
        saved_by = checkpoint.read_state(found[-1]).versions.get("bert_cli", "")
        schedule = settings.optimizer_opts.learning_rate.schedule_name
        if saved_by.startswith("0.1.") and schedule == "up_down":
            told += f"; it was saved by {saved_by}, and the learning rate falls to 1e-7 on the last step since 0.2.0"
        return told
    if settings.pretrained_ckpt_path is not None:
        source = find_source(settings.pretrained_ckpt_path)
        return start_from(source, settings.bert_config, state, form.config.get("id2label"))
    return f"starts with new weights from seed {settings.seed}"


def start_from(
    source: Source, config: BertConfig, state: State, labels: Mapping[str, str] | None = None
) -> str:
    """Take the weights of a model; the optimizer stays fresh. The sentence that says so.

    A classifier for other `labels` (id2label of a config.json) is left behind.
    """
    hf.check_hf_config(source.described, config, where=source.where)
    # The labels of Google's checkpoints have no names to compare.
    unnamed = Path(source.where).name == TF1_CONFIG
    same_labels = labels is None or unnamed or source.described.get("id2label") == labels
    new, left_out = put_weights(source, state.weights, same_labels=same_labels)
    told = f"starts from the weights in {source.folder} with a fresh optimizer"
    told += f"; new from the seed: {', '.join(new)}" if new else ""
    return told + (f"; left out: {', '.join(left_out)}" if left_out else "")


def put_weights(
    source: Source, weights: Mapping[str, Any], *, same_labels: bool = True
) -> tuple[list[str], list[str]]:
    """Put a model's values into the weights; the parts that it lacks, and those not wanted of it.

    Raises CheckpointError for values that are not finite or not real numbers.
    """
    shapes = _shapes(weights)
    wanted = {
        name: shape for name, shape in shapes.items() if same_labels or "/classifier/" not in name
    }
    tensors, left_out = hf.fitting(source.tensors(), wanted)
    values, new = hf.from_hf(tensors, shapes, where=str(source.weights))
    for name, value in values.items():
        if problem := checkpoint.fault_of(name, value):
            raise CheckpointError(f"{source.weights}: {name} {problem}; use another checkpoint")
        weights[name].assign(value)
    return new, left_out


def _shapes(weights: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in weights.items()}
