"""Scores with their interval, by the bootstrap over groups of examples.

Examples of a group, such as the questions about a document, are not independent: a resample draws whole groups. A
score is a rule of what each example adds to it, with a weight for each example: how often the resample has it. So one
function resamples every score, and systems that are compared on the same examples have the same resamples.

Shapes: n rows, G groups, C columns, L labels, R resamples.
"""

import hashlib
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

RESAMPLES = 1000
CONFIDENCE = 0.95
AT_ONCE = 1 << 22  # weights of resamples that are computed together: 32 MB
Floats = npt.NDArray[np.float64]
Rule = Callable[[Floats, Floats], Floats]
"""Returns the score [R] of each resample from its weights [R, n] and the columns [n, C]."""


@dataclass(frozen=True)
class Examples:
    """Which examples a score is of, and which of them belong together."""

    groups: npt.NDArray[np.int64]
    """The group of each row [n], from 0."""
    digest: str
    """Equal for the same examples in the same order."""
    size: int
    """The number of examples; a row may stand for several."""

    def take(self, rows: npt.NDArray[np.bool_]) -> "Examples":
        """Return the examples of a mask [n]."""
        _, groups = np.unique(self.groups[rows], return_inverse=True)
        digest = hashlib.blake2b(rows.tobytes(), key=self.digest.encode(), digest_size=8)
        return replace(self, groups=groups, digest=digest.hexdigest(), size=int(rows.sum()))


def examples_of(
    keys: Iterable[object], groups: Sequence[Hashable] | None = None, size: int | None = None
) -> Examples:
    """Return examples by their keys, such as texts; equal keys are a group, unless `groups` names one for each.

    Raises ValueError without keys, or for groups of another number.
    """
    texts = list(map(str, keys))
    names: Sequence[Hashable] = texts if groups is None else groups
    if not texts or len(names) != len(texts):
        raise ValueError(f"{len(texts)} examples of {len(names)} groups")
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    owner = np.array([numbers[name] for name in names])
    digest = hashlib.blake2b(digest_size=8)
    for text, number in zip(texts, owner, strict=True):
        digest.update(f"{len(text)} {text} {number} ".encode("utf-8", "surrogatepass"))
    return Examples(owner, digest.hexdigest(), size or len(texts))


@dataclass(frozen=True)
class Sample:
    """What a score is computed from."""

    rule: str
    """The name of a rule in RULES."""
    columns: Floats
    """What each row adds to the score [n, C]; the rule says what the columns are."""
    examples: Examples

    @property
    def value(self) -> float:
        """The score of all examples."""
        return float(RULES[self.rule](np.ones((1, len(self.columns))), self.columns)[0])

    def take(self, rows: npt.NDArray[np.bool_]) -> "Sample":
        """Return the sample of a mask [n]."""
        return Sample(self.rule, self.columns[rows], self.examples.take(rows))


def sample_of(examples: Examples, rule: str, *columns: npt.ArrayLike) -> Sample:
    """Return a sample of one array [n], or one number, for each column."""
    arrays = np.broadcast_arrays(examples.groups, *columns)[1:]
    return Sample(rule, np.stack(arrays, axis=1).astype(np.float64), examples)


def mean_of(
    values: Sequence[float] | npt.NDArray[Any], groups: Sequence[Hashable] | None = None
) -> Sample:
    """Return the sample of the mean of values; by default each is its own group."""
    return sample_of(examples_of(range(len(values)), groups), "ratio", values, 1.0)


class Score(NamedTuple):
    """A score, and the bounds between which it lies with a probability of CONFIDENCE; NaN for fewer than two groups."""

    value: float
    low: float
    high: float
    n: int
    """Examples."""
    groups: int
    """Groups of examples that are drawn together."""

    def __str__(self) -> str:
        bounds = "no interval" if math.isnan(self.low) else f"{self.low:.3f}, {self.high:.3f}"
        return f"{self.value:.3f} [{bounds}]"


