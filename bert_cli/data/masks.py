"""Masked tokens of examples (Devlin et al. 2018, section 3.1), for a block of them at once.

Every random bit is a hash of the example's key and the place, so that a mask never depends on which
rows stand beside it: the same function masks records once when they are written and anew each time
when they are read.

Shapes: B examples, S places, P masked places, V words.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bert_cli.config.data import Masking
from bert_cli.data.instances import SpecialIds
from bert_cli.data.random_bits import PLACES, REPLACEMENTS, Ints, Keys, bits

_NOT_CHOSEN = np.uint64(0xFFFFFFFFFFFFFFFF)
_PLACE_BITS = np.uint64(0xFFFF)  # S is at most 65535


class Masked(NamedTuple):
    """What the model reads and is to predict."""

    input_ids: npt.NDArray[np.int32]
    """[B, S] tokens with the masked ones replaced."""
    positions: npt.NDArray[np.int32]
    """[B, P] masked places in ascending order, then zeros."""
    ids: npt.NDArray[np.int32]
    """[B, P] the tokens that stood there, then zeros."""
    weights: npt.NDArray[np.float32]
    """[B, P] 1.0 for a prediction, 0.0 for padding."""


def mask_examples(
    tokens_BS: Ints,
    lengths_B: Ints,
    first_lengths_B: Ints,
    labels_B: Ints | npt.NDArray[np.bool_],
    keys_B: Keys,
    *,
    special: SpecialIds,
    vocab_size: int,
    predictions: int,
    masking: Masking,
    is_continuation: npt.NDArray[np.bool_] | None = None,
) -> dict[str, npt.NDArray[Any]]:
    """Mask rows of tokens, as `mask_tokens` does; return all that an example has, by its name.

    `first_lengths` count [CLS], segment A and its [SEP]; a label is 1 for a random next. The arrays
    are int32, the weights float32.
    """
    masked = mask_tokens(
        tokens_BS,
        lengths_B,
        keys_B,
        special=special,
        vocab_size=vocab_size,
        predictions=predictions,
        masking=masking,
        is_continuation=is_continuation,
    )
    places = np.arange(tokens_BS.shape[1])
    is_token_BS = places < lengths_B[:, None]
    return {
        "input_ids": masked.input_ids,
        "input_mask": is_token_BS.astype(np.int32),
        "segment_ids": (is_token_BS & (places >= first_lengths_B[:, None])).astype(np.int32),
        "masked_lm_positions": masked.positions,
        "masked_lm_ids": masked.ids,
        "masked_lm_weights": masked.weights,
        "next_sentence_labels": labels_B.astype(np.int32),
    }


def mask_tokens(
    tokens_BS: Ints,
    lengths_B: Ints,
    keys_B: Keys,
    *,
    special: SpecialIds,
    vocab_size: int,
    predictions: int,
    masking: Masking,
    is_continuation: npt.NDArray[np.bool_] | None = None,
) -> Masked:
    """Choose `min(P, max(1, round(0.15 length)))` places of each row and replace them 80/10/10.

    As in Devlin et al. 2018, section 3.1. Never [CLS], [SEP] or padding; 80 % become [MASK], 10 % a
    word drawn from the whole vocabulary, 10 % stay. The length counts the special tokens. Whole words
    need `is_continuation` [V] (pieces that continue a word) and come in random order; those that do
    not fit in what is left are passed over, so that a row may have fewer predictions, none if its
    every word has more pieces than predictions are wanted.
    """
    sequence_length = tokens_BS.shape[1]
    places = np.arange(sequence_length)
    allowed_BS = (
        (tokens_BS != special.cls) & (tokens_BS != special.sep) & (places < lengths_B[:, None])
    )
    wanted_B = np.clip(np.rint(lengths_B * masking.probability).astype(np.int64), 1, predictions)
    order_BS = (bits(keys_B, PLACES, places) & ~_PLACE_BITS) | places.astype(np.uint64)
    if masking.unit == "token":
        places_BP = _single_places(
            order_BS, allowed_BS, wanted_B, min(predictions, sequence_length)
        )
    else:
        assert is_continuation is not None
        follows_BS = is_continuation[tokens_BS]
        follows_BS[:, 0] = False
        follows_BS[:, 1:] &= allowed_BS[:, :-1]  # what was cut off from its word begins one
        places_BP = _word_places(
            order_BS, allowed_BS, allowed_BS & ~follows_BS, wanted_B, predictions
        )
    return _replace(
        tokens_BS,
        places_BP,
        keys_B,
        special=special,
        vocab_size=vocab_size,
        predictions=predictions,
    )


def _single_places(
    order_BS: Keys, allowed_BS: npt.NDArray[np.bool_], wanted_B: npt.NDArray[np.int64], most: int
) -> npt.NDArray[np.int64]:
    """Places of the `wanted` smallest random numbers of each row, ascending; S for none."""
    order_BS[~allowed_BS] = _NOT_CHOSEN
    smallest_BP = np.sort(np.partition(order_BS, most - 1, axis=1)[:, :most], axis=1)
    chosen_BP = (np.arange(most) < wanted_B[:, None]) & (smallest_BP != _NOT_CHOSEN)
    places_BP = np.where(chosen_BP, (smallest_BP & _PLACE_BITS).astype(np.int64), order_BS.shape[1])
    return np.sort(places_BP, axis=1)


def _word_places(
    order_BS: Keys,
    allowed_BS: npt.NDArray[np.bool_],
    starts_BS: npt.NDArray[np.bool_],
    wanted_B: npt.NDArray[np.int64],
    predictions: int,
) -> npt.NDArray[np.int64]:
    """Places of whole words in random order, as many as fit, ascending; S for none."""
    rows, length = order_BS.shape
    words_BS = np.maximum(np.cumsum(starts_BS, axis=1) - 1, 0)
    numbers = (words_BS + np.arange(rows)[:, None] * length)[allowed_BS]
    sizes_BS = np.bincount(numbers, minlength=rows * length).reshape(rows, length)
    shuffled_BS = np.sort(np.where(starts_BS, order_BS, _NOT_CHOSEN), axis=1)
    taken_BS = np.zeros((rows, length), np.bool_)
    left_B = wanted_B.copy()
    row = np.arange(rows)  # those that still want a place and have a word
    for turn in range(length):
        start = shuffled_BS[row, turn]
        goes_on = (left_B[row] > 0) & (start != _NOT_CHOSEN)
        row, start = row[goes_on], start[goes_on]
        if not len(row):
            break
        word = words_BS[row, (start & _PLACE_BITS).astype(np.int64)]
        size = sizes_BS[row, word]
        fits = size <= left_B[row]
        left_B[row] -= np.where(fits, size, 0)
        taken_BS[row, word] = fits
    chosen_BS = allowed_BS & np.take_along_axis(taken_BS, words_BS, axis=1)
    return np.sort(np.where(chosen_BS, np.arange(length), length), axis=1)[:, :predictions]


def _replace(
    tokens_BS: Ints,
    places_BP: npt.NDArray[np.int64],
    keys_B: Keys,
    *,
    special: SpecialIds,
    vocab_size: int,
    predictions: int,
) -> Masked:
    """Replace the chosen places 80/10/10 and pad the targets to P with zeros."""
    rows, length = tokens_BS.shape
    most = places_BP.shape[1]
    chosen_BP = places_BP < length
    places_BP = np.where(chosen_BP, places_BP, 0)
    drawn_BP = bits(keys_B, REPLACEMENTS, places_BP)
    coin_BP = drawn_BP >> np.uint64(32)
    word_BP = ((drawn_BP & np.uint64(0xFFFFFFFF)) * np.uint64(vocab_size)) >> np.uint64(32)
    labels_BP = np.take_along_axis(tokens_BS, places_BP, axis=1).astype(np.int32)
    replaced_BP = np.where(
        coin_BP < np.uint64(0.8 * 2**32),
        np.int32(special.mask),
        np.where(coin_BP < np.uint64(0.9 * 2**32), word_BP.astype(np.int32), labels_BP),
    )
    input_ids = np.array(tokens_BS, np.int32)
    row = np.broadcast_to(np.arange(rows)[:, None], places_BP.shape)
    input_ids[row[chosen_BP], places_BP[chosen_BP]] = replaced_BP[chosen_BP]
    positions = np.zeros((rows, predictions), np.int32)
    ids = np.zeros((rows, predictions), np.int32)
    weights = np.zeros((rows, predictions), np.float32)
    positions[:, :most] = places_BP
    ids[:, :most] = np.where(chosen_BP, labels_BP, 0)
    weights[:, :most] = chosen_BP
    return Masked(input_ids, positions, ids, weights)
