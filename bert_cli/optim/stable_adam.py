"""StableAdamW (Wortsman et al. 2023, arXiv 2304.13013, Algorithm 2): AdamW whose update of a weight is clipped."""

from collections.abc import Sequence

from keras import ops

from bert_cli.optim import adam
from bert_cli.optim.optimizer import Hyperparameters, Rule, Tensor


def update_direction(
    numbers: Hyperparameters,
    rule: Rule,
    weight: Tensor,
    gradient: Tensor,
    slots: Sequence[Tensor],
    factor: Tensor,
    updates: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return AdamW's update direction, with its decay, divided by the size of the gradient, and the new moments.

    The size is the root mean square, over a complete weight, of the gradient divided by the root of the second moment;
    only sizes above 1 count.
    """
    direction, m, v = adam.update_direction(numbers, rule, weight, gradient, slots, factor, updates)
    t = ops.cast(updates, "float32") + 1.0
    root = ops.sqrt(v / adam.one_minus_power(numbers.beta_2, t))
    ratio = factor * ops.cast(gradient, "float32") / ops.maximum(root, numbers.epsilon)
    # About 1 while the second moment is up to date; far above 1 when a gradient is suddenly larger.
    size = ops.sqrt(ops.mean(ops.square(ratio)))
    return direction / ops.maximum(size, 1.0), m, v
