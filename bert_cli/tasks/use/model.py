"""A model from disk as functions of columns, which `bert predict` runs and `bert export` converts.

It has the blocks of training without a loss, dropout or gradients, on one device, for any number of examples
and positions. The task decides which blocks follow the encoder; a part that the task needs must be in the
file.

Shapes: B examples, S positions, P masked positions, D hidden size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from bert_cli.config.settings import BertConfig
from bert_cli.errors import ConfigError
from bert_cli.model.bert import build_blocks, named_weights
from bert_cli.tasks.run import start

Columns = Mapping[str, Any]

ARCHITECTURES = {
    "BertForPreTraining": "fill-mask",
    "BertForMaskedLM": "fill-mask",
    "BertForQuestionAnswering": "question-answering",
    "BertForSequenceClassification": "text-classification",
    "BertForTokenClassification": "token-classification",
    "BertModel": "embed",
}
"""Class of transformers -> its task."""


@dataclass(frozen=True)
class Head:
    """The blocks after the encoder."""

    blocks: tuple[str, ...]
    needs: tuple[str, ...] = ()
    """Parts that must be in the file; others may be new where the task does not read them."""


HEADS = {
    "fill-mask": Head(("enc_out", "pool", "heads"), ("heads/masked_lm",)),
    "question-answering": Head(("qa_head",), ("qa_head",)),
    "text-classification": Head(("pool", "glue_head"), ("glue_head", "pool")),
    "token-classification": Head(("token_head",), ("token_head",)),
    "embed": Head(()),
    # An encoder for export.
    "encoder": Head(("pool",)),
}


@dataclass(frozen=True)
class Opened:
    """A model with its weights, ready to run."""

    source: start.Source
    config: BertConfig
    blocks: Sequence[tuple[str, keras.layers.Layer]]
    new: tuple[str, ...]
    """Parts that the file lacks."""

    @property
    def label_names(self) -> tuple[str, ...] | None:
        """Return the names of a classifier's labels; None for regression, which has one output."""
        labels = labels_of(self.source)
        if labels == 1 or self.source.described.get("problem_type") == "regression":
            return None
        return self.source.label_names or tuple(f"LABEL_{number}" for number in range(labels))

    def hidden(self, columns: Columns) -> Any:
        """Return the encoder's output [B, S, D] from `input_ids`, `segment_ids` and `input_mask` [B, S]."""
        hidden: Any = None
        for name, block in self.blocks:
            if name == "emb" or name.startswith("hid_"):
                hidden = block(hidden, columns, None)
        return hidden

    def logits(self, columns: Columns) -> Any:
        """Return the head's logits, float32; fill-mask reads `masked_lm_positions` [B, P] too."""
        *body, (_, head) = self.blocks
        hidden: Any = None
        for _, block in body:
            hidden = block(hidden, columns, None)
        return head.logits(hidden, None)


def task_of(source: start.Source, wanted: str | None) -> str:
    """Return the task that the model is used for. ConfigError for one that it was not trained for."""
    known = "embed" if source.architecture == "?" else ARCHITECTURES.get(source.architecture)
    if known is None:
        where = f"{source.where} (architecture {source.architecture})"
        raise ConfigError(where, "is not supported", f"give one of {', '.join(ARCHITECTURES)}")
    if wanted is not None and wanted not in (known, "embed"):
        problem = f"{source.folder} is a {source.architecture}, which is for {known}"
        remedy = f"leave out --task, or give a model that was trained for {wanted}"
        raise ConfigError(f"task ({wanted})", problem, remedy)
    return wanted or known


def labels_of(source: start.Source) -> int:
    """Return the outputs of a classifier: two if the config has no number, as in transformers."""
    named = source.described.get("id2label")
    return len(named) if named else int(source.described.get("num_labels") or 2)


def open_model(source: start.Source, task: str, precision: str = "float32") -> Opened:
    """Build the model for a task and load the file's weights.

    CheckpointError when the weights do not fit, ConfigError when the head is not among them.
    """
    config, head = source.config, HEADS[task]
    blocks = build_blocks(
        config, seed=0, policy=precision, last_blocks=head.blocks, labels=labels_of(source)
    )
    new, _ = start.load_weights(source, named_weights(blocks))
    lacking = [part for part in head.needs if part in new]
    if lacking:
        problem = f"has no {' and no '.join(lacking)} of its shape, so it cannot be used for {task}"
        where = f"{source.folder} ({source.architecture})"
        raise ConfigError(where, problem, "give a model that was trained for it")
    return Opened(source, config, blocks, tuple(new))


def one_device() -> str:
    """Use the first GPU, or the CPU, and return which; GPU memory grows on demand."""
    gpus = tf.config.list_physical_devices("GPU")[:1]
    try:
        tf.config.set_visible_devices(gpus, "GPU")
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)
    except RuntimeError:
        pass  # TensorFlow is initialized already
    return "GPU" if gpus else "CPU"


def signature(*names: str) -> dict[str, tf.TensorSpec]:
    """Return int32 columns with any number of examples and positions: one trace for all of them."""
    return {name: tf.TensorSpec([None, None], tf.int32, name=name) for name in names}
