"""Random bits of an example: a hash of the example's key and a position, never the next number of a generator.

What is drawn for an example depends neither on the other rows of a block nor on the process that draws it, and is the
same when records are written and when they are read.
"""

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

from bert_cli.data.stream.permutation import GOLDEN, mix

Ints = npt.NDArray[np.integer[Any]]
Keys = npt.NDArray[np.uint64]

# What random bits decide: masked positions, their replacements, where a segment is cut, lengths of spans.
POSITIONS, REPLACEMENTS, CUTS, SPANS = (
    np.uint64(0xD1B54A32D192ED03 * number % 2**64) for number in (1, 2, 3, 4)
)


def row_keys(numbers: npt.ArrayLike, *names: int | str) -> Keys:
    """Return keys of examples [B], from their numbers and other names such as seed, copy or epoch."""
    digest = hashlib.blake2b("\0".join(map(str, names)).encode(), digest_size=8).digest()
    base = np.uint64(int.from_bytes(digest, "little"))
    return mix(mix(base + np.atleast_1d(np.asarray(numbers, np.uint64)) * GOLDEN) ^ base)


def bits(keys_B: Keys, purpose: np.uint64, positions: Ints) -> Keys:
    """Return 64 random bits for each position of each row: splitmix64 of the row's key."""
    start_B = mix(keys_B + purpose)
    return mix(start_B[:, None] + (positions.astype(np.uint64) + np.uint64(1)) * GOLDEN)
