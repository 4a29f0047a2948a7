"""Means with their interval, by the bootstrap over groups of examples.

Examples of a group, such as the questions about a document, are not independent: a resample draws whole groups. Two
systems are compared on the same examples, by the interval of the difference.
"""

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

RESAMPLES = 1000
CONFIDENCE = 0.95
Floats = npt.NDArray[np.float64]


class Interval(NamedTuple):
    """A mean, and the bounds between which it lies with a probability of CONFIDENCE."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        bounds = "no interval" if math.isnan(self.low) else f"{self.low:.3f}, {self.high:.3f}"
        return f"{self.mean:.3f} [{bounds}]"


def interval(
    values: Sequence[float] | Floats, groups: Sequence[Hashable] | None = None, seed: int = 0
) -> Interval:
    """Return the mean of examples with the percentile interval of their bootstrap; by default each is its own group.

    Fewer than two groups have no interval: its bounds are NaN. Raises ValueError without values, or for groups of
    another number.
    """
    numbers = np.asarray(values, np.float64)
    names = range(len(numbers)) if groups is None else groups
    if not len(numbers) or len(names) != len(numbers):
        raise ValueError(f"{len(numbers)} values of {len(names)} groups")
    rows = {name: row for row, name in enumerate(dict.fromkeys(names))}
    if len(rows) < 2:
        return Interval(float(numbers.mean()), math.nan, math.nan)
    owner = np.array([rows[name] for name in names])
    sums = np.bincount(owner, numbers)
    sizes = np.bincount(owner)
    random = np.random.default_rng(seed)
    means = np.empty(RESAMPLES)
    for number in range(RESAMPLES):
        drawn = random.integers(0, len(rows), len(rows))
        means[number] = sums[drawn].sum() / sizes[drawn].sum()
    tail = (1.0 - CONFIDENCE) / 2
    low, high = np.quantile(means, [tail, 1.0 - tail])
    return Interval(float(numbers.mean()), float(low), float(high))


def difference(
    first: Sequence[float] | Floats,
    second: Sequence[float] | Floats,
    groups: Sequence[Hashable] | None = None,
    seed: int = 0,
) -> Interval:
    """Return how much higher the first system's mean is than the second's, paired by example, as `interval`."""
    return interval(np.subtract(first, second), groups, seed)
