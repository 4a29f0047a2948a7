"""The scale of every activation, weight and gradient in the first step, for `bert doctor --scales`.

The scale of a tensor is its root mean square. Float16 has 0.1 to 10 in the middle of its range, where Unit Scaling
puts every tensor; the gradients of a plain BERT are far below, which is why it needs a loss scale.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from bert_cli.config.training import PretrainSettings
from bert_cli.model.bert import build_blocks, named_weights
from bert_cli.model.layers import Layer
from bert_cli.model.scaling import Factor
from bert_cli.parallel.engine import Batch, count
from bert_cli.tasks.run.start import factors_of

# Results of products and of softmax, besides the outputs of layers.
ACTIVATIONS = ("sum", "queries", "keys", "probabilities", "input")
RANGE = (0.1, 10.0)


def scales(settings: PretrainSettings, batch: Batch) -> dict[str, tuple[float, float]]:
    """Return the scales of each tensor and of its gradient for a micro-batch [B, ...], without dropout."""
    blocks = build_blocks(
        settings.bert_config, seed=settings.seed, policy="float32", factors=factors_of(settings)
    )
    *body, (_, head) = blocks
    columns = {name: tf.convert_to_tensor(column) for name, column in batch.items()}
    totals = count({name: column[None] for name, column in batch.items()}, head.COUNTS)
    counts = {name: tf.constant(total, tf.float32) for name, total in totals.items()}
    seen: dict[str, tuple[Any, Any, float]] = {}
    for _, block in blocks:
        _record(block, seen)
    weights = named_weights(blocks)
    with tf.GradientTape() as tape:
        hidden: Any = None
        for _, block in body:
            hidden = block(hidden, columns, None)
        loss, _ = head(hidden, columns, counts, None)
    seen |= {name: (weight.value, weight.value, 1.0) for name, weight in weights.items()}
    gradients = tape.gradient(loss, [before for _, before, _ in seen.values()])
    return {
        name: (_size(value), _size(gradient) / forward)
        for (name, (value, _, forward)), gradient in zip(seen.items(), gradients, strict=True)
    }


def _record(layer: Layer, seen: dict[str, tuple[Any, Any, float]]) -> None:
    """Have a layer and those in it note each activation: its value, the tensor before its factor, and the factor."""
    call, scaled, path = layer.call, layer.scaled, layer.path

    def recorded_call(*inputs: Any) -> Any:
        output = call(*inputs)
        if tf.is_tensor(output):
            seen[path] = output, output, 1.0
        return output

    def recorded_scaled(name: str, value: Any) -> Any:
        result = scaled(name, value)
        if name in ACTIVATIONS:
            seen[f"{path}/{name}"] = result, value, layer.factors.get(name, Factor()).forward
        return result

    layer.__dict__.update(call=recorded_call, scaled=recorded_scaled)
    for inner in vars(layer).values():
        if isinstance(inner, Layer):
            _record(inner, seen)


def _size(tensor: Any) -> float:
    """Return the root mean square; 0 for a gradient of nothing."""
    values = 0.0 if tensor is None else tf.convert_to_tensor(tensor)
    return float(np.sqrt(np.mean(np.square(values))))


def is_far(numbers: tuple[float, float]) -> bool:
    """Return whether a scale is outside RANGE; 0 is not, which is the first value of a bias."""
    return any(number and not RANGE[0] <= number <= RANGE[1] for number in numbers)
