"""A small model, synthetic micro-batches with padding, and one way to run forward and backward."""

import numpy as np
import pytest

from bert_cli.config.settings import BertConfig


@pytest.fixture(scope="session")
def tiny():
    return BertConfig(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=24,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )


@pytest.fixture(scope="session")
def make_examples():
    def make(config, examples=4, length=16, predictions=5, seed=0):
        """Columns of a micro-batch with padding of positions and of predictions."""
        draw = np.random.default_rng(seed)
        lengths = draw.integers(length // 2, length + 1, examples)
        lengths[0] = length
        real = np.arange(length) < lengths[:, None]
        predicted = draw.integers(1, predictions + 1, examples)
        weights = (np.arange(predictions) < predicted[:, None]).astype(np.float32)
        positions = np.stack(
            [np.sort(draw.permutation(np.arange(1, n - 1))[:predictions]) for n in lengths]
        )
        return {
            "input_ids": np.where(real, draw.integers(1, config.vocab_size, real.shape), 0).astype(
                np.int32
            ),
            "input_mask": real.astype(np.int32),
            "segment_ids": (real & (np.arange(length) >= length // 3)).astype(np.int32),
            "masked_lm_positions": (positions * weights).astype(np.int32),
            "masked_lm_ids": (draw.integers(0, config.vocab_size, weights.shape) * weights).astype(
                np.int32
            ),
            "masked_lm_weights": weights,
            "next_sentence_labels": draw.integers(0, 2, examples).astype(np.int32),
        }

    return make


@pytest.fixture(scope="session")
def counts_of():
    def counts(columns):
        return {
            "masked": np.float32(columns["masked_lm_weights"].sum()),
            "pairs": np.float32(len(columns["next_sentence_labels"])),
        }

    return counts


@pytest.fixture(scope="session")
def hidden_of():
    def run(blocks, columns, key=None):
        """Through every block but the heads."""
        hidden = None
        for _, block in blocks[:-1]:
            hidden = block(hidden, columns, key)
        return hidden

    return run


@pytest.fixture(scope="session")
def gradients_of(hidden_of):
    import tensorflow as tf

    from bert_cli.model.bert import named_weights

    def run(blocks, columns, counts, key=None):
        """(loss, sums, gradient of every weight by name), all as tensors."""
        weights = named_weights(blocks)
        columns = {name: tf.convert_to_tensor(column) for name, column in columns.items()}
        counts = {name: tf.convert_to_tensor(count) for name, count in counts.items()}
        with tf.GradientTape() as tape:
            loss, sums = blocks[-1][1](hidden_of(blocks, columns, key), columns, counts, key)
        gradients = tape.gradient(loss, {name: weight.value for name, weight in weights.items()})
        return loss, sums, {name: tf.convert_to_tensor(value) for name, value in gradients.items()}

    return run
