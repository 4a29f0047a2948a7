"""A model from disk, and the code that predictions for all tasks share.

The model has the blocks of training without a loss, dropout or gradients, on one device. A prediction turns a list of
inputs into their rows, in the same order; inside, inputs of similar length go through the model together.
Probabilities are computed from the logits in float32.

Shapes: n inputs, T tokens of all inputs, B examples, S positions, P masked positions, D hidden size, V vocabulary size.
"""

import json
import os
import re
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from bert_cli.arrays import Bools, Floats32, Ints32
from bert_cli.config.use import PredictSettings
from bert_cli.data.finetune import embeddings
from bert_cli.data.finetune.features import Features, by_length, encode_texts, outputs_of
from bert_cli.data.finetune.labels import DECISION, Decision, read_decision
from bert_cli.data.tokens.tokenizer import TextTokenizer
from bert_cli.errors import ConfigError, DeviceError, absent_package
from bert_cli.facts.architectures import ARCHITECTURES, head_of_class
from bert_cli.facts.bert import BertConfig
from bert_cli.facts.heads import LAST_BLOCKS, Head, heads
from bert_cli.files import JSONObject
from bert_cli.model.names import hf
from bert_cli.processes import quiet_imports
from bert_cli.progress import TerminalBar
from bert_cli.tasks.model import models

# Name of an input in transformers -> the column of a batch.
INPUTS = {"input_ids": "input_ids", "attention_mask": "input_mask", "token_type_ids": "segment_ids"}
FOREIGN_CODE = ("auto_map", "custom_pipelines")
UNLIMITED = 2**31 - 1
TRUNCATED = "truncated"  # key of an answer to a text that was too long
NONE = "none"  # the label of a text where the model is not sure enough
Columns = Mapping[str, Any]
Row = JSONObject


def inputs_of(config: BertConfig) -> list[str]:
    """Return the inputs of a model in transformers; one without segments has no token_type_ids."""
    return [name for name in INPUTS if name != "token_type_ids" or config.type_vocab_size > 1]


@dataclass(frozen=True)
class OpenedModel:
    """A model with its weights, ready to run."""

    source: models.Source
    blocks: Sequence[tuple[str, Any]]
    """Layers of Keras; none if another runtime computes."""
    new: Sequence[str]
    """Parts of the model that the file lacks."""
    head: Head | None
    """The last of the blocks; None for an encoder."""
    runtime: str = ""
    """What computes instead of blocks."""

    @property
    def ops(self) -> Any:
        """Return the operations on its outputs."""
        from keras import ops

        return ops

    @property
    def is_compiled(self) -> bool:
        """Return whether each shape of a batch is compiled."""
        return not self.runtime and backend() == "jax"

    @property
    def architecture(self) -> str:
        """Return transformers' class for the weights in the file."""
        architecture = self.source.architecture
        if self.head is None:
            return architecture
        prefix = ARCHITECTURES[self.source.config.architecture].hf_prefix
        classes = [prefix + name for name in self.head.hf_classes]
        if len(classes) > 1 and architecture == classes[0]:
            return classes[bool(self.new)]
        return architecture

    @property
    def label_names(self) -> tuple[str, ...] | None:
        """Return the names of a classifier's labels; None for regression, which has one output."""
        labels = labels_of(self.source)
        if labels == 1 or self.source.described.get("problem_type") == "regression":
            return None
        return self.source.label_names or tuple(f"LABEL_{number}" for number in range(labels))

    @cached_property
    def decision(self) -> Decision:
        """How its logits become answers."""
        return read_decision(self.source.folder)

    @property
    def has_bio_labels(self) -> bool:
        """Return whether the labels of words are entity labels: O, B-type, I-type."""
        names = self.label_names
        return names is not None and all(re.fullmatch(r"O|[BI]-.+", name) for name in names)

    def hidden(self, columns: Columns) -> Any:
        """Return the encoder's output [B, S, D] from `input_ids`, `segment_ids` and `input_mask` [B, S]."""
        hidden: Any = None
        for name, block in self.blocks:
            if name not in LAST_BLOCKS:
                hidden = block(hidden, columns, None)
        return hidden

    def logits(self, columns: Columns) -> Any:
        """Return the head's logits, float32; fill-mask reads `masked_lm_positions` [B, P] too."""
        *body, (_, head) = self.blocks
        hidden: Any = None
        for _, block in body:
            hidden = block(hidden, columns, None)
        return head.logits(hidden, None)


