"""A model from disk, and its predictions for each task.

The model has the blocks of training without a loss, dropout or gradients, on one device. A prediction turns a list of
inputs into their rows, in the same order; inside, inputs of similar length go through the model together.
Probabilities are computed from the logits in float32.

Shapes: n inputs, T tokens of all inputs, B examples, S positions, P masked positions, D hidden size, V vocabulary size.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
from keras import ops
from scipy.special import softmax

from bert_cli.config.finetune import PredictSettings
from bert_cli.config.heads import (
    LAST_BLOCKS,
    SENTENCE_EMBEDDING,
    Head,
    head_of_class,
    head_of_task,
    heads,
)
from bert_cli.data.finetune import conll
from bert_cli.data.finetune.embeddings import cosines
from bert_cli.data.finetune.features import Features, by_length, encode_texts, padded_length
from bert_cli.data.finetune.squad import Question
from bert_cli.data.finetune.squad_windows import answers, make_windows, with_null_threshold
from bert_cli.data.records.tokenizer import TextTokenizer
from bert_cli.errors import ConfigError, DeviceError
from bert_cli.model import hf
from bert_cli.model.bert import build_blocks, named_weights
from bert_cli.tasks.run import models, start

MASK = "[MASK]"
UNLIMITED = 2**31 - 1
N_BEST = 20
"""Number of distinct texts over which an answer's probability is normalized."""
Columns = Mapping[str, Any]
Floats = npt.NDArray[np.float32]
Row = dict[str, Any]


@dataclass(frozen=True)
class Opened:
    """A model with its weights, ready to run."""

    source: models.Source
    blocks: Sequence[tuple[str, keras.layers.Layer]]
    new: Sequence[str]
    """Parts of the model that the file lacks."""
    head: Head | None
    """The last of the blocks; None for an encoder."""

    @property
    def architecture(self) -> str:
        """Return transformers' class for the weights in the file."""
        architecture = self.source.architecture
        prefix = hf.PREFIXES[self.source.config.architecture]
        classes = [prefix + name for name in self.head.hf_classes] if self.head else []
        if len(classes) > 1 and architecture in ("?", classes[0]):
            return classes[bool(self.new)]
        return f"{prefix}BertModel" if architecture == "?" else architecture

    @property
    def label_names(self) -> tuple[str, ...] | None:
        """Return the names of a classifier's labels; None for regression, which has one output."""
        labels = labels_of(self.source)
        if labels == 1 or self.source.described.get("problem_type") == "regression":
            return None
        return self.source.label_names or tuple(f"LABEL_{number}" for number in range(labels))

    @property
    def has_several_labels(self) -> bool:
        """Return whether a text may have several labels."""
        return self.source.described.get("problem_type") == "multi_label_classification"

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
    name = source.architecture.removeprefix(hf.PREFIXES["groupbert"])
    head = SENTENCE_EMBEDDING if name == "?" else head_of_class(name)
    if head is None:
        where = f"{source.where} (architecture {source.architecture})"
        classes = dict.fromkeys(name for head in heads() for name in head.hf_classes)
        raise ConfigError(where, "is not supported", f"give one of {', '.join(classes)}")
    known = head.task
    if requested is not None and requested not in (known, "embed", "similarity"):
        problem = f"{source.folder} is a {source.architecture}, which is for {known}"
        remedy = f"leave out --task, or give a model that was trained for {requested}"
        raise ConfigError(f"task ({requested})", problem, remedy)
    return requested or known


def labels_of(source: models.Source) -> int:
    """Return the number of outputs of a classifier: two if the config has no number, as in transformers."""
    labels = source.described.get("id2label")
    return len(labels) if labels else int(source.described.get("num_labels") or 2)


def open_model(
    source: models.Source, task: str, precision: str = "float32", without_head: Sequence[str] = ()
) -> Opened:
    """Build the model for a task and load the file's weights.

    For a task without a head, the blocks `without_head` follow the encoder layers. Raises CheckpointError if the
    weights do not fit, ConfigError if the head is not among them.
    """
    head = head_of_task(task)
    last_blocks = head.last_blocks if head else without_head
    blocks = build_blocks(
        source.config, seed=0, policy=precision, last_blocks=last_blocks, labels=labels_of(source)
    )
    new, _ = start.load_weights(source, named_weights(blocks))
    if lacking := [part for part in (head.needs if head else ()) if part in new]:
        problem = f"has no {' and no '.join(lacking)} of its shape, so it cannot be used for {task}"
        where = f"{source.folder} ({source.architecture})"
        raise ConfigError(where, problem, "give a model that was trained for it")
    return Opened(source, blocks, new, head)


