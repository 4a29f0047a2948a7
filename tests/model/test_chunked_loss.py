"""The loss in chunks of the vocabulary and its gradients equal those of the complete scores."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from support.model_inputs import counts_of, make_examples

from bert_cli.model import fused
from bert_cli.model.bert import build_block, build_blocks, word_table
from bert_cli.model.heads import chunked_loss, loss_sums

MASKED, WIDTH, WORDS = 24, 32, 97
# Relative to the largest value: a few roundings of the compute dtype.
ROUNDING = {"float32": 1e-6, "bfloat16": 2**-7, "float16": 2**-10}


def inputs_of(dtype):
    draw = np.random.default_rng(0)
    x, table = draw.normal(size=(MASKED, WIDTH)), draw.normal(size=(WORDS, WIDTH))
    bias = draw.normal(size=WORDS)
    tensors = [tf.cast(tf.constant(value, tf.float32), dtype) for value in (x, table)]
    return [*tensors, tf.constant(bias, tf.float32)]


LABELS = np.random.default_rng(1).integers(0, WORDS, MASKED).astype(np.int32)
WEIGHTS = (np.arange(MASKED) % 4 > 0).astype(np.float32)


def with_gradients(chunks, labels, weights):
    """Return a function of x, table and bias: both sums and three gradients; 0 chunks are the complete scores."""

    @tf.function(autograph=False)
    def run(x, table, bias):
        with tf.GradientTape() as tape:
            tape.watch([x, table, bias])
            if chunks:
                loss, correct = chunked_loss(x, table, bias, labels, weights, chunks)
            else:
                scores = tf.cast(tf.matmul(x, table, transpose_b=True), tf.float32) + bias
                loss, correct = loss_sums(scores, labels, weights)
            scaled = loss / 70.0
        return [loss, correct, *tape.gradient(scaled, [x, table, bias])]

    return run


def both(chunks, dtype):
    """Sums and gradients of the complete scores, or of chunks."""
    values = with_gradients(chunks, LABELS, WEIGHTS)(*inputs_of(dtype))
    return [tf.cast(value, tf.float32).numpy() for value in values]


@pytest.mark.parametrize(
    ("chunks", "dtype", "compiles"),
    [(97, "float32", False), (3, "float32", True), (3, "bfloat16", True), (3, "float16", True)],
)
def test_chunks_give_the_loss_and_gradients_of_the_complete_scores(chunks, dtype, compiles):
    names = ("loss", "correct", "gradient of x", "of the table", "of the bias")
    complete = both(0, dtype)
    fused.compile_fused(compiles)
    try:
        chunked = both(chunks, dtype)
    finally:
        fused.compile_fused(False)
    for name, expected, ours in zip(names, complete, chunked, strict=True):
        assert np.abs(ours - expected).max() <= ROUNDING[dtype] * np.abs(expected).max(), name


def test_the_first_of_equal_words_is_the_best_also_across_chunks():
    x, table, bias = tf.zeros([2, WIDTH]), tf.zeros([WORDS, WIDTH]), tf.zeros([WORDS])
    _, correct = chunked_loss(x, table, bias, tf.constant([0, 96]), tf.ones([2]), 5)
    assert float(correct) == 1.0


def test_the_heads_with_chunks_are_the_heads(tiny):
    blocks = build_blocks(tiny, seed=1, policy="float32")
    table = word_table(blocks[0][1])
    columns = make_examples(tiny.vocab_size)
    hidden = tf.random.stateless_normal((4, 6, 32), [1, 2])
    losses = {}
    for chunks in (1, 4):
        heads = build_block(
            "heads", tiny, seed=1, policy="float32", word_table=table, chunks=chunks
        )
        loss, sums = heads(hidden, columns, counts_of(columns), None)
        losses[chunks] = [float(loss), *(float(value) for value in sums.values())]
    np.testing.assert_allclose(losses[4], losses[1], rtol=1e-6)


def tensor_sizes(graph):
    """Elements of the tensors that a graph and the functions in it compute."""
    definition = graph.as_graph_def(add_shapes=True)
    for node in (
        *definition.node,
        *(node for body in definition.library.function for node in body.node_def),
    ):
        for shape in node.attr["_output_shapes"].list.shape:
            yield int(np.prod([max(axis.size, 1) for axis in shape.dim]))


def large(rows, width, words, chunks):
    """A traced function of many rows and words, and its arguments."""
    run = with_gradients(chunks, tf.zeros([rows], tf.int32), tf.ones([rows]))
    return run, (tf.ones([rows, width]), tf.ones([words, width]), tf.zeros([words]))


def test_no_tensor_has_the_scores_of_all_words():
    sizes = {}
    for chunks in (0, 10):
        run, inputs = large(600, 8, 1000, chunks)
        sizes[chunks] = max(tensor_sizes(run.get_concrete_function(*inputs).graph))
    assert sizes == {0: 600 * 1000, 10: 600 * 100}


@pytest.mark.slow
@pytest.mark.tensorflow
def test_the_memory_of_all_scores_is_never_allocated():
    """Chunks that were computed at the same time would need it, which the graph does not show."""
    rows, width, words = 6144, 64, 20_000
    code = """
import json, sys
sys.path[:0] = ["tests", "tests/model"]
from test_chunked_loss import fused, large
fused.compile_fused(True)
run, inputs = large(*json.loads(sys.argv[1]))
def peak():
    text = open("/proc/self/status").read()
    return 1024 * int(next(row.split()[1] for row in text.splitlines() if row.startswith("VmHWM")))
before = peak()
run(*inputs)
print(peak() - before)
"""
    grown = {}
    for chunks in (0, 10):
        done = subprocess.run(
            [sys.executable, "-c", code, json.dumps([rows, width, words, chunks])],
            env={**os.environ, "KERAS_BACKEND": "tensorflow"},
            capture_output=True,
            text=True,
            check=True,
        )
        grown[chunks] = int(done.stdout.split()[-1])
    assert grown[0] > 4 * rows * words
    assert grown[10] < 4 * rows * words / 2, grown
