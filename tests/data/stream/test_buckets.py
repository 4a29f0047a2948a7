"""Buckets: as little padding as ends can leave, every record once an epoch but a known few."""

from itertools import combinations

import numpy as np
import pytest

from bert_cli.data.stream.buckets import MULTIPLE, Buckets, bucket_ends


def drawn_lengths(count: int, longest: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.where(rng.random(count) < 0.6, longest, rng.integers(5, longest + 1, count))


def positions(histogram: np.ndarray, ends: np.ndarray) -> int:
    lengths = np.arange(len(histogram))
    return int(
        (histogram * np.asarray(ends)[np.searchsorted(ends, lengths).clip(max=len(ends) - 1)]).sum()
    )


@pytest.mark.parametrize("longest", [8, 40, 60])
@pytest.mark.parametrize("buckets", [1, 2, 3, 20])
def test_the_ends_leave_as_few_places_empty_as_any(longest: int, buckets: int) -> None:
    rng = np.random.default_rng(longest)
    for _ in range(5):
        histogram = rng.integers(0, 50, longest + 1) * (rng.random(longest + 1) < 0.5)
        histogram[0], histogram[rng.integers(1, longest + 1)] = 0, 30
        highest = int(np.flatnonzero(histogram)[-1])
        candidates = [min(end, longest) for end in range(MULTIPLE, highest + MULTIPLE, MULTIPLE)]
        fewest = min(
            positions(histogram, np.array([*chosen, candidates[-1]]))
            for count in range(buckets)
            for chosen in combinations(candidates[:-1], count)
        )
        ends = bucket_ends(histogram, buckets)
        assert positions(histogram, ends) == fewest
        assert 1 <= len(ends) <= buckets
        assert set(ends.tolist()) <= set(candidates)
        assert ends[-1] >= highest


@pytest.mark.parametrize(
    ("count", "longest", "buckets", "step"),
    [(8, 60, 3, 8), (100, 60, 3, 8), (1000, 128, 4, 32), (3000, 512, 8, 16), (200, 512, 8, 64)],
)
def test_an_epoch_has_every_record_once_but_fewer_than_a_step_left_out(
    count: int, longest: int, buckets: int, step: int
) -> None:
    lengths = drawn_lengths(count, longest)
    drawn = Buckets(lengths, longest, buckets, step, seed=1)
    assert len(drawn) == count // step * step
    assert drawn.left_out == count % step
    left, orders = [], []
    for epoch in range(4):
        epochs, records, width = drawn.records(np.arange(len(drawn)) + epoch * len(drawn))
        assert np.all(epochs == epoch)
        assert width == drawn.ends[-1]
        assert len(np.unique(records)) == len(drawn)
        left.append(set(range(count)) - set(records.tolist()))
        orders.append(records)
    assert not np.array_equal(orders[0], orders[1])
    if drawn.left_out:
        assert len(set.union(*left)) > drawn.left_out
        longest_of_all = {int(lengths[record]) for record in set.union(*left)}
        assert min(longest_of_all) > drawn.ends[-2]


def test_a_step_is_of_one_width_that_fits_and_any_part_of_it_is_too() -> None:
    lengths = drawn_lengths(3000, 512)
    drawn = Buckets(lengths, 512, 8, 32, seed=1)
    widths, used, mixed = [], 0, 0
    for step in range(drawn.steps):
        positions = np.arange(32) + (drawn.steps + step) * 32
        _, records, width = drawn.records(positions)
        assert lengths[records].max() <= width
        assert width in drawn.ends
        assert drawn.records(positions[8:16])[2] == width
        buckets = np.searchsorted(drawn.ends, lengths[records])
        assert drawn.ends[buckets.max()] == width
        mixed += buckets.min() != buckets.max()
        widths.append(width)
        used += width * 32
    assert mixed <= len(drawn.ends) - 1, "only what is left over of a bucket goes into a wider one"
    assert len(set(widths[:20])) > 2, "steps are in an order of chance"
    left = drawn.left_out * int(drawn.ends[-1])
    assert drawn.real_token_fraction == pytest.approx(lengths.sum() / (used + left))
    assert drawn.real_token_fraction > 0.95 > lengths.mean() / 512


def test_buckets_are_a_function_of_seed_and_position() -> None:
    lengths = drawn_lengths(500, 128)
    one, again, other = (Buckets(lengths, 128, 4, 16, seed) for seed in (5, 5, 6))
    positions = np.random.default_rng(0).integers(0, 5000, 300)
    got = one.records(positions)[1]
    assert np.array_equal(again.records(positions)[1], got)
    assert np.array_equal(one.records(positions[7:8])[1], got[7:8])
    assert not np.array_equal(other.records(positions)[1], got)
