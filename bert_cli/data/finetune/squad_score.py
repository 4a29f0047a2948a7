"""`bert squad-score`: the official scores of answers, F1 and exact match in per cent.

Rajpurkar et al. 2016 and 2018 and their `evaluate-v1.1.py` and `evaluate-v2.0.py`: texts are
compared in lower case, without ASCII punctuation and articles, by their words, and the best of the
gold answers counts. The two scripts differ where nothing is left of a text: 1.1 gives F1 0 for two
empty texts, 2.0 gives 1 and does not count empty gold answers. A missing answer is 0 here in both;
the script of 2.0 stops at one.
"""

import json
import math
import re
import string
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_cli.config.finetune import SquadScoreSettings
from bert_cli.data.finetune.examples import read_text
from bert_cli.data.finetune.squad import Questions, answer_rows, questions_in, read_json, text_field
from bert_cli.errors import DataError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def run(settings: SquadScoreSettings) -> None:
    """Score a file of predictions; nothing but one JSON object goes to standard output."""
    gold = read_gold(settings.gold)
    predictions = read_predictions(settings.predictions)
    for line in mismatches(gold, predictions):
        print(f"{settings.predictions}: {line}", file=sys.stderr)
    path = settings.na_prob_file
    if path is None:
        print(json.dumps(score(gold, predictions)))
        return
    if not gold.version_2:
        raise DataError(
            f"na_prob_file ({path}): has no effect with {settings.gold}, where every question has an answer; "
            "leave it out"
        )
    odds = read_no_answer_probabilities(path, gold)
    print(json.dumps(score(gold, predictions, odds, settings.na_prob_thresh)))


@dataclass(frozen=True)
class Gold:
    """What predictions are held against."""

    answers: Sequence[tuple[str, tuple[str, ...]]]
    """Id and gold texts of each question; no text: it cannot be answered."""
    version_2: bool
    """Whether the rules of SQuAD 2.0 hold, as they do when any question is impossible."""


def read_gold(gold: Path | Mapping[str, Any]) -> Gold:
    """The gold answers of a SQuAD file, or of what it holds. DataError for any other structure."""
    origin: Path | str = gold if isinstance(gold, Path) else "gold"
    parsed = read_json(gold) if isinstance(gold, Path) else gold
    answers: list[tuple[str, tuple[str, ...]]] = []
    bare, version_2 = "", False
    for where, _, row in questions_in(origin, parsed):
        texts = tuple(text_field(answer, "text", where) for answer in answer_rows(row, where))
        answers.append((text_field(row, "id", where), texts))
        version_2 |= row.get("is_impossible") is True
        bare = bare or ("" if texts else where)
    if not answers:
        raise DataError(f"{origin}: holds no questions; give a development file")
    if bare and not version_2:
        raise DataError(f"{bare}: has no answers to score against; give a development file")
    return Gold(answers, version_2)


def gold_of(questions: Questions) -> Gold:
    """The gold answers of questions that were read, by the rule of `read_gold`: where some are impossible,
    so is one without an answer. DataError for it elsewhere.
    """
    rows = questions.questions
    version_2 = any(question.is_impossible for question in rows)
    bare = [question.id for question in rows if not question.answers]
    if bare and not version_2:
        raise DataError(
            f"question '{bare[0]}': has no answers to score against; give a development file"
        )
    texts = [(row.id, tuple(answer.text for answer in row.answers)) for row in rows]
    return Gold(texts, version_2)


def read_predictions(path: Path) -> dict[str, str]:
    """Answer by question id. DataError, with the line, for anything but texts."""
    parsed = read_json(path)
    if not isinstance(parsed, dict):
        raise DataError(f"{path}: is no JSON object; give question id -> answer")
    for name, answer in parsed.items():
        if not isinstance(answer, str):
            line = _line_of(read_text(path), name)
            raise DataError(
                f"{path} (line {line}): the answer to '{name}' is no string; give a text, "
                'or "" for no answer'
            )
    return parsed


def read_no_answer_probabilities(path: Path, gold: Gold) -> dict[str, float]:
    """Probability of no answer by question id, for all gold questions. DataError for anything else."""
    parsed = read_json(path)
    if not isinstance(parsed, dict):
        raise DataError(f"{path}: is no JSON object; give question id -> probability of no answer")
    for name, value in parsed.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            line = _line_of(read_text(path), name)
            raise DataError(f"{path} (line {line}): '{name}' has no number; give a probability")
    missing = [name for name, _ in gold.answers if name not in parsed]
    if missing:
        raise DataError(f"{path}: lacks {_counted(missing)}; give a probability for each question")
    return parsed


def _line_of(text: str, name: str) -> int:
    """The line where a JSON object's last key of this name stands."""
    spelt = {json.dumps(name), json.dumps(name, ensure_ascii=False)}
    pattern = "|".join(re.escape(word) for word in spelt)
    # An odd spelling, "\u0061" for an "a", is not found: then it is the first line.
    places = [found.start() for found in re.finditer(rf"(?:{pattern})\s*:", text)]
    return text.count("\n", 0, places[-1] if places else 0) + 1


