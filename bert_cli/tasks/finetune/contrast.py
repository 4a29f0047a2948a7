"""The contrastive loss of a batch of texts, for `bert embed` and for labels of few texts.

It needs the vectors of the complete batch, so each step of several micro-batches begins with a forward pass of all
(`Engine.forward`) and computes, on the host, the loss and its gradient with respect to the vectors. The update that
follows has the gradients of the complete batch in the memory of one micro-batch (gradient caching). Shapes: n rows of G
texts each, D size of a vector.
"""

from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp, softmax

from bert_cli.arrays import Bools, Floats32, Ints, Ints64
from bert_cli.parallel.engine import Batch, Engine, UpdateRequest

ROWS = 1024  # anchors whose scores are computed at once: 4 kB for each candidate


class Contrast(NamedTuple):
    """What the contrastive loss of a batch depends on besides its texts."""

    rows: int
    """Rows n of a batch."""
    texts: int
    """Texts G of a row."""
    temperature: float
    sizes: tuple[int, ...]
    """The size of the vectors, and the smaller sizes to which they can be shortened."""


def add_candidates(
    contrast: Contrast, engine: Engine, batch: Batch, request: UpdateRequest
) -> Batch:
    """Return the batch of one micro-batch with the order of its texts, and the candidates of each row."""
    order = np.argsort(batch["text_index"], axis=1, kind="stable").astype(np.int32)
    slots = order[:, -contrast.rows * contrast.texts :]
    texts = np.take_along_axis(batch["text_numbers"], slots, 1).reshape(-1, contrast.texts)
    columns = {
        "text_slots": slots,
        "is_left_out": _left_out(texts, np.arange(len(texts)))[None],
        "temperature": np.full(1, contrast.temperature, np.float32),
    }
    if len(contrast.sizes) > 1:
        sizes = np.array(contrast.sizes)
        columns["is_in_prefix"] = (np.arange(sizes[0]) < sizes[:, None])[None]
    return {**batch, **columns}


def _left_out(texts: Ints, rows: Ints64) -> Bools:
    """Return a mask [rows, n * (G - 1)] of the candidates that are not negatives of some of the rows [n, G].

    Their text equals the row's anchor or positive.
    """
    candidates = texts[:, 1:].reshape(-1)
    left_out = (candidates == texts[rows, :1]) | (candidates == texts[rows, 1:2])
    left_out[np.arange(len(rows)), rows * (texts.shape[1] - 1)] = False
    return left_out


def add_gradients(
    contrast: Contrast, engine: Engine, batch: Batch, request: UpdateRequest
) -> Batch:
    """Return the batch with the loss of each row and the gradient with respect to each vector."""
    vectors = engine.forward(batch, request)
    index = batch["text_index"]
    is_text = index >= 0
    # Every process computes the loss of all texts.
    number_of_texts = contrast.rows * contrast.texts
    # Each process fills the rows of its own texts, so the sum over processes is the table of all.
    everywhere = np.zeros((number_of_texts, vectors.shape[2] + 1))
    everywhere[index[is_text], :-1] = vectors[is_text]
    everywhere[index[is_text], -1] = batch["text_numbers"][is_text]
    rows = engine.group.all_reduce(everywhere)
    rows = rows.reshape(-1, contrast.texts, rows.shape[-1])
    texts = rows[:, :, -1].astype(np.int64)
    complete = rows[:, :, :-1].astype(np.float32)
    temperature = contrast.temperature
    losses, is_correct, vector_gradients = contrastive_loss(complete, texts, temperature)
    for size in contrast.sizes[1:]:
        prefixes = complete[:, :, :size]
        losses_of_prefix, _, gradients_of_prefix = contrastive_loss(prefixes, texts, temperature)
        losses += losses_of_prefix
        vector_gradients[:, :, :size] += gradients_of_prefix
    columns = {
        # Each text gets the loss of its row, so that the mean over texts equals the mean over rows.
        "losses": np.repeat(losses, texts.shape[1]),
        "is_correct": np.repeat(is_correct, texts.shape[1]),
        "vector_gradients": vector_gradients.reshape(number_of_texts, -1),
    }
    # Index -1, of no text, reads the zeros at the end.
    gradients = {
        name: np.concatenate([column, np.zeros_like(column[:1])])[index]
        for name, column in columns.items()
    }
    return {**batch, **gradients}


def contrastive_loss(
    vectors: Floats32, texts: Ints64, temperature: float
) -> tuple[Floats32, Floats32, Floats32]:
    """Return the InfoNCE loss (van den Oord et al. 2018, equation 4) of vectors [n, G, D].

    A row is an anchor, its positive and hard negatives. The scores of an anchor are its cosines, over the temperature,
    with the positives and hard negatives of all rows; the loss [n] is their cross entropy with its own positive. Also
    returned: whether the positive alone has the highest score [n], and the gradient of the mean loss with respect to
    the vectors. `texts` [n, G] numbers the texts: candidates equal to the anchor or its positive are not used as
    negatives.
    """
    n, _, size = vectors.shape
    lengths = np.maximum(np.linalg.norm(vectors, axis=2, keepdims=True), 1e-12)
    units = vectors / lengths
    anchors = units[:, 0]
    candidates = units[:, 1:].reshape(-1, size)
    losses = np.empty(n, np.float32)
    is_correct = np.empty(n, np.float32)
    gradients = np.empty_like(units)
    of_candidates = np.zeros_like(candidates)
    for first in range(0, n, ROWS):
        rows = np.arange(first, min(first + ROWS, n))
        positive = rows - first, rows * (vectors.shape[1] - 1)  # the score of the positive
        scores = anchors[rows] @ candidates.T / np.float32(temperature)
        scores[_left_out(texts, rows)] = -np.inf
        # A tie counts as wrong; otherwise a model with one vector for all texts would be always right.
        is_correct[rows] = (scores >= scores[positive][:, None]).sum(1) == 1
        losses[rows] = logsumexp(scores, axis=1) - scores[positive]
        changes = softmax(scores, axis=1)  # the gradient of a row's loss with respect to its scores
        changes[positive] -= 1.0
        changes /= np.float32(n * temperature)
        gradients[rows, 0] = changes @ candidates
        of_candidates += changes.T @ anchors[rows]
    gradients[:, 1:] = of_candidates.reshape(n, -1, size)
    # A vector's length does not matter, so its gradient is orthogonal to it.
    gradients -= (gradients * units).sum(2, keepdims=True) * units
    return losses, is_correct, gradients / lengths
