"""The list of blocks: names, first values, and the freedom to build them apart."""

import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from bert_cli.model.bert import (
    block_names,
    build_block,
    build_blocks,
    initial_value,
    named_weights,
    word_table,
)


@pytest.fixture(scope="module")
def blocks(tiny):
    return build_blocks(tiny, seed=1984, policy="float32")


def test_blocks_come_in_the_order_in_which_they_run(tiny, blocks):
    assert [name for name, _ in blocks] == ["emb", "hid_0", "hid_1", "enc_out", "pool", "heads"]
    assert [block.name for _, block in blocks] == block_names(tiny)


def test_every_weight_exists_at_once_under_a_name_of_its_block(blocks):
    named = named_weights(blocks)
    assert len(named) == 5 + 2 * 16 + 2 + 7
    assert len({id(weight) for weight in named.values()}) == len(named)
    assert [name for name in named if name.startswith("hid_1/attention")] == [
        f"hid_1/attention/{name}"
        for name in (
            *(
                f"{part}/{leaf}"
                for part in ("query", "key", "value")
                for leaf in ("kernel", "bias")
            ),
            *(
                "output/dense/kernel",
                "output/dense/bias",
                "output/layer_norm/gamma",
                "output/layer_norm/beta",
            ),
        )
    ]
    for block_name, block in blocks:
        assert all(weight.path.startswith((block_name, "emb/word/")) for weight in block.weights)


def test_running_adds_no_weight(tiny, blocks, make_examples, hidden_of):
    before = list(named_weights(blocks))
    hidden_of(blocks, make_examples(tiny))
    assert list(named_weights(blocks)) == before


def test_first_values_do_not_depend_on_what_was_built_before(tiny, blocks):
    alone = build_block("hid_1", tiny, seed=1984, policy="float32")
    whole = named_weights(blocks)
    for name, weight in named_weights([("hid_1", alone)]).items():
        np.testing.assert_array_equal(weight, whole[name])


def test_the_heads_leave_the_word_table_as_it_is(tiny):
    emb = build_block("emb", tiny, seed=1, policy="float32")
    word_table(emb).assign(np.full((97, 32), 3.0))
    build_block("heads", tiny, seed=1, policy="float32", word_table=word_table(emb))
    assert (word_table(emb).numpy() == 3.0).all()


def test_first_values_are_a_cut_off_normal_distribution():
    values = initial_value(1984, "hid_0/attention/query/kernel", (512, 512), 0.02)
    assert values.dtype == np.float32
    assert np.abs(values).max() <= 0.04
    # A normal distribution cut at two standard deviations keeps 0.8796 of one.
    assert values.std() == pytest.approx(0.8796 * 0.02, rel=0.01)
    assert abs(values.mean()) < 2e-4
    assert (initial_value(1984, "a/gamma", (3,), 0.02) == 1).all()
    assert (initial_value(1984, "a/bias", (3,), 0.02) == 0).all()
    assert (initial_value(1984, "a/beta", (3,), 0.02) == 0).all()
    with pytest.raises(ValueError, match="no first value"):
        initial_value(1984, "a/moment", (3,), 0.02)


def test_another_seed_or_name_gives_unrelated_first_values():
    one = initial_value(1984, "hid_0/attention/query/kernel", (64, 64), 0.02)
    for seed, name in (
        (1985, "hid_0/attention/query/kernel"),
        (1984, "hid_1/attention/query/kernel"),
    ):
        other = initial_value(seed, name, (64, 64), 0.02)
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.08


def test_pinned_first_values():
    # Who changes these changes where every seed starts; it belongs in the changelog as such.
    values = initial_value(1984, "emb/word/embeddings", (30522, 4), 0.02)
    np.testing.assert_array_equal(
        values[0], np.array([0.0112583125, 0.0141787045, -0.009825924, 0.0016922487], np.float32)
    )


def test_names_do_not_depend_on_the_scope_in_which_blocks_are_built(tiny):
    with tf.name_scope("replica"):
        block = build_block("pool", tiny, seed=1, policy="float32")
    assert list(named_weights([("pool", block)])) == ["pool/dense/kernel", "pool/dense/bias"]


def test_a_block_lies_on_the_device_that_was_current():
    """In a process of its own, because devices are cut up before TensorFlow starts."""
    program = """
import tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
from bert_cli.config.settings import BertConfig
from bert_cli.model.bert import build_block
config = BertConfig(vocab_size=97, hidden_size=32, num_attention_heads=4, intermediate_size=64)
with tf.device("CPU:1"):
    block = build_block("hid_0", config, seed=1, policy="mixed_float16")
print({weight.value.device[-5:] for weight in block.weights})
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout == "{'CPU:1'}\n", ran.stderr


@pytest.mark.parametrize(
    ("name", "table"), [("hid_2", False), ("pooler", False), ("heads", False), ("pool", True)]
)
def test_blocks_that_do_not_fit_are_refused(name, table, tiny, blocks):
    with pytest.raises(ValueError, match=rf"block \({name}\)"):
        build_block(
            name,
            tiny,
            seed=1,
            policy="float32",
            word_table=word_table(blocks[0][1]) if table else None,
        )
