"""The statistics of a sample, compared with known counts."""

from pathlib import Path

import numpy as np
import pytest

from bert_cli.data.records.inspect import SampleStatistics, labels_of, unmasked
from bert_cli.data.records.tokenizer import Vocabulary
from bert_cli.errors import DataError

PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", ".", "sat")
PAD, UNK, CLS, SEP, MASK, THE, CAT, S, DOT, SAT = range(len(PIECES))
VOCABULARY = Vocabulary(Path(), PIECES, "")


def batch_of(*rows: dict) -> dict[str, np.ndarray]:
    """Return examples of 12 positions and 4 predictions, without their padding in the rows."""
    sizes = {"input_ids": 12, "input_mask": 12, "segment_ids": 12}
    sizes |= {"masked_lm_positions": 4, "masked_lm_ids": 4, "masked_lm_weights": 4}
    batch = {
        name: np.zeros((len(rows), size), np.float32 if "weights" in name else np.int32)
        for name, size in sizes.items()
    }
    for number, row in enumerate(rows):
        for name, array in batch.items():
            array[number, : len(row[name])] = row[name]
    labels = [row["next_sentence_labels"] for row in rows]
    return batch | {"next_sentence_labels": np.array(labels, np.int32)}


# [CLS] the cats . [SEP] sat [UNK] [SEP], where "cat" is masked, "." replaced and "sat" unchanged.
ONE = {
    "input_ids": [CLS, THE, MASK, S, THE, SEP, SAT, UNK, SEP],
    "input_mask": [1] * 9,
    "segment_ids": [0] * 6 + [1] * 3,
    "masked_lm_positions": [2, 4, 6],
    "masked_lm_ids": [CAT, DOT, SAT],
    "masked_lm_weights": [1, 1, 1],
    "next_sentence_labels": 1,
}


def counted(batch: dict[str, np.ndarray]) -> SampleStatistics:
    sample = SampleStatistics(VOCABULARY)
    sample.add(batch)
    return sample


def test_the_statistics_of_one_example_are_the_known_ones():
    unmasked_tokens = [CLS, THE, CAT, S, DOT, SEP, SAT, UNK, SEP, 0, 0, 0]
    assert unmasked(batch_of(ONE)).tolist() == [unmasked_tokens]
    expected = {
        "real_token_share": 9 / 12,
        "tokens_per_sequence": 9,
        "masked_share_of_tokens": 3 / 9,
        "masks_shown_as_mask": 1 / 3,
        "masks_shown_as_another_word": 1 / 3,
        "masks_shown_as_they_are": 1 / 3,
        "unknown_share_of_tokens": 1 / 6,
        # the, cat ##s, sat: "." and [UNK] are not words that were split into pieces.
        "pieces_per_word": 4 / 3,
        "random_next_share": 1.0,
        "examples_with_all_predictions": 0.0,
    }
    report = counted(batch_of(ONE)).report(records=1)
    assert {name: report[name] for name in expected} == expected


def test_blocks_add_up_to_the_statistics_of_all_rows():
    other = ONE | {
        "next_sentence_labels": 0,
        "input_ids": [CLS, CAT, S, S, DOT, SEP, SAT, UNK, SEP],
    }
    apart = SampleStatistics(VOCABULARY)
    for row in (ONE, other, ONE):
        apart.add(batch_of(row))
    together = counted(batch_of(ONE, other, ONE))
    assert apart.report(9) == together.report(9)
    assert apart.lengths == together.lengths == {9: 3}
    assert together.report(9)["random_next_share"] == 2 / 3


def test_a_continuation_whose_first_piece_was_cut_off_begins_a_word():
    cut = {name: value[:3] for name, value in ONE.items() if name != "next_sentence_labels"}
    cut |= {"input_ids": [CLS, S, S], "masked_lm_weights": [0], "next_sentence_labels": 0}
    assert counted(batch_of(cut)).report(1)["pieces_per_word"] == 2.0


