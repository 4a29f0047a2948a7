"""The optimizers: a row each, with the facts that the rest of a run needs.

The arithmetic of an optimizer is the function `update_direction` in a file of its own in `optim/`.
"""

from dataclasses import dataclass

# What every optimizer stores for a weight, in float32 from zeros on: means of the gradient and of its square.
MOMENTS = ("moment1", "moment2")
# Of an element of a weight.
MOMENT_BYTES = 4 * len(MOMENTS)


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer, without the numbers of a run."""

    module: str
    """The module of its function `update_direction`."""
    has_trust_ratio: bool = False
    """Whether an update is scaled by the norms of the weight and of the update direction."""


OPTIMIZERS = {
    "LAMB": OptimizerKind("bert_cli.optim.adam", has_trust_ratio=True),
    "AdamW": OptimizerKind("bert_cli.optim.adam"),
    "StableAdamW": OptimizerKind("bert_cli.optim.stable_adam"),
}
