"""What a device holds, counted: against the real model, its traced functions, and its own rules."""

import math

import pytest

from bert_cli.config.load import configs_folder, load
from bert_cli.config.memory import (
    GAPS,
    SAVED,
    SAVED_COMPILED,
    estimate,
    on_device,
    stages_of,
    weights_of,
)
from bert_cli.config.model import BertConfig
from bert_cli.config.training import PretrainSettings

TINY = BertConfig(
    vocab_size=1009,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=256,
    max_position_embeddings=128,
)
STAGES = [["emb"], ["hid*2"], ["hid*2"], ["enc_out", "pool", "heads"]]
ON_THREE = {"pipeline_stages": STAGES, "pipeline_device_mapping": [0, 1, 2, 0]}


def settings(
    replicas: int = 1, accumulation: int = 8, precision: str = "float32", **parallel: object
) -> PretrainSettings:
    return PretrainSettings.model_validate(
        {
            "bert_config": {**TINY.model_dump(), "num_hidden_layers": 4},
            "max_seq_length": 128,
            "max_predictions_per_seq": 20,
            "global_batch": {
                "micro_batch_size": 4,
                "replicas": replicas,
                "grad_acc_steps_per_replica": accumulation,
            },
            "precision": precision,
            "parallel": parallel,
            "optimizer_opts": {"name": "LAMB", "learning_rate": {"max_learning_rate": 0.006}},
        }
    )


@pytest.mark.parametrize("config", [TINY, BertConfig()], ids=["tiny", "base"])
def test_the_weights_are_those_of_the_real_model(config):
    from bert_cli.model.bert import build_blocks, named_weights

    blocks = build_blocks(config, seed=1, policy="float32")
    counted = weights_of(config)
    for name, block in blocks:
        own = [w for path, w in named_weights([(name, block)]).items() if path.startswith(name)]
        kind = "hid" if name.startswith("hid_") else name
        assert sum(math.prod(weight.shape) for weight in own) == counted[kind], name
    whole = counted["hid"] * config.num_hidden_layers
    whole += sum(counted[name] for name, _ in blocks if not name.startswith("hid_"))
    assert whole == sum(math.prod(weight.shape) for weight in named_weights(blocks).values())


def traced_stash(name: str, precision: str, examples: int, places: int) -> int:
    """Bytes that the forward function of a block hands to its backward function, but for weights."""
    import tensorflow as tf

    from bert_cli.model.bert import build_block

    block = build_block(name, TINY, seed=1, policy=precision)
    ids = tf.ones([examples, places], tf.int32)
    hidden = None
    if name != "emb":
        hidden = tf.zeros([examples, places, TINY.hidden_size], block.compute_dtype)
    batch = {"input_ids": ids, "segment_ids": ids, "input_mask": ids}
    function = tf.function(lambda hidden, batch, key: block(hidden, batch, key))
    concrete = function.get_concrete_function(hidden, batch, tf.constant([1, 2], tf.int32))
    # TensorFlow does not tell in public what it keeps.
    forward, _ = concrete._delayed_rewrite_functions.forward_backward()
    held = {}
    for tensor in forward.graph.outputs:
        origin = tensor
        while origin.op.type in ("Reshape", "Identity", "IdentityN"):
            n = origin.value_index if origin.op.type == "IdentityN" else 0
            origin = origin.op.inputs[n]
        if origin.op.type != "ReadVariableOp":
            held[origin.name] = math.prod(origin.shape) * origin.dtype.size
    return sum(held.values())


@pytest.mark.parametrize("precision", ["float32", "mixed_bfloat16", "float16"])
@pytest.mark.parametrize(
    ("name", "table"), [("emb", SAVED["emb"]), ("hid_0", SAVED["hid"]), ("hid_0", SAVED_COMPILED)]
)
def test_what_a_block_keeps_is_what_its_traced_function_hands_on(
    name, table, precision, monkeypatch
):
    from bert_cli.model import fused

    monkeypatch.setattr(fused, "_compiles", table is SAVED_COMPILED)
    monkeypatch.setattr(fused, "WORTH_COMPILING", 1)
    block = name.partition("_")[0]
    compute = 4 if precision == "float32" else 2
    sizes = {"B": 4, "S": 128, "N": 2, "D": 64, "F": 256}
    # What goes in is counted, and here also what comes out.
    bytes_kept = compute * 4 * 128 * 64
    for one in table:
        bytes_each = compute if one.form == "compute" else 4
        bytes_kept += (
            one.two_functions * bytes_each * math.prod(sizes[letter] for letter in one.shape)
        )
    kernels = 2 * (4 * 64 * 64 + 2 * 64 * 256) if precision == "mixed_bfloat16" else 0
    found = traced_stash(name, precision, 4, 128) - (kernels if block == "hid" else 0)
    assert bytes_kept == pytest.approx(found, rel=0.02)


