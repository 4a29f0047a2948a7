"""AdamW and LAMB: Adam's update direction (Loshchilov & Hutter 2019, Algorithm 2)."""

import math
from collections.abc import Sequence

from keras import ops

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
    """Return the update direction and the new moments; the decay is also multiplied by the learning rate."""
    # `factor` is folded into the moment coefficients, so XLA does not allocate a scaled gradient.
    first, second = slots
    w = ops.cast(weight, "float32")
    g = ops.cast(gradient, "float32")
    t = ops.cast(updates, "float32") + 1.0
    m = numbers.beta_1 * first + (1.0 - numbers.beta_1) * factor * g
    v = numbers.beta_2 * second + ops.square(math.sqrt(1.0 - numbers.beta_2) * factor * g)
    direction = (m / one_minus_power(numbers.beta_1, t)) / (
        ops.sqrt(v / one_minus_power(numbers.beta_2, t)) + numbers.epsilon
    )
    if rule.decays:
        direction = direction + numbers.weight_decay_rate * w
    return direction, m, v


def one_minus_power(beta: float, t: Tensor) -> Tensor:
    """Return 1 - beta ** t, the factor of a mean of t values that started at zero."""
    # In float32, 1 - 0.999 ** 1 has a relative error of 1.3e-5; with the exact logarithm only the rounding
    # error remains.
    if beta == 0.0:  # which has no logarithm
        return 1.0
    return -ops.expm1(t * math.log(beta))
