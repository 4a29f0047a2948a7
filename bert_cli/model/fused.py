"""The element-wise work between the matrix products, in float32 whatever the compute dtype.

One idea: a matrix product may run in 16 bits, everything between two products runs in 32, and is one
chain: bias and GELU; bias, dropout, residual and LayerNorm; scores to shares. Each chain has a plain form
in `keras.ops`, and for TensorFlow, once `compile_chains` asked for it, a form in which XLA makes one
kernel of the forward pass and one of the backward pass. That one keeps only its inputs, in the compute
dtype, and draws dropout again; products and sums of columns stay with TensorFlow, whose library is the
faster one for them on CPUs (for products of 16 bits four times).
"""

import math
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import keras
from keras import ops

from bert_cli.model.dropout import Tensor, dropout

if keras.config.backend() == "tensorflow":
    import tensorflow as tf
else:
    tf = None

Pulled = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""Gradients of the first inputs of a chain, and what is summed over all axes but the last for the others."""

WORTH_COMPILING = 2**19
"""Elements of a chain above which compiling saves more than the half second that it takes."""

_compiles = False


def compile_chains(yes: bool) -> None:
    """Have TensorFlow compile the chains, of this process, that are traced from now on."""
    global _compiles
    _compiles = yes and tf is not None


def _compiled(x: Tensor) -> bool:
    """Whether a chain is worth compiling; one for batches of any shape, as scores are traced, is not."""
    shape = tuple(x.shape)
    return _compiles and None not in shape and math.prod(shape) > WORTH_COMPILING


def kernel(chain: Callable[..., Any]) -> Callable[..., Any]:
    """A chain as one kernel where chains are compiled, else as it is."""
    return _kernel(chain) if _compiles else chain


def value_of(weight: Tensor) -> Tensor:
    """The tensor in a variable: what has a gradient of its own takes no variables."""
    return ops.convert_to_tensor(weight) if tf is None else tf.convert_to_tensor(weight)


def with_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors that returns (results, their gradients to those of its arguments).

    Where the backend is not TensorFlow its own differentiation does the same, with more memory.
    """
    if tf is None:
        return lambda *arguments: function(*arguments)[0]
    wrapped: Callable[..., Any] = tf.custom_gradient(function)
    return wrapped


def after(x: Tensor, others: Iterable[Tensor]) -> Tensor:
    """The same tensor, not read before the others are there."""
    if tf is None:
        return x
    with tf.control_dependencies(list(others)):
        return tf.identity(x)


def product_with_table(x: Tensor, table_VD: Tensor) -> Tensor:
    """[M, D] times the transpose of [V, D] -> [M, V]; both in one dtype.

    The one product whose right side lies the other way round. TensorFlow's takes it as it lies;
    an explicit transpose copies the table in the backward pass, and `einsum` of float16 takes a
    path that is 6 times slower on CPUs.
    """
    if tf is None:
        return ops.matmul(x, ops.transpose(table_VD))
    return tf.matmul(x, table_VD, transpose_b=True)


def product_of_columns(x: Tensor, y: Tensor) -> Tensor:
    """The transpose of [M, V] times [M, D] -> [V, D]; both in one dtype, and none copied."""
    if tf is None:
        return ops.matmul(ops.transpose(x), y)
    return tf.matmul(x, y, transpose_a=True)


def largest(x: Tensor) -> Tensor:
    """The place of the largest value along the last axis, int32.

    Keras' `argmax` makes copies to tell -0.0 from 0.0: nearly three times the scores of all words.
    """
    if tf is None:
        return ops.cast(ops.argmax(x, axis=-1), "int32")
    return tf.argmax(x, axis=-1, output_type=tf.int32)


def gelu(x: Tensor) -> Tensor:
    """The exact GELU, x * Phi(x) (Hendrycks and Gimpel 2016, section 2); float32 in and out."""
    return ops.gelu(x, approximate=False)


def normalize(x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float) -> Tensor:
    """LayerNorm over the last axis (Ba et al. 2016, equation 4); float32 in and out."""
    centred = x - ops.mean(x, axis=-1, keepdims=True)
    variance = ops.mean(ops.square(centred), axis=-1, keepdims=True)
    scale = wide(gamma) * ops.rsqrt(variance + epsilon)
    return centred * scale + wide(beta)


def biased_gelu(rows: Tensor, bias: Tensor) -> Tensor:
    """GELU of a product [..., F] and its bias [F]; the dtype of the product in and out."""
    if _compiled(rows):
        return _in_kernels(_gelu_forward, _gelu_backward, (), (rows, bias))
    return ops.cast(gelu(wide(rows) + wide(bias)), rows.dtype)


def added_and_normalized(
    rows: Tensor,
    bias: Tensor,
    residual: Tensor,
    scale: tuple[Tensor, Tensor],
    epsilon: float,
    rate: float,
    stream: Tensor | None,
) -> Tensor:
    """LayerNorm of dropout(product + bias) + residual; `scale` are its gamma and beta.

    Product and residual [..., D] in one dtype, which the result has. The end of both halves of a
    post-norm encoder layer (Vaswani et al. 2017, section 3.1).
    """
    if _compiled(rows):
        inputs, fixed = (rows, residual, bias, *scale), {"rate": rate, "epsilon": epsilon}
        return _in_kernels(_added_forward, _added_backward, (stream,), inputs, **fixed)
    joined = _joined(rows, bias, residual, stream, rate=rate)
    return ops.cast(normalize(joined, *scale, epsilon), rows.dtype)


