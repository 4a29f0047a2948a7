"""Dropout is a function of (seed, position, site); GELU and LayerNorm are those of the papers."""

import math

import numpy as np
import pytest
import tensorflow as tf

from bert_cli.model import fused

FORMS = [fused.keep_mask_tensorflow, fused.keep_mask_plain]
SHAPE = (64, 4, 32)


def mask(form=fused.keep_mask, shape=SHAPE, rate=0.1, seed=7, position=3, site=5):
    return np.asarray(form(shape, rate, tf.constant([seed, position], tf.int32), site))


@pytest.mark.parametrize("form", FORMS)
def test_the_mask_is_the_same_in_eager_mode_in_a_graph_and_under_xla(form):
    def draw(key):
        return form(SHAPE, 0.1, key, 5)

    key = tf.constant([7, 3], tf.int32)
    eager = draw(key).numpy()
    np.testing.assert_array_equal(eager, tf.function(draw)(key).numpy())
    np.testing.assert_array_equal(eager, tf.function(draw, jit_compile=True)(key).numpy())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_the_share_of_kept_elements_is_one_minus_the_rate(form, rate):
    kept = mask(form, (1000, 1000), rate).mean()
    assert abs(kept - (1 - rate)) < 5 * math.sqrt(rate * (1 - rate) / 1e6)


@pytest.mark.parametrize("form", FORMS)
def test_another_seed_position_or_site_gives_an_unrelated_mask(form):
    shape = (500, 500)
    masks = [
        mask(form, shape),
        mask(form, shape, seed=8),
        mask(form, shape, position=4),
        mask(form, shape, site=6),
        mask(form, shape, seed=3, position=7),
        mask(form, shape, seed=-7),
    ]
    for number, one in enumerate(masks):
        for other in masks[:number]:
            # Independent masks agree in 0.9^2 + 0.1^2 = 82 % of the places, give or take 0.08 %.
            assert abs((one == other).mean() - 0.82) < 0.005


@pytest.mark.parametrize("form", FORMS)
def test_neighbouring_places_are_independent(form):
    flat = mask(form, (1000, 1000)).ravel()
    for distance in (1, 2, 1000):
        assert abs((flat[distance:] == flat[:-distance]).mean() - 0.82) < 0.003


def test_the_mask_does_not_depend_on_what_was_drawn_before():
    first = mask()
    mask(site=1), mask(site=2), mask(position=9)
    np.testing.assert_array_equal(first, mask())


def test_pinned_bits():
    # Runs that were interrupted continue with these masks: a change here breaks their resumption,
    # and belongs in the changelog as such.
    assert (
        np.packbits(mask(fused.keep_mask_tensorflow, (64,), 0.5)).tobytes().hex()
        == "e7dd8e2004351988"
    )
    assert (
        np.packbits(mask(fused.keep_mask_plain, (64,), 0.5)).tobytes().hex() == "672132167f6530c8"
    )


def test_kept_elements_are_scaled_and_others_are_zero():
    x = tf.random.stateless_normal(SHAPE, [1, 2])
    y = fused.dropout(x, 0.25, tf.constant([7, 3], tf.int32), 5).numpy()
    np.testing.assert_allclose(y, np.where(mask(rate=0.25), x.numpy() / 0.75, 0.0), rtol=1e-6)


def test_no_key_or_a_rate_of_zero_is_no_dropout():
    x = tf.ones(SHAPE)
    assert fused.dropout(x, 0.5, None, 0) is x
    assert fused.dropout(x, 0.0, tf.constant([7, 3], tf.int32), 0) is x


def test_a_rate_of_one_is_refused():
    with pytest.raises(ValueError, match=r"dropout rate \(1.0\)"):
        mask(rate=1.0)


def test_gelu_is_the_exact_one():
    x = np.linspace(-6, 6, 241, dtype=np.float32)
    exact = [v * 0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x.astype(np.float64)]
    np.testing.assert_allclose(fused.gelu(tf.constant(x)).numpy(), exact, atol=5e-7)


def test_layer_norm_is_that_of_the_paper_also_where_the_mean_is_large():
    draw = np.random.default_rng(0)
    x, gamma, beta = 100.0 + draw.normal(size=(8, 64)), draw.normal(size=64), draw.normal(size=64)
    x, gamma, beta = (value.astype(np.float32) for value in (x, gamma, beta))
    wide = x.astype(np.float64)
    normal = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-12)
    ours = fused.normalize(*(tf.constant(value) for value in (x, gamma, beta)), 1e-12).numpy()
    np.testing.assert_allclose(ours, normal * gamma + beta, atol=5e-5)


def test_the_product_with_the_table_is_the_same_in_both_forms(monkeypatch):
    x, table = (
        tf.random.stateless_normal((6, 8), [1, 2]),
        tf.random.stateless_normal((11, 8), [3, 4]),
    )
    tensorflow = fused.product_with_table(x, table).numpy()
    monkeypatch.setattr(fused, "tf", None)
    np.testing.assert_allclose(fused.product_with_table(x, table).numpy(), tensorflow, atol=1e-6)
