"""The masked-LM loss computed in chunks of the vocabulary, without the complete matrix of scores.

Of each row of scores [M, V] softmax cross entropy needs only the logarithm of the summed exponentials, the
label's score and the best token. All three can be carried from one chunk to the next (Milakov and
Gimelshein 2018, "Online normalizer calculation for softmax", section 3). The backward pass computes
each chunk's scores again and from them its gradients: one product in four more in the head, for
1 / chunks of its memory.

Shapes: M masked positions of all examples, D hidden size, V vocabulary size, C tokens of a chunk.
"""

from collections.abc import Callable
from typing import NamedTuple

from keras import ops

from bert_cli.model.dropout import Tensor
from bert_cli.model.fused import (
    argmax,
    compiled,
    custom_gradient,
    float32,
    matmul_of_transpose,
    matmul_with_transpose,
    run_after,
)

Gradients = tuple[Tensor, Tensor, Tensor]


class RowState(NamedTuple):
    """The state of each row [M] after some chunks, float32 but for the best token."""

    largest: Tensor
    """Largest score so far."""
    exponentials: Tensor
    """Sum of exp(score - largest)."""
    label_score: Tensor
    """The label's score, 0 before its chunk."""
    best: Tensor
    """The token of the largest score, int32."""


def chunk_ranges(size: int, chunks: int) -> list[tuple[int, int]]:
    """Return the first index and the end of each chunk; the last one may be shorter."""
    step = -(-size // chunks)
    return [(start, min(start + step, size)) for start in range(0, size, step)]


def chunked_loss(
    x_MD: Tensor, table_VD: Tensor, bias_V: Tensor, labels_M: Tensor, weights_M: Tensor, chunks: int
) -> tuple[Tensor, Tensor]:
    """Return the weighted float32 sums over rows of the cross entropy and of the right predictions.

    `x_MD` and `table_VD` are in the compute dtype, labels int32, weights float32. Equal to the loss
    of the complete scores, but for rounding.
    """

    @custom_gradient
    def sums(
        x_MD: Tensor, table_VD: Tensor, bias_V: Tensor
    ) -> tuple[tuple[Tensor, Tensor], Callable[..., Gradients]]:
        state = _forward(x_MD, table_VD, bias_V, labels_M, chunks)
        log_sum_M = state.largest + ops.log(state.exponentials)
        loss = ops.sum((log_sum_M - state.label_score) * weights_M)
        correct = ops.sum(ops.cast(ops.equal(state.best, labels_M), "float32") * weights_M)

        def gradient(loss_gradient: Tensor, correct_gradient: Tensor) -> Gradients:
            scale_M = weights_M * loss_gradient
            return _backward(x_MD, table_VD, bias_V, labels_M, log_sum_M, scale_M, chunks)

        return (loss, correct), gradient

    result: tuple[Tensor, Tensor] = sums(x_MD, table_VD, bias_V)
    return result


def _forward(
    x_MD: Tensor, table_VD: Tensor, bias_V: Tensor, labels_M: Tensor, chunks: int
) -> RowState:
    zeros_M = ops.zeros_like(labels_M)
    zeros32_M = ops.cast(zeros_M, "float32")
    state = RowState(zeros32_M - float("inf"), zeros32_M, zeros32_M, zeros_M)
    for start, end in chunk_ranges(table_VD.shape[0], chunks):
        # One chunk after the other: all at once would need the memory of all scores.
        product_MC = matmul_with_transpose(run_after(x_MD, state), table_VD[start:end])
        scores_MC = float32(product_MC) + float32(bias_V[start:end])
        state = _with_chunk(state, scores_MC, labels_M - start, start)
    return state


def _with_chunk(state: RowState, scores_MC: Tensor, labels_M: Tensor, start: int) -> RowState:
    chunk_largest_M = ops.max(scores_MC, axis=-1)
    largest_M = ops.maximum(state.largest, chunk_largest_M)
    column_M = ops.clip(labels_M, 0, scores_MC.shape[1] - 1)
    at_column_M = ops.take_along_axis(scores_MC, column_M[:, None], axis=1)[:, 0]
    is_in_chunk_M = ops.equal(column_M, labels_M)
    best_M = ops.where(chunk_largest_M > state.largest, argmax(scores_MC) + start, state.best)
    added_M = ops.sum(ops.exp(scores_MC - largest_M[:, None]), axis=-1)
    return RowState(
        largest_M,
        state.exponentials * ops.exp(state.largest - largest_M) + added_M,
        ops.where(is_in_chunk_M, at_column_M, state.label_score),
        best_M,
    )


def _backward(
    x_MD: Tensor,
    table_VD: Tensor,
    bias_V: Tensor,
    labels_M: Tensor,
    log_sum_M: Tensor,
    scale_M: Tensor,
    chunks: int,
) -> Gradients:
    """Return the gradients of x, table and bias; that of a score is scale * (probability - 1 at the label)."""
    x_gradient_MD = ops.zeros_like(ops.cast(x_MD, "float32"))
    table_gradients: list[Tensor] = []
    bias_gradients: list[Tensor] = []
    for start, end in chunk_ranges(table_VD.shape[0], chunks):
        # The dependency also keeps the graph optimizer from merging this with the forward pass, which
        # would save all scores.
        done = (x_gradient_MD, scale_M, *table_gradients[-1:], *bias_gradients[-1:])
        x_again_MD, table_CD = run_after(x_MD, done), table_VD[start:end]
        product_MC = matmul_with_transpose(x_again_MD, table_CD)
        gradient_MC = compiled(_chunk_gradient)(
            product_MC, bias_V[start:end], labels_M - start, log_sum_M, scale_M
        )
        x_gradient_MD = x_gradient_MD + float32(ops.matmul(gradient_MC, table_CD))
        table_gradients.append(matmul_of_transpose(gradient_MC, x_again_MD))
        bias_gradients.append(ops.sum(float32(gradient_MC), axis=0))
    return (
        ops.cast(x_gradient_MD, x_MD.dtype),
        ops.concatenate(table_gradients, axis=0),
        ops.cast(ops.concatenate(bias_gradients, axis=0), bias_V.dtype),
    )


def _chunk_gradient(
    product_MC: Tensor, bias_C: Tensor, labels_M: Tensor, log_sum_M: Tensor, scale_M: Tensor
) -> Tensor:
    """Return the gradient of a chunk's products; a label of another chunk is in no column."""
    probabilities_MC = ops.exp(float32(product_MC) + float32(bias_C) - log_sum_M[:, None])
    is_label_MC = ops.equal(ops.arange(product_MC.shape[1], dtype="int32"), labels_M[:, None])
    gradient_MC = (probabilities_MC - float32(is_label_MC)) * scale_M[:, None]
    return ops.cast(gradient_MC, product_MC.dtype)
