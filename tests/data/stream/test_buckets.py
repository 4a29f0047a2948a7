"""Length buckets: as little padding as ends can leave, every record once an epoch but a known few."""

from itertools import combinations

import numpy as np
import pytest

from bert_cli.data.stream.reader import MULTIPLE, Buckets, bucket_ends


def drawn_lengths(count, longest):
    rng = np.random.default_rng(0)
    return np.where(rng.random(count) < 0.6, longest, rng.integers(5, longest + 1, count))


def positions(histogram, ends):
    buckets = np.searchsorted(ends, np.arange(len(histogram))).clip(max=len(ends) - 1)
    return int((histogram * np.asarray(ends)[buckets]).sum())


@pytest.mark.parametrize("longest", [8, 40, 60])
def test_the_ends_leave_as_little_padding_as_any(longest):
    rng = np.random.default_rng(longest)
    for buckets in (1, 2, 3, 20) * 5:
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
        assert 1 <= len(ends) <= buckets and set(ends.tolist()) <= set(candidates)
        assert ends[-1] >= highest


def test_an_epoch_has_every_record_once_but_fewer_than_a_step_left_out():
    for count, longest, buckets, step in (
        (8, 60, 3, 8), (100, 60, 3, 8), (1000, 128, 4, 32), (3000, 512, 8, 16), (200, 512, 8, 64)
    ):  # fmt: skip
        lengths = drawn_lengths(count, longest)
        drawn = Buckets(lengths, longest, buckets, step, seed=1)
        size = drawn.steps * step
        assert (size, drawn.left_out) == (count // step * step, count % step)
        left, orders = set[int](), []
        for epoch in range(4):
            epochs, records, width = drawn.records(np.arange(size) + epoch * size)
            assert np.all(epochs == epoch) and width == drawn.ends[-1]
            assert len(np.unique(records)) == size
            left |= set(range(count)) - set(records.tolist())
            orders.append(records)
        assert not np.array_equal(orders[0], orders[1])
        if drawn.left_out:
            assert len(left) > drawn.left_out
            assert min(int(lengths[record]) for record in left) > drawn.ends[-2]


def test_a_step_has_the_length_of_its_longest_bucket_and_any_part_of_it_too():
    lengths = drawn_lengths(3000, 512)
    drawn = Buckets(lengths, 512, 8, 32, seed=1)
    widths, mixed = [], 0
    for step in range(drawn.steps):
        indices = np.arange(32) + (drawn.steps + step) * 32
        _, records, width = drawn.records(indices)
        assert drawn.records(indices[8:16])[2] == width
        buckets = np.searchsorted(drawn.ends, lengths[records])
        assert drawn.ends[buckets.max()] == width
        mixed += buckets.min() != buckets.max()
        widths.append(width)
    assert mixed <= len(drawn.ends) - 1, "only what is left over of a bucket goes into a longer one"
    assert len(set(widths[:20])) > 2, "steps are in a random order"
    padded = 32 * sum(widths) + drawn.left_out * int(drawn.ends[-1])
    assert lengths.sum() / padded > 0.95 > lengths.mean() / 512