def shares_of(scores: Tensor, unread: Tensor, rate: float, stream: Tensor | None) -> Tensor:
    """Softmax of scores [B, N, S, S] plus `unread`, then dropout; the dtype of the scores in and out."""
    if _compiled(scores):
        return _shares_compiled(scores, unread, rate, stream)
    shares = ops.softmax(wide(scores) + unread, axis=-1)
    return ops.cast(dropout(shares, rate, stream), scores.dtype)


def wide(x: Tensor) -> Tensor:
    """The same numbers in float32."""
    return ops.cast(x, "float32")


def _joined(
    rows: Tensor, bias: Tensor, residual: Tensor, stream: Tensor | None, *, rate: float
) -> Tensor:
    return dropout(wide(rows) + wide(bias), rate, stream) + wide(residual)


@cache
def _kernel(chain: Callable[..., Any], **fixed: float) -> Any:
    """One function of TensorFlow's for all layers: XLA compiles it once for each shape."""
    return tf.function(partial(chain, **fixed), autograph=False, jit_compile=True)


def _in_kernels(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    constants: tuple[Any, ...],
    inputs: tuple[Tensor, ...],
    **fixed: float,
) -> Tensor:
    """A chain of `inputs`, of variables their values, whose backward pass reads the same inputs again.

    `backward` gives the gradients of the first inputs, and what sums up to those of the last: XLA sums
    columns on a CPU one number at a time, 8.4 of 13.3 ms of GELU's backward pass for 1,024 x 3,072.
    """

    @tf.custom_gradient
    def chain(*inputs: Tensor) -> tuple[Tensor, Callable[..., Any]]:
        given = (*constants, *inputs)

        def pull(above: Tensor) -> tuple[Tensor, ...]:
            gradients, rows = _kernel(backward, **fixed)(*given, above)
            sums = list(map(_summed, rows, inputs[len(gradients) :]))
            # What is summed is float32 and as large as the activations: gone before the layer below.
            return (*(after(gradient, sums) for gradient in gradients), *sums)

        return _kernel(forward, **fixed)(*given), pull

    return chain(*map(value_of, inputs))


def _gelu_forward(rows: Tensor, bias: Tensor) -> Tensor:
    x = wide(rows) + wide(bias)
    return ops.cast(x * _normal_below(x), rows.dtype)


def _gelu_backward(rows: Tensor, bias: Tensor, above: Tensor) -> Pulled:
    x = wide(rows) + wide(bias)
    density = ops.exp(-0.5 * ops.square(x)) * (1.0 / math.sqrt(2.0 * math.pi))
    below = wide(above) * (_normal_below(x) + x * density)
    return (ops.cast(below, rows.dtype),), (below,)


def _normal_below(x: Tensor) -> Tensor:
    """Phi(x): the share of the normal distribution below x."""
    return 0.5 * (1.0 + ops.erf(x * math.sqrt(0.5)))


def _added_forward(
    stream: Tensor | None,
    rows: Tensor,
    residual: Tensor,
    bias: Tensor,
    gamma: Tensor,
    beta: Tensor,
    *,
    rate: float,
    epsilon: float,
) -> Tensor:
    joined = _joined(rows, bias, residual, stream, rate=rate)
    return ops.cast(normalize(joined, gamma, beta, epsilon), rows.dtype)


def _added_backward(
    stream: Tensor | None,
    rows: Tensor,
    residual: Tensor,
    bias: Tensor,
    gamma: Tensor,
    beta: Tensor,
    above: Tensor,
    *,
    rate: float,
    epsilon: float,
) -> Pulled:
    joined = _joined(rows, bias, residual, stream, rate=rate)
    centred = joined - ops.mean(joined, axis=-1, keepdims=True)
    spread = ops.rsqrt(ops.mean(ops.square(centred), axis=-1, keepdims=True) + epsilon)
    normal, above = centred * spread, wide(above)
    inner = above * wide(gamma)
    mean = ops.mean(inner, axis=-1, keepdims=True)
    along = ops.mean(inner * normal, axis=-1, keepdims=True)
    below = spread * (inner - mean - normal * along)
    dropped = dropout(below, rate, stream)
    gradients = ops.cast(dropped, rows.dtype), ops.cast(below, residual.dtype)
    return gradients, (dropped, above * normal, above)


def _shares_compiled(scores: Tensor, unread: Tensor, rate: float, stream: Tensor | None) -> Tensor:
    @tf.custom_gradient
    def chain(scores: Tensor) -> tuple[Tensor, Callable[..., Any]]:
        dropped, shares = _kernel(_shares_forward, rate=rate)(stream, scores, unread)
        return dropped, partial(_kernel(_shares_backward, rate=rate), stream, shares)

    return chain(scores)


def _shares_forward(
    stream: Tensor | None, scores: Tensor, unread: Tensor, *, rate: float
) -> tuple[Tensor, Tensor]:
    """Return shares with dropout and without: the backward pass needs those without."""
    seen = wide(scores) + unread
    raised = ops.exp(seen - ops.max(seen, axis=-1, keepdims=True))
    # One division a row; a product by its result for each place.
    shares = raised * (1.0 / ops.sum(raised, axis=-1, keepdims=True))
    dropped = dropout(shares, rate, stream)
    return ops.cast(dropped, scores.dtype), ops.cast(shares, scores.dtype)


def _shares_backward(
    stream: Tensor | None, shares: Tensor, above: Tensor, *, rate: float
) -> Tensor:
    kept, pulled = wide(shares), dropout(wide(above), rate, stream)
    below = kept * (pulled - ops.sum(kept * pulled, axis=-1, keepdims=True))
    return ops.cast(below, shares.dtype)


def _summed(x: Tensor, like: Tensor) -> Tensor:
    """The sum over all axes but the last, in the dtype of the weight that it is the gradient of."""
    return ops.cast(ops.sum(x, axis=tuple(range(len(x.shape) - 1))), like.dtype)
