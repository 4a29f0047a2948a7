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


KINDS = {
    # What is learned -> the block of the head and its outputs.
    "pre-training": ("heads", 2),
    "question answering": ("qa_head", 2),
    "sequence classification": ("glue_head", 3),
    "several labels": ("glue_head", 3),
    "regression": ("glue_head", 1),
    "token classification": ("token_head", 3),
}


def task_labels(kind: str, mask: np.ndarray) -> dict[str, np.ndarray]:
    """Return labels for a head of fine-tuning, by its name in `KINDS`, for texts [B, S] with padding."""
    draw = np.random.default_rng(0)
    examples, length = mask.shape
    if kind == "question answering":
        # Within the shortest text: an answer in its padding has no finite loss.
        ends = draw.integers(0, length // 2, (2, examples))
        return {"start_positions": ends[0], "end_positions": ends[1]}
    if kind == "token classification":
        is_word = (draw.random(mask.shape) < 0.5) & (mask > 0)
        labels = draw.integers(0, 3, mask.shape) * is_word
        return {"labels": labels, "label_weights": is_word.astype(np.float32)}
    labels = {
        "sequence classification": draw.integers(0, 3, examples),
        "several labels": draw.integers(0, 2, (examples, 3)),
        "regression": draw.normal(size=examples).astype(np.float32),
    }
    return {"labels": labels[kind]}


def random_blocks(config: Any, kind: str = "pre-training") -> list[tuple[str, Any]]:
    """Return the blocks of a model with a head of `KINDS`, whose weights are all random: gammas and biases, too."""
    from bert_cli.facts.architectures import ARCHITECTURES
    from bert_cli.model.build import Outputs, build_blocks, named_weights

    name, outputs = KINDS[kind]
    options = {"last_blocks": ARCHITECTURES[config.architecture].heads[name].last_blocks}
    blocks = build_blocks(config, seed=4, policy="float32", outputs=Outputs(outputs), **options)
    draw = np.random.default_rng(5)
    for weight in named_weights(blocks).values():
        weight.assign(weight.numpy() + draw.normal(0, 0.1, weight.shape))
    return blocks


def values_of(blocks: Sequence[Any]) -> dict[str, np.ndarray]:
    from bert_cli.model.build import named_weights

    return {name: weight.numpy() for name, weight in named_weights(blocks).items()}


def hidden_of(blocks: Sequence[Any], columns: Mapping[str, Any], key: Any = None) -> Any:
    hidden = None
    for _, block in blocks[:-1]:
        hidden = block(hidden, columns, key)
    return hidden


def gradients_of(
    blocks: Sequence[Any], columns: Mapping[str, Any], counts: Mapping[str, Any], key: Any = None
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Return loss, sums, and the gradient of every weight by name, all as tensors."""
    import tensorflow as tf

    from bert_cli.model.build import named_weights

    weights = named_weights(blocks)
    columns = {name: tf.convert_to_tensor(column) for name, column in columns.items()}
    counts = {name: tf.convert_to_tensor(count) for name, count in counts.items()}
    with tf.GradientTape() as tape:
        loss, sums = blocks[-1][1](hidden_of(blocks, columns, key), columns, counts, key)
    gradients = tape.gradient(loss, {name: weight.value for name, weight in weights.items()})
    return loss, sums, {name: tf.convert_to_tensor(value) for name, value in gradients.items()}
