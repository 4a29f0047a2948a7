"""Numbers do not depend on the layout: replicas, stages, schedules, recomputation, precision of sums."""

import json
from typing import Any

import numpy as np
import pytest
from support.layouts import (
    LAYOUTS,
    assert_close,
    assert_weights_close,
    built,
    gradients,
    settings_of,
)

from bert_cli.model.heads import PretrainingHeads
from bert_cli.parallel.engine import count
from bert_cli.parallel.tensorflow.schedule import SCHEDULES
from bert_cli.train import checkpoint
from bert_cli.train.folder import checkpoint_name
from bert_cli.train.step import State

TABLE = [name for name in LAYOUTS if name != "4x1"]
SPREAD = [name for name in TABLE if name not in ("1x1", "gather alone")]
RECOMPUTE = {
    "kept": {},
    "layer": {"recompute": True},
    "stage": {"recompute": True, "recompute_by": "stage"},
}
MICRO_BATCHES = (1, 4)
# Where there are no stages, one layer has all that can differ, and is there in a third of the time.
SHALLOW = {"num_hidden_layers": 1}
MADE: dict[str, tuple[dict[str, Any], list[dict[str, float]], State]] = {}
# Ten steps at the learning rate of the tests, in both directions.
WANDER = 2 * 10 * 0.01


def first_step(engine, reader, micro_batches: int, position: int = 0):
    """Sums and gradients of the first micro-batches of the stream, with dropout."""
    engine.clear_gradients()
    batch = reader[0]
    batch = {name: column[:micro_batches] for name, column in batch.items()}
    sums = engine.accumulate(batch, position, count(batch, PretrainingHeads.COUNTS), 1.0)
    squared = engine.all_reduce_gradients(1.0)
    found = gradients(engine)
    whole = sum(np.square(gradient, dtype=np.float64).sum() for gradient in found.values())
    assert squared == pytest.approx(whole, rel=1e-5)
    return sums, found


def engine_of(layout: str, micro_batches: int = 4, **changes):
    engine, _, _, reader = built(settings_of(layout, micro_batches, **changes), moves=False)
    return engine, reader


@pytest.fixture(scope="module")
def one_device():
    """Micro-batches -> sums and gradients of one device."""
    engine, reader = engine_of("1x1")
    return {number: first_step(engine, reader, number) for number in (*MICRO_BATCHES, 2)}


# Recomputation is a stage's own affair: three layouts have every kind of stage.
@pytest.mark.parametrize(
    ("layout", "recompute"),
    [
        *((layout, "kept") for layout in TABLE),
        *((layout, kind) for layout in ("1x1", "2x2", "1x4") for kind in ("layer", "stage")),
    ],
)
def test_loss_and_gradients_are_those_of_one_device(layout, recompute, one_device):
    engine, reader = engine_of(layout, parallel=RECOMPUTE[recompute])
    for micro_batches in MICRO_BATCHES:
        # A replica has at least one.
        micro_batches = max(micro_batches, LAYOUTS[layout][0])
        sums, found = first_step(engine, reader, micro_batches)
        wanted_sums, wanted = one_device[micro_batches]
        for name, value in wanted_sums.items():
            assert sums[name] == pytest.approx(value, rel=1e-6), name
        assert_close(found, wanted, 1e-6)


def test_the_schedule_changes_no_bit_and_keeps_what_it_says(one_device):
    kept, found = {}, {}
    for schedule in SCHEDULES:
        engine, reader = engine_of("5 stages on 4 devices", parallel={"schedule": schedule})
        _, found[schedule] = first_step(engine, reader, 4)
        kept[schedule] = engine.max_in_flight
    for name, gradient in found["1F1B"].items():
        np.testing.assert_array_equal(found["GPipe"][name], gradient, err_msg=name)
    # Stage k of 5 keeps at most 5 - k, and there are 4.
    assert all(most <= 5 - stage for stage, most in enumerate(kept["1F1B"]))
    assert kept["GPipe"] == [4, 4, 4, 4, 1]


