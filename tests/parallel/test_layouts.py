"""The contract of an engine: in every layout, with every model and task, a run is that of one device with TensorFlow.

Steps of LAMB with dropout and clipping, unless a case says otherwise. What one engine alone has is in its folder,
but shards, buckets and compiled updates of TensorFlow are here, because their tests compare complete runs.
"""

import math
import re
from functools import partial

import numpy as np
import pytest
from support.engine_runs import (
    BASE,
    assert_same,
    difference,
    jax_process,
    moved_apart,
    on_tensorflow,
)

from bert_cli.parallel.tensorflow import update
from bert_cli.train.checkpoint import checkpoint_name

slow = partial(pytest.param, marks=pytest.mark.slow)
LAST = ["enc_out", "pool", "heads"]
RECOMPUTED = {"recompute": True}
CHUNKED, MANY_CHUNKS = ({"embedding_serialization_factor": number} for number in (3, 16))
MOMENTS, WEIGHTS = {"replicated_tensor_sharding": True}, {"shard_weights": True}
LOOPS = {"loops": True}
"""As on TPUs: the gradients of a stacked weight are one array, and so is its all-reduce."""


def layout(replicas=1, stages=None, devices=None, **parallel):
    stages = {"pipeline_stages": stages, "pipeline_device_mapping": devices} if stages else {}
    return {"replicas": replicas, "parallel": stages | parallel}


ONE, TWO = layout(), layout(2)
EIGHT = layout(2, tensor=[2, 2], **WEIGHTS, **RECOMPUTED, **CHUNKED)
FOUR = layout(2, tensor=2)
GATHERS = 1, [["emb", "hid"], ["hid"], ["enc_out"], ["pool"], ["heads"]], [0, 1, 2, 3, 0]
"""A device has only the gather of the masked positions, which has no weights."""
THREE = [["emb"], ["hid"], ["hid", *LAST]], [0, 1, 0]
ALTERNATING = [["emb"], ["hid*2"], LAST], [0, 1, 0]
TWO_OF_TWO = 2, [["emb", "hid"], ["hid"], LAST], [0, 1, 0]

# Weights that begin so small are stored exactly enough to measure what AdamW moves them by.
ADAMW = {
    "steps": 10,  # in fewer they move by less
    "bert_config": {"initializer_range": 0.02},
    "optimizer_opts": {"name": "AdamW", "learning_rate": {"max_learning_rate": 0.001}},
}
SHALLOW = {"bert_config": {"num_hidden_layers": 1}}
SHALLOW_ADAMW = {**ADAMW, "bert_config": {**SHALLOW["bert_config"], "initializer_range": 0.02}}
STABLE = SHALLOW_ADAMW | {"optimizer_opts": ADAMW["optimizer_opts"] | {"name": "StableAdamW"}}
UNIT = {
    "steps": 10,
    "scaling": "unit",
    "bert_config": {"initializer_range": 0.02},
    "optimizer_opts": {
        "name": "AdamW", "learning_rate": {"max_learning_rate": 0.05}, "max_gradient_norm": None,
        "epsilon": 1e-3,  # a gradient near zero is rounding, which 1e-6 would make a step of full size
    },
}  # fmt: skip
DECAY = {"optimizer_opts": BASE["optimizer_opts"] | {"layer_decay": 0.5}}
PACKS = {**SHALLOW_ADAMW, "max_sequences_per_pack": 2, "scores": True}
GROUP = {"bert_config": {"architecture": "groupbert", "conv_group_size": 8, "ffn_groups": 2}}
# At 16 positions JAX computes the local layers in blocks, TensorFlow all scores. Recomputation repeats layers 1 and 2.
MODERN = {
    "bert_config": {
        "architecture": "modernbert", "num_hidden_layers": 6, "local_attention": 4, "global_attn_every_n_layers": 2
    }
}  # fmt: skip

MODERN_2 = {
    "bert_config": MODERN["bert_config"] | {"num_hidden_layers": 2, "hidden_dropout_prob": 0.1},
    "steps": 3,
}


def task(kind, labels, **sizes):
    model = {"bert_config": SHALLOW_ADAMW["bert_config"] | {"max_position_embeddings": 32}}
    return SHALLOW_ADAMW | model | {"kind": kind, "labels": labels, "scores": True, **sizes}


