"""The predictions of each task: a class for each, which the record of a head names.

Shapes: as in `model`.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pkgutil import resolve_name
from typing import Any, ClassVar

import numpy as np

from bert_cli.arrays import Ints32
from bert_cli.config.use import PredictSettings
from bert_cli.data.finetune import conll, squad_windows
from bert_cli.data.finetune.features import Features
from bert_cli.data.finetune.labels import expit, softmax
from bert_cli.data.finetune.squad import Question
from bert_cli.data.tokens.tokenizer import MASK
from bert_cli.errors import DataError
from bert_cli.facts.heads import heads
from bert_cli.facts.windows import ANSWER_LENGTH, DOC_STRIDE, QUERY_LENGTH, QUESTION_SPECIALS
from bert_cli.files import JSONObject
from bert_cli.processes import print_error
from bert_cli.tasks.model import models
from bert_cli.tasks.model.opened import (
    NONE,
    Columns,
    Input,
    Predictor,
    Row,
    exact,
    labels_of,
    row_of,
)
from bert_cli.tasks.model.vectors import Similarity


class FillMask(Predictor):
    """The most probable pieces in place of each [MASK]."""

    SETTINGS = ("top",)
    EMPTY: ClassVar[Row] = {"masks": []}
    COLUMNS = (*Predictor.COLUMNS, "masked_lm_positions")

    @classmethod
    def check(cls, item: Input) -> None:
        """Raise DataError for a text without [MASK]."""
        if MASK not in item.fields["text"]:
            raise DataError(item.where, f"has no {MASK}", "put one in place of a word")

    def outputs(self, columns: Columns) -> Any:
        """Return the probabilities and the numbers of the best pieces."""
        # A model's vocabulary may be rounded up; outputs beyond the tokenizer's pieces have no word.
        size = len(self.tokenizer.pieces)
        logits_BPV, *_ = self.model.logits(columns)
        ops = self.model.ops
        best = min(self.settings.top, size)
        return ops.top_k(ops.softmax(logits_BPV)[:, :, :size], best)

    def more_columns(self, input_ids: Ints32) -> Columns:
        """Return the positions of the masks."""
        is_mask = input_ids == self.tokenizer.special.mask
        # Masks come first; in a row with fewer masks, other positions follow.
        order = np.argsort(~is_mask, axis=1, kind="stable").astype(np.int32)
        masks = max(1, int(is_mask.sum(axis=1).max()))
        if self.model.is_compiled:  # few shapes
            masks = 1 << (masks - 1).bit_length()
        return {"masked_lm_positions": order[:, :masks]}

    def answer(self, inputs: Sequence[Input]) -> list[Row]:
        """Return the most probable pieces for each [MASK]; null for a mask in the truncated part."""
        special = self.tokenizer.special
        pieces = self.tokenizer.pieces
        shown = self.tokenizer.notation.shown
        rows = []
        is_cut = []
        texts = [item.fields["text"] for item in inputs]
        library = self.tokenizer.with_masks
        for encoding in library.encode_batch_fast(texts, add_special_tokens=False):
            ids = [special.cls, *encoding.ids]
            rows.append(np.array([*ids[: self.max_seq_length - 1], special.sep], np.int32))
            is_cut.append(len(ids) + 1 > self.max_seq_length)
        tokens = np.concatenate(rows)
        ends = np.cumsum([len(row) for row in rows]).astype(np.int64)
        features = Features(tokens, np.zeros(len(tokens), np.int8), ends)
        masks: list[list[Any]] = [[None] * item.fields["text"].count(MASK) for item in inputs]
        where = [item.where for item in inputs]
        for numbers, columns, (probabilities, words) in self.batches(features, where):
            counts = (columns["input_ids"] == special.mask).sum(axis=1)
            for row, number in enumerate(numbers):
                for mask in range(counts[row]):
                    pairs = zip(words[row, mask], probabilities[row, mask], strict=True)
                    best = [{"word": shown(pieces[w]), "probability": exact(p)} for w, p in pairs]
                    masks[number][mask] = best
        results = zip(inputs, masks, is_cut, strict=True)
        return [row_of(item, {"masks": filled}, cut) for item, filled, cut in results]


class TextClassification(Predictor):
    """The label of a text or a pair, or a score."""

    OPTIONAL = ("second",)
    SETTINGS = ("doc_stride", "none_below")

    def empty_answer(self) -> Row:
        """Return an answer without a label."""
        if self.model.label_names is None:
            column = "score" if labels_of(self.model.source) == 1 else "scores"
            return {column: None}
        if self.model.source.has_several_labels:
            return {"labels": [], "probabilities": {}}
        return {"label": None, "probability": None, "probabilities": {}}

    def answer(self, inputs: Sequence[Input]) -> list[Row]:
        """Return the most probable label and every label's probability; for regression the score."""
        names = self.model.label_names
        several = self.model.source.has_several_labels
        logits, is_cut = self.of_texts(inputs)
        answers = self.model.decision.answers(logits, several=several)
        if several:
            probabilities = expit(logits)
        else:
            probabilities = softmax(logits, -1)
        rows = []
        columns = zip(inputs, logits, probabilities, answers, is_cut, strict=True)
        for item, scores, values, answer, cut in columns:
            row: Row = {"scores": list(map(exact, scores))}
            if names is not None:
                best = int(np.argmax(values))
                label = NONE
                if values[best] >= (self.settings.none_below or 0.0):
                    label = names[best]
                row = {"label": label, "probability": exact(values[best])}
                if several:
                    row = {"labels": [names[k] for k in np.flatnonzero(answer)]}
                row["probabilities"] = dict(zip(names, map(exact, values), strict=True))
            elif len(scores) == 1:
                row = {"score": exact(scores[0])}
            rows.append(row_of(item, row, cut))
        return rows