def test_another_dropout_would_be_seen(one_device):
    """The comparison can fail: a micro-batch drawn at another position is far from 1e-6."""
    engine, reader = engine_of("1x1")
    _, found = first_step(engine, reader, 1, position=1)
    with pytest.raises(AssertionError):
        assert_close(found, one_device[1][1], 1e-3)


def ten_steps(layout: str, **changes):
    """Weights after ten steps, and the figures of each; a run that was made before is not made again."""
    described = json.dumps([layout, changes], sort_keys=True)
    if described not in MADE:
        _, state, step, reader = built(settings_of(layout, 4, **changes))
        figures = [step(reader[number]) for number in range(10)]
        weights = {name: weight.numpy() for name, weight in state.weights.items()}
        MADE[described] = weights, figures, state
    return MADE[described]


@pytest.mark.parametrize("layout", SPREAD)
def test_weights_after_ten_lamb_steps_are_those_of_one_device(layout):
    weights, figures, state = ten_steps(layout)
    wanted, wanted_figures, _ = ten_steps("1x1")
    # Ten steps of rounding; LAMB's first steps divide by the root of tiny second moments.
    assert_weights_close(weights, wanted, 1e-5, WANDER)
    for found, other in zip(figures, wanted_figures, strict=True):
        assert found["mlm_loss"] == pytest.approx(other["mlm_loss"], rel=1e-5)
        assert found["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=1e-4)
        assert found["weight_norm"] == pytest.approx(other["weight_norm"], rel=1e-6)
    for name, weight in state.weights.items():
        for copy in weight.variables[1:]:
            np.testing.assert_array_equal(copy.numpy(), weight.numpy(), err_msg=name)


CLIPPED = {"optimizer": {"name": "AdamW", "max_gradient_norm": 0.5}, "model": SHALLOW}


@pytest.mark.parametrize(("layout", "options"), [("2x2", {}), ("2x1", CLIPPED)])
def test_sharded_moments_give_the_same_weights(layout, options):
    whole, _, state = ten_steps(layout, **options)
    shared, _, shares = ten_steps(layout, **options, parallel={"replicated_tensor_sharding": True})
    if options == CLIPPED:
        for name, weight in whole.items():
            np.testing.assert_array_equal(shared[name], weight, err_msg=name)
    else:
        # A whole norm adds up in another order than its shares: of the weights after ten LAMB steps the
        # worst, a bias, then differs by 1.04e-6 of its norm, a tenth of what layouts may differ by.
        assert_weights_close(shared, whole, 2e-6, WANDER)
    for name, pair in state.moments.items():
        for moment, share in zip(pair, shares.moments[name], strict=True):
            np.testing.assert_allclose(share.numpy(), moment.numpy(), rtol=1e-4, atol=1e-8)
            assert share.variables[0].shape[0] == -(-moment.numpy().size // 2)


@pytest.mark.parametrize(
    ("layout", "kept"), [("1x1", {}), ("2x2", {"replicated_tensor_sharding": True})]
)
def test_offloaded_moments_give_the_same_bits(layout, kept):
    here, _, _ = ten_steps(layout, **({"parallel": kept} if kept else {}))
    away, _, state = ten_steps(layout, parallel={**kept, "optimizer_state_offload": True})
    for name, weight in here.items():
        np.testing.assert_array_equal(away[name], weight, err_msg=name)
    devices = {v.device for pair in state.moments.values() for m in pair for v in m.variables}
    assert len(devices) == 1 and devices.pop().endswith("CPU:0")


def test_random_rounding_of_shares_is_that_of_the_whole():
    options = {
        "precision": "float16",
        "optimizer": {"name": "AdamW", "stochastic_rounding": True, "loss_scaling": 64.0},
        "model": SHALLOW,
    }
    whole, _, _ = ten_steps("2x1", **options)
    shared, _, _ = ten_steps("2x1", **options, parallel={"replicated_tensor_sharding": True})
    for name, weight in whole.items():
        assert weight.dtype == np.float16
        np.testing.assert_array_equal(shared[name], weight, err_msg=name)


@pytest.mark.parametrize(("precision", "tolerance"), [("float16", 2e-3), ("bfloat16", 1e-2)])
def test_gradients_may_travel_in_16_bits(precision, tolerance, one_device):
    _, whole = one_device[4]
    _, short = first_step(*engine_of("2x2", parallel={"reduce_precision": precision}), 4)
    assert_close(short, whole, tolerance)
    assert any((short[name] != gradient).any() for name, gradient in whole.items())


def test_small_buckets_add_up_the_same():
    engine, reader = engine_of("2x1", model=SHALLOW)
    assert len(engine.updates[0][0].buckets) == 1
    _, whole = first_step(engine, reader, 4)
    for row in engine.updates:
        for update in row:
            update.make_functions([[name] for name in update.weights], first=100)
    _, found = first_step(engine, reader, 4)
    for name, gradient in found.items():
        np.testing.assert_array_equal(gradient, whole[name], err_msg=name)


def test_a_gradient_that_overflows_on_one_replica_moves_no_weight_on_any():
    settings = settings_of("2x2", 4)
    engine, state, step, reader = built(settings)
    before = {name: weight.numpy().copy() for name, weight in state.weights.items()}
    # Only the second replica's stage, whose micro-batches the first one does not see.
    poisoned = engine.replicas[1][1].accumulators["hid_2/attention/query/kernel"]
    reduce = engine.reduce

    def poison_and_reduce(shrink):
        poisoned.assign_add(np.full(poisoned.shape, np.nan, np.float32))
        return reduce(shrink)

    engine.reduce = poison_and_reduce
    figures = step(reader[0])
    engine.reduce = reduce
    assert figures["skipped"] == 1
    for name, weight in state.weights.items():
        for copy in weight.variables:
            np.testing.assert_array_equal(copy.numpy(), before[name])
    assert step(reader[1])["skipped"] == 1
    moved = [
        name for name, weight in state.weights.items() if (weight.numpy() != before[name]).any()
    ]
    assert len(moved) == len(before)


def test_clipping_is_of_the_whole_step():
    options = {"optimizer": {"name": "AdamW", "max_gradient_norm": 0.01}}
    one, figures, _ = ten_steps("1x1", **options)
    assert all(figure["gradient_norm"] > 0.1 for figure in figures)
    spread, _, _ = ten_steps("2x2", **options)
    assert_weights_close(spread, one, 1e-5, WANDER)


def test_a_checkpoint_goes_through_layouts_whatever_their_shares(tmp_path):
    """Sharded over two, then over four and offloaded, then whole: after each two steps another layout."""
    _, state, step, reader = built(settings_of("1x1"))
    for number in range(6):
        step(reader[number])
    wanted = {name: weight.numpy() for name, weight in state.weights.items()}
    sharded = {"replicated_tensor_sharding": True}
    way = [
        ("2x2", sharded),
        ("4x1", {**sharded, "optimizer_state_offload": True}),
        ("1x2", {}),
    ]
    for number, (layout, parallel) in enumerate(way):
        settings = settings_of(layout, parallel=parallel)
        _, state, step, reader = built(settings)
        form = checkpoint.Format(to_disk=dict, from_disk=dict, config={})
        if number:
            checkpoint.resume(tmp_path / checkpoint_name(2 * number), state, form, {})
        assert state.step == 2 * number
        for _ in range(2):
            step(reader[state.step])
        checkpoint.save(tmp_path, state, form, fixed={}, settings={}, versions={})
    found = {name: weight.numpy() for name, weight in state.weights.items()}
    assert_weights_close(found, wanted, 1e-5, WANDER)
