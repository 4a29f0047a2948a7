"""The permutation: one to one for every size, different each epoch, and looks like chance."""

import numpy as np
import pytest

from bert_cli.data.stream.permutation import mix, permute, record_at

# What record stands where is part of every run that was ever started: resuming one after these
# numbers change would read other examples. Only a change that says so in the changelog, and makes
# such runs refuse to resume, may change them.
PINNED = [500, 389, 491, 541, 934, 425, 273, 256, 184, 132]


def test_ten_values_are_pinned() -> None:
    assert permute(np.arange(10), 1000, seed=1984, epoch=3).tolist() == PINNED


@pytest.mark.parametrize("sizes", [range(1, 130), range(130, 2001, 17), [2**14, 2**14 + 1, 99_991]])
def test_every_record_comes_once_whatever_the_size(sizes: list[int]) -> None:
    for size in sizes:
        for seed, epoch in [(0, 0), (1984, 5)]:
            got = permute(np.arange(size), size, seed, epoch)
            assert np.array_equal(np.sort(got), np.arange(size)), (size, seed, epoch)


@pytest.mark.parametrize("size", [10**6 + 3, 2**31 + 11, 10**12, 2**40])
def test_big_corpora_repeat_no_record_among_many_positions(size: int) -> None:
    rng = np.random.default_rng(size)
    positions = np.unique(rng.integers(0, size, 100_000))
    got = permute(positions, size, 7, 1)
    assert got.min() >= 0
    assert got.max() < size
    assert len(np.unique(got)) == len(positions)


def test_a_position_has_one_answer_in_any_company() -> None:
    whole = permute(np.arange(5000), 5000, 11, 2)
    some = np.array([4999, 0, 77, 77, 1234])
    assert np.array_equal(permute(some, 5000, 11, 2), whole[some])
    assert permute(77, 5000, 11, 2).tolist() == [whole[77]]
    assert permute([], 5000, 11, 2).tolist() == []


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    size = 1000
    orders = [permute(np.arange(size), size, s, e) for s in (0, 1, 2, 1984) for e in range(5)]
    for number, one in enumerate(orders):
        for other in orders[number + 1 :]:
            # Two random orders agree at one place on average.
            assert np.count_nonzero(one == other) < 10


def test_seed_and_epoch_do_not_stand_in_for_each_other() -> None:
    orders = {
        tuple(permute(np.arange(50), 50, seed, epoch)) for seed in range(30) for epoch in range(30)
    }
    assert len(orders) == 900


@pytest.mark.parametrize("size", [10, 64, 100])
def test_each_record_is_as_likely_at_the_first_places(size: int) -> None:
    trials = 20_000
    for place in (0, 1, size - 1):
        got = permute(np.full(trials, place), size, seed=5, epoch=np.arange(trials))
        counts = np.bincount(got, minlength=size)
        chi_square = float(((counts - trials / size) ** 2 / (trials / size)).sum())
        # Mean size - 1, standard deviation sqrt(2 (size - 1)).
        assert abs(chi_square - (size - 1)) < 5 * (2 * (size - 1)) ** 0.5


def test_neighbours_land_far_apart() -> None:
    size = 1 << 20
    got = permute(np.arange(100_000), size, 3, 0).astype(np.float64)
    correlation = np.corrcoef(got[:-1], got[1:])[0, 1]
    assert abs(correlation) < 0.02
    gaps = np.abs(np.diff(got))
    assert gaps.mean() == pytest.approx(size / 3, rel=0.02)


def test_all_orders_of_four_records_occur() -> None:
    orders = [tuple(permute(np.arange(4), 4, 0, epoch)) for epoch in range(3000)]
    counts = np.unique(orders, axis=0, return_counts=True)[1]
    assert len(counts) == 24
    assert counts.min() > 60


def test_the_stream_is_one_epoch_after_the_other() -> None:
    size = 37
    epochs, records = record_at(np.arange(4 * size), size, seed=9)
    assert np.array_equal(epochs, np.repeat(np.arange(4), size))
    for epoch in range(4):
        of_epoch = records[epochs == epoch]
        assert np.array_equal(of_epoch, permute(np.arange(size), size, 9, epoch))
        assert np.array_equal(np.sort(of_epoch), np.arange(size))
    far = 10**15
    assert record_at(far, size, 9)[0].tolist() == [far // size]


def test_mixing_is_one_to_one_and_leaves_its_input_alone() -> None:
    numbers = np.arange(100_000, dtype=np.uint64)
    mixed = mix(numbers)
    assert numbers[5] == 5
    assert len(np.unique(mixed)) == len(numbers)
    ones = np.unpackbits(mixed.view(np.uint8)).mean()
    assert ones == pytest.approx(0.5, abs=0.002)
