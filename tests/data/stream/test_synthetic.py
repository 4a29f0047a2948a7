"""Made-up packs: what a run on packs needs to be tried without data."""

from typing import Any

import numpy as np
import pytest

from bert_cli.config.data import Masking
from bert_cli.data.finetune.features import Features
from bert_cli.data.records.columns import PACKED_FIELDS
from bert_cli.data.stream.synthetic import GeneratedReader, generated_features
from bert_cli.errors import ConfigError

S, P, WORDS = 64, 9, 1000


def made_up(**changes: Any) -> GeneratedReader:
    settings = {"vocab_size": WORDS, "seed": 1984, "sequence_length": S, "predictions": P}
    settings |= {"max_sequences_per_pack": 3}
    return GeneratedReader(examples_per_step=16, micro_batch_size=4, **(settings | changes))


def test_made_up_packs_look_like_real_ones() -> None:
    rows = made_up().rows(np.arange(2000))
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


def test_a_step_of_made_up_packs_is_a_function_of_seed_and_step() -> None:
    one, again = made_up(), made_up()
    for name, array in one[7].items():
        np.testing.assert_array_equal(again[7][name], array)
        assert array.shape[:2] == (4, 4)
    halves = [made_up(part=part, parts=2)[7] for part in range(2)]
    for name, array in one[7].items():
        np.testing.assert_array_equal(np.concatenate([h[name] for h in halves]), array)
    assert one.fingerprint != made_up(max_sequences_per_pack=1).fingerprint
    assert not np.array_equal(made_up(seed=3)[7]["input_ids"], one[7]["input_ids"])


@pytest.mark.parametrize("most", [0, 11])
def test_more_sequences_than_places_have_room_for_are_refused(most: int) -> None:
    with pytest.raises(ConfigError, match=rf"max_sequences_per_pack \({most}\): .* 1 to 10"):
        made_up(max_sequences_per_pack=most)


def test_made_up_text_is_masked_as_the_run_says() -> None:
    def chosen(**said: Any) -> np.ndarray:
        rows = made_up(max_sequences_per_pack=1, masking=Masking(**said)).rows(np.arange(500))
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
    assert made_up(masking=Masking(probability=0.3)).masked_places > made_up().masked_places


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
        return generated_features(
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


def test_synthetic_features_need_some_words() -> None:
    with pytest.raises(ConfigError, match="at least 8 of each"):
        generated_features("qa_head", 4, labels=2, vocab_size=7, sequence_length=64, seed=0)
