"""Pairs and single segments, judged by exact partitions and loops over tokens."""

from itertools import pairwise
from random import Random

import numpy as np
import pytest

from bert_cli.data.random import row_keys
from bert_cli.data.records.sentence_pairs import (
    Pairs,
    fill_sentences,
    gather,
    pair_sentences,
    truncate_pairs,
)
from bert_cli.data.tokens.notation import SpecialIds

SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
S = 128
LONGEST = S - 3


def corpus(documents=60, seed=0, longest=40):
    """Return prefix sums of sentences of 1 to `longest` tokens in documents of 1 to 80 sentences."""
    random = Random(seed)
    sizes = [random.randint(1, 80) for _ in range(documents)]
    lengths = [random.randint(1, longest) for _ in range(sum(sizes))]
    sentences = np.concatenate(([0], np.cumsum(lengths))).tolist()
    return sentences, np.concatenate(([0], np.cumsum(sizes))).tolist()


def fill(sentences, documents, seed=1, short=0.1, longest=S - 2):
    return fill_sentences(sentences, documents, longest, short, Random(seed))


def document_of(tokens, sentences, documents):
    starts = np.array(sentences)[np.array(documents)]
    return np.searchsorted(starts, tokens, side="right") - 1


def close(fraction, wanted, trials):
    return abs(fraction - wanted) < 5 * np.sqrt(wanted * (1 - wanted) / trials)


def test_a_pass_uses_every_sentence_exactly_once_and_every_second_segment_is_where_its_label_says():
    for seed in range(5):
        sentences, documents = corpus(seed=seed)
        pairs = pair_sentences(sentences, documents, LONGEST, 0.1, Random(seed))
        used = []
        for a, a_length, b, b_length, is_random in zip(*(c.tolist() for c in pairs), strict=True):
            used.append((a, a + a_length))
            if not is_random:
                used.append((b, b + b_length))
        assert used[0][0] == 0
        assert used[-1][1] == sentences[-1]
        assert all(before[1] == after[0] for before, after in pairwise(used))
        edges = set(sentences)
        assert all(start in edges and end in edges for start, end in used)
        first = document_of(pairs.first_start, sentences, documents)
        second = document_of(pairs.second_start, sentences, documents)
        assert np.all((first != second) == pairs.is_random)
        follows = pairs.second_start == pairs.first_start + pairs.first_length
        assert np.all(follows[~pairs.is_random])
        # The last sentence is the one that reaches the target.
        assert np.all((pairs.first_length + pairs.second_length)[~pairs.is_random] < LONGEST + 40)
        ends = pairs.second_start + pairs.second_length - 1
        assert np.array_equal(document_of(ends, sentences, documents), second)


def truncated(a, b, longest):
    """Return the lengths that remain when tokens are removed one by one from the longer segment."""
    while a + b > longest:
        a, b = (a - 1, b) if a > b else (a, b - 1)
    return a, b


def test_truncation_leaves_what_a_loop_over_tokens_leaves():
    lengths = [(a, b) for a in range(1, 70) for b in range(1, 70)]
    a, b = (np.array(column) for column in zip(*lengths, strict=True))
    pairs = Pairs(np.zeros(len(a), np.int64), a, np.full(len(a), 1000), b, np.zeros(len(a), bool))
    for longest in (5, 6, 29):
        cut = truncate_pairs(pairs, longest, row_keys(np.arange(len(a)), 0))
        remaining = list(zip(cut.first_length.tolist(), cut.second_length.tolist(), strict=True))
        assert remaining == [truncated(*each, longest) for each in lengths]
        assert np.all(cut.first_start >= 0) and np.all(cut.second_start >= 1000)
        assert np.all(cut.first_start + cut.first_length <= a)
        assert np.all(cut.second_start + cut.second_length <= 1000 + b)


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


def test_single_segments_hold_every_token_once_and_stay_in_their_document():
    for seed in range(5):
        sentences, documents = corpus(seed=seed, longest=200)  # some are longer than a segment
        pairs = fill(sentences, documents, seed)
        starts, lengths = pairs.first_start, pairs.first_length
        assert starts[0] == 0
        assert np.array_equal(starts[1:], (starts + lengths)[:-1])
        assert starts[-1] + lengths[-1] == sentences[-1]
        assert lengths.min() > 0 and lengths.max() <= S - 2
        last = document_of(starts + lengths - 1, sentences, documents)
        assert np.array_equal(document_of(starts, sentences, documents), last)
        assert not pairs.second_length.any() and not pairs.is_random.any()


def test_a_segment_ends_where_the_next_sentence_does_not_fit_or_the_document_ends():
    sentences, documents = corpus(longest=40)
    pairs = fill(sentences, documents, short=0.0)
    ends = pairs.first_start + pairs.first_length
    assert set(ends.tolist()) <= set(sentences)
    document_ends = {sentences[n] for n in documents}
    following = dict(pairwise(sentences))
    for start, end in zip(pairs.first_start.tolist(), ends.tolist(), strict=True):
        assert end in document_ends or following[end] - start > S - 2
    # A sentence that is too long is cut, and its rest continues with the next one.
    assert fill([0, 300, 310, 330], [0, 3], short=0.0).first_length.tolist() == [126, 126, 78]


def test_short_segments_have_at_least_a_sentence_and_are_as_frequent_as_the_settings_say():
    sentences = list(range(0, 400_001, 10))
    documents = [0, len(sentences) - 1]
    assert set(fill(sentences, documents, short=0.0).first_length[:-1].tolist()) == {120}
    some = fill(sentences, documents, short=0.1).first_length
    # A short target of 120 or more, 7 in 125, fills a segment too.
    assert close((some < 120).mean(), 0.1 * (1 - 7 / 125), len(some))
    assert some.min() == 10
    assert fill(sentences, documents, short=1.0).first_length.mean() < 65
