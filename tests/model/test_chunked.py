"""The loss by chunks of the vocabulary is the loss of the whole scores, and so are its gradients."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from bert_cli.model import fused
from bert_cli.model.bert import build_block, build_blocks, word_table
from bert_cli.model.chunked import cuts, summed_by_chunks
from bert_cli.model.heads import summed

MASKED, WIDTH, WORDS = 24, 32, 97
# Of the largest value: of a few roundings of the compute dtype.
ROUNDING = {"float32": 1e-6, "bfloat16": 2**-7, "float16": 2**-10}


def given(dtype):
    draw = np.random.default_rng(0)
    x, table = draw.normal(size=(MASKED, WIDTH)), draw.normal(size=(WORDS, WIDTH))
    bias = draw.normal(size=WORDS)
    tensors = [tf.cast(tf.constant(value, tf.float32), dtype) for value in (x, table)]
    return [*tensors, tf.constant(bias, tf.float32)]


LABELS = np.random.default_rng(1).integers(0, WORDS, MASKED).astype(np.int32)
WEIGHTS = (np.arange(MASKED) % 4 > 0).astype(np.float32)


@pytest.fixture(params=[False, True])
def compiles(request):
    fused.compile_chains(request.param)
    yield
    fused.compile_chains(False)


def both(chunks, dtype):
    """Sums and gradients of the whole scores, or of chunks."""

    @tf.function(autograph=False)
    def run(x, table, bias):
        with tf.GradientTape() as tape:
            tape.watch([x, table, bias])
            if chunks:
                loss, correct = summed_by_chunks(x, table, bias, LABELS, WEIGHTS, chunks)
            else:
                scores = tf.cast(tf.matmul(x, table, transpose_b=True), tf.float32) + bias
                loss, correct = summed(scores, LABELS, WEIGHTS)
            share = loss / 70.0
        return [loss, correct, *tape.gradient(share, [x, table, bias])]

    return [tf.cast(value, tf.float32).numpy() for value in run(*given(dtype))]


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("chunks", [2, 3, 5, 97])
def test_chunks_give_the_loss_and_the_gradients_of_the_whole(chunks, dtype, compiles):
    names = ("loss", "right answers", "gradient of x", "of the table", "of the bias")
    for name, whole, cut in zip(names, both(0, dtype), both(chunks, dtype), strict=True):
        assert np.abs(cut - whole).max() <= ROUNDING[dtype] * np.abs(whole).max(), name


def test_the_first_of_equal_words_is_the_best_also_across_chunks():
    x, table, bias = tf.zeros([2, WIDTH]), tf.zeros([WORDS, WIDTH]), tf.zeros([WORDS])
    _, correct = summed_by_chunks(x, table, bias, tf.constant([0, 96]), tf.ones([2]), 5)
    assert float(correct) == 1.0


def test_every_word_is_in_one_chunk():
    for words, chunks in ((97, 1), (97, 4), (30522, 5), (3, 5)):
        found = [word for start, end in cuts(words, chunks) for word in range(start, end)]
        assert found == list(range(words))


def test_the_heads_with_chunks_are_the_heads(tiny, make_examples, counts_of):
    blocks = build_blocks(tiny, seed=1, policy="float32")
    table = word_table(blocks[0][1])
    columns = make_examples(tiny)
    hidden = tf.random.stateless_normal((4, 6, 32), [1, 2])
    losses = {}
    for chunks in (1, 4):
        heads = build_block(
            "heads", tiny, seed=1, policy="float32", word_table=table, chunks=chunks
        )
        loss, sums = heads(hidden, columns, counts_of(columns), None)
        losses[chunks] = [float(loss), *(float(value) for value in sums.values())]
    np.testing.assert_allclose(losses[4], losses[1], rtol=1e-6)


GROWTH = """
import json, os, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import tensorflow as tf
from bert_cli.model.chunked import summed_by_chunks
from bert_cli.model.fused import compile_chains
from bert_cli.model.heads import summed
compile_chains(True)
rows, width, words, chunks = json.loads(sys.argv[1])
x, table, bias = tf.ones([rows, width]), tf.ones([words, width]), tf.zeros([words])
labels, weights = tf.zeros([rows], tf.int32), tf.ones([rows])

@tf.function(autograph=False)
def run(x, table, bias):
    with tf.GradientTape() as tape:
        tape.watch([x, table, bias])
        if chunks == 1:
            loss, _ = summed(tf.matmul(x, table, transpose_b=True) + bias, labels, weights)
        else:
            loss, _ = summed_by_chunks(x, table, bias, labels, weights, chunks)
    return [tf.reduce_sum(value) for value in tape.gradient(loss, [x, table, bias])]

def most():
    text = open("/proc/self/status").read()
    return 1024 * int(next(row.split()[1] for row in text.splitlines() if row.startswith("VmHWM")))
before = most()
run(x, table, bias)
print(most() - before)
"""


def test_the_scores_of_all_words_are_never_there_at_once():
    if not os.path.exists("/proc/self/status"):
        pytest.skip("this system does not tell the memory of a process")
    rows, width, words = 6144, 64, 20_000
    grown = {}
    for chunks in (1, 10):
        told = subprocess.run(
            [sys.executable, "-c", GROWTH, json.dumps([rows, width, words, chunks])],
            env={**os.environ, "KERAS_BACKEND": "tensorflow"},
            capture_output=True,
            text=True,
            check=True,
        )
        grown[chunks] = int(told.stdout.split()[-1])
    whole = 4 * rows * words
    assert grown[1] > whole
    assert grown[10] < whole / 2, grown
