"""Intervals, judged by SciPy's bootstrap."""

import numpy as np
import pytest
from scipy.stats import bootstrap

from bert_cli.statistics import RESAMPLES, difference, interval

VALUES = np.random.default_rng(7).normal(size=80)


def test_the_interval_is_that_of_scipy():
    found = interval(VALUES, seed=3)
    rng = np.random.default_rng(3)
    expected = bootstrap((VALUES,), np.mean, n_resamples=RESAMPLES, method="percentile", rng=rng)
    low, high = expected.confidence_interval
    np.testing.assert_allclose(found, (VALUES.mean(), low, high), rtol=1e-12)


def test_groups_are_drawn_whole():
    groups = [n // 8 for n in range(80)]
    means = VALUES.reshape(10, 8).mean(1)
    rng = np.random.default_rng(0)
    expected = bootstrap((means,), np.mean, n_resamples=RESAMPLES, method="percentile", rng=rng)
    np.testing.assert_allclose(interval(VALUES, groups)[1:], expected.confidence_interval)
    equal = np.repeat(VALUES[:10], 8)  # eight equal examples say no more than one
    wide, narrow = interval(equal, groups), interval(equal)
    assert wide.high - wide.low > 2 * (narrow.high - narrow.low)


def test_a_pair_of_systems_is_compared_by_example():
    found = difference(VALUES + 0.1, VALUES)
    np.testing.assert_allclose(found, (0.1, 0.1, 0.1))
    assert str(found) == "0.100 [0.100, 0.100]"
    for alone in (interval([0.5]), interval([0.25, 0.75], ["a", "a"])):
        assert str(alone) == "0.500 [no interval]" and np.isnan(alone.high)
    with pytest.raises(ValueError, match="0 values"):
        interval([])
    with pytest.raises(ValueError, match="2 values of 1 groups"):
        interval([1.0, 2.0], ["a"])
