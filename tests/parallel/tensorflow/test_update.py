"""The update of TensorFlow: moments in shards, compiled updates, buckets, overflow on one replica, norms."""

import math

import numpy as np
import pytest
import tensorflow as tf
from support.engine_runs import KEY_BIAS, assert_same, case, on_tensorflow, run
from support.layouts import SHALLOW, accumulate, built, engine_of, settings_of

from bert_cli.errors import ConfigError
from bert_cli.parallel.tensorflow import update

SHARDED = {"replicated_tensor_sharding": True}
OFFLOADED = {"optimizer_state_offload": True}


def first_gradients(engine, reader):
    """Return the gradients of the first four micro-batches of the stream, with dropout."""
    batch = {name: column[:4] for name, column in reader[0].items()}
    return accumulate(engine, batch)[1]


def test_an_optimizer_that_needs_complete_weights_is_refused_with_sharded_moments():
    stable = {"model": SHALLOW, "optimizer": {"name": "StableAdamW"}}
    with pytest.raises(ConfigError, match="an update of this optimizer needs complete weights"):
        built(settings_of("2x1", **stable, parallel=SHARDED), updates=False)


def test_a_replica_holds_its_shard_of_each_moment_in_the_memory_of_the_host():
    settings = settings_of("2x1", model=SHALLOW, parallel=SHARDED | OFFLOADED)
    _, state, *_ = built(settings, updates=False)
    for shard in state.slots.values():
        assert shard.variables[0].shape[0] == -(-math.prod(shard.shape) // 2)
        assert all(variable.device.endswith("CPU:0") for variable in shard.variables)


# In place, on another device than the weights, and on shards: each assigns other results.
@pytest.mark.parametrize(
    ("replicas", "parallel"),
    [
        (1, {}),
        pytest.param(1, OFFLOADED, marks=pytest.mark.slow),
        pytest.param(2, SHARDED, marks=pytest.mark.slow),
    ],
)
def test_compiled_updates_are_the_plain_ones(monkeypatch, replicas, parallel):
    plain = on_tensorflow(replicas=replicas, parallel=parallel)
    monkeypatch.setattr(update, "UPDATES_WORTH_COMPILING", 0)
    # Of the word table alone: every compilation takes a second.
    monkeypatch.setattr(update, "LARGE", 600)
    compiled = run.__wrapped__(case("tensorflow", replicas=replicas, parallel=parallel))
    assert_same(compiled, plain)
    names = [name for name in plain.weights if KEY_BIAS not in name]
    assert any((compiled.weights[name] != plain.weights[name]).any() for name in names), "compiled"


def test_small_buckets_add_up_to_the_same_bits(monkeypatch):
    engine, reader = engine_of("2x1", model=SHALLOW)
    assert len(engine.updates[0][0].buckets) == 1
    expected = first_gradients(engine, reader)
    monkeypatch.setattr(update, "buckets", lambda sizes, most: [[name] for name in sizes])
    engine, *_ = built(settings_of("2x1", model=SHALLOW), updates=False)
    assert len(engine.updates[0][0].buckets) > 1
    for name, gradient in first_gradients(engine, reader).items():
        np.testing.assert_array_equal(gradient, expected[name], err_msg=name)


def test_a_gradient_that_overflows_on_one_replica_updates_no_weight_on_any(monkeypatch):
    engine, state, step, reader = built(settings_of("2x1", model=SHALLOW))
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
    for number in (1, 2):  # the rate of the first update is that of the warm-up
        assert step(reader[number])["skipped"] == 1
    assert all((weight.numpy() != before[name]).any() for name, weight in state.weights.items())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_squared_norm_of_millions_of_elements_is_exact_to_float32(dtype):
    tensor = tf.cast(tf.random.stateless_normal([3000, 768], [1, 2]) + 1.0, dtype)
    exact = np.sum(tensor.numpy().astype(np.float64) ** 2)
    assert float(update.squared_norm([tensor, tensor])) == pytest.approx(2 * exact, rel=3e-7)
    assert float(update.squared_norm([])) == 0.0


def test_buckets_have_at_most_their_size_or_one_weight():
    sizes = {"a": 3, "b": 4, "c": 30, "d": 1, "e": 9, "f": 1}
    assert update.buckets(sizes, 10) == [["a", "b"], ["c"], ["d", "e"], ["f"]]
    assert update.buckets({}, 10) == []
