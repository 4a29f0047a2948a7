"""A matrix product of a model, from which weights, memory and floating-point operations are counted."""

from typing import NamedTuple


class Product(NamedTuple):
    """A product of a matrix [rows, inputs] with a weight of `outputs` columns.

    In `groups`, the g-th part of the outputs reads the g-th part of the inputs alone.
    """

    rows: int
    inputs: int
    outputs: int
    groups: int = 1
    kernel_size: int = 1
    """Of a convolution: rows that an output reads."""
    has_bias: bool = True
    has_own_input: bool = True
    """Whether the backward pass saves its input; False after a product with the same input."""
    is_activated: bool = False
    """Whether GELU follows."""
    is_gate: bool = False
    """Whether the result of that GELU is multiplied by it."""

    @property
    def width(self) -> int:
        """Return how many numbers an output reads."""
        return self.kernel_size * self.inputs // self.groups

    @property
    def matrix_weights(self) -> int:
        """Return the number of weights without the bias."""
        return self.width * self.outputs

    @property
    def flops(self) -> int:
        """Return the multiplications and additions of the forward product."""
        return 2 * self.rows * self.matrix_weights


class BatchShape(NamedTuple):
    """The sizes B, S, P and C of a batch, in examples and in positions of an example."""

    examples: int
    positions: int
    masked: int = 0
    sequences: int = 1
