"""The list of blocks: names, first values, and the freedom to build them apart."""

import numpy as np
import pytest
import tensorflow as tf

from bert_cli.model.bert import build_block, build_blocks, initial_value, named_weights


def test_first_values_depend_on_seed_and_name_alone_and_not_on_what_was_built_before(tiny):
    complete = named_weights(build_blocks(tiny, seed=1984, policy="float32"))
    with tf.name_scope("replica"), tf.device("CPU:1"):
        alone = build_block("hid_1", tiny, seed=1984, policy="float32")
    for name, weight in named_weights([("hid_1", alone)]).items():
        np.testing.assert_array_equal(weight, complete[name])
        # A block lies on the device that was current.
        assert weight.value.device.endswith("CPU:1")


def test_first_values_are_a_cut_off_normal_distribution():
    name = "hid_0/attention/query/kernel"
    values = initial_value(1984, name, (512, 512), 0.02)
    assert values.dtype == np.float32
    assert np.abs(values).max() <= 0.04
    # A normal distribution cut at two standard deviations keeps 0.8796 of one.
    assert values.std() == pytest.approx(0.8796 * 0.02, rel=0.01)
    assert abs(values.mean()) < 2e-4
    for leaf, value in (("gamma", 1), ("bias", 0), ("beta", 0)):
        assert (initial_value(1984, f"a/{leaf}", (3,), 0.02) == value).all()
    for other in ((1985, name), (1984, name.replace("hid_0", "hid_1"))):
        unrelated = initial_value(*other, (512, 512), 0.02)
        assert abs(np.corrcoef(values.ravel(), unrelated.ravel())[0, 1]) < 0.01


def test_pinned_first_values():
    # Who changes these changes where every seed starts; it belongs in the changelog as such.
    values = initial_value(1984, "emb/word/embeddings", (30522, 4), 0.02)
    np.testing.assert_array_equal(
        values[0], np.array([0.0112583125, 0.0141787045, -0.009825924, 0.0016922487], np.float32)
    )
