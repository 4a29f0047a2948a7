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


def product_forms(left, right, transpose_a, transpose_b):
    """Return whether each product contracts the last axis, its dtypes, and whether each fixed layout is by rows."""
    import jax
    import jax.numpy as jnp

    x, y = (jnp.zeros(shape, jnp.bfloat16) for shape in (left, right))
    options = {"transpose_a": transpose_a, "transpose_b": transpose_b, "uses_amx": True}

    def both(x, y):
        product, pull = jax.vjp(partial(fused.matmul, **options), x, y)
        return pull(product)

    products = []
    is_stored_by_rows = []
    for line in jax.make_jaxpr(both)(x, y).jaxpr.eqns:
        rank = line.invars[0].aval.ndim if line.invars else 0
        if line.primitive.name == "layout_constraint":
            is_stored_by_rows.append(line.params["layout"].major_to_minor == (*range(rank),))
        elif line.primitive.name == "dot_general":
            dtypes = [value.aval.dtype.name for value in (*line.invars, *line.outvars)]
            ((axis,), _), _ = line.params["dimension_numbers"]
            products.append((axis == rank - 1, dtypes))
    return products, is_stored_by_rows


@pytest.mark.parametrize(
    ("left", "right", "transposes", "is_for_amx"),
    [
        ((64, 1), (1, 48), (False, False), True),
        ((64, 32), (32, 7), (False, False), False),
        ((7, 32), (32, 48), (False, False), False),
        ((64, 4), (48, 4), (False, True), True),
        ((4, 64), (4, 48), (True, False), True),
        ((64, 4), (64, 48), (True, False), False),
    ],
)
def test_only_a_large_product_has_the_form_of_amx(on_jax, left, right, transposes, is_for_amx):
    """By the rows and columns of its result: the library refuses fewer than 8 of these."""
    products, is_stored_by_rows = on_jax(product_forms, left, right, *transposes)
    assert len(products) == 3 and is_stored_by_rows == 9 * is_for_amx * [True]
    if is_for_amx:
        assert products == [(True, ["bfloat16", "bfloat16", "float32"])] * 3
