"""The update of TensorFlow: which replica holds what, buckets, norms."""

import numpy as np
import pytest
import tensorflow as tf
from support.layouts import SHALLOW, settings_of, untraced

from bert_cli.parallel.engine import UpdateRequest
from bert_cli.parallel.tensorflow import update


def test_one_replica_holds_each_moment_in_the_memory_of_the_host():
    parallel = {"replicated_tensor_sharding": True, "optimizer_state_offload": True}
    settings = settings_of("2x1", model=SHALLOW, parallel=parallel)
    _, state, *_ = untraced(settings)
    for moment in state.slots.values():
        (variable,) = moment.variables
        assert variable.shape == moment.shape and variable.device.endswith("CPU:0")


def test_the_replica_with_the_smallest_share_owns_the_next_weight():
    sizes = {"bias": 1, "table": 30, "inner": 16, "output": 16, "query": 4}
    assert update.shares(sizes, 2) == [["table", "query"], ["inner", "output", "bias"]]
    assert update.shares(sizes, 1) == [["table", "inner", "output", "query", "bias"]]
    assert update.shares({"a": 1}, 3) == [["a"], [], []]


# An update in place and one on another device assign their results differently.
@pytest.mark.parametrize(
    "parallel", [{}, pytest.param({"optimizer_state_offload": True}, marks=pytest.mark.slow)]
)
def test_compiled_updates_are_the_plain_ones(parallel, monkeypatch):
    settings = settings_of("1x1", model=SHALLOW, parallel=parallel)
    # Of the word table and two kernels: every compilation takes a second.
    monkeypatch.setattr(update, "LARGE", 500)
    values = []
    for above in (update.UPDATES_WORTH_COMPILING, 0):
        monkeypatch.setattr(update, "UPDATES_WORTH_COMPILING", above)
        engine, state, *_ = untraced(settings)
        start, draw = (
            {name: w.numpy() for name, w in state.weights.items()},
            np.random.default_rng(3),
        )
        for step in range(2):
            for name, (gradient,) in engine.updates[0][0].accumulators.items():
                gradient.assign(draw.normal(0, 1e-3, start[name].shape))
            engine.apply_update(0.5, UpdateRequest(step=step, updates=step, learning_rate=0.01))
        moved = {name: weight.numpy() - start[name] for name, weight in state.weights.items()}
        values.append(moved | {name: slot.numpy() for name, slot in state.slots.items()})
    plain, compiled = values
    for name, value in plain.items():
        assert np.linalg.norm(compiled[name] - value) <= 2e-6 * np.linalg.norm(value), name
    assert any(np.any(plain[name] != compiled[name]) for name in plain)


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