def test_a_ratio_without_a_denominator_is_none():
    empty = {name: [] for name in ONE} | {"next_sentence_labels": 0}
    report = counted(batch_of(empty)).report(1)
    names = ["tokens_per_sequence", "masked_share_of_tokens", "masks_shown_as_mask"]
    names += ["unknown_share_of_tokens", "pieces_per_word", "equals_per_example"]
    assert {report[name] for name in names} == {None}
    assert report["real_token_share"] == 0.0


def test_the_sequences_of_a_pack_are_counted_one_by_one():
    pack = {
        "input_ids": [CLS, THE, SEP, SAT, SEP, CLS, CAT, S, SEP],
        "input_mask": [1, 1, 1, 1, 1, 2, 2, 2, 2],
        "segment_ids": [0, 0, 0, 1, 1, 0, 0, 0, 0],
        "masked_lm_positions": [3],
        "masked_lm_ids": [SAT],
        "masked_lm_weights": [1],
        "next_sentence_labels": [1, 0],
    }
    batch = batch_of(pack) | {"next_sentence_weights": np.array([[1.0, 0.0]], np.float32)}
    sample = counted(batch)
    report = sample.report(1)
    assert (report["examples"], report["sequences"], report["sequences_per_example"]) == (1, 2, 2.0)
    assert sample.lengths == {5: 1, 4: 1}
    assert (report["next_sentence_labels"], report["random_next_share"]) == (1, 1.0)
    labels, counts = labels_of(batch)
    assert labels.tolist() == [[1, 0]] and counts.tolist() == [[True, False]]
    # The second sequence alone, unpacked, is the same text.
    alone = {name: pack[name][5:] for name in ("input_ids", "segment_ids")}
    alone |= {"input_mask": [1] * 4, "next_sentence_labels": 0}
    alone |= {name: [] for name in pack if name.startswith("masked")}
    sample.add(batch_of(alone))
    assert sample.report(2)["repeated_texts"] == 1


def test_equal_texts_are_counted_with_and_without_their_masks():
    unchanged = ONE | {"input_ids": [CLS, THE, CAT, S, DOT, SEP, SAT, UNK, SEP]}
    other = ONE | {"input_ids": [CLS, CAT, MASK, S, THE, SEP, SAT, UNK, SEP]}
    report = counted(batch_of(ONE, unchanged, ONE, other)).report(4)
    assert report["repeated_texts"] == 2
    assert report["repeated_texts_with_their_masks"] == 1
    assert report["equal_pairs"] == 3
    # Of four examples three have two duplicates each.
    assert report["equals_per_example"] == 6 / 4


def test_a_sample_estimates_the_duplicates_in_the_complete_folder():
    # 2,000 records: 300 texts three times, 1,100 once: 900 x 2 duplicates over 2,000 records.
    texts = np.concatenate([np.repeat(np.arange(300), 3), np.arange(300, 1400)])
    estimates = []
    for seed in range(30):
        chosen = np.random.default_rng(seed).permutation(texts)[:300]
        batch = batch_of(*[ONE | {"masked_lm_weights": [0, 0, 0]}] * len(chosen))
        for position in range(1, 12):
            batch["input_ids"][:, position] = chosen // 5 ** (position % 6) % 5 + 5
        batch["input_mask"][:] = 1
        estimates.append(counted(batch).report(2000)["equals_per_example"])
    assert np.mean(estimates) == pytest.approx(1800 / 2000, rel=0.15)
    assert min(estimates) > 0


def test_a_token_that_the_vocabulary_does_not_have_is_rejected():
    for name in ("input_ids", "masked_lm_ids"):
        for token in (len(PIECES), -1):
            changed = list(ONE[name])
            changed[1] = token
            with pytest.raises(DataError, match=f"the vocabulary has {len(PIECES)} tokens"):
                counted(batch_of(ONE | {name: changed}))