# What is run on JAX -> layout, options, and how near the weights are, relative to what all of them have moved.
IN_EIGHT = "2 replicas x tensor [2, 2], weights sharded, recomputed, chunked"
ON_JAX = {IN_EIGHT: (EIGHT, {}, 1e-6), "2 replicas": (TWO, {}, 1e-6)}
# Runs of TensorFlow in two layouts are up to 1.2e-6 apart where a model has little but biases, and few of them.
MORE_ON_JAX = {
    "2 replicas, layers in a loop": (TWO | LOOPS, {}, 1e-6),
    "tensor 4, chunked": (layout(tensor=4, **CHUNKED), {}, 1e-6),
    "4 replicas, weights sharded": (layout(4, **WEIGHTS), {}, 1e-6),
    "2 replicas x tensor 4, moments sharded, layers in a loop": (layout(2, tensor=4, **MOMENTS) | LOOPS, {}, 1e-6),
    "tensor [2, 2], layers in a loop": (layout(tensor=[2, 2]) | LOOPS, {}, 1e-6),
    "tensor 2, each layer in a loop has its rate": (layout(tensor=2) | LOOPS, DECAY, 1e-6),
    "4 replicas, moments sharded, recomputed, AdamW": (layout(4, **MOMENTS, **RECOMPUTED), ADAMW, 1e-6),
    "StableAdamW, which reads complete gradients": (EIGHT, STABLE, 3e-6),
    "packs": (FOUR, PACKS, 3e-6),
    "groupbert": (layout(2, tensor=2, **RECOMPUTED, **WEIGHTS), GROUP, 3e-6),
    "modernbert": (layout(2, tensor=2, **RECOMPUTED), MODERN, 3e-6),
    "modernbert, weights sharded": (layout(tensor=[2, 2], **WEIGHTS), MODERN, 3e-6),
    "modernbert, chunked": (layout(**CHUNKED), MODERN, 3e-6),
    "unit scaling": (layout(2, tensor=2, **RECOMPUTED), UNIT, 1e-5),
    "squad": (FOUR, task("Squad", 2, max_seq_length=32, doc_stride=8, max_query_length=8), 3e-6),
    "glue": (FOUR, task("Glue", 3), 3e-6),
    "similarity": (FOUR, task("Glue", 1), 3e-6),
    "ner": (FOUR, task("Ner", 5), 3e-6),
}  # fmt: skip
ON_TENSORFLOW = {
    "5 stages on 4 devices, of which one gathers": (layout(*GATHERS), {}, 1e-6),
    # The last stage has a layer, whose dropout is recomputed, too.
    "modernbert in 3 stages on 2 devices, recomputed, with a loss scale": (
        layout(1, [["emb"], ["hid"], ["hid", "enc_out", "heads"]], [0, 1, 0], **RECOMPUTED)
        | {"optimizer_opts": {"loss_scaling": 4096.0}}, MODERN_2, 3e-6
    ),
}  # fmt: skip
MORE_ON_TENSORFLOW = {
    "recomputed": (layout(**RECOMPUTED), {}, 1e-6),
    "3 stages on 2 devices, recomputed": (layout(1, *THREE, **RECOMPUTED), {}, 1e-6),
    "5 stages, recomputed": (layout(*GATHERS, **RECOMPUTED), {}, 1e-6),
    "2 replicas x 2 devices, moments sharded, recomputed": (layout(*TWO_OF_TWO, **MOMENTS, **RECOMPUTED), {}, 1e-6),
    "groupbert in 3 stages": (layout(1, *ALTERNATING, **RECOMPUTED), GROUP, 3e-6),
}  # fmt: skip


@pytest.fixture(scope="module")
def jax():
    with jax_process() as process:
        for where, _, _ in ON_JAX.values():  # while this process runs TensorFlow
            process.start(**where)
        yield process


def assert_same_run(result, expected, within):
    assert_same(result, expected, weights_within=within)
    assert result.sums == pytest.approx(expected.sums, rel=1e-6)
    for mine, other in zip(result.logits, expected.logits, strict=True):
        assert mine.shape == other.shape
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-5 * np.abs(other).max())


@pytest.mark.parametrize("name", [*ON_JAX, *map(slow, MORE_ON_JAX)])
def test_a_run_on_jax_is_that_of_one_device_of_tensorflow(name, jax):
    where, options, within = (ON_JAX | MORE_ON_JAX)[name]
    result, expected = jax.start(**where, **options), on_tensorflow(**options)
    assert options or all(metrics["gradient_norm"] > 0.05 for metrics in expected.metrics)
    assert_same_run(result.result(), expected, within)


