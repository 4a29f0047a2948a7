"""Windows of SQuAD, [CLS] question [SEP] part of the paragraph [SEP], and the answers from their logits.

Windows start `doc_stride` pieces apart (Devlin et al. 2019, section 4.2, and Google's `run_squad.py`). An answer
is the span with the highest sum of two logits. In SQuAD 2.0 "no answer" (section 4.3) is given when [CLS] beats
it by more than a threshold.

Shapes: q questions, n windows, T tokens of all windows, L positions of a window.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from pydantic import BaseModel

from bert_cli.arrays import Array, Bools, Floats, Ints32, Ints64
from bert_cli.data.finetune.features import (
    Arrays,
    Features,
    Pieces,
    encode,
    framed,
    most_central,
    runs,
    window_spans,
)
from bert_cli.data.finetune.squad import Answer, Question, best_score, gold_of, remark_lines
from bert_cli.data.tokens.tokenizer import TextTokenizer
from bert_cli.errors import ConfigError, DataError
from bert_cli.facts.windows import QUESTION_SPECIALS, window_error
from bert_cli.files import read_json
from bert_cli.settings.numbers import Positive

Entry = dict[str, str | float]

NO_PIECES = "question{s} left out of training, whose answer contains no token"
CUT_QUESTIONS = "question{s} longer than max_query_length, truncated"
LONG_ANSWERS = "question{s} whose answer, longer than max_answer_length, is never given"
COLUMNS = ("question", "offsets", "best_context")
NULL_THRESHOLD = "null_threshold.json"
# A text, the sum of its logits, and the logits.
NO_ANSWER = "", 0.0, (0.0, 0.0)
# As in Google's run_squad.py.
N_BEST = 20  # different answers of a question, over which its probabilities are normalized
SPANS_PER_ANSWER = 4  # several may be the same text


@dataclass(frozen=True)
class Windows:
    """Questions, each with a part of its context."""

    features: Features
    """For training they have the labels `start_positions` and `end_positions` int32 [n], positions in the window;
    0 where the answer is impossible or not completely inside."""
    question: Ints32  # [n] number of the question; its windows are consecutive
    offsets: Ints32  # [T, 2] characters in the context; -1 outside of it
    best_context: Bools  # [T] whether no window has more context
    remarks: tuple[str, ...] = ()


def arrays_of_windows(windows: Windows) -> dict[str, Array]:
    """Return the windows as arrays by name, for a cache."""
    columns = {name: getattr(windows, name) for name in COLUMNS}
    remarks = np.array(windows.remarks, np.str_)
    return {**windows.features.arrays(), **columns, "remarks": remarks}


def windows_of(arrays: Arrays) -> Windows:
    """Return the windows of these arrays."""
    columns = {name: arrays[name] for name in COLUMNS}
    return Windows(Features.of(arrays), **columns, remarks=tuple(map(str, arrays["remarks"])))


def make_windows(
    questions: Sequence[Question],
    tokenizer: TextTokenizer,
    *,
    max_seq_length: int,
    doc_stride: int,
    max_query_length: int,
    training: bool,
) -> Windows:
    """Return the windows of all questions; for training they are labelled with each question's first answer.

    `doc_stride` is the distance between the starts of consecutive windows. Raises ConfigError if a question leaves
    fewer positions than that.
    """
    error = window_error(max_seq_length, doc_stride, max_query_length)
    if error:
        raise ConfigError("max_seq_length", *error)
    number_of: dict[str, int] = {}
    # A paragraph has some five questions: it is encoded once, and its windows refer to it.
    context = np.array([number_of.setdefault(row.context, len(number_of)) for row in questions])
    texts = encode(tokenizer, list(number_of), with_offsets=True)
    queries = encode(tokenizer, [row.question for row in questions])
    is_cut = queries.lengths > max_query_length
    ids = {CUT_QUESTIONS: [questions[number].id for number in np.flatnonzero(is_cut).tolist()]}

    numbers = np.arange(len(questions))
    spans = np.zeros((len(questions), 2), np.int64)
    if training:
        spans = _answer_pieces(questions, context, texts)
        # These questions have an answer; labelled as impossible, they would be wrong training data.
        has_pieces = spans[:, 0] <= spans[:, 1]
        ids[NO_PIECES] = [questions[number].id for number in np.flatnonzero(~has_pieces).tolist()]
        numbers = np.flatnonzero(has_pieces)

    query = np.minimum(queries.lengths[numbers], max_query_length)
    room = max_seq_length - QUESTION_SPECIALS - query
    row, first, length = window_spans(texts.lengths[context[numbers]], room, doc_stride)
    question = numbers[row]
    query = query[row]
    part = texts.part(context[question], first, length)
    is_pair = np.ones(len(row), np.bool_)
    features = framed(tokenizer, queries.part(question, np.zeros_like(row), query), part, is_pair)
    offsets = np.full((len(features.tokens), 2), -1, np.int32)
    offsets[runs(features.starts + query + 2, length)] = texts.offsets[runs(part.starts, length)]
    best = offsets[:, 0] >= 0
    best[best] = most_central(row, first, length)
    if training:
        # The positions of each window's answer [n]; 0, which is [CLS], where it is not inside.
        pieces = spans[question]
        is_inside = (pieces[:, 0] >= first) & (pieces[:, 1] < first + length)
        # From the paragraph to the window: [CLS], the question and a [SEP] come before.
        positions = pieces - (first - query - 2)[:, None]
        start, end = np.where(is_inside[:, None], positions, 0).astype(np.int32).T.copy()
        features = replace(features, labels={"start_positions": start, "end_positions": end})
    remarks = remark_lines({remark: names for remark, names in ids.items() if names})
    return Windows(features, question.astype(np.int32), offsets, best, remarks)


def _answer_pieces(rows: Sequence[Question], context: Ints64, texts: Pieces) -> Ints64:
    """Return the first and last piece of each first answer [q, 2]; first > last if it has none, -1 if impossible.

    A piece that the answer only touches belongs to it.
    """
    spans = np.full((len(rows), 2), -1, np.int64)
    for number, row in enumerate(rows):
        if not row.is_impossible:
            begin = row.answers[0].answer_start
            start = texts.starts[context[number]]
            offsets = texts.offsets[start : start + texts.lengths[context[number]]]
            # The first piece that ends after the start of the answer, and the last that begins before its end.
            first = np.searchsorted(offsets[:, 1], begin, side="right")
            stop = np.searchsorted(offsets[:, 0], begin + len(row.answers[0].text), side="left")
            spans[number] = first, stop - 1
    return spans


def long_answers(
    questions: Sequence[Question], windows: Windows, max_answer_length: int
) -> tuple[str, ...]:
    """Return the remark on questions whose first answer has more tokens than the maximum, if there are any."""
    answers = [row.answers[0] if row.answers else Answer("", 0) for row in questions]
    begin = np.array([answer.answer_start for answer in answers], np.int32)
    end = np.array([answer.answer_start + len(answer.text) for answer in answers], np.int32)
    owner = np.repeat(windows.question, windows.features.lengths)
    # Each token of a paragraph has one window with the most context.
    is_inside = windows.best_context & (windows.offsets[:, 1] > begin[owner])
    sizes = np.bincount(owner[is_inside & (windows.offsets[:, 0] < end[owner])], minlength=len(end))
    ids = [questions[number].id for number in np.flatnonzero(sizes > max_answer_length).tolist()]
    if not ids:
        return ()
    return remark_lines({LONG_ANSWERS: ids})


@dataclass(frozen=True)
class Answers:
    """The answers to some questions, by question id."""

    predictions: dict[str, str]
    nbest: dict[str, list[Entry]]
    """The best distinct answers with `text`, `probability`, `start_logit`, `end_logit`; for SQuAD 2.0 also the
    empty answer."""
    null_odds: dict[str, float]  # SQuAD 2.0 only: score of no answer minus the best answer's score


def answers(
    questions: Sequence[Question],
    windows: Windows,
    logits: Floats,
    *,
    max_answer_length: int,
    version_2: bool,
) -> Answers:
    """Return the best texts for all questions from the logits [T, 2] of their windows, without padding.

    A question without any position to answer from (a context of control characters) gets "".
    """
    start, end = logits.T.astype(np.float64)
    limit = N_BEST * SPANS_PER_ANSWER
    owner, first, last = _best_spans(windows, start, end, limit, max_answer_length)
    spans_of = np.searchsorted(owner, np.arange(len(questions) + 1)).tolist()
    windows_of = np.searchsorted(windows.question, np.arange(len(questions) + 1)).tolist()
    sums = start + end
    result = Answers({}, {}, {})
    for number, question in enumerate(questions):
        by_text: dict[str, tuple[float, float]] = {}
        for row in range(*spans_of[number : number + 2]):
            begin = windows.offsets[first[row], 0]
            text = question.context[begin : windows.offsets[last[row], 1]]
            by_text.setdefault(text, (float(start[first[row]]), float(end[last[row]])))
            if len(by_text) == N_BEST:
                break
        ranked = [(text, sum(logits), logits) for text, logits in by_text.items()]
        best, highest, _ = NO_ANSWER
        if ranked:
            best, highest, _ = ranked[0]
        name = question.id
        if version_2:
            # [CLS] in the window where no answer scores lowest, the first window at ties.
            cls = windows.features.starts[slice(*windows_of[number : number + 2])]
            lowest = cls[sums[cls].argmin()]
            null = float(start[lowest]), float(end[lowest])
            result.null_odds[name] = sum(null) - highest
            # Last, so that it comes after answers of equal score.
            ranked = sorted([*ranked, ("", sum(null), null)], key=itemgetter(1), reverse=True)
        ranked = ranked or [NO_ANSWER]
        result.predictions[name] = best
        scores = np.array([score for _, score, _ in ranked])
        # Less the largest, so that no exponential overflows.
        powers = np.exp(scores - scores.max())
        probabilities = (powers / powers.sum()).tolist()
        result.nbest[name] = [
            {"text": text, "probability": value, "start_logit": first, "end_logit": last}
            for (text, _, (first, last)), value in zip(ranked, probabilities, strict=True)
        ]
    return result


def _best_spans(
    windows: Windows, start: Floats, end: Floats, limit: int, max_answer_length: int
) -> tuple[Ints64, Ints64, Ints64]:
    """Return the question and the first and last position (of all T) of the `limit` best spans of each window.

    Spans are sorted by question, score and position.
    """
    features = windows.features
    inside = windows.offsets[:, 0] >= 0
    # A span that is not allowed has the sum -inf.
    start = np.where(inside & windows.best_context, start, -np.inf)
    end = np.where(inside, end, -np.inf)
    spans = [np.zeros((2, 0), np.int64)]
    for begin, stop in zip(features.starts.tolist(), features.ends.tolist(), strict=True):
        reach = min(stop - begin, max_answer_length)
        padded = np.pad(end[begin:stop], (0, reach - 1), constant_values=-np.inf)
        # [L, reach]: an answer that starts at L and is 1, 2, ... positions long.
        sums = start[begin:stop, None] + sliding_window_view(padded, reach)
        # The best `limit` of L x reach sums, unsorted: sorting all of them would be most of the work.
        best = np.argpartition(sums, max(0, sums.size - limit), axis=None)[-limit:]
        first, more = np.divmod(best[sums.ravel()[best] > -np.inf], reach)
        spans.append(begin + np.stack([first, first + more]))
    first, last = np.concatenate(spans, axis=1)
    window = np.searchsorted(features.ends, first, side="right")
    question = windows.question[window].astype(np.int64)
    order = np.lexsort((last, first, -(start[first] + end[last]), question))
    return question[order], first[order], last[order]


class WindowSizes(BaseModel):
    """The sizes of windows and answers in a run's settings, or in the config.json of its export."""

    max_seq_length: Positive | None = None
    doc_stride: Positive | None = None
    max_query_length: Positive | None = None
    max_answer_length: Positive | None = None


