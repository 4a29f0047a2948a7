"""The file of a toy optimizer: gradient descent with momentum, whose one slot is the mean of the gradients."""

from keras import ops


def update_direction(numbers, rule, weight, gradient, slots, factor, updates):
    """Return the mean of the gradients as the direction and as the new slot."""
    gradient = factor * ops.cast(gradient, "float32")
    mean = numbers.beta_1 * slots[0] + (1.0 - numbers.beta_1) * gradient
    return mean, mean
