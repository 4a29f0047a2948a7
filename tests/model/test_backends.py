"""The model outside TensorFlow's eager mode: under XLA, after Grappler, and on another backend of Keras."""

import json
import os
import subprocess
import sys

import pytest
import tensorflow as tf
from support.model_inputs import counts_of, gradients_of, make_examples

from bert_cli.model.bert import build_blocks

# Runs in a process of its own, because Keras chooses its backend once, when it is imported.
PROGRAM = """
import json, sys
import numpy as np
from keras import ops
from bert_cli.config.settings import BertConfig
from bert_cli.model.bert import build_blocks, named_weights
given = json.load(sys.stdin)
columns = {name: ops.convert_to_tensor(np.array(*column)) for name, column in given["columns"].items()}
counts = {name: ops.convert_to_tensor(np.float32(count)) for name, count in given["counts"].items()}
blocks = build_blocks(BertConfig(**given["config"]), seed=1, policy="float32")
losses = []
for key in (None, [7, 3], [7, 3], [7, 4]):
    key = None if key is None else ops.convert_to_tensor(np.array(key, np.int32))
    hidden = None
    for _, block in blocks[:-1]:
        hidden = block(hidden, columns, key)
    loss, _ = blocks[-1][1](hidden, columns, counts, key)
    losses.append(float(ops.convert_to_numpy(loss)))
print(json.dumps(losses))
"""


def test_the_model_runs_on_another_backend_of_keras(tiny):
    pytest.importorskip("torch")
    columns = make_examples(tiny.vocab_size)
    given = {
        "config": tiny.model_dump(),
        "columns": {name: (column.tolist(), str(column.dtype)) for name, column in columns.items()},
        "counts": {name: float(count) for name, count in counts_of(columns).items()},
    }
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(given),
        env={**os.environ, "KERAS_BACKEND": "torch"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    plain, dropped, again, elsewhere = json.loads(ran.stdout)
    loss, _, _ = gradients_of(
        build_blocks(tiny, seed=1, policy="float32"), columns, counts_of(columns)
    )
    assert plain == pytest.approx(float(loss), abs=2e-6)
    assert dropped == again
    assert len({plain, dropped, elsewhere}) == 3


def test_no_float16_product_feeds_a_bias_directly(tiny):
    """Grappler fuses such a pair, and on some CPUs the result takes 40 ms a row: it looks like a hang."""
    columns = {name: tf.constant(column) for name, column in make_examples(tiny.vocab_size).items()}
    blocks = dict(build_blocks(tiny, seed=1, policy="float16"))
    steps = {
        "hid_0": lambda hidden: blocks["hid_0"](hidden, columns, None),
        "pool": lambda hidden: blocks["pool"](hidden, columns, None),
        "heads": lambda hidden: blocks["heads"].logits(hidden),
    }
    for name, step in steps.items():
        graph = (
            tf.function(step).get_concrete_function(tf.TensorSpec((4, 16, 32), tf.float16)).graph
        )
        products = [op for op in graph.get_operations() if op.type == "MatMul"]
        assert {op.outputs[0].dtype for op in products} == {tf.float16}
        consumers = {reader.type for op in products for reader in op.outputs[0].consumers()}
        assert consumers <= {"Reshape", "Cast"}, name