def test_the_thresholds_are_those_of_the_engine():
    from bert_cli.config.memory import COMPILED_CHAIN_ELEMENTS, COMPILED_UPDATE_WEIGHTS
    from bert_cli.model.fused import WORTH_COMPILING
    from bert_cli.parallel.tensorflow.update import UPDATES_WORTH_COMPILING

    assert COMPILED_CHAIN_ELEMENTS == WORTH_COMPILING
    assert COMPILED_UPDATE_WEIGHTS == UPDATES_WORTH_COMPILING


@pytest.mark.parametrize(
    "path", sorted(configs_folder().glob("pretrain_*.json")), ids=lambda p: p.stem
)
def test_every_shipped_config_has_an_estimate(path, monkeypatch):
    monkeypatch.setenv("DATASETS_DIR", "/corpora")
    shipped, _ = load(PretrainSettings, ["--config", str(path)], "bert pretrain")
    found = estimate(shipped)
    assert len(found) == max(stages_of(shipped)[1]) + 1
    for one in found:
        assert all(value >= 0 for value in vars(one).values())
        assert 10**6 < one.total < 10**12
    assert sum(one.logits > 0 for one in found) == 1


def test_the_tied_word_table_is_held_once_and_has_an_accumulator_for_each_stage():
    table = TINY.vocab_size * TINY.hidden_size
    parted = estimate(settings(**ON_THREE))[0]
    together = on_device(settings(), [["emb", "enc_out", "pool", "heads"]], [0], 0)
    assert parted.weights == together.weights
    assert parted.accumulators - together.accumulators == 4 * table


def test_one_forward_one_backward_keeps_fewer_and_fewer_and_gpipe_keeps_all():
    one_each = estimate(settings(**ON_THREE))
    all_of_them = estimate(settings(schedule="GPipe", **ON_THREE))
    assert one_each[1].stashes / one_each[2].stashes == pytest.approx(3 / 2, rel=1e-3)
    assert all_of_them[1].stashes == all_of_them[2].stashes
    assert all_of_them[1].stashes / one_each[1].stashes == pytest.approx(8 / 3, rel=1e-3)
    few = estimate(settings(accumulation=2, **ON_THREE))
    assert few[1].stashes == few[2].stashes


def test_recomputation_keeps_inputs_only_and_by_stage_the_fewest():
    kept, by_layer, by_stage = (
        estimate(settings(**ON_THREE, **more))
        for more in ({}, {"recompute": True}, {"recompute": True, "recompute_by": "stage"})
    )
    hidden = 4 * 4 * 128 * 64
    assert by_layer[1].stashes == pytest.approx(GAPS * 3 * 2 * hidden, rel=1e-3)
    assert by_stage[1].stashes == pytest.approx(GAPS * 3 * 1 * hidden, rel=1e-3)
    assert kept[1].stashes > 20 * by_layer[1].stashes
    assert by_layer[1].working < by_stage[1].working
    assert max(one.total for one in by_layer) < max(one.total for one in kept)


def test_moments_are_shared_out_among_replicas_or_in_host_memory():
    whole = estimate(settings(replicas=4))[0].moments
    assert whole == 2 * estimate(settings(replicas=4))[0].weights
    shared = estimate(settings(replicas=4, replicated_tensor_sharding=True))[0].moments
    assert shared == pytest.approx(whole / 4, abs=8)
    assert estimate(settings(replicated_tensor_sharding=True))[0].moments == whole
    assert estimate(settings(optimizer_state_offload=True))[0].moments == 0


def test_sixteen_bits_halve_what_is_multiplied_and_float16_the_weights_too():
    wide, mixed, narrow = (
        estimate(settings(precision=name))[0] for name in ("float32", "mixed_bfloat16", "float16")
    )
    assert wide.weights == mixed.weights == 2 * narrow.weights
    assert wide.moments == mixed.moments == narrow.moments
    assert narrow.working < mixed.working < wide.working


def test_what_is_kept_grows_with_the_micro_batch_and_weights_do_not():
    small, large = settings(**ON_THREE), settings(**ON_THREE)
    batch = large.global_batch.model_copy(update={"micro_batch_size": 8})
    large = large.model_copy(update={"global_batch": batch})
    for one, two in zip(estimate(small), estimate(large), strict=True):
        assert two.stashes == pytest.approx(2 * one.stashes, rel=1e-3)
        assert (two.weights, two.moments, two.update) == (one.weights, one.moments, one.update)
