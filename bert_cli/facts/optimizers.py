"""The optimizers: a row each, with the facts that the rest of a run needs.

The arithmetic of an optimizer is the function `update_direction` in a file of its own in `optim/`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

Shape = tuple[int, ...]
FLOAT32 = 4


class Slot(NamedTuple):
    """A float32 array that an optimizer stores for a weight. It starts as zeros."""

    shape: Shape
    is_square: bool = False
    """Whether it is a mean of squares, which is never negative."""


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer, without the numbers of a run."""

    module: str
    """The module of its function `update_direction`."""
    slots: Callable[[Shape], Mapping[str, Slot]]
    """Returns the slots of a weight of a shape, by their names in a checkpoint."""
    needs_complete_matrix: bool = False
    """Whether the update of an element depends on other elements: then a shard cannot be updated alone."""
    has_trust_ratio: bool = False
    """Whether an update is scaled by the norms of the weight and of the update direction."""

    def slot_bytes(self, weights: int) -> int:
        """Return the bytes of the slots of a vector of weights."""
        slots = self.slots((weights,)).values()
        return sum(FLOAT32 * math.prod(slot.shape) for slot in slots)


def two_moments(shape: Shape) -> dict[str, Slot]:
    """Return the slots of Adam: the means of the gradient and of its square."""
    return {"moment1": Slot(shape), "moment2": Slot(shape, is_square=True)}


OPTIMIZERS = {
    "LAMB": OptimizerKind("bert_cli.optim.adam", two_moments, has_trust_ratio=True),
    "AdamW": OptimizerKind("bert_cli.optim.adam", two_moments),
    "StableAdamW": OptimizerKind(
        "bert_cli.optim.stable_adam", two_moments, needs_complete_matrix=True
    ),
}