def one_device() -> str:
    """Use the first GPU or TPU, or the CPU, and return which; GPU memory grows on demand."""
    if keras.config.backend() == "jax":
        import jax

        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        return jax.default_backend().upper()
    import tensorflow as tf

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


@dataclass(frozen=True)
class Predictor:
    """A model with the tokenizer and settings of a task."""

    task: str
    model: Opened
    tokenizer: TextTokenizer
    settings: PredictSettings
    max_seq_length: int

    @cached_property
    def traced(self) -> Any:
        """The outputs of columns [B, S]: TensorFlow traces once for all shapes, JAX compiles for each."""
        names = ["input_ids", "segment_ids", "input_mask"]
        vectors = dict.fromkeys(("embed", "similarity"), self._vectors)
        outputs = {"fill-mask": self._best_words, **vectors}
        function = outputs.get(self.task, self.model.logits)
        if keras.config.backend() == "jax":
            import jax

            weights = list(named_weights(self.model.blocks).values())

            def run(values: Sequence[Any], columns: Columns) -> Any:
                # As arguments: XLA would compile weights in the closure as constants.
                with keras.StatelessScope(state_mapping=zip(weights, values, strict=True)):
                    return function(columns)

            return partial(jax.jit(run), [weight.value for weight in weights])
        import tensorflow as tf

        if self.task == "fill-mask":
            names.append("masked_lm_positions")
        shapes = {name: tf.TensorSpec([None, None], tf.int32, name=name) for name in names}
        return tf.function(function, input_signature=[shapes], autograph=False)

    def _best_words(self, columns: Columns) -> Any:
        # A model's vocabulary may be rounded up; outputs beyond the tokenizer's pieces have no word.
        size = len(self.tokenizer.pieces)
        logits_BPV, _ = self.model.logits(columns)
        best = min(self.settings.top, size)
        return ops.top_k(ops.softmax(logits_BPV)[:, :, :size], best)

    def _vectors(self, columns: Columns) -> Any:
        hidden_BSD = ops.cast(self.model.hidden(columns), "float32")
        mask_BS1 = ops.cast(columns["input_mask"], "float32")[:, :, None]
        vector_BD = hidden_BSD[:, 0]
        if self.settings.pooling != "cls":
            vector_BD = ops.sum(hidden_BSD * mask_BS1, 1) / ops.sum(mask_BS1, 1)
        if not self.settings.normalize:
            return vector_BD
        squared_B1 = ops.sum(ops.square(vector_BD), -1, keepdims=True)
        return vector_BD * ops.rsqrt(ops.maximum(squared_B1, 1e-12))

    def batches(self, features: Features, where: Sequence[str]) -> Iterator[tuple[Any, Any, Any]]:
        """Yield examples of similar length: their numbers, padded columns and outputs.

        Raises DeviceError, naming the first example by `where` [examples], for outputs that are not finite.
        """
        is_jax = keras.config.backend() == "jax"
        for numbers in by_length(features, self.settings.batch_size):
            rows = numbers
            length = int(features.lengths[numbers].max())
            if is_jax:  # few shapes; the batch is filled up with its own examples
                rows = np.resize(numbers, min(self.settings.batch_size, len(features)))
                length = padded_length(length, self.max_seq_length)
            batch = features.batch(rows, length)
            columns = {name: batch[name] for name in ("input_ids", "segment_ids", "input_mask")}
            more = {}
            if self.task == "fill-mask":
                is_mask = columns["input_ids"] == self.tokenizer.special.mask
                # The masks first; a row with fewer masks has other positions after them.
                order = np.argsort(~is_mask, axis=1, kind="stable").astype(np.int32)
                masks = max(1, int(is_mask.sum(axis=1).max()))
                masks = 1 << (masks - 1).bit_length() if is_jax else masks
                more["masked_lm_positions"] = order[:, :masks]
            results = keras.tree.flatten(self.traced({**columns, **more}))
            outputs = [ops.convert_to_numpy(value)[: len(numbers)] for value in results]
            finite = np.isfinite(outputs[0]).reshape(len(numbers), -1).all(axis=1)
            if not finite.all():
                raise DeviceError(
                    where[int(numbers[np.argmin(finite)])],
                    "the model's outputs are not finite",
                    "check its weights, or choose a higher precision",
                )
            yield numbers, {n: column[: len(numbers)] for n, column in columns.items()}, outputs

    def of_texts(self, inputs: Sequence[Input]) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """Return the outputs [n, ...] of texts or pairs, and a mask [n] of truncated inputs."""
        features = self._encode(inputs, self.max_seq_length)
        cut = np.zeros(len(inputs), np.bool_)
        # Only examples of full length can have been truncated; these are encoded again without a limit.
        full = np.flatnonzero(features.lengths == self.max_seq_length).tolist()
        uncut = self._encode([inputs[number] for number in full], UNLIMITED)
        cut[full] = uncut.lengths > self.max_seq_length
        rows: list[Any] = [None] * len(inputs)
        for numbers, _, (values,) in self.batches(features, [item.where for item in inputs]):
            for number, value in zip(numbers, values, strict=True):
                rows[number] = value
        return np.stack(rows), cut

    def of_positions(
        self, features: Features, owner: npt.NDArray[Any], inputs: Sequence[Input], outputs: int
    ) -> Floats:
        """Return the logits [T, outputs] of all positions; `owner` has the input of each example."""
        logits = np.zeros((len(features.tokens), outputs), np.float32)
        where = [inputs[number].where for number in owner]
        for numbers, columns, (values,) in self.batches(features, where):
            inside = columns["input_mask"] > 0
            positions = features.starts[numbers, None] + np.arange(inside.shape[1])
            logits[positions[inside]] = values[inside]
        return logits

    def _encode(self, inputs: Sequence[Input], length: int) -> Features:
        first = [item.fields["text"] for item in inputs]
        second = [item.fields.get("second", "") for item in inputs]
        return encode_texts(self.tokenizer, first, second, {}, max_seq_length=length)[0]


