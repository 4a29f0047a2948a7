"""The contrastive loss of a batch of texts and its gradient, on the host: the batch is spread over all devices.

Shapes: n rows of G texts each, an anchor, its positive and hard negatives; D size of a vector.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

ROWS = 1024  # anchors whose scores are computed at once: 4 kB for each candidate


class ContrastiveLoss(NamedTuple):
    """The loss of each row, whether its positive has the highest score, and the gradient of the mean loss."""

    losses: Floats  # [n]
    is_correct: Floats  # [n]
    gradients: Floats  # [n, G, D]


def contrastive_loss(
    vectors: Floats, texts: npt.NDArray[np.int64], temperature: float
) -> ContrastiveLoss:
    """Return the InfoNCE loss (van den Oord et al. 2018, equation 4) of vectors [n, G, D].

    The scores of an anchor are its cosines, over the temperature, with the positives and hard negatives of all rows;
    the loss is their cross entropy with its own positive. `texts` [n, G] numbers the texts: a candidate with the text
    of the positive or of the anchor itself is no negative.
    """
    n, _, size = vectors.shape
    lengths = np.maximum(np.linalg.norm(vectors, axis=2, keepdims=True), 1e-12)
    units = vectors / lengths
    anchors, candidates = units[:, 0], units[:, 1:].reshape(-1, size)
    own = np.arange(n) * (vectors.shape[1] - 1)  # the candidate that is the positive of each row
    candidate_texts = texts[:, 1:].reshape(-1)
    losses, is_correct = np.empty(n, np.float32), np.empty(n, np.float32)
    gradients, of_candidates = np.empty_like(units), np.zeros_like(candidates)
    for first in range(0, n, ROWS):
        rows = np.arange(first, min(first + ROWS, n))
        at, positive = np.arange(len(rows)), own[rows]
        scores = anchors[rows] @ candidates.T / np.float32(temperature)
        is_equal = candidate_texts == texts[rows, 0, None]
        is_equal |= candidate_texts == texts[rows, 1, None]
        is_equal[at, positive] = False
        scores[is_equal] = -np.inf
        is_correct[rows] = scores[at, positive] >= scores.max(1)
        scores -= scores.max(1, keepdims=True)
        own_scores = scores[at, positive]
        exponentials = np.exp(scores)
        sums = exponentials.sum(1, keepdims=True)
        losses[rows] = np.log(sums[:, 0]) - own_scores
        changes = (
            exponentials / sums
        )  # the gradient of the loss of each row with respect to its scores
        changes[at, positive] -= 1.0
        changes /= np.float32(n * temperature)
        gradients[rows, 0] = changes @ candidates
        of_candidates += changes.T @ anchors[rows]
    gradients[:, 1:] = of_candidates.reshape(n, -1, size)
    # A vector's length does not matter, so its gradient is orthogonal to it.
    gradients -= (gradients * units).sum(2, keepdims=True) * units
    return ContrastiveLoss(losses, is_correct, gradients / lengths)
