"""A pack gives what its sequences give alone: no position reads another sequence, forward or backward."""

import numpy as np
import pytest
import tensorflow as tf

from bert_cli.model.bert import build_blocks, named_weights

LENGTH, MOST, PREDICTED = 24, 3, 4
# Lengths of the sequences of each pack; the second is not full, the last one is alone.
PACKS = ((9, 8, 7), (12, 9), (24,))


@pytest.fixture(scope="module")
def sequences(tiny):
    """Each sequence alone: tokens, segments, masked positions, labels."""
    draw = np.random.default_rng(0)
    made = []
    for length in (length for pack in PACKS for length in pack):
        masked = draw.permutation(np.arange(1, length - 1))[: draw.integers(1, PREDICTED + 1)]
        made.append(
            {
                "input_ids": draw.integers(1, tiny.vocab_size, length),
                "segment_ids": (np.arange(length) > length // 2).astype(int),
                "masked_lm_positions": np.sort(masked),
                "masked_lm_ids": draw.integers(0, tiny.vocab_size, len(masked)),
                "next_sentence_labels": draw.integers(2, size=1),
                "masked_lm_weights": np.ones(len(masked)),
                "next_sentence_weights": np.ones(1),
                "position_ids": np.arange(length),
                "next_sentence_positions": np.zeros(1, int),
            }
        )
    return made


def columns_of(packs, sequences_of_pack):
    """Return the columns of packs, each a list of sequences."""
    widths = {"masked_lm": sequences_of_pack * PREDICTED, "next_sentence": sequences_of_pack}
    rows = []
    for pack in packs:
        lengths = [len(sequence["input_ids"]) for sequence in pack]
        starts = np.cumsum([0, *lengths])[:-1]
        row = {"input_mask": np.repeat(np.arange(1, len(pack) + 1), lengths)}
        for name in pack[0]:
            moves = name in ("masked_lm_positions", "next_sentence_positions")
            parts = zip(pack, starts, strict=True)
            row[name] = np.concatenate([one[name] + start * moves for one, start in parts])
        rows.append(row)
    columns = {}
    for name in rows[0]:
        kind = next((kind for kind in widths if name.startswith(kind)), None)
        dtype = np.float32 if name.endswith("weights") else np.int32
        columns[name] = np.zeros((len(rows), widths.get(kind, LENGTH)), dtype)
        for number, row in enumerate(rows):
            columns[name][number, : len(row[name])] = row[name]
    return columns


def alone(sequences):
    columns = columns_of([[sequence] for sequence in sequences], 1)
    for name in ("position_ids", "next_sentence_positions", "next_sentence_weights"):
        del columns[name]
    return {**columns, "next_sentence_labels": columns["next_sentence_labels"][:, 0]}


def packed(sequences):
    ends = np.cumsum([len(lengths) for lengths in PACKS])
    packs = [sequences[end - len(lengths) : end] for end, lengths in zip(ends, PACKS, strict=True)]
    return columns_of(packs, MOST)


def run(blocks, columns):
    """Loss, sums, logits [predictions, V] and [sequences, 2] of what is real, and gradients by name."""
    *body, (_, heads) = blocks
    weights = named_weights(blocks)
    variables = {name: getattr(weight, "value", weight) for name, weight in weights.items()}
    counts = {"masked": np.float32(columns["masked_lm_weights"].sum()), "pairs": np.float32(6)}
    with tf.GradientTape() as tape:
        hidden = None
        for _, block in body:
            hidden = block(hidden, columns, None)
        loss, sums = heads(hidden, columns, counts, None)
    found = tape.gradient(loss, list(variables.values()))
    gradients = {n: tf.convert_to_tensor(g).numpy() for n, g in zip(variables, found, strict=True)}
    many = 1 if columns["next_sentence_labels"].ndim == 1 else MOST
    mlm, nsp = (logits.numpy() for logits in heads.scores(hidden, many))
    known = columns.get("next_sentence_weights", np.ones((len(mlm), 1)))
    mlm, nsp = mlm[columns["masked_lm_weights"] > 0], nsp[known > 0]
    return float(loss), {name: float(value) for name, value in sums.items()}, mlm, nsp, gradients


@pytest.fixture(scope="module")
def both(tiny, sequences):
    blocks = build_blocks(tiny, seed=1, policy="float32")
    draw = np.random.default_rng(5)
    for weight in named_weights(blocks).values():
        weight.assign(weight.numpy() + draw.normal(0, 0.2, weight.shape))
    return blocks, run(blocks, alone(sequences)), run(blocks, packed(sequences))


def test_the_loss_logits_and_gradients_of_a_pack_are_those_of_its_sequences(both):
    _, (loss, sums, mlm, nsp, gradients), packed_run = both
    packed_loss, packed_sums, packed_mlm, packed_nsp, packed_gradients = packed_run
    assert nsp.shape == (6, 2) and np.abs(mlm).max() > 1
    np.testing.assert_allclose(packed_mlm, mlm, atol=1e-5)
    np.testing.assert_allclose(packed_nsp, nsp, atol=1e-5)
    assert packed_loss == pytest.approx(loss, abs=1e-5)
    assert packed_sums == pytest.approx(sums, rel=1e-5)
    assert gradients.keys() == packed_gradients.keys()
    for name, gradient in gradients.items():
        largest = max(1.0, np.abs(gradient).max())
        np.testing.assert_allclose(packed_gradients[name], gradient, atol=1e-5 * largest)
    assert max(np.abs(gradient).max() for gradient in gradients.values()) > 0.01
