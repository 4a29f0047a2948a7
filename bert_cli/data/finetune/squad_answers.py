"""From logits of starts and ends to answers.

An answer is a span of positions in the context, at most `max_answer_length` long, and scores the sum of its
start's and its end's logit. All such spans are compared, not only those of the best starts and ends, and an
answer may start at a position only in the window with the most context around it. The text is cut from the
context by its characters. For SQuAD 2.0 the [CLS] position stands for "no answer" (Devlin et al. 2019,
section 4.3), which is given when it beats the best span by more than a threshold; that is chosen afterwards,
on the same logits.

Shapes: q questions, n windows, T tokens of all windows, L positions of a window.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from bert_cli.data.finetune.features import by_length
from bert_cli.data.finetune.metrics import best_score
from bert_cli.data.finetune.squad import Questions, gold_of
from bert_cli.data.finetune.squad_windows import Windows
from bert_cli.errors import DataError
from bert_cli.files import read_json

Floats = npt.NDArray[np.floating[Any]]
Numbers = npt.NDArray[np.int64]
Entry = dict[str, str | float]

SUMS_AT_ONCE = 1 << 22
"""Sums of a start and an end, 32 MB; more at once is not faster."""
WINDOWS_AT_ONCE = 64
NULL_THRESHOLD = "null_threshold.json"
SPANS_PER_ANSWER = 4
"""Spans taken from a window for each wanted answer, as several may be the same text."""


@dataclass(frozen=True)
class Answers:
    """The answers to some questions, by question id."""

    predictions: dict[str, str]
    nbest: dict[str, list[Entry]]
    """The best answers of different text with `text`, `probability`, `start_logit`, `end_logit`; for SQuAD
    2.0 also the empty one."""
    null_odds: dict[str, float]
    """Score of no answer minus that of the best one; for SQuAD 2.0 only."""


@dataclass(frozen=True)
class NullThreshold:
    """The thresholds that score best on a development set, and those scores in per cent."""

    f1: float
    f1_threshold: float
    exact_match: float
    exact_threshold: float


class _Spans(NamedTuple):
    """Spans of positions, all [spans]; those of a question are consecutive, the best first."""

    question: Numbers
    first: Numbers
    """Position among all T."""
    last: Numbers
    start_logit: Floats
    end_logit: Floats


def answers(
    questions: Questions,
    windows: Windows,
    start_logits: Floats,
    end_logits: Floats,
    *,
    n_best: int,
    max_answer_length: int,
    version_2: bool,
    null_threshold: float | None,
) -> Answers:
    """Return the answers to all questions from the logits [T] of their windows, without padding.

    Without a threshold the best text is always given, as `best_null_threshold` needs it. A question without
    any position to answer from (a context of control characters) gets "".
    """
    start, end = start_logits.astype(np.float64), end_logits.astype(np.float64)
    if not len(start) == len(end) == len(windows.offsets):
        raise ValueError(f"{len(start)} and {len(end)} logits for {len(windows.offsets)} tokens")
    if len(np.unique(windows.question)) != len(questions):
        raise ValueError("some questions have no windows; make them with training=False")
    spans = _best_spans(windows, start, end, n_best * SPANS_PER_ANSWER, max_answer_length)
    bounds = np.searchsorted(spans.question, np.arange(len(questions) + 1))
    begin = windows.offsets[spans.first, 0].tolist()
    finish = windows.offsets[spans.last, 1].tolist()
    starts, ends = spans.start_logit.tolist(), spans.end_logit.tolist()
    nulls = _null_positions(windows, start, end, len(questions)) if version_2 else None

    result = Answers({}, {}, {})
    for number, question in enumerate(questions.questions):
        entries: dict[str, Entry] = {}
        for row in range(bounds[number], bounds[number + 1]):
            text = question.context[begin[row] : finish[row]]
            entries.setdefault(text, _entry(text, starts[row], ends[row]))
            if len(entries) == n_best:
                break
        ranked = list(entries.values()) or [_entry("", 0.0, 0.0)]
        best, name = ranked[0], question.id
        if nulls is not None:
            null = _entry("", float(start[nulls[number]]), float(end[nulls[number]]))
            result.null_odds[name] = _sum(null) - _sum(best)
            # Last, so that it comes after answers of equal score.
            ranked = sorted([*entries.values(), null], key=_sum, reverse=True)
        result.predictions[name] = str(best["text"])
        result.nbest[name] = _with_probabilities(ranked)
    if null_threshold is None:
        return result
    chosen = with_null_threshold(result.predictions, result.null_odds, null_threshold)
    return Answers(chosen, result.nbest, result.null_odds)


def _entry(text: str, start: float, end: float) -> Entry:
    return {"text": text, "probability": 0.0, "start_logit": start, "end_logit": end}


def _sum(entry: Entry) -> float:
    return float(entry["start_logit"]) + float(entry["end_logit"])


def _with_probabilities(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries with their softmax probabilities."""
    sums = np.array([_sum(entry) for entry in entries])
    powers = np.exp(sums - sums.max())
    values = (powers / powers.sum()).tolist()
    return [entry | {"probability": value} for entry, value in zip(entries, values, strict=True)]


# --- the best spans