@pytest.mark.parametrize("name", [*ON_TENSORFLOW, *map(slow, MORE_ON_TENSORFLOW)])
def test_a_run_in_a_layout_of_tensorflow_is_that_of_one_device(name):
    where, options, within = (ON_TENSORFLOW | MORE_ON_TENSORFLOW)[name]
    result = on_tensorflow(**where, **options)
    # A power of two, which changes no number, nor the norm that is clipped.
    scale = where.get("optimizer_opts", {}).get("loss_scaling", 1.0)
    rows = [row | {"loss_scale": row["loss_scale"] / scale} for row in result.metrics]
    assert_same_run(result._replace(metrics=rows), on_tensorflow(**options), within)


# --- shards of TensorFlow, whose numbers are the same bits

CLIPPED = SHALLOW | {"optimizer_opts": {"name": "AdamW", "max_gradient_norm": 0.5}}
ROUNDING = {"stochastic_rounding": True, "loss_scaling": 64.0}
ROUNDED = CLIPPED | {"precision": "float16", "optimizer_opts": CLIPPED["optimizer_opts"] | ROUNDING}
SHARDS = layout(2, **MOMENTS, optimizer_state_offload=True)


def assert_same_bits(result, expected):
    for mine, other in ((result.weights, expected.weights), (result.moments, expected.moments)):
        assert mine.keys() == other.keys()
        for name, value in other.items():
            np.testing.assert_array_equal(mine[name], value, err_msg=name)


def counted_reductions(monkeypatch):
    """Return a set, to which the number of reductions of each device is added."""
    numbers, reduce = set(), update.DeviceUpdate.all_reduce_gradients

    def counted(self):
        numbers.add(len(self.reductions))
        return reduce(self)

    monkeypatch.setattr(update.DeviceUpdate, "all_reduce_gradients", counted)
    return numbers


@pytest.mark.slow  # but for AdamW, which clips: in the next test
@pytest.mark.parametrize(
    "options",
    [ROUNDED, SHALLOW, STABLE | {"steps": 4}],
    ids=["rounded at random", "LAMB", "StableAdamW"],
)
def test_sharded_and_offloaded_moments_give_the_same_bits(options):
    """A replica updates its share of the weights as without shards."""
    mine, expected = on_tensorflow(**SHARDS, **options), on_tensorflow(**TWO, **options)
    assert_same_bits(mine, expected)
    assert mine.metrics == expected.metrics


def test_a_run_with_complete_moments_continues_with_shards_to_the_same_bytes(tmp_path, monkeypatch):
    """Both halves of the run, and its checkpoint, equal those with complete moments."""
    folders = [tmp_path / name for name in ("complete", "shards")]
    complete = on_tensorflow(**TWO, **CLIPPED, save=folders[0])
    middle, end = map(checkpoint_name, (2, 4))
    # Several weights in a bucket, and the word table, which is larger, in one of its own.
    monkeypatch.setattr(update, "REDUCE_BUCKET", 4 * 2500)
    sums = counted_reductions(monkeypatch)
    sharded = on_tensorflow(**SHARDS, **CLIPPED, save=folders[1], resume=folders[0] / middle)
    assert_same_bits(sharded, complete)
    assert sums == {7}
    assert sharded.metrics == complete.metrics[2:]
    for name in ("model.safetensors", "optimizer.safetensors"):
        shards, expected = (folder / end / name for folder in folders[::-1])
        assert shards.read_bytes() == expected.read_bytes(), name


# --- precisions


def apart(one, other):
    """Return the largest relative difference of a metric in a step: one alone may be near by chance."""
    pairs = [*zip(one.metrics, other.metrics, strict=True)]
    names = ("mlm_loss", "nsp_loss", "gradient_norm")
    return max(abs(mine[name] / theirs[name] - 1) for mine, theirs in pairs for name in names)


FLOAT16 = {**ADAMW["optimizer_opts"], "loss_scaling": 512}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "options", "rounding", "where"),
    [
        ("mixed_bfloat16", {}, {}, FOUR),
        ("mixed_float16", {"loss_scaling": 512}, {}, FOUR),
        ("float16", FLOAT16, {"stochastic_rounding": True}, layout(2, **WEIGHTS)),
    ],
)
def test_a_precision_is_as_near_to_tensorflow_as_that_is_to_float32(
    precision, options, rounding, where, jax
):
    """Both round in other places, and stochastic rounding draws other bits: so far apart is rounding alone."""
    chosen = SHALLOW | {"precision": precision, "optimizer_opts": options | rounding}
    result, expected = jax.start(**where, **chosen), on_tensorflow(**chosen)
    exact = on_tensorflow(**SHALLOW, optimizer_opts=options)
    for measure in (
        apart,
        lambda one, other: difference(one.moments, other.moments),
        moved_apart,
    ):
        assert 0 < measure(result.result(), expected) < 3 * measure(expected, exact), measure


