"""The update of TensorFlow: moments in shards, compiled updates, buckets, overflow on one replica, norms."""

import numpy as np
import pytest
import tensorflow as tf
from support.engine_runs import KEY_BIAS, assert_same, case, on_tensorflow, run
from support.layouts import SHALLOW, accumulate, built, settings_of, untraced

from bert_cli.parallel.tensorflow import update

SHARDED = {"replicated_tensor_sharding": True}
OFFLOADED = {"optimizer_state_offload": True}


def first_gradients(engine, reader):
    """Return the gradients of the first four micro-batches of the stream, with dropout."""
    batch = {name: column[:4] for name, column in reader[0].items()}
    return accumulate(engine, batch)[1]


def test_one_replica_holds_each_moment_in_the_memory_of_the_host():
    settings = settings_of("2x1", model=SHALLOW, parallel=SHARDED | OFFLOADED)
    _, state, *_ = untraced(settings)
    for moment in state.slots.values():
        (variable,) = moment.variables
        assert variable.shape == moment.shape and variable.device.endswith("CPU:0")


def test_the_replica_with_the_smallest_share_owns_the_next_weight():
    sizes = {"bias": 1, "table": 30, "inner": 16, "output": 16, "query": 4}
    assert update.shares(sizes, 2) == [["table", "query"], ["inner", "output", "bias"]]
    assert update.shares(sizes, 1) == [["table", "inner", "output", "query", "bias"]]
    assert update.shares({"a": 1}, 3) == [["a"], [], []]


# In place, and on another device than the weights: each assigns other results.
@pytest.mark.parametrize("parallel", [{}, pytest.param(OFFLOADED, marks=pytest.mark.slow)])
def test_compiled_updates_are_the_plain_ones(monkeypatch, parallel):
    plain = on_tensorflow(bert_config=SHALLOW, parallel=parallel)
    monkeypatch.setattr(update, "UPDATES_WORTH_COMPILING", 0)
    # Of the word table alone: every compilation takes a second.
    monkeypatch.setattr(update, "LARGE", 600)
    compiled = run.__wrapped__(case("tensorflow", bert_config=SHALLOW, parallel=parallel))
    assert_same(compiled, plain)
    names = [name for name in plain.weights if KEY_BIAS not in name]
    assert any((compiled.weights[name] != plain.weights[name]).any() for name in names), "compiled"


@pytest.fixture(scope="module")
def two():
    """A run on two replicas."""
    return built(settings_of("2x1", model=SHALLOW))


def test_small_buckets_add_up_to_the_same_bits(two, monkeypatch):
    complete, _, _, reader = two
    assert len(complete.updates[0][0].reductions) == 1
    expected = first_gradients(complete, reader)
    monkeypatch.setattr(update, "REDUCE_BUCKET", 1)
    engine, *_ = built(settings_of("2x1", model=SHALLOW), updates=False)
    assert len(engine.updates[0][0].reductions) == len(engine.weights)
    for name, weight in engine.weights.items():
        weight.assign(complete.weights[name].numpy())
    for name, gradient in first_gradients(engine, reader).items():
        np.testing.assert_array_equal(gradient, expected[name], err_msg=name)


def test_a_loss_scale_changes_no_number():
    """Nor the norm, which is clipped: the scale is a power of two."""
    plain, scaled = (
        on_tensorflow(bert_config=SHALLOW, parallel={}, **options)
        for options in ({}, {"optimizer_opts": {"loss_scaling": 4096.0}})
    )
    assert {row["loss_scale"] for row in scaled.metrics} == {4096.0}
    rows = [row | {"loss_scale": 1.0} for row in scaled.metrics]
    assert_same(scaled._replace(metrics=rows), plain)


def test_a_gradient_that_overflows_on_one_replica_updates_no_weight_on_any(two, monkeypatch):
    engine, state, step, reader = two
    before = {name: weight.numpy().copy() for name, weight in state.weights.items()}
    # Of the second replica alone, whose micro-batches the first one does not have.
    poisoned = engine.replicas[1][0].accumulators["hid_0/attention/query/kernel"]
    all_reduce = engine.all_reduce_gradients

    def poison_and_reduce():
        poisoned.assign_add(np.full(poisoned.shape, np.nan, np.float32))
        return all_reduce()

    with monkeypatch.context() as patch:
        patch.setattr(engine, "all_reduce_gradients", poison_and_reduce)
        assert step(reader[0])["skipped"] == 1
    for name, weight in state.weights.items():
        for replica in weight.variables:
            np.testing.assert_array_equal(replica.numpy(), before[name])
    assert not any(moment.numpy().any() for moment in state.slots.values())
    for number in (1, 2):  # the rate of the first update is that of the warm-up
        assert step(reader[number])["skipped"] == 1
    assert all((weight.numpy() != before[name]).any() for name, weight in state.weights.items())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_squared_norm_of_millions_of_elements_is_exact_to_float32(dtype):
    tensor = tf.cast(tf.random.stateless_normal([3000, 768], [1, 2]) + 1.0, dtype)
    exact = np.sum(tensor.numpy().astype(np.float64) ** 2)
    assert float(update.squared_norm([tensor, tensor])) == pytest.approx(2 * exact, rel=3e-7)
    assert float(update.squared_norm([])) == 0.0


def test_buckets_have_at_most_their_size_or_one_weight(monkeypatch):
    monkeypatch.setattr(update, "REDUCE_BUCKET", 4 * 10)  # float32
    sizes = {"a": 3, "b": 4, "c": 30, "d": 1, "e": 9, "f": 1}
    assert update.buckets(sizes) == [["a", "b"], ["c"], ["d", "e"], ["f"]]
    assert update.buckets({}) == []