def task_of(source: models.Source, requested: str | None) -> str:
    """Return the task of a prediction. Raises ConfigError for a task that the model was not trained for."""
    head = head_of(source)
    if head is None:
        where = f"{source.where} (architecture {source.architecture})"
        names = chain.from_iterable(head.hf_classes for head in heads())
        classes = dict.fromkeys(names)
        raise ConfigError(where, "is not supported", f"use one of {', '.join(classes)}")
    known = head.task
    is_for_any = requested not in [head.task for head in heads() if head.needs]
    if not is_for_any and requested != known:
        problem = f"{source.folder} is a {source.architecture}, a model for {known}"
        remedy = f"leave out --task, or use a model that was trained for {requested}"
        raise ConfigError(f"task ({requested})", problem, remedy)
    return requested or known


def head_of(source: models.Source) -> Head | None:
    """Return the head of a model by its class, None for an unknown class."""
    return head_of_class(source.architecture)


def head_for(source: models.Source, task: str) -> Head | None:
    """Return the model's head if the task reads it, None for a task that reads the encoder's output."""
    head = head_of(source)
    if head and head.needs and head.task == task:
        return head
    return None


def write_model_files(source: models.Source, architecture: str, folder: Path) -> None:
    """Write the files of a Hugging Face folder but its weights: config, tokenizer, pooling and classes.

    Entries that make transformers run the code of the model's owner are left out.
    """
    entries = {name: v for name, v in source.described.items() if name not in FOREIGN_CODE}
    described = entries | hf.class_entries(source.config, architecture)
    (folder / "config.json").write_text(json.dumps(described, indent=2), encoding="utf-8")
    head = head_of_class(architecture)
    fills_masks = head is not None and head.fills_masks
    files = source.tokenizer.for_model(source.config, fills_masks=fills_masks)
    files |= embeddings.stored_files(source.folder)
    if read_decision(source.folder).thresholds:  # a temperature is in the weights
        files[DECISION] = (source.folder / DECISION).read_bytes()
    for name, content in {**files, **hf.class_files(source.config, head)}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def labels_of(source: models.Source) -> int:
    """Return the number of outputs of a classifier: two if the config has no number, as in transformers."""
    labels = source.described.get("id2label")
    if labels:
        return len(labels)
    return int(source.described.get("num_labels") or 2)


def open_model(
    source: models.Source,
    task: str,
    precision: str = "float32",
    without_head: Sequence[str] = (),
    *,
    uses_library: bool = False,
) -> OpenedModel:
    """Build the model for a task and load the file's weights.

    For a task without a head, the blocks `without_head` follow the encoder layers. With `uses_library` it has
    `LibraryOperations`. Raises CheckpointError if the weights do not fit, ConfigError if the head is not among them.
    """
    backend()
    from bert_cli.model.arithmetic.operations import PLAIN, LibraryOperations
    from bert_cli.model.build import Outputs, build_blocks, named_weights
    from bert_cli.parallel.devices import keep_freed_memory

    head = head_for(source, task)
    if head and head.is_per_position and head.has_label_names and labels_of(source) == 1:
        where = f"{source.where} (id2label {source.described.get('id2label')})"
        raise ConfigError(where, "names one label, which every word has", "use another model")
    last_blocks = head.last_blocks if head else without_head
    operations = LibraryOperations() if uses_library else PLAIN
    blocks = build_blocks(
        source.config,
        seed=None,  # the file has all weights that are read
        policy=precision,
        last_blocks=last_blocks,
        operations=operations,
        outputs=Outputs(labels_of(source)),
    )
    if uses_library:
        keep_freed_memory()
    new, _ = models.load_weights(source, named_weights(blocks))
    lacking = [part for part in head.needs if part in new] if head else []
    if lacking:
        problem = f"has no {' and no '.join(lacking)} of the right shape, so it cannot do {task}"
        where = f"{source.folder} ({source.architecture})"
        raise ConfigError(where, problem, "use a model that was trained for the task")
    return OpenedModel(source, blocks, new, head)


