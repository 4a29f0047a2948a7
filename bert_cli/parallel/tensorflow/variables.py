"""The variables of a run as one: a weight that every replica has, a moment that replicas share out.

The rest of the tool reads and writes a value by its name, whole, in the shape of the weight; how many
variables hold it, and where, stays here. Reading a shared-out value brings together what other
processes hold, so all of them have to do it, in the same order.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from bert_cli.parallel.tensorflow.collectives import Peers


class Copies:
    """Variables that are equal: one on each replica of this process."""

    def __init__(self, variables: Sequence[Any]) -> None:
        self.variables = list(variables)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return tuple(self.variables[0].shape)

    def numpy(self) -> npt.NDArray[Any]:
        """The value."""
        variable = self.variables[0]
        return np.asarray(variable.value if hasattr(variable, "path") else variable)

    def assign(self, value: npt.NDArray[Any]) -> None:
        """Set the value on every replica."""
        for variable in self.variables:
            variable.assign(value)


class Shares:
    """Flat variables that hold one part each: share k of n belongs to replica k of the run.

    All shares have the same length; what the last ones have beyond the value stays zero.
    """

    def __init__(
        self,
        variables: Sequence[tf.Variable],
        shape: Sequence[int],
        first: int,
        shares: int,
        peers: Peers,
    ) -> None:
        self.variables = list(variables)
        self.shape = tuple(shape)
        self.first, self.shares, self.peers = first, shares, peers

    def numpy(self) -> npt.NDArray[Any]:
        """The whole value, brought together from all processes."""
        length = int(self.variables[0].shape[0])
        flat = np.zeros((self.shares, length), np.float32)
        for number, variable in enumerate(self.variables, self.first):
            flat[number] = variable.numpy()
        # The other places are zero here, so the sum is the value, exactly.
        whole = self.peers.total(flat).astype(np.float32)
        return whole.reshape(-1)[: int(np.prod(self.shape))].reshape(self.shape)

    def assign(self, value: npt.NDArray[Any]) -> None:
        """Set the parts that this process holds."""
        length = int(self.variables[0].shape[0])
        flat = np.zeros(self.shares * length, np.float32)
        flat[: value.size] = value.reshape(-1)
        for number, variable in enumerate(self.variables, self.first):
            variable.assign(flat[number * length : (number + 1) * length])
