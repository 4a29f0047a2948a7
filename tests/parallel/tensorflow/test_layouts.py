"""The numbers do not depend on the layout: replicas, stages, schedules, recomputation, precision of all-reduces."""

import json
from typing import Any

import numpy as np
import pytest
from support.layouts import (
    LAYOUTS,
    SHALLOW,
    accumulate,
    assert_close,
    assert_weights_close,
    built,
    engine_of,
    settings_of,
)

from bert_cli.parallel.tensorflow.schedule import SCHEDULES
from bert_cli.train import checkpoint
from bert_cli.train.checkpoint import checkpoint_name
from bert_cli.train.loop import State

BY_LAYER = {"recompute": True}
BY_STAGE = {"recompute": True, "recompute_by": "stage"}
SHARDED = {"replicated_tensor_sharding": True}
RUNS: dict[str, tuple[dict[str, Any], list[dict[str, float]], State]] = {}
# Ten steps at the learning rate of the tests, in both directions.
WANDER = 2 * 10 * 0.01


def first_step(engine, reader, micro_batches: int, first_index: int = 0):
    """Return the sums and gradients of the first micro-batches of the stream, with dropout."""
    batch = {name: column[:micro_batches] for name, column in reader[0].items()}
    return accumulate(engine, batch, first_index)


@pytest.fixture(scope="module")
def one_device():
    """Number of micro-batches -> sums and gradients of one device."""
    engine, reader = engine_of("1x1")
    return {number: first_step(engine, reader, number) for number in (1, 2, 4)}


@pytest.mark.parametrize(
    ("layout", "parallel"),
    [
        *((layout, {}) for layout in ("2x1", "1x2", "2x2", "gather alone")),
        ("1x1", BY_LAYER),
        ("2x2", BY_LAYER),
        ("1x2", BY_STAGE),
    ],
)
def test_loss_and_gradients_are_those_of_one_device(layout, parallel, one_device):
    engine, reader = engine_of(layout, parallel=parallel)
    # A replica has at least one micro-batch.
    for micro_batches in (LAYOUTS[layout][0], 4):
        sums, gradient = first_step(engine, reader, micro_batches)
        expected_sums, expected = one_device[micro_batches]
        for name, value in expected_sums.items():
            assert sums[name] == pytest.approx(value, rel=1e-6), name
        assert_close(gradient, expected, 1e-6)


def test_the_schedule_changes_no_bit_and_saves_activations_as_promised(one_device):
    saved, gradients = {}, {}
    for schedule in SCHEDULES:
        engine, reader = engine_of("5 stages on 4 devices", parallel={"schedule": schedule})
        _, gradients[schedule] = first_step(engine, reader, 4)
        saved[schedule] = engine.max_in_flight
    for name, gradient in gradients["1F1B"].items():
        np.testing.assert_array_equal(gradients["GPipe"][name], gradient, err_msg=name)
    assert_close(gradients["1F1B"], one_device[4][1], 1e-6)
    # Stage k of 5 saves those of at most 5 - k micro-batches, and there are 4.
    assert all(most <= 5 - stage for stage, most in enumerate(saved["1F1B"]))
    assert saved["GPipe"] == [4, 4, 4, 4, 1]


def test_another_dropout_would_be_seen(one_device):
    """The comparison can fail: a micro-batch with the dropout of another index differs by far more than 1e-6."""
    _, gradient = first_step(*engine_of("1x1"), 1, first_index=1)
    with pytest.raises(AssertionError):
        assert_close(gradient, one_device[1][1], 1e-3)


def ten_steps(layout: str, **changes):
    """Return the weights after ten steps, the metrics of each, and the state; each run is made once."""
    described = json.dumps([layout, changes], sort_keys=True)
    if described not in RUNS:
        _, state, step, reader = built(settings_of(layout, 4, **changes))
        metrics = [step(reader[number]) for number in range(10)]
        weights = {name: weight.numpy() for name, weight in state.weights.items()}
        RUNS[described] = weights, metrics, state
    return RUNS[described]