def mismatches(gold: Gold, predictions: Mapping[str, str]) -> list[str]:
    """What a person should know of ids that only one side has."""
    known = dict(gold.answers)
    missing = [name for name in known if name not in predictions]
    foreign = [name for name in predictions if name not in known]
    told = []
    if missing:
        told.append(f"{_counted(missing)} of {len(known)} have no answer; each scores 0")
    if foreign:
        told.append(f"{_counted(foreign)} are not in the gold file; their answers are not scored")
    return told


def _counted(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{len(names)} question{'s' if len(names) > 1 else ''} ({shown})"


def score(
    gold: Gold | Path | Mapping[str, Any],
    predictions: Mapping[str, str],
    no_answer: Mapping[str, float] | None = None,
    threshold: float = 1.0,
) -> dict[str, float | int]:
    """Return F1 and exact match in per cent under the official names.

    Those of 1.1 are `f1` and `exact_match`; those of 2.0 `exact`, `f1` and `total` of all questions, and
    with `HasAns_` and `NoAns_` of those that have answers and that have none. With `no_answer`, the
    probability of none by question id, an answer counts as none where that is above `threshold`, and
    the thresholds that would have scored best follow, as `best_exact_thresh` and `best_f1_thresh`.
    """
    if not isinstance(gold, Gold):
        gold = read_gold(gold)
    # The script of 1.1 counts an id that comes twice each time, that of 2.0 its last.
    rows = list(dict(gold.answers).items()) if gold.version_2 else list(gold.answers)
    raw = [
        (0.0, 0.0) if name not in predictions
        else best_score(texts, predictions[name], version_2=gold.version_2)
        for name, texts in rows
    ]  # fmt: skip
    if not gold.version_2:
        f1, exact = _mean(raw)
        return {"f1": f1, "exact_match": exact}
    odds = no_answer or {}
    scores = [
        (float(not texts), float(not texts))
        if name in predictions and odds.get(name, threshold) > threshold
        else found
        for (name, texts), found in zip(rows, raw, strict=True)
    ]
    counted = _counts(scores)
    for prefix, wanted in (("HasAns", True), ("NoAns", False)):
        pairs = zip(rows, scores, strict=True)
        part = [found for (_, texts), found in pairs if bool(texts) == wanted]
        if part:
            counted |= {f"{prefix}_{name}": value for name, value in _counts(part).items()}
    if no_answer is not None:
        for name, which in (("exact", 1), ("f1", 0)):
            own = [found[which] for found in raw]
            best = _best_threshold(rows, own, predictions, no_answer)
            counted |= dict(zip((f"best_{name}", f"best_{name}_thresh"), best, strict=True))
    return counted


def _counts(scores: Sequence[tuple[float, float]]) -> dict[str, float | int]:
    f1, exact = _mean(scores)
    return {"exact": exact, "f1": f1, "total": len(scores)}


def _mean(scores: Sequence[tuple[float, float]]) -> tuple[float, float]:
    f1 = sum(found[0] for found in scores)
    exact = sum(found[1] for found in scores)
    return 100.0 * f1 / len(scores), 100.0 * exact / len(scores)


def _best_threshold(
    rows: Sequence[tuple[str, tuple[str, ...]]],
    scores: Sequence[float],
    predictions: Mapping[str, str],
    no_answer: Mapping[str, float],
) -> tuple[float, float]:
    """Return the best score in per cent and its threshold, as `find_best_thresh` of `evaluate-v2.0.py` does.

    At first no question is answered; they get their answers in the order of their probabilities, equal ones
    in that of the file.
    """
    number = {name: index for index, (name, _) in enumerate(rows)}
    total = float(sum(not texts and name in predictions for name, texts in rows))
    best, threshold = total, 0.0
    for name in sorted(no_answer, key=no_answer.__getitem__):
        if name not in number or name not in predictions:
            continue
        if rows[number[name]][1]:
            total += scores[number[name]]
        elif predictions[name]:
            total -= 1.0
        if total > best:
            best, threshold = total, no_answer[name]
    return 100.0 * best / len(rows), threshold


def best_score(texts: Iterable[str], prediction: str, *, version_2: bool) -> tuple[float, float]:
    """F1 and exact match (0 or 1) of one answer, each the best among the gold texts."""
    golds = [normalize(text) for text in texts]
    if version_2:
        golds = [text for text in golds if text] or [""]
    found = normalize(prediction)
    f1 = max(_f1(text.split(), found.split(), both_empty=float(version_2)) for text in golds)
    return f1, float(found in golds)


def normalize(text: str) -> str:
    """A text as it is compared: lower case, no ASCII punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def _f1(gold: Sequence[str], found: Sequence[str], *, both_empty: float) -> float:
    """Of two bags of words."""
    if not gold and not found:
        return both_empty
    same = (Counter(gold) & Counter(found)).total()
    if not same:
        return 0.0
    precision, recall = same / len(found), same / len(gold)
    return 2 * precision * recall / (precision + recall)