def read_window_sizes(run: Path) -> dict[str, int]:
    """Return the sizes of a run's windows, empty for a run without. Raises DataError for an unreadable file."""
    path = run / "settings.json"
    if not path.is_file():
        return {}
    remedy = "restore it, or move the checkpoint to a separate folder"
    sizes = read_json(path, WindowSizes, DataError, remedy).model_dump(exclude_none=True)
    if "doc_stride" in sizes:
        return sizes
    return {}


class _Threshold(BaseModel):
    threshold: float


def read_null_threshold(run: Path) -> float | None:
    """Return the threshold in a run's folder, or None. Raises DataError if its file cannot be read."""
    path = run / NULL_THRESHOLD
    if not path.is_file():
        return None
    return read_json(path, _Threshold, DataError, "move it away and score the run again").threshold


def with_null_threshold(
    predictions: Mapping[str, str], null_odds: Mapping[str, float], threshold: float
) -> dict[str, str]:
    """Return the predictions, replaced by "" where no answer scores better by more than the threshold."""
    replaced = {}
    for name, text in predictions.items():
        replaced[name] = "" if null_odds[name] > threshold else text
    return replaced


def best_null_threshold(
    null_odds: Mapping[str, float], predictions: Mapping[str, str], questions: Sequence[Question]
) -> float:
    """Return the smallest threshold with the best F1; `predictions` were made without a threshold.

    Differs from `evaluate-v2.0.py` in two points: a threshold below all odds, which may be negative, is tried too,
    and questions with equal odds change together.
    """
    gold = gold_of(questions).answers
    names = sorted(gold, key=lambda name: null_odds[name])
    odds = np.array([null_odds[name] for name in names])
    f1 = np.array([best_score(gold[name], predictions[name], version_2=True)[0] for name in names])
    empty = np.array([best_score(gold[name], "", version_2=True)[0] for name in names])
    # [q + 1] sums of F1 when the first 0, 1, ... questions are answered.
    # The rest has no answer: the sum of the scores of empty answers from there on.
    answered = np.append(0.0, f1.cumsum())
    unanswered = np.append(empty[::-1].cumsum()[::-1], 0.0)
    sums = answered + unanswered
    thresholds = np.append(odds[0] - 1.0, odds)
    # Not between equal odds, which one threshold cannot part.
    possible = np.append(True, np.diff(odds, append=np.inf) > 0)
    return float(thresholds[np.where(possible, sums, -np.inf).argmax()])
