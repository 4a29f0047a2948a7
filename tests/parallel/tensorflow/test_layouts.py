"""The numbers do not depend on the layout: replicas, stages, schedules, recomputation, all-reduces, updates."""

import json
import math
from collections.abc import Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from support.layouts import (
    KEY_BIAS,
    SHALLOW,
    accumulate,
    assert_close,
    built,
    engine_of,
    settings_of,
)

from bert_cli.errors import ConfigError
from bert_cli.parallel.tensorflow import update
from bert_cli.parallel.tensorflow.engine import TensorFlowEngine
from bert_cli.train import checkpoint
from bert_cli.train.loop import State, Step, copy_state

GROUP = {"architecture": "groupbert", "conv_group_size": 4, "ffn_groups": 2}
MODERN = {"architecture": "modernbert", "num_hidden_layers": 4, "local_attention": 2}
BY_LAYER = {"recompute": True}
OFFLOADED = {"optimizer_state_offload": True}
SHARDED = {"replicated_tensor_sharding": True}
LAMB = {"optimizer": {"max_gradient_norm": 0.05}}
CLIPPED = {"optimizer": {"name": "AdamW", "max_gradient_norm": 0.5}, "model": SHALLOW}
ROUNDING = {"stochastic_rounding": True, "loss_scaling": 64.0}
ROUNDED = {**CLIPPED, "precision": "float16", "optimizer": CLIPPED["optimizer"] | ROUNDING}
STEPS = 4
# At the learning rate of the tests, in both directions.
WANDER = 2 * STEPS * 0.01
slow = partial(pytest.param, marks=pytest.mark.slow)


def assert_equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name, value in b.items():
        np.testing.assert_array_equal(a[name], value, err_msg=name)


def arrays_of(values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: value.numpy().copy() for name, value in values.items()}


def first_step(engine, reader, micro_batches: int = 4):
    """Return the sums and gradients of the first micro-batches of the stream, with dropout."""
    batch = {name: column[:micro_batches] for name, column in reader[0].items()}
    return accumulate(engine, batch)


class Run(NamedTuple):
    """What some steps leave behind."""

    gradients: dict[int, Any]  # number of micro-batches -> sums and gradients at the first weights
    clipped_norm: float  # of the first gradient, by the first moments after it
    weights: dict[str, np.ndarray]
    moments: dict[str, np.ndarray]
    metrics: list[dict[str, float]]
    engine: TensorFlowEngine
    state: State
    step: Step
    reader: Any


def run_of(layout: str, **changes) -> Run:
    return _run_of(json.dumps([layout, changes], sort_keys=True))


@cache
def _run_of(described: str) -> Run:
    layout, changes = json.loads(described)
    return make_run(layout, **changes)


def make_run(layout: str, **changes) -> Run:
    engine, state, step, reader = built(settings_of(layout, 4, **changes))
    gradients = {number: first_step(engine, reader, number) for number in (2, 4)}
    engine.clear_gradients()
    metrics = [step(reader[0])]
    firsts = [slot for name, slot in state.slots.items() if name.endswith("/moment1")]
    squares = [np.sum(first.numpy() ** 2, dtype=np.float64) for first in firsts]
    metrics += [step(reader[number]) for number in range(1, STEPS)]
    # The first moment is 1 - beta_1 of the gradient.
    clipped_norm = 10 * math.sqrt(sum(squares))
    values = arrays_of(state.weights), arrays_of(state.slots)
    return Run(gradients, clipped_norm, *values, metrics, engine, state, step, reader)


