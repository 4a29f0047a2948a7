"""Losses are sums over this micro-batch divided by counts of the whole step."""

import numpy as np
import pytest
from support.model_inputs import make_examples

from bert_cli.model.bert import build_blocks


def test_correct_predictions_are_counted_and_losses_divided_by_the_counts_of_the_step(tiny):
    columns = make_examples(tiny.vocab_size, examples=16)
    counts = {"masked": np.float32(70), "pairs": np.float32(40)}
    hidden = np.random.default_rng(0).normal(size=(16, 6, 32)).astype(np.float32) * 3
    heads = build_blocks(tiny, seed=1, policy="float32")[-1][1]
    mlm, nsp = (value.numpy() for value in heads.logits(hidden))
    assert mlm.shape == (16, 5, 97) and nsp.shape == (16, 2)
    weights, nexts = columns["masked_lm_weights"], columns["next_sentence_labels"]
    # Some right predictions, word 0 as an answer, and labels where the weight is 0.
    ids = columns["masked_lm_ids"] = mlm.argmax(-1)
    ids[::3], ids[1::3] = 0, 42
    assert 0 < (weights[::3] > 0).sum() < weights[::3].size
    loss, sums = heads(hidden, columns, counts, None)
    mlm_correct, nsp_correct = (mlm.argmax(-1) == ids) * weights, nsp.argmax(-1) == nexts
    assert float(sums["mlm_correct"]) == mlm_correct.sum() and 0 < mlm_correct.sum() < weights.sum()
    assert float(sums["nsp_correct"]) == nsp_correct.sum() and 0 < nsp_correct.sum() < 16
    total = float(sums["mlm_loss"]) / 70 + float(sums["nsp_loss"]) / 40
    assert float(loss) == pytest.approx(total, rel=1e-6)


def test_scores_of_float16_are_summed_in_float32(tiny):
    """exp(12) already leaves float16, and so do a few thousand losses added up."""
    heads = build_blocks(tiny, seed=1, policy="float16")[-1][1]
    heads.masked_lm.bias.assign(np.linspace(-300, 300, 97))
    columns = make_examples(tiny.vocab_size, examples=512)
    hidden = np.zeros((512, 6, 32), np.float16)
    loss, sums = heads(hidden, columns, {"masked": np.float32(1e5), "pairs": np.float32(1e5)}, None)
    assert np.isfinite(loss)
    assert float(sums["mlm_loss"]) > 65504
