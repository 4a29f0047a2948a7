"""Predictions for each task: a function that returns the answering function.

The first takes the model, its tokenizer and the settings, and traces once; the second turns a list of inputs
into their rows, in the same order. Inside, inputs of similar length go through the model together.
Probabilities are computed from the logits in float32.

Shapes: n inputs, T tokens of all inputs, B examples, S positions, P masked positions, V vocabulary size.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from bert_cli.config.finetune import PredictSettings
from bert_cli.data.finetune.conll import (
    Sentences,
    chunks,
    word_features,
    word_labels,
    word_spans,
)
from bert_cli.data.finetune.features import Features, by_length, encode_texts
from bert_cli.data.finetune.squad import Question, Questions
from bert_cli.data.finetune.squad_windows import Answers, Windows, answers, make_windows
from bert_cli.data.records.tokenizer import TextTokenizer
from bert_cli.errors import DeviceError
from bert_cli.tasks.use.model import Columns, Opened, labels_of, signature

MASK = "[MASK]"
UNLIMITED = 2**31 - 1
N_BEST = 20
"""Different texts over which an answer's probability is normalized."""
READ = ("input_ids", "segment_ids", "input_mask")
BIO = re.compile(r"O|[BI]-.+")
Floats = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.int64]
Row = dict[str, Any]


@dataclass(frozen=True)
class Input:
    """An input and where it comes from."""

    where: str
    fields: Mapping[str, str]


@dataclass(frozen=True)
class Use:
    """A model and how to use it."""

    model: Opened
    tokenizer: TextTokenizer
    settings: PredictSettings
    max_seq_length: int


Answering = Callable[[Sequence[Input]], list[Row]]
Run = Callable[[Columns], Any]


# --- masks


def fill_mask(use: Use) -> Answering:
    """Answer with the most probable pieces for each [MASK]."""
    size = len(use.tokenizer.pieces)
    top = min(use.settings.top, size)

    def best(columns: Columns) -> Any:
        # A model's vocabulary may be rounded up; outputs beyond the tokenizer's pieces are no words.
        logits_BPV, _ = use.model.logits(columns)
        return tf.math.top_k(tf.nn.softmax(logits_BPV)[:, :, :size], top)

    return partial(_fill_masks, use, _traced(best, "masked_lm_positions"))


def _fill_masks(use: Use, run: Run, inputs: Sequence[Input]) -> list[Row]:
    special, pieces = use.tokenizer.special, use.tokenizer.pieces
    encoded = [_with_masks(use.tokenizer, one.fields["text"]) for one in inputs]
    cut = [[*ids[: use.max_seq_length - 1], special.sep] for ids in encoded]
    masks = [np.flatnonzero(np.array(ids) == special.mask) for ids in cut]
    filled: list[list[Any]] = [[] for _ in inputs]
    for numbers, columns in _batches(_features_of_ids(cut), use.settings.batch_size):
        most = max(len(masks[number]) for number in numbers)
        if not most:
            continue
        positions_BP = np.zeros((len(numbers), most), np.int32)
        for row, number in enumerate(numbers):
            positions_BP[row, : len(masks[number])] = masks[number]
        values, words = run({**columns, "masked_lm_positions": positions_BP})
        _check_finite(values.numpy(), numbers, inputs)
        for number, probability, word in zip(numbers, values.numpy(), words.numpy(), strict=True):
            for mask in range(len(masks[number])):
                pairs = zip(word[mask], probability[mask], strict=True)
                filled[number].append(
                    [{"word": pieces[w], "probability": exact(p)} for w, p in pairs]
                )
    rows = []
    for one, ids, found in zip(inputs, encoded, filled, strict=True):
        # A [MASK] that was cut off is answered with null.
        found += [None] * (one.fields["text"].count(MASK) - len(found))
        rows.append(_row(one, {"masks": found}, len(ids) + 1 > use.max_seq_length))
    return rows