@pytest.mark.slow
def test_some_steps_of_replicated_pipelines_are_those_of_one_device():
    run, expected = run_of("2x2", **LAMB), run_of("1x1", **LAMB)
    for micro_batches, (sums, gradient) in run.gradients.items():
        expected_sums, expected_gradient = expected.gradients[micro_batches]
        assert sums == pytest.approx(expected_sums, rel=1e-6)
        assert_close(gradient, expected_gradient, 1e-6)
    assert run.metrics[0]["gradient_norm"] > 0.1
    assert run.clipped_norm == pytest.approx(0.05, rel=1e-4)
    # Rounding; the first steps of LAMB divide by the root of tiny second moments.
    assert_close(run.weights, expected.weights, 1e-5, WANDER)
    for ours, other in zip(run.metrics, expected.metrics, strict=True):
        assert ours["mlm_loss"] == pytest.approx(other["mlm_loss"], rel=1e-5)
        assert ours["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=1e-4)
        assert ours["weight_norm"] == pytest.approx(other["weight_norm"], rel=1e-6)
    for name, weight in run.state.weights.items():
        for replica in weight.variables[1:]:
            np.testing.assert_array_equal(replica.numpy(), weight.numpy(), err_msg=name)


@pytest.mark.parametrize(
    ("layout", "parallel", "model"),
    [
        # The last stage of the others has no layer, so no dropout, to recompute.
        ("1x1", BY_LAYER, {}),
        ("1x2", BY_LAYER, {}),
        ("5 stages on 4 devices", {}, {}),
        slow("gather alone", {}, {}),
        slow("2x2", BY_LAYER, {}),
        slow("1x2", BY_LAYER, GROUP),
        ("1x2 without pool", BY_LAYER, MODERN),
    ],
)
def test_loss_and_gradients_are_those_of_one_device(layout, parallel, model):
    expected_sums, expected = first_step(*engine_of(model=model))
    sums, gradient = first_step(*engine_of(layout, model=model, parallel=parallel))
    assert sums == pytest.approx(expected_sums, rel=1e-6)
    assert_close(gradient, expected, 1e-6)


def test_an_optimizer_that_needs_complete_weights_is_refused_with_sharded_moments():
    stable = {"model": SHALLOW, "optimizer": {"name": "StableAdamW"}}
    with pytest.raises(ConfigError, match="an update of this optimizer needs complete weights"):
        built(settings_of("2x1", **stable, parallel=SHARDED), updates=False)


@pytest.mark.slow
def test_sharded_moments_of_lamb_give_the_same_weights():
    expected, sharded = run_of("2x2", **LAMB), run_of("2x2", **LAMB, parallel=SHARDED)
    # The norm of a complete weight adds up in another order than those of its shards: of the weights after ten
    # LAMB steps the worst, a bias, differs by 1.04e-6 of its norm, a tenth of what layouts may differ by.
    assert_close(sharded.weights, expected.weights, 2e-6, WANDER)
    for name, moment in expected.moments.items():
        np.testing.assert_allclose(sharded.moments[name], moment, rtol=1e-4, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("options", [CLIPPED, ROUNDED])
def test_sharded_and_offloaded_moments_give_the_same_bits(options):
    """With clipping, and with random rounding: a shard is rounded as in the complete weight."""
    expected = run_of("2x1", **options)
    run = run_of("2x1", **options, parallel=SHARDED | OFFLOADED)
    assert_equal(run.weights, expected.weights)
    assert_equal(run.moments, expected.moments)
    for shard in run.state.slots.values():
        assert shard.variables[0].shape[0] == -(-math.prod(shard.shape) // 2)
        assert all(variable.device.endswith("CPU:0") for variable in shard.variables)


def test_a_checkpoint_passes_from_shards_to_complete_moments_and_back(tmp_path):
    """A run that resumes it does the next step like the run that saved it."""
    form = checkpoint.Format(to_disk=dict, from_disk=dict, config={})
    complete = run_of("2x1", **CLIPPED)
    sharded = run_of("2x1", **CLIPPED, parallel=SHARDED | OFFLOADED)
    for saves, resumes in ((sharded, complete), (complete, sharded)):
        number = saves.state.step + 1
        saves.step(saves.reader[number - 1])
        path = checkpoint.save(tmp_path, copy_state(saves.state), form, fixed={}, settings={})
        checkpoint.resume(checkpoint.Saved(path), resumes.state, form, {})
        for run in (saves, resumes):
            run.step(run.reader[number])
        assert resumes.state.step == number + 1
        assert_equal(arrays_of(resumes.state.weights), arrays_of(saves.state.weights))
        assert_equal(arrays_of(resumes.state.slots), arrays_of(saves.state.slots))


# In place, on another device than the weights, and on shards: each assigns other results.
@pytest.mark.parametrize(
    ("layout", "parallel"), [("1x1", {}), slow("1x1", OFFLOADED), slow("2x1", SHARDED)]
)
def test_compiled_updates_are_the_plain_ones(monkeypatch, layout, parallel):
    options = {**LAMB, **({"parallel": parallel} if parallel else {})}
    plain = run_of(layout, **options)
    monkeypatch.setattr(update, "UPDATES_WORTH_COMPILING", 0)
    # Of the word table alone: every compilation takes a second.
    monkeypatch.setattr(update, "LARGE", 600)
    compiled = make_run(layout, **options)
    devices = [device for replica in compiled.engine.updates for device in replica]
    assert all(any(key[2] for key in device.functions) for device in devices)
    assert_close(compiled.weights, plain.weights, 1e-5, WANDER)
    for name, moment in compiled.moments.items():
        if KEY_BIAS not in name:  # whose gradient is nothing but rounding
            expected = plain.moments[name]
            largest = np.abs(expected).max()
            np.testing.assert_allclose(moment, expected, rtol=1e-4, atol=1e-6 * largest)


def test_small_buckets_add_up_to_the_same_bits(monkeypatch):
    expected_engine, reader = engine_of("2x1", model=SHALLOW)
    assert len(expected_engine.updates[0][0].buckets) == 1
    _, expected = first_step(expected_engine, reader)
    monkeypatch.setattr(update, "buckets", lambda sizes, most: [[name] for name in sizes])
    engine, *_ = built(settings_of("2x1", model=SHALLOW), updates=False)
    assert len(engine.updates[0][0].buckets) > 1
    _, gradient = first_step(engine, reader)
    assert_equal(gradient, expected)


def test_a_gradient_that_overflows_on_one_replica_updates_no_weight_on_any(monkeypatch):
    *_, engine, state, step, reader = run_of("2x1", **CLIPPED)
    before = arrays_of(state.weights)
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
    assert step(reader[1])["skipped"] == 1
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
