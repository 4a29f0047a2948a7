"""The blocks in every precision, and their dropout."""

from functools import cache, partial

import numpy as np
import pytest
import tensorflow as tf
from support.model_inputs import counts_of, gradients_of, hidden_of, make_examples

from bert_cli.model.arithmetic import fused
from bert_cli.model.build import build_blocks, named_weights

COMPUTE = {
    "float32": "float32",
    "mixed_float16": "float16",
    "mixed_bfloat16": "bfloat16",
    "float16": "float16",
}
KEY = np.array([7, 3], np.int32)


@pytest.fixture(scope="module")
def blocks_of(tiny):
    return cache(lambda policy: build_blocks(tiny, seed=1, policy=policy))


@pytest.mark.parametrize("policy", COMPUTE)
def test_blocks_run_forward_and_backward_in_every_precision(policy, model):
    blocks = build_blocks(model, seed=1, policy=policy)
    columns = make_examples(model.vocab_size)
    columns["input_mask"][1] = 0  # an example that is all padding stays finite
    hidden = None
    for name, block in blocks[:-1]:
        hidden = block(hidden, columns, KEY)
        rows = 16 if name == "emb" or name.startswith("hid") else 1 + 5
        assert hidden.shape == (4, rows, model.hidden_size)
        assert hidden.dtype == COMPUTE[policy]
    kind = "float16" if policy == "float16" else "float32"
    assert {weight.dtype for weight in named_weights(blocks).values()} == {kind}
    loss, sums, gradients = gradients_of(blocks, columns, counts_of(columns), KEY)
    assert {loss.dtype, *(value.dtype for value in sums.values())} == {tf.float32}
    assert np.isfinite(loss)
    for name, gradient in gradients.items():
        assert gradient.dtype == kind
        assert np.isfinite(gradient).all(), name
        # Nothing but the bias of attention keys, which moves all scores of a row alike, has no effect.
        assert np.any(gradient) or name.endswith("key/bias"), name


@pytest.mark.parametrize("policy", list(COMPUTE)[1:])
def test_low_precision_differs_from_float32_by_roundings_of_the_matrix_products(
    policy, tiny, blocks_of, monkeypatch
):
    """The element-wise operations have float32 inputs; only products have the compute dtype."""
    seen = {name: set() for name in ("softmax", "gelu", "mean", "rsqrt", "matmul", "tanh")}

    def recorded(plain, dtypes, x, *rest, **options):
        dtypes.add(tf.as_dtype(x.dtype).name)
        return plain(x, *rest, **options)

    for name, dtypes in seen.items():
        operation = partial(recorded, getattr(fused.ops, name), dtypes)
        monkeypatch.setattr(fused.ops, name, operation)
    columns = make_examples(tiny.vocab_size)
    # A loss scale of 1,024: without one the smallest float16 gradients lose bits.
    counts = {name: count / np.float32(1024) for name, count in counts_of(columns).items()}
    loss, _, gradients = gradients_of(blocks_of(policy), columns, counts, KEY)
    assert seen.pop("matmul") == {COMPUTE[policy]}
    assert all(dtypes == {"float32"} for dtypes in seen.values()), seen
    right, _, right_gradients = gradients_of(blocks_of("float32"), columns, counts, KEY)
    assert 0 < abs(float(loss - right)) / 1024 < 2e-3
    for name, gradient in gradients.items():
        if not name.endswith("key/bias"):
            difference = tf.norm(tf.cast(gradient, tf.float32) - right_gradients[name])
            assert difference < 0.05 * tf.norm(right_gradients[name]), name


def test_attention_scores_stay_in_range_in_float16(tiny):
    """Scores of 1,000 before the division by the root of the head size would be infinite in float16."""
    blocks = build_blocks(tiny, seed=1, policy="float16")
    attention = dict(blocks)["hid_0"].attention
    for dense in (attention.query, attention.key):
        dense.bias.assign(tf.fill([32], 140.0))
    assert np.isfinite(hidden_of(blocks, make_examples(tiny.vocab_size)).numpy()).all()


def test_scores_of_float16_are_summed_in_float32(tiny):
    """exp(12) already leaves float16, and so do a few thousand losses added up."""
    heads = build_blocks(tiny, seed=1, policy="float16")[-1][1]
    heads.masked_lm.bias.assign(np.linspace(-300, 300, 97))
    columns = make_examples(tiny.vocab_size, examples=512)
    hidden = np.zeros((512, 6, 32), np.float16)
    loss, sums = heads(hidden, columns, {"masked": np.float32(1e5), "pairs": np.float32(1e5)}, None)
    assert np.isfinite(loss)
    assert float(sums["mlm_loss"]) > 65504


def test_dropout_is_applied_as_in_the_paper(model, monkeypatch):
    draws = []
    draw = fused.keep_mask

    def recorded(shape, rate, seed):
        draws.append((tuple(shape), rate, int(seed)))
        return draw(shape, rate, seed)

    monkeypatch.setattr(fused, "keep_mask", recorded)
    rates = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3}
    config = model.model_copy(update=rates)
    blocks = build_blocks(config, seed=1, policy="float32")
    hidden_of(blocks, make_examples(model.vocab_size), KEY)
    # After the embeddings; in each layer on the probabilities and at the end of both halves, or of four modules.
    scores, hidden = ((4, 4, 16, 16), 0.3), ((4, 16, model.hidden_size), 0.2)
    layer = [scores, hidden, hidden]
    if model.architecture == "groupbert":
        layer = [hidden, hidden, scores, hidden, hidden]
    assert [draw[:2] for draw in draws] == [hidden, *layer, *layer]
    assert len({seed for _, _, seed in draws}) == len(draws) == 1 + 2 * len(layer)
    hidden_of(blocks, make_examples(model.vocab_size), None)
    assert len(draws) == 1 + 2 * len(layer)  # none without a key


def test_no_float16_product_feeds_a_bias_directly(tiny, blocks_of):
    """Grappler fuses such a pair, and on some CPUs the result takes 40 ms a row: it looks like a hang."""
    columns = {name: tf.constant(column) for name, column in make_examples(tiny.vocab_size).items()}
    blocks = dict(blocks_of("float16"))
    for name in ("hid_0", "pool", "heads"):
        block = blocks[name]
        run = block.logits if name == "heads" else partial(block, batch=columns, key=None)
        graph = tf.function(run).get_concrete_function(tf.TensorSpec((4, 16, 32), tf.float16)).graph
        products = [op for op in graph.get_operations() if op.type == "MatMul"]
        assert {op.outputs[0].dtype for op in products} == {tf.float16}
        consumers = {reader.type for op in products for reader in op.outputs[0].consumers()}
        assert consumers <= {"Reshape", "Cast"}, name
