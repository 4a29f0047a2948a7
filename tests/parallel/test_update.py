"""The end of a step on a device: moves that XLA compiles, and what is replaced where it lies."""

import numpy as np
import pytest
from layouts import KEY_BIAS, assert_weights_close, built, settings_of

from bert_cli.parallel import update

STEPS = 2
OFFLOADED = {"optimizer_state_offload": True}
SHARDED = {"replicated_tensor_sharding": True}


def some_steps(layout, optimizer, parallel):
    """Weights and moments after some steps, and what is left of the last one's gradient."""
    settings = settings_of(
        layout,
        2,
        model={"num_hidden_layers": 1},
        optimizer={"name": optimizer},
        parallel=parallel,
    )
    engine, state, step, reader = built(settings)
    for number in range(STEPS):
        step(reader[number])
    weights = {name: weight.numpy() for name, weight in state.weights.items()}
    moments = {
        f"{name} {order}": moment.numpy()
        for name, pair in state.moments.items()
        for order, moment in enumerate(pair)
    }
    left = [
        accumulator.numpy()
        for device in engine.updates[0]
        for held in device.accumulators.values()
        for accumulator in held
    ]
    return weights, moments, left


@pytest.mark.parametrize(
    ("layout", "optimizer", "parallel"),
    [
        ("1x1", "AdamW", {}),
        ("1x1", "LAMB", {}),
        ("1x1", "LAMB", OFFLOADED),
        ("2x1", "AdamW", SHARDED),
    ],
    ids=["AdamW", "LAMB", "offloaded", "sharded"],
)
def test_compiled_moves_are_the_plain_ones_and_leave_no_gradient(
    monkeypatch, layout, optimizer, parallel
):
    plain, plain_moments, _ = some_steps(layout, optimizer, parallel)
    monkeypatch.setattr(update, "MOVES_WORTH_COMPILING", 0)
    monkeypatch.setattr(update, "LARGE", 500)
    weights, moments, left = some_steps(layout, optimizer, parallel)
    assert_weights_close(weights, plain, 1e-5, 2 * STEPS * 0.01)
    for name, moment in moments.items():
        if KEY_BIAS in name:
            continue  # its gradient is nothing but rounding
        largest = np.abs(plain_moments[name]).max()
        assert largest > 0 or name.startswith("emb/position"), name
        np.testing.assert_allclose(
            moment, plain_moments[name], rtol=1e-4, atol=1e-6 * largest + 1e-12, err_msg=name
        )
    assert not any(gradient.any() for gradient in left)
