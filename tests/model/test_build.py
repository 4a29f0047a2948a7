"""The list of blocks: names, first values, and the freedom to build them apart."""

import numpy as np
import pytest
import tensorflow as tf

from bert_cli.model.build import (
    build_block,
    build_blocks,
    initial_value,
    named_weights,
    repeated_parts,
)


def test_first_values_depend_on_seed_and_name_alone_and_not_on_what_was_built_before(tiny):
    complete = named_weights(build_blocks(tiny, seed=1984, policy="float32"))
    with tf.name_scope("replica"), tf.device("CPU:1"):
        alone = build_block("hid_1", tiny, seed=1984, policy="float32")
    for name, weight in named_weights([("hid_1", alone)]).items():
        np.testing.assert_array_equal(weight, complete[name])
        # A block lies on the device that was current.
        assert weight.value.device.endswith("CPU:1")


def test_first_values_are_cut_off_at_two_deviations():
    values = initial_value(1984, "emb/word/embeddings", (30522, 4), 0.02)
    assert np.abs(values).max() <= 0.04
    for leaf, value in (("gamma", 1), ("bias", 0), ("beta", 0)):
        assert (initial_value(1984, f"a/{leaf}", (3,), 0.02) == value).all()


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ("", []),
        ("a", [(1, 1)]),
        ("abb", [(1, 1), (1, 2)]),
        ("eaaap", [(1, 1), (1, 3), (1, 1)]),
        ("egllgllgp", [(1, 1), (3, 2), (1, 1), (1, 1)]),
        ("abab", [(2, 2)]),
    ],
)
def test_parts_that_repeat_are_found(keys, parts):
    assert repeated_parts(keys) == parts
