"""What a model says to inputs, for each task: a function that makes the answering function.

The first is given the model, its tokenizer and the settings, and traces once; the second turns a
list of inputs into their rows, in the same order. Inside, inputs of like length go through the model
together. Probabilities are computed beside the logits, in float32.

Shapes: n inputs, T tokens of all of them, B examples, S places, P masked places, L labels.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from bert_cli.config.tools import PredictSettings
from bert_cli.data.finetune.conll import Sentences, word_features, word_labels, words_of
from bert_cli.data.finetune.features import Features, by_length, encode_texts
from bert_cli.data.finetune.metrics import chunks
from bert_cli.data.finetune.squad import Question, Questions
from bert_cli.data.finetune.squad_answers import answers
from bert_cli.data.finetune.squad_windows import make_windows
from bert_cli.data.records.tokenizer import TextTokenizer
from bert_cli.errors import DeviceError
from bert_cli.tasks.use.model import Columns, Opened, labels_of, signature

MASK = "[MASK]"
LONGEST = 2**31 - 1
N_BEST = 20
"""Different texts among which an answer's probability is shared out."""
READ = ("input_ids", "segment_ids", "input_mask")
BIO = re.compile(r"O|[BI]-.+")
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Asked:
    """An input and where it stands."""

    where: str
    fields: Mapping[str, str]


Row = dict[str, Any]
Answering = Callable[[Sequence[Asked]], list[Row]]


@dataclass(frozen=True)
class Use:
    """What all tasks answer with."""

    model: Opened
    tokenizer: TextTokenizer
    settings: PredictSettings
    places: int
    """Most tokens of an example."""


def fill_mask(use: Use) -> Answering:
    """The likeliest words for each [MASK], with their probabilities among all words."""
    pieces, top = use.tokenizer.pieces, min(use.settings.top, len(use.tokenizer.pieces))

    def best(columns: Columns) -> Any:
        # A model may have more words than its tokenizer, up to a round number; they are no words.
        scores_BPV, _ = use.model.logits(columns)
        return tf.math.top_k(tf.nn.softmax(scores_BPV)[:, :, : len(pieces)], top)

    run = _traced(best, "masked_lm_positions")

    def answer(inputs: Sequence[Asked]) -> list[Row]:
        encoded = [_with_masks(use.tokenizer, asked.fields["text"]) for asked in inputs]
        kept = [[*ids[: use.places - 1], use.tokenizer.special.sep] for ids in encoded]
        where = [np.flatnonzero(np.array(ids) == use.tokenizer.special.mask) for ids in kept]
        features = _features_of_ids(kept)
        found: list[list[Any]] = [[] for _ in inputs]
        for numbers, columns in _batches(features, use.settings.batch_size):
            most = max(len(where[number]) for number in numbers)
            if not most:
                continue
            positions = np.zeros((len(numbers), most), np.int32)
            for row, number in enumerate(numbers):
                positions[row, : len(where[number])] = where[number]
            shares, words = run({**columns, "masked_lm_positions": positions})
            _check(shares.numpy(), numbers, inputs)
            for number, share, word in zip(numbers, shares.numpy(), words.numpy(), strict=True):
                for place in range(len(where[number])):
                    pairs = zip(word[place], share[place], strict=True)
                    found[number].append(
                        [{"word": pieces[w], "probability": exact(p)} for w, p in pairs]
                    )
        rows = []
        for asked, ids, masks in zip(inputs, encoded, found, strict=True):
            # A [MASK] that was cut off keeps its place.
            masks += [None] * (asked.fields["text"].count(MASK) - len(masks))
            rows.append(_row(asked, {"masks": masks}, len(ids) + 1 > use.places))
        return rows

    return answer


def _with_masks(tokenizer: TextTokenizer, text: str) -> list[int]:
    """[CLS] and the text with each literal [MASK] as the special token, which text alone cannot make."""
    parts = tokenizer.library.encode_batch_fast(text.split(MASK), add_special_tokens=False)
    ids = [tokenizer.special.cls, *parts[0].ids]
    for part in parts[1:]:
        ids += [tokenizer.special.mask, *part.ids]
    return ids


