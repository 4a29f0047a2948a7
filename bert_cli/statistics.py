"""Scores with their interval, by the bootstrap over groups of examples.

Examples of a group, such as the questions about a document, are not independent: a resample draws whole groups. A
score is a rule of what each example adds to it, with a weight for each example: how often the resample has it. So one
function resamples every score, and systems that are compared on the same examples have the same resamples.

The percentiles of resampled differences are too near to one another with few groups: of 6, where nothing changed, they
miss 0 in 15 of 100 cases instead of 5. Therefore a difference has the wider of Student's interval and the studentized
bootstrap's (Efron and Tibshirani 1993, chapter 12): the one holds for few groups, the other for skewed differences.

Shapes: n rows, C columns, L labels, R resamples.
"""

import hashlib
import math
import unicodedata
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bert_cli.arrays import Bools, Floats64, Ints64, UInts8
from bert_cli.text import count

# The ends of an interval are the 25th value from each side; their own error is about 2 % of its width.
RESAMPLES = 1000
TAILS = 0.025, 0.975  # of 95 %
# Weights of resamples that are computed together: half a megabyte, which stays in a cache.
AT_ONCE = 1 << 16
# Characters that are not seen: soft hyphens, joiners, marks of direction and of the order of bytes.
INVISIBLE = dict.fromkeys(
    (0xAD, *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x2070), 0xFEFF)
)


class Examples(NamedTuple):
    """Which examples a score is of, and which of them belong together."""

    groups: Ints64
    """The group of each row [n], from 0."""
    digest: str
    """Equal for the same examples in the same order."""
    size: int
    """The number of examples; a row may stand for several."""


