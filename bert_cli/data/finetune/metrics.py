"""Metrics of predictions, as the tasks are published with them.

scikit-learn and SciPy compute those of examples. An entity is right when its type and both of its ends are;
entities are read from labels as conlleval (Tjong Kim Sang and Buchholz 2000) and seqeval by default do, so an
I- after O or after another type starts one. Every score is a number, never NaN, so that the best checkpoint
is well defined.

SQuAD's F1 and exact match are those of Rajpurkar et al. 2016 and 2018 and their `evaluate-v1.1.py` and
`evaluate-v2.0.py`: texts are compared in lower case, without ASCII punctuation and articles, by their words,
and the best of the gold answers counts. The scripts differ where nothing is left of a text: 1.1 gives F1 0
for two empty texts, 2.0 gives 1 and does not count empty gold answers. A missing answer is 0 here in both;
the script of 2.0 fails at one.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bert_cli.errors import DataError

Column = npt.NDArray[Any]
Chunk = tuple[str, int, int]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


# --- examples

METRICS = ("accuracy", "f1", "macro_f1", "matthews", "pearson", "spearman")


def score(names: Sequence[str], labels: Column, predictions: Column) -> dict[str, float]:
    """Return the metrics of these names. DataError for no examples, or for unequal lengths.

    `f1` is of label 1 against label 0, `macro_f1` the mean of the labels that occur, `matthews`, `pearson` and
    `spearman` are correlations. Where one is undefined, as with constant predictions, it is 0.
    """
    # Late, since they take a second to import.
    from scipy import stats
    from sklearn import metrics

    if len(labels) != len(predictions) or not len(labels):
        problem = f"cannot be scored against {len(labels)} labels"
        raise DataError(f"predictions ({len(predictions)})", problem, "give one for each example")
    columns = (labels, predictions)
    functions: Mapping[str, Callable[[], float]] = {
        "accuracy": lambda: metrics.accuracy_score(*columns),
        "f1": lambda: metrics.f1_score(*columns, zero_division=0.0),
        "macro_f1": lambda: metrics.f1_score(*columns, average="macro", zero_division=0.0),
        "matthews": lambda: metrics.matthews_corrcoef(*columns),
        "pearson": lambda: _correlation(stats.pearsonr, *columns),
        "spearman": lambda: _correlation(stats.spearmanr, *columns),
    }
    return {name: float(functions[name]()) for name in names}


def _correlation(function: Callable[..., Any], labels: Column, predictions: Column) -> float:
    # In float32, sums of 1,500 squares differ in the fifth digit.
    columns = [np.asarray(column, np.float64) for column in (labels, predictions)]
    if any(np.all(column == column[0]) for column in columns):
        return 0.0
    return float(function(*columns).statistic)


def confusion(labels: Column, predictions: Column, size: int) -> list[list[int]]:
    """Return how often each label (row) was predicted as each label (column), of `size` labels."""
    counts = np.zeros((size, size), np.int64)
    np.add.at(counts, (labels, predictions), 1)
    rows: list[list[int]] = counts.tolist()
    return rows


# --- entities


@dataclass(frozen=True)
class EntityScore:
    """Precision, recall and F1 of entities; a ratio with denominator 0 is 0."""

    right: int
    predicted: int
    support: int
    """Entities in the labels."""

    @property
    def precision(self) -> float:
        """Return the fraction of predicted entities that are right."""
        return self.right / self.predicted if self.predicted else 0.0

    @property
    def recall(self) -> float:
        """Return the fraction of labelled entities that were predicted."""
        return self.right / self.support if self.support else 0.0

    @property
    def f1(self) -> float:
        """Return the harmonic mean of both."""
        both = self.predicted + self.support
        return 2 * self.right / both if both else 0.0


def chunks(labels: Sequence[str]) -> list[Chunk]:
    """Return the entities of labels O, B-type, I-type: type, first word, last word.

    A bare B or I has the type "_", as in seqeval.
    """
    entities: list[Chunk] = []
    begin, before = 0, "O"
    for position, label in enumerate([*labels, "O"]):
        continues = label[0] == "I" and before != "O" and label[1:] == before[1:]
        if not continues:
            if before != "O":
                entities.append((before[2:] or "_", begin, position - 1))
            begin = position
        before = label
    return entities


def entity_scores(
    labels: Sequence[Sequence[str]], predictions: Sequence[Sequence[str]]
) -> tuple[EntityScore, dict[str, EntityScore]]:
    """Return the score of all entities together (the micro average), and those of each type.

    Takes label names of each sentence's words. DataError when sentences or words are missing.
    """
    if [len(sentence) for sentence in labels] != [len(sentence) for sentence in predictions]:
        problem = f"have other lengths than the labels ({len(labels)} sentences)"
        where = f"predictions ({len(predictions)} sentences)"
        raise DataError(where, problem, "give one for each word")
    gold, predicted = (
        {(number, *chunk) for number, sentence in enumerate(side) for chunk in chunks(sentence)}
        for side in (labels, predictions)
    )
    right = gold & predicted

    def of_type(kind: str) -> EntityScore:
        sides = (right, predicted, gold)
        return EntityScore(*(sum(chunk[1] == kind for chunk in side) for side in sides))

    types = sorted({chunk[1] for chunk in gold | predicted})
    return EntityScore(len(right), len(predicted), len(gold)), {
        name: of_type(name) for name in types
    }


# --- SQuAD


@dataclass(frozen=True)
class Gold:
    """The gold answers of questions."""

    answers: Sequence[tuple[str, tuple[str, ...]]]
    """Id and gold texts of each question; no text: it cannot be answered."""
    version_2: bool
    """Whether the rules of SQuAD 2.0 apply, as they do when any question is impossible."""


def squad_scores(
    gold: Gold,
    predictions: Mapping[str, str],
    no_answer: Mapping[str, float] | None = None,
    threshold: float = 1.0,
) -> dict[str, float | int]:
    """Return F1 and exact match in per cent under the official names.

    Those of 1.1 are `f1` and `exact_match`; those of 2.0 `exact`, `f1` and `total` of all questions, and with
    `HasAns_` and `NoAns_` of those with and without answers. With `no_answer`, the probability by question id
    that there is no answer, an answer counts as empty where that is above `threshold`, and the thresholds
    that would score best follow, as `best_exact_thresh` and `best_f1_thresh`.
    """
    # The script of 1.1 counts an id that comes twice each time, that of 2.0 its last.
    rows = list(dict(gold.answers).items()) if gold.version_2 else list(gold.answers)
    raw = [
        best_score(texts, predictions[name], version_2=gold.version_2)
        if name in predictions
        else (0.0, 0.0)
        for name, texts in rows
    ]
    if not gold.version_2:
        f1, exact = _mean(raw)
        return {"f1": f1, "exact_match": exact}
    odds = no_answer or {}
    scores = [
        (float(not texts), float(not texts))
        if name in predictions and odds.get(name, threshold) > threshold
        else pair
        for (name, texts), pair in zip(rows, raw, strict=True)
    ]
    counted = _named(scores)
    for prefix, has_answers in (("HasAns", True), ("NoAns", False)):
        pairs = zip(rows, scores, strict=True)
        part = [pair for (_, texts), pair in pairs if bool(texts) == has_answers]
        if part:
            counted |= {f"{prefix}_{name}": value for name, value in _named(part).items()}
    if no_answer is not None:
        for name, which in (("exact", 1), ("f1", 0)):
            own = [pair[which] for pair in raw]
            best = _best_threshold(rows, own, predictions, no_answer)
            counted |= dict(zip((f"best_{name}", f"best_{name}_thresh"), best, strict=True))
    return counted


def _named(scores: Sequence[tuple[float, float]]) -> dict[str, float | int]:
    f1, exact = _mean(scores)
    return {"exact": exact, "f1": f1, "total": len(scores)}


def _mean(scores: Sequence[tuple[float, float]]) -> tuple[float, float]:
    f1 = sum(pair[0] for pair in scores)
    exact = sum(pair[1] for pair in scores)
    return 100.0 * f1 / len(scores), 100.0 * exact / len(scores)


def _best_threshold(
    rows: Sequence[tuple[str, tuple[str, ...]]],
    scores: Sequence[float],
    predictions: Mapping[str, str],
    no_answer: Mapping[str, float],
) -> tuple[float, float]:
    """Return the best score in per cent and its threshold, as `find_best_thresh` of `evaluate-v2.0.py`.

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
    """Return F1 and exact match (0 or 1) of an answer, each the best among the gold texts."""
    golds = [normalize(text) for text in texts]
    if version_2:
        golds = [text for text in golds if text] or [""]
    answer = normalize(prediction)
    best = max(_f1(text.split(), answer.split(), both_empty=float(version_2)) for text in golds)
    return best, float(answer in golds)


def normalize(text: str) -> str:
    """Return a text as it is compared: lower case, no ASCII punctuation or articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def _f1(gold: Sequence[str], answer: Sequence[str], *, both_empty: float) -> float:
    """Return F1 of two bags of words."""
    if not gold and not answer:
        return both_empty
    same = (Counter(gold) & Counter(answer)).total()
    if not same:
        return 0.0
    precision, recall = same / len(answer), same / len(gold)
    return 2 * precision * recall / (precision + recall)
