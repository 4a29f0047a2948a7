"""How good predictions are, by the measures that the tasks are published with.

Numbers of examples come from scikit-learn and SciPy. Entities are counted here: a chunk is right
when its type and both of its ends are, and chunks are read as conlleval does (Tjong Kim Sang and
Buchholz 2000) and seqeval by default, so an I- behind O or behind another type starts one.
Every score is a number, never NaN, so that the best of several checkpoints can be told.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bert_cli.errors import DataError

Column = npt.NDArray[Any]


def accuracy(labels: Column, predictions: Column) -> float:
    """Share of right predictions."""
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(labels, predictions))


def f1(labels: Column, predictions: Column) -> float:
    """F1 of label 1 against label 0; 0 where nothing is found and nothing is there."""
    from sklearn.metrics import f1_score

    return float(f1_score(labels, predictions, zero_division=0.0))


def macro_f1(labels: Column, predictions: Column) -> float:
    """Mean of the F1 of each label that occurs among the labels or the predictions."""
    from sklearn.metrics import f1_score

    return float(f1_score(labels, predictions, average="macro", zero_division=0.0))


def matthews(labels: Column, predictions: Column) -> float:
    """Matthews' correlation; 0 when one side is constant."""
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(labels, predictions))


def pearson(labels: Column, predictions: Column) -> float:
    """Pearson's correlation; 0 when one side is constant, where it has no value."""
    from scipy.stats import pearsonr

    if _is_constant(labels) or _is_constant(predictions):
        return 0.0
    return float(pearsonr(_doubles(labels), _doubles(predictions)).statistic)


def spearman(labels: Column, predictions: Column) -> float:
    """Spearman's rank correlation; 0 when one side is constant, where it has no value."""
    from scipy.stats import spearmanr

    if _is_constant(labels) or _is_constant(predictions):
        return 0.0
    return float(spearmanr(_doubles(labels), _doubles(predictions)).statistic)


def _is_constant(column: Column) -> bool:
    return bool(np.all(column == column[0]))


def _doubles(column: Column) -> npt.NDArray[np.float64]:
    # float32 sums of 1,500 squares differ in the fifth digit.
    return np.asarray(column, np.float64)


METRICS: Mapping[str, Callable[[Column, Column], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "macro_f1": macro_f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
}


def score(names: Sequence[str], labels: Column, predictions: Column) -> dict[str, float]:
    """The metrics of these names, for labels and predictions [n].

    DataError when there is nothing to score or the lengths differ.
    """
    if len(labels) != len(predictions) or not len(labels):
        raise DataError(
            f"predictions ({len(predictions)}): cannot be scored against {len(labels)} labels; "
            "give one for each example"
        )
    return {name: METRICS[name](labels, predictions) for name in names}


def confusion(labels: Column, predictions: Column, size: int) -> list[list[int]]:
    """How often each label (row) was predicted as which (column), for labels 0 to size - 1."""
    counts = np.zeros((size, size), np.int64)
    np.add.at(counts, (labels, predictions), 1)
    return [[int(count) for count in row] for row in counts]


@dataclass(frozen=True)
class EntityScore:
    """Precision, recall and F1 of entities; a ratio without a denominator is 0."""

    right: int
    predicted: int
    support: int
    """Entities that are there."""

    @property
    def precision(self) -> float:
        """Share of the predicted entities that are right."""
        return self.right / self.predicted if self.predicted else 0.0

    @property
    def recall(self) -> float:
        """Share of the entities there that were found."""
        return self.right / self.support if self.support else 0.0

    @property
    def f1(self) -> float:
        """Harmonic mean of both."""
        both = self.predicted + self.support
        return 2 * self.right / both if both else 0.0


def chunks(labels: Sequence[str]) -> list[tuple[str, int, int]]:
    """The entities of a sentence's labels O, B-type, I-type: type, first word, last word.

    A bare B or I has the type "_", as in seqeval.
    """
    found: list[tuple[str, int, int]] = []
    begin, before = 0, "O"
    for place, label in enumerate([*labels, "O"]):
        goes_on = label[0] == "I" and before != "O" and label[1:] == before[1:]
        if not goes_on:
            if before != "O":
                found.append((before[2:] or "_", begin, place - 1))
            begin = place
        before = label
    return found


def entity_scores(
    labels: Sequence[Sequence[str]], predictions: Sequence[Sequence[str]]
) -> tuple[EntityScore, dict[str, EntityScore]]:
    """Scores of all entities together (the micro average), and of each type.

    Takes label names of each sentence's words. DataError when sentences or words are missing.
    """
    if [len(sentence) for sentence in labels] != [len(sentence) for sentence in predictions]:
        raise DataError(
            f"predictions ({len(predictions)} sentences): have other lengths than the labels "
            f"({len(labels)} sentences); give one for each word"
        )
    there = {(n, *chunk) for n, sentence in enumerate(labels) for chunk in chunks(sentence)}
    found = {(n, *chunk) for n, sentence in enumerate(predictions) for chunk in chunks(sentence)}
    types = sorted({chunk[1] for chunk in there | found})
    right = there & found

    def of(kind: str) -> EntityScore:
        counts = (sum(chunk[1] == kind for chunk in some) for some in (right, found, there))
        return EntityScore(*counts)

    return EntityScore(len(right), len(found), len(there)), {kind: of(kind) for kind in types}
