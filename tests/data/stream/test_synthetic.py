"""Synthetic examples, packs and features."""

from typing import Any

import numpy as np
import pytest

from bert_cli.config.data import Masking
from bert_cli.data.finetune.features import Features
from bert_cli.data.records.columns import PACKED_FIELDS
from bert_cli.data.stream.reader import Batching
from bert_cli.data.stream.synthetic import SyntheticStream, synthetic_features
from bert_cli.errors import ConfigError

S, P, WORDS = 64, 9, 1000
BATCHING = Batching(16, 4)


def synthetic(batching: Batching = BATCHING, **changes: Any) -> SyntheticStream:
    settings = {"vocab_size": WORDS, "seed": 1984, "sequence_length": S, "predictions": P}
    return SyntheticStream(batching, **settings | {"max_sequences_per_pack": 3} | changes)


def test_synthetic_packs_look_like_real_ones() -> None:
    rows = synthetic().rows(np.arange(2000))
    assert tuple(rows) == PACKED_FIELDS
    counts = rows["input_mask"].max(axis=1)
    assert np.bincount(counts).tolist()[0] == 0
    assert np.bincount(counts)[1:].min() > 500
    totals = (rows["input_mask"] > 0).sum(axis=1)
    assert 0.7 < (totals == S).mean() < 0.85
    for number in (1, 2, 3):
        lengths = (rows["input_mask"] == number).sum(axis=1)
        assert np.all((lengths >= 6) == (counts >= number))
        here = np.flatnonzero(counts >= number)
        starts = rows["next_sentence_positions"][here, number - 1]
        ends = starts + lengths[here] - 1
        assert np.all(rows["input_ids"][here, starts] == 2)
        assert np.all(rows["input_ids"][here, ends] == 3)
        assert np.all(rows["position_ids"][here, ends] == lengths[here] - 1)
        assert np.all(rows["segment_ids"][here, starts] == 0)
        assert np.all(rows["segment_ids"][here, ends] == 1)
    assert np.array_equal(rows["next_sentence_weights"], np.arange(3) < counts[:, None])
    labels = rows["next_sentence_labels"][rows["next_sentence_weights"] > 0]
    assert labels.mean() == pytest.approx(0.5, abs=0.03)
    real = rows["masked_lm_weights"] > 0
    assert real.sum(axis=1).min() >= counts.min()
    assert rows["masked_lm_ids"][real].min() >= 5
    assert real.sum() == pytest.approx(0.15 * totals.sum(), rel=0.03)


def test_synthetic_examples_look_like_real_ones() -> None:
    S, P = 16, 4
    rows = synthetic(max_sequences_per_pack=1, sequence_length=S, predictions=P).rows(
        np.arange(4000)
    )
    ids, mask, segments = rows["input_ids"], rows["input_mask"], rows["segment_ids"]
    lengths = mask.sum(axis=1)
    assert lengths.min() >= 6
    assert 0.6 < (lengths == S).mean() < 0.9
    assert not ids[mask == 0].any()
    assert np.all(ids[:, 0] == 2)
    assert np.all(ids[np.arange(4000), lengths - 1] == 3)
    assert np.all((ids == 3).sum(axis=1) <= 2 + P)
    first = (segments == 0).argmin(axis=1)
    assert np.all(ids[np.arange(4000), first - 1] == 3)
    assert np.all(segments[mask == 0] == 0)
    assert ids.min() == 0
    assert ids.max() < WORDS
    assert rows["next_sentence_labels"].mean() == pytest.approx(0.5, abs=0.05)
    counts = rows["masked_lm_weights"].sum(axis=1)
    assert np.array_equal(counts, np.clip(np.rint(0.15 * lengths), 1, P))
    real = rows["masked_lm_weights"] == 1
    positions = np.where(real, rows["masked_lm_positions"], S + np.arange(P))
    assert np.all(np.diff(positions, axis=1) > 0)
    targets = rows["masked_lm_ids"][real]
    assert targets.min() >= 5
    values = np.take_along_axis(ids, rows["masked_lm_positions"], axis=1)[real]
    assert (values == 4).mean() == pytest.approx(0.8, abs=0.03)
    assert (
        synthetic(max_sequences_per_pack=1, predictions=P, vocab_size=8, sequence_length=8)[3][
            "input_ids"
        ].max()
        < 8
    )
    with pytest.raises(ConfigError, match="at least 8"):
        synthetic(max_sequences_per_pack=1, predictions=P, vocab_size=7, sequence_length=S)


def test_more_sequences_than_fit_are_refused() -> None:
    for most in (0, 11):
        with pytest.raises(ConfigError, match=rf"max_sequences_per_pack \({most}\): .* 1 to 10"):
            synthetic(max_sequences_per_pack=most)


def test_synthetic_text_is_masked_as_the_run_says() -> None:
    def chosen(**said: Any) -> np.ndarray:
        rows = synthetic(max_sequences_per_pack=1, masking=Masking(**said)).rows(np.arange(500))
        flags = np.zeros((500, S), np.bool_)
        row, column = np.nonzero(rows["masked_lm_weights"])
        flags[row, rows["masked_lm_positions"][row, column]] = True
        return flags

    def beside_another(flags: np.ndarray) -> float:
        return float((flags[:, 1:] & flags[:, :-1]).sum() / flags.sum())

    token, word = chosen(), chosen(unit="word")
    short, long = (chosen(unit="span", longest_span=most) for most in (2, 10))
    assert token.sum() == chosen(probability=0.15).sum() > 0.95 * word.sum()
    assert np.array_equal(token, chosen(longest_span=10))
    shares = [beside_another(flags) for flags in (token, word, short, long)]
    assert shares == sorted(shares) and shares[0] < 0.2 < 0.5 < shares[3]
    assert (
        synthetic(masking=Masking(probability=0.3)).masked_positions > synthetic().masked_positions
    )


@pytest.mark.parametrize(
    ("head", "labels", "columns"),
    [
        ("qa_head", 2, {"start_positions", "end_positions"}),
        ("glue_head", 3, {"labels"}),
        ("glue_head", 1, {"labels"}),
        ("token_head", 9, {"labels", "label_weights"}),
    ],
)
@pytest.mark.parametrize("length", [8, 32, 512])
def test_synthetic_features_have_the_shapes_and_labels_of_a_head(head, labels, columns, length):
    def make(seed: int = 5) -> Features:
        return synthetic_features(
            head, 400, labels=labels, vocab_size=99, sequence_length=length, seed=seed
        )

    found = make()
    assert found.fingerprint == make().fingerprint != make(6).fingerprint
    assert len(found) == 400 and found.lengths.max() == length and found.lengths.min() > 1
    assert found.tokens.min() >= 5 and found.tokens.max() == 98
    batch = found.batch(np.arange(400), length)
    assert set(batch) == {"input_ids", "segment_ids", "input_mask", *columns}
    if head == "qa_head":
        start, end = batch["start_positions"], batch["end_positions"]
        # Behind the question, and inside the window.
        question = np.argmax(batch["segment_ids"], axis=1)
        assert (question <= start).all() and (start <= end).all() and (end < found.lengths).all()
    elif labels == 1:
        assert batch["labels"].dtype == np.float32
        assert 0.0 <= batch["labels"].min() < 1.0 and 4.0 < batch["labels"].max() <= 5.0
    else:
        assert set(np.unique(batch["labels"])) == set(range(labels))
    if head == "token_head":
        weights = batch["label_weights"]
        assert (weights.sum(axis=1) == found.lengths - 2).all() and not weights[:, 0].any()
        assert not batch["labels"][weights == 0].any()
