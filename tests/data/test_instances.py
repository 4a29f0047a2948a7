"""The recipe, judged by exact partitions, a walk token by token, and bounds of five deviations."""

from itertools import pairwise
from random import Random

import numpy as np
import pytest

from bert_cli.data.instances import (
    Pairs,
    SpecialIds,
    gather,
    mask_tokens,
    pair_sentences,
    row_keys,
    truncate_pairs,
)

SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
WORDS = 1000
S = 128
LONGEST = S - 3


def corpus(documents=60, seed=0, longest=40):
    """Prefix sums of sentences of 1 to `longest` tokens in documents of 1 to 80 sentences."""
    random = Random(seed)
    sizes = [random.randint(1, 80) for _ in range(documents)]
    lengths = [random.randint(1, longest) for _ in range(sum(sizes))]
    sentences = np.concatenate(([0], np.cumsum(lengths))).tolist()
    return sentences, np.concatenate(([0], np.cumsum(sizes))).tolist()


def pair(sentences, documents, seed=1, short=0.1, length=S):
    return pair_sentences(
        sentences, documents, sequence_length=length, short_seq_prob=short, random=Random(seed)
    )


def document_of(places, sentences, documents):
    starts = np.array(sentences)[np.array(documents)]
    return np.searchsorted(starts, places, side="right") - 1


def rows(count=20_000, length=100, seed=0, continues=None):
    """Rows of `count` examples with two segments, ordinary ids in them."""
    numbers = np.random.default_rng(seed)
    tokens = numbers.integers(5, WORDS, (count, S)).astype(np.int32)
    tokens[:, 0], tokens[:, 40], tokens[:, length - 1] = SPECIAL.cls, SPECIAL.sep, SPECIAL.sep
    tokens[:, length:] = SPECIAL.pad
    return tokens, np.full(count, length), row_keys(np.arange(count), seed)


def masked(tokens, lengths, keys, predictions=20, **settings):
    return mask_tokens(
        tokens,
        lengths,
        keys,
        special=SPECIAL,
        vocab_size=WORDS,
        predictions=predictions,
        **settings,
    )


def close(share, wanted, trials):
    """Within five standard deviations of a binomial share."""
    return abs(share - wanted) < 5 * np.sqrt(wanted * (1 - wanted) / trials)


# --- pairs


@pytest.mark.parametrize("seed", range(5))
def test_a_pass_uses_every_sentence_of_every_document_exactly_once(seed):
    sentences, documents = corpus(seed=seed)
    pairs = pair(sentences, documents, seed)
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


def test_a_random_next_comes_from_another_document_and_an_actual_one_follows():
    sentences, documents = corpus()
    for seed in range(20):
        pairs = pair(sentences, documents, seed)
        first = document_of(pairs.first_start, sentences, documents)
        second = document_of(pairs.second_start, sentences, documents)
        assert np.all((first != second) == pairs.is_random)
        follows = pairs.second_start == pairs.first_start + pairs.first_length
        assert np.all(follows[~pairs.is_random])
        last = document_of(
            pairs.second_start + pairs.second_length - 1, sentences, documents
        )  # B stays in its document
        assert np.array_equal(last, second)


def test_with_two_documents_the_random_next_comes_from_the_other_one():
    pairs = pair(list(range(0, 2001, 10)), [0, 100, 200])
    assert np.all((pairs.first_start < 1000) == (pairs.second_start >= 1000), where=pairs.is_random)
    assert pairs.is_random.any()


