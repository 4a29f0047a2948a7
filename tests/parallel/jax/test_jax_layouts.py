"""On JAX the numbers are those of TensorFlow on one device, in every layout; what a layout sends and saves."""

import re
from functools import partial

import numpy as np
import pytest
from support.engine_runs import BASE, assert_same, jax_process, on_tensorflow

from bert_cli.train.checkpoint import checkpoint_name

slow = partial(pytest.param, marks=pytest.mark.slow)
# Weights that begin so small are stored exactly enough to measure what AdamW moves them by.
ADAMW = {
    "bert_config": {"initializer_range": 0.02},
    "optimizer_opts": {"name": "AdamW", "learning_rate": {"max_learning_rate": 0.001}},
}
RECOMPUTED = {"recompute": True}
CHUNKED, MANY_CHUNKS = ({"embedding_serialization_factor": number} for number in (3, 16))
MOMENTS, WEIGHTS = {"replicated_tensor_sharding": True}, {"shard_weights": True}
ONE = {"parallel": {}}
EIGHT = {"replicas": 2, "parallel": {"tensor": [2, 2], **WEIGHTS, **RECOMPUTED, **CHUNKED}}
TWO = {"replicas": 2, "parallel": {}}
MODERN = {"architecture": "modernbert", "num_hidden_layers": 28, "local_attention": 16}
LAYOUTS = {
    "2 replicas": TWO,
    "2 replicas x tensor [2, 2], weights sharded, recomputed, chunked": EIGHT,
}
MORE = {
    "1": ONE,
    "4 replicas, moments sharded, recomputed": {"replicas": 4, "parallel": MOMENTS | RECOMPUTED},
    "tensor 2": {"parallel": {"tensor": 2}},
    "4 replicas, weights sharded": {"replicas": 4, "parallel": WEIGHTS},
    "tensor 4, chunked": {"parallel": {"tensor": 4, **CHUNKED}},
    "tensor [2, 2]": {"parallel": {"tensor": [2, 2]}},
    "2 replicas x tensor 4, moments sharded": {"replicas": 2, "parallel": {"tensor": 4, **MOMENTS}},
}


@pytest.fixture(scope="module")
def jax():
    with jax_process() as process:
        for layout in LAYOUTS.values():  # while this process runs TensorFlow
            process.start(**layout)
        yield process


@pytest.mark.parametrize("name", [*LAYOUTS, *map(slow, MORE)])
def test_ten_lamb_steps_are_those_of_tensorflow_on_one_device(name, jax):
    """With dropout, and with clipping in every step."""
    expected = on_tensorflow()
    assert all(metrics["gradient_norm"] > 0.05 for metrics in expected.metrics)
    assert_same(jax.run(**(LAYOUTS | MORE)[name]), expected)


@pytest.mark.parametrize(
    "name", ["2 replicas", slow("tensor [2, 2]"), slow("4 replicas, weights sharded")]
)
def test_ten_steps_of_layers_in_a_loop_are_those_of_tensorflow(name, jax):
    """As on TPUs: the gradients of a stacked weight are one array, and so is its all-reduce."""
    layout = (LAYOUTS | MORE)[name]
    assert_same(jax.run(**layout, loops=True), on_tensorflow())


@pytest.mark.slow
def test_each_of_the_layers_in_a_loop_has_its_learning_rate(jax):
    decay = {"optimizer_opts": BASE["optimizer_opts"] | {"layer_decay": 0.5}}
    assert_same(jax.run(**decay, loops=True), on_tensorflow(**decay))


@pytest.mark.slow
def test_each_of_the_layers_in_a_loop_is_rounded_with_its_random_bits(jax):
    rounded = {"optimizer_opts": BASE["optimizer_opts"] | {"stochastic_rounding": True}}
    options = {"precision": "float16", "steps": 1, **rounded}
    results = [jax.run(**options, loops=loops) for loops in (True, False)]
    kernels = [name for name in results[0].weights if re.fullmatch(r"hid_1/.*/kernel", name)]
    assert kernels
    for kernel in kernels:
        first, second = (result.weights[kernel] for result in results)
        assert np.mean(first == results[0].first[kernel]) < 0.5
        assert np.mean(first == second) > 0.99


