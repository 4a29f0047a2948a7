"""Windows: questions with as much of their paragraph as a model can read at once.

A paragraph may be longer than a model's places, so a question becomes several windows, [CLS]
question [SEP] part of the paragraph [SEP], each starting `doc_stride` pieces after the one before
(Devlin et al. 2019, section 4.2, and Google's `run_squad.py`). Pieces know their characters: an
answer's characters become places, and places become text again without undoing any tokenization. A
paragraph is encoded once for all its questions and every array is built for all windows together, so
that the 10,570 questions of the 1.1 development set take 1.2 seconds on two cores.

Shapes: q questions, n windows, T tokens of all of them.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bert_cli.config.finetune import QUESTION_SPECIALS, window_error
from bert_cli.data.finetune.features import (
    ENCODED_AT_ONCE,
    Arrays,
    Features,
    arrays_of,
    features_of,
)
from bert_cli.data.finetune.squad import Question, Questions, Remark, Remarks
from bert_cli.data.records.tokenizer import TextTokenizer
from bert_cli.errors import ConfigError, DataError
from bert_cli.files import parse_json

Numbers = npt.NDArray[np.int64]

NO_PIECES = "questions left out of the training, as no piece lies under their answer"
CUT_QUESTIONS = "questions longer than max_query_length, cut"


@dataclass(frozen=True)
class Windows:
    """Questions, each with a part of its context."""

    features: Features
    """For training with the labels `start_positions` and `end_positions` int32 [n], places in the
    window; 0 where the answer is not wholly inside, or impossible."""
    question: npt.NDArray[np.int32]
    """[n] number of the question; a question's windows stand together, the first part first."""
    offsets: npt.NDArray[np.int32]
    """[T, 2] first character in the context and the one behind the last; -1 outside the context."""
    best_context: npt.NDArray[np.bool_]
    """[T] whether a token of the context has the most text around it here, of all windows."""
    remarks: tuple[Remark, ...] = ()


def arrays_of_windows(windows: Windows) -> dict[str, npt.NDArray[Any]]:
    """All that the windows hold as arrays by name, for a cache."""
    return {
        **arrays_of(windows.features),
        "question": windows.question,
        "offsets": windows.offsets,
        "best_context": windows.best_context,
        "remarks": np.array([json.dumps(asdict(remark)) for remark in windows.remarks], np.str_),
    }


def windows_of(arrays: Arrays) -> Windows:
    """Return the windows whose arrays these are. Raises DataError for remarks that are none."""
    remedy = "remove the files of cache_dir and run the same command again"
    return Windows(
        features_of(arrays),
        arrays["question"],
        arrays["offsets"],
        arrays["best_context"],
        tuple(
            parse_json("remarks of cached windows", text.encode(), Remark, DataError, remedy)
            for text in arrays["remarks"].tolist()
        ),
    )


class Pieces(NamedTuple):
    """Pieces of several texts, one text after another."""

    ids: npt.NDArray[np.int32]
    starts: Numbers
    """Where each text starts."""
    lengths: Numbers
    """Pieces of each text."""
    offsets: npt.NDArray[np.int32]
    """[pieces, 2] characters in the text; empty where nobody asked."""


def make_windows(
    questions: Questions,
    tokenizer: TextTokenizer,
    *,
    max_seq_length: int,
    doc_stride: int,
    max_query_length: int,
    training: bool,
) -> Windows:
    """The windows of all questions; for training labelled with each question's first answer.

    `doc_stride` is the step from a window's start to the next one's, as Google has it (the
    `transformers` library calls the overlap so). ConfigError where the longest question leaves fewer
    places than `doc_stride`: text between two windows would be in none. For training the questions
    have to be read for it; ValueError for one without an answer.
    """
    _check_room(max_seq_length, doc_stride, max_query_length)
    if training and not questions.can_be_scored:
        raise ValueError("questions without answers cannot be trained on; read with training=True")
    found = Remarks()
    rows = questions.questions
    number_of: dict[str, int] = {}
    context = np.array([number_of.setdefault(row.context, len(number_of)) for row in rows])
    texts = _encode(tokenizer, list(number_of), with_offsets=True)
    asked = _encode(tokenizer, [row.question for row in rows], with_offsets=False)
    for number in np.flatnonzero(asked.lengths > max_query_length):
        found.add(CUT_QUESTIONS, rows[number].id)

    numbers = np.arange(len(rows))
    spans = np.zeros((len(rows), 2), np.int64)
    if training:
        spans = _answer_pieces(rows, context, texts, list(number_of))
        # Labelled as if they had no answer, these would teach something wrong.
        for number in np.flatnonzero(spans[:, 0] > spans[:, 1]):
            found.add(NO_PIECES, rows[number].id)
        numbers = np.flatnonzero(spans[:, 0] <= spans[:, 1])

    query = np.minimum(asked.lengths[numbers], max_query_length)
    room = max_seq_length - QUESTION_SPECIALS - query
    over = np.maximum(0, texts.lengths[context[numbers]] - room)
    parts = 1 + -(-over // doc_stride)

    question = np.repeat(numbers, parts)
    first = runs(np.zeros(len(parts), np.int64), parts) * doc_stride
    room, query = np.repeat(room, parts), np.repeat(query, parts)
    length = np.minimum(room, texts.lengths[context[question]] - first)
    features, offsets = _layout(
        tokenizer, asked, texts, question, context[question], query, first, length
    )
    best = _best_context(offsets, question, features.starts + query + 2, first, length)
    if training:
        labels = _labels(spans[question], first, length, query)
        features = Features(features.tokens, features.segments, features.ends, labels)
    return Windows(features, question.astype(np.int32), offsets, best, found.all())


def _check_room(max_seq_length: int, doc_stride: int, max_query_length: int) -> None:
    for name, value in (("doc_stride", doc_stride), ("max_query_length", max_query_length)):
        if value < 1:
            raise ConfigError(f"{name} ({value}): is below 1; give 1 or more")
    error = window_error(max_seq_length, doc_stride, max_query_length)
    if error:
        raise ConfigError("max_seq_length", *error)


def _encode(tokenizer: TextTokenizer, texts: Sequence[str], *, with_offsets: bool) -> Pieces:
    """Pieces of texts on all cores, some thousands at once: the library's answers are large."""
    library = tokenizer.library
    encode = library.encode_batch if with_offsets else library.encode_batch_fast
    ids, lengths, offsets = [np.zeros(0, np.int32)], [], [np.zeros((0, 2), np.int32)]
    for begin in range(0, len(texts), ENCODED_AT_ONCE):
        for found in encode(texts[begin : begin + ENCODED_AT_ONCE], add_special_tokens=False):
            ids.append(np.array(found.ids, np.int32))
            lengths.append(len(found.ids))
            if with_offsets:
                offsets.append(np.array(found.offsets, np.int32).reshape(-1, 2))
    counts = np.array(lengths, np.int64)
    return Pieces(np.concatenate(ids), counts.cumsum() - counts, counts, np.concatenate(offsets))


def runs(starts: Numbers, lengths: Numbers) -> Numbers:
    """start, start + 1, ... as long as each run is, one run after another."""
    before = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) + np.repeat(starts - before, lengths)


