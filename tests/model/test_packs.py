"""No position reads padding or another sequence: a pack gives what its sequences give alone, forward or backward."""

import numpy as np
import pytest
from support.model_inputs import counts_of, gradients_of, hidden_of, make_examples, random_blocks

from bert_cli.data.records.formats import pack_columns
from bert_cli.model.bert.encoder import MeanPooling
from bert_cli.model.build import build_blocks


# ModernBERT computes a pack in blocks, and its sequences alone with all scores, or in blocks.
@pytest.mark.parametrize(
    ("architecture", "length"),
    [("bert", 24), ("groupbert", 24), ("modernbert", 12), ("modernbert", 44)],
)
def test_the_loss_logits_and_gradients_of_a_pack_are_those_of_its_sequences(
    architecture, length, shapes, queries_apart
):
    blocks = random_blocks(shapes[architecture])
    head = blocks[-1][1]
    alone = make_examples(97, examples=6, length=length, predictions=4)
    packs = pack_columns(
        {**alone, "next_sentence_weights": np.ones(6, np.float32)},
        np.array([3, 2, 1]),
        (4 * length, 3 * 4, 3),
        pad=0,
    )
    results = []
    for columns, sequences in ((alone, 1), (packs, 3)):
        loss, sums, gradients = gradients_of(blocks, columns, counts_of(alone))
        hidden = hidden_of(blocks, columns)
        first = 0 if architecture == "modernbert" else sequences
        logits = [head.masked_lm(hidden[:, first:])[columns["masked_lm_weights"] > 0]]
        if first:
            is_real = columns.get("next_sentence_weights", np.ones((6, 1))) > 0
            logits.append(head.next_sentence(hidden[:, :first])[is_real])
        results.append((logits, loss, sums, gradients))
    logits, loss, sums, gradients = results[0]
    packed_logits, packed_loss, packed_sums, packed_gradients = results[1]
    assert np.abs(logits[0]).max() > 1
    for ours, packed in zip(logits, packed_logits, strict=True):
        np.testing.assert_allclose(packed, ours, atol=5e-6)
    np.testing.assert_allclose(packed_loss, loss, atol=5e-6)
    for name, total in sums.items():
        np.testing.assert_allclose(packed_sums[name], total, rtol=1e-5)
    assert gradients.keys() == packed_gradients.keys()
    for name, gradient in gradients.items():
        scale = 0.2 if name.endswith("key/bias") else np.linalg.norm(gradient)
        assert np.linalg.norm(packed_gradients[name] - gradient) < 5e-6 * scale, name


def test_the_mean_of_each_text_of_a_pack_is_that_of_its_tokens():
    numbers = np.array([[1, 1, 1, 2, 2, 0], [1, 2, 3, 3, 3, 0]], np.int32)
    hidden = np.random.default_rng(5).standard_normal((2, 6, 4)).astype(np.float32)
    batch = {"input_mask": numbers, "next_sentence_positions": np.zeros((2, 3), np.int32)}
    expected = [
        row[text == n].mean(0) if n in text else np.zeros(4)
        for row, text in zip(hidden, numbers, strict=True)
        for n in (1, 2, 3)
    ]
    means = MeanPooling.call(None, hidden, batch, None)
    np.testing.assert_allclose(means, np.stack(expected)[:, None], atol=1e-6)


def test_no_example_depends_on_padding(model):
    columns = make_examples(model.vocab_size)
    pairs = columns.items()
    longer = {n: np.pad(value, ((0, 0), (0, 4))) for n, value in pairs if value.ndim == 2}
    # Padding is masked, and not empty.
    longer["input_ids"] = np.where(longer["input_mask"], longer["input_ids"], 7)
    blocks = build_blocks(model, seed=1, policy="float32")[:-2]
    alone, padded = (hidden_of(blocks, batch) for batch in (columns, longer))
    is_real = columns["input_mask"] > 0
    np.testing.assert_allclose(padded.numpy()[:, :16][is_real], alone.numpy()[is_real], atol=1e-6)
