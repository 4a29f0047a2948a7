"""The masked-LM loss in chunks of the vocabulary: M masked positions, D hidden size, V words, W words of a chunk."""

from collections.abc import Callable
from typing import NamedTuple

from keras import ops

from bert_cli.model.arithmetic.fused import (
    NEVER,
    Operation,
    Tensor,
    argmax,
    custom_gradient,
    float32,
    kernel_of,
    matmul,
    run_after,
)

Gradients = tuple[Tensor, Tensor, Tensor]


class RowState(NamedTuple):
    """The state of each row [M] after some chunks, float32 but for the best token."""

    largest: Tensor
    exponentials: Tensor  # sum of exp(score - largest)
    label_score: Tensor  # 0 before the label's chunk
    best: Tensor  # the token of the largest score, int32


def chunk_ranges(size: int, chunks: int) -> list[tuple[int, int]]:
    """Return the first index and the end of each chunk; the last chunk may be shorter."""
    step = -(-size // chunks)
    return [(start, min(start + step, size)) for start in range(0, size, step)]


def chunked_loss(
    x_MD: Tensor,
    table_VD: Tensor,
    bias_V: Tensor,
    labels_M: Tensor,
    weights_M: Tensor,
    chunks: int,
    fuse_above: float = NEVER,
) -> tuple[Tensor, Tensor]:
    """Return the weighted float32 sums over rows of the cross entropy and of the correct predictions.

    Equal to `loss_sums` of the complete scores, but for rounding. Computed in chunks of the vocabulary, for 1 / chunks
    of the memory: the row state is carried from chunk to chunk (Milakov and Gimelshein 2018, "Online normalizer
    calculation for softmax", section 3), and the backward pass computes each chunk's scores again. `x_MD` and
    `table_VD` are in the compute dtype, labels int32, weights float32.
    """
    chunk_gradient = kernel_of(_chunk_gradient) if fuse_above < NEVER else _chunk_gradient

    def sums(
        labels_M: Tensor, weights_M: Tensor, x_MD: Tensor, table_VD: Tensor, bias_V: Tensor
    ) -> tuple[tuple[Tensor, Tensor], Callable[..., Gradients]]:
        state = _forward(x_MD, table_VD, bias_V, labels_M, chunks)
        log_sum_M = state.largest + ops.log(state.exponentials)
        loss = ops.sum((log_sum_M - state.label_score) * weights_M)
        correct = ops.sum(float32(ops.equal(state.best, labels_M)) * weights_M)

        def gradient(loss_gradient: Tensor, correct_gradient: Tensor) -> Gradients:
            scale_M = weights_M * loss_gradient
            inputs = x_MD, table_VD, bias_V, labels_M, log_sum_M, scale_M
            return _backward(*inputs, chunks, chunk_gradient)

        return (loss, correct), gradient

    return custom_gradient(sums, labels_M, weights_M)(x_MD, table_VD, bias_V)


def _forward(
    x_MD: Tensor, table_VD: Tensor, bias_V: Tensor, labels_M: Tensor, chunks: int
) -> RowState:
    zeros_M = ops.zeros_like(labels_M)
    zeros32_M = float32(zeros_M)
    # Made from the labels, because their number may be known only when the graph runs.
    state = RowState(zeros32_M - float("inf"), zeros32_M, zeros32_M, zeros_M)
    for start, end in chunk_ranges(table_VD.shape[0], chunks):
        # One chunk after the other: all at once would need the memory of all scores.
        after_MD = run_after(x_MD, state)
        product_MW = matmul(after_MD, table_VD[start:end], transpose_b=True)
        scores_MW = float32(product_MW) + float32(bias_V[start:end])
        state = _with_chunk(state, scores_MW, labels_M - start, start)
    return state


def _with_chunk(state: RowState, scores_MW: Tensor, labels_M: Tensor, start: int) -> RowState:
    chunk_largest_M = ops.max(scores_MW, axis=-1)
    largest_M = ops.maximum(state.largest, chunk_largest_M)
    # A label of another chunk reads some column of this one, and the result is not used.
    column_M = ops.clip(labels_M, 0, scores_MW.shape[1] - 1)
    at_column_M = ops.take_along_axis(scores_MW, column_M[:, None], axis=1)[:, 0]
    is_in_chunk_M = ops.equal(column_M, labels_M)
    best_M = ops.where(chunk_largest_M > state.largest, argmax(scores_MW) + start, state.best)
    added_M = ops.sum(ops.exp(scores_MW - largest_M[:, None]), axis=-1)
    return RowState(
        largest_M,
        # The sum so far has the scale of the largest score before: it is moved to the new one, so that no exponential
        # overflows.
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
    chunk_gradient: Operation,
) -> Gradients:
    """Return the gradients of x, table and bias; a score has the gradient scale * (probability - 1 at the label)."""
    # Summed over chunks in float32: in float16 each of up to V / W additions would round.
    x_gradient_MD = ops.zeros_like(float32(x_MD))
    table_gradients: list[Tensor] = []
    bias_gradients: list[Tensor] = []
    for start, end in chunk_ranges(table_VD.shape[0], chunks):
        # The dependency also prevents the graph optimizer from merging this with the forward pass, which
        # would save all scores.
        done = (x_gradient_MD, scale_M, *table_gradients[-1:], *bias_gradients[-1:])
        x_again_MD = run_after(x_MD, done)
        table_WD = table_VD[start:end]
        product_MW = matmul(x_again_MD, table_WD, transpose_b=True)
        gradient_MW = chunk_gradient(
            product_MW, bias_V[start:end], labels_M - start, log_sum_M, scale_M
        )
        x_gradient_MD = x_gradient_MD + float32(matmul(gradient_MW, table_WD))
        table_gradients.append(matmul(gradient_MW, x_again_MD, transpose_a=True))
        bias_gradients.append(ops.sum(float32(gradient_MW), axis=0))
    table_gradient_VD = ops.concatenate(table_gradients, axis=0)
    bias_gradient_V = ops.cast(ops.concatenate(bias_gradients, axis=0), bias_V.dtype)
    return ops.cast(x_gradient_MD, x_MD.dtype), table_gradient_VD, bias_gradient_V


def _chunk_gradient(
    product_MW: Tensor, bias_W: Tensor, labels_M: Tensor, log_sum_M: Tensor, scale_M: Tensor
) -> Tensor:
    """Return the gradient of a chunk's products; a label of another chunk is in no column."""
    probabilities_MW = ops.exp(float32(product_MW) + float32(bias_W) - log_sum_M[:, None])
    is_label_MW = ops.equal(ops.arange(product_MW.shape[1], dtype="int32"), labels_M[:, None])
    gradient_MW = (probabilities_MW - float32(is_label_MW)) * scale_M[:, None]
    return ops.cast(gradient_MW, product_MW.dtype)
