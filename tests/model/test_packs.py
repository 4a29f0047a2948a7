"""No position reads padding or another sequence: a pack gives what its sequences give alone, forward or backward."""

import numpy as np
from support.model_inputs import counts_of, gradients_of, hidden_of, make_examples

from bert_cli.data.records.formats import pack_columns
from bert_cli.model.bert import build_blocks, named_weights


def test_the_loss_logits_and_gradients_of_a_pack_are_those_of_its_sequences(model):
    blocks = build_blocks(model, seed=1, policy="float32")
    draw = np.random.default_rng(5)
    for weight in named_weights(blocks).values():
        weight.assign(weight.numpy() + draw.normal(0, 0.2, weight.shape))
    alone = make_examples(model.vocab_size, examples=6, length=24, predictions=4)
    packed = pack_columns(
        {**alone, "next_sentence_weights": np.ones(6, np.float32)},
        np.array([3, 2, 1]),
        (3 * 24, 3 * 4, 3),
        pad=0,
    )
    found = []
    for columns, sequences in ((alone, 1), (packed, 3)):
        loss, sums, gradients = gradients_of(blocks, columns, counts_of(alone))
        mlm, nsp = blocks[-1][1].scores(hidden_of(blocks, columns), sequences)
        is_real = columns.get("next_sentence_weights", np.ones((6, 1))) > 0
        logits = mlm[columns["masked_lm_weights"] > 0].numpy(), nsp[is_real].numpy()
        found.append((*logits, loss, sums, gradients))
    mlm, nsp, loss, sums, gradients = found[0]
    packed_mlm, packed_nsp, packed_loss, packed_sums, packed_gradients = found[1]
    assert nsp.shape == (6, 2) and np.abs(mlm).max() > 1
    np.testing.assert_allclose(packed_mlm, mlm, atol=1e-5)
    np.testing.assert_allclose(packed_nsp, nsp, atol=1e-5)
    np.testing.assert_allclose(packed_loss, loss, atol=1e-5)
    for name, total in sums.items():
        np.testing.assert_allclose(packed_sums[name], total, rtol=1e-5)
    assert gradients.keys() == packed_gradients.keys()
    for name, gradient in gradients.items():
        largest = max(1.0, np.abs(gradient).max())
        np.testing.assert_allclose(packed_gradients[name], gradient, atol=1e-5 * largest)
    assert max(np.abs(gradient).max() for gradient in gradients.values()) > 0.01


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