def _with_masks(tokenizer: TextTokenizer, text: str) -> list[int]:
    """Return [CLS] and the text; each literal [MASK] is the special token, which no other text becomes."""
    parts = tokenizer.library.encode_batch_fast(text.split(MASK), add_special_tokens=False)
    ids = [tokenizer.special.cls, *parts[0].ids]
    for part in parts[1:]:
        ids += [tokenizer.special.mask, *part.ids]
    return ids


def _features_of_ids(rows: Sequence[Sequence[int]]) -> Features:
    ends = np.cumsum([len(row) for row in rows]).astype(np.int64)
    tokens = np.concatenate([np.array(row, np.int32) for row in rows])
    return Features(tokens, np.zeros(len(tokens), np.int8), ends)


# --- labels of texts


def text_classification(use: Use) -> Answering:
    """Answer with the most probable label and every label's probability; for regression the score."""
    return partial(_classify, use, _traced(use.model.logits))


def _classify(use: Use, run: Run, inputs: Sequence[Input]) -> list[Row]:
    features, cut = _encode(use, inputs)
    logits = np.zeros((len(inputs), labels_of(use.model.source)), np.float32)
    for numbers, columns in _batches(features, use.settings.batch_size):
        logits[numbers] = run(columns).numpy()
        _check_finite(logits[numbers], numbers, inputs)
    names = use.model.label_names
    if names is None:
        rows: list[Row] = [_scores(values) for values in logits]
    elif use.model.source.described.get("problem_type") == "multi_label_classification":
        rows = [_several_labels(names, values) for values in 1.0 / (1.0 + np.exp(-logits))]
    else:
        rows = [_one_label(names, values) for values in _softmax(logits)]
    return [_row(*parts) for parts in zip(inputs, rows, cut, strict=True)]


def _scores(values: Floats) -> Row:
    scores = [exact(score) for score in values]
    return {"score": scores[0]} if len(scores) == 1 else {"scores": scores}


def _one_label(names: Sequence[str], probabilities: Floats) -> Row:
    best = int(np.argmax(probabilities))
    pairs = zip(names, probabilities, strict=True)
    return {
        "label": names[best],
        "probability": exact(probabilities[best]),
        "probabilities": {name: exact(value) for name, value in pairs},
    }


def _several_labels(names: Sequence[str], probabilities: Floats) -> Row:
    """Return labels that do not exclude one another: those that are more probable than not."""
    pairs = list(zip(names, probabilities, strict=True))
    return {
        "labels": [name for name, value in pairs if value > 0.5],
        "probabilities": {name: exact(value) for name, value in pairs},
    }


# --- answers to questions


def question_answering(use: Use) -> Answering:
    """Answer with the best span of each context, its probability and its characters."""
    return partial(_answer_questions, use, _traced(use.model.logits))


def _answer_questions(use: Use, run: Run, inputs: Sequence[Input]) -> list[Row]:
    settings = use.settings
    questions = Questions(
        tuple(
            Question(str(number), one.fields["question"], one.fields["context"], (), False)
            for number, one in enumerate(inputs)
        )
    )
    windows = make_windows(
        questions,
        use.tokenizer,
        max_seq_length=use.max_seq_length,
        doc_stride=settings.doc_stride,
        max_query_length=settings.max_query_length,
        training=False,
    )
    logits = _by_position(run, use, windows.features, windows.question, inputs, 2)
    found = answers(
        questions,
        windows,
        logits[:, 0],
        logits[:, 1],
        n_best=N_BEST,
        max_answer_length=settings.max_answer_length,
        version_2=settings.version_2,
        null_threshold=settings.null_score_diff_threshold,
    )
    texts = [one.fields["question"] for one in inputs]
    encoded = use.tokenizer.library.encode_batch_fast(texts, add_special_tokens=False)
    is_cut = [len(query.ids) > settings.max_query_length for query in encoded]
    rows = _answer_rows(questions, windows, logits[:, 0], found)
    return [
        {**row, **({"truncated": True} if cut else {})}
        for row, cut in zip(rows, is_cut, strict=True)
    ]


