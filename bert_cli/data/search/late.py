"""Late interaction: each token of a question looks for the most similar token of a passage (Khattab and Zaharia 2020).

The model of the index computes the token vectors, without training. They are projected on their principal axes, stored
as SIZE values of 8 bits, and re-rank the best passages that words and meaning have found together.

Shapes: T tokens of some texts, t tokens of a text, D values of a vector, n passages.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bert_cli.arrays import Floats32

# Values of a token in the index, a byte each.
SIZE = 64
# The largest value of a byte with a sign; values of unit vectors are at most 1.
SCALE = 127
RERANKED = 30  # passages; 60 are no better


class Vectors(NamedTuple):
    """The vectors of texts, of length 1."""

    texts: Floats32
    """[n, D]."""
    tokens: list[Floats32]
    """[t, D] of each text."""


class Meaning(NamedTuple):
    """How similar a question is to passages."""

    cosines: Floats32
    """[N]."""
    tokens: Floats32
    """Projected vectors [t, S] of the question's tokens; none in an index without token vectors."""


NO_TOKENS: Floats32 = np.zeros((0, 0), np.float32)
NO_MEANING = Meaning(np.zeros(0, np.float32), NO_TOKENS)


def axes_of(tokens: Floats32) -> Floats32:
    """Return the principal axes [D, SIZE] of vectors [T, D] of length 1; of fewer values, all axes."""
    _, axes = np.linalg.eigh(tokens.T @ tokens)
    return np.ascontiguousarray(axes[:, ::-1][:, :SIZE], np.float32)


def unpacked_axes(stored: bytes) -> Floats32:
    """Return axes of their bytes."""
    values = np.frombuffer(stored, np.float32)
    return values.reshape(-1, min(SIZE, math.isqrt(len(values))))


def projected(tokens: Floats32, axes: Floats32) -> Floats32:
    """Return vectors [t, D] on the axes, of length 1."""
    values = tokens @ axes
    return values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), np.float32(1e-12))


def packed(tokens: Floats32, axes: Floats32) -> bytes:
    """Return vectors [t, D] as an index stores them."""
    return np.rint(SCALE * projected(tokens, axes)).astype(np.int8).tobytes()


def similarities(question: Floats32, passages: Sequence[bytes]) -> Floats32:
    """Return the mean over the tokens of a question of their highest cosine with a token of each passage [n]."""
    size = question.shape[1]
    tokens = np.frombuffer(b"".join(passages), np.int8).reshape(-1, size).astype(np.float32)
    ends = np.cumsum([len(passage) // size for passage in passages])
    starts = np.concatenate([[0], ends[:-1]])
    highest: Floats32 = np.maximum.reduceat(question @ tokens.T, starts, axis=1)
    return highest.mean(0) / np.float32(SCALE)
