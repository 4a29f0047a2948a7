"""The update on a device: buckets, functions that XLA compiles, and what they assign."""

import json
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from support.layouts import KEY_BIAS, SHALLOW, assert_weights_close, built, gradients, settings_of

from bert_cli.parallel.engine import count
from bert_cli.parallel.tensorflow import update

STEPS = 2

# XLA reads its options when it first compiles something, so this needs a process of its own.
COUNT_LOOPS = """
import json
import tensorflow as tf
from bert_cli.optim.adam import Hyperparameters, Optimizer, Rule
from bert_cli.parallel.tensorflow.runtime import fuse_results
from bert_cli.parallel.tensorflow.update import LARGE, WeightUpdater

fuse_results()
loops = {}
for name, adapts in (("update_element_wise", False), ("update_moments", True)):
    rule = Rule(decays=True, adapts=adapts)
    optimizer = Optimizer(hyperparameters=Hyperparameters(), rules={"a/kernel": rule}, seed=1)
    updater = WeightUpdater(optimizer, device="CPU:0", is_local=True, compiled=True)
    variables = [tf.Variable(tf.ones([LARGE // 512, 512])) for _ in range(4)]
    numbers = [tf.constant(1.0), tf.constant(0)]
    if not adapts:
        numbers = [tf.constant(1.0), tf.constant(1e-3), tf.constant(0), optimizer.key(1, 2)]
    function = updater.function(getattr(updater, name), rule, variables[0])
    text = function.experimental_get_compiler_ir(*variables, *numbers)(stage="optimized_hlo")
    entry = text[text.index("ENTRY"):].splitlines()
    shape = f"f32[{LARGE // 512},512]"
    fusions = [line.partition(" fusion(")[0] for line in entry if " fusion(" in line]
    loops[name] = [results.count(shape) for results in fusions if shape in results]
print(json.dumps(loops))
"""


@pytest.mark.tensorflow
def test_a_compiled_update_is_one_loop_with_three_results():
    command = [sys.executable, "-c", COUNT_LOOPS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loops = json.loads(done.stdout.splitlines()[-1])
    assert loops == {"update_element_wise": [3], "update_moments": [3]}


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


def some_steps(layout, optimizer, parallel):
    """Return engine, weights and moments after some steps."""
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


# In place, on another device than the weights, and on shards: each assigns other results.
@pytest.mark.parametrize(
    ("layout", "optimizer", "parallel"),
    [
        ("1x2", "LAMB", {}),
        ("1x1", "AdamW", {"optimizer_state_offload": True}),
        ("2x1", "LAMB", {"replicated_tensor_sharding": True}),
    ],
)
def test_compiled_updates_are_the_plain_ones(monkeypatch, layout, optimizer, parallel):
    _, plain, plain_moments = some_steps(layout, optimizer, parallel)
    monkeypatch.setattr(update, "UPDATES_WORTH_COMPILING", 0)
    monkeypatch.setattr(update, "LARGE", 500)
    engine, weights, moments = some_steps(layout, optimizer, parallel)
    devices = [device for replica in engine.updates for device in replica]
    assert all(any(key[2] for key in device.updater.functions) for device in devices)
    assert_weights_close(weights, plain, 1e-5, 2 * STEPS * 0.01)
    for name, moment in moments.items():
        if KEY_BIAS not in name:  # whose gradient is nothing but rounding
            largest = np.abs(plain_moments[name]).max()
            np.testing.assert_allclose(
                moment, plain_moments[name], rtol=1e-4, atol=1e-6 * largest, err_msg=name
            )


@pytest.mark.parametrize("optimizer", ["AdamW", "LAMB"])
def test_each_moment_is_that_of_its_gradient_and_functions_are_traced_once_for_each_shape(
    optimizer,
):
    settings = settings_of("1x1", 1, optimizer={"name": optimizer}, model=SHALLOW)
    engine, state, _, reader = built(settings)
    batch = reader[0]
    engine.accumulate(batch, 0, count(batch, engine.head.COUNTS), 1.0)
    engine.all_reduce_gradients(1.0)
    expected = gradients(engine)
    engine.apply_update(1.0, 0.01, 0, 0)
    for name, (first, second) in state.moments.items():
        np.testing.assert_allclose(first.numpy(), 0.1 * expected[name], rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(
            second.numpy(), 0.001 * expected[name] ** 2, rtol=1e-4, atol=1e-30, err_msg=name
        )
    (device,) = engine.updates[0]
    for (_, rule, *_), function in device.updater.functions.items():
        shapes = {
            tuple(weight.shape)
            for name, weight in device.weights.items()
            if device.optimizer.rules[name] == rule
        }
        assert function.experimental_get_tracing_count() == len(shapes)
