"""Losses are sums in float32; test_parity and test_task_heads compare their values with PyTorch."""

import numpy as np
from support.model_inputs import make_examples

from bert_cli.model.bert import build_blocks


def test_scores_of_float16_are_summed_in_float32(tiny):
    """exp(12) already leaves float16, and so do a few thousand losses added up."""
    heads = build_blocks(tiny, seed=1, policy="float16")[-1][1]
    heads.masked_lm.bias.assign(np.linspace(-300, 300, 97))
    columns = make_examples(tiny.vocab_size, examples=512)
    hidden = np.zeros((512, 6, 32), np.float16)
    loss, sums = heads(hidden, columns, {"masked": np.float32(1e5), "pairs": np.float32(1e5)}, None)
    assert np.isfinite(loss)
    assert float(sums["mlm_loss"]) > 65504
