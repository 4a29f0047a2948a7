"""From a model's scores of starts and ends to answers.

An answer is a run of places in the context, at most so long, and scores the sum of its start's and
its end's logit. Every such run is looked at, not only those of the best starts and ends, and a place
may start an answer only in the window where it has the most text around it. The text is cut from the
context by its characters. For SQuAD 2.0 the [CLS] place stands for no answer (Devlin et al. 2019,
section 4.3), given when it beats the best answer by more than a threshold; that is chosen afterwards,
on the same logits.

Shapes: q questions, n windows, T tokens of all of them, L places of a window.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from bert_cli.data.finetune.features import by_length
from bert_cli.data.finetune.squad import Questions
from bert_cli.data.finetune.squad_score import best_score, gold_of
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
SPARE = 4
"""Runs taken from a window for each answer wanted, as several may be the same text."""


@dataclass(frozen=True)
class Answers:
    """The answers to some questions, by question id."""

    predictions: dict[str, str]
    nbest: dict[str, list[Entry]]
    """The best answers of different text with `text`, `probability`, `start_logit`, `end_logit`; for
    SQuAD 2.0 also the empty one."""
    null_odds: dict[str, float]
    """How much better no answer scores than the best one; for SQuAD 2.0 only."""


@dataclass(frozen=True)
class NullThreshold:
    """The thresholds that score best on a development set, and the scores there in per cent."""

    f1: float
    f1_threshold: float
    exact_match: float
    exact_threshold: float


class _Spans(NamedTuple):
    """Runs of places; all [runs], those of a question together, the best first."""

    question: Numbers
    first: Numbers
    """Place among all T."""
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
    """The answers to all questions from the logits [T] of their windows, padding left out.

    Without a threshold the best text is always given, which is what `best_null_threshold` wants. A
    question without any place to answer from (a context of control characters) gets "".
    """
    start, end = start_logits.astype(np.float64), end_logits.astype(np.float64)
    if not len(start) == len(end) == len(windows.offsets):
        raise ValueError(f"{len(start)} and {len(end)} logits for {len(windows.offsets)} tokens")
    if len(np.unique(windows.question)) != len(questions):
        raise ValueError("some questions have no windows; make them with training=False")
    spans = _best_spans(windows, start, end, n_best * SPARE, max_answer_length)
    bounds = np.searchsorted(spans.question, np.arange(len(questions) + 1))
    begin = windows.offsets[spans.first, 0].tolist()
    finish = windows.offsets[spans.last, 1].tolist()
    starts, ends = spans.start_logit.tolist(), spans.end_logit.tolist()
    nulls = _null_places(windows, start, end, len(questions)) if version_2 else None

    found = Answers({}, {}, {})
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
            found.null_odds[name] = _sum(null) - _sum(best)
            # Behind answers that score the same.
            ranked = sorted([*entries.values(), null], key=_sum, reverse=True)
        found.predictions[name] = str(best["text"])
        found.nbest[name] = _with_probabilities(ranked)
    if null_threshold is None:
        return found
    chosen = with_null_threshold(found.predictions, found.null_odds, null_threshold)
    return Answers(chosen, found.nbest, found.null_odds)


def _entry(text: str, start: float, end: float) -> Entry:
    return {"text": text, "probability": 0.0, "start_logit": start, "end_logit": end}


def _sum(entry: Entry) -> float:
    return float(entry["start_logit"]) + float(entry["end_logit"])


def _with_probabilities(entries: Sequence[Entry]) -> list[Entry]:
    """The entries with their shares of the softmax among them."""
    sums = np.array([_sum(entry) for entry in entries])
    powers = np.exp(sums - sums.max())
    shares = (powers / powers.sum()).tolist()
    return [entry | {"probability": share} for entry, share in zip(entries, shares, strict=True)]


# --- the best runs of places


def _best_spans(
    windows: Windows, start: Floats, end: Floats, wanted: int, max_answer_length: int
) -> _Spans:
    """The so many best runs of each window, ordered by question, score and place."""
    inside = windows.offsets[:, 0] >= 0
    # A run that must not be has the sum -inf.
    start = np.where(inside & windows.best_context, start, -np.inf)
    end = np.where(inside, end, -np.inf)
    parts = [
        _best_of_windows(where, valid, start, end, wanted, max_answer_length)
        for where, valid in _groups(windows, max_answer_length)
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
    """Places [B, L] among all T of windows of like length, and which of them are padding's."""
    features = windows.features
    for group in by_length(features, WINDOWS_AT_ONCE):
        longest = int(features.lengths[group].max())
        rows = max(1, SUMS_AT_ONCE // (longest * min(longest, max_answer_length)))
        for begin in range(0, len(group), rows):
            numbers = group[begin : begin + rows]
            place = np.arange(longest)
            valid = place < features.lengths[numbers, None]
            yield np.where(valid, features.starts[numbers, None] + place, 0), valid


def _best_of_windows(
    where: Numbers,
    valid: npt.NDArray[np.bool_],
    start: Floats,
    end: Floats,
    wanted: int,
    max_answer_length: int,
) -> tuple[Numbers, Numbers]:
    """First and last places of the best runs of some windows, in no order."""
    longest = where.shape[1]
    reach = min(longest, max_answer_length)
    starts = np.where(valid, start[where], -np.inf)
    ends = np.where(valid, end[where], -np.inf)
    behind = np.pad(ends, ((0, 0), (0, reach - 1)), constant_values=-np.inf)
    # [B, L, reach]: an answer that starts at L and is 1, 2, ... places long.
    sums = starts[:, :, None] + np.lib.stride_tricks.sliding_window_view(behind, reach, axis=1)
    flat = sums.reshape(len(where), longest * reach)
    wanted = min(wanted, flat.shape[1])
    best = np.argpartition(flat, flat.shape[1] - wanted, axis=1)[:, -wanted:]
    row, column = np.nonzero(np.take_along_axis(flat, best, axis=1) > -np.inf)
    place, more = np.divmod(best[row, column], reach)
    return where[row, place], where[row, place + more]


# --- no answer


def _null_places(windows: Windows, start: Floats, end: Floats, questions: int) -> Numbers:
    """[q] the [CLS] of each question's window where no answer scores lowest, the first of equals."""
    places = windows.features.starts
    order = np.lexsort((places, start[places] + end[places], windows.question))
    first = np.searchsorted(windows.question[order], np.arange(questions))
    return places[order[first]]


class _Threshold(BaseModel):
    threshold: float


def null_threshold_of(run: Path) -> float | None:
    """The threshold that lies in a run's folder, None for none. DataError where it cannot be read."""
    path = run / NULL_THRESHOLD
    if not path.is_file():
        return None
    return read_json(path, _Threshold, DataError, "remove it, or score the run again").threshold


def with_null_threshold(
    predictions: Mapping[str, str], null_odds: Mapping[str, float], threshold: float
) -> dict[str, str]:
    """The predictions, empty where no answer is better by more than the threshold."""
    return {name: "" if null_odds[name] > threshold else text for name, text in predictions.items()}


def best_null_threshold(
    null_odds: Mapping[str, float], predictions: Mapping[str, str], questions: Questions
) -> NullThreshold:
    """The thresholds that give the best F1 and the best exact match, each the smallest of equals.

    `predictions` are those without a threshold. As `evaluate-v2.0.py` chooses them, but for two
    things: one below all odds is tried too, as odds may be negative, and questions of equal odds
    turn together, as they do when the threshold is applied.
    """
    gold = dict(gold_of(questions).answers)
    names = sorted(gold, key=lambda name: null_odds[name])
    odds = np.array([null_odds[name] for name in names])
    given = np.array([best_score(gold[name], predictions[name], version_2=True) for name in names])
    empty = np.array([best_score(gold[name], "", version_2=True) for name in names])
    # [q + 1, 2] sums of both scores when the first 0, 1, ... questions keep their answers.
    none = np.zeros((1, 2))
    kept = np.concatenate([none, given.cumsum(0)])
    emptied = np.concatenate([empty[::-1].cumsum(0)[::-1], none])
    sums = kept + emptied
    thresholds = np.concatenate([odds[:1] - 1.0, odds])
    possible = np.flatnonzero(np.append(True, np.diff(odds, append=np.inf) > 0))
    f1, exact = (int(possible[sums[possible, column].argmax()]) for column in (0, 1))
    share = 100.0 / len(names)
    return NullThreshold(
        share * float(sums[f1, 0]),
        float(thresholds[f1]),
        share * float(sums[exact, 1]),
        float(thresholds[exact]),
    )
