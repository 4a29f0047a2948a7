"""The masked-LM loss over a vocabulary cut into chunks: the scores of all words are never there at once.

One idea: softmax cross entropy needs of the scores [M, V] only, row by row, the logarithm of the summed
exponentials, the label's score and the best word, and all three can be carried from one chunk of words
to the next (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", section 3). The
backward pass computes each chunk's scores once more, and from them the gradients of that chunk: one
product in four more of the head, for 1 / chunks of its memory.

Shapes: M masked places of all examples, D model width, V words, C words of a chunk.
"""

from collections.abc import Callable
from typing import NamedTuple

from keras import ops

from bert_cli.model.dropout import Tensor
from bert_cli.model.fused import (
    after,
    kernel,
    largest,
    product_of_columns,
    product_with_table,
    wide,
    with_gradient,
)

Sums = tuple[Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]


class Carried(NamedTuple):
    """What is known of each row [M] after some chunks, float32 but for the words."""

    largest: Tensor
    """Largest score so far."""
    raised: Tensor
    """Sum of exp(score - largest)."""
    right: Tensor
    """The label's score, 0 before its chunk came."""
    best: Tensor
    """The word of the largest score, int32."""


def cuts(words: int, chunks: int) -> list[tuple[int, int]]:
    """First word and the one behind the last of each chunk; the last one may be shorter."""
    size = -(-words // chunks)
    return [(start, min(start + size, words)) for start in range(0, words, size)]


def summed_by_chunks(
    x_MD: Tensor,
    table_VD: Tensor,
    bias_V: Tensor,
    labels_M: Tensor,
    weights_M: Tensor,
    chunks: int,
) -> tuple[Tensor, Tensor]:
    """Weighted sums over the rows of the cross entropy and of the right answers, in float32.

    `x_MD` and `table_VD` in the compute dtype, labels int32, weights float32. The same as the whole
    scores give, but for rounding.
    """

    @with_gradient
    def sums(
        x_MD: Tensor, table_VD: Tensor, bias_V: Tensor
    ) -> tuple[Sums, Callable[..., Gradients]]:
        known = _forward(x_MD, table_VD, bias_V, labels_M, chunks)
        log_sum_M = known.largest + ops.log(known.raised)
        loss = ops.sum((log_sum_M - known.right) * weights_M)
        correct = ops.sum(ops.cast(ops.equal(known.best, labels_M), "float32") * weights_M)

        def gradient(loss_above: Tensor, correct_above: Tensor) -> Gradients:
            rows_M = weights_M * loss_above
            return _backward(x_MD, table_VD, bias_V, labels_M, log_sum_M, rows_M, chunks)

        return (loss, correct), gradient

    found: Sums = sums(x_MD, table_VD, bias_V)
    return found


def _forward(
    x_MD: Tensor, table_VD: Tensor, bias_V: Tensor, labels_M: Tensor, chunks: int
) -> Carried:
    zeros_M = ops.zeros_like(labels_M)
    none_M = ops.cast(zeros_M, "float32")
    known = Carried(none_M - float("inf"), none_M, none_M, zeros_M)
    for start, end in cuts(table_VD.shape[0], chunks):
        # One chunk after the other: all at once would hold all scores after all.
        rows_MC = product_with_table(after(x_MD, known), table_VD[start:end])
        scores_MC = wide(rows_MC) + wide(bias_V[start:end])
        known = _with_chunk(known, scores_MC, labels_M - start, start)
    return known


def _with_chunk(known: Carried, scores_MC: Tensor, labels_M: Tensor, start: int) -> Carried:
    words = scores_MC.shape[1]
    here_M = ops.max(scores_MC, axis=-1)
    most_M = ops.maximum(known.largest, here_M)
    column_M = ops.clip(labels_M, 0, words - 1)
    at_column_M = ops.take_along_axis(scores_MC, column_M[:, None], axis=1)[:, 0]
    is_here_M = ops.equal(column_M, labels_M)
    best_M = ops.where(here_M > known.largest, largest(scores_MC) + start, known.best)
    added_M = ops.sum(ops.exp(scores_MC - most_M[:, None]), axis=-1)
    return Carried(
        most_M,
        known.raised * ops.exp(known.largest - most_M) + added_M,
        ops.where(is_here_M, at_column_M, known.right),
        best_M,
    )


def _backward(
    x_MD: Tensor,
    table_VD: Tensor,
    bias_V: Tensor,
    labels_M: Tensor,
    log_sum_M: Tensor,
    rows_M: Tensor,
    chunks: int,
) -> Gradients:
    """Gradients of x, table and bias; that of a score is weight x (its share - 1 at the label)."""
    to_x_MD = ops.zeros_like(ops.cast(x_MD, "float32"))
    to_table: list[Tensor] = []
    to_bias: list[Tensor] = []
    for start, end in cuts(table_VD.shape[0], chunks):
        # Also so that the graph optimizer does not see the forward pass in it and keep those scores.
        done = (to_x_MD, rows_M, *to_table[-1:], *to_bias[-1:])
        again_MD, words_CD = after(x_MD, done), table_VD[start:end]
        rows_MC = product_with_table(again_MD, words_CD)
        to_rows_MC = kernel(_to_chunk)(
            rows_MC, bias_V[start:end], labels_M - start, log_sum_M, rows_M
        )
        to_x_MD = to_x_MD + wide(ops.matmul(to_rows_MC, words_CD))
        to_table.append(product_of_columns(to_rows_MC, again_MD))
        to_bias.append(ops.sum(wide(to_rows_MC), axis=0))
    return (
        ops.cast(to_x_MD, x_MD.dtype),
        ops.concatenate(to_table, axis=0),
        ops.cast(ops.concatenate(to_bias, axis=0), bias_V.dtype),
    )


def _to_chunk(
    rows_MC: Tensor, bias_C: Tensor, labels_M: Tensor, log_sum_M: Tensor, weights_M: Tensor
) -> Tensor:
    """Gradients of a chunk's products; a label of another chunk is in no column."""
    shares_MC = ops.exp(wide(rows_MC) + wide(bias_C) - log_sum_M[:, None])
    is_label_MC = ops.equal(ops.arange(rows_MC.shape[1], dtype="int32"), labels_M[:, None])
    to_rows_MC = (shares_MC - wide(is_label_MC)) * weights_M[:, None]
    return ops.cast(to_rows_MC, rows_MC.dtype)
