"""Masks and their random bits; `test_recipe` has the fractions of the paper."""

from collections import namedtuple

import numpy as np

from bert_cli.data.random import row_keys
from bert_cli.data.records.masking import MaskRecipe, mask_examples
from bert_cli.data.tokens.notation import SpecialIds
from bert_cli.facts.masking import Masking

SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
V = 1000
S = 128
THIRD = np.arange(V) % 3 == 0
THIRD[:5] = False
UNITS = (("token", None), ("word", THIRD))


def rows(count, length=100):
    """Return examples of two segments of random tokens, with lengths and keys."""
    tokens = np.random.default_rng(0).integers(5, V, (count, S)).astype(np.int32)
    tokens[:, 0], tokens[:, 40], tokens[:, length - 1] = SPECIAL.cls, SPECIAL.sep, SPECIAL.sep
    tokens[:, length:] = SPECIAL.pad
    return tokens, np.full(count, length), row_keys(np.arange(count), 0)


Masked = namedtuple("Masked", "input_ids positions ids weights")


def masked(tokens, lengths, keys, predictions=20, is_continuation=None, unit="token", **settings):
    recipe = MaskRecipe(SPECIAL, V, Masking(unit=unit, **settings), predictions, is_continuation)
    columns = mask_examples(tokens, lengths, lengths, lengths, keys, recipe)
    names = ("input_ids", "masked_lm_positions", "masked_lm_ids", "masked_lm_weights")
    return Masked(*(columns[name] for name in names))


def test_rows_with_fewer_tokens_than_predictions_mask_them_all_and_are_padded():
    tokens = np.array([[SPECIAL.cls, 9, SPECIAL.sep, 8, SPECIAL.sep, 0, 0, 0]])
    out = masked(tokens, np.array([5]), row_keys([0], 1), 20, probability=0.99)
    assert out.positions[0, :3].tolist() == [1, 3, 0]
    assert out.ids[0, :3].tolist() == [9, 8, 0]
    assert out.weights[0].sum() == 2
    for unit, _ in UNITS:
        out = masked(tokens, np.array([5]), row_keys([0], 1), 76, np.zeros(V, bool), unit)
        assert out.positions.shape == out.ids.shape == out.weights.shape == (1, 76)
        assert out.weights.sum() == 1


def test_the_words_of_a_seed_never_change():
    """A run continues with the same words: change these numbers only with a new major version.

    `test_tokenize` pins masks of tokens, with which records were made.
    """
    tokens, lengths, keys = rows(2, length=60)
    out = masked(tokens, lengths, keys, 9, THIRD, "word")
    assert out.positions.tolist() == [
        [1, 2, 3, 14, 41, 43, 44, 45, 55],
        [9, 12, 13, 14, 15, 27, 33, 49, 51],
    ]
    assert np.take_along_axis(out.input_ids, out.positions, axis=1).tolist() == [
        [638, 4, 4, 970, 291, 4, 4, 4, 4],
        [4, 4, 230, 292, 4, 4, 758, 4, 4],
    ]
