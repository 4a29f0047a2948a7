"""Stages: the sums of gradients, and those of unused weights."""

import numpy as np
import pytest
import tensorflow as tf

from bert_cli.parallel.tensorflow.stage import Stage

KEY = np.array([7, 3], np.int32)


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