class QuestionAnswering(Predictor):
    """The answer to a question in its context."""

    FIELDS = ("question", "context")
    SETTINGS = ("doc_stride", "version_2")
    EMPTY: ClassVar[Row] = {"answer": "", "probability": None, "start": None, "end": None}

    @classmethod
    def read_defaults(cls, source: models.Source, settings: PredictSettings) -> JSONObject:
        """Return the sizes of the run's windows, or those that fit."""
        sizes = source.window_sizes
        longest = source.config.max_position_embeddings
        length = settings.max_seq_length or min(longest, sizes.get("max_seq_length", longest))
        # At most half of the window for the question, and half of the rest for the stride.
        fitting = max(1, (length - QUESTION_SPECIALS - _query_length(source, length)) // 2)
        return {"doc_stride": min(DOC_STRIDE, fitting), **super().read_defaults(source, settings)}

    @cached_property
    def threshold(self) -> float:
        """The threshold of no answer that the run chose, or 0."""
        chosen = squad_windows.read_null_threshold(self.model.source.folder.parent)
        origin = "the default"
        if chosen is not None:
            origin = "chosen by `bert squad`"
        print_error(f"null_score_diff_threshold {chosen or 0.0:.4f} ({origin})")
        return chosen or 0.0

    def answer(self, inputs: Sequence[Input]) -> list[Row]:
        """Return the best span of each context, its probability and its characters."""
        settings = self.settings
        questions = [
            Question(str(number), item.fields["question"], item.fields["context"], (), False)
            for number, item in enumerate(inputs)
        ]
        query_length = _query_length(self.model.source, self.max_seq_length)
        windows = squad_windows.make_windows(
            questions,
            self.tokenizer,
            training=False,
            max_seq_length=self.max_seq_length,
            doc_stride=settings.doc_stride or DOC_STRIDE,
            max_query_length=query_length,
        )
        where = [inputs[number].where for number in windows.question]
        logits = self.of_examples(windows.features, where)
        answer_length = self.model.source.window_sizes.get("max_answer_length", ANSWER_LENGTH)
        result = squad_windows.answers(
            questions,
            windows,
            logits,
            max_answer_length=answer_length,
            version_2=settings.version_2,
        )
        predictions = result.predictions
        if settings.version_2:
            predictions = squad_windows.with_null_threshold(
                predictions, result.null_odds, self.threshold
            )
        texts = [item.fields["question"] for item in inputs]
        encoded = self.tokenizer.library.encode_batch_fast(texts, add_special_tokens=False)
        # A question's windows are consecutive, so its positions are one range.
        last = np.searchsorted(windows.question, np.arange(len(questions)), side="right") - 1
        rows = []
        begin = 0
        parts = zip(inputs, questions, encoded, windows.features.ends[last], strict=True)
        for item, question, query, end in parts:
            text = predictions[question.id]
            entry = next(row for row in result.nbest[question.id] if row["text"] == text)
            # If the text occurs several times, the score of its first piece identifies the occurrence.
            pieces = begin + np.flatnonzero(logits[begin:end, 0] == entry["start_logit"])
            offsets = windows.offsets[pieces, 0].tolist()
            at = next((n for n in offsets if text and question.context[n:].startswith(text)), None)
            row: Row = {
                "answer": text,
                "probability": entry["probability"],
                "start": at,
                "end": None,
            }
            if at is not None:
                row["end"] = at + len(text)
            rows.append(row_of(item, row, len(query.ids) > query_length))
            begin = end
        return rows


def _query_length(source: models.Source, length: int) -> int:
    """Return the longest question of the run, or one that fits into a window."""
    return int(source.window_sizes.get("max_query_length", min(QUERY_LENGTH, length // 2)))


class TokenClassification(Predictor):
    """The label of each word, and the entities."""

    SETTINGS = ("doc_stride",)

    def empty_answer(self) -> Row:
        """Return an answer without words."""
        if self.model.has_bio_labels:
            return {"words": [], "entities": []}
        return {"words": []}

    def answer(self, inputs: Sequence[Input]) -> list[Row]:
        """Return a label for each word and, for BIO labels, the entities."""
        names = self.model.label_names or ("score",)
        texts = [item.fields["text"] for item in inputs]
        spans = [conll.word_spans(text) for text in texts]
        words = [[t[a:b] for a, b in bounds] for t, bounds in zip(texts, spans, strict=True)]
        sentences = conll.Sentences(words, [[0] * len(row) for row in words], tuple(names))
        length = self.max_seq_length
        stride = self.settings.doc_stride or max(1, (length - QUESTION_SPECIALS) // 2)
        features, _ = conll.word_features(sentences, self.tokenizer, length, stride)
        assert features.owner is not None
        where = [inputs[number].where for number in features.owner]
        logits = self.of_examples(features, where)
        probabilities = softmax(logits, -1)
        # [T] for each piece; a word has the answer of its first piece.
        predicted = np.argmax(probabilities, axis=1)
        labels = sentences.names(conll.of_words(sentences, features, predicted))
        best = conll.of_words(sentences, features, probabilities.max(axis=1))
        rows = []
        for number, item in enumerate(inputs):
            columns = zip(words[number], labels[number], best[number], strict=True)
            of_words = [{"word": w, "label": n, "probability": exact(p)} for w, n, p in columns]
            row: Row = {"words": of_words}
            if self.model.has_bio_labels:
                row["entities"] = entities_of(texts[number], spans[number], labels[number])
            rows.append(row_of(item, row, False))
        return rows


def entities_of(text: str, spans: Sequence[tuple[int, int]], labels: Sequence[str]) -> list[Row]:
    """Return the entities of a text from the characters and the labels of its words."""
    ends = [(kind, spans[a][0], spans[b][1]) for kind, a, b in conll.chunks(labels)]
    return [{"type": k, "text": text[s:e], "start": s, "end": e} for k, s, e in ends]


def predictors() -> Mapping[str, type[Predictor]]:
    """Return the class of each task of `bert predict`."""
    classes = {head.task: resolve_name(head.predictor) for head in heads()}
    return classes | {"similarity": Similarity}
