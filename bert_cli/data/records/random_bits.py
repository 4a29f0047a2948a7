"""Random bits of an example: a hash of the example's key and the place, never a generator's next number.

So what is drawn for an example depends neither on which rows stand beside it nor on who draws it, and
is the same when records are written and when they are read.
"""

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

from bert_cli.data.stream.permutation import GOLDEN, mix

Ints = npt.NDArray[np.integer[Any]]
Keys = npt.NDArray[np.uint64]

# Streams of random bits of one example: which places, what replaces them, where it is cut, how long
# a span is.
PLACES, REPLACEMENTS, CUTS, SPANS = (
    np.uint64(0xD1B54A32D192ED03 * number % 2**64) for number in (1, 2, 3, 4)
)


def row_keys(numbers: npt.ArrayLike, *names: int | str) -> Keys:
    """Keys of examples [B]: their numbers and what else tells them apart (seed, copy, epoch)."""
    digest = hashlib.blake2b("\0".join(map(str, names)).encode(), digest_size=8).digest()
    base = np.uint64(int.from_bytes(digest, "little"))
    return mix(mix(base + np.atleast_1d(np.asarray(numbers, np.uint64)) * GOLDEN) ^ base)


def bits(keys_B: Keys, stream: np.uint64, places: Ints) -> Keys:
    """64 random bits for each place of each row: splitmix64 of the row's key, at that place."""
    start_B = mix(keys_B + stream)
    return mix(start_B[:, None] + (places.astype(np.uint64) + np.uint64(1)) * GOLDEN)