def resampled(sample: Sample, seed: int = 0) -> Floats:
    """Return the score of each resample [R]; those of samples with equally many groups draw the same groups."""
    owner = sample.examples.groups
    counts = _draws(int(owner.max()) + 1, seed)
    rows = max(1, AT_ONCE // len(owner))
    parts = [
        RULES[sample.rule](counts[first : first + rows, owner].astype(np.float64), sample.columns)
        for first in range(0, RESAMPLES, rows)
    ]
    return np.concatenate(parts)


def interval(sample: Sample, seed: int = 0) -> Score:
    """Return a score with the percentile interval of its bootstrap."""
    return _score(sample.value, lambda: resampled(sample, seed), sample.examples)


def difference(first: Sequence[Sample], second: Sequence[Sample], seed: int = 0) -> Score:
    """Return how much higher the first score is than the second, on the same examples, resampled together.

    Each side is the mean of one or more systems, such as the seeds of a run. Raises ValueError for other examples.
    """
    if len({sample.examples.digest for sample in (*first, *second)}) != 1:
        raise ValueError("the samples have other examples")

    def of(function: Callable[[Sample], Any]) -> Any:
        sides = [np.mean([function(sample) for sample in side], axis=0) for side in (first, second)]
        return sides[0] - sides[1]

    value = float(of(lambda sample: sample.value))
    return _score(value, lambda: of(lambda sample: resampled(sample, seed)), first[0].examples)


def _score(value: float, resamples: Callable[[], Floats], examples: Examples) -> Score:
    groups = int(examples.groups.max()) + 1
    if groups < 2:
        return Score(value, math.nan, math.nan, examples.size, groups)
    tail = (1.0 - CONFIDENCE) / 2
    low, high = np.quantile(resamples(), [tail, 1.0 - tail])
    return Score(value, float(low), float(high), examples.size, groups)


@lru_cache(maxsize=4)
def _draws(groups: int, seed: int) -> npt.NDArray[np.uint8]:
    """Return how often each resample has each group [R, G]."""
    random = np.random.default_rng(seed)
    # More than 255 times is impossible: with so many groups, one of them has some ten at most.
    counts = np.empty((RESAMPLES, groups), np.uint8)
    for row in counts:
        row[:] = np.bincount(random.integers(0, groups, groups), minlength=groups)
    return counts


# --- rules; a score whose denominator is 0 is 0


def _ratio(weights: Floats, columns: Floats) -> Floats:
    """Return the sum of the first column over the sum of the second: a mean, an accuracy, the F1 of entities."""
    over, by = (weights @ columns).T
    return _divided(over, by)


def _macro_f1(weights: Floats, columns: Floats) -> Floats:
    """Return the mean of the F1 of all labels that the resample has, from labels and predictions."""
    right, labelled, predicted = _label_counts(weights, columns)
    occurs = labelled + predicted
    return _divided(_divided(2 * right, occurs).sum(1), (occurs > 0).sum(1))


def _matthews(weights: Floats, columns: Floats) -> Floats:
    """Return Matthews' correlation of labels and predictions (for several labels Gorodkin 2004)."""
    right, labelled, predicted = _label_counts(weights, columns)
    total = weights.sum(1)
    covariance = right.sum(1) * total - (labelled * predicted).sum(1)
    spreads = [total**2 - (counts**2).sum(1) for counts in (labelled, predicted)]
    return _divided(covariance, np.sqrt(spreads[0] * spreads[1]))


def _pearson(weights: Floats, columns: Floats) -> Floats:
    """Return the correlation of two columns."""
    columns = columns - columns.mean(0)
    products = [
        columns[:, first] * columns[:, second] for first, second in ((0, 1), (0, 0), (1, 1))
    ]
    total = weights.sum(1)
    first, second = (weights @ columns).T
    both, *squares = (weights @ np.stack(products, axis=1)).T * total
    spreads = [
        # What rounding leaves of equal values is no spread.
        np.where(square - sums**2 > 1e-12 * square, square - sums**2, 0.0)
        for square, sums in zip(squares, (first, second), strict=True)
    ]
    return _divided(both - first * second, np.sqrt(spreads[0] * spreads[1]))


def _spearman(weights: Floats, columns: Floats) -> Floats:
    """Return the correlation of the ranks of two columns; equal values have their mean rank."""
    first, second = (_centred_ranks(weights, column) for column in columns.T)
    both, *squares = (
        (weights * one * other).sum(1)
        for one, other in ((first, second), (first, first), (second, second))
    )
    return _divided(both, np.sqrt(squares[0] * squares[1]))


RULES: Mapping[str, Rule] = {
    "ratio": _ratio,
    "macro_f1": _macro_f1,
    "matthews": _matthews,
    "pearson": _pearson,
    "spearman": _spearman,
}


def _divided(over: Floats, by: Floats) -> Floats:
    return np.divide(over, by, out=np.zeros_like(over), where=by != 0)


def _label_counts(weights: Floats, columns: Floats) -> tuple[Floats, Floats, Floats]:
    """Return how often each resample has a label right, as the label, and as the prediction [R, L]."""
    labelled, predicted = (columns[:, :, None] == np.unique(columns)).swapaxes(0, 1)
    return tuple(weights @ of_each for of_each in (labelled & predicted, labelled, predicted))


def _centred_ranks(weights: Floats, values: Floats) -> Floats:
    """Return the rank of each row in each resample minus their mean [R, n]."""
    different, owner = np.unique(values, return_inverse=True)
    starts = np.searchsorted(np.sort(owner), np.arange(len(different)))
    counts = np.add.reduceat(weights[:, np.argsort(owner, kind="stable")], starts, axis=1)
    ranks = np.cumsum(counts, axis=1) - counts / 2
    return (ranks - weights.sum(1, keepdims=True) / 2)[:, owner]
