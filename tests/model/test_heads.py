"""Losses are sums over this micro-batch divided by counts of the whole step."""

import numpy as np
import pytest

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


def test_sums_are_those_of_numpy(tiny, blocks, make_examples, counts_of):
    columns, counts = (
        make_examples(tiny, examples=16),
        {"masked": np.float32(70), "pairs": np.float32(40)},
    )
    hidden = np.random.default_rng(0).normal(size=(16, 6, 32)).astype(np.float32) * 3
    heads = blocks[-1][1]
    mlm, nsp = (value.numpy() for value in heads.logits(hidden))
    assert mlm.shape == (16, 5, 97) and nsp.shape == (16, 2)
    loss, sums = heads(hidden, columns, counts, None)
    weights, ids, nexts = (
        columns[n] for n in ("masked_lm_weights", "masked_lm_ids", "next_sentence_labels")
    )
    expected = {
        "mlm_loss": (cross_entropy(mlm, ids) * weights).sum(),
        "mlm_correct": ((mlm.argmax(-1) == ids) * weights).sum(),
        "nsp_loss": cross_entropy(nsp, nexts).sum(),
        "nsp_correct": (nsp.argmax(-1) == nexts).sum(),
    }
    for name, value in expected.items():
        assert float(sums[name]) == pytest.approx(value, rel=1e-6), name
    assert 0 < expected["nsp_correct"] < 16
    assert float(loss) == pytest.approx(
        expected["mlm_loss"] / 70 + expected["nsp_loss"] / 40, rel=1e-6
    )


def test_right_answers_are_counted_by_weight(tiny, blocks, make_examples):
    columns = make_examples(tiny)
    hidden = np.random.default_rng(0).normal(size=(4, 6, 32)).astype(np.float32) * 3
    heads = blocks[-1][1]
    mlm, _ = heads.logits(hidden)
    columns["masked_lm_ids"] = mlm.numpy().argmax(-1)
    _, sums = heads(hidden, columns, {"masked": np.float32(1), "pairs": np.float32(1)}, None)
    assert (
        float(sums["mlm_correct"])
        == columns["masked_lm_weights"].sum()
        < columns["masked_lm_weights"].size
    )


def test_the_weight_decides_not_the_label(tiny, blocks, make_examples):
    """Word 0 may be an answer, and any label may stand where the weight is 0."""
    columns = make_examples(tiny)
    hidden = np.random.default_rng(0).normal(size=(4, 6, 32)).astype(np.float32)
    counts = {"masked": np.float32(1), "pairs": np.float32(1)}
    heads = blocks[-1][1]
    before, _ = heads(hidden, columns, counts, None)
    unused = columns["masked_lm_weights"] == 0
    assert unused.any()
    same, _ = heads(
        hidden,
        {**columns, "masked_lm_ids": np.where(unused, 42, columns["masked_lm_ids"])},
        counts,
        None,
    )
    assert float(same) == float(before)
    zero, _ = heads(
        hidden, {**columns, "masked_lm_ids": np.zeros_like(columns["masked_lm_ids"])}, counts, None
    )
    mlm, nsp = (value.numpy() for value in heads.logits(hidden))
    expected = (cross_entropy(mlm, np.zeros((4, 5), int)) * columns["masked_lm_weights"]).sum()
    assert float(zero) == pytest.approx(
        expected + cross_entropy(nsp, columns["next_sentence_labels"]).sum(), rel=1e-6
    )


def test_micro_batches_add_up_to_the_big_batch(
    tiny, blocks, make_examples, counts_of, gradients_of
):
    """Uneven numbers of masked tokens: means of means would differ in the second digit."""
    columns = make_examples(tiny, examples=8)
    counts = counts_of(columns)
    loss, sums, gradients = gradients_of(blocks, columns, counts)
    parts = [
        gradients_of(
            blocks, {name: column[start : start + size] for name, column in columns.items()}, counts
        )
        for start, size in ((0, 1), (1, 4), (5, 3))
    ]
    assert float(sum(part[0] for part in parts)) == pytest.approx(float(loss), abs=1e-6)
    for name, value in sums.items():
        assert float(sum(part[1][name] for part in parts)) == pytest.approx(float(value), rel=1e-6)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(
            sum(part[2][name].numpy() for part in parts), gradient, atol=1e-6, err_msg=name
        )


def test_scores_of_float16_are_summed_in_float32(tiny, make_examples):
    """exp(12) already leaves float16, and so do a few thousand losses added up."""
    heads = build_blocks(tiny, seed=1, policy="float16")[-1][1]
    heads.masked_lm.bias.assign(np.linspace(-300, 300, 97))
    columns = make_examples(tiny, examples=512)
    hidden = np.zeros((512, 6, 32), np.float16)
    loss, sums = heads(hidden, columns, {"masked": np.float32(1e5), "pairs": np.float32(1e5)}, None)
    assert np.isfinite(loss)
    assert float(sums["mlm_loss"]) > 65504
