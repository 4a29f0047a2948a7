"""Every random number of the data is a hash of where it is used; nothing is shuffled and no state is kept.

Each epoch is a permutation of the record numbers, drawn by (seed, epoch): a Feistel network of
eight rounds (Luby & Rackoff 1988) over the smallest power of two that holds the corpus, applied
again to numbers outside the corpus (Black & Rogaway 2002, "Ciphers with Arbitrary Finite Domains",
section 3). The power is less than twice the size, so the network is applied less than twice on average.
"""

import hashlib

import numpy as np
import numpy.typing as npt

from bert_cli.arrays import Bools, Ints, Ints64, UInts64

ROUNDS = 8  # four suffice for large corpora; small ones have halves of a few bits
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio, made odd


def mix(numbers: UInts64) -> UInts64:
    """Return 64 bits that look independent for each number, one to one, in a new array.

    The finalizer of splitmix64 (Steele, Lea & Flood 2014, "Fast Splittable Pseudorandom Number
    Generators", figure 16).
    """
    mixed = numbers ^ (numbers >> np.uint64(30))
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def row_keys(numbers: npt.ArrayLike, *names: int | str) -> UInts64:
    """Return keys of examples [B], from their numbers and other names such as seed, copy or epoch."""
    digest = hashlib.blake2b("\0".join(map(str, names)).encode(), digest_size=8).digest()
    base = np.uint64(int.from_bytes(digest, "little"))
    return mix(mix(base + np.atleast_1d(np.asarray(numbers, np.uint64)) * GOLDEN) ^ base)


def bits(keys_B: UInts64, purpose: np.uint64, positions: Ints) -> UInts64:
    """Return 64 random bits for each position of each row: splitmix64 of the row's key."""
    start_B = mix(keys_B + purpose)
    return mix(start_B[:, None] + (positions.astype(np.uint64) + np.uint64(1)) * GOLDEN)


def permute(indices: npt.ArrayLike, size: npt.ArrayLike, seed: int, epoch: npt.ArrayLike) -> Ints64:
    """Return the record number at each index [n] of an epoch, a bijection of 0 .. size - 1.

    `size` and `epoch` are numbers, or arrays with a number for each index; sizes are below 2**53.
    """
    numbers = np.array(indices, np.uint64, ndmin=1)
    sizes = np.broadcast_to(np.asarray(size, np.uint64), numbers.shape)
    assert np.all(numbers < sizes)
    epochs = np.broadcast_to(np.asarray(epoch, np.uint64), numbers.shape)
    # An array, since NumPy warns when a scalar overflows, and 64-bit overflow is meant here.
    seed_key = mix(np.array([(seed + 1) * int(GOLDEN) % 2**64], np.uint64))
    # A key for each index, so that one call serves several epochs.
    keys = mix(seed_key + epochs * GOLDEN)
    bits = np.frexp((sizes - np.uint64(1)).astype(np.float64))[1].astype(np.uint64)  # bit_length
    numbers = _feistel(numbers, keys, bits)
    # The permutation is applied again until the index is in range; it stays one to one.
    outside = np.flatnonzero(numbers >= sizes)
    while outside.size:
        numbers[outside] = _feistel(numbers[outside], keys[outside], bits[outside])
        outside = outside[numbers[outside] >= sizes[outside]]
    return numbers.astype(np.int64)


def chooses(groups: Ints) -> Bools:
    """Return whether the group of each example [n] is in the half that chooses; the other half reports."""
    return permute(groups, int(groups.max()) + 1, seed=0, epoch=0) % 2 == 0


def record_at(sample_indices: npt.ArrayLike, size: int, seed: int) -> tuple[Ints64, Ints64]:
    """Return (epochs [n], records [n]) at sample indices [n] of the endless stream over `size` records.

    Every `size` indices are an epoch, which has each record once.
    """
    epochs, indices = np.divmod(np.array(sample_indices, np.int64, ndmin=1), size)
    return epochs, permute(indices, size, seed, epochs)


def _feistel(numbers: UInts64, keys: UInts64, bits: UInts64) -> UInts64:
    """Permute the numbers below 2**bits: each half is changed in turn by a hash of the other half."""
    one_bit = np.uint64(1)
    low = bits >> one_bit
    low_mask = (one_bit << low) - one_bit
    high_mask = (one_bit << (bits - low)) - one_bit
    left = numbers >> low
    right = numbers & low_mask
    steps = np.arange(1, ROUNDS + 1, dtype=np.uint64) * GOLDEN
    for first, second in steps.reshape(-1, 2):
        # Each round has an inverse, so all rounds together are a permutation, whatever `mix` is.
        left ^= mix(keys + first + right) & high_mask
        right ^= mix(keys + second + left) & low_mask
    return (left << low) | right