def text_classification(use: Use) -> Answering:
    """The likeliest label and every label's probability; for regression the score."""
    names = use.model.label_names
    several = use.model.source.described.get("problem_type") == "multi_label_classification"
    run = _traced(use.model.logits)

    def answer(inputs: Sequence[Asked]) -> list[Row]:
        features, cut = _encoded(use, inputs)
        logits = np.zeros((len(inputs), labels_of(use.model.source)), np.float32)
        for numbers, columns in _batches(features, use.settings.batch_size):
            logits[numbers] = run(columns).numpy()
            _check(logits[numbers], numbers, inputs)
        if names is None:
            told: list[Row] = [_scores(row) for row in logits]
        elif several:
            told = [_several_labels(names, shares) for shares in 1.0 / (1.0 + np.exp(-logits))]
        else:
            told = [_one_label(names, shares) for shares in _softmax(logits)]
        return [_row(*parts) for parts in zip(inputs, told, cut, strict=True)]

    return answer


def _scores(row: Floats) -> Row:
    found = [exact(score) for score in row]
    return {"score": found[0]} if len(found) == 1 else {"scores": found}


def _one_label(names: Sequence[str], shares: Floats) -> Row:
    best = int(np.argmax(shares))
    return {
        "label": names[best],
        "probability": exact(shares[best]),
        "probabilities": {name: exact(share) for name, share in zip(names, shares, strict=True)},
    }


def _several_labels(names: Sequence[str], shares: Floats) -> Row:
    """For labels that do not exclude one another: those that are likelier than not."""
    pairs = list(zip(names, shares, strict=True))
    return {
        "labels": [name for name, share in pairs if share > 0.5],
        "probabilities": {name: exact(share) for name, share in pairs},
    }


def question_answering(use: Use) -> Answering:
    """The best span of each context, its share among the best of other text, and its characters."""
    asked_for = use.settings
    run = _traced(use.model.logits)

    def answer(inputs: Sequence[Asked]) -> list[Row]:
        questions = Questions(
            tuple(
                Question(str(n), asked.fields["question"], asked.fields["context"], (), False)
                for n, asked in enumerate(inputs)
            )
        )
        windows = make_windows(
            questions,
            use.tokenizer,
            max_seq_length=use.places,
            doc_stride=asked_for.doc_stride,
            max_query_length=asked_for.max_query_length,
            training=False,
        )
        logits = _by_place(run, use, windows.features, windows.question, inputs, 2)
        found = answers(
            questions,
            windows,
            logits[:, 0],
            logits[:, 1],
            n_best=N_BEST,
            max_answer_length=asked_for.max_answer_length,
            version_2=asked_for.version_2,
            null_threshold=asked_for.null_score_diff_threshold,
        )
        texts = [asked.fields["question"] for asked in inputs]
        encoded = use.tokenizer.library.encode_batch_fast(texts, add_special_tokens=False)
        # A question's windows stand together, so its places are one range.
        ends = np.searchsorted(windows.question, np.arange(len(inputs)), side="right")
        ends = windows.features.ends[ends - 1]
        rows, begin = [], 0
        for number, asked in enumerate(inputs):
            text = found.predictions[str(number)]
            entry = next(row for row in found.nbest[str(number)] if row["text"] == text)
            # Of equal texts in the context, the one whose first piece has this very score.
            own = begin + np.flatnonzero(logits[begin : ends[number], 0] == entry["start_logit"])
            begin = ends[number]
            starts = windows.offsets[own, 0].tolist()
            begins = [at for at in starts if text and asked.fields["context"][at:].startswith(text)]
            start = begins[0] if begins else None
            told = {
                "question": asked.fields["question"],
                "answer": text,
                "probability": entry["probability"],
                "start": start,
                "end": None if start is None else start + len(text),
            }
            cut = len(encoded[number].ids) > asked_for.max_query_length
            rows.append({**told, **({"truncated": True} if cut else {})})
        return rows

    return answer