def fill_masks(use: Predictor, inputs: Sequence[Input]) -> list[Row]:
    """Return the most probable pieces for each [MASK]; null for a mask in the truncated part."""
    special = use.tokenizer.special
    pieces = use.tokenizer.pieces
    rows = []
    is_cut = []
    for item in inputs:
        # Each literal [MASK] is the special token, which no other text becomes.
        texts = item.fields["text"].split(MASK)
        parts = use.tokenizer.library.encode_batch_fast(texts, add_special_tokens=False)
        ids = [special.cls, *parts[0].ids]
        for part in parts[1:]:
            ids += [special.mask, *part.ids]
        rows.append(np.array([*ids[: use.max_seq_length - 1], special.sep], np.int32))
        is_cut.append(len(ids) + 1 > use.max_seq_length)
    tokens = np.concatenate(rows)
    ends = np.cumsum([len(row) for row in rows]).astype(np.int64)
    features = Features(tokens, np.zeros(len(tokens), np.int8), ends)
    masks: list[list[Any]] = [[None] * item.fields["text"].count(MASK) for item in inputs]
    where = [item.where for item in inputs]
    for numbers, columns, (probabilities, words) in use.batches(features, where):
        counts = (columns["input_ids"] == special.mask).sum(axis=1)
        for row, number in enumerate(numbers):
            for mask in range(counts[row]):
                pairs = zip(words[row, mask], probabilities[row, mask], strict=True)
                best = [{"word": pieces[word], "probability": exact(p)} for word, p in pairs]
                masks[number][mask] = best
    results = zip(inputs, masks, is_cut, strict=True)
    return [_row(item.fields, {"masks": filled}, cut) for item, filled, cut in results]


def classify(use: Predictor, inputs: Sequence[Input]) -> list[Row]:
    """Return the most probable label and every label's probability; for regression the score."""
    names = use.model.label_names
    several = use.model.has_several_labels
    logits, is_cut = use.of_texts(inputs)
    probabilities = 1.0 / (1.0 + np.exp(-logits)) if several else softmax(logits, -1)
    rows = []
    for item, scores, values, cut in zip(inputs, logits, probabilities, is_cut, strict=True):
        row: Row = {"scores": list(map(exact, scores))}
        if names is not None:
            best = int(np.argmax(values))
            each = list(zip(names, values, strict=True))
            row = {"label": names[best], "probability": exact(values[best])}
            if several:
                row = {"labels": [name for name, value in each if value > 0.5]}
            row["probabilities"] = {name: exact(value) for name, value in each}
        elif len(scores) == 1:
            row = {"score": exact(scores[0])}
        rows.append(_row(item.fields, row, cut))
    return rows


