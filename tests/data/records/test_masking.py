"""Masks, judged by the paper's numbers and bounds of five deviations."""

import numpy as np
import pytest

from bert_cli.config.data import Masking
from bert_cli.data.records.masking import TokenKinds, _span_lengths, mask_tokens
from bert_cli.data.records.random_bits import POSITIONS, REPLACEMENTS, SPANS, bits, row_keys
from bert_cli.data.records.sentence_pairs import SpecialIds

SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
WORDS = 1000
S = 128


def rows(count=20_000, length=100, seed=0, continues=None):
    """Rows of `count` examples with two segments, ordinary ids in them."""
    numbers = np.random.default_rng(seed)
    tokens = numbers.integers(5, WORDS, (count, S)).astype(np.int32)
    tokens[:, 0], tokens[:, 40], tokens[:, length - 1] = SPECIAL.cls, SPECIAL.sep, SPECIAL.sep
    tokens[:, length:] = SPECIAL.pad
    return tokens, np.full(count, length), row_keys(np.arange(count), seed)


def masked(
    tokens, lengths, keys, predictions=20, probability=0.15, is_continuation=None, **of_spans
):
    unit = "token" if is_continuation is None else "word"
    masking = Masking(**{"unit": unit, "probability": probability} | of_spans)
    kinds = TokenKinds(SPECIAL, WORDS, is_continuation)
    return mask_tokens(tokens, lengths, keys, kinds, masking, predictions)


def close(share, wanted, trials):
    """Within five standard deviations of a binomial share."""
    return abs(share - wanted) < 5 * np.sqrt(wanted * (1 - wanted) / trials)


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
    out = masked(tokens, np.array([5]), row_keys([0], 1), 20, probability=0.99)
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
    third = np.arange(WORDS) % 3 == 0
    for unit, words in (("token", None), ("word", third), ("span", third)):
        given = {"unit": unit, "is_continuation": words}
        whole = masked(tokens, lengths, keys, **given)
        order = np.random.default_rng(1).permutation(500)[:77]
        part = masked(tokens[order], lengths[order], keys[order], **given)
        alone = masked(tokens[7:8], lengths[7:8], keys[7:8], **given)
        for a, b, c in zip(whole, part, alone, strict=True):
            assert np.array_equal(a[order], b)
            assert np.array_equal(a[7:8], c)


def test_a_row_is_masked_alike_with_more_padding():
    tokens, lengths, keys = rows(200)
    wide = np.pad(tokens, ((0, 0), (0, 60)))
    third = np.arange(WORDS) % 3 == 0
    for unit, words in (("token", None), ("word", third), ("span", third)):
        given = {"unit": unit, "is_continuation": words}
        narrow, padded = (
            masked(tokens, lengths, keys, **given),
            masked(wide, lengths, keys, **given),
        )
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
    none = np.zeros(WORDS, bool)
    for words in (None, none):
        out = masked(tokens, np.array([5]), row_keys([0], 1), 76, is_continuation=words)
        spans = masked(
            tokens, np.array([5]), row_keys([0], 1), 76, is_continuation=none, unit="span"
        )
        assert spans.positions.shape == (1, 76)
        assert spans.weights.sum() == 1
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


# --- spans


def walk_spans(row, length, key, continues, wanted, stop, longest):
    """Places of one row's spans by the plain rule, a word at a time; [(places), ...] in their order.

    It shares with the code only which bits are drawn where.
    """
    words = words_of(row, length, continues)
    keys = np.array([key])
    order = bits(keys, POSITIONS, np.arange(len(row)))[0] >> np.uint64(16)
    masked_places, spans = set(), []
    for first in sorted(range(len(words)), key=lambda number: (order[words[number][0]], number)):
        if len(masked_places) >= wanted:
            break
        draw = int(bits(keys, SPANS, np.array([words[first][0]]))[0, 0]) >> 11
        shares = [stop * (1 - stop) ** count for count in range(longest)]
        words_wanted = 1
        while words_wanted < longest and draw / 2**53 >= sum(shares[:words_wanted]) / sum(shares):
            words_wanted += 1
        span = []
        for word in words[first : first + words_wanted]:
            follows = not span or word[0] == span[-1] + 1
            fits = len(masked_places) + len(word) <= wanted
            if not follows or not fits or word[0] in masked_places:
                break
            span += word
            masked_places.update(word)
        if span:
            spans.append(span)
    return spans


