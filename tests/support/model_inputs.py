"""Synthetic micro-batches with padding, and one way to run a list of blocks forward and backward."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def make_examples(
    vocab_size: int, examples: int = 4, length: int = 16, predictions: int = 5, seed: int = 0
) -> dict[str, np.ndarray]:
    """Return the columns of a micro-batch with padding of positions and of predictions."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(length // 2, length + 1, examples)
    lengths[0] = length
    real = np.arange(length) < lengths[:, None]
    predicted = draw.integers(1, predictions + 1, examples)
    weights = np.arange(predictions) < predicted[:, None]
    positions = [np.sort(draw.permutation(np.arange(1, n - 1))[:predictions]) for n in lengths]
    columns = {
        "input_ids": real * draw.integers(1, vocab_size, real.shape),
        "input_mask": real,
        "segment_ids": real & (np.arange(length) >= length // 3),
        "masked_lm_positions": np.stack(positions) * weights,
        "masked_lm_ids": weights * draw.integers(0, vocab_size, weights.shape),
        "next_sentence_labels": draw.integers(0, 2, examples),
    }
    columns = {name: column.astype(np.int32) for name, column in columns.items()}
    return {**columns, "masked_lm_weights": weights.astype(np.float32)}


def counts_of(columns: Mapping[str, np.ndarray]) -> dict[str, np.float32]:
    """Return what the losses of pre-training are divided by."""
    masked, pairs = columns["masked_lm_weights"].sum(), len(columns["next_sentence_labels"])
    return {"masked": np.float32(masked), "pairs": np.float32(pairs)}


def assert_gradients_of_pytorch(
    ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray], zero: Sequence[str] = ()
) -> None:
    """Assert that gradients are equal relative to the norm of each.

    What adds the same to all scores of a softmax changes nothing: the true gradient of an attention key's bias, and of
    the weights named in `zero`, is zero. What is there is rounding, and there is nothing to be relative to.
    """
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        distance = np.linalg.norm(ours[name] - gradient)
        if name.endswith("attention.self.key.bias") or name in zero:
            assert distance < 1e-6, name
        else:
            assert distance < 1e-5 * np.linalg.norm(gradient), name


def hidden_of(blocks: Sequence[Any], columns: Mapping[str, Any], key: Any = None) -> Any:
    """Return the hidden values after every block but the head."""
    hidden = None
    for _, block in blocks[:-1]:
        hidden = block(hidden, columns, key)
    return hidden


def gradients_of(
    blocks: Sequence[Any], columns: Mapping[str, Any], counts: Mapping[str, Any], key: Any = None
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Return loss, sums, and the gradient of every weight by name, all as tensors."""
    import tensorflow as tf

    from bert_cli.model.bert import named_weights

    weights = named_weights(blocks)
    columns = {name: tf.convert_to_tensor(column) for name, column in columns.items()}
    counts = {name: tf.convert_to_tensor(count) for name, count in counts.items()}
    with tf.GradientTape() as tape:
        loss, sums = blocks[-1][1](hidden_of(blocks, columns, key), columns, counts, key)
    gradients = tape.gradient(loss, {name: weight.value for name, weight in weights.items()})
    return loss, sums, {name: tf.convert_to_tensor(value) for name, value in gradients.items()}
