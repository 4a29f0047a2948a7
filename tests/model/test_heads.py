"""Losses are sums over this micro-batch divided by counts of the whole step."""

import numpy as np
import pytest
from support.model_inputs import make_examples

from bert_cli.model.bert import build_blocks


@pytest.fixture(scope="module")
def blocks(tiny):
    return build_blocks(tiny, seed=1, policy="float32")


def cross_entropy(logits, labels):
    logits = logits.astype(np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    every = (
        np.log(np.exp(shifted).sum(-1)) - np.take_along_axis(shifted, labels[..., None], -1)[..., 0]
    )
    return every


def test_sums_are_those_of_numpy(tiny, blocks):
    columns = make_examples(tiny.vocab_size, examples=16)
    counts = {"masked": np.float32(70), "pairs": np.float32(40)}
    hidden = np.random.default_rng(0).normal(size=(16, 6, 32)).astype(np.float32) * 3
    heads = blocks[-1][1]
    mlm, nsp = (value.numpy() for value in heads.logits(hidden))
    assert mlm.shape == (16, 5, 97) and nsp.shape == (16, 2)
    weights, nexts = columns["masked_lm_weights"], columns["next_sentence_labels"]
    # Some right predictions, word 0 as an answer, and labels where the weight is 0.
    ids = columns["masked_lm_ids"] = mlm.argmax(-1)
    ids[::3], ids[1::3] = 0, 42
    assert 0 < (weights[::3] > 0).sum() < weights[::3].size
    loss, sums = heads(hidden, columns, counts, None)
    expected = {
        "mlm_loss": (cross_entropy(mlm, ids) * weights).sum(),
        "mlm_correct": ((mlm.argmax(-1) == ids) * weights).sum(),
        "nsp_loss": cross_entropy(nsp, nexts).sum(),
        "nsp_correct": (nsp.argmax(-1) == nexts).sum(),
    }
    for name, value in expected.items():
        assert float(sums[name]) == pytest.approx(value, rel=1e-6), name
    assert 0 < expected["mlm_correct"] < weights.sum() and 0 < expected["nsp_correct"] < 16
    assert float(loss) == pytest.approx(
        expected["mlm_loss"] / 70 + expected["nsp_loss"] / 40, rel=1e-6
    )


def test_scores_of_float16_are_summed_in_float32(tiny):
    """exp(12) already leaves float16, and so do a few thousand losses added up."""
    heads = build_blocks(tiny, seed=1, policy="float16")[-1][1]
    heads.masked_lm.bias.assign(np.linspace(-300, 300, 97))
    columns = make_examples(tiny.vocab_size, examples=512)
    hidden = np.zeros((512, 6, 32), np.float16)
    loss, sums = heads(hidden, columns, {"masked": np.float32(1e5), "pairs": np.float32(1e5)}, None)
    assert np.isfinite(loss)
    assert float(sums["mlm_loss"]) > 65504
