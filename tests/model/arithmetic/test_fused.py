"""LayerNorm is that of the paper, and each compiled chain is its plain form."""

from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from bert_cli.model.arithmetic import fused
from bert_cli.model.arithmetic.fused import dropout_seed

# Largest difference relative to the largest value or gradient: a few roundings.
ROUNDING = {"float32": 2e-6, "float16": 2**-10}


def normal(shape, seed, dtype="float32"):
    return tf.cast(tf.random.stateless_normal(shape, [seed, 1]), dtype)


def run(chain, inputs, above, fuse_above):
    @tf.function(autograph=False)
    def both(*inputs):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            value = chain(*inputs, fuse_above=fuse_above)
        return [value, *tape.gradient(value, inputs, output_gradients=above)]

    return [tf.cast(found, tf.float32).numpy() for found in both(*inputs)]


BIAS = np.where(np.arange(16) < 12, 0.0, -1e9).astype(np.float32)[None, None, None]
ROWS = (4, 16, 96)
# Name -> the chain with its dropout seed, and the shapes of its inputs, of which vectors are weights.
CHAINS = {
    "bias and GELU": (
        lambda seed, *inputs, **fuse: fused.bias_gelu(*inputs, **fuse),
        [ROWS, (96,)],
    ),
    "gated GELU": (lambda seed, *inputs, **fuse: fused.gated_gelu(*inputs, **fuse), [ROWS, ROWS]),
    "end of a sublayer": (
        lambda seed, rows, bias, residual, *scale, **fuse: fused.add_and_normalize(
            rows, bias, residual, (*scale, 1e-12), fused.Dropout(0.3, seed), **fuse
        ),
        [ROWS, (96,), ROWS, (96,), (96,)],
    ),
    "attention probabilities": (
        lambda seed, scores, **fuse: fused.attention_probabilities(
            scores, BIAS, fused.Dropout(0.3, seed), **fuse
        ),
        [(2, 3, 16, 16)],
    ),
}


HAVE_DROPOUT = ("end of a sublayer", "attention probabilities")
FORMS = [(chain, dtype, True) for chain in CHAINS for dtype in ("float32", "float16")]
FORMS += [(chain, "float32", False) for chain in HAVE_DROPOUT]


@pytest.mark.parametrize(("chain", "dtype", "drops"), FORMS)
def test_a_compiled_chain_is_the_plain_one(chain, dtype, drops):
    function, shapes = CHAINS[chain]
    kinds = {1: "float16" if dtype == "float16" else "float32"}
    inputs = [normal(shape, n, kinds.get(len(shape), dtype)) for n, shape in enumerate(shapes, 1)]
    seed = dropout_seed(tf.constant([7, 3], tf.int32), 5) if drops else None
    above = normal(shapes[0], 6, dtype)
    forms = [run(partial(function, seed), inputs, above, number) for number in (fused.NEVER, 1)]
    for number, (plain, ours) in enumerate(zip(*forms, strict=True)):
        largest = np.abs(plain).max()
        assert largest > 0, number
        assert np.abs(ours - plain).max() <= ROUNDING[dtype] * largest, number
    if chain == "attention probabilities":
        assert not np.any(forms[1][0][..., 12:]), "padding has a probability"


def test_layer_norm_is_that_of_the_paper_also_where_the_mean_is_large():
    draw = np.random.default_rng(0)
    x, gamma, beta = 100.0 + draw.normal(size=(8, 64)), draw.normal(size=64), draw.normal(size=64)
    x, gamma, beta = (value.astype(np.float32) for value in (x, gamma, beta))
    wide = x.astype(np.float64)
    normal = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-12)
    ours = fused.normalize(*(tf.constant(value) for value in (x, gamma, beta)), 1e-12).numpy()
    np.testing.assert_allclose(ours, normal * gamma + beta, atol=5e-5)


def test_an_exact_product_is_that_in_float64_where_the_device_would_round_factors(monkeypatch):
    monkeypatch.setattr(fused, "rounds_products", lambda: True)
    x, y = np.random.default_rng(4).standard_normal((2, 8, 300)).astype(np.float32)
    product = fused.exact_matmul(tf.constant(x), tf.constant(y), transpose_b=True)
    expected = (x.astype(np.float64) @ y.T.astype(np.float64)).astype(np.float32)
    np.testing.assert_array_equal(product, expected)
    assert not np.array_equal(x @ y.T, expected), "sums in float32 round"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_operations_by_the_library_are_the_plain_ones(dtype):
    """In a graph for batches of any shape, as in prediction; the reference is float64."""
    draw = np.random.default_rng(3)
    size = {"float32": 1e-5, "bfloat16": 2**-7}[dtype]
    x, kernel, bias, gamma, beta = (
        draw.standard_normal(shape).astype(np.float32)
        for shape in ((3, 17, 64), (64, 96), *[(96,)] * 3)
    )
    # A policy of float16 has weights in float32, too.
    assert fused.constant_of(kernel, tf.float16).dtype == tf.float16
    x_any = tf.TensorSpec([None, None, 64], dtype)
    for is_gelu in (False, True):
        run = tf.function(
            lambda x, is_gelu=is_gelu: fused.dense_by_library(x, kernel, bias, is_gelu=is_gelu),
            input_signature=[x_any],
        )
        rounded = [tf.cast(tf.cast(value, dtype), tf.float64) for value in (x, kernel, bias)]
        expected = tf.tensordot(rounded[0], rounded[1], 1) + rounded[2]
        expected = tf.nn.gelu(expected) if is_gelu else expected
        result = tf.cast(run(tf.cast(x, dtype)), tf.float64)
        terms = np.abs(expected)
        if dtype == "bfloat16":  # with AVX2 alone the library adds in bfloat16, too
            terms = tf.tensordot(tf.abs(rounded[0]), tf.abs(rounded[1]), 1) + tf.abs(rounded[2])
        assert np.all(np.abs(result - expected) <= size * (terms + 1))
    rows = draw.standard_normal((3, 17, 96)).astype(np.float32) * 3 + 1
    normalize = tf.function(
        lambda x: fused.normalize_by_library(x, gamma, beta, 1e-12),
        input_signature=[tf.TensorSpec([None, None, 96], dtype)],
    )
    rounded = [tf.cast(tf.cast(value, dtype), "float32") for value in (rows, gamma, beta)]
    plain = fused.normalize(*rounded, 1e-12)
    terms = np.abs(plain - rounded[2]) + np.abs(rounded[2])
    result = tf.cast(normalize(tf.cast(rows, dtype)), "float32")
    # Each of the two terms is rounded before they are added, so the error is relative to them, not to their sum.
    assert np.all(np.abs(result - plain) <= size * (terms + size))