def token_classification(use: Use) -> Answering:
    """A label for each word, as `words_of` parts them, and where labels are BIO the entities."""
    names = use.model.label_names or ("score",)
    bio = labels_entities(names)
    run = _traced(use.model.logits)

    def answer(inputs: Sequence[Asked]) -> list[Row]:
        texts = [asked.fields["text"] for asked in inputs]
        spans = [words_of(text) for text in texts]
        words = [[t[a:b] for a, b in own] for t, own in zip(texts, spans, strict=True)]
        sentences = Sentences(words, [[0] * len(row) for row in words], tuple(names))
        features, places = word_features(sentences, use.tokenizer, use.places)
        # Part of a sentence that was cut between words -> the sentence.
        belongs = np.searchsorted(places.places[places.ends - 1], features.starts)
        shares = _softmax(_by_place(run, use, features, belongs, inputs, len(names)))
        best = sentences.names(word_labels(places, np.argmax(shares, axis=1)))
        sure = np.split(shares.max(axis=1)[places.places], places.ends[:-1])
        rows = []
        for number, asked in enumerate(inputs):
            each = zip(words[number], best[number], sure[number], strict=True)
            told = [{"word": w, "label": n, "probability": exact(p)} for w, n, p in each]
            found = _entities(texts[number], spans[number], best[number]) if bio else []
            entities = {"entities": found} if bio else {}
            rows.append(_row(asked, {"words": told, **entities}, False))
        return rows

    return answer


def labels_entities(names: Sequence[str] | None) -> bool:
    """Whether a classifier's labels are those of entities."""
    return all(BIO.fullmatch(name) for name in names or ("score",))


def _entities(text: str, spans: Sequence[tuple[int, int]], labels: Sequence[str]) -> list[Row]:
    found = [(kind, spans[a][0], spans[b][1]) for kind, a, b in chunks(labels)]
    return [{"type": k, "text": text[s:e], "start": s, "end": e} for k, s, e in found]


def embed(use: Use) -> Answering:
    """A vector of each text, from the encoder's last layer."""
    mean, normalize = use.settings.pooling == "mean", use.settings.normalize

    def vectors(columns: Columns) -> Any:
        hidden_BSD = tf.cast(use.model.hidden(columns), tf.float32)
        mask_BS1 = tf.cast(columns["input_mask"], tf.float32)[:, :, None]
        found_BD = hidden_BSD[:, 0]
        if mean:
            found_BD = tf.reduce_sum(hidden_BSD * mask_BS1, 1) / tf.reduce_sum(mask_BS1, 1)
        return tf.math.l2_normalize(found_BD, -1) if normalize else found_BD

    run = _traced(vectors)

    def answer(inputs: Sequence[Asked]) -> list[Row]:
        features, cut = _encoded(use, inputs)
        found = np.zeros((len(inputs), use.model.config.hidden_size), np.float32)
        for numbers, columns in _batches(features, use.settings.batch_size):
            found[numbers] = run(columns).numpy()
            _check(found[numbers], numbers, inputs)
        return [
            _row(asked, {"embedding": [exact(value) for value in vector]}, over)
            for asked, vector, over in zip(inputs, found, cut, strict=True)
        ]

    return answer


def exact(value: np.floating[Any]) -> float:
    """The shortest decimal that stands for this float32, instead of its seventeen digits as a double."""
    return float(str(value))


def _traced(function: Callable[[Columns], Any], *more: str) -> Any:
    """Traced once, whatever the number of examples and places; with `more` columns than all read."""
    return tf.function(function, input_signature=[signature(*READ, *more)], autograph=False)