def backend() -> str:
    """Return the framework of Keras, which takes seconds to load. Raises ConfigError if it is not installed."""
    try:
        with quiet_imports():
            import keras
    except ModuleNotFoundError as error:
        engine = os.environ.get("KERAS_BACKEND", "tensorflow")
        raise absent_package(error, f"engine ({engine})") from None
    return str(keras.config.backend())


def one_device() -> str:
    """Use the first GPU or TPU, or the CPU, and return which; GPU memory grows on demand."""
    if backend() == "jax":
        import jax

        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        return jax.default_backend().upper()
    import tensorflow as tf

    # One is enough for a prediction, and the others stay free.
    gpus = tf.config.list_physical_devices("GPU")[:1]
    with suppress(RuntimeError):  # TensorFlow is initialized already
        tf.config.set_visible_devices(gpus, "GPU")
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)
    return "GPU" if gpus else "CPU"


# --- predictions


@dataclass(frozen=True)
class Input:
    """An input and where it comes from."""

    where: str
    fields: Mapping[str, str]
    columns: Mapping[str, Any] | None = None
    """The columns of its row but for a context, if it comes from a table or a JSON line."""
    taken: Container[str] = ()
    """The columns of all rows of the file."""

    @property
    def shown(self) -> Mapping[str, Any]:
        """Return what its answer repeats: its columns or its fields, but for a context."""
        return self.columns or {n: t for n, t in self.fields.items() if n != "context"}


@dataclass
class AnsweredInputs:
    """How many of a command's inputs are answered before a call, and how many it has; by default it has all."""

    done: int = 0
    inputs: int = 0
    total: int = 0

    def move(self, done: int, inputs: int, total: int) -> None:
        """Say that the next call has `inputs`, after those that are done."""
        self.done = done
        self.inputs = inputs
        self.total = total