def answer_questions(use: Predictor, inputs: Sequence[Input]) -> list[Row]:
    """Return the best span of each context, its probability and its characters."""
    settings = use.settings
    questions = [
        Question(str(number), item.fields["question"], item.fields["context"], (), False)
        for number, item in enumerate(inputs)
    ]
    sizes = settings.model_dump(include={"doc_stride", "max_query_length"})
    windows = make_windows(
        questions, use.tokenizer, max_seq_length=use.max_seq_length, training=False, **sizes
    )
    logits = use.of_positions(windows.features, windows.question, inputs, 2)
    limits = settings.model_dump(include={"max_answer_length", "version_2"})
    result = answers(questions, windows, logits, n_best=N_BEST, **limits)
    predictions = result.predictions
    threshold = settings.null_score_diff_threshold
    if threshold is not None:
        predictions = with_null_threshold(predictions, result.null_odds, threshold)
    texts = [item.fields["question"] for item in inputs]
    encoded = use.tokenizer.library.encode_batch_fast(texts, add_special_tokens=False)
    # A question's windows are consecutive, so its positions are one range.
    last = np.searchsorted(windows.question, np.arange(len(questions)), side="right") - 1
    rows = []
    begin = 0
    for question, query, end in zip(questions, encoded, windows.features.ends[last], strict=True):
        text = predictions[question.id]
        entry = next(row for row in result.nbest[question.id] if row["text"] == text)
        # If the text occurs several times, the score of its first piece identifies the occurrence.
        pieces = begin + np.flatnonzero(logits[begin:end, 0] == entry["start_logit"])
        offsets = windows.offsets[pieces, 0].tolist()
        at = next((n for n in offsets if text and question.context[n:].startswith(text)), None)
        row: Row = {"answer": text, "probability": entry["probability"], "start": at}
        row["end"] = None if at is None else at + len(text)
        is_cut = len(query.ids) > settings.max_query_length
        rows.append(_row({"question": question.question}, row, is_cut))
        begin = end
    return rows


def label_words(use: Predictor, inputs: Sequence[Input]) -> list[Row]:
    """Return a label for each word and, for BIO labels, the entities."""
    names = use.model.label_names or ("score",)
    texts = [item.fields["text"] for item in inputs]
    spans = [conll.word_spans(text) for text in texts]
    words = [[t[a:b] for a, b in bounds] for t, bounds in zip(texts, spans, strict=True)]
    sentences = conll.Sentences(words, [[0] * len(row) for row in words], tuple(names))
    features, _ = conll.word_features(sentences, use.tokenizer, use.max_seq_length)
    # A sentence that was split has several examples.
    positions = conll.of_words(sentences, features, np.arange(len(features.tokens)))
    sentence = np.searchsorted([numbers[-1] for numbers in positions], features.starts)
    probabilities = softmax(use.of_positions(features, sentence, inputs, len(names)), -1)
    predicted = np.argmax(probabilities, axis=1)
    labels = sentences.names(conll.of_words(sentences, features, predicted))
    best = conll.of_words(sentences, features, probabilities.max(axis=1))
    rows = []
    for number, item in enumerate(inputs):
        each = zip(words[number], labels[number], best[number], strict=True)
        row: Row = {"words": [{"word": w, "label": n, "probability": exact(p)} for w, n, p in each]}
        if use.model.has_bio_labels:
            row["entities"] = entities_of(texts[number], spans[number], labels[number])
        rows.append(_row(item.fields, row, False))
    return rows


def entities_of(text: str, spans: Sequence[tuple[int, int]], labels: Sequence[str]) -> list[Row]:
    """Return the entities of a text from the characters and the labels of its words."""
    ends = [(kind, spans[a][0], spans[b][1]) for kind, a, b in conll.chunks(labels)]
    return [{"type": k, "text": text[s:e], "start": s, "end": e} for k, s, e in ends]


def embed(use: Predictor, inputs: Sequence[Input]) -> list[Row]:
    """Return a vector of each text, from the encoder's last layer."""
    rows = zip(inputs, *use.of_texts(inputs), strict=True)
    return [_row(item.fields, {"embedding": [*map(exact, row)]}, cut) for item, row, cut in rows]


def rank(use: Predictor, inputs: Sequence[Input]) -> list[Row]:
    """Return the texts that are most similar to the first text, by the cosine of their vectors, the best first."""
    vectors, is_cut = use.of_texts(inputs)
    similarities = cosines(np.broadcast_to(vectors[:1], vectors[1:].shape), vectors[1:])
    best = np.argsort(-similarities, kind="stable")[: use.settings.top]
    return [
        _row(inputs[n + 1].fields, {"similarity": exact(similarities[n])}, is_cut[n + 1])
        for n in best.tolist()
    ]


def exact(value: np.floating[Any]) -> float:
    """Return the shortest decimal number of a float32, not its seventeen digits as a double."""
    return float(str(value))


def _row(fields: Mapping[str, str], answer: Row, is_cut: bool) -> Row:
    return {**fields, **answer, **({"truncated": True} if is_cut else {})}


PREDICTIONS: Mapping[str, Callable[[Predictor, Sequence[Input]], list[Row]]] = {
    "fill-mask": fill_masks,
    "question-answering": answer_questions,
    "text-classification": classify,
    "token-classification": label_words,
    "embed": embed,
}
"""Task -> function that returns the row of each input. Raises DeviceError for outputs that are not finite."""
