"""Layer-wise decay of the learning rate: by depth, for every weight, and really in the move."""

import keras
import numpy as np
import pytest

from bert_cli.optim.adam import Adam, Rule, assign, patterns
from bert_cli.optim.optimizer import Optimizer, decayed_by_layer

NAMES = [
    "emb/word/embeddings", "emb/layer_norm/gamma", "hid_0/attention/query/kernel", "hid_1/feed_forward/inner/bias",
    "hid_10/feed_forward/inner/bias", "hid_11/attention/output/layer_norm/beta", "pool/dense/kernel",
    "glue_head/classifier/kernel",
]  # fmt: skip


def test_the_rate_falls_from_the_top_layer_to_the_embeddings():
    rules = decayed_by_layer(assign(NAMES, patterns("AdamW")), 0.5)
    powers = {name: int(np.log2(1 / rule.rate)) for name, rule in rules.items()}
    assert list(powers.values()) == [13, 13, 12, 11, 2, 1, 0, 0]


def test_nothing_else_of_a_rule_changes():
    before = assign(NAMES, patterns("LAMB"))
    for name, rule in decayed_by_layer(before, 0.9).items():
        assert (rule.decays, rule.adapts) == (before[name].decays, before[name].adapts)
    assert decayed_by_layer(before, 1.0) == before


@pytest.mark.parametrize("optimizer", ["AdamW", "LAMB"])
def test_a_weight_moves_by_its_share_of_the_rate(optimizer):
    weight, along = np.array([1.0, -2.0], np.float32), np.array([0.5, 0.25], np.float32)
    squared = (np.float32((weight**2).sum()), np.float32((along**2).sum()))
    moved = []
    for rate in (1.0, 0.25):
        rule = Rule(decays=False, adapts=optimizer == "LAMB", rate=rate)
        made = Optimizer(numbers=Adam(), rules={"w": rule}, seed=0)
        new = made.moved(rule, 0, weight, along, squared, 0.1, made.key(made.number("w"), 0))
        moved.append(keras.ops.convert_to_numpy(new) - weight)
    # The move is the difference of two float32 numbers of up to 2: each is rounded.
    np.testing.assert_allclose(moved[1], 0.25 * moved[0], rtol=1e-5, atol=3e-7)
    assert np.all(moved[0] != 0)


def test_a_model_without_layers_has_its_embeddings_below_the_heads():
    rules = decayed_by_layer(
        assign(["emb/word/embeddings", "pool/dense/bias"], patterns("AdamW")), 0.5
    )
    assert [rule.rate for rule in rules.values()] == [0.5, 1.0]
