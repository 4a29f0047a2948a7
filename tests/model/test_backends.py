"""The model after Grappler, TensorFlow's graph optimizer."""

from functools import partial

import tensorflow as tf
from support.model_inputs import make_examples

from bert_cli.model.bert import build_blocks


def test_no_float16_product_feeds_a_bias_directly(tiny):
    """Grappler fuses such a pair, and on some CPUs the result takes 40 ms a row: it looks like a hang."""
    columns = {name: tf.constant(column) for name, column in make_examples(tiny.vocab_size).items()}
    blocks = dict(build_blocks(tiny, seed=1, policy="float16"))
    for name in ("hid_0", "pool", "heads"):
        block = blocks[name]
        run = block.logits if name == "heads" else partial(block, batch=columns, key=None)
        graph = tf.function(run).get_concrete_function(tf.TensorSpec((4, 16, 32), tf.float16)).graph
        products = [op for op in graph.get_operations() if op.type == "MatMul"]
        assert {op.outputs[0].dtype for op in products} == {tf.float16}
        consumers = {reader.type for op in products for reader in op.outputs[0].consumers()}
        assert consumers <= {"Reshape", "Cast"}, name