@pytest.mark.parametrize(
    ("stop", "longest", "probability"), [(0.2, 10, 0.15), (0.05, 300, 0.3), (0.5, 2, 0.8)]
)
def test_spans_are_those_of_a_walk_over_the_words_of_each_row(stop, longest, probability):
    continues = np.arange(WORDS) % 3 == 0
    continues[:5] = False
    tokens, lengths, keys = rows(300)
    lengths[::7] = 41  # one segment, and an empty one
    tokens[::7, 41:] = SPECIAL.pad
    out = masked(
        tokens,
        lengths,
        keys,
        predictions=60,
        is_continuation=continues,
        unit="span",
        probability=probability,
        span_stop=stop,
        longest_span=longest,
    )
    sizes = []
    for number, row in enumerate(tokens.tolist()):
        wanted = min(60, round(probability * lengths[number]))
        spans = walk_spans(row, lengths[number], keys[number], continues, wanted, stop, longest)
        chosen = sorted(place for span in spans for place in span)
        assert out.positions[number][out.weights[number] == 1].tolist() == chosen
        assert out.ids[number][: len(chosen)].tolist() == [row[place] for place in chosen]
        sizes += map(len, spans)
        for span in spans:
            # One toss for all of a span, the one at its first place.
            toss = int(bits(keys[number : number + 1], REPLACEMENTS, np.array(span[:1]))[0, 0])
            seen = out.input_ids[number][span]
            if toss < int(0.8 * 2**32) << 32:
                assert np.all(seen == SPECIAL.mask)
            elif toss >= int(0.9 * 2**32) << 32:
                assert np.all(seen == tokens[number][span])
        left = np.setdiff1d(np.arange(S), chosen)
        assert np.array_equal(out.input_ids[number][left], tokens[number][left])
    assert max(sizes) > 4


def test_lengths_of_spans_are_geometric_and_cut():
    drawn = bits(row_keys(np.arange(200), 5), SPANS, np.arange(1000)).ravel()
    lengths = _span_lengths(drawn, Masking(unit="span"))
    shares = 0.2 * 0.8 ** np.arange(10)
    shares /= shares.sum()
    counts = np.bincount(lengths, minlength=11)[1:]
    assert len(counts) == 10
    for count, share in zip(counts, shares, strict=True):
        assert close(count / len(lengths), share, len(lengths))
    # The paper's mean: 3.8 words.
    assert abs(lengths.mean() - 3.797) < 5 * lengths.std() / np.sqrt(len(lengths))
    assert np.all(_span_lengths(drawn, Masking(unit="span", longest_span=1)) == 1)


def test_spans_of_one_word_are_whole_words():
    continues = np.arange(WORDS) % 3 == 0
    tokens, lengths, keys = rows(200)
    spans = masked(tokens, lengths, keys, is_continuation=continues, unit="span", longest_span=1)
    words = masked(tokens, lengths, keys, is_continuation=continues)
    assert np.array_equal(spans.positions, words.positions)
    assert np.array_equal(spans.ids, words.ids)


def test_the_spans_of_a_seed_never_change():
    # A run goes on after a stop with the same masks: change these numbers only with a new major version.
    tokens, lengths, keys = rows(2, length=60)
    tokens[tokens > 4] = 500
    continues = np.zeros(WORDS, bool)
    out = masked(tokens, lengths, keys, predictions=9, is_continuation=continues, unit="span")
    assert out.positions.tolist() == PINNED_SPANS["positions"]
    assert np.take_along_axis(out.input_ids, out.positions, axis=1).tolist() == PINNED_SPANS["seen"]


PINNED_SPANS = {
    "positions": [[1, 41, 42, 43, 44, 45, 46, 47, 55], [6, 7, 8, 9, 10, 12, 51, 52, 53]],
    "seen": [[500, 291, 125, 316, 448, 98, 381, 497, 4], [4, 4, 4, 4, 4, 4, 4, 4, 4]],
}


@pytest.mark.parametrize("given", [{"span_stop": 0.3}, {"longest_span": 5}])
@pytest.mark.parametrize("unit", ["token", "word"])
def test_settings_of_spans_are_refused_where_nothing_has_spans(given, unit):
    with pytest.raises(ValueError, match=f"has no effect with unit '{unit}'"):
        Masking(unit=unit, **given)
    assert Masking(unit="span", **given).unit == "span"
