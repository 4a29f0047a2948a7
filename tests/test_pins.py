"""Bits that never change: runs that were ever started continue with them, and files that were made are read with them.

Only a change that says so in the changelog, and makes such runs refuse to resume, may change `pins.json`. The pin of
static records is in `data/steps/test_tokenize.py`.
"""

from hashlib import sha256

import numpy as np
import pytest

from bert_cli.data.examples.source import Packs
from bert_cli.data.random import permute, row_keys
from bert_cli.data.records.masking import MaskRecipe, mask_examples
from bert_cli.data.text import duplicates
from bert_cli.data.tokens.notation import SpecialIds
from bert_cli.facts.masking import Masking


def order_of_records():
    return permute(np.arange(10), 1000, seed=1984, epoch=3)


def packs_of_records():
    packs = Packs(np.arange(100) * 7 % 10 + 30, 128, 3, seed=1984)
    return packs.records(np.array([0, 11, 22, 33]), np.full(4, 2))


def masked_words():
    tokens = np.random.default_rng(0).integers(5, 1000, (2, 128)).astype(np.int32)
    tokens[:, 0], tokens[:, 40], tokens[:, 59], tokens[:, 60:] = 2, 3, 3, 0
    thirds = (np.arange(1000) % 3 == 0) & (np.arange(1000) > 4)
    recipe = MaskRecipe(SpecialIds(0, 1, 2, 3, 4), 1000, Masking(unit="word"), 9, thirds)
    lengths = np.full(2, 60)
    batch = mask_examples(tokens, lengths, lengths, lengths, row_keys(np.arange(2), 0), recipe)
    positions = batch["masked_lm_positions"]
    return np.stack([positions, np.take_along_axis(batch["input_ids"], positions, axis=1)])


def signature_of_a_document():
    pytest.importorskip("rensa")
    document = duplicates._Document(near=True)
    document.add("bake the lomi of the rato in a river, and sail it home.")
    return sha256(document.signature()).hexdigest()[:16]


def kept_by_dropout():
    import tensorflow as tf

    from bert_cli.model.arithmetic.fused import dropout_seed, keep_mask

    mask = keep_mask((64,), 0.5, dropout_seed(tf.constant([7, 3], tf.int32), 5))
    return np.packbits(np.asarray(mask)).tobytes().hex()


def first_values_of_a_weight():
    from bert_cli.model.build import initial_value

    return initial_value(1984, "emb/word/embeddings", (30522, 4), 0.02)[0]


def ids_of_random_rounding():
    from bert_cli.optim.optimizer import Hyperparameters, Optimizer

    made = Optimizer(kind=None, hyperparameters=Hyperparameters(), rules={}, seed=1984)
    return [made.weight_id(name) for name in ("emb/word/embeddings", "hid_0/a/bias")]


def factors_of_unit_scaling():
    from bert_cli.facts.bert import BertConfig
    from bert_cli.facts.products import BatchShape
    from bert_cli.model.arithmetic.scaling import factors

    config = BertConfig(hidden_size=96, num_hidden_layers=2, num_attention_heads=3, vocab_size=1009)
    table = factors(config, BatchShape(6, 40, 7, 2))
    rows = sorted((name, *(f"{number:.6g}" for number in row)) for name, row in table.items())
    return sha256(repr(rows).encode()).hexdigest()[:16]


MADE = (order_of_records, packs_of_records, masked_words, signature_of_a_document)
MADE += (kept_by_dropout, first_values_of_a_weight)
MADE += (ids_of_random_rounding, factors_of_unit_scaling)


@pytest.mark.parametrize("made", MADE, ids=lambda made: made.__name__)
def test_what_a_seed_makes_never_changes(made, pins):
    pin = pins[made.__name__.replace("_", " ")]
    value = made()
    if isinstance(value, np.ndarray):
        np.testing.assert_array_equal(value, np.array(pin, value.dtype))
    else:
        assert value == pin


def test_every_pin_is_compared(pins):
    assert pins.keys() == {made.__name__.replace("_", " ") for made in MADE} | {"static records"}
