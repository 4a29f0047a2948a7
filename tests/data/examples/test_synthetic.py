"""Synthetic examples, packs and features."""

import numpy as np
import pytest
from support.corpora import sequences_of

from bert_cli.data.examples.reader import Batching
from bert_cli.data.examples.synthetic import SyntheticStream
from bert_cli.data.finetune.synthetic import synthetic_features
from bert_cli.data.records.formats import PACKED_FIELDS
from bert_cli.facts import heads
from bert_cli.facts.masking import Masking

S, P, WORDS = 64, 9, 1000


def synthetic(**changes):
    settings = {"vocab_size": WORDS, "seed": 1984, "sequence_length": S, "predictions": P} | changes
    return SyntheticStream(Batching(16, 4), **settings)


def test_synthetic_packs_look_like_real_ones():
    rows = synthetic(max_sequences_per_pack=3).rows(np.arange(2000))
    assert tuple(rows) == PACKED_FIELDS
    counts = rows["input_mask"].max(axis=1)
    assert set(counts) == {2, 3}
    totals = (rows["input_mask"] > 0).sum(axis=1)
    assert rows["input_ids"].min() == 0 and rows["input_ids"].max() < WORDS
    assert totals.mean() > 0.8 * S
    sequences = sequences_of(rows)
    assert len(sequences) == counts.sum()
    for sequence in sequences:
        tokens, segments = sequence["tokens"], sequence["segments"]
        assert len(tokens) >= 6 and (tokens[0], tokens[-1]) == (2, 3)
        assert (segments[0], segments[-1]) == (0, 1) and tokens[segments.index(1) - 1] == 3
    assert np.mean([sequence["label"] for sequence in sequences]) == pytest.approx(0.5, abs=0.03)
    assert rows["masked_lm_weights"].sum() == pytest.approx(0.15 * totals.sum(), rel=0.03)


def test_three_of_four_synthetic_examples_have_the_full_length():
    lengths = synthetic().rows(np.arange(2000))["input_mask"].sum(axis=1)
    assert (lengths == S).mean() == pytest.approx(0.75, abs=0.03) and lengths.min() >= 6


def test_synthetic_text_is_masked_as_the_run_says():
    fractions = []
    for settings in ({}, {"unit": "word"}):
        rows = synthetic(masking=Masking(**settings)).rows(np.arange(500))
        is_masked = np.zeros((500, S), np.bool_)
        row, slot = np.nonzero(rows["masked_lm_weights"])
        is_masked[row, rows["masked_lm_positions"][row, slot]] = True
        # How often the next token is masked too.
        fractions.append((is_masked[:, 1:] & is_masked[:, :-1]).sum() / is_masked.sum())
    assert fractions[0] < 0.2 < fractions[1]


@pytest.mark.parametrize(
    ("head", "labels", "columns"),
    [
        (heads.QUESTION_ANSWERING, 2, {"start_positions", "end_positions"}),
        (heads.SEQUENCE_CLASSIFICATION, 3, {"labels"}),
        (heads.SEQUENCE_CLASSIFICATION, 1, {"labels"}),
        (heads.TOKEN_CLASSIFICATION, 9, {"labels", "label_weights"}),
    ],
)
def test_synthetic_features_have_the_shapes_and_labels_of_a_head(head, labels, columns):
    for length in (8, 512):
        sizes = {"labels": labels, "vocab_size": 99, "sequence_length": length}
        made = synthetic_features(head, 400, **sizes, seed=5)
        assert made.fingerprint != synthetic_features(head, 400, **sizes, seed=6).fingerprint
        assert len(made) == 400 and made.lengths.max() == length and made.lengths.min() > 1
        assert made.tokens.min() >= 5 and made.tokens.max() == 98
        batch = made.batch(np.arange(400), length)
        assert set(batch) == {"input_ids", "segment_ids", "input_mask", *columns}
        if head is heads.QUESTION_ANSWERING:
            start, end = batch["start_positions"], batch["end_positions"]
            # After the question, and inside the window.
            assert (np.argmax(batch["segment_ids"], axis=1) <= start).all()
            assert (start <= end).all() and (end < made.lengths).all()
        elif labels == 1:
            assert 0.0 <= batch["labels"].min() < 1.0 and 4.0 < batch["labels"].max() <= 5.0
        else:
            assert set(np.unique(batch["labels"])) == set(range(labels))
        if head is heads.TOKEN_CLASSIFICATION:
            weights = batch["label_weights"]
            assert (weights.sum(axis=1) == made.lengths - 2).all() and not weights[:, 0].any()
            assert not batch["labels"][weights == 0].any()