def test_every_other_document_and_every_sentence_of_it_is_as_likely():
    sentences, documents = list(range(0, 161, 4)), [0, 10, 20, 30, 40]
    counts = np.zeros((4, 40), np.int64)
    for seed in range(3000):
        pairs = pair(sentences, documents, seed, length=16)
        chosen = pairs.is_random
        np.add.at(counts, (pairs.first_start[chosen] // 40, pairs.second_start[chosen] // 4), 1)
    for document, row in enumerate(counts):
        others = np.delete(row, slice(10 * document, 10 * document + 10))
        assert row.sum() == others.sum()
        expected = row.sum() / 30
        chi2 = ((others - expected) ** 2 / expected).sum()
        assert chi2 < 29 + 5 * np.sqrt(2 * 29)


def test_half_of_the_pairs_that_can_have_an_actual_next_get_a_random_one():
    sentences, documents = corpus(documents=400)
    trials = heads = alone = 0
    for seed in range(5):
        pairs = pair(sentences, documents, seed, short=0.0)
        ends = [sentences[i] for i in documents[1:]]
        for start, is_random in zip(
            pairs.first_start.tolist(), pairs.is_random.tolist(), strict=True
        ):
            stop = next(end for end in ends if end > start)
            begin = sentences.index(start)
            length = sentences[begin + 1] - start
            if length >= LONGEST or start + length == stop:
                assert is_random  # a single sentence has no second half
                alone += 1
            else:
                trials += 1
                heads += is_random
    assert alone > 100
    assert close(heads / trials, 0.5, trials)


def test_sentences_are_collected_until_they_reach_the_target_and_no_further():
    sentences, documents = corpus(documents=300)
    pairs = pair(sentences, documents, short=0.0)
    ends = {sentences[i] for i in documents}
    actual = ~pairs.is_random
    total = (pairs.first_length + pairs.second_length)[actual]
    last = (pairs.second_start + pairs.second_length)[actual]
    at_end = np.isin(last, list(ends))
    assert np.all(total[~at_end] >= LONGEST)
    assert np.all(total < LONGEST + 40)  # the last sentence crossed the target
    # A random B reaches the target too, unless its document ends.
    b_end = (pairs.second_start + pairs.second_length)[pairs.is_random]
    whole = (pairs.first_length + pairs.second_length)[pairs.is_random]
    assert np.all((whole >= LONGEST) | np.isin(b_end, list(ends)))


def test_a_tenth_of_the_examples_aims_at_a_shorter_length_drawn_per_example():
    # One-token sentences: an actual next that does not end its document is exactly as long as aimed.
    sentences, documents = list(range(2_000_001)), [0, 1_000_000, 2_000_000]
    pairs = pair(sentences, documents, length=S)
    actual = ~pairs.is_random
    total = (pairs.first_length + pairs.second_length)[actual][:-1]
    assert total.max() == LONGEST
    assert total.min() == 2
    short = total < LONGEST
    # One in 124 short targets is the full length.
    assert close(short.mean(), 0.1 * 123 / 124, len(total))
    spread = (LONGEST - 2) / np.sqrt(12 * short.sum())
    assert abs(total[short].mean() - (2 + LONGEST - 1) / 2) < 5 * spread


def test_segment_a_is_cut_at_any_sentence_with_equal_chance():
    sentences, documents = list(range(0, 100_001, 25)), [0, 2000, 4000]
    pairs = pair(sentences, documents, short=0.0)
    counts = np.bincount(pairs.first_length[:-1] // 25, minlength=6)[1:5]  # 5 sentences collected
    assert counts.sum() >= len(pairs.is_random) - 4
    for count in counts:
        assert close(count / counts.sum(), 0.25, counts.sum())


def test_one_document_cannot_make_pairs():
    with pytest.raises(ValueError, match="another"):
        pair([0, 5, 9], [0, 2])


def test_the_same_seed_gives_the_same_pairs_and_another_one_others():
    sentences, documents = corpus()
    one, same, other = (pair(sentences, documents, seed) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(one, same, strict=True))
    assert not np.array_equal(one.first_start[:50], other.first_start[:50])


# --- truncation


def walked(a, b, longest):
    """How long the segments are when tokens go one by one from the longer."""
    while a + b > longest:
        if a > b:
            a -= 1
        else:
            b -= 1
    return a, b


@pytest.mark.parametrize("longest", [5, 6, 29])
def test_truncation_leaves_what_a_walk_token_by_token_leaves(longest):
    lengths = [(a, b) for a in range(1, 70) for b in range(1, 70)]
    a, b = (np.array(column) for column in zip(*lengths, strict=True))
    pairs = Pairs(np.zeros(len(a), np.int64), a, np.full(len(a), 1000), b, np.zeros(len(a), bool))
    cut = truncate_pairs(pairs, longest, row_keys(np.arange(len(a)), 0))
    got = list(zip(cut.first_length.tolist(), cut.second_length.tolist(), strict=True))
    assert got == [walked(*each, longest) for each in lengths]
    for start, length, old_start, old in (
        (cut.first_start, cut.first_length, 0, a),
        (cut.second_start, cut.second_length, 1000, b),
    ):
        assert np.all(start >= old_start)
        assert np.all(start + length <= old_start + old)


@pytest.mark.parametrize("removed", [1, 7, 64, 65, 200, 1000])
def test_each_token_goes_from_the_front_with_a_chance_of_one_half(removed):
    count = 4000
    full = np.full(count, removed + 120)
    zeros = np.zeros(count, np.int64)
    pairs = Pairs(zeros, full, zeros, np.full(count, 5), zeros.astype(bool))
    cut = truncate_pairs(pairs, LONGEST, row_keys(np.arange(count), 3))
    assert np.all(cut.first_length == 120)
    assert np.all(cut.second_start == 0)
    front = cut.first_start
    assert front.min() >= 0
    assert front.max() <= removed
    assert close(front.sum() / (count * removed), 0.5, count * removed)
    # Variance of a binomial; its sample variance deviates by about sqrt(2 / count).
    assert abs(front.var() / (removed / 4) - 1) < 6 * np.sqrt(2 / count)


def test_a_row_is_cls_a_sep_b_sep_and_padding():
    tokens = np.arange(100, 200).astype(np.uint16)
    pairs = Pairs(*(np.array(c) for c in ([3, 0], [2, 5], [50, 97], [1, 3], [True, False])))
    rows_BS, lengths = gather(tokens, pairs, SPECIAL, 12)
    assert rows_BS.tolist() == [
        [2, 103, 104, 3, 150, 3, 0, 0, 0, 0, 0, 0],
        [2, 100, 101, 102, 103, 104, 3, 197, 198, 199, 3, 0],
    ]
    assert lengths.tolist() == [6, 11]


# --- masks


@pytest.mark.parametrize(
    ("length", "predictions", "wanted"),
    # 15 % of all tokens, the special ones too, half to even as Python rounds.
    [
        (128, 20, 19),
        (128, 10, 10),
        (5, 20, 1),
        (10, 20, 2),
        (30, 20, 4),
        (50, 20, 8),
        (128, 200, 19),
    ],
)
def test_a_row_has_exactly_as_many_predictions_as_the_paper_says(length, predictions, wanted):
    assert wanted == min(predictions, max(1, round(0.15 * length)))
    tokens = np.full((50, 128), 7)
    tokens[:, 0], tokens[:, 2], tokens[:, length - 1] = SPECIAL.cls, SPECIAL.sep, SPECIAL.sep
    tokens[:, length:] = SPECIAL.pad
    out = masked(tokens, np.full(50, length), row_keys(np.arange(50), 1), predictions)
    assert out.positions.shape == (50, predictions)
    assert np.all(out.weights.sum(axis=1) == wanted)
    assert np.all((out.weights == 1) == (np.arange(predictions) < wanted))


def test_a_row_with_fewer_ordinary_tokens_than_predictions_masks_them_all():
    tokens = np.array([[SPECIAL.cls, 9, SPECIAL.sep, 8, SPECIAL.sep, 0, 0, 0]])
    out = masked(tokens, np.array([5]), row_keys([0], 1), 20, masked_lm_prob=0.99)
    assert out.positions[0, :3].tolist() == [1, 3, 0]
    assert out.ids[0, :3].tolist() == [9, 8, 0]
    assert out.weights[0].sum() == 2


def test_masks_are_ascending_places_of_ordinary_tokens_with_their_ids_and_zero_padding():
    tokens, lengths, keys = rows()
    out = masked(tokens, lengths, keys)
    held = out.weights == 1
    assert np.all(held.sum(axis=1) == 15)
    assert np.all(np.diff(out.positions[:, :15], axis=1) > 0)
    assert np.all(out.positions[~held] == 0)
    assert np.all(out.ids[~held] == 0)
    assert np.all(np.isin(out.weights, [0.0, 1.0]))
    here = np.take_along_axis(tokens, out.positions, axis=1)
    assert np.array_equal(here[held], out.ids[held])
    assert not np.isin(out.ids[held], [SPECIAL.cls, SPECIAL.sep, SPECIAL.pad]).any()
    restored = out.input_ids.copy()
    np.put_along_axis(restored, out.positions[:, :15], out.ids[:, :15], axis=1)
    assert np.array_equal(restored, tokens)


def test_replacements_are_80_10_10_and_the_random_word_is_any_of_the_vocabulary():
    tokens, lengths, keys = rows()
    tokens[tokens > 4] = 777
    out = masked(tokens, lengths, keys)
    seen = np.take_along_axis(out.input_ids, out.positions[:, :15], axis=1)
    mask, kept = seen == SPECIAL.mask, seen == 777
    other = ~mask & ~kept
    total = seen.size
    # A random word is [MASK], or the word itself, once in V times.
    assert close(mask.mean(), 0.8 + 0.1 / WORDS, total)
    assert close(kept.mean(), 0.1 + 0.1 / WORDS, total)
    assert close(other.mean(), 0.1 - 0.2 / WORDS, total)
    counts = np.bincount(seen[other], minlength=WORDS)
    expected = other.sum() / (WORDS - 2)
    counts = np.delete(counts, [SPECIAL.mask, 777])
    assert counts.min() > 0  # every word, the special ones and the last too
    chi2 = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi2 - (WORDS - 3)) < 5 * np.sqrt(2 * WORDS)


def test_every_ordinary_place_is_as_likely_to_be_masked():
    tokens, lengths, keys = rows()
    out = masked(tokens, lengths, keys)
    counts = np.bincount(out.positions[:, :15].ravel(), minlength=S)
    ordinary = np.flatnonzero(tokens[0] > 4)
    assert counts.sum() == counts[ordinary].sum()
    share = 15 / len(ordinary)
    deviations = (counts[ordinary] / len(tokens) - share) / np.sqrt(
        share * (1 - share) / len(tokens)
    )
    assert np.abs(deviations).max() < 5
    # What becomes of a place does not depend on which place it is, nor on its neighbours.
    is_mask = np.take_along_axis(out.input_ids, out.positions[:, :15], axis=1) == SPECIAL.mask
    assert np.abs(np.corrcoef(is_mask.T) - np.eye(15)).max() < 5 / np.sqrt(len(tokens))


def test_a_row_is_masked_alike_whatever_stands_beside_it():
    tokens, lengths, keys = rows(500)
    for words in (None, np.arange(WORDS) % 3 == 0):
        whole = masked(tokens, lengths, keys, is_continuation=words)
        order = np.random.default_rng(1).permutation(500)[:77]
        part = masked(tokens[order], lengths[order], keys[order], is_continuation=words)
        alone = masked(tokens[7:8], lengths[7:8], keys[7:8], is_continuation=words)
        for a, b, c in zip(whole, part, alone, strict=True):
            assert np.array_equal(a[order], b)
            assert np.array_equal(a[7:8], c)


def test_a_row_is_masked_alike_with_more_padding():
    tokens, lengths, keys = rows(200)
    wide = np.pad(tokens, ((0, 0), (0, 60)))
    narrow, padded = masked(tokens, lengths, keys), masked(wide, lengths, keys)
    assert np.array_equal(narrow.positions, padded.positions)
    assert np.array_equal(narrow.input_ids, padded.input_ids[:, :S])


def test_other_keys_give_other_masks_and_the_input_is_left_alone():
    tokens, lengths, keys = rows(100)
    before = tokens.copy()
    one, two = masked(tokens, lengths, keys), masked(tokens, lengths, keys + np.uint64(1))
    assert np.array_equal(tokens, before)
    assert np.mean(np.all(one.positions == two.positions, axis=1)) < 0.05


def test_rows_narrower_than_predictions_are_padded():
    tokens = np.array([[SPECIAL.cls, 9, SPECIAL.sep, 8, SPECIAL.sep]])
    for words in (None, np.zeros(WORDS, bool)):
        out = masked(tokens, np.array([5]), row_keys([0], 1), 76, is_continuation=words)
        assert out.positions.shape == out.ids.shape == out.weights.shape == (1, 76)
        assert out.weights.sum() == 1


def test_the_masks_of_a_seed_never_change():
    # Records in use were made with them: change these numbers only with the format of the records.
    tokens, lengths, keys = rows(3, length=30)
    tokens[tokens > 4] = 500
    out = masked(tokens, lengths, keys, predictions=6)
    assert keys.tolist() == PINNED["keys"]
    assert out.positions.tolist() == PINNED["positions"]
    assert np.take_along_axis(out.input_ids, out.positions, axis=1).tolist() == PINNED["seen"]


PINNED = {
    "keys": [9413581018138331720, 14786693606146816186, 8966975528015379237],
    "positions": [[1, 2, 10, 14, 0, 0], [6, 9, 12, 27, 0, 0], [1, 7, 18, 20, 0, 0]],
    "seen": [[500, 4, 4, 500, 2, 2], [4, 4, 4, 4, 2, 2], [4, 4, 750, 4, 2, 2]],
}


# --- whole words


def words_of(row, length, continues):
    """Places of each word: a piece that continues joins the piece before it in its segment."""
    found = []
    for place in range(length):
        if row[place] in (SPECIAL.cls, SPECIAL.sep):
            continue
        before = row[place - 1] in (SPECIAL.cls, SPECIAL.sep)
        if continues[row[place]] and not before:
            found[-1].append(place)
        else:
            found.append([place])
    return found


def test_whole_words_are_masked_whole_and_none_that_fits_is_left_out():
    continues = np.arange(WORDS) % 3 == 0
    continues[:5] = False
    tokens, lengths, keys = rows(400)
    out = masked(tokens, lengths, keys, is_continuation=continues)
    for number in range(400):
        chosen = set(out.positions[number][out.weights[number] == 1].tolist())
        assert len(chosen) == out.weights[number].sum() <= 15
        words = words_of(tokens[number].tolist(), 100, continues)
        for word in words:
            hit = chosen & set(word)
            assert not hit or hit == set(word)
            assert hit or len(word) > 15 - len(chosen)
        assert sorted(chosen) == out.positions[number][: len(chosen)].tolist()
        assert np.all(tokens[number][sorted(chosen)] == out.ids[number][: len(chosen)])


def test_every_word_is_as_likely_to_be_masked_whole():
    continues = np.zeros(WORDS, bool)
    continues[6] = True
    tokens, lengths, keys = rows()
    tokens[:, 1:40:3] = tokens[:, 2:40:3] = 5
    tokens[:, 3:40:3] = 6  # places 2 and 3, 5 and 6, ... are words
    out = masked(tokens, lengths, keys, is_continuation=continues)
    counts = np.bincount(out.positions[out.weights == 1], minlength=S)
    assert np.array_equal(counts[2:39:3], counts[3:40:3])
    single = counts[41:99]
    share = single.mean() / len(tokens)
    assert np.abs(single / len(tokens) - share).max() < 5 * np.sqrt(share / len(tokens))
    # A word of two is passed over when one place is left, so it is chosen a little less often.
    pairs = counts[2:39:3].mean() / len(tokens)
    assert 0.93 * share < pairs < share


def test_a_row_whose_words_are_all_too_long_has_no_predictions():
    continues = np.zeros(WORDS, bool)
    continues[6] = True
    row = [SPECIAL.cls, 5, 6, 6, SPECIAL.sep, 5, 6, 6, SPECIAL.sep]
    out = masked(np.array([row]), np.array([9]), row_keys([0], 0), is_continuation=continues)
    assert out.weights.sum() == 0
    assert out.input_ids.tolist() == [row]


# --- keys


def test_keys_differ_by_number_and_by_every_name():
    sets = [
        row_keys(np.arange(100_000), *names) for names in [(1, "a", 0), (1, "a", 1), (2, "a", 0)]
    ]
    assert len(np.unique(np.concatenate(sets))) == 300_000
    assert np.array_equal(row_keys([5], 1, "a", 0), sets[0][5:6])
    bits = np.unpackbits(sets[0].view(np.uint8)).reshape(-1, 64).mean(axis=0)
    assert np.abs(bits - 0.5).max() < 5 * 0.5 / np.sqrt(100_000)