def _answer_pieces(
    rows: Sequence[Question], context: Numbers, texts: Pieces, contexts: Sequence[str]
) -> Numbers:
    """[q, 2] first and last piece under each first answer; the first is behind the last if none.

    A piece that the answer only touches counts whole. An impossible question has -1, -1, which no
    window holds. All contexts lie one after another here, so that one search finds all.
    """
    sizes = np.array([len(text) for text in contexts], np.int64)
    base = np.cumsum(sizes) - sizes
    shift = np.repeat(base, texts.lengths)
    begin = np.array([row.answers[0].start if row.answers else 0 for row in rows], np.int64)
    size = np.array([len(row.answers[0].text) if row.answers else 1 for row in rows], np.int64)
    begin += base[context]
    first = np.searchsorted(texts.offsets[:, 1] + shift, begin, side="right")
    last = np.searchsorted(texts.offsets[:, 0] + shift, begin + size, side="left") - 1
    spans = np.stack([first, last], axis=1) - texts.starts[context, None]
    spans[[row.is_impossible for row in rows]] = -1
    return spans


def _layout(
    tokenizer: TextTokenizer,
    asked: Pieces,
    texts: Pieces,
    question: Numbers,
    context: Numbers,
    query: Numbers,
    first: Numbers,
    length: Numbers,
) -> tuple[Features, npt.NDArray[np.int32]]:
    """Tokens, segments and offsets of windows; all arguments behind `texts` are [n]."""
    ends = np.cumsum(query + length + QUESTION_SPECIALS)
    starts = ends - (query + length + QUESTION_SPECIALS)
    text_starts = starts + query + 2
    total = int(ends[-1]) if len(ends) else 0
    tokens = np.full(total, tokenizer.special.sep, np.int32)
    tokens[starts] = tokenizer.special.cls
    tokens[runs(starts + 1, query)] = asked.ids[runs(asked.starts[question], query)]
    inside = runs(text_starts, length)
    taken = runs(texts.starts[context] + first, length)
    tokens[inside] = texts.ids[taken]
    segments = np.zeros(total, np.int8)
    segments[runs(text_starts, length + 1)] = 1
    offsets = np.full((total, 2), -1, np.int32)
    offsets[inside] = texts.offsets[taken]
    return Features(tokens, segments, ends.astype(np.int64)), offsets


def _best_context(
    offsets: npt.NDArray[np.int32],
    question: Numbers,
    text_starts: Numbers,
    first: Numbers,
    length: Numbers,
) -> npt.NDArray[np.bool_]:
    """[T] whether a place of a context has the most text around it here, of all windows.

    As Google has it: the smaller of the pieces left and right of it, and a hundredth of the window's
    length on top; of equals the first.
    """
    best = offsets[:, 0] >= 0
    # Most questions have one window, which is the best for all its pieces.
    several = np.flatnonzero(np.bincount(question)[question] > 1)
    question, text_starts, first, length = (
        column[several] for column in (question, text_starts, first, length)
    )
    piece = runs(first, length)
    left = piece - np.repeat(first, length)
    sizes = np.repeat(length, length)
    value = 100 * np.minimum(left, sizes - 1 - left) + sizes
    # The best of each piece of each question comes first, and of equals the earlier window's.
    owner = np.repeat(question, length)
    order = np.lexsort((-value, piece, owner))
    owner, piece = owner[order], piece[order]
    changes = (np.diff(owner, prepend=-1) != 0) | (np.diff(piece, prepend=-1) != 0)
    wins = np.zeros(len(order), np.bool_)
    wins[order[changes]] = True
    best[runs(text_starts, length)] = wins
    return best


def _labels(
    spans: Numbers, first: Numbers, length: Numbers, query: Numbers
) -> dict[str, npt.NDArray[np.int32]]:
    """Places of each window's answer [n, 2]; 0, which is [CLS], where it is not wholly inside."""
    inside = (spans[:, 0] >= first) & (spans[:, 1] < first + length)
    places = np.where(inside[:, None], spans - (first - query - 2)[:, None], 0).astype(np.int32)
    return {"start_positions": places[:, 0].copy(), "end_positions": places[:, 1].copy()}