def test_a_dynamic_loss_scale_skips_the_same_steps(jax):
    """It starts so high that the gradients of float16 overflow, and is halved until they do not."""
    options = SHALLOW | {"precision": "mixed_float16", "loss_scale": 2**18, "steps": 10}
    result, expected = jax.start(**FOUR, **options), on_tensorflow(**options)
    columns = [
        {name: [metrics[name] for metrics in run.metrics] for name in expected.metrics[0]}
        for run in (result.result(), expected)
    ]
    for name in ("skipped", "loss_scale", "learning_rate"):
        assert columns[0][name] == columns[1][name]
    assert 1 < columns[0]["skipped"][-1] < 8
    norms = [column["gradient_norm"] for column in columns]
    assert [*map(math.isfinite, norms[0])] == [*map(math.isfinite, norms[1])]
    assert norms[0][-1] == pytest.approx(norms[1][-1], rel=1e-3)
    losses = [column["mlm_loss"][-1] for column in columns]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


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


# --- the memory of a device, and checkpoints of JAX


@pytest.mark.parametrize(
    ("name", "parts", "most"),
    [
        ("2 replicas", 1, 1.05),
        # Pooler and heads are divided over the replicas alone, most biases over one of the two axes.
        (IN_EIGHT, 1 / 8, 0.3),
        slow("tensor 2, each layer in a loop has its rate", 1 / 2, 0.65),
        slow("4 replicas, weights sharded", 1 / 4, 0.3),
        slow("4 replicas, moments sharded, recomputed, AdamW", (1 + 2 / 4) / 3, 0.55),
    ],
)
def test_a_layout_divides_weights_and_moments_among_the_devices(name, parts, most, jax):
    """A device's arguments are its parts of weights and moments, and its examples."""
    where, options, _ = (ON_JAX | MORE_ON_JAX)[name]
    result = jax.run(**where, **options)
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
        (RECOMPUTED, {"architecture": "modernbert", "num_hidden_layers": 28, "local_attention": 16}, 0.2),
        (MANY_CHUNKS, {"num_hidden_layers": 1, "vocab_size": 16384}, 0.75),
    ],
)  # fmt: skip
def test_temporaries_shrink(parallel, model, fraction, jax):
    shape = {"bert_config": {"max_position_embeddings": 64, **model}, "max_seq_length": 64}
    shape |= {"max_predictions_per_seq": 20, "global_batch": {"micro_batch_size": 8}, "steps": 0}
    saved, recomputed = (jax.run(**shape, parallel=p).memory[1] for p in ({}, parallel))
    assert recomputed < fraction * saved


@pytest.fixture(scope="module")
def saved(jax, tmp_path_factory):
    """Runs of four steps of each engine, on one and on eight devices, that save after two."""
    folders = {name: tmp_path_factory.mktemp("run") for name in ("tensorflow", "1", "8")}
    one, eight = jax.start(**ONE, save=folders["1"]), jax.start(**EIGHT, save=folders["8"])
    runs = {"tensorflow": on_tensorflow(save=folders["tensorflow"])}
    runs |= {"1": one.result(), "8": eight.result()}
    return {name: (runs[name], folder / checkpoint_name(2)) for name, folder in folders.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "where"), [("1", ONE), ("8", EIGHT)])
def test_a_resumed_run_has_the_same_bytes(name, where, saved, jax):
    run, path = saved[name]
    resumed = jax.run(**where, resume=path)
    assert resumed.metrics == run.metrics[2:]
    assert_same_bits(resumed, run)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "where"), [("tensorflow", EIGHT), ("8", ONE), ("8", None)])
def test_a_checkpoint_passes_to_another_layout_and_to_the_other_engine(name, where, saved, jax):
    _, path = saved[name]
    resumed = jax.run(**where, resume=path) if where else on_tensorflow(resume=path)
    run, _ = saved["tensorflow"]
    assert_same(resumed._replace(first=run.first), run._replace(metrics=run.metrics[2:]))
