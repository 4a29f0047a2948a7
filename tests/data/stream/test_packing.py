"""Packing: no pack is over-full, no sequence is lost, and few positions are left."""

from collections import Counter

import numpy as np
import pytest

from bert_cli.config.data import packed_predictions
from bert_cli.data.stream.source import Packs, shortest_pack_first

# Which records share an example is part of every run on packs that was ever started; only a change
# that says so in the changelog, and makes such runs refuse to resume, may change these numbers.
PINNED = [[27, 77, 7], [98, 38, 48], [9, 89, 69], [70, -1, -1]]


def drawn_lengths(count, longest, seed=0):
    """As a corpus has them: six in ten full, the rest of any length."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random(count) < 0.6, longest, rng.integers(5, longest + 1, count))


def one_by_one(lengths, longest, most):
    """Shortest pack first over sequences and not over a histogram."""
    packs: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fits = [p for p in packs if len(p) < most and sum(p) + length <= longest]
        if fits:
            min(fits, key=sum).append(length)
        else:
            packs.append([length])
    return Counter(tuple(pack) for pack in packs)


@pytest.mark.parametrize("most", [1, 2, 3, 60])
def test_a_histogram_is_packed_as_its_sequences_would_be_one_by_one(most):
    for seed in range(6):
        rng = np.random.default_rng(seed)
        longest = int(rng.integers(8, 60))
        lengths = rng.integers(1, longest + 1, int(rng.integers(1, 400)))
        packed, counts = shortest_pack_first(np.bincount(lengths, minlength=longest + 1), most)
        slow = one_by_one(lengths.tolist(), longest, most)
        assert int(counts.sum()) == slow.total()
        # Otherwise packs with as much room may have room for another number of sequences.
        if most in (1, 60):
            filled, ours = Counter[int](), Counter[int]()
            for pack, count in slow.items():
                filled[sum(pack)] += count
            for row, count in zip(packed, counts, strict=True):
                ours[int(row.sum())] += int(count)
            assert ours == filled


@pytest.mark.parametrize("most", [1, 2, 3, 8])
def test_every_record_is_in_exactly_one_pack_of_each_epoch(most):
    for count, longest in ((1, 16), (2, 16), (7, 20), (3000, 128)):
        lengths = drawn_lengths(count, longest)
        packs = Packs(lengths, longest, most, seed=1984)
        epochs = []
        for epoch in (0, 1, 2, 1000):
            records = packs.records(np.arange(len(packs)), np.full(len(packs), epoch))
            assert records.shape == (len(packs), most)
            is_used = records >= 0
            assert np.array_equal(np.sort(records[is_used]), np.arange(count))
            assert np.where(is_used, lengths[records], 0).sum(axis=1).max() <= longest
            assert np.array_equal(is_used, np.arange(most) < is_used.sum(axis=1)[:, None])
            assert is_used[:, 0].all()
            epochs.append({tuple(sorted(row)) for row in records.tolist()})
        if count == 3000:
            alone = sum((records >= 0).sum(axis=1) == 1)
            assert len(epochs[0] & epochs[1]) < alone + 0.05 * len(packs)


def test_some_packs_are_pinned():
    pinned = Packs(np.arange(100) * 7 % 10 + 30, 128, 3, seed=1984)
    assert pinned.records(np.array([0, 11, 22, 33]), np.full(4, 2)).tolist() == PINNED


def test_a_pack_has_room_for_the_predictions_of_its_sequences():
    rng = np.random.default_rng(0)
    for probability in (0.1, 0.15, 0.5, 0.9):
        for most, predictions in ((1, 20), (2, 76), (3, 1), (3, 76), (8, 20)):
            room = packed_predictions(512, most, predictions, probability)
            assert room <= most * predictions
            cuts = np.sort(rng.integers(0, 513, (20_000, most - 1)), axis=1)
            lengths = np.diff(cuts, axis=1, prepend=0, append=512)
            wanted = np.clip(np.rint(lengths * probability), 1, predictions).astype(int)
            assert np.where(lengths > 0, wanted, 0).sum(axis=1).max() <= room
    sizes = [
        packed_predictions(512, *rest) for rest in ((3, 76, None), (3, 76, 0.15), (1, 76, 0.15))
    ]
    assert sizes == [228, 79, 76]