def _best_spans(
    windows: Windows, start: Floats, end: Floats, wanted: int, max_answer_length: int
) -> _Spans:
    """Return the `wanted` best spans of each window, sorted by question, score and position."""
    inside = windows.offsets[:, 0] >= 0
    # A span that is not allowed has the sum -inf.
    start = np.where(inside & windows.best_context, start, -np.inf)
    end = np.where(inside, end, -np.inf)
    parts = [
        _best_of_windows(positions, valid, start, end, wanted, max_answer_length)
        for positions, valid in _groups(windows, max_answer_length)
    ]
    first = np.concatenate([np.zeros(0, np.int64), *(part[0] for part in parts)])
    last = np.concatenate([np.zeros(0, np.int64), *(part[1] for part in parts)])
    window = np.searchsorted(windows.features.ends, first, side="right")
    question = windows.question[window].astype(np.int64)
    order = np.lexsort((last, first, -(start[first] + end[last]), question))
    first, last = first[order], last[order]
    return _Spans(question[order], first, last, start[first], end[last])


def _groups(
    windows: Windows, max_answer_length: int
) -> Iterator[tuple[Numbers, npt.NDArray[np.bool_]]]:
    """Yield the positions [B, L] among all T of windows of similar length, and which are not padding."""
    features = windows.features
    for group in by_length(features, WINDOWS_AT_ONCE):
        longest = int(features.lengths[group].max())
        rows = max(1, SUMS_AT_ONCE // (longest * min(longest, max_answer_length)))
        for begin in range(0, len(group), rows):
            numbers = group[begin : begin + rows]
            inner = np.arange(longest)
            valid = inner < features.lengths[numbers, None]
            yield np.where(valid, features.starts[numbers, None] + inner, 0), valid


def _best_of_windows(
    positions: Numbers,
    valid: npt.NDArray[np.bool_],
    start: Floats,
    end: Floats,
    wanted: int,
    max_answer_length: int,
) -> tuple[Numbers, Numbers]:
    """Return the first and last positions of the best spans of some windows, in no order."""
    longest = positions.shape[1]
    reach = min(longest, max_answer_length)
    starts = np.where(valid, start[positions], -np.inf)
    ends = np.where(valid, end[positions], -np.inf)
    padded = np.pad(ends, ((0, 0), (0, reach - 1)), constant_values=-np.inf)
    # [B, L, reach]: an answer that starts at L and is 1, 2, ... positions long.
    sums = starts[:, :, None] + np.lib.stride_tricks.sliding_window_view(padded, reach, axis=1)
    flat = sums.reshape(len(positions), longest * reach)
    wanted = min(wanted, flat.shape[1])
    best = np.argpartition(flat, flat.shape[1] - wanted, axis=1)[:, -wanted:]
    row, column = np.nonzero(np.take_along_axis(flat, best, axis=1) > -np.inf)
    first, more = np.divmod(best[row, column], reach)
    return positions[row, first], positions[row, first + more]


# --- no answer


def _null_positions(windows: Windows, start: Floats, end: Floats, questions: int) -> Numbers:
    """Return the [CLS] [q] of each question's window where no answer scores lowest, of equals the first."""
    positions = windows.features.starts
    order = np.lexsort((positions, start[positions] + end[positions], windows.question))
    first = np.searchsorted(windows.question[order], np.arange(questions))
    return positions[order[first]]


class _Threshold(BaseModel):
    threshold: float


def read_null_threshold(run: Path) -> float | None:
    """Return the threshold in a run's folder, or None. DataError where it cannot be read."""
    path = run / NULL_THRESHOLD
    if not path.is_file():
        return None
    return read_json(path, _Threshold, DataError, "remove it, or score the run again").threshold


def with_null_threshold(
    predictions: Mapping[str, str], null_odds: Mapping[str, float], threshold: float
) -> dict[str, str]:
    """Return the predictions, empty where no answer is better by more than the threshold."""
    return {name: "" if null_odds[name] > threshold else text for name, text in predictions.items()}


def best_null_threshold(
    null_odds: Mapping[str, float], predictions: Mapping[str, str], questions: Questions
) -> NullThreshold:
    """Return the thresholds with the best F1 and the best exact match, of equals the smallest.

    `predictions` are those without a threshold. Chosen as in `evaluate-v2.0.py`, except that a threshold
    below all odds is tried too, as odds may be negative, and questions of equal odds change together, as they
    do when the threshold is applied.
    """
    gold = dict(gold_of(questions).answers)
    names = sorted(gold, key=lambda name: null_odds[name])
    odds = np.array([null_odds[name] for name in names])
    given = np.array([best_score(gold[name], predictions[name], version_2=True) for name in names])
    empty = np.array([best_score(gold[name], "", version_2=True) for name in names])
    # [q + 1, 2] sums of both scores when the first 0, 1, ... questions are answered.
    none = np.zeros((1, 2))
    answered = np.concatenate([none, given.cumsum(0)])
    unanswered = np.concatenate([empty[::-1].cumsum(0)[::-1], none])
    sums = answered + unanswered
    thresholds = np.concatenate([odds[:1] - 1.0, odds])
    possible = np.flatnonzero(np.append(True, np.diff(odds, append=np.inf) > 0))
    f1, exact = (int(possible[sums[possible, column].argmax()]) for column in (0, 1))
    scale = 100.0 / len(names)
    return NullThreshold(
        scale * float(sums[f1, 0]),
        float(thresholds[f1]),
        scale * float(sums[exact, 1]),
        float(thresholds[exact]),
    )
