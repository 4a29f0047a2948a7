"""Stages: shared traces that change no bit, and gradients of unused weights."""

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from support.settings import SHAPE

from bert_cli.facts.bert import BertConfig
from bert_cli.model.bert import build_block
from bert_cli.model.layers import EncoderLayer
from bert_cli.model.operations import PLAIN
from bert_cli.parallel.tensorflow.mesh import traced
from bert_cli.parallel.tensorflow.stage import SharedTraces, Stage

B, S = 3, 16
CONFIG = BertConfig(**SHAPE | {"max_position_embeddings": S, "initializer_range": 0.5})
KEY = np.array([7, 3], np.int32)


def layers():
    return [build_block(f"hid_{n}", CONFIG, seed=1, policy="mixed_bfloat16") for n in range(2)]


def inputs(length: int):
    hidden = np.random.default_rng(0).standard_normal((B, length, 16))
    mask = (np.arange(length) < [[16], [7], [12]]).astype(np.int32)
    columns = {"input_mask": tf.constant(mask), "input_ids": tf.zeros([B, length], tf.int32)}
    return tf.constant(hidden, tf.bfloat16), columns


def forward_and_backward(blocks, run):
    """Return a function of the length: the output of the blocks, and the gradients of input and weights."""
    weights = [weight.value for block in blocks for weight in block.weights]

    @traced
    def compute(hidden, columns, key):
        with tf.GradientTape() as tape:
            tape.watch(hidden)
            output = hidden
            for block in blocks:
                output = run(block, output, columns, key)
            loss = tf.reduce_sum(tf.cast(output, tf.float32) ** 3)
        gradients = tape.gradient(loss, [hidden, *weights])
        return [tf.cast(tensor, tf.float32) for tensor in (output, *gradients)]

    return lambda length: compute(*inputs(length), KEY)


def separately(block, *rest):
    return block(*rest)


def test_layers_with_a_shared_trace_are_the_layers_bit_for_bit_at_every_length():
    blocks = layers()
    traces, single = SharedTraces(blocks), SharedTraces(blocks[:1])
    separate = forward_and_backward(blocks, separately)
    shared = forward_and_backward(blocks, traces.run)
    for length in (16, 8, 16):
        values, expected = shared(length), separate(length)
        assert len(expected) == 2 + 2 * 16
        for value, other in zip(values, expected, strict=True):
            assert np.any(other)
            np.testing.assert_array_equal(value, other)
    # One trace for each length; a single layer has none.
    assert len(traces.functions) == 2
    assert {f.experimental_get_tracing_count() for f in traces.functions.values()} == {1}
    forward_and_backward(blocks[:1], single.run)(16)
    assert not single.functions


class WindowLayer(EncoderLayer):
    """An encoder layer that ignores the positions from `window` on."""

    def __init__(self, *, window: int, **options):
        self.window = window
        super().__init__(**options)

    def call(self, hidden, batch, key):
        mask = batch["input_mask"] * (np.arange(hidden.shape[1]) < self.window)
        return super().call(hidden, {"input_mask": mask}, key)


def test_layers_of_one_class_with_different_attributes_share_no_trace():
    layer = {"policy": keras.DTypePolicy("mixed_bfloat16"), "operations": PLAIN}
    blocks = [
        WindowLayer(name=f"hid_{n}", **layer, config=CONFIG, number=n, window=window)
        for n, window in enumerate((4, 4, 16))
    ]
    draw = np.random.default_rng(1)
    for weight in (weight for block in blocks for weight in block.weights):
        weight.assign(draw.standard_normal(weight.shape) / 4)
    shared = SharedTraces(blocks)
    values = forward_and_backward(blocks, shared.run)(16)
    expected = forward_and_backward(blocks, separately)(16)
    for value, other in zip(values, expected, strict=True):
        np.testing.assert_array_equal(value, other)
    assert list(shared.functions) == [(blocks[0].trace_key, B, S, 16)]


def test_a_stage_that_recomputes_saves_the_inputs_of_its_layers():
    stage = Stage(layers(), None, {}, device="CPU:0", recomputes=True)
    _, values = stage.forward(*inputs(16), tf.constant(KEY))
    assert [tuple(value.shape) for value in values] == [(B, 16, 16)] * 2


def test_a_trace_for_any_length_is_not_used_for_a_known_one():
    """It has no known shape, which dropout needs."""
    blocks = layers()
    shared = SharedTraces(blocks)
    run = partial(shared.run, blocks[0])
    any_length, known = traced(run, any_length=True), traced(run)
    for length in (16, 8, 12):
        any_length(*inputs(length), None)
    known(*inputs(12), None)
    assert [length for _, _, length, _ in shared.functions] == [16, None, 12]


# Compiled functions select where others branch. The table has two gradients, as the word table: in the body, which is
# computed again where only the inputs of layers are saved, and in the head.
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recomputes", [False, True])
def test_the_first_gradients_overwrite_and_a_weight_without_a_part_in_the_loss_has_none(
    recomputes, compiled
):
    table, other = tf.Variable([1.0, 2.0]), tf.Variable([3.0])

    def body(hidden, batch, key):
        return table * 2.0

    def head(hidden, labels, counts, key):
        loss = tf.reduce_sum(hidden * table)
        return loss, {"loss": loss}

    body.READS = head.READS = head.COUNTS = ()
    body.trace_key = "body"
    weights = {"table": table, "other": other}
    stage = Stage([body], head, weights, device="CPU:0", recomputes=recomputes, compiled=compiled)
    for accumulator in stage.accumulators.values():
        accumulator.assign(np.full(accumulator.shape, np.nan, np.float32))
    for total in ([4.0, 8.0], [8.0, 16.0]):
        stage.forward_backward(None, {}, tf.constant(KEY), {}, tf.constant(1.0))
        np.testing.assert_array_equal(stage.accumulators["table"], total)
        np.testing.assert_array_equal(stage.accumulators["other"], [0.0])
    stage.has_gradients = False
    stage.forward_backward(None, {}, tf.constant(KEY), {}, tf.constant(1.0))
    np.testing.assert_array_equal(stage.accumulators["table"], [4.0, 8.0])


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_float16_are_added_in_float32(compiled):
    """4,096 + 1 is 4,096 in float16."""
    table = tf.Variable(tf.ones(2, tf.float16))

    def head(hidden, labels, counts, key):
        loss = tf.reduce_sum(tf.cast(table, tf.float32))
        return loss, {"loss": loss}

    head.READS = head.COUNTS = ()
    stage = Stage([], head, {"table": table}, device="CPU:0", compiled=compiled)
    for scale in (4096.0, 1.0):
        stage.forward_backward(None, {}, tf.constant(KEY), {}, tf.constant(scale))
    assert stage.accumulators["table"].dtype == tf.float32
    np.testing.assert_array_equal(stage.accumulators["table"], [4097.0] * 2)
