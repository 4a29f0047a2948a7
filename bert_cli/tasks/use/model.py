"""A model from disk as functions of columns: what `bert predict` runs and `bert export` converts.

It is the blocks of training without a head's loss, without dropout and without gradients, on one
device and with whatever number of examples and places comes. Which blocks follow the encoder is the
task's choice; a part that the task cannot do without has to be in the file.

Shapes: B examples, S places, P masked places, D model width, L labels, V words.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from bert_cli.config.model import BertConfig
from bert_cli.errors import ConfigError
from bert_cli.model.bert import build_blocks, named_weights
from bert_cli.tasks.run import start

Columns = Mapping[str, Any]

# What a class of transformers' is for, and the architectures that stand for it.
ARCHITECTURES = {
    "BertForPreTraining": "fill-mask",
    "BertForMaskedLM": "fill-mask",
    "BertForQuestionAnswering": "question-answering",
    "BertForSequenceClassification": "text-classification",
    "BertForTokenClassification": "token-classification",
    "BertModel": "embed",
}


@dataclass(frozen=True)
class Head:
    """What follows the encoder."""

    blocks: tuple[str, ...]
    needs: str | None
    """The part that has to be in the file; others may be new where the task does not read them."""


HEADS = {
    "fill-mask": Head(("enc_out", "pool", "heads"), "heads/masked_lm"),
    "question-answering": Head(("qa_head",), "qa_head"),
    "text-classification": Head(("pool", "glue_head"), "glue_head"),
    "token-classification": Head(("token_head",), "token_head"),
    "embed": Head((), None),
    # What a bare encoder is exported as.
    "encoder": Head(("pool",), None),
}


@dataclass(frozen=True)
class Opened:
    """A model with its weights, ready to run."""

    source: start.Source
    config: BertConfig
    blocks: Sequence[tuple[str, keras.layers.Layer]]
    new: tuple[str, ...]
    """Parts of it that the file lacks."""

    @property
    def label_names(self) -> tuple[str, ...] | None:
        """Names of a classifier's labels; None for regression, which has one output."""
        labels = labels_of(self.source)
        if labels == 1 or self.source.described.get("problem_type") == "regression":
            return None
        return self.source.label_names or tuple(f"LABEL_{number}" for number in range(labels))

    def hidden(self, columns: Columns) -> Any:
        """The encoder's output [B, S, D] from `input_ids`, `segment_ids` and `input_mask` [B, S]."""
        hidden: Any = None
        for name, block in self.blocks:
            if name == "emb" or name.startswith("hid_"):
                hidden = block(hidden, columns, None)
        return hidden

    def logits(self, columns: Columns) -> Any:
        """What the head gives, float32; with `masked_lm_positions` [B, P] too where it fills masks."""
        *body, (_, head) = self.blocks
        hidden: Any = None
        for _, block in body:
            hidden = block(hidden, columns, None)
        return head.logits(hidden, None)


def task_of(source: start.Source, asked: str | None) -> str:
    """The task that the model is used for. ConfigError for one that it was not trained for."""
    known = ARCHITECTURES.get(source.architecture)
    if source.architecture == "?":
        known = "embed"
    if known is None:
        raise ConfigError(
            f"{source.where} (architecture {source.architecture}): is not known here; give one of "
            f"{', '.join(ARCHITECTURES)}"
        )
    if asked is not None and asked not in (known, "embed"):
        raise ConfigError(
            f"task ({asked}): {source.folder} is a {source.architecture}, which is for {known}; leave out "
            f"--task, or give a model that was trained for {asked}"
        )
    return asked or known


def labels_of(source: start.Source) -> int:
    """Outputs of a classifier: two where the config is silent, as in transformers."""
    named = source.described.get("id2label")
    return len(named) if named else int(source.described.get("num_labels") or 2)


def open_model(source: start.Source, task: str, precision: str = "float32") -> Opened:
    """Build the model for a task and put the file's weights into it.

    Raises CheckpointError when the weights do not fit, ConfigError when the head is not among them.
    """
    config, head = source.config, HEADS[task]
    blocks = build_blocks(
        config, seed=0, policy=precision, last_blocks=head.blocks, labels=labels_of(source)
    )
    new, _ = start.load_weights(source, named_weights(blocks))
    wanted = [head.needs] if head.needs else []
    if task == "text-classification":
        wanted.append("pool")
    lacking = [part for part in wanted if part in new]
    if lacking:
        raise ConfigError(
            f"{source.folder} ({source.architecture}): has no {' and no '.join(lacking)} of its shape, so it "
            f"cannot be used for {task}; give a model that was trained for it"
        )
    return Opened(source, config, blocks, tuple(new))


def one_device() -> str:
    """Take the first GPU, or the CPU, and say which; memory is taken as it is needed."""
    gpus = tf.config.list_physical_devices("GPU")[:1]
    try:
        tf.config.set_visible_devices(gpus, "GPU")
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)
    except RuntimeError:
        pass  # TensorFlow runs already, in a process that has done something before
    return "GPU" if gpus else "CPU"


def signature(*names: str) -> dict[str, tf.TensorSpec]:
    """Columns of whole numbers with any number of examples and places: one trace for all of them."""
    return {name: tf.TensorSpec([None, None], tf.int32, name=name) for name in names}