def plain(text: str) -> str:
    """Return a text without case, white space, invisible characters and forms of letters, which make no other text."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().translate(INVISIBLE).split())


def identify(
    keys: Iterable[object], groups: Sequence[Hashable] | None = None, size: int | None = None
) -> Examples:
    """Return examples by their keys, such as texts; keys that are equal by `plain` are a group, unless `groups` has one
    for each.

    Raises ValueError without keys, or for groups of another number.
    """
    texts = list(map(str, keys))
    names: Sequence[Hashable] = [*map(plain, texts)] if groups is None else groups
    if not texts or len(names) != len(texts):
        raise ValueError(f"{len(texts)} examples of {len(names)} groups")
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    owner = np.array([numbers[name] for name in names])
    text = "\0".join(texts).encode("utf-8", "surrogatepass") + owner.tobytes()
    digest = hashlib.blake2b(text, digest_size=8).hexdigest()
    return Examples(owner, digest, size or len(texts))


def linked(rows: Iterable[Iterable[Hashable]]) -> list[Hashable]:
    """Group rows that share a name, directly or through other rows."""
    parents: dict[Hashable, Hashable] = {}

    def root(name: Hashable) -> Hashable:
        while parents.setdefault(name, name) != name:
            # Halves the path on the way, so that the next search is short (union-find).
            parents[name] = name = parents[parents[name]]
        return name

    firsts: list[Hashable] = []
    for names in rows:
        # A row without names is a group of its own, by its number.
        first, *others = [*names] or [("row", len(firsts))]
        firsts.append(first)
        for name in others:
            parents[root(name)] = root(first)
    return list(map(root, firsts))


def linked_texts(rows: Iterable[Iterable[str]]) -> list[Hashable]:
    """Group rows that share a text by `plain`, directly or through other rows."""
    return linked(filter(None, map(plain, row)) for row in rows)


class Sample(NamedTuple):
    """What a score is computed from."""

    rule: str
    """A name in RULES."""
    columns: Floats64
    """What each row adds to the score [n, C], by the rule; -inf where the system lacks the row."""
    examples: Examples

    @property
    def value(self) -> float:
        """The score of all examples."""
        return float(RULES[self.rule](np.ones((1, len(self.columns))), self.columns)[0])

    def take(self, rows: Bools) -> "Sample":
        """Return the sample of a mask [n]."""
        keys = [f"{self.examples.digest} {row}" for row in np.flatnonzero(rows)]
        groups = self.examples.groups[rows].tolist()
        return Sample(self.rule, self.columns[rows], identify(keys, groups))


def sample_of(examples: Examples, rule: str, *columns: npt.ArrayLike) -> Sample:
    """Return a sample of one array [n], or one number, for each column."""
    arrays = np.broadcast_arrays(examples.groups, *columns)[1:]
    return Sample(rule, np.stack(arrays, axis=1).astype(np.float64), examples)


def mean_of(values: npt.ArrayLike, groups: Sequence[Hashable] | None = None) -> Sample:
    """Return the sample of the mean of values [n]; by default each is its own group."""
    return sample_of(identify(range(np.size(values)), groups), "ratio", values, 1.0)


class Score(NamedTuple):
    """A score, and the bounds between which it lies with a probability of 95 %; NaN for fewer than two groups."""

    value: float
    low: float
    high: float
    n: int
    """Examples."""
    groups: int
    """Groups of examples that are drawn together."""

    @property
    def bounds(self) -> dict[str, float | None]:
        """Return all but the value as in JSON, which has no NaN."""
        low, high = (None if math.isnan(bound) else bound for bound in (self.low, self.high))
        return {"low": low, "high": high, "n": self.n, "groups": self.groups}

    @property
    def as_json(self) -> dict[str, float | None]:
        """Return the value and the bounds as in JSON."""
        value = self.value if math.isfinite(self.value) else None
        return {"value": value, **self.bounds}

    @classmethod
    def of(cls, value: float, bounds: Mapping[str, Any]) -> "Score":
        """Return a value with its `bounds`."""
        low, high = (math.nan if bounds[end] is None else bounds[end] for end in ("low", "high"))
        return cls(value, low, high, bounds["n"], bounds["groups"])

    def __format__(self, form: str) -> str:
        form = form.replace(".", "z.", 1)  # 0.000 instead of -0.000
        bounds = f"{self.low:{form}}, {self.high:{form}}"
        if math.isnan(self.low):
            bounds = "no interval"
        return f"{self.value:{form}} [{bounds}]"


def describe(scores: Mapping[str, Score]) -> str:
    """Return scores with their intervals and their numbers of examples as a line."""
    sizes = {score[3:]: f" in {count(score.groups, 'group')}" for score in scores.values()}
    numbers = []
    for (n, groups), in_groups in sizes.items():
        # Where each example is a group of its own, the groups say nothing.
        numbers.append(f"{n:,}{in_groups}" if n != groups else f"{n:,}")
    values = "  ".join(f"{name} {score:.4f}" for name, score in scores.items())
    return f"{values}; n {' and '.join(numbers)}"


def resampled(sample: Sample) -> Floats64:
    """Return the score of each resample [R]; those of samples with equally many groups draw the same groups."""
    return _scores(sample, _draws(int(sample.examples.groups.max()) + 1))


def _scores(sample: Sample, counts: UInts8) -> Floats64:
    """Return the score of each row of counts [R, groups], which has each group as often."""
    owner = sample.examples.groups
    # Resamples at once; of more than 8,192 examples still 8, because each call of a rule costs too.
    rows = max(8, AT_ONCE // len(owner))
    parts = (counts[first : first + rows, owner] for first in range(0, len(counts), rows))
    rule = RULES[sample.rule]
    return np.concatenate([rule(part.astype(np.float64), sample.columns) for part in parts])


def interval(*systems: Sample) -> Score:
    """Return the score of a system, or the mean of several, with the percentile interval of its bootstrap."""
    return difference(systems, ())


def intervals(samples: Mapping[str, Sample]) -> dict[str, Score]:
    """Return the score of each sample."""
    return {name: interval(sample) for name, sample in samples.items()}


def difference(first: Sequence[Sample], second: Sequence[Sample]) -> Score:
    """Return how much higher the first score is than the second, on the same examples, resampled together.

    What each group adds comes from the score without it. With more groups than RESAMPLES the percentiles suffice.
    Each side is the mean of its systems, such as the seeds of a run. Rows that one of them lacks count for none.
    Raises ValueError for other examples.
    """
    systems = (*first, *second)
    if len({sample.examples.digest for sample in systems}) > 1:
        raise ValueError("the samples have other examples")
    lacks = np.any([np.isneginf(sample.columns).any(1) for sample in systems], axis=0)
    if lacks.any():
        first, second = ([sample.take(~lacks) for sample in side] for side in (first, second))
    examples = first[0].examples

    def of(function: Callable[[Sample], Any]) -> Any:
        sides = [np.mean([*map(function, side)], axis=0) for side in (first, second) if side]
        return sides[0] - sum(sides[1:])

    groups = int(examples.groups.max()) + 1
    value = float(of(lambda sample: sample.value))
    low = high = math.nan
    if second and 1 < groups <= RESAMPLES:
        others = 1 - np.eye(groups, dtype=np.uint8)
        # Pseudovalues of the jackknife: their mean is the score without most of its bias.
        added = groups * value - (groups - 1) * of(lambda sample: _scores(sample, others))
        low, high = np.array(mean_bounds(added)) + value - added.mean()
        if all(map(_is_at_most_1, systems)):
            low, high = np.clip((low, high), -1.0, 1.0)
    elif groups > 1:
        low, high = np.quantile(of(resampled), TAILS)
    return Score(value, float(low), float(high), examples.size, groups)


def _is_at_most_1(sample: Sample) -> bool:
    """Return whether a score is a mean of ratios from 0 to 1, so that no difference is larger than 1."""
    over, by = np.split(sample.columns, 2, axis=1)
    return sample.rule == "ratio" and bool(((over >= 0) & (over <= by)).all())


def mean_bounds(values: Floats64) -> tuple[Floats64, Floats64]:
    """Return the bounds [...] of the mean of values [..., groups]: the wider of Student's and the bootstrap's."""
    groups = values.shape[-1]
    mean = values.mean(-1)
    centred = values - mean[..., None]
    draws = _draws(groups).T / groups
    # [..., groups] x [groups, R]: the means of all resamples in one product.
    shifts = centred @ draws
    variances = centred**2 @ draws - shifts**2
    # Of equal values there is no variance but for rounding, and such a resample says nothing.
    least = 1e-9 * centred.var(-1)[..., None]
    ratios = _divided(shifts, np.sqrt(np.where(variances > least, variances, 0.0)))
    # Quantiles of the studentized mean: they change sides, as its distribution is of the error.
    below, above = np.quantile(np.sqrt(groups) * ratios, TAILS, axis=-1)
    usual = student_quantile(groups - 1)
    error = values.std(-1, ddof=1) / np.sqrt(groups)
    return mean - np.maximum(usual, above) * error, mean + np.maximum(usual, -below) * error


@lru_cache(maxsize=256)
def student_quantile(freedom: int) -> float:
    """Return the bound of the middle 95 % of Student's distribution with so many degrees of freedom.

    By bisection of its closed form (Abramowitz and Stegun 1964, formulas 26.7.3 and 26.7.4): SciPy, which has this too,
    would be half of the small installation.
    """
    is_odd = freedom % 2
    steps = np.arange(2 + is_odd, freedom - 1, 2)
    angle = math.pi / 4  # its tangent is the bound over the root of the degrees
    for halvings in range(3, 60):
        terms = np.cumprod((steps - 1) / steps * math.cos(angle) ** 2)
        middle = math.sin(angle) * (1 + terms.sum())
        if is_odd:
            middle *= math.cos(angle) * (freedom > 1)
            middle = 2 / math.pi * (angle + middle)
        angle += math.copysign(math.pi / 2**halvings, TAILS[1] - TAILS[0] - middle)
    return math.sqrt(freedom) * math.tan(angle)


@lru_cache(maxsize=4)
def _draws(groups: int) -> UInts8:
    """Return how often each resample has each group [R, groups]."""
    # Fixed, so that two systems with the same groups have the same resamples, and a score its interval again.
    random = np.random.default_rng(0)
    # More than 255 times is impossible: with so many groups, one of them has some ten at most.
    counts = np.empty((RESAMPLES, groups), np.uint8)
    for row in counts:
        row[:] = np.bincount(random.integers(0, groups, groups), minlength=groups)
    return counts


# --- rules: the score [R] of each resample from its weights [R, n] and the columns [n, C]; 0 where it is undefined


def _ratio(weights: Floats64, columns: Floats64) -> Floats64:
    """Return the sum of the first column over the sum of the second: a mean, an accuracy, the F1 of entities.

    Of 2 k columns it is the mean of k ratios, as the macro F1 of labels; those whose second sum is 0 do not count.
    """
    over, by = np.split(weights @ columns, 2, axis=1)
    return _divided(_divided(over, by).sum(1), (by != 0).sum(1))


def _macro_f1(weights: Floats64, columns: Floats64) -> Floats64:
    """Return the mean of the F1 of all labels that the resample has, from labels and predictions."""
    labels, numbers = np.unique(columns, return_inverse=True)
    true, predicted = numbers.reshape(columns.shape).T

    def totals(of: Ints64, weights: Floats64) -> Floats64:
        return np.stack([np.bincount(of, row, len(labels)) for row in weights])

    right = totals(true, weights * (true == predicted))
    occurs = totals(true, weights) + totals(predicted, weights)
    return _divided(_divided(2 * right, occurs).sum(1), (occurs > 0).sum(1))


RULES: Mapping[str, Callable[[Floats64, Floats64], Floats64]] = {
    "ratio": _ratio,
    "macro_f1": _macro_f1,
    # Of labels 0 and 1 it is Matthews' correlation.
    "pearson": lambda weights, columns: _correlation(weights, *columns.T),
    "spearman": lambda weights, columns: _correlation(
        weights, *(_ranks(weights, column) for column in columns.T)
    ),
}


def _divided(over: Floats64, by: Floats64) -> Floats64:
    return np.divide(over, by, out=np.zeros_like(over), where=by != 0)


def _correlation(weights: Floats64, *columns: Floats64) -> Floats64:
    """Return the correlation of two columns, [n] or different in each resample [R, n]."""
    total = weights.sum(1, keepdims=True)
    means = [(weights * column).sum(1, keepdims=True) / total for column in columns]
    first, second = (column - mean for column, mean in zip(columns, means, strict=True))
    pairs = (first, second), (first, first), (second, second)
    both, *spreads = ((weights * left * right).sum(1) for left, right in pairs)
    # What rounding leaves of equal values is no spread.
    limits = [1e-24 * (total * mean**2)[:, 0] for mean in means]
    is_defined = (spreads[0] > limits[0]) & (spreads[1] > limits[1])
    return _divided(both, np.where(is_defined, np.sqrt(spreads[0] * spreads[1]), 0.0))


def _ranks(weights: Floats64, values: Floats64) -> Floats64:
    """Return the rank of each row in each resample [R, n]; equal values have their mean rank."""
    _, owner, sizes = np.unique(values, return_inverse=True, return_counts=True)
    # In the order of the values, so that `reduceat` adds up the weights of equal ones.
    ordered = weights[:, np.argsort(owner, kind="stable")]
    counts = np.add.reduceat(ordered, np.cumsum(sizes) - sizes, axis=1)
    return (np.cumsum(counts, axis=1) - (counts - 1) / 2)[:, owner]
