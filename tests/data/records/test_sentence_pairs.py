"""Pairs and single segments, judged by exact partitions and loops over tokens."""

from random import Random

import numpy as np
import pytest

from bert_cli.data.random import row_keys
from bert_cli.data.records.sentence_pairs import (
    Pairs,
    fill_sentences,
    gather,
    truncate_pairs,
)
from bert_cli.data.tokens.notation import SpecialIds

SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
S = 128
LONGEST = S - 3


def fill(sentences, documents, seed=1, short=0.1, longest=S - 2):
    return fill_sentences(sentences, documents, longest, short, Random(seed))


def close(fraction, wanted, trials):
    return abs(fraction - wanted) < 5 * np.sqrt(wanted * (1 - wanted) / trials)


@pytest.mark.parametrize("removed", [1, 64, 65, 1000])
def test_each_token_is_removed_from_the_front_with_a_chance_of_one_half(removed):
    count = 4000
    full = np.full(count, removed + 120)
    zeros = np.zeros(count, np.int64)
    pairs = Pairs(zeros, full, zeros, np.full(count, 5), zeros.astype(bool))
    cut = truncate_pairs(pairs, LONGEST, row_keys(np.arange(count), 3))
    assert np.all(cut.first_length == 120)
    assert np.all(cut.second_start == 0)
    front = cut.first_start
    assert front.min() >= 0 and front.max() <= removed
    assert close(front.sum() / (count * removed), 0.5, count * removed)
    # Variance of a binomial; its sample variance deviates by about sqrt(2 / count).
    assert abs(front.var() / (removed / 4) - 1) < 6 * np.sqrt(2 / count)


def test_a_row_of_a_single_segment_is_cls_a_sep_and_padding():
    segments = fill([0, 3, 5, 20], [0, 2, 3], short=0.0, longest=18)
    rows, lengths = gather(np.arange(10, 30), segments, SPECIAL, 20)
    assert lengths.tolist() == [7, 17]
    assert rows[0].tolist() == [2, 10, 11, 12, 13, 14, 3] + [0] * 13
    assert rows[1].tolist() == [2, *range(15, 30), 3] + [0] * 3


def test_short_segments_have_at_least_a_sentence_and_are_as_frequent_as_the_settings_say():
    sentences = list(range(0, 400_001, 10))
    documents = [0, len(sentences) - 1]
    assert set(fill(sentences, documents, short=0.0).first_length[:-1].tolist()) == {120}
    some = fill(sentences, documents, short=0.1).first_length
    # A short target of 120 or more, 7 in 125, fills a segment too.
    assert close((some < 120).mean(), 0.1 * (1 - 7 / 125), len(some))
    assert some.min() == 10
    assert fill(sentences, documents, short=1.0).first_length.mean() < 65
