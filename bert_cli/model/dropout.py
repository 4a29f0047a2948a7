"""Dropout as a function: a mask is f(run seed, sample index of the micro-batch, dropout id, position).

Integer bits from a hash of the position are compared with a threshold: no generator and no state, nothing
to save for the backward pass, and the same mask in eager mode, in a graph, under XLA and on every backend
of Keras, also when a block is recomputed. A hash is a few integer operations an element, which XLA
fuses into the kernel that uses the mask: 15 times faster than drawing Philox bits before it (0.5 ms and
7.7 for the attention of 8 examples of 128 positions, one core).
"""

from typing import Any

from keras import ops

Tensor = Any
"""A tensor of Keras' backend; Keras carries no types."""

# Odd, so that id -> id * constant is one to one in 32 bits; large, so that the dropouts of neighbouring
# run seeds get different seeds.
_ID_STRIDE = 0x9E3779B1
_MIX_1 = 0x7FEB352D
_MIX_2 = 0x846CA68B


def dropout_seed(key: Tensor | None, dropout_id: int) -> Tensor | None:
    """Return the int32 seed of one dropout; None, for no dropout, without a key.

    `key` is int32 [2], (run seed, sample index of the micro-batch); no other dropout of the model has the
    same `dropout_id`.
    """
    if key is None:
        return None
    return _mix(_mix(key[0] + _signed(dropout_id * _ID_STRIDE)) ^ key[1])


def shifted_key(key: Tensor | None, ids: int) -> Tensor | None:
    """Return the key with which each dropout id has the seed that the id plus `ids` has with this one."""
    if key is None:
        return None
    return ops.stack([key[0] + _signed(ids * _ID_STRIDE), key[1]])


def keep_mask(shape: tuple[Any, ...], rate: float, seed: Tensor) -> Tensor:
    """Return a boolean tensor, False with probability `rate`: a function of its arguments.

    Signed arithmetic that wraps, because not every backend multiplies unsigned integers. The two
    rounds are those of Wellons' lowbias32, in which every input bit changes every output bit.
    """
    bits = _mix(_mix(_indices_from(seed, shape)) ^ seed)
    return bits >= _threshold(rate) - 2**31


def dropout(x: Tensor, rate: float, seed: Tensor | None) -> Tensor:
    """Zero each element with probability `rate` and scale the others by 1 / (1 - rate).

    Float32 in and out. Without a seed, or with a rate of 0, `x` is returned.
    """
    if seed is None or rate == 0.0:
        return x
    keep = ops.cast(keep_mask(ops.shape(x), rate, seed), "float32")
    return x * (keep * (1.0 / (1.0 - rate)))


def _indices_from(first: Tensor, shape: tuple[Any, ...]) -> Tensor:
    """Return the index of each element, counted row by row from `first`, int32 that wraps.

    Raises ValueError for a shape that is not known when the graph is made: the mask would be wrong.

    A sum of one short range for each axis, of which `first` is known only at run time: a range of all
    elements would be stored as constants, 6 MB in a kernel for the attention of 8 examples of 128
    positions, and 100 MB for 512.
    """
    if not all(isinstance(size, int) for size in shape):
        raise ValueError(f"dropout of shape {shape}: must be known when the graph is made")
    indices, stride = ops.reshape(first, [1] * len(shape)), 1
    for axis in reversed(range(len(shape))):
        steps = ops.arange(shape[axis], dtype="int32") * _signed(stride)
        # Not `+=`: PyTorch would add in place, into a tensor that is too small.
        indices = indices + ops.reshape(steps, [-1 if n == axis else 1 for n in range(len(shape))])
        stride *= shape[axis]
    return indices


def _mix(x: Tensor) -> Tensor:
    """Two multiply-xorshift rounds: every input bit changes every output bit."""
    x = ops.bitwise_xor(x, _shift_right(x, 16)) * _signed(_MIX_1)
    x = ops.bitwise_xor(x, _shift_right(x, 15)) * _signed(_MIX_2)
    return ops.bitwise_xor(x, _shift_right(x, 16))


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift in zeros; the shift of signed integers alone would copy the sign."""
    return ops.bitwise_and(ops.right_shift(x, bits), (1 << (32 - bits)) - 1)


def _signed(number: int) -> int:
    """Return the low 32 bits of a number as a signed 32-bit integer."""
    return (number + 2**31) % 2**32 - 2**31


def _threshold(rate: float) -> int:
    """Return how many of the 2^32 draws are dropped."""
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout rate ({rate}): not in [0, 1)")
    return round(rate * 2**32)
