"""The permutation: one to one for every size and different each epoch."""

import numpy as np

from bert_cli.data.random import permute

# What record stands where is part of every run that was ever started: resuming one after these
# numbers change would read other examples. Only a change that says so in the changelog, and makes
# such runs refuse to resume, may change them.
PINNED = [500, 389, 491, 541, 934, 425, 273, 256, 184, 132]


def test_ten_values_are_pinned():
    assert permute(np.arange(10), 1000, seed=1984, epoch=3).tolist() == PINNED


def test_every_record_comes_once_whatever_the_size():
    for size in (*range(1, 130), *range(130, 2001, 85), 2**14, 2**14 + 1, 99_991):
        order = permute(np.arange(size), size, 1984, 5)
        assert np.array_equal(np.sort(order), np.arange(size)), size
    for size in (10**6 + 3, 2**31 + 11, 10**12, 2**40):
        indices = np.unique(np.random.default_rng(size).integers(0, size, 100_000))
        records = permute(indices, size, 7, 1)
        assert records.min() >= 0 and records.max() < size
        assert len(np.unique(records)) == len(indices)


def test_an_index_has_one_record_whatever_is_asked_with_it():
    order = permute(np.arange(5000), 5000, 11, 2)
    some = np.array([4999, 0, 77, 77, 1234])
    assert np.array_equal(permute(some, 5000, 11, 2), order[some])
    assert permute([], 5000, 11, 2).tolist() == []
    rng = np.random.default_rng(0)
    sizes = np.concatenate((np.arange(1, 70), rng.integers(1, 10**9, 100)))
    indices, epochs = rng.integers(0, sizes), rng.integers(0, 1000, len(sizes))
    rows = zip(indices, sizes, epochs, strict=True)
    one_by_one = [int(permute(index, int(size), 5, epoch)[0]) for index, size, epoch in rows]
    assert permute(indices, sizes, 5, epochs).tolist() == one_by_one


def test_seeds_and_epochs_have_orders_of_their_own():
    size = 1000
    orders = [permute(np.arange(size), size, s, e) for s in (0, 1, 2, 1984) for e in range(5)]
    for number, one in enumerate(orders):
        for other in orders[number + 1 :]:
            # Two random orders agree at one index on average.
            assert np.count_nonzero(one == other) < 10
