"""The blocks in every precision, their dropout, and that running a block again changes nothing."""

from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from bert_cli.model import fused
from bert_cli.model.bert import build_blocks, named_weights

COMPUTE = {
    "float32": "float32",
    "mixed_float16": "float16",
    "mixed_bfloat16": "bfloat16",
    "float16": "float16",
}
KEY = np.array([7, 3], np.int32)


@pytest.fixture(scope="module")
def blocks_of(tiny):
    built = {}

    def blocks(policy):
        if policy not in built:
            built[policy] = build_blocks(tiny, seed=1, policy=policy)
        return built[policy]

    return blocks


@pytest.mark.parametrize("policy", COMPUTE)
def test_blocks_run_forward_and_backward_in_every_precision(
    policy, tiny, blocks_of, make_examples, counts_of, gradients_of
):
    blocks = blocks_of(policy)
    columns = make_examples(tiny)
    columns["input_mask"][1] = 0  # an example that is all padding stays finite
    hidden = None
    for name, block in blocks[:-1]:
        hidden = block(hidden, columns, KEY)
        rows = 16 if name == "emb" or name.startswith("hid") else 1 + 5
        assert hidden.shape == (4, rows, 32)
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
    policy, tiny, blocks_of, make_examples, counts_of, gradients_of, monkeypatch
):
    """The element-wise operations have float32 inputs; only products have the compute dtype."""
    seen = {name: set() for name in ("softmax", "gelu", "mean", "rsqrt", "matmul", "tanh")}

    def recorded(plain, dtypes, x, *rest, **options):
        dtypes.add(tf.as_dtype(x.dtype).name)
        return plain(x, *rest, **options)

    for name, dtypes in seen.items():
        operation = partial(recorded, getattr(fused.ops, name), dtypes)
        monkeypatch.setattr(fused.ops, name, operation)
    columns = make_examples(tiny)
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


def test_attention_scores_stay_in_range_in_float16(tiny, make_examples, hidden_of):
    """Scores of 1,000 before the division by the root of the head size would be infinite in float16."""
    blocks = build_blocks(tiny, seed=1, policy="float16")
    attention = dict(blocks)["hid_0"].attention
    for dense in (attention.query, attention.key):
        dense.bias.assign(tf.fill([32], 140.0))
    assert np.isfinite(hidden_of(blocks, make_examples(tiny)).numpy()).all()


def test_tokens_in_the_padding_have_no_effect(tiny, blocks_of, make_examples, hidden_of):
    columns = make_examples(tiny)
    other = {**columns, "input_ids": np.where(columns["input_mask"], columns["input_ids"], 50)}
    assert (other["input_ids"] != columns["input_ids"]).any()
    blocks = blocks_of("float32")
    np.testing.assert_array_equal(hidden_of(blocks, columns), hidden_of(blocks, other))


def test_a_block_recomputed_in_the_backward_pass_has_the_same_gradient(
    tiny, blocks_of, make_examples
):
    blocks = dict(blocks_of("float32"))
    columns = {name: tf.constant(column) for name, column in make_examples(tiny).items()}
    hidden = blocks["emb"](None, columns, KEY)
    key = tf.constant(KEY)

    @tf.function
    def plain():
        with tf.GradientTape() as tape:
            tape.watch(hidden)
            loss = tf.reduce_sum(blocks["hid_0"](hidden, columns, key) ** 3)
        return tape.gradient(loss, hidden)

    @tf.function
    def recomputed():
        y = blocks["hid_0"](hidden, columns, key)
        with tf.GradientTape() as tape:
            tape.watch(hidden)
            again = blocks["hid_0"](hidden, columns, key)
        return tape.gradient(again, hidden, output_gradients=3 * y**2)

    np.testing.assert_allclose(plain(), recomputed(), atol=1e-6)


def test_no_block_has_a_generator_state(tiny, blocks_of, make_examples, counts_of, gradients_of):
    """Two calls of one traced function: a hidden generator state would show as a difference."""
    columns = make_examples(tiny)
    step = tf.function(
        lambda: gradients_of(blocks_of("float32"), columns, counts_of(columns), tf.constant(KEY))
    )
    first, second = step(), step()
    assert first[0] == second[0]
    for name, gradient in first[2].items():
        np.testing.assert_array_equal(gradient, second[2][name])


def test_dropout_is_applied_as_in_the_paper(tiny, make_examples, hidden_of, monkeypatch):
    draws = []
    draw = fused.keep_mask

    def recorded(shape, rate, seed):
        draws.append((tuple(shape), rate, int(seed)))
        return draw(shape, rate, seed)

    monkeypatch.setattr(fused, "keep_mask", recorded)
    config = tiny.model_copy(
        update={"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3}
    )
    hidden_of(build_blocks(config, seed=1, policy="float32"), make_examples(tiny), KEY)
    # After the embeddings; in each layer on the probabilities and at the end of both halves.
    layer = [((4, 4, 16, 16), 0.3), ((4, 16, 32), 0.2), ((4, 16, 32), 0.2)]
    assert [draw[:2] for draw in draws] == [((4, 16, 32), 0.2), *layer, *layer]
    assert len({seed for _, _, seed in draws}) == len(draws) == 7
    hidden_of(build_blocks(config, seed=1, policy="float32"), make_examples(tiny), None)
    assert len(draws) == 7  # none without a key


def test_enc_out_gathers_the_first_position_and_the_masked_ones(tiny, blocks_of, make_examples):
    columns = make_examples(tiny)
    hidden = np.random.default_rng(0).normal(size=(4, 16, 32)).astype(np.float32)
    taken = dict(blocks_of("float32"))["enc_out"](hidden, columns, None).numpy()
    np.testing.assert_array_equal(taken[:, 0], hidden[:, 0])
    for example in range(4):
        np.testing.assert_array_equal(
            taken[example, 1:], hidden[example, columns["masked_lm_positions"][example]]
        )


def test_pool_changes_the_first_row_only(blocks_of):
    hidden = np.random.default_rng(0).normal(size=(4, 6, 32)).astype(np.float32)
    pooled = dict(blocks_of("float32"))["pool"](hidden, {}, None).numpy()
    np.testing.assert_array_equal(pooled[:, 1:], hidden[:, 1:])
    assert (pooled[:, 0] != hidden[:, 0]).all()
    assert (np.abs(pooled[:, 0]) < 1).all()
