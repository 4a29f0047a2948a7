"""On JAX every precision, kind of batch, model and task has the numbers that it has on TensorFlow."""

import math
from functools import partial

import numpy as np
import pytest
from support.engine_runs import assert_same, difference, jax_process, moved_apart, on_tensorflow

SHALLOW = {"bert_config": {"num_hidden_layers": 1}}
FOUR = {"replicas": 2, "parallel": {"tensor": 2}}
# Weights that begin so small are stored exactly enough to measure what AdamW moves them by.
ADAMW = {
    "bert_config": {"num_hidden_layers": 1, "initializer_range": 0.02},
    "optimizer_opts": {"name": "AdamW", "learning_rate": {"max_learning_rate": 0.001}},
}
SHARDED = {"replicas": 2, "parallel": {"shard_weights": True}}


@pytest.fixture(scope="module")
def jax():
    with jax_process() as process:
        yield process


# Runs of TensorFlow in two layouts are up to 1.2e-6 apart: these models have little but biases, and few of them.
assert_same = partial(assert_same, weights_within=3e-6)


def both(jax, layout, **options):
    """Return the results of a run in a layout on JAX and on one device with TensorFlow."""
    return jax.start(**layout, **options).result(), on_tensorflow(**options)


FLOAT16 = {**ADAMW["optimizer_opts"], "loss_scaling": 512}
ROUNDED = {"stochastic_rounding": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "options", "rounding", "layout"),
    [
        ("mixed_bfloat16", {}, {}, FOUR),
        ("mixed_float16", {"loss_scaling": 512}, {}, FOUR),
        ("float16", FLOAT16, ROUNDED, SHARDED),
    ],
)
def test_a_precision_is_as_near_to_tensorflow_as_that_is_to_float32(
    precision, options, rounding, layout, jax
):
    """Both round in other places, and stochastic rounding draws other bits: so far apart is rounding alone."""
    chosen = {"precision": precision, "optimizer_opts": options | rounding}
    result, expected = both(jax, layout, **SHALLOW, **chosen)
    exact = on_tensorflow(**SHALLOW, optimizer_opts=options)
    for measure in (
        partial(apart, name="mlm_loss"),
        partial(apart, name="nsp_loss"),
        partial(apart, name="gradient_norm"),
        lambda one, other: difference(one.moments, other.moments),
        moved_apart,
    ):
        assert 0 < measure(result, expected) < 3 * measure(expected, exact), measure


def apart(one, other, name):
    """Return the largest relative difference of a metric in a step."""
    pairs = zip(one.metrics, other.metrics, strict=True)
    return max(abs(mine[name] / theirs[name] - 1) for mine, theirs in pairs)


def test_a_dynamic_loss_scale_skips_the_same_steps(jax):
    """It starts so high that the gradients of float16 overflow, and is halved until they do not."""
    result, expected = both(jax, FOUR, precision="mixed_float16", loss_scale=2**18, **SHALLOW)
    counts = [[metrics["skipped"] for metrics in run.metrics] for run in (result, expected)]
    assert counts[0] == counts[1] and 1 < counts[0][-1] < 8
    for name in ("loss_scale", "learning_rate"):
        assert [m[name] for m in result.metrics] == [m[name] for m in expected.metrics]
    finite = [math.isfinite(metrics["gradient_norm"]) for metrics in result.metrics]
    assert finite == [math.isfinite(metrics["gradient_norm"]) for metrics in expected.metrics]
    last, other = result.metrics[-1], expected.metrics[-1]
    assert last["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=1e-3)
    assert last["mlm_loss"] == pytest.approx(other["mlm_loss"], rel=1e-4)


@pytest.mark.slow
def test_packs_and_what_they_are_evaluated_and_predicted_to_be(jax):
    """Also five of them, which two replicas do not divide."""
    options = {"max_sequences_per_pack": 2, "scores": True, **ADAMW}
    result, expected = both(jax, FOUR, **options)
    assert_same(result, expected)
    assert_same_scores(result, expected)


def assert_same_scores(result, expected):
    for mine, other in zip(result.sums, expected.sums, strict=True):
        assert mine == pytest.approx(other, rel=1e-6)
    for mine, other in zip(result.logits, expected.logits, strict=True):
        assert mine.shape == other.shape
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-5 * np.abs(other).max())


GROUP = {"architecture": "groupbert", "conv_group_size": 8, "ffn_groups": 2}


@pytest.mark.slow
def test_groupbert(jax):
    parallel = {"tensor": 2, "recompute": True, "shard_weights": True}
    assert_same(*both(jax, {"replicas": 2, "parallel": parallel}, bert_config=GROUP))


# At 16 positions JAX computes the local layers in blocks, TensorFlow all scores. Recomputation repeats layers 1 and 2.
MODERN = {
    "architecture": "modernbert",
    "num_hidden_layers": 6,
    "local_attention": 4,
    "global_attn_every_n_layers": 2,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"replicas": 2, "parallel": {"tensor": 2, "recompute": True}},
        {"parallel": {"tensor": [2, 2], "shard_weights": True}},
        {"parallel": {"embedding_serialization_factor": 3}},
    ],
)
def test_modernbert(layout, jax):
    result, expected = both(jax, layout, bert_config=MODERN)
    assert_same(result, expected)
    assert "nsp_loss" not in expected.metrics[0]


@pytest.mark.slow
def test_stable_adamw_divides_by_the_size_of_complete_gradients(jax):
    options = ADAMW["optimizer_opts"] | {"name": "StableAdamW"}
    layout = {"replicas": 2, "parallel": {"tensor": 2, "shard_weights": True}}
    assert_same(*both(jax, layout, **ADAMW | {"optimizer_opts": options}))


@pytest.mark.slow
def test_unit_scaling(jax):
    rate = {"name": "AdamW", "learning_rate": {"max_learning_rate": 0.05}}
    options = {"scaling": "unit", "optimizer_opts": rate | {"max_gradient_norm": None}}
    options["bert_config"] = {"initializer_range": 0.02}
    layout = {"replicas": 2, "parallel": {"tensor": 2, "recompute": True}}
    assert_same(*both(jax, layout, **options), weights_within=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "labels"), [("Squad", 2), ("Glue", 3), ("Glue", 1), ("Ner", 5)])
def test_a_task_is_trained_scored_and_predicted(kind, labels, jax):
    options = {"kind": kind, "labels": labels, "scores": True}
    if kind == "Squad":
        options |= {"max_seq_length": 32, "doc_stride": 8, "max_query_length": 8}
    model = {"bert_config": ADAMW["bert_config"] | {"max_position_embeddings": 32}}
    result, expected = both(jax, FOUR, **ADAMW | model, **options)
    assert_same(result, expected)
    assert_same_scores(result, expected)
