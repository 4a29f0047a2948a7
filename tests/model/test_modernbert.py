"""ModernBERT: what a position reads, graphs for all lengths, traces, and the files of a checkpoint."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.hf_models import need
from support.model_inputs import hidden_of, make_examples, random_blocks, values_of

from bert_cli.errors import CheckpointError
from bert_cli.facts.architectures import ARCHITECTURES, shape_of
from bert_cli.model import modernbert
from bert_cli.model.build import build_block, build_blocks, named_weights
from bert_cli.model.names.hf import config_of, from_hf, hf_config, to_hf
from bert_cli.planning.memory import weights_of

SHORT, LONG = 24, 44  # all scores, and blocks of 8 positions that the length does not fill


@pytest.fixture(scope="module")
def config(shapes):
    return shapes["modernbert"]


@pytest.fixture(scope="module")
def blocks(config):
    return random_blocks(config)


def randomize(layer):
    draw = np.random.default_rng(0)
    for weight in layer.weights:
        weight.assign(draw.normal(0, 0.3, weight.shape))
    return draw


def test_one_graph_for_all_lengths_computes_as_a_graph_for_each(config, queries_apart):
    """Its outputs are those of all scores, and it has the branches that save memory."""
    import tensorflow as tf

    blocks = random_blocks(config.model_copy(update={"num_hidden_layers": 2}))  # global, local

    def encoder(columns):
        return hidden_of(blocks[:-1], columns)

    any_shape = tf.TensorSpec([None, None], tf.int32)
    names = ("input_ids", "input_mask")
    traced = tf.function(encoder, [dict.fromkeys(names, any_shape)], autograph=False)
    for length in (2, 7, 16, 17, SHORT, 39, 40, LONG, 80):
        columns = make_examples(config.vocab_size, length=max(length, 20))
        columns = {name: tf.constant(columns[name][:, :length], tf.int32) for name in names}
        inside = columns["input_mask"].numpy() > 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(modernbert, "MAX_SCORED", 1000)
            patch.setattr(modernbert, "MIN_BLOCKS", 1000)
            expected = encoder(columns).numpy()
        for outputs in (traced(columns).numpy(), encoder(columns).numpy()):
            assert np.abs(outputs - expected)[inside].max() < 1e-6 * np.abs(expected).max(), length


@pytest.mark.parametrize("length", [SHORT, LONG])
@pytest.mark.parametrize("window", [1, 4, None])
def test_a_position_reads_exactly_its_window(length, window, config):
    changes = {"local_attention": 2 * (window or 4), "global_attn_every_n_layers": 2}
    number = 0 if window is None else 1
    config = config.model_copy(update=changes)
    block = build_block(f"hid_{number}", config, seed=1, policy="float32")
    draw = randomize(block)
    x = draw.normal(size=(1, length, config.hidden_size)).astype(np.float32)
    columns = {"input_mask": np.ones((1, length), np.int32)}
    expected = block.attention(x, columns).numpy()
    for position in (0, 5, length // 2, length - 1):
        changed = x.copy()
        changed[0, position] += 1.0
        differs = np.abs(block.attention(changed, columns).numpy() - expected)[0].max(-1) > 0
        distance = np.abs(np.arange(length) - position)
        assert np.array_equal(differs, distance <= (length if window is None else window))


def test_rotary_positions_are_exact_where_products_have_16_bits(config):
    attention = build_block("hid_1", config, seed=1, policy="mixed_bfloat16").attention
    positions = np.arange(4001, 4001 + SHORT, dtype=np.int32)
    columns = {"position_ids": positions[None], "input_mask": np.ones((1, SHORT), np.int32)}
    angles = positions[:, None] / 10.0 ** np.array([0.0, 0.25, 0.5, 0.75])
    for turned, function in zip(attention._rotation(columns, 8), (np.cos, np.sin), strict=True):
        np.testing.assert_allclose(turned[0, :, 0], function(angles), atol=5e-4)
    # The scores depend on distances alone.
    draw = randomize(attention)
    x = draw.normal(size=(1, SHORT, 32)).astype(np.float32)
    far, near = (
        np.float32(attention(x, columns | {"position_ids": columns["position_ids"] - first}))
        for first in (0, 4001)
    )
    assert np.linalg.norm(far - near) < 0.01 * np.linalg.norm(near)


def test_rotary_positions_and_the_last_layer_are_their_own_trace(config):
    names = [f"hid_{number}" for number in range(5)]
    keys = [build_block(name, config, seed=1, policy="float32").trace_key for name in names]
    assert keys[1] == keys[2] and len({*keys}) == 4
    theta = config.model_copy(update={"local_rope_theta": 11.0})
    assert build_block("hid_1", theta, seed=1, policy="float32").trace_key != keys[1]


def test_the_weights_of_transformers_come_back_byte_for_byte(config, tmp_path):
    need("torch", "transformers")
    import transformers

    def shapes_of(head):
        last_blocks = ARCHITECTURES["modernbert"].heads[head].last_blocks
        blocks = build_blocks(config, seed=0, policy="float32", last_blocks=last_blocks)
        return {name: weight.shape for name, weight in named_weights(blocks).items()}

    described = hf_config(config) | {"tie_word_embeddings": True}
    theirs = transformers.ModernBertConfig(**described)
    transformers.ModernBertForMaskedLM(theirs).save_pretrained(tmp_path)
    described = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert "global_rope_theta" not in described  # transformers 5 writes its own spelling alone
    assert config_of(described) == config
    tensors = load_file(tmp_path / "model.safetensors")
    values, missing = from_hf(tensors, shapes_of("heads"), config)
    assert missing == []
    again = to_hf(values, config)
    assert again.keys() == tensors.keys() - {"decoder.weight"}
    assert all(again[name].tobytes() == tensors[name].tobytes() for name in again)
    # Where a file has the encoder or the masked-LM head alone, a classifier takes what there is.
    for start, expected in (("decoder.", []), (("head.", "decoder."), ["token_head/transform"])):
        kept = {name: value for name, value in tensors.items() if not name.startswith(start)}
        missing = from_hf(kept, shapes_of("token_head"), config)[1]
        assert missing == [*expected, "token_head/classifier"]
    tensors["model.layers.1.attn.Wqkv.weight"] = tensors["model.layers.1.attn.Wqkv.weight"][:-1]
    del tensors["model.layers.0.mlp.Wi.weight"]
    with pytest.raises(CheckpointError) as refusal:
        from_hf(tensors, shapes_of("heads"), config)
    assert "1 tensors are missing: model.layers.0.mlp.Wi.weight;" in str(refusal.value)
    assert "Wqkv.weight ((32, 95) there, (32, 32) here as hid_1/attention/key" in str(refusal.value)


@pytest.mark.parametrize("layers", [1, 2, 5, 22])
@pytest.mark.parametrize("every", [1, 2, 3, 30])
def test_both_spellings_of_a_config_describe_the_same_shape(layers, every, config):
    changes = {"num_hidden_layers": layers, "global_attn_every_n_layers": every}
    config = config.model_copy(update=changes)
    described = hf_config(config)
    spelling_5 = ("layer_types", "rope_parameters")
    old = {name: value for name, value in described.items() if name not in spelling_5}
    spelling_4 = ("global_attn_every_n_layers", "global_rope_theta", "local_rope_theta")
    new = {name: value for name, value in described.items() if name not in spelling_4}
    assert config_of(old) == config_of(described) == config
    types = [layer % every == 0 for layer in range(layers)]
    read = config_of(new)
    assert types == [layer % read.global_attn_every_n_layers == 0 for layer in range(layers)]
    assert read.local_rope_theta == config.local_rope_theta


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"norm_bias": True}, "norm_bias True"),
        ({"hidden_activation": "relu"}, "hidden_act 'relu'"),
        ({"layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 3}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 5}, "layer_types"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_parameters"),
    ],
)
def test_a_model_with_other_blocks_is_refused_by_the_name_of_its_entry(changes, problem, config):
    with pytest.raises(CheckpointError, match=problem):
        config_of(hf_config(config) | changes)


def test_the_weights_of_modernbert_base_are_counted_and_start_as_in_transformers(config, blocks):
    counted = weights_of(shape_of({"architecture": "modernbert"}))
    total = counted["emb"] + 22 * counted["hid"] + counted["final_norm"] + counted["heads"]
    assert total == 149_655_232
    counted = weights_of(config)
    total = counted["emb"] + 5 * counted["hid"] + counted["final_norm"] + counted["heads"]
    assert total == sum(value.size for value in values_of(blocks).values())
    deviations = {
        "hid_1/attention/query/kernel": 0.02,
        "hid_1/feed_forward/output/kernel": 0.02 / 10**0.5,
        "heads/masked_lm/transform/dense/kernel": 0.02 / 10**0.5,
        "token_head/classifier/kernel": 32**-0.5,
    }
    for name, deviation in deviations.items():
        assert config.deviation_of(name) == pytest.approx(deviation), name
