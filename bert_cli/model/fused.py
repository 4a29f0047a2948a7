"""The element-wise work between the matrix products, in float32 whatever the compute dtype.

One idea: a matrix product may run in 16 bits, everything between two products runs in 32. So GELU,
LayerNorm and dropout are written once for every precision, float16 cannot overflow in them, and they
are what is worth fusing on a given machine.

Dropout is a function, not a generator: the kept places are f(run seed, position of the micro-batch,
site) from integer random bits compared with a threshold. Running a block again draws the same mask,
and integer bits, unlike float draws, are the same in eager mode, in a graph and under XLA.
"""

import math
from typing import Any

import keras
from keras import ops

if keras.config.backend() == "tensorflow":
    import tensorflow as tf
else:
    tf = None

Tensor = Any
"""A tensor of Keras' backend; Keras carries no types."""

# Odd, so that site -> site * constant is one to one in 32 bits; large, so that neighbouring run
# seeds do not meet one another's sites.
_SITE_STRIDE = 0x9E3779B1
_MIX_1 = 0x7FEB352D
_MIX_2 = 0x846CA68B


def product_with_table(x: Tensor, table_VD: Tensor) -> Tensor:
    """[M, D] times the transpose of [V, D] -> [M, V]; both in one dtype.

    The one product whose right side lies the other way round. TensorFlow's takes it as it lies;
    an explicit transpose copies the table in the backward pass, and `einsum` of float16 takes a
    path that is 6 times slower on CPUs.
    """
    if tf is None:
        return ops.matmul(x, ops.transpose(table_VD))
    return tf.matmul(x, table_VD, transpose_b=True)


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
    scale = ops.cast(gamma, "float32") * ops.rsqrt(variance + epsilon)
    return centred * scale + ops.cast(beta, "float32")


def dropout(x: Tensor, rate: float, key: Tensor | None, site: int) -> Tensor:
    """Zero each element with probability `rate` and scale the others by 1 / (1 - rate).

    `key` is int32 [2], (run seed, position of the micro-batch in the stream), or None for no
    dropout. `site` is a number no other dropout of the model has.
    """
    if key is None or rate == 0.0:
        return x
    keep = ops.cast(keep_mask(ops.shape(x), rate, key, site), x.dtype)
    return x * (keep * (1.0 / (1.0 - rate)))


def keep_mask(shape: tuple[Any, ...], rate: float, key: Tensor, site: int) -> Tensor:
    """Bool tensor, False with probability `rate`: a function of its arguments and nothing else."""
    form = keep_mask_plain if tf is None else keep_mask_tensorflow
    return form(shape, rate, key, site)


def keep_mask_tensorflow(shape: tuple[Any, ...], rate: float, key: Tensor, site: int) -> Tensor:
    """Philox bits of TensorFlow (Salmon et al. 2011); one fast kernel on every device."""
    seed = key + tf.constant([_signed(site * _SITE_STRIDE), 0], "int32")
    bits = tf.random.stateless_uniform(
        shape, seed, minval=None, maxval=None, dtype=tf.uint32, alg="philox"
    )
    return bits >= tf.constant(_threshold(rate), "uint32")


def keep_mask_plain(shape: tuple[Any, ...], rate: float, key: Tensor, site: int) -> Tensor:
    """A hash of the element's place in `keras.ops`, for backends without stateless integer draws.

    Other bits than TensorFlow's, with the same properties. Signed arithmetic that wraps, because
    not every backend multiplies unsigned integers.
    """
    stream = _mix(_mix(key[0] + _signed(site * _SITE_STRIDE)) ^ key[1])
    # The size is static under every backend that traces; `math.prod` keeps it a Python number.
    place = ops.arange(math.prod(shape), dtype="int32")
    bits = _mix(_mix(place + stream) ^ stream)
    return ops.reshape(bits >= _threshold(rate) - 2**31, shape)


def _mix(x: Tensor) -> Tensor:
    """Two multiply-xorshift rounds: every input bit reaches every output bit."""
    x = ops.bitwise_xor(x, _shift_right(x, 16)) * _signed(_MIX_1)
    x = ops.bitwise_xor(x, _shift_right(x, 15)) * _signed(_MIX_2)
    return ops.bitwise_xor(x, _shift_right(x, 16))


def _shift_right(x: Tensor, places: int) -> Tensor:
    """Shift in zeros; the shift of signed integers alone would copy the sign."""
    return ops.bitwise_and(ops.right_shift(x, places), (1 << (32 - places)) - 1)


def _signed(number: int) -> int:
    """The low 32 bits of a number, read as a signed 32-bit integer."""
    return (number + 2**31) % 2**32 - 2**31


def _threshold(rate: float) -> int:
    """How many of the 2^32 draws are dropped."""
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout rate ({rate}): not in [0, 1)")
    return round(rate * 2**32)
