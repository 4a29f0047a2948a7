"""Intervals, judged by SciPy's bootstrap and by the metrics of SciPy and scikit-learn."""

import tracemalloc

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics

from bert_cli.statistics import (
    RESAMPLES,
    Sample,
    Score,
    describe,
    difference,
    identify,
    interval,
    linked,
    mean_bounds,
    mean_of,
    resampled,
    sample_of,
    student_quantile,
)

RANDOM = np.random.default_rng(7)
VALUES = RANDOM.normal(size=80)
OTHERS = np.round(VALUES + RANDOM.normal(size=80), 1)  # with ties
LABELS = RANDOM.integers(0, 3, 80)
LABELS[:2] = 3  # which some resamples lack
PREDICTED = np.where(RANDOM.random(80) < 0.6, LABELS, RANDOM.integers(0, 3, 80))
# Rule -> its columns, and the function that decides.
RULES = {
    "ratio": (VALUES, OTHERS + 9, lambda x, y: x.sum() / y.sum()),
    "macro_f1": (LABELS, PREDICTED, lambda x, y: metrics.f1_score(x, y, average="macro")),
    "pearson": (VALUES, OTHERS, lambda x, y: stats.pearsonr(x, y).statistic),
    "spearman": (VALUES, OTHERS, lambda x, y: stats.spearmanr(x, y).statistic),
}


def test_students_quantile_is_scipys():
    for freedom in (1, 2, 3, 4, 9, 10, 79, 1998, 1999):
        assert student_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-10)


def scipys(*columns, metric, **options):
    options |= {"n_resamples": RESAMPLES, "method": "percentile"}
    random = np.random.default_rng(0)
    return stats.bootstrap(columns, metric, rng=random, **options).confidence_interval


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_its_metric_and_has_the_interval_of_scipy(rule):
    *columns, metric = RULES[rule]
    sample = sample_of(identify(range(80)), rule, *columns)
    assert sample.value == pytest.approx(metric(*columns), rel=1e-12)
    found = interval(sample)
    expected = scipys(*columns, metric=metric, paired=True, vectorized=False)
    np.testing.assert_allclose(found, (sample.value, *expected, 80, 80), rtol=1e-10)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_counts_a_repeated_example_as_often_as_it_is_there(rule):
    *columns, metric = RULES[rule]
    groups = np.arange(80) // 8
    found = resampled(sample_of(identify(range(80), groups.tolist()), rule, *columns))
    drawn = np.random.default_rng(0).integers(0, 10, 10)
    rows = (8 * drawn[:, None] + np.arange(8)).ravel()
    expected = metric(*(column[rows] for column in columns))
    assert found[0] == pytest.approx(expected, rel=1e-12)
    few = sample_of(identify("ab"), rule, 1.0, 1.0 if rule != "ratio" else 0.0)
    assert few.value == (rule == "macro_f1"), "an undefined score is 0"


def test_no_difference_of_shares_is_larger_than_1():
    better, worse = mean_of([1, 1, 0]), mean_of([0, 0, 0])
    assert difference([better], [worse])[:3] == pytest.approx((2 / 3, -0.7676, 1.0), abs=1e-4)
    assert difference([worse], [better]).low == -1.0
    assert difference([mean_of([2, 1, 0])], [worse]).high > 1.0  # no shares
    sides = [
        sample_of(identify("abc"), "pearson", [0, 0.5, 1], by) for by in ([0, 1, 1], [1, 0.9, 1])
    ]
    assert difference(sides[:1], sides[1:]).high > 1.0


