"""Windows of SQuAD: questions with as much of their paragraph as the model can read at once.

A question becomes one window or several, [CLS] question [SEP] part of the paragraph [SEP], each starting
`doc_stride` pieces after the one before (Devlin et al. 2019, section 4.2, and Google's `run_squad.py`).
Pieces know their characters, so that an answer's characters become positions and positions become text again.
A paragraph is encoded once for all its questions, and every array is built for all windows together: the
10,570 questions of the 1.1 development set take 1.2 seconds on two cores.

Shapes: q questions, n windows, T tokens of all windows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
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
from bert_cli.data.finetune.squad import Question, Questions, remark_lines
from bert_cli.data.records.tokenizer import TextTokenizer
from bert_cli.errors import ConfigError

Numbers = npt.NDArray[np.int64]

NO_PIECES = "questions left out of the training, as their answer contains no piece"
CUT_QUESTIONS = "questions longer than max_query_length, cut"


@dataclass(frozen=True)
class Windows:
    """Questions, each with a part of its context."""

    features: Features
    """For training with the labels `start_positions` and `end_positions` int32 [n], positions in the window;
    0 where the answer is not completely inside, or impossible."""
    question: npt.NDArray[np.int32]
    """[n] number of the question; a question's windows are consecutive, the first part first."""
    offsets: npt.NDArray[np.int32]
    """[T, 2] first character in the context and the one after the last; -1 outside the context."""
    best_context: npt.NDArray[np.bool_]
    """[T] whether, of all windows, this one has the most context around the token."""
    remarks: tuple[str, ...] = ()


def arrays_of_windows(windows: Windows) -> dict[str, npt.NDArray[Any]]:
    """Return the windows as arrays by name, for a cache."""
    return {
        **arrays_of(windows.features),
        "question": windows.question,
        "offsets": windows.offsets,
        "best_context": windows.best_context,
        "remarks": np.array(windows.remarks, np.str_),
    }


def windows_of(arrays: Arrays) -> Windows:
    """Return the windows of these arrays."""
    return Windows(
        features_of(arrays),
        arrays["question"],
        arrays["offsets"],
        arrays["best_context"],
        tuple(map(str, arrays["remarks"])),
    )


class _Pieces(NamedTuple):
    """Pieces of several texts, one text after another."""

    ids: npt.NDArray[np.int32]
    starts: Numbers
    """Of each text."""
    lengths: Numbers
    """Of each text."""
    offsets: npt.NDArray[np.int32]
    """[pieces, 2] characters in the text; empty unless requested."""


class _Layout(NamedTuple):
    """What each window contains, all [n]."""

    question: Numbers
    context: Numbers
    """Number of the paragraph."""
    query: Numbers
    """Pieces of the question."""
    first: Numbers
    """First piece of the paragraph."""
    length: Numbers
    """Pieces of the paragraph."""


