"""The loss in chunks of the vocabulary and its gradients equal those of the complete scores."""

import numpy as np
import pytest
import tensorflow as tf
from support.model_inputs import counts_of, make_examples

from bert_cli.model.arithmetic.chunked_loss import chunked_loss
from bert_cli.model.arithmetic.fused import NEVER
from bert_cli.model.bert.heads import loss_sums
from bert_cli.model.build import Outputs, build_block, build_blocks

MASKED, WIDTH, WORDS = 24, 32, 23
# Relative to the largest value: a few roundings of the compute dtype.
ROUNDING = {"float32": 1e-6, "float16": 2**-10}


def inputs_of(dtype):
    draw = np.random.default_rng(0)
    x, table = draw.normal(size=(MASKED, WIDTH)), draw.normal(size=(WORDS, WIDTH))
    bias = tf.constant(draw.normal(size=WORDS), "float32")
    return tf.constant(x, dtype), tf.constant(table, dtype), bias


LABELS = np.random.default_rng(1).integers(0, WORDS, MASKED).astype(np.int32)
WEIGHTS = (np.arange(MASKED) % 4 > 0).astype(np.float32)


def with_gradients(chunks, labels, weights, is_compiled=False):
    """Return a function of x, table and bias: both sums and three gradients; 0 chunks are the complete scores."""

    @tf.function(autograph=False)
    def run(x, table, bias):
        with tf.GradientTape() as tape:
            tape.watch([x, table, bias])
            if chunks:
                fuse_above = 0 if is_compiled else NEVER
                loss, correct = chunked_loss(x, table, bias, labels, weights, chunks, fuse_above)
            else:
                scores = tf.cast(tf.matmul(x, table, transpose_b=True), tf.float32) + bias
                loss, correct = loss_sums(scores, labels, weights)
            scaled = loss / 70.0
        return [loss, correct, *tape.gradient(scaled, [x, table, bias])]

    return run


@pytest.mark.parametrize(
    ("chunks", "dtype", "compiles"),
    [(12, "float32", False), (3, "float32", True), (3, "float16", True)],
)
def test_chunks_give_the_loss_and_gradients_of_the_complete_scores(chunks, dtype, compiles):
    inputs = inputs_of(dtype)
    complete = with_gradients(0, LABELS, WEIGHTS)(*inputs)
    chunked = with_gradients(chunks, LABELS, WEIGHTS, compiles)(*inputs)
    for pair in zip(complete, chunked, strict=True):
        expected, ours = (tf.cast(value, tf.float32).numpy() for value in pair)
        assert np.abs(ours - expected).max() <= ROUNDING[dtype] * np.abs(expected).max()


def test_the_first_of_equal_words_is_the_best_also_across_chunks():
    x, table, bias = tf.zeros([2, WIDTH]), tf.zeros([WORDS, WIDTH]), tf.zeros([WORDS])
    _, correct = chunked_loss(x, table, bias, tf.constant([0, WORDS - 1]), tf.ones([2]), 5)
    assert float(correct) == 1.0


def test_the_heads_with_chunks_are_the_heads(tiny):
    blocks = build_blocks(tiny, seed=1, policy="float32")
    columns = make_examples(tiny.vocab_size)
    hidden = tf.random.stateless_normal((4, 6, 32), [1, 2])
    losses = {}
    for chunks in (1, 4):
        outputs = Outputs(chunks=chunks, word_table=blocks[0][1].word.embeddings)
        heads = build_block("heads", tiny, seed=1, policy="float32", outputs=outputs)
        loss, sums = heads(hidden, columns, counts_of(columns), None)
        losses[chunks] = [float(loss), *(float(value) for value in sums.values())]
    np.testing.assert_allclose(losses[4], losses[1], rtol=1e-6)
