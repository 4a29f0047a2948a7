"""The state of a run on JAX: weights and slots, divided over the grid of devices by a table of their names.

With one tensor axis the first product of a pair is divided by columns, complete heads together, and the second by rows
(Shoeybi et al. 2019, section 3). With two axes, weights are divided over both, and hidden states over the second axis.
Layers in a loop share an array [rounds, ...].
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, cast

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh as Grid
from jax.sharding import NamedSharding, PartitionSpec

from bert_cli.arrays import Array, Shape

# Pattern of a weight's name -> for each axis of the weight, the axis of the grid that divides it. The first match
# counts.
SPECS: dict[str, tuple[str | None, ...]] = {
    r"emb/word/embeddings": ("tensor", "tensor_2"),
    r"emb/(position|segment)/embeddings": (None, "tensor_2"),
    r"\w+/masked_lm/bias": ("tensor",),
    r"hid_\d+/.*/(query|key|value|inner|gate)/kernel": ("tensor_2", "tensor"),
    r"hid_\d+/.*/(query|key|value|inner|gate)/bias": ("tensor",),
    r"hid_\d+/.*/output/(dense/)?kernel": ("tensor", "tensor_2"),
    r"(emb|hid_\d+)/.*(bias|gamma|beta)": ("tensor_2",),
    r".*": (),
}
# Entries: a weight and its slots, by the weight's name in the first of the layers that share them.
State = dict[str, list[jax.Array]]
PUT_ROW = partial(lax.dynamic_update_index_in_dim, axis=0)  # once, or each row would be compiled


class Row(NamedTuple):
    """The entry of the state that stores a weight, and the weight's row in it."""

    key: str
    number: int | None = None
    """The round of the loop, None for a weight that is not stacked."""


@dataclass(frozen=True)
class DividedArray:
    """A weight (part 0) or one of its slots (1, 2, ...), divided over the devices of all processes."""

    state: State
    gather: Callable[[jax.Array], jax.Array]
    row: Row
    part: int

    @property
    def shape(self) -> Shape:
        """Shape of the value."""
        return self._stored.shape[self._axes :]

    @property
    def is_sharded(self) -> bool:
        """Whether this process stores only a part."""
        stored = self._stored
        return sum(shard.data.size for shard in distinct_shards(stored)) < stored.size

    def numpy(self) -> Array:
        """Return the value; all processes must call this method if `is_sharded`."""
        value = np.empty(self.shape, self._stored.dtype)
        if self.is_sharded:
            for shard in distinct_shards(self.gather(self._row_of(self._stored))):
                value[shard.index] = shard.data
        else:
            # Only the process that writes a checkpoint reads complete weights. On TPUs a program over all
            # processes would wait for the others.
            for shard in distinct_shards(self._stored):
                value[shard.index[self._axes :]] = self._row_of(shard.data)
        return value

    def assign(self, value: Array) -> None:
        """Set the value; all processes must call this method."""
        stored = self._stored
        entry = cast(NamedSharding, stored.sharding)
        sharding = NamedSharding(entry.mesh, PartitionSpec(*entry.spec[self._axes :]))
        new = place(value.astype(stored.dtype), sharding)
        if self.row.number is not None:
            with_row = jax.jit(PUT_ROW, donate_argnums=0, out_shardings=entry)
            new = with_row(stored, new, self.row.number)
        self.state[self.row.key][self.part] = new

    @property
    def _stored(self) -> jax.Array:
        """The entry of the state, of all processes."""
        return self.state[self.row.key][self.part]

    @property
    def _axes(self) -> int:
        """1 if the entry has an axis of rounds, else 0."""
        return int(self.row.number is not None)

    def _row_of(self, stored: jax.Array) -> jax.Array:
        if self.row.number is None:
            return stored
        return _row(stored, self.row.number)


def spec_of(name: str, shape: Shape, grid: Grid) -> PartitionSpec:
    """Return the division of a weight: not along an axis whose size the devices do not divide."""
    axes = next(axes for pattern, axes in SPECS.items() if re.fullmatch(pattern, name))
    divided: list[str | None] = []
    for axis, size in zip(axes, shape, strict=False):
        # An axis of one device divides nothing.
        if axis and grid.shape[axis] > 1 and size % grid.shape[axis] == 0:
            divided.append(axis)
        else:
            divided.append(None)
    return PartitionSpec(*divided)


def over_replicas(spec: PartitionSpec, shape: Shape, grid: Grid) -> PartitionSpec:
    """Return the specification with the longest undivided axis divided over the replicas, if its size allows it."""
    axes = [*spec, *[None] * (len(shape) - len(spec))]
    # Every axis gives slices of the same size; the longest is the likeliest to divide by another number of replicas.
    free = [
        n for n, axis in enumerate(axes) if axis is None and shape[n] % grid.shape["replica"] == 0
    ]
    if free:
        axes[max(free, key=lambda n: shape[n])] = "replica"
    return PartitionSpec(*axes)


def distinct_shards(array: jax.Array) -> list[jax.Shard]:
    """Return the distinct parts of an array on this process' devices."""
    return list({str(shard.index): shard for shard in array.addressable_shards}.values())


def place(value: Array, sharding: jax.sharding.Sharding) -> jax.Array:
    """Return a value divided over the devices; each process places its part."""
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


@jax.jit
def _row(stacked: jax.Array, number: int) -> jax.Array:
    """Return a row; one function for all rows, so that it is compiled once for each shape."""
    return lax.dynamic_index_in_dim(stacked, number, keepdims=False)
