"""How a layer computes: one operation at a time, fused, or by TensorFlow's library; shapes as in `bert.encoder`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from keras import ops

from bert_cli.model.arithmetic import fused
from bert_cli.model.arithmetic.fused import NEVER, Dropout, Norm, Tensor, float32
from bert_cli.model.arithmetic.scaling import Factor

# Input, kernel and bias of a dense layer.
Operands = tuple[Tensor, Tensor, Tensor | None]


def linear(x: Tensor, kernel: Tensor) -> Tensor:
    """Multiply the last axis of `x` by `kernel`, in the dtype of `x`, as one rank-2 product."""
    # The reshape afterwards keeps Grappler from fusing product and bias in float16, which takes 40 ms a row on CPUs.
    inputs, outputs = kernel.shape
    rows = fused.matmul(ops.reshape(x, (-1, inputs)), kernel)
    return ops.reshape(rows, (*ops.shape(x)[:-1], outputs))


@dataclass(frozen=True)
class Operations:
    """The operations of training."""

    fuse_above: float = NEVER
    """Elements above which the operations between matrix products are fused."""
    factors: Mapping[str, Factor] = field(default_factory=dict, hash=False)
    """Factors of Unit Scaling, by path below the layer; for a complete model by path."""

    def inside(self, name: str) -> Self:
        """Return the operations of an inner layer."""
        # Paths become relative, so that equal layers have equal factors and can share a trace.
        start = f"{name}/"
        inner = {n.removeprefix(start): f for n, f in self.factors.items() if n.startswith(start)}
        return replace(self, factors=inner)

    def dense(self, x: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
        """Return x @ kernel, in the dtype of `x`, plus bias in float32."""
        product = float32(linear(x, kernel))
        if bias is None:
            return product
        return product + float32(bias)

    def project(self, layer: Any, x: Tensor) -> Tensor:
        """Return the result of a `Dense`, for another operation of the block."""
        # Called as a layer: TensorFlow's graph optimizer reads the names of operations, which change last digits.
        return layer(x)

    def dense_gelu(self, x: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
        """Return the GELU of x @ kernel + bias, in the dtype of `x`."""
        return fused.bias_gelu(linear(x, kernel), bias, self.fuse_above)

    def query(self, query: Tensor, scale: float) -> Tensor:
        """Return a query for products that `probabilities` reads; scaled in float32, float16 stays far from 65504."""
        return query * scale

    def probabilities(self, scores: Tensor, bias: Tensor, scale: float, dropout: Dropout) -> Tensor:
        """Return the attention probabilities of scores [B, N, S, S], whose queries have their scale by `query`."""
        return fused.attention_probabilities(scores, bias, dropout, self.fuse_above)

    def add_and_normalize(
        self, dense: Operands, residual: Tensor, norm: Norm, dropout: Dropout
    ) -> Tensor:
        """Return LayerNorm of the residual plus dropout of x @ kernel + bias, in the dtype of `x`."""
        x, kernel, bias = dense
        product = linear(x, kernel)
        return fused.add_and_normalize(product, bias, residual, norm, dropout, self.fuse_above)

    def normalize(self, x: Tensor, norm: Norm) -> Tensor:
        """Return LayerNorm over the last axis of float32."""
        return fused.normalize(x, *norm)


PLAIN = Operations()


@dataclass(frozen=True)
class LibraryOperations(Operations):
    """Bias, GELU, softmax and LayerNorm of TensorFlow's library, in the compute dtype: for predictions on a CPU."""

    def project(self, layer: Any, x: Tensor) -> Tensor:
        """Return the result of a `Dense` with a bias, in the dtype of `x`."""
        return fused.dense_by_library(*layer.operands(x))

    def dense_gelu(self, x: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
        """Return the GELU of x @ kernel + bias, in the dtype of `x`."""
        return fused.dense_by_library(x, kernel, bias, is_gelu=True)

    def query(self, query: Tensor, scale: float) -> Tensor:
        """Return the query: the library multiplies in float32, and the scores have the scale."""
        return query

    def probabilities(self, scores: Tensor, bias: Tensor, scale: float, dropout: Dropout) -> Tensor:
        """Return the softmax of scores, in their dtype: computed in float32, with results that are rounded."""
        return ops.softmax(scores * scale + ops.cast(bias, scores.dtype), axis=-1)

    def add_and_normalize(
        self, dense: Operands, residual: Tensor, norm: Norm, dropout: Dropout
    ) -> Tensor:
        """Return LayerNorm of the residual plus x @ kernel + bias, in the dtype of `x`."""
        return self.normalize(fused.dense_by_library(*dense) + residual, norm)

    def normalize(self, x: Tensor, norm: Norm) -> Tensor:
        """Return LayerNorm over the last axis, in the dtype of `x`."""
        if norm[1] is None:  # without beta
            return fused.normalize(x, *norm)
        return fused.normalize_by_library(x, *norm)
