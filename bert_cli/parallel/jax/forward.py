"""Runs the blocks of a model with weights as arguments: Keras layers read arrays instead of their variables.

Layers that differ only in their weights can run in a loop: each weight is one array [rounds, ...] under the name that
it has in the first round. Kernels of other layers are cast to the compute dtype once.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import keras
from jax import lax
from jax.sharding import Mesh as Grid
from jax.sharding import PartitionSpec

from bert_cli.model.arithmetic.fused import shifted_key
from bert_cli.model.arithmetic.parts import Block
from bert_cli.model.bert.heads import Head
from bert_cli.model.build import repeated_parts
from bert_cli.parallel.engine import Tensor

Arrays = dict[str, jax.Array]
ANY = PartitionSpec.UNCONSTRAINED

# Whether equal layers run in a loop also if all activations are saved, by the kind of device.
LOOPS = {"TPU": True, "GPU": False, "CPU": False}
# A loop is compiled once for all layers, which matters to the compiler for TPUs. It stores what each layer saves in one
# array of all layers, which takes time and memory on CPUs and GPUs (docs/ideas/speed.md).


# The weights of matrix products of encoder layers, if they have two axes.
LAYER_KERNEL = re.compile(r"hid_\d+/.*/kernel")


@dataclass(frozen=True)
class ForwardPass:
    """The blocks of a model, and how they run on a grid of devices."""

    body: Sequence[Block]
    head: Head
    grid: Grid
    specs: Mapping[str, PartitionSpec]
    """The division of a weight where it is read."""
    recomputes: bool
    """Whether only the inputs of blocks are saved. The loop then saves memory: unrolled, XLA saves all activations."""
    loops: bool

    @cached_property
    def parts(self) -> list[tuple[Sequence[Block], int]]:
        """The consecutive parts of the body: blocks, and how many rounds of such blocks there are."""
        first = 0
        parts: list[tuple[Sequence[Block], int]] = []
        for length, rounds in repeated_parts([block.trace_key for block in self.body]):
            blocks = self.body[first : first + length * rounds]
            first += len(blocks)
            if self.loops and rounds > 1:
                parts.append((blocks, rounds))
            else:
                parts += [([block], 1) for block in blocks]
        return parts

    @cached_property
    def stacks(self) -> dict[str, list[str]]:
        """The names of the weights that are stored as one array [rounds, ...], by the first of them."""
        stacks: dict[str, list[str]] = {}
        for blocks, rounds in self.parts:
            if rounds == 1:
                continue
            names = [[weight.path for weight in block.weights] for block in blocks]
            length = len(blocks) // rounds
            for number in range(length):
                columns = zip(*names[number::length], strict=True)
                stacks |= {column[0]: list(column) for column in columns}
        return stacks

    @cached_property
    def kernel_dtypes(self) -> dict[str, str]:
        """The dtypes to which weights are cast once, by name."""
        # Not in a loop: XLA for TPUs would copy the rounded kernels of all layers in each round.
        dtypes = {}
        for blocks, rounds in self.parts:
            if rounds > 1:
                continue
            for block in blocks:
                for weight in block.weights:
                    if LAYER_KERNEL.fullmatch(weight.path) and len(weight.shape) == 2:
                        dtypes[weight.path] = block.kernel_dtype
        return dtypes

    def prepare(self, weights: Arrays) -> Arrays:
        """Return the weights as `__call__` takes them: kernels are cast."""
        return {
            name: weight.astype(self.kernel_dtypes.get(name, weight.dtype))
            for name, weight in weights.items()
        }

    def stacked_spec(self, name: str, spec: PartitionSpec) -> PartitionSpec:
        """Return the division of an entry of the weights from the division of each weight."""
        if name in self.stacks:
            return PartitionSpec(None, *spec)
        return spec

    def __call__(
        self, weights: Arrays, columns: Arrays, key: Tensor = None, counts: Arrays | None = None
    ) -> Tensor:
        """Return loss and sums, or the logits without `counts`."""
        return self.with_totals(weights, {}, columns, key, counts)[0]

    def with_totals(
        self, weights: Arrays, totals: Arrays, columns: Arrays, key: Tensor, counts: Arrays | None
    ) -> tuple[Tensor, Arrays]:
        """Return the result of `__call__`, and `totals`, an array for each weight, unchanged.

        A backward pass that takes totals as their cotangents returns the totals plus the gradients of the weights.
        """
        # Totals of layers in a loop are passed on by the loop, row by row.
        separate = {name: total for name, total in totals.items() if name not in self.stacks}
        weights, separate = _accumulating(weights, separate)
        totals = totals | separate
        hidden: Tensor = None
        for blocks, rounds in self.parts:
            if rounds > 1:
                hidden, totals = self._loop(blocks, rounds, weights, (hidden, totals), columns, key)
            else:
                hidden = self._run(blocks[0], weights, hidden, columns, key)
        with self._reading(self.head, _weights_of(self.head, weights)):
            if counts is None:
                return self.head.logits(hidden, key), totals
            return self.head(hidden, columns, counts, key), totals

    def _loop(
        self,
        blocks: Sequence[Block],
        rounds: int,
        weights: Arrays,
        carried: tuple[Tensor, Arrays],
        columns: Arrays,
        key: Tensor,
    ) -> tuple[Tensor, Arrays]:
        """Run blocks whose trace keys recur in each of the rounds; return hidden states and totals."""
        length = len(blocks) // rounds
        pattern = blocks[:length]
        # The pattern's dropout ids with a shifted key draw the masks of another block.
        shifts = [
            block.dropout_id - pattern[number % length].dropout_id
            for number, block in enumerate(blocks)
        ]
        keys = [shifted_key(key, shift) for shift in shifts]
        # [rounds][blocks of the pattern] -> one key for each block of the pattern, with an axis of rounds.
        keys_of_rounds = [keys[first : first + length] for first in range(0, len(keys), length)]
        stacked_keys = jax.tree.map(lambda *arrays: jnp.stack(arrays), *keys_of_rounds)
        names: set[str] = set()
        for block in pattern:
            names.update(weight.path for weight in block.weights)
        hidden, totals = carried

        def run(carried: tuple[Tensor, Arrays], inputs: Tensor) -> tuple[Tensor, None]:
            hidden, totals = carried
            number, rows, block_keys = inputs
            rows, totals = _accumulating(rows, totals, number)
            for block, block_key in zip(pattern, block_keys, strict=True):
                hidden = self._run(block, rows, hidden, columns, block_key)
            return (hidden, totals), None

        changed = {name: total for name, total in totals.items() if name in names}
        stacked = {name: weights[name] for name in names}
        inputs = jnp.arange(rounds), stacked, stacked_keys
        (hidden, changed), _ = lax.scan(run, (hidden, changed), inputs)
        return hidden, totals | changed

    def _run(
        self, block: Block, weights: Arrays, hidden: Tensor, columns: Arrays, key: Tensor
    ) -> Tensor:
        def run(part: list[jax.Array], hidden: Tensor, columns: Arrays, key: Tensor) -> Tensor:
            with self._reading(block, part):
                hidden = block(hidden, columns, key)
            if self.grid.shape["tensor_2"] > 1:
                hidden = lax.with_sharding_constraint(hidden, PartitionSpec(ANY, ANY, "tensor_2"))
            return hidden

        # Saves the arguments of `run` alone, the block's input, and computes the rest again.
        if self.recomputes:
            run = jax.checkpoint(run)
        return run(_weights_of(block, weights), hidden, columns, key)

    @contextmanager
    def _reading(self, block: Block, part: Sequence[jax.Array]) -> Iterator[None]:
        """Make a block read these arrays, complete over the replicas, instead of Keras' variables."""
        scope = keras.StatelessScope()
        for weight, array in zip(block.weights, part, strict=True):
            # The argument `state_mapping` would cast the array to the variable's dtype.
            constrained = lax.with_sharding_constraint(array, self.specs[weight.path])
            scope.state_mapping[id(weight)] = constrained
        with scope:
            yield