def _answer_rows(
    questions: Questions, windows: Windows, start_logits: Floats, found: Answers
) -> Iterator[Row]:
    """Yield each question's answer with its characters in the context."""
    # A question's windows are consecutive, so its positions are one range.
    last = np.searchsorted(windows.question, np.arange(len(questions)), side="right")
    begin = 0
    for question, end in zip(questions.questions, windows.features.ends[last - 1], strict=True):
        text = found.predictions[question.id]
        entry = next(row for row in found.nbest[question.id] if row["text"] == text)
        # Of equal texts in the context, the one whose first piece has exactly this score.
        own = begin + np.flatnonzero(start_logits[begin:end] == entry["start_logit"])
        begin = end
        starts = windows.offsets[own, 0].tolist()
        start = next((at for at in starts if text and question.context[at:].startswith(text)), None)
        yield {
            "question": question.question,
            "answer": text,
            "probability": entry["probability"],
            "start": start,
            "end": None if start is None else start + len(text),
        }


# --- labels of words


def token_classification(use: Use) -> Answering:
    """Answer with a label for each word and, where labels are BIO, the entities."""
    return partial(_label_words, use, _traced(use.model.logits))


def _label_words(use: Use, run: Run, inputs: Sequence[Input]) -> list[Row]:
    names = use.model.label_names or ("score",)
    texts = [one.fields["text"] for one in inputs]
    spans = [word_spans(text) for text in texts]
    words = [[t[a:b] for a, b in own] for t, own in zip(texts, spans, strict=True)]
    sentences = Sentences(words, [[0] * len(row) for row in words], tuple(names))
    features, where = word_features(sentences, use.tokenizer, use.max_seq_length)
    # A sentence that was cut has several examples.
    sentence = np.searchsorted(where.positions[where.ends - 1], features.starts)
    logits = _by_position(run, use, features, sentence, inputs, len(names))
    probabilities = _softmax(logits)
    labels = sentences.names(word_labels(where, np.argmax(probabilities, axis=1)))
    best = np.split(probabilities.max(axis=1)[where.positions], where.ends[:-1])
    rows = []
    for number, one in enumerate(inputs):
        each = zip(words[number], labels[number], best[number], strict=True)
        row: Row = {"words": [{"word": w, "label": n, "probability": exact(p)} for w, n, p in each]}
        if are_bio(names):
            row["entities"] = entities_of(texts[number], spans[number], labels[number])
        rows.append(_row(one, row, False))
    return rows


def are_bio(names: Sequence[str] | None) -> bool:
    """Return whether a classifier's labels are those of entities."""
    return all(BIO.fullmatch(name) for name in names or ("score",))


def entities_of(text: str, spans: Sequence[tuple[int, int]], labels: Sequence[str]) -> list[Row]:
    """Return the entities of a text from the characters and the labels of its words."""
    found = [(kind, spans[a][0], spans[b][1]) for kind, a, b in chunks(labels)]
    return [{"type": k, "text": text[s:e], "start": s, "end": e} for k, s, e in found]


# --- vectors


def embed(use: Use) -> Answering:
    """Answer with a vector of each text, from the encoder's last layer."""
    mean, normalize = use.settings.pooling == "mean", use.settings.normalize

    def vectors(columns: Columns) -> Any:
        hidden_BSD = tf.cast(use.model.hidden(columns), tf.float32)
        mask_BS1 = tf.cast(columns["input_mask"], tf.float32)[:, :, None]
        vector_BD = hidden_BSD[:, 0]
        if mean:
            vector_BD = tf.reduce_sum(hidden_BSD * mask_BS1, 1) / tf.reduce_sum(mask_BS1, 1)
        return tf.math.l2_normalize(vector_BD, -1) if normalize else vector_BD

    return partial(_embed, use, _traced(vectors))


def _embed(use: Use, run: Run, inputs: Sequence[Input]) -> list[Row]:
    features, cut = _encode(use, inputs)
    vectors = np.zeros((len(inputs), use.model.config.hidden_size), np.float32)
    for numbers, columns in _batches(features, use.settings.batch_size):
        vectors[numbers] = run(columns).numpy()
        _check_finite(vectors[numbers], numbers, inputs)
    return [
        _row(one, {"embedding": [exact(value) for value in vector]}, is_cut)
        for one, vector, is_cut in zip(inputs, vectors, cut, strict=True)
    ]