def _batches(
    features: Features, size: int
) -> Iterator[tuple[npt.NDArray[np.int64], dict[str, npt.NDArray[Any]]]]:
    """Examples of like length: their numbers, and the columns padded to the longest of them."""
    for numbers in by_length(features, size):
        batch = features.batch(numbers, int(features.lengths[numbers].max()))
        yield numbers, {name: batch[name] for name in READ}


def _by_place(
    run: Callable[[Columns], Any],
    use: Use,
    features: Features,
    belongs: npt.NDArray[Any],
    inputs: Sequence[Asked],
    outputs: int,
) -> Floats:
    """The logits [T, outputs] of all places; `belongs` [n] is the input that an example is part of."""
    found = np.zeros((len(features.tokens), outputs), np.float32)
    for numbers, columns in _batches(features, use.settings.batch_size):
        logits = run(columns).numpy()
        _check(logits, belongs[numbers], inputs)
        inside = columns["input_mask"] > 0
        where = features.starts[numbers, None] + np.arange(inside.shape[1])
        found[where[inside]] = logits[inside]
    return found


def _features_of_ids(rows: Sequence[Sequence[int]]) -> Features:
    ends = np.cumsum([len(row) for row in rows]).astype(np.int64)
    tokens = np.concatenate([np.array(row, np.int32) for row in rows])
    return Features(tokens, np.zeros(len(tokens), np.int8), ends)


def _encoded(use: Use, inputs: Sequence[Asked]) -> tuple[Features, npt.NDArray[np.bool_]]:
    """The texts, or pairs, as examples, and which of them [n] were cut.

    Pairs and single texts may be mixed: each kind is encoded by itself and put back in order.
    """
    rows: list[npt.NDArray[np.int32]] = [np.zeros(0, np.int32)] * len(inputs)
    segments = [np.zeros(0, np.int8)] * len(inputs)
    cut = np.zeros(len(inputs), np.bool_)
    for pairs in (False, True):
        own = [n for n, asked in enumerate(inputs) if ("second" in asked.fields) == pairs]
        if not own:
            continue
        features, _ = _encode(use, [inputs[n] for n in own], use.places)
        for n, begin, end in zip(own, features.starts, features.ends, strict=True):
            rows[n], segments[n] = features.tokens[begin:end], features.segments[begin:end]
        # Only a full one can have been cut; how long it would be is asked for again.
        full = [n for n in own if len(rows[n]) == use.places]
        if full:
            uncut, _ = _encode(use, [inputs[n] for n in full], LONGEST)
            cut[full] = uncut.lengths > use.places
    ends = np.cumsum([len(row) for row in rows]).astype(np.int64)
    return Features(np.concatenate(rows), np.concatenate(segments), ends), cut


def _encode(use: Use, inputs: Sequence[Asked], places: int) -> tuple[Features, int]:
    first = [asked.fields["text"] for asked in inputs]
    second = [asked.fields["second"] for asked in inputs if "second" in asked.fields]
    return encode_texts(use.tokenizer, first, second or None, {}, max_seq_length=places)


def _row(asked: Asked, told: Row, cut: bool) -> Row:
    return {**asked.fields, **told, **({"truncated": True} if cut else {})}


def _softmax(logits: Floats) -> Floats:
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def _check(
    values: npt.NDArray[Any], numbers: npt.NDArray[np.int64], inputs: Sequence[Asked]
) -> None:
    """Refuse numbers that JSON has no word for; DeviceError names the first input that has them."""
    finite = np.isfinite(values).reshape(len(values), -1).all(axis=1)
    if not finite.all():
        first = inputs[int(numbers[np.flatnonzero(~finite)[0]])]
        raise DeviceError(
            f"{first.where}: the model's numbers are not finite; its weights are damaged, or the precision "
            "is too small"
        )


ANSWERING: Mapping[str, Callable[[Use], Answering]] = {
    "fill-mask": fill_mask,
    "question-answering": question_answering,
    "text-classification": text_classification,
    "token-classification": token_classification,
    "embed": embed,
}