def _weights_of(block: Block, weights: Arrays) -> list[jax.Array]:
    return [weights[weight.path] for weight in block.weights]


def _accumulating(
    weights: Arrays, totals: Arrays, number: jax.Array | None = None
) -> tuple[Arrays, Arrays]:
    """Return weights and totals unchanged; the backward pass adds each gradient to a total, or to its row `number`."""
    # A loop carries the totals through its backward pass and updates them in place.
    weights = dict(weights)
    passed = {}
    for name, total in totals.items():
        weights[name], passed[name] = _accumulate(weights[name], total, number)
    return weights, passed


@jax.custom_vjp
def _accumulate(
    weight: jax.Array, total: jax.Array, number: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    return weight, total


def _accumulate_forward(weight: jax.Array, total: jax.Array, number: jax.Array | None) -> Tensor:
    return (weight, total), number


def _accumulate_backward(
    number: jax.Array | None, gradients: tuple[jax.Array, jax.Array]
) -> Tensor:
    gradient, total = gradients
    # Gradients of kernels have the compute dtype; in bfloat16 a sum of many would lose the small ones.
    gradient = gradient.astype(total.dtype)
    if number is None:
        return None, total + gradient, None
    row = lax.dynamic_index_in_dim(total, number, keepdims=False) + gradient
    return None, lax.dynamic_update_index_in_dim(total, row, number, 0), None


_accumulate.defvjp(_accumulate_forward, _accumulate_backward)