# Layouts that divide an update in different ways; LAMB is compared in all.
@pytest.mark.slow
@pytest.mark.parametrize("name", [[*LAYOUTS][-1], "4 replicas, moments sharded, recomputed"])
def test_ten_adamw_steps_are_those_of_tensorflow_on_one_device(name, jax):
    assert_same(jax.run(**(LAYOUTS | MORE)[name], **ADAMW), on_tensorflow(**ADAMW))


@pytest.mark.parametrize(
    ("name", "parts", "most"),
    [
        ("2 replicas", 1, 1.05),
        # Pooler and heads are divided over the replicas alone, most biases over one of the two axes.
        (list(LAYOUTS)[-1], 1 / 8, 0.3),
        slow("tensor 2", 1 / 2, 0.65),
        slow("4 replicas, weights sharded", 1 / 4, 0.3),
        slow("4 replicas, moments sharded, recomputed", (1 + 2 / 4) / 3, 0.55),
    ],
)
def test_a_layout_divides_weights_and_moments_among_the_devices(name, parts, most, jax):
    """A device's arguments are its parts of weights and moments, and its examples."""
    result = jax.run(**(LAYOUTS | MORE)[name])
    complete = sum(value.nbytes for value in (*result.weights.values(), *result.moments.values()))
    assert parts * complete < result.memory[0] < most * complete


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "model", "fraction"),
    [
        # Of four layers of 64 positions: what a layer saves, against its input alone; of the loss, whose table has
        # a gradient in any case, seven tenths.
        (RECOMPUTED, {"num_hidden_layers": 4}, 0.6),
        # Repetitions of three layers; without them 0.23.
        (RECOMPUTED, MODERN, 0.2),
        (MANY_CHUNKS, {"num_hidden_layers": 1, "vocab_size": 16384}, 0.75),
    ],
)
def test_temporaries_shrink(parallel, model, fraction, jax):
    shape = {"bert_config": {"max_position_embeddings": 64, **model}, "max_seq_length": 64}
    shape |= {"max_predictions_per_seq": 20, "global_batch": {"micro_batch_size": 8}, "steps": 0}
    saved, recomputed = (jax.run(**shape, parallel=p).memory[1] for p in ({}, parallel))
    assert recomputed < fraction * saved


@pytest.fixture(scope="module")
def saved(jax, tmp_path_factory):
    """Runs of ten steps of each engine, on one and on eight devices, that save after five."""
    folders = {name: tmp_path_factory.mktemp("run") for name in ("tensorflow", "1", "8")}
    one, eight = jax.start(**ONE, save=folders["1"]), jax.start(**EIGHT, save=folders["8"])
    runs = {"tensorflow": on_tensorflow(save=folders["tensorflow"])}
    runs |= {"1": one.result(), "8": eight.result()}
    return {name: (runs[name], folder / checkpoint_name(5)) for name, folder in folders.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), [("1", ONE), ("8", EIGHT)])
def test_a_resumed_run_has_the_same_bytes(name, layout, saved, jax):
    run, path = saved[name]
    resumed = jax.run(**layout, resume=path)
    assert resumed.metrics == run.metrics[5:]
    for mine, other in ((resumed.weights, run.weights), (resumed.moments, run.moments)):
        for key, value in other.items():
            np.testing.assert_array_equal(mine[key], value, err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), [("tensorflow", EIGHT), ("8", ONE), ("8", None)])
def test_a_checkpoint_passes_to_another_layout_and_to_the_other_engine(name, layout, saved, jax):
    _, path = saved[name]
    resumed = jax.run(**layout, resume=path) if layout else on_tensorflow(resume=path)
    run, _ = saved["tensorflow"]
    assert_same(resumed._replace(first=run.first), run._replace(metrics=run.metrics[5:]))
