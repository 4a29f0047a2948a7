"""The scales (root mean squares) of weights, activations and their gradients in the first step of a model."""

from collections.abc import Sequence
from typing import Any, get_args

import tensorflow as tf

from bert_cli.config.training import WeightKind
from bert_cli.model.arithmetic.parts import Layer
from bert_cli.model.build import named_weights
from bert_cli.parallel.engine import Batch, count

# The names of a layer's weights and of the shared table, whose factors are inside a product or a lookup.
WEIGHTS = (*get_args(WeightKind), "table")


def scales(blocks: Sequence[Any], batch: Batch) -> dict[str, tuple[float, float]]:
    """Return the scales of tensors and their gradients for a micro-batch [B, ...] of a model, without dropout."""
    *body, head = blocks
    columns = {name: tf.convert_to_tensor(column) for name, column in batch.items()}
    totals = count({name: column[None] for name, column in batch.items()}, head.COUNTS)
    counts = {name: tf.constant(total, tf.float32) for name, total in totals.items()}
    seen: dict[str, Any] = {}
    for block in blocks:
        _record(block, seen)
    with tf.GradientTape() as tape:
        hidden: Any = None
        for block in body:
            hidden = block(hidden, columns, None)
        loss, _ = head(hidden, columns, counts, None)
    weights = named_weights([(block.name, block) for block in blocks])
    seen |= {name: weight.value for name, weight in weights.items()}
    gradients = tape.gradient(loss, seen)
    return {name: (_size(value), _size(gradients[name])) for name, value in seen.items()}


def _record(layer: Layer, seen: dict[str, Any]) -> None:
    """Make a layer and those in it record their activations."""
    call, scaled, path = layer.call, layer.scaled, layer.path

    def recorded_call(*inputs: Any) -> Any:
        output = call(*inputs)
        if tf.is_tensor(output):
            seen[path] = output
        return output

    def recorded_scaled(name: str, value: Any) -> Any:
        result = scaled(name, value)
        if name not in WEIGHTS and result is not value and tf.rank(value) > 1:
            seen[f"{path}/{name}, before"], seen[f"{path}/{name}, after"] = value, result
        return result

    layer.__dict__.update(call=recorded_call, scaled=recorded_scaled)
    for inner in vars(layer).values():
        if isinstance(inner, Layer):
            _record(inner, seen)


def _size(tensor: Any) -> float:
    """Return the root mean square; 0 for a gradient of nothing."""
    values = 0.0 if tensor is None else tf.convert_to_tensor(tensor)
    return float(tf.sqrt(tf.reduce_mean(tf.square(values))))


def is_far(numbers: tuple[float, float]) -> bool:
    """Return whether a scale is outside 0.1 to 10; 0 is not, which is the first value of a bias."""
    return any(number and not 0.1 <= number <= 10 for number in numbers)