def make_windows(
    questions: Questions,
    tokenizer: TextTokenizer,
    *,
    max_seq_length: int,
    doc_stride: int,
    max_query_length: int,
    training: bool,
) -> Windows:
    """Return the windows of all questions; for training labelled with each question's first answer.

    `doc_stride` is the step from a window's start to the next one's, as in Google's code (transformers calls
    the overlap so). ConfigError where the longest question leaves fewer positions than `doc_stride`: text
    between two windows would be in none. ValueError for training on a question without an answer.
    """
    _check_room(max_seq_length, doc_stride, max_query_length)
    if training and not questions.can_be_scored:
        raise ValueError("questions without answers cannot be trained on; read with training=True")
    rows = questions.questions
    number_of: dict[str, int] = {}
    context = np.array([number_of.setdefault(row.context, len(number_of)) for row in rows])
    texts = _encode(tokenizer, list(number_of), with_offsets=True)
    queries = _encode(tokenizer, [row.question for row in rows], with_offsets=False)
    is_cut = queries.lengths > max_query_length
    ids = {CUT_QUESTIONS: [rows[number].id for number in np.flatnonzero(is_cut)]}

    numbers = np.arange(len(rows))
    spans = np.zeros((len(rows), 2), np.int64)
    if training:
        spans = _answer_pieces(rows, context, texts, list(number_of))
        # Labelled as impossible, these would teach the model something wrong.
        has_pieces = spans[:, 0] <= spans[:, 1]
        ids[NO_PIECES] = [rows[number].id for number in np.flatnonzero(~has_pieces)]
        numbers = np.flatnonzero(has_pieces)

    query = np.minimum(queries.lengths[numbers], max_query_length)
    room = max_seq_length - QUESTION_SPECIALS - query
    over = np.maximum(0, texts.lengths[context[numbers]] - room)
    parts = 1 + -(-over // doc_stride)
    question = np.repeat(numbers, parts)
    first = runs(np.zeros(len(parts), np.int64), parts) * doc_stride
    length = np.minimum(np.repeat(room, parts), texts.lengths[context[question]] - first)
    layout = _Layout(question, context[question], np.repeat(query, parts), first, length)

    features, offsets = _features(tokenizer, queries, texts, layout)
    best = _best_context(offsets, features.starts + layout.query + 2, layout)
    if training:
        labels = _labels(spans[question], layout)
        features = Features(features.tokens, features.segments, features.ends, labels)
    remarks = remark_lines({remark: names for remark, names in ids.items() if names})
    return Windows(features, question.astype(np.int32), offsets, best, remarks)


def _check_room(max_seq_length: int, doc_stride: int, max_query_length: int) -> None:
    for name, value in (("doc_stride", doc_stride), ("max_query_length", max_query_length)):
        if value < 1:
            raise ConfigError(f"{name} ({value})", "is below 1", "give 1 or more")
    error = window_error(max_seq_length, doc_stride, max_query_length)
    if error:
        raise ConfigError("max_seq_length", *error)


def _encode(tokenizer: TextTokenizer, texts: Sequence[str], *, with_offsets: bool) -> _Pieces:
    """Encode texts on all cores, some thousands at once, as the library's results are large."""
    library = tokenizer.library
    encode = library.encode_batch if with_offsets else library.encode_batch_fast
    ids, lengths, offsets = [np.zeros(0, np.int32)], [], [np.zeros((0, 2), np.int32)]
    for begin in range(0, len(texts), ENCODED_AT_ONCE):
        for encoding in encode(texts[begin : begin + ENCODED_AT_ONCE], add_special_tokens=False):
            ids.append(np.array(encoding.ids, np.int32))
            lengths.append(len(encoding.ids))
            if with_offsets:
                offsets.append(np.array(encoding.offsets, np.int32).reshape(-1, 2))
    counts = np.array(lengths, np.int64)
    return _Pieces(np.concatenate(ids), counts.cumsum() - counts, counts, np.concatenate(offsets))


def runs(starts: Numbers, lengths: Numbers) -> Numbers:
    """Return start, start + 1, ... of each run, one run after another."""
    before = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) + np.repeat(starts - before, lengths)


def _answer_pieces(
    rows: Sequence[Question], context: Numbers, texts: _Pieces, contexts: Sequence[str]
) -> Numbers:
    """Return the first and last piece of each first answer [q, 2]; first > last if it has none.

    A piece that the answer only touches belongs to it. An impossible question has -1, -1, which no window
    contains. The characters of all contexts are numbered consecutively, so that one search handles all
    questions.
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


def _features(
    tokenizer: TextTokenizer, queries: _Pieces, texts: _Pieces, layout: _Layout
) -> tuple[Features, npt.NDArray[np.int32]]:
    """Return tokens and segments of the windows, and the characters [T, 2] of their tokens."""
    question, context, query, first, length = layout
    ends = np.cumsum(query + length + QUESTION_SPECIALS)
    starts = ends - (query + length + QUESTION_SPECIALS)
    text_starts = starts + query + 2
    total = int(ends[-1]) if len(ends) else 0
    tokens = np.full(total, tokenizer.special.sep, np.int32)
    tokens[starts] = tokenizer.special.cls
    tokens[runs(starts + 1, query)] = queries.ids[runs(queries.starts[question], query)]
    inside = runs(text_starts, length)
    pieces = runs(texts.starts[context] + first, length)
    tokens[inside] = texts.ids[pieces]
    segments = np.zeros(total, np.int8)
    segments[runs(text_starts, length + 1)] = 1
    offsets = np.full((total, 2), -1, np.int32)
    offsets[inside] = texts.offsets[pieces]
    return Features(tokens, segments, ends.astype(np.int64)), offsets


def _best_context(
    offsets: npt.NDArray[np.int32], text_starts: Numbers, layout: _Layout
) -> npt.NDArray[np.bool_]:
    """Return whether, of all windows, this one has the most context around a token [T].

    As in Google's code: the smaller number of the pieces left and right of it, plus a hundredth of the
    window's length; of equal windows the first.
    """
    best = offsets[:, 0] >= 0
    # Most questions have one window, which is the best for all its pieces.
    several = np.flatnonzero(np.bincount(layout.question)[layout.question] > 1)
    question, first, length = (
        column[several] for column in (layout.question, layout.first, layout.length)
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
    best[runs(text_starts[several], length)] = wins
    return best


def _labels(spans: Numbers, layout: _Layout) -> dict[str, npt.NDArray[np.int32]]:
    """Return the positions of each window's answer [n]; 0, which is [CLS], where it is not inside."""
    first, last = layout.first, layout.first + layout.length
    is_inside = (spans[:, 0] >= first) & (spans[:, 1] < last)
    shift = (first - layout.query - 2)[:, None]
    positions = np.where(is_inside[:, None], spans - shift, 0).astype(np.int32)
    return {"start_positions": positions[:, 0].copy(), "end_positions": positions[:, 1].copy()}