@dataclass(frozen=True)
class Predictor:
    """A model with the tokenizer and settings of a task; each task has a class, which its head's record names."""

    FIELDS: ClassVar[tuple[str, ...]] = ("text",)
    """Fields of an input."""
    OPTIONAL: ClassVar[tuple[str, ...]] = ()
    """Fields that an input may have."""
    SETTINGS: ClassVar[tuple[str, ...]] = ()
    """Settings with an effect on this task and not on every task."""
    COLUMNS: ClassVar[tuple[str, ...]] = ("input_ids", "segment_ids", "input_mask")
    """Columns that `outputs` reads."""
    EMPTY: ClassVar[Row] = {}
    """Keys of an answer without values."""
    COMPARES: ClassVar[bool] = False
    """Whether TEXT is compared with the other texts, so that all are answered at once."""

    model: OpenedModel
    tokenizer: TextTokenizer
    settings: PredictSettings
    max_seq_length: int
    progress: AnsweredInputs = field(default_factory=AnsweredInputs, compare=False)

    @classmethod
    def read_defaults(cls, source: models.Source, settings: PredictSettings) -> JSONObject:
        """Return values from the model's folder for settings that are not given, and maybe a max_seq_length."""
        names = ("max_seq_length", "doc_stride")
        return {name: n for name, n in source.window_sizes.items() if name in names}

    @classmethod
    def check(cls, item: Input) -> None:
        """Raise DataError for an input without a prediction."""

    def answer(self, inputs: Sequence[Input]) -> list[Row]:
        """Return the row of each input. Raises DeviceError for outputs that are not finite."""
        raise NotImplementedError

    def empty_answer(self) -> Row:
        """Return the answer to an empty text."""
        return self.EMPTY

    def outputs(self, columns: Columns) -> Any:
        """Return the model's outputs for the columns of a batch."""
        return self.model.logits(columns)

    def more_columns(self, input_ids: Ints32) -> Columns:
        """Return the columns of a batch that not every task has."""
        return {}

    @cached_property
    def traced(self) -> Any:
        """`outputs` of columns [B, S]: TensorFlow traces once for all shapes, JAX compiles for each."""
        if self.model.runtime:
            return self.outputs
        if self.model.is_compiled:
            import jax
            import keras

            from bert_cli.model.build import named_weights

            weights = list(named_weights(self.model.blocks).values())

            def run(values: Sequence[Any], columns: Columns) -> Any:
                # As arguments: XLA would compile weights in the closure as constants.
                with keras.StatelessScope(state_mapping=zip(weights, values, strict=True)):
                    return self.outputs(columns)

            return partial(jax.jit(run), [weight.value for weight in weights])
        import tensorflow as tf

        shapes = {name: tf.TensorSpec([None, None], tf.int32, name=name) for name in self.COLUMNS}
        return tf.function(partial(self.outputs), input_signature=[shapes], autograph=False)

    def batches(self, features: Features, where: Sequence[str]) -> Iterator[tuple[Any, Any, Any]]:
        """Yield examples of similar length: their numbers, padded columns and outputs. A terminal shows the progress.

        Raises DeviceError, naming the first example by `where` [examples], for outputs that are not finite.
        """
        models.check_segments(self.model.source.config, features)
        examples = len(features)
        before = self.progress
        total = before.total or examples
        inputs = before.inputs or examples
        size = self.settings.batch_size
        shape = None
        if self.model.is_compiled:
            shape = (min(size, examples), self.max_seq_length)

        def predict(batch: Columns) -> Sequence[Any]:
            columns = {**batch, **self.more_columns(batch["input_ids"])}
            results = self.traced({name: columns[name] for name in self.COLUMNS})
            if isinstance(results, tuple | list):
                return results
            return [results]

        read = 0
        batches = by_length(features, size)
        with TerminalBar(sys.stderr, f"{total:,} texts", total, before.done) as bar:
            # A single batch is over before a bar would be drawn.
            bar.shown &= total > size
            for numbers, columns, outputs in outputs_of(features, batches, predict, shape):
                finite = np.isfinite(outputs[0]).reshape(len(numbers), -1).all(axis=1)
                if not finite.all():
                    raise DeviceError(
                        where[int(numbers[np.argmin(finite)])],
                        "the model's outputs are not finite",
                        "check its weights, or choose a higher precision",
                    )
                yield numbers, columns, outputs
                read += len(numbers)
                # Windows of long texts, in proportion: batches go by length, not by text.
                done = before.done + read * inputs // examples
                bar.show(f"{done:,} of {total:,} texts", done)

    def of_texts(self, inputs: Sequence[Input]) -> tuple[Floats32, Bools]:
        """Return the outputs [n, ...] of texts or pairs, and a mask [n] of truncated inputs."""
        features, is_cut = self.encoded(inputs)
        where = [item.where for item in inputs]
        if features.owner is not None:  # several windows of a long text
            where = [where[number] for number in features.owner]
        outputs = self.of_examples(features, where)
        return features.by_text(outputs), is_cut

    def encoded(self, inputs: Sequence[Input]) -> tuple[Features, Bools]:
        """Return the examples of texts or pairs, and a mask [n] of truncated inputs."""
        first = [item.fields["text"] for item in inputs]
        second = [item.fields.get("second", "") for item in inputs]
        encode = partial(encode_texts, self.tokenizer, first, second, {})
        return encode(max_seq_length=self.max_seq_length, doc_stride=self.settings.doc_stride)

    def of_examples(self, features: Features, where: Sequence[str]) -> Floats32:
        """Return the outputs [n, L] of examples, or [T, L] of their positions; `where` as in `batches`."""
        outputs: Floats32 | None = None
        for numbers, _, (values,) in self.batches(features, where):
            if outputs is None:
                rows = len(features.tokens) if values.ndim == 3 else len(features)
                outputs = np.zeros((rows, values.shape[-1]), np.float32)
            features.put(outputs, numbers, values)
        assert outputs is not None
        return outputs


def row_of(item: Input, answer: Row, is_cut: bool) -> Row:
    """Return the row of an input: its columns, and its answer."""
    if is_cut:
        answer = {**answer, TRUNCATED: True}
    return {**item.shown, **{name_beside(name, item.taken): of for name, of in answer.items()}}


def name_beside(name: str, taken: Container[str]) -> str:
    """Return the name of a value of an answer among columns that a file has already."""
    return name_beside(f"predicted_{name}", taken) if name in taken else name


def exact(value: np.floating[Any]) -> float:
    """Return the shortest decimal that stands for a float32, not its seventeen digits as a double."""
    return float(str(value))
