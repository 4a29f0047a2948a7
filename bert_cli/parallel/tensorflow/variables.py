"""The weights and moments of a run as values by name, whether variables are replicated or sharded."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from bert_cli.parallel.engine import ProcessGroup


class ReplicatedVariable:
    """Equal variables, one on each replica of this process."""

    is_sharded = False

    def __init__(self, variables: Sequence[Any]) -> None:
        self.variables = list(variables)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return tuple(self.variables[0].shape)

    def numpy(self) -> npt.NDArray[Any]:
        """Return the value."""
        variable = self.variables[0]
        return np.asarray(variable.value if hasattr(variable, "path") else variable)

    def assign(self, value: npt.NDArray[Any]) -> None:
        """Set the value on every replica."""
        for variable in self.variables:
            variable.assign(value)


class ShardedVariable:
    """Flat variables that hold one shard each: shard k of n belongs to replica k of the run.

    All shards have the same length. Elements beyond the end of the value stay zero.
    """

    is_sharded = True

    def __init__(
        self,
        variables: Sequence[tf.Variable],
        shape: Sequence[int],
        first: int,
        shards: int,
        group: ProcessGroup,
    ) -> None:
        """`first` is the number of this process' first shard."""
        self.variables = list(variables)
        self.shape = tuple(shape)
        self.first, self.shards, self.group = first, shards, group

    def numpy(self) -> npt.NDArray[Any]:
        """Return the complete value. All processes must call this in the same order."""
        length = int(self.variables[0].shape[0])
        flat = np.zeros((self.shards, length), np.float32)
        for number, variable in enumerate(self.variables, self.first):
            flat[number] = variable.numpy()
        # Every element is non-zero in one process only, so the sum is exact.
        complete = self.group.all_reduce(flat).astype(np.float32)
        return complete.reshape(-1)[: int(np.prod(self.shape))].reshape(self.shape)

    def assign(self, value: npt.NDArray[Any]) -> None:
        """Set the shards of this process."""
        length = int(self.variables[0].shape[0])
        flat = np.zeros(self.shards * length, np.float32)
        flat[: value.size] = value.reshape(-1)
        for number, variable in enumerate(self.variables, self.first):
            variable.assign(flat[number * length : (number + 1) * length])
