"""Layers of one kind, traced once, are the layers themselves: the same values and gradients, bit for bit."""

import numpy as np
import pytest
import tensorflow as tf

from bert_cli.config.model import BertConfig
from bert_cli.model.bert import build_block
from bert_cli.parallel.tensorflow.runtime import traced
from bert_cli.parallel.tensorflow.stage import SharedTraces

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


def given(policy: str, places: int):
    hidden = np.random.default_rng(0).standard_normal((B, places, 16))
    mask = (np.arange(places) < [[16], [7], [12]]).astype(np.int32)
    columns = {"input_mask": tf.constant(mask), "input_ids": tf.zeros([B, places], tf.int32)}
    return tf.cast(tf.constant(hidden, tf.float32), policy.removeprefix("mixed_")), columns


def both_ways(blocks, run, policy):
    """A function: what comes out of the blocks, and the gradients of input and weights."""
    weights = [weight.value for block in blocks for weight in block.weights]

    def go(hidden, columns, key):
        with tf.GradientTape() as tape:
            tape.watch(hidden)
            onward = hidden
            for block in blocks:
                onward = run(block, onward, columns, key)
            loss = tf.reduce_sum(tf.cast(onward, tf.float32) ** 3)
        return onward, tape.gradient(loss, [hidden, *weights])

    function = traced(go)

    def found(places, key):
        hidden, columns = given(policy, places)
        onward, gradients = function(hidden, columns, None if key is None else tf.constant(key))
        return [np.asarray(tf.cast(tensor, tf.float32)) for tensor in (onward, *gradients)]

    return found


@pytest.mark.parametrize("key", [KEY, None], ids=["dropout", "no dropout"])
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_layers_traced_once_are_the_layers_bit_for_bit_at_every_length(policy, key):
    blocks = layers(policy)
    plain = both_ways(blocks, lambda block, *rest: block(*rest), policy)
    once = both_ways(blocks, SharedTraces(blocks).run, policy)
    for places in (16, 8, 12, 16):
        mine, wanted = once(places, key), plain(places, key)
        assert len(mine) == len(wanted) == 2 + 3 * 16
        for one, other in zip(mine, wanted, strict=True):
            assert other.any()
            np.testing.assert_array_equal(one, other)


def test_three_layers_are_traced_as_one_for_each_length_and_one_alone_is_not():
    blocks = layers()
    alike = SharedTraces(blocks)
    run = both_ways(blocks, alike.run, "float32")
    for places in (16, 8):
        run(places, KEY)
    assert len(alike.functions) == 2
    assert {f.experimental_get_tracing_count() for f in alike.functions.values()} == {1}
    alone = SharedTraces(blocks[:1])
    both_ways(blocks[:1], alone.run, "float32")(16, KEY)
    assert not alone.functions


def test_scores_of_any_length_do_not_become_the_trace_of_a_known_one():
    blocks = layers()
    alike = SharedTraces(blocks)
    seen = []

    def forward(hidden, columns, key):
        for block in blocks:
            hidden = alike.run(block, hidden, columns, key)
            seen.append(tuple(hidden.shape))
        return hidden

    anything, known = traced(forward, any_length=True), traced(forward)
    for places in (16, 8, 12):
        anything(*given("float32", places), None)
    assert (B, None, 16) in seen
    seen.clear()
    known(*given("float32", 12), None)
    assert set(seen) == {(B, 12, 16)}


def test_layers_of_another_width_or_precision_or_class_are_of_another_kind():
    class Other(type(layers()[0])):
        """A layer that might do something else."""

    first, other = layers()[0], layers()[1]
    assert first.kind == other.kind and hash(first.kind) == hash(other.kind)
    narrow = CONFIG.model_copy(update={"intermediate_size": 8})
    others = [
        build_block("hid_1", narrow, seed=1, policy="float32"),
        build_block("hid_1", CONFIG, seed=1, policy="mixed_bfloat16"),
        Other(CONFIG, name="hid_1", policy=first.dtype_policy, site=4),
    ]
    assert len({one.kind for one in [first, *others]}) == 4
