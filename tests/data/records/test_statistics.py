"""The figures of a sample, beside counts by hand."""

from pathlib import Path

import numpy as np
import pytest

from bert_cli.data.records.statistics import SampleStatistics, labels_of, unmasked
from bert_cli.data.records.vocab import Vocabulary
from bert_cli.errors import DataError

PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", ".", "sat")
PAD, UNK, CLS, SEP, MASK, THE, CAT, S, DOT, SAT = range(len(PIECES))
VOCABULARY = Vocabulary(Path(), PIECES, "")


def batch_of(*rows: dict) -> dict[str, np.ndarray]:
    """Examples of 12 places and 4 predictions, from what is not padding in them."""
    wanted = {
        "input_ids": (12, np.int32),
        "input_mask": (12, np.int32),
        "segment_ids": (12, np.int32),
        "masked_lm_positions": (4, np.int32),
        "masked_lm_ids": (4, np.int32),
        "masked_lm_weights": (4, np.float32),
    }
    made = {name: np.zeros((len(rows), size), kind) for name, (size, kind) in wanted.items()}
    for number, row in enumerate(rows):
        for name, array in made.items():
            array[number, : len(row[name])] = row[name]
    labels = [row["next_sentence_labels"] for row in rows]
    return made | {"next_sentence_labels": np.array(labels, np.int32)}


# [CLS] the cats . [SEP] sat [UNK] [SEP], where "cat" is masked, "." replaced and "sat" kept.
ONE = {
    "input_ids": [CLS, THE, MASK, S, THE, SEP, SAT, UNK, SEP],
    "input_mask": [1] * 9,
    "segment_ids": [0] * 6 + [1] * 3,
    "masked_lm_positions": [2, 4, 6],
    "masked_lm_ids": [CAT, DOT, SAT],
    "masked_lm_weights": [1, 1, 1],
    "next_sentence_labels": 1,
}


def tallied(batch: dict[str, np.ndarray]) -> SampleStatistics:
    tally = SampleStatistics(VOCABULARY)
    tally.add(batch)
    return tally


def test_the_tokens_of_an_example_are_put_back_as_they_stood_before_masking():
    wanted = [CLS, THE, CAT, S, DOT, SEP, SAT, UNK, SEP, 0, 0, 0]
    assert unmasked(batch_of(ONE)).tolist() == [wanted]


def test_figures_are_what_one_counts_by_hand():
    found = tallied(batch_of(ONE)).report(records=1)
    assert found["real_token_share"] == 9 / 12
    assert found["tokens_per_sequence"] == 9
    assert found["masked_share_of_tokens"] == 3 / 9
    assert found["masks_shown_as_mask"] == 1 / 3
    assert found["masks_shown_as_another_word"] == 1 / 3
    assert found["masks_shown_as_they_are"] == 1 / 3
    assert found["unknown_share_of_tokens"] == 1 / 6
    # the, cat ##s, sat: neither "." nor [UNK] is a word that was cut into pieces.
    assert found["pieces_per_word"] == 4 / 3
    assert found["random_next_share"] == 1.0
    assert found["examples_with_all_predictions"] == 0.0


def test_blocks_add_up_to_the_figures_of_all_rows():
    other = ONE | {
        "next_sentence_labels": 0,
        "input_ids": [CLS, CAT, S, S, DOT, SEP, SAT, UNK, SEP],
    }
    apart = SampleStatistics(VOCABULARY)
    for row in (ONE, other, ONE):
        apart.add(batch_of(row))
    together = tallied(batch_of(ONE, other, ONE))
    assert apart.report(9) == together.report(9)
    assert apart.lengths == together.lengths == {9: 3}
    assert together.report(9)["random_next_share"] == 2 / 3


def test_a_piece_that_was_cut_off_from_its_word_begins_one():
    cut = {name: value[:3] for name, value in ONE.items() if name != "next_sentence_labels"}
    cut |= {"input_ids": [CLS, S, S], "masked_lm_weights": [0], "next_sentence_labels": 0}
    assert tallied(batch_of(cut)).report(1)["pieces_per_word"] == 2.0


def test_what_cannot_be_had_is_none_and_not_a_number():
    empty = {name: [] for name in ONE} | {"next_sentence_labels": 0}
    found = tallied(batch_of(empty)).report(1)
    shares = ["tokens_per_sequence", "masked_share_of_tokens", "masks_shown_as_mask"]
    shares += ["unknown_share_of_tokens", "pieces_per_word", "equals_per_example"]
    assert {found[name] for name in shares} == {None}
    assert found["real_token_share"] == 0.0


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
    tally = tallied(batch)
    found = tally.report(1)
    assert (found["examples"], found["sequences"], found["sequences_per_example"]) == (1, 2, 2.0)
    assert tally.lengths == {5: 1, 4: 1}
    assert (found["next_sentence_labels"], found["random_next_share"]) == (1, 1.0)
    labels, counts = labels_of(batch)
    assert labels.tolist() == [[1, 0]] and counts.tolist() == [[True, False]]
    # The second sequence alone, unpacked, is the same text.
    alone = {
        name: value[5:] for name, value in pack.items() if name in ("input_ids", "segment_ids")
    }
    alone |= {"input_mask": [1] * 4, "next_sentence_labels": 0}
    alone |= {name: [] for name in pack if name.startswith("masked")}
    tally.add(batch_of(alone))
    assert tally.report(2)["repeated_texts"] == 1


def test_equal_texts_are_told_with_and_without_their_masks():
    kept = ONE | {"input_ids": [CLS, THE, CAT, S, DOT, SEP, SAT, UNK, SEP]}
    other = ONE | {"input_ids": [CLS, CAT, MASK, S, THE, SEP, SAT, UNK, SEP]}
    found = tallied(batch_of(ONE, kept, ONE, other)).report(4)
    assert found["repeated_texts"] == 2
    assert found["repeated_texts_with_their_masks"] == 1
    assert found["equal_pairs"] == 3
    # Of four examples three have two equals each.
    assert found["equals_per_example"] == 6 / 4


def test_a_sample_tells_the_equals_in_the_whole_folder():
    # 2,000 records: 300 texts three times, 1,100 once: 900 x 2 equals over 2,000 records.
    texts = np.concatenate([np.repeat(np.arange(300), 3), np.arange(300, 1400)])
    found = []
    for seed in range(30):
        chosen = np.random.default_rng(seed).permutation(texts)[:300]
        tally = SampleStatistics(VOCABULARY)
        rows = len(chosen)
        batch = batch_of(*[ONE | {"masked_lm_weights": [0, 0, 0]}] * rows)
        for place in range(1, 12):
            batch["input_ids"][:, place] = chosen // 5 ** (place % 6) % 5 + 5
        batch["input_mask"][:] = 1
        tally.add(batch)
        found.append(tally.report(2000)["equals_per_example"])
    assert np.mean(found) == pytest.approx(1800 / 2000, rel=0.15)
    assert min(found) > 0


@pytest.mark.parametrize("name", ["input_ids", "masked_lm_ids"])
@pytest.mark.parametrize("number", [len(PIECES), -1])
def test_a_token_that_the_vocabulary_does_not_have_is_refused(name, number):
    changed = list(ONE[name])
    changed[1] = number
    with pytest.raises(DataError, match=f"the vocabulary has {len(PIECES)} tokens"):
        tallied(batch_of(ONE | {name: changed}))