def test_groups_are_drawn_whole():
    groups = [n // 8 for n in range(80)]
    expected = scipys(VALUES.reshape(10, 8).mean(1), metric=np.mean)
    found = interval(mean_of(VALUES, groups))
    np.testing.assert_allclose(found, (VALUES.mean(), *expected, 80, 10))
    equal = np.repeat(VALUES[:10], 8)  # eight equal examples say no more than one
    wide, narrow = interval(mean_of(equal, groups)), interval(mean_of(equal))
    assert wide.high - wide.low > 2 * (narrow.high - narrow.low)


def test_systems_are_compared_in_the_same_resamples():
    found = difference([mean_of(VALUES + 0.1)], [mean_of(VALUES)])
    np.testing.assert_allclose(found[:3], (0.1, 0.1, 0.1))
    assert f"{found:.3f}" == "0.100 [0.100, 0.100]"
    seeds = difference([mean_of(VALUES + 0.1), mean_of(VALUES + 0.3)], [mean_of(VALUES)])
    np.testing.assert_allclose(seeds[:3], (0.2, 0.2, 0.2))
    for other in (mean_of(VALUES[1:]), mean_of(VALUES, [*map(int, LABELS)])):
        with pytest.raises(ValueError, match="other examples"):
            difference([mean_of(VALUES)], [other])


SHAPES = {
    "normal": lambda random, size: random.normal(size=size),
    "skewed": lambda random, size: random.exponential(size=size) - 1,
    "heavy-tailed": lambda random, size: random.standard_t(3, size=size),
    "mostly zero": lambda random, size: random.choice([-1.0, *[0.0] * 8, 1.0], size=size),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_where_nothing_changed_five_of_a_hundred_intervals_of_a_difference_miss_zero(shape):
    """Of 1,500 intervals three standard errors more than 5 % may miss it, and of symmetric gains half on each side."""
    drawn = np.random.default_rng(0)
    tests = 1500
    for groups in (6, 10, 20, 60):
        low, high = mean_bounds(SHAPES[shape](drawn, (tests, groups)))
        better, worse = np.mean(low > 0), np.mean(high < 0)
        assert better + worse < 0.05 + 3 * np.sqrt(0.05 * 0.95 / tests), (groups, better, worse)
        if shape != "skewed":
            assert max(better, worse) < 0.025 + 3 * np.sqrt(0.025 * 0.975 / tests), groups
        if shape == "normal":  # and it is no wider than it must be
            assert better + worse > 0.02, groups
            low, _ = mean_bounds(SHAPES[shape](drawn, (tests, groups)) + 1.0)
            assert np.mean(low > 0) > {6: 0.25, 10: 0.65, 20: 0.97, 60: 0.999}[groups]


def test_a_difference_is_that_of_what_each_group_adds():
    groups = [n // 8 for n in range(80)]
    gains = (VALUES - OTHERS).reshape(10, 8).mean(1)
    found = difference([mean_of(VALUES, groups)], [mean_of(OTHERS, groups)])
    np.testing.assert_allclose(found[1:3], mean_bounds(gains))
    student = stats.ttest_1samp(gains, 0.0).confidence_interval(0.95)
    assert found.low <= student.low + 1e-9 and found.high >= student.high - 1e-9
    for rule, (*columns, _) in RULES.items():
        sides = [sample_of(identify(range(80)), rule, *part) for part in (columns, columns[::-1])]
        by_student = difference(sides[:1], sides[1:])
        resampled_gains = resampled(sides[0]) - resampled(sides[1])
        low, high = np.quantile(resampled_gains, [0.025, 0.975])
        spread = high - low + 1e-9
        assert (
            abs(by_student.low - low) < 0.4 * spread and abs(by_student.high - high) < 0.4 * spread
        )


def test_a_row_that_a_system_lacks_counts_for_none_of_the_compared():
    parts = np.where(np.arange(80) % 4, -np.inf, OTHERS)
    every = slice(None, None, 4)
    found = difference([mean_of(VALUES)], [mean_of(parts)])
    expected = difference([mean_of(VALUES[every])], [mean_of(OTHERS[every])])
    np.testing.assert_allclose(found, expected)
    assert (interval(mean_of(parts)).n, interval(mean_of(parts)).groups) == (20, 20)


def test_macro_f1_of_many_labels_needs_little_memory():
    labels, predicted = RANDOM.integers(0, 150, (2, 20_000))
    sample = sample_of(identify(range(20_000)), "macro_f1", labels, predicted)
    expected = metrics.f1_score(labels, predicted, average="macro")
    tracemalloc.start()
    assert sample.value == pytest.approx(expected, rel=1e-12)
    assert tracemalloc.get_traced_memory()[1] < 10e6
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("rows", "groups"),
    [
        (["ab", "cd", "ef"], [0, 1, 2]),
        (["ab", "cb", "ad"], [0, 0, 0]),
        (["ab", "cd", "ef", "da"], [0, 0, 1, 0]),
        (["a", "", "", "a"], [0, 1, 2, 0]),
        ([], []),
    ],
)
def test_rows_that_share_names_are_linked(rows, groups):
    numbers = {name: n for n, name in enumerate(dict.fromkeys(linked(rows)))}
    assert [numbers[name] for name in linked(rows)] == groups


def test_a_change_that_rounds_to_nothing_has_no_minus():
    shown = f"{Score(-0.0004, -0.003, 0.003, 9, 9):+.3f}"
    assert shown == "+0.000 [-0.003, +0.003]"


def test_few_groups_have_no_interval_and_mistakes_are_errors():
    for alone in (mean_of([0.5]), mean_of([0.25, 0.75], ["a", "a"])):
        assert f"{interval(alone):.3f}" == "0.500 [no interval]"
        assert "groups" not in describe({"accuracy": interval(alone)})
        assert interval(alone).bounds["low"] is None
        assert np.isnan(Score.of(0.5, interval(alone).bounds).high)
    nothing = Score(np.nan, 0.1, 0.2, 3, 2)
    assert [*nothing.as_json.values()] == [None, 0.1, 0.2, 3, 2]
    assert Score.of(0.3, nothing.bounds) == (0.3, 0.1, 0.2, 3, 2)
    with pytest.raises(ValueError, match="0 examples"):
        mean_of([])
    with pytest.raises(ValueError, match="2 examples of 1 groups"):
        mean_of([1.0, 2.0], ["a"])


def test_a_part_of_the_examples_is_a_sample_of_its_own():
    whole = sample_of(identify("aabbcc"), "ratio", range(6), 1.0)
    part = whole.take(np.array([True, False, False, False, True, True]))
    assert isinstance(part, Sample)
    assert part.value == 3.0
    assert part.examples.groups.tolist() == [0, 1, 1]
    assert part.examples.digest != whole.examples.digest
