"""Columns of packs, compared with packs that a loop puts together."""

import numpy as np
import pytest

from bert_cli.data.records.columns import FIELDS, PACKED_FIELDS, Batch, pack_columns
from bert_cli.errors import DataError

S, P, MOST = 24, 5, 3


def some_sequences(counts: list[int], seed: int = 0) -> tuple[Batch, np.ndarray]:
    """Return sequences of 3 to 8 tokens, of which three fit into S positions, masked at some positions."""
    rng = np.random.default_rng(seed)
    rows = sum(counts)
    lengths = rng.integers(3, S // MOST + 1, rows)
    width = 16
    is_token = np.arange(width) < lengths[:, None]
    columns = {
        "input_ids": np.where(is_token, rng.integers(5, 1000, (rows, width)), 0).astype(np.int32),
        "input_mask": is_token.astype(np.int32),
        "segment_ids": (is_token & (np.arange(width) >= 2)).astype(np.int32),
        "masked_lm_positions": np.zeros((rows, P), np.int32),
        "masked_lm_ids": np.zeros((rows, P), np.int32),
        "masked_lm_weights": np.zeros((rows, P), np.float32),
        "next_sentence_labels": rng.integers(0, 2, rows).astype(np.int32),
    }
    for row in range(rows):
        masked = int(rng.integers(0, 3))
        positions = np.sort(rng.choice(np.arange(1, lengths[row]), masked, replace=False))
        columns["masked_lm_positions"][row, :masked] = positions
        columns["masked_lm_ids"][row, :masked] = rng.integers(5, 1000, masked)
        columns["masked_lm_weights"][row, :masked] = 1.0
    return columns, lengths


def pack_by_loop(
    columns: Batch, lengths: np.ndarray, counts: list[int], predictions: int, pad: int
) -> Batch:
    packs: dict[str, list[list[float]]] = {name: [] for name in PACKED_FIELDS}
    row = 0
    for count in counts:
        pack: dict[str, list[float]] = {name: [] for name in PACKED_FIELDS}
        for number in range(1, count + 1):
            start = len(pack["input_ids"])
            pack["next_sentence_positions"].append(start)
            pack["next_sentence_labels"].append(columns["next_sentence_labels"][row])
            pack["next_sentence_weights"].append(1.0)
            for position in range(lengths[row]):
                pack["input_ids"].append(columns["input_ids"][row, position])
                pack["segment_ids"].append(columns["segment_ids"][row, position])
                pack["input_mask"].append(number)
                pack["position_ids"].append(position)
            for position in range(P):
                if columns["masked_lm_weights"][row, position] > 0:
                    pack["masked_lm_positions"].append(
                        start + columns["masked_lm_positions"][row, position]
                    )
                    pack["masked_lm_ids"].append(columns["masked_lm_ids"][row, position])
                    pack["masked_lm_weights"].append(1.0)
            row += 1
        for name, values in pack.items():
            wide = {"masked_lm": predictions, "next_sentence": MOST}.get(name.rpartition("_")[0], S)
            packs[name].append(values + [pad if name == "input_ids" else 0] * (wide - len(values)))
    return {
        name: np.array(rows, np.float32 if name.endswith("weights") else np.int32)
        for name, rows in packs.items()
    }


@pytest.mark.parametrize(("seed", "pad"), [(0, 0), (1, 7), (2, 0)])
def test_packs_are_those_of_a_loop_over_their_sequences(seed: int, pad: int) -> None:
    counts = np.random.default_rng(seed).integers(1, MOST + 1, 40).tolist()
    columns, lengths = some_sequences(counts, seed)
    got = pack_columns(
        columns,
        lengths,
        np.array(counts),
        sequence_length=S,
        most=MOST,
        predictions=8,
        next_sentence=True,
        pad=pad,
    )
    expected = pack_by_loop(columns, lengths, counts, 8, pad)
    assert tuple(got) == PACKED_FIELDS
    assert set(FIELDS) < set(PACKED_FIELDS)
    for name in expected:
        assert got[name].dtype == expected[name].dtype
        np.testing.assert_array_equal(got[name], expected[name], err_msg=name)


def test_without_pairs_no_next_sentence_label_counts() -> None:
    columns, lengths = some_sequences([2, 1])
    settings = {"sequence_length": S, "most": MOST, "predictions": 8, "pad": 0}
    got = pack_columns(columns, lengths, np.array([2, 1]), next_sentence=False, **settings)
    assert not got["next_sentence_weights"].any()
    with_pairs = pack_columns(columns, lengths, np.array([2, 1]), next_sentence=True, **settings)
    assert with_pairs["next_sentence_weights"].tolist() == [[1, 1, 0], [1, 0, 0]]


def test_a_pack_with_too_many_tokens_or_predictions_is_rejected() -> None:
    columns, lengths = some_sequences([3] * 20)
    settings = {"most": MOST, "next_sentence": True, "pad": 0}
    with pytest.raises(DataError, match=r"a pack \(\d+ tokens\): has room for 9"):
        pack_columns(
            columns, lengths, np.array([3] * 20), sequence_length=9, predictions=8, **settings
        )
    with pytest.raises(DataError, match=r"a pack \(\d masked positions\): has room for 2"):
        pack_columns(
            columns, lengths, np.array([3] * 20), sequence_length=S, predictions=2, **settings
        )
