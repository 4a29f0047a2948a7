"""Layers of one kind, traced once, are the layers themselves: the same values and gradients, bit for bit."""

import numpy as np
import pytest
import tensorflow as tf

from bert_cli.config.schema import BertConfig
from bert_cli.model.bert import build_block
from bert_cli.parallel.alike import Runner

B, S = 3, 16
CONFIG = BertConfig(
    vocab_size=50,
    hidden_size=16,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=S,
    initializer_range=0.5,
)
KEY = np.array([7, 3], np.int32)


def layers(policy: str = "float32"):
    return [build_block(f"hid_{n}", CONFIG, seed=1, policy=policy) for n in range(3)]


def given(policy: str):
    generator = np.random.default_rng(0)
    hidden = tf.constant(generator.standard_normal((B, S, 16)), tf.float32)
    dtype = {"float32": "float32"}.get(policy, policy.removeprefix("mixed_"))
    mask = (np.arange(S) < [[16], [9], [12]]).astype(np.int32)
    columns = {"input_mask": tf.constant(mask), "input_ids": tf.zeros([B, S], tf.int32)}
    return tf.cast(hidden, dtype), columns


def both_ways(blocks, run, policy, key):
    """What comes out of the blocks, and the gradients of input and weights."""
    hidden, columns = given(policy)
    weights = [weight.value for block in blocks for weight in block.weights]

    @tf.function(autograph=False)
    def go(hidden, columns, key):
        with tf.GradientTape() as tape:
            tape.watch(hidden)
            onward = hidden
            for block in blocks:
                onward = run(block, onward, columns, key)
            loss = tf.reduce_sum(tf.cast(onward, tf.float32) ** 3)
        return onward, tape.gradient(loss, [hidden, *weights])

    onward, found = go(hidden, columns, None if key is None else tf.constant(key))
    return [np.asarray(tf.cast(tensor, tf.float32)) for tensor in (onward, *found)]


@pytest.mark.parametrize("key", [KEY, None], ids=["dropout", "no dropout"])
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_layers_traced_once_are_the_layers_bit_for_bit(policy, key):
    blocks = layers(policy)
    plain = both_ways(blocks, lambda block, *rest: block(*rest), policy, key)
    once = both_ways(blocks, Runner(blocks), policy, key)
    assert len(plain) == len(once) == 2 + 3 * 16
    for mine, wanted in zip(once, plain, strict=True):
        assert wanted.any()
        np.testing.assert_array_equal(mine, wanted)


def test_three_layers_are_traced_as_one_and_one_alone_is_not():
    blocks = layers()
    runner = Runner(blocks)
    both_ways(blocks, runner, "float32", KEY)
    (function,) = runner._functions.values()
    assert function.experimental_get_tracing_count() == 1
    assert not Runner(blocks[:1])._functions


def test_layers_of_another_width_or_precision_are_of_another_kind():
    narrow = CONFIG.model_copy(update={"intermediate_size": 8})
    others = [
        build_block("hid_1", narrow, seed=1, policy="float32"),
        build_block("hid_1", CONFIG, seed=1, policy="mixed_bfloat16"),
    ]
    for other in others:
        assert not Runner([layers()[0], other])._functions
