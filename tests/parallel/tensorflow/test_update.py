"""The end of a step on a device: moves that XLA compiles, and what is replaced where it lies."""

import numpy as np
import pytest
from support.layouts import KEY_BIAS, assert_weights_close, built, gradients, settings_of

from bert_cli.parallel.engine import count
from bert_cli.parallel.tensorflow import update

STEPS = 2
OFFLOADED = {"optimizer_state_offload": True}
SHARDED = {"replicated_tensor_sharding": True}
SHALLOW = {"num_hidden_layers": 1}


def some_steps(layout, optimizer, parallel):
    """Engine, weights and moments after some steps."""
    model = {} if layout == "1x2" else {"model": SHALLOW}
    settings = settings_of(layout, 2, optimizer={"name": optimizer}, parallel=parallel, **model)
    engine, state, step, reader = built(settings)
    for number in range(STEPS):
        step(reader[number])
    weights = {name: weight.numpy() for name, weight in state.weights.items()}
    moments = {
        f"{name} {order}": moment.numpy()
        for name, pair in state.moments.items()
        for order, moment in enumerate(pair)
    }
    return engine, weights, moments


@pytest.mark.parametrize(
    ("layout", "optimizer", "parallel"),
    [
        ("1x1", "AdamW", {}),
        ("1x2", "LAMB", {}),
        ("1x1", "AdamW", OFFLOADED),
        ("2x1", "LAMB", SHARDED),
    ],
    ids=["whole", "stages that share a table", "offloaded", "sharded"],
)
def test_compiled_moves_are_the_plain_ones_and_leave_no_gradient(
    monkeypatch, layout, optimizer, parallel
):
    _, plain, plain_moments = some_steps(layout, optimizer, parallel)
    monkeypatch.setattr(update, "UPDATES_WORTH_COMPILING", 0)
    monkeypatch.setattr(update, "LARGE", 500)
    engine, weights, moments = some_steps(layout, optimizer, parallel)
    devices = [device for replica in engine.updates for device in replica]
    assert all(
        any(compiled for _, _, compiled, *_ in device.updater.functions) for device in devices
    )
    assert_weights_close(weights, plain, 1e-5, 2 * STEPS * 0.01)
    for name, moment in moments.items():
        if KEY_BIAS in name:
            continue  # its gradient is nothing but rounding
        largest = np.abs(plain_moments[name]).max()
        np.testing.assert_allclose(
            moment, plain_moments[name], rtol=1e-4, atol=1e-6 * largest, err_msg=name
        )
    assert all(not stage.has_gradients for replica in engine.replicas for stage in replica)


@pytest.mark.parametrize("optimizer", ["AdamW", "LAMB"])
def test_each_moment_is_that_of_the_gradient_and_a_move_is_traced_once_for_each_shape(optimizer):
    settings = settings_of("1x1", 1, optimizer={"name": optimizer}, model=SHALLOW)
    engine, state, _, reader = built(settings)
    batch = reader[0]
    engine.accumulate(batch, 0, count(batch, engine.head.COUNTS), 1.0)
    engine.all_reduce_gradients(1.0)
    found = gradients(engine)
    engine.apply_update(1.0, 0.01, 0, 0)
    for name, (first, second) in state.moments.items():
        np.testing.assert_allclose(first.numpy(), 0.1 * found[name], rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(
            second.numpy(), 0.001 * found[name] ** 2, rtol=1e-4, atol=1e-30, err_msg=name
        )
    (device,) = engine.updates[0]
    for (_, rule, *_), move in device.updater.functions.items():
        shapes = {
            tuple(weight.shape)
            for name, weight in device.weights.items()
            if device.optimizer.rules[name] == rule
        }
        assert move.experimental_get_tracing_count() == len(shapes)
