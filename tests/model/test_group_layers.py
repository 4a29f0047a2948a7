"""Padding changes no example, of either architecture."""

import numpy as np
from support.model_inputs import hidden_of, make_examples

from bert_cli.model.bert import build_blocks


def test_no_example_depends_on_padding(model):
    columns = make_examples(model.vocab_size)
    longer = {
        name: np.pad(column, ((0, 0), (0, 4)))
        for name, column in columns.items()
        if column.ndim == 2
    }
    # Padding is masked, and not empty.
    longer["input_ids"] = np.where(longer["input_mask"], longer["input_ids"], 7)
    blocks = build_blocks(model, seed=1, policy="float32")[:-2]
    alone, padded = (hidden_of(blocks, batch) for batch in (columns, longer))
    is_real = columns["input_mask"] > 0
    np.testing.assert_allclose(padded.numpy()[:, :16][is_real], alone.numpy()[is_real], atol=1e-6)
