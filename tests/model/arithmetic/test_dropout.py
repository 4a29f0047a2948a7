"""Dropout is a function of (run seed, sample index, dropout id), however it is run."""

import numpy as np
import tensorflow as tf

from bert_cli.model.arithmetic.fused import dropout, dropout_seed, keep_mask

SHAPE = (64, 4, 32)
KEY = np.array([7, 3], np.int32)


def mask(shape=SHAPE, rate=0.1, seed=7, index=3, dropout_id=5):
    mask_seed = dropout_seed(tf.constant([seed, index], tf.int32), dropout_id)
    return np.asarray(keep_mask(shape, rate, mask_seed))


def test_the_mask_is_the_same_in_eager_mode_in_a_graph_and_under_xla():
    def draw(key):
        return keep_mask(SHAPE, 0.1, dropout_seed(key, 5))

    for compiles in (False, True):
        graph = tf.function(draw, jit_compile=compiles)(tf.constant(KEY))
        np.testing.assert_array_equal(draw(KEY), graph)


def test_another_seed_index_or_id_gives_an_unrelated_mask():
    others = ({"seed": 8}, {"index": 4}, {"dropout_id": 6}, {"seed": 3, "index": 7}, {"seed": -7})
    masks = [mask((500, 500), **other) for other in ({}, *others)]
    assert abs(masks[0].mean() - 0.9) < 0.003
    for number, one in enumerate(masks):
        for other in masks[:number]:
            # Independent masks agree in 0.9^2 + 0.1^2 = 82 % of the positions, give or take 0.08 %.
            assert abs((one == other).mean() - 0.82) < 0.005


def test_elements_that_stay_are_scaled_and_others_are_zero():
    x = tf.random.stateless_normal(SHAPE, [1, 2])
    y = dropout(x, 0.25, dropout_seed(KEY, 5)).numpy()
    np.testing.assert_allclose(y, np.where(mask(rate=0.25), x.numpy() / 0.75, 0.0), rtol=1e-6)
    assert dropout(x, 0.5, None) is x
    assert dropout(x, 0.0, tf.constant(7)) is x
