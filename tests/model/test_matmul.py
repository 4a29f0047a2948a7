"""The product as XLA's library for CPUs takes it is the plain one, on every processor."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import numpy as np
import pytest

from bert_cli.model import fused


@pytest.fixture(scope="module")
def on_jax():
    """Run a function in a process whose Keras computes with JAX, on one device."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KERAS_BACKEND", "jax")
            executor.submit(int).result()
        yield lambda function, *values: executor.submit(function, *values).result()


def products(left, right, transpose_a, transpose_b):
    """Return result and gradients in float32, and in bfloat16 of the plain form and of the form for AMX."""
    import jax
    import jax.numpy as jnp

    plain_matmul = partial(fused.matmul, transpose_a=transpose_a, transpose_b=transpose_b)
    rng = np.random.default_rng(1)
    x, y = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in (left, right))

    def both(x, y, cotangent, uses_amx=False):
        product, pull = jax.vjp(partial(plain_matmul, uses_amx=uses_amx), x, y)
        return product, *pull(cotangent.astype(product.dtype))

    shape = jax.eval_shape(plain_matmul, x, y).shape
    cotangent = jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    wide = jax.jit(both)(*(value.astype(jnp.float32) for value in (x, y, cotangent)))
    results = [wide]
    for uses_amx in (False, True):
        # A replica is an axis of the batch, as in the engine; the second operand is a float32 weight.
        replicas = jax.vmap(partial(both, uses_amx=uses_amx), in_axes=(0, None, 0))
        inputs = x[None], y.astype(jnp.float32), cotangent[None]
        results.append([np.asarray(result)[0] for result in jax.jit(replicas)(*inputs)])
    return [[np.asarray(value, np.float32) for value in values] for values in results]


@pytest.mark.parametrize(
    ("left", "right", "transposes"),
    [
        ((64, 32), (32, 48), (False, False)),
        ((16, 32), (160, 32), (False, True)),
        ((16, 160), (16, 32), (True, False)),
        ((2, 3, 16, 8), (2, 3, 8, 16), (False, False)),
        ((8, 8), (8, 8), (False, False)),
        # Vectors and very small matrices, which the library refuses.
        ((1, 32), (32, 48), (False, False)),
        ((64, 32), (32, 2), (False, False)),
        ((64, 1), (1, 48), (False, False)),
    ],
)
def test_a_product_for_amx_is_the_plain_one_but_for_its_rounding(on_jax, left, right, transposes):
    wide, plain, ours = on_jax(products, left, right, *transposes)
    for expected, rounded, result in zip(wide, plain, ours, strict=True):
        assert np.abs(result - expected).max() <= 2**-8 * np.abs(expected).max()
        assert np.abs(result - expected).max() <= np.abs(rounded - expected).max() + 1e-5
