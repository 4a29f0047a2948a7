"""The columns of a batch, their limits, and the columns of packs made from those of their sequences.

The sequences of a pack follow one another from its first position. So the tokens of a block of packs, read row by row,
are those of its sequences, read one by one, and a column of packs is one masked assignment.

Shapes: B packs, R sequences in the order of their packs, S positions, P masked positions, C most sequences of a pack.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bert_cli.errors import DataError

Batch = dict[str, npt.NDArray[Any]]
"""The columns by name, [M, B, ...] of the micro-batches of a step or [n, ...] of any examples."""

Ints = npt.NDArray[np.integer[Any]]

# The columns, in this order; weights are float32, all others int32.
FIELDS = (
    "input_ids",  # [S]
    "input_mask",  # [S] 1 for a token; in a pack k for the tokens of its k-th sequence
    "segment_ids",  # [S]
    "masked_lm_positions",  # [P]
    "masked_lm_ids",  # [P]
    "masked_lm_weights",  # [P]
    "next_sentence_labels",  # [] or, of a pack, [C]
    "next_sentence_weights",  # the same: 0 where there is no such label
)
PACKED_FIELDS = (
    *FIELDS,
    "position_ids",  # [S] from 0 in each sequence
    "next_sentence_positions",  # [C] position of each sequence's [CLS]
)


def value_limits(vocab_size: int, sequence_length: int, sequences: int) -> dict[str, int]:
    """Return the largest value of each column of examples; the smallest is 0 in all of them."""
    of_positions = ("masked_lm_positions", "position_ids", "next_sentence_positions")
    limits = dict.fromkeys(PACKED_FIELDS, 1) | dict.fromkeys(of_positions, sequence_length - 1)
    return limits | {
        "input_ids": vocab_size - 1,
        "masked_lm_ids": vocab_size - 1,
        "input_mask": sequences,
    }


class Outside(NamedTuple):
    """A value that is outside 0 to a limit."""

    column: str
    row: int
    value: float
    limit: int


def first_outside(columns: Batch, limits: Mapping[str, int]) -> Outside | None:
    """Return the first value outside 0 to the limit of its column; None if there is none.

    Columns are int32 or float32; NaN is outside.
    """
    for name, values in columns.items():
        # Read as unsigned, negative numbers and NaN are larger than every limit: one pass finds both.
        limit = np.array(limits[name], values.dtype).view(np.uint32)
        if values.size and values.view(np.uint32).max() > limit:
            wrong = np.argwhere(~((values >= 0) & (values <= limits[name])))
            if wrong.size:
                return Outside(name, int(wrong[0][0]), values[tuple(wrong[0])].item(), limits[name])
    return None


def label_weights(labels: Ints, next_sentence: bool) -> npt.NDArray[np.float32]:
    """Return the weights of next-sentence labels, in their shape: 0 where the corpus has no pairs."""
    return np.full(labels.shape, next_sentence, np.float32)


def pack_columns(
    sequences: Batch,
    lengths_R: Ints,
    counts_B: Ints,
    *,
    sequence_length: int,
    most: int,
    predictions: int,
    next_sentence: bool,
    pad: int,
) -> Batch:
    """Put masked sequences into packs, of which each has the next `counts` of them.

    `sequences` has the columns of unpacked examples, whose tokens come before their padding. `predictions` are those
    of a pack and `most` is C. DataError when a pack has too many tokens or predictions.
    """
    ends_R = np.cumsum(lengths_R, dtype=np.int64)
    totals_B = np.diff(ends_R[np.cumsum(counts_B) - 1], prepend=0)
    starts_R = ends_R - lengths_R - np.repeat(np.cumsum(totals_B) - totals_B, counts_B)
    is_sequence_BC = np.arange(most) < counts_B[:, None]
    number_R = np.arange(len(lengths_R)) - np.repeat(np.cumsum(counts_B) - counts_B, counts_B)
    is_token_RS = np.arange(sequences["input_ids"].shape[1]) < lengths_R[:, None]
    is_token_BS = np.arange(sequence_length) < totals_B[:, None]
    is_masked_RP = sequences["masked_lm_weights"] > 0
    pack_R = np.repeat(np.arange(len(counts_B)), counts_B)
    masked_B = np.bincount(pack_R, is_masked_RP.sum(axis=1), len(counts_B)).astype(np.int64)
    is_masked_BP = np.arange(predictions) < masked_B[:, None]
    _check_room("tokens", totals_B, sequence_length)
    _check_room("masked positions", masked_B, predictions)

    packed: Batch = {}

    def put(name: str, values: npt.NDArray[Any], where: npt.NDArray[np.bool_], empty: int) -> None:
        dtype = np.float32 if name.endswith("weights") else np.int32
        packed[name] = np.full(where.shape, empty, dtype)
        packed[name][where] = values

    put("input_ids", sequences["input_ids"][is_token_RS], is_token_BS, pad)
    put("input_mask", np.repeat(number_R + 1, lengths_R), is_token_BS, 0)
    put("segment_ids", sequences["segment_ids"][is_token_RS], is_token_BS, 0)
    positions = np.arange(ends_R[-1]) - np.repeat(ends_R - lengths_R, lengths_R)
    put("position_ids", positions, is_token_BS, 0)
    positions_RP = sequences["masked_lm_positions"] + starts_R[:, None]
    put("masked_lm_positions", positions_RP[is_masked_RP], is_masked_BP, 0)
    for name in ("masked_lm_ids", "masked_lm_weights"):
        put(name, sequences[name][is_masked_RP], is_masked_BP, 0)
    put("next_sentence_positions", starts_R, is_sequence_BC, 0)
    put("next_sentence_labels", sequences["next_sentence_labels"], is_sequence_BC, 0)
    weights_R = label_weights(sequences["next_sentence_labels"], next_sentence)
    put("next_sentence_weights", weights_R, is_sequence_BC, 0)
    return {name: packed[name] for name in PACKED_FIELDS}


def _check_room(unit: str, counts_B: npt.NDArray[np.int64], room: int) -> None:
    if int(counts_B.max(initial=0)) > room:
        raise DataError(
            f"a pack ({counts_B.max()} {unit})",
            f"has room for {room}, by the lengths and masked_lm_prob that corpus.json names",
            "its records were made otherwise, make them again",
        )