def test_weights_after_ten_lamb_steps_are_those_of_one_device():
    weights, metrics, state = ten_steps("2x2")
    expected, expected_metrics, _ = ten_steps("1x1")
    # Ten steps of rounding; the first steps of LAMB divide by the root of tiny second moments.
    assert_weights_close(weights, expected, 1e-5, WANDER)
    for ours, other in zip(metrics, expected_metrics, strict=True):
        assert ours["mlm_loss"] == pytest.approx(other["mlm_loss"], rel=1e-5)
        assert ours["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=1e-4)
        assert ours["weight_norm"] == pytest.approx(other["weight_norm"], rel=1e-6)
    for name, weight in state.weights.items():
        for replica in weight.variables[1:]:
            np.testing.assert_array_equal(replica.numpy(), weight.numpy(), err_msg=name)


CLIPPED = {"optimizer": {"name": "AdamW", "max_gradient_norm": 0.5}, "model": SHALLOW}


@pytest.mark.parametrize(("layout", "options"), [("2x2", {}), ("2x1", CLIPPED)])
def test_sharded_moments_give_the_same_weights(layout, options):
    expected, _, state = ten_steps(layout, **options)
    weights, _, sharded = ten_steps(layout, **options, parallel=SHARDED)
    if options == CLIPPED:
        for name, weight in expected.items():
            np.testing.assert_array_equal(weights[name], weight, err_msg=name)
    else:
        # The norm of a complete weight adds up in another order than those of its shards: of the weights after ten
        # LAMB steps the worst, a bias, differs by 1.04e-6 of its norm, a tenth of what layouts may differ by.
        assert_weights_close(weights, expected, 2e-6, WANDER)
    for name, pair in state.moments.items():
        for moment, shard in zip(pair, sharded.moments[name], strict=True):
            np.testing.assert_allclose(shard.numpy(), moment.numpy(), rtol=1e-4, atol=1e-8)
            assert shard.variables[0].shape[0] == -(-moment.numpy().size // 2)


@pytest.mark.parametrize(("layout", "parallel"), [("1x1", {}), ("2x2", SHARDED)])
def test_offloaded_moments_give_the_same_bits(layout, parallel):
    expected, _, _ = ten_steps(layout, **({"parallel": parallel} if parallel else {}))
    weights, _, state = ten_steps(layout, parallel={**parallel, "optimizer_state_offload": True})
    for name, weight in expected.items():
        np.testing.assert_array_equal(weights[name], weight, err_msg=name)
    devices = {v.device for pair in state.moments.values() for m in pair for v in m.variables}
    assert len(devices) == 1 and devices.pop().endswith("CPU:0")


def test_random_rounding_of_shards_is_that_of_the_complete_weight():
    options = {
        "precision": "float16",
        "optimizer": {"name": "AdamW", "stochastic_rounding": True, "loss_scaling": 64.0},
        "model": SHALLOW,
    }
    expected, _, _ = ten_steps("2x1", **options)
    weights, _, _ = ten_steps("2x1", **options, parallel=SHARDED)
    for name, weight in expected.items():
        assert weight.dtype == np.float16
        np.testing.assert_array_equal(weights[name], weight, err_msg=name)


@pytest.mark.parametrize(("precision", "tolerance"), [("float16", 2e-3), ("bfloat16", 1e-2)])
def test_gradients_may_be_all_reduced_in_16_bits(precision, tolerance):
    _, expected = first_step(*engine_of("2x1", model=SHALLOW), 4)
    short = engine_of("2x1", model=SHALLOW, parallel={"reduce_precision": precision})
    _, gradient = first_step(*short, 4)
    assert_close(gradient, expected, tolerance)
    assert any((gradient[name] != other).any() for name, other in expected.items())


def test_small_buckets_add_up_to_the_same_bits():
    expected_engine, reader = engine_of("2x1", model=SHALLOW)
    assert len(expected_engine.updates[0][0].buckets) == 1
    _, expected = first_step(expected_engine, reader, 4)
    engine, _, _, _ = built(settings_of("2x1", model=SHALLOW), updates=False)
    for row in engine.updates:
        for update in row:
            update.make_functions([[name] for name in update.weights])
    _, gradient = first_step(engine, reader, 4)
    for name, value in gradient.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


def test_a_gradient_that_overflows_on_one_replica_updates_no_weight_on_any(monkeypatch):
    engine, state, step, reader = built(settings_of("2x1", 4, model=SHALLOW))
    before = {name: weight.numpy().copy() for name, weight in state.weights.items()}
    # Of the second replica alone, whose micro-batches the first one does not have.
    poisoned = engine.replicas[1][0].accumulators["hid_0/attention/query/kernel"]
    all_reduce = engine.all_reduce_gradients

    def poison_and_reduce(shrink):
        poisoned.assign_add(np.full(poisoned.shape, np.nan, np.float32))
        return all_reduce(shrink)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "all_reduce_gradients", poison_and_reduce)
        assert step(reader[0])["skipped"] == 1
    for name, weight in state.weights.items():
        for replica in weight.variables:
            np.testing.assert_array_equal(replica.numpy(), before[name])
    assert step(reader[1])["skipped"] == 1
    assert all((weight.numpy() != before[name]).any() for name, weight in state.weights.items())


def test_clipping_is_of_the_complete_gradient_of_all_stages_and_replicas():
    """By the first moments after one step: AdamW's weights do not depend on the size of the gradient."""
    options = {"optimizer": {"name": "AdamW", "max_gradient_norm": 0.01}}
    _, state, step, reader = built(settings_of("2x2", 4, **options))
    assert step(reader[0])["gradient_norm"] > 0.1
    squared = sum(
        np.square(first.numpy(), dtype=np.float64).sum() for first, _ in state.moments.values()
    )
    # 1 - beta_1 of a gradient whose norm is the limit.
    assert np.sqrt(squared) == pytest.approx(0.1 * 0.01, rel=1e-4)


def test_a_checkpoint_passes_through_layouts_with_other_shards(tmp_path):
    """Sharded over two, then over four and offloaded, then complete: another layout after each two steps."""
    _, state, step, reader = built(settings_of("1x1", model=SHALLOW))
    for number in range(6):
        step(reader[number])
    expected = {name: weight.numpy() for name, weight in state.weights.items()}
    layouts = [
        ("2x1", SHARDED),
        ("4x1", {**SHARDED, "optimizer_state_offload": True}),
        ("1x1", {}),
    ]
    for number, (layout, parallel) in enumerate(layouts):
        _, state, step, reader = built(settings_of(layout, parallel=parallel, model=SHALLOW))
        form = checkpoint.Format(to_disk=dict, from_disk=dict, config={})
        if number:
            checkpoint.resume(tmp_path / checkpoint_name(2 * number), state, form, {})
        assert state.step == 2 * number
        for _ in range(2):
            step(reader[state.step])
        checkpoint.save(tmp_path, state, form, fixed={}, settings={}, versions={})
    weights = {name: weight.numpy() for name, weight in state.weights.items()}
    assert_weights_close(weights, expected, 1e-5, WANDER)