# --- what they share


def exact(value: np.floating[Any]) -> float:
    """Return the shortest decimal that stands for a float32, not its seventeen digits as a double."""
    return float(str(value))


def _traced(function: Callable[[Columns], Any], *more: str) -> Any:
    """Trace once for any number of examples and positions; `more` are columns beyond `READ`."""
    return tf.function(function, input_signature=[signature(*READ, *more)], autograph=False)


def _batches(
    features: Features, size: int
) -> Iterator[tuple[Numbers, dict[str, npt.NDArray[Any]]]]:
    """Yield examples of similar length: their numbers, and their columns padded to the longest."""
    for numbers in by_length(features, size):
        batch = features.batch(numbers, int(features.lengths[numbers].max()))
        yield numbers, {name: batch[name] for name in READ}


def _by_position(
    run: Run,
    use: Use,
    features: Features,
    owner: npt.NDArray[Any],
    inputs: Sequence[Input],
    outputs: int,
) -> Floats:
    """Return the logits [T, outputs] of all positions; `owner` has the input of each example."""
    logits = np.zeros((len(features.tokens), outputs), np.float32)
    for numbers, columns in _batches(features, use.settings.batch_size):
        values = run(columns).numpy()
        _check_finite(values, owner[numbers], inputs)
        inside = columns["input_mask"] > 0
        positions = features.starts[numbers, None] + np.arange(inside.shape[1])
        logits[positions[inside]] = values[inside]
    return logits


def _encode(use: Use, inputs: Sequence[Input]) -> tuple[Features, npt.NDArray[np.bool_]]:
    """Return the texts, or pairs, as examples, and which of them [n] were cut.

    Pairs and single texts may be mixed: each kind is encoded separately, and the order is restored.
    """
    rows: list[npt.NDArray[np.int32]] = [np.zeros(0, np.int32)] * len(inputs)
    segments = [np.zeros(0, np.int8)] * len(inputs)
    cut = np.zeros(len(inputs), np.bool_)
    for is_pair in (False, True):
        own = [n for n, one in enumerate(inputs) if ("second" in one.fields) == is_pair]
        if not own:
            continue
        features = _features(use, [inputs[n] for n in own], use.max_seq_length)
        for n, begin, end in zip(own, features.starts, features.ends, strict=True):
            rows[n], segments[n] = features.tokens[begin:end], features.segments[begin:end]
        # Only examples of full length can have been cut; encode those again without a limit.
        full = [n for n in own if len(rows[n]) == use.max_seq_length]
        if full:
            uncut = _features(use, [inputs[n] for n in full], UNLIMITED)
            cut[full] = uncut.lengths > use.max_seq_length
    ends = np.cumsum([len(row) for row in rows]).astype(np.int64)
    return Features(np.concatenate(rows), np.concatenate(segments), ends), cut


def _features(use: Use, inputs: Sequence[Input], length: int) -> Features:
    first = [one.fields["text"] for one in inputs]
    second = [one.fields["second"] for one in inputs if "second" in one.fields]
    return encode_texts(use.tokenizer, first, second or None, {}, max_seq_length=length)[0]


def _row(one: Input, answer: Row, is_cut: bool) -> Row:
    return {**one.fields, **answer, **({"truncated": True} if is_cut else {})}


def _softmax(logits: Floats) -> Floats:
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def _check_finite(values: npt.NDArray[Any], numbers: Numbers, inputs: Sequence[Input]) -> None:
    """Refuse values that JSON cannot hold; DeviceError names the first input that has them."""
    finite = np.isfinite(values).reshape(len(values), -1).all(axis=1)
    if not finite.all():
        first = inputs[int(numbers[np.flatnonzero(~finite)[0]])]
        problem = "the model's outputs are not finite"
        raise DeviceError(first.where, problem, "check its weights, or choose a higher precision")


ANSWERING: Mapping[str, Callable[[Use], Answering]] = {
    "fill-mask": fill_mask,
    "question-answering": question_answering,
    "text-classification": text_classification,
    "token-classification": token_classification,
    "embed": embed,
}
