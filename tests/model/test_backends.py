"""The model outside TensorFlow's eager mode: under XLA, after Grappler, and on another backend of Keras."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import tensorflow as tf
from support.model_inputs import counts_of, gradients_of, make_examples

from bert_cli.model.bert import build_blocks

# Runs in a process of its own, because Keras chooses its backend once, when it is imported.
PROGRAM = """
import json
import sys
import numpy as np
from keras import ops
from support.model_inputs import counts_of, hidden_of, make_examples
from bert_cli.config.architectures import shape_of
from bert_cli.model.bert import build_blocks
config = shape_of(json.loads(sys.argv[1]))
columns = make_examples(config.vocab_size)
counts = {name: ops.convert_to_tensor(n) for name, n in counts_of(columns).items()}
columns = {name: ops.convert_to_tensor(column) for name, column in columns.items()}
blocks = build_blocks(config, seed=1, policy="float32")
for key in (None, [7, 3], [7, 3], [7, 4]):
    key = None if key is None else ops.convert_to_tensor(np.array(key, np.int32))
    loss, _ = blocks[-1][1](hidden_of(blocks, columns, key), columns, counts, key)
    print(float(ops.convert_to_numpy(loss)))
"""


@pytest.mark.slow
def test_the_model_runs_on_another_backend_of_keras(tiny):
    pytest.importorskip("torch")
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, tiny.model_dump_json()],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "KERAS_BACKEND": "torch"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    plain, dropped, again, elsewhere = map(float, ran.stdout.split())
    columns, blocks = make_examples(tiny.vocab_size), build_blocks(tiny, seed=1, policy="float32")
    loss, _, _ = gradients_of(blocks, columns, counts_of(columns))
    assert plain == pytest.approx(float(loss), abs=2e-6)
    assert dropped == again
    assert len({plain, dropped, elsewhere}) == 3


def test_no_float16_product_feeds_a_bias_directly(tiny):
    """Grappler fuses such a pair, and on some CPUs the result takes 40 ms a row: it looks like a hang."""
    columns = {name: tf.constant(column) for name, column in make_examples(tiny.vocab_size).items()}
    blocks = dict(build_blocks(tiny, seed=1, policy="float16"))
    for name in ("hid_0", "pool", "heads"):
        block = blocks[name]
        run = block.logits if name == "heads" else partial(block, batch=columns, key=None)
        hidden = tf.TensorSpec((4, 16, 32), tf.float16)
        graph = tf.function(run).get_concrete_function(hidden).graph
        products = [op for op in graph.get_operations() if op.type == "MatMul"]
        assert {op.outputs[0].dtype for op in products} == {tf.float16}
        consumers = {reader.type for op in products for reader in op.outputs[0].consumers()}
        assert consumers <= {"Reshape", "Cast"}, name
