"""GELU and LayerNorm are those of the papers, and each compiled chain is its plain form."""

import math

import numpy as np
import pytest
import tensorflow as tf

from bert_cli.model import fused
from bert_cli.model.fused import dropout_seed

# (largest difference of a value, of a gradient), relative to the largest of either: a few roundings
# of the dtype that the chain's inputs and results have.
ROUNDING = {"float32": 2e-6, "bfloat16": 2**-7, "float16": 2**-10}


@pytest.fixture(autouse=True)
def small_chains_too(monkeypatch):
    monkeypatch.setattr(fused, "WORTH_COMPILING", 1)


def normal(shape, seed, dtype="float32"):
    return tf.cast(tf.random.stateless_normal(shape, [seed, 1]), dtype)


def drawn(drops):
    return dropout_seed(tf.constant([7, 3], tf.int32), 5) if drops else None


def run(chain, inputs, above, compiles):
    """Values and gradients of a chain in its plain or its compiled form, as float32."""
    fused.compile_fused(compiles)
    try:

        @tf.function(autograph=False)
        def both(*inputs):
            with tf.GradientTape() as tape:
                tape.watch(inputs)
                value = chain(*inputs)
            return [value, *tape.gradient(value, inputs, output_gradients=above)]

        return [tf.cast(found, tf.float32).numpy() for found in both(*inputs)]
    finally:
        fused.compile_fused(False)


def same_in_both_forms(chain, inputs, above):
    names = ["value", *(f"gradient {number}" for number in range(len(inputs)))]
    forms = [run(chain, inputs, above, compiles) for compiles in (False, True)]
    for name, plain, ours in zip(names, *forms, strict=True):
        largest = np.abs(plain).max()
        assert largest > 0, name
        assert np.abs(ours - plain).max() <= ROUNDING[above.dtype.name] * largest, name
    return forms[1][0]


WEIGHTS = {"float32": "float32", "bfloat16": "float32", "float16": "float16"}


@pytest.mark.parametrize("dtype", ROUNDING)
def test_compiled_gelu_is_the_plain_one(dtype):
    inputs = normal((4, 16, 96), 1, dtype), normal((96,), 2, WEIGHTS[dtype])
    same_in_both_forms(fused.bias_gelu, inputs, normal((4, 16, 96), 3, dtype))


@pytest.mark.parametrize(
    ("dtype", "drops"),
    [("float32", True), ("float32", False), ("bfloat16", True), ("float16", True)],
)
def test_the_compiled_end_of_a_sublayer_is_the_plain_one(dtype, drops):
    shape, weights = (4, 16, 96), WEIGHTS[dtype]
    inputs = (
        normal(shape, 1, dtype),
        normal((96,), 2, weights),
        normal(shape, 3, dtype),
        normal((96,), 4, weights),
        normal((96,), 5, weights),
    )

    def chain(rows, bias, residual, gamma, beta):
        return fused.add_and_normalize(
            rows, bias, residual, (gamma, beta), 1e-12, 0.3, drawn(drops)
        )

    same_in_both_forms(chain, inputs, normal(shape, 6, dtype))


@pytest.mark.parametrize(
    ("dtype", "drops"),
    [("float32", True), ("float32", False), ("bfloat16", True), ("float16", True)],
)
def test_compiled_probabilities_are_the_plain_ones_and_padding_has_none(dtype, drops):
    shape = (2, 3, 16, 16)
    bias = tf.constant(np.where(np.arange(16) < 12, 0.0, -1e9), tf.float32)[None, None, None]

    def chain(scores):
        return fused.attention_probabilities(scores, bias, 0.3, drawn(drops))

    scores, above = (normal(shape, 1, dtype),), normal(shape, 2, dtype)
    value = same_in_both_forms(chain, scores, above)
    assert not np.any(value[..., 12:])


def test_a_large_chain_of_known_shape_is_compiled_once_for_all_layers_and_others_are_not(
    monkeypatch,
):
    monkeypatch.setattr(fused, "_compiles", True)
    rows, bias = normal((4, 8), 1), normal((8,), 2)
    kernel = fused._kernel(fused._gelu_forward)
    before = kernel.experimental_get_tracing_count()
    signature = [tf.TensorSpec([None, 8]), tf.TensorSpec([8])]
    any_length = tf.function(fused.bias_gelu, input_signature=signature)(rows, bias)
    monkeypatch.setattr(fused, "WORTH_COMPILING", 33)
    small = fused.bias_gelu(rows, bias)
    assert kernel.experimental_get_tracing_count() == before
    np.testing.assert_allclose(any_length, small, rtol=1e-6)
    monkeypatch.setattr(fused, "WORTH_COMPILING", 1)
    tf.function(lambda: fused.bias_gelu(fused.bias_gelu(rows, bias), 2.0 * bias))()
    assert kernel.experimental_get_tracing_count() == before + 1


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
    tensorflow = fused.matmul_with_transpose(x, table).numpy()
    monkeypatch.setattr(fused, "tf", None)
    np.testing.assert_allclose(fused.matmul_with_transpose(x, table).numpy(), tensorflow, atol=1e-6)
