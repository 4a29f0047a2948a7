"""Masked tokens of a block of examples (Devlin et al. 2018, "BERT", section 3.1).

Every random bit is a hash of the example's key and a position, so a mask depends neither on the other rows of a block
nor on the process that draws it. A mask covers single tokens or all tokens of a word.

Shapes: B examples, S positions, P masked positions, V vocabulary size, W words of a row, at most S.
"""

from dataclasses import dataclass

import numpy as np

from bert_cli.arrays import Bools, Ints, Ints32, Ints64, UInts64
from bert_cli.data.random import bits
from bert_cli.data.records.formats import Batch
from bert_cli.data.tokens.notation import SpecialIds
from bert_cli.facts.masking import Masking

STRIDE = np.array(0xD1B54A32D192ED03, np.uint64)
# Purposes of random bits: masked positions, their replacements, cuts of segments.
POSITIONS, REPLACEMENTS, CUTS = STRIDE * np.arange(1, 4, dtype=np.uint64)
_NEVER = np.uint64(0xFFFFFFFFFFFFFFFF)
# The low bits of a random number hold its position: one sort orders by the number and gives the position.
_POSITION_BITS = np.uint64(0xFFFF)  # S is at most 65535


@dataclass(frozen=True)
class MaskRecipe:
    """The values besides the tokens that masks depend on: vocabulary and settings."""

    special: SpecialIds
    vocab_size: int
    masking: Masking
    predictions: int  # P, the most masked positions of an example
    is_continuation: Bools | None = None  # [V] tokens that continue a word, for whole words


def mask_examples(
    tokens_BS: Ints,
    lengths_B: Ints,
    first_lengths_B: Ints,
    labels_B: Ints | Bools,
    keys_B: UInts64,
    recipe: MaskRecipe,
) -> Batch:
    """Mask rows of tokens and return all columns of the examples, int32 and weights float32.

    `first_lengths` count [CLS], segment A and its [SEP]; a label is 1 for a random next. Of each row
    `min(P, max(1, round(0.15 length)))` tokens are masked. [CLS], [SEP] and padding never are, but [CLS] and [SEP]
    count in the length. 80 % of the masked tokens become [MASK], 10 % any token of the vocabulary, 10 % stay.
    Whole words are taken in random order as long as they fit, so a row may have fewer predictions.
    """
    positions = np.arange(tokens_BS.shape[1])
    is_token_BS = positions < lengths_B[:, None]
    special = recipe.special
    masking = recipe.masking
    predictions = recipe.predictions
    maskable_BS = is_token_BS & (tokens_BS != special.cls) & (tokens_BS != special.sep)
    # 15 % of the tokens, with [CLS] and [SEP], at least one: as in Google's create_pretraining_data.py.
    quotas_B = np.clip(np.rint(lengths_B * masking.probability).astype(np.int64), 1, predictions)
    order_BS = (bits(keys_B, POSITIONS, positions) & ~_POSITION_BITS) | positions.astype(np.uint64)
    if masking.unit == "token":
        positions_BP = _choose_tokens(order_BS, maskable_BS, quotas_B, predictions)
    else:
        assert recipe.is_continuation is not None
        continues_BS = continuations(tokens_BS, maskable_BS, recipe.is_continuation)
        is_masked_BS = _choose_words(order_BS, maskable_BS, continues_BS, quotas_B)
        sorted_BS = np.sort(np.where(is_masked_BS, positions, len(positions)), axis=1)
        positions_BP = sorted_BS[:, :predictions]
    return {
        "input_mask": is_token_BS.astype(np.int32),
        "segment_ids": (is_token_BS & (positions >= first_lengths_B[:, None])).astype(np.int32),
        "next_sentence_labels": labels_B.astype(np.int32),
        **_replace(tokens_BS, positions_BP, keys_B, recipe),
    }


def _choose_tokens(
    order_BS: UInts64, maskable_BS: Bools, quotas_B: Ints64, predictions: int
) -> Ints64:
    """Return the positions of the `quotas` [B] smallest random numbers, ascending, then S."""
    length = order_BS.shape[1]
    width = min(predictions, length)
    order_BS[~maskable_BS] = _NEVER
    # A partition finds the P smallest without sorting all S.
    smallest_BP = np.sort(np.partition(order_BS, width - 1, axis=1)[:, :width], axis=1)
    is_chosen_BP = (np.arange(width) < quotas_B[:, None]) & (smallest_BP != _NEVER)
    positions_BP = (smallest_BP & _POSITION_BITS).astype(np.int64)
    return np.sort(np.where(is_chosen_BP, positions_BP, length), axis=1)


def continuations(tokens_BS: Ints, is_text_BS: Bools, is_continuation_V: Bools) -> Bools:
    """Return the positions that continue a word; a continuation whose first piece was truncated begins one."""
    continues_BS = is_text_BS & is_continuation_V[tokens_BS]
    continues_BS[:, 0] = False
    continues_BS[:, 1:] &= is_text_BS[:, :-1]
    return continues_BS


def unmasked(batch: Batch) -> Ints32:
    """Return the tokens [B, S] of masked examples before masking."""
    tokens_BS = np.array(batch["input_ids"], np.int32)
    row, column = np.nonzero(batch["masked_lm_weights"] > 0)
    tokens_BS[row, batch["masked_lm_positions"][row, column]] = batch["masked_lm_ids"][row, column]
    return tokens_BS


def _choose_words(
    order_BS: UInts64, maskable_BS: Bools, continues_BS: Bools, quotas_B: Ints64
) -> Bools:
    """Return which positions [B, S] are masked: words in random order, each that still fits into the quota."""
    rows, length = maskable_BS.shape
    begins_BS = maskable_BS & ~continues_BS
    # [B, S] the word of each position, from 0 in each row.
    numbers_BS = np.maximum(np.cumsum(begins_BS, axis=1) - 1, 0)
    numbers = (numbers_BS + np.arange(rows)[:, None] * length)[maskable_BS]
    sizes_BW = np.bincount(numbers, minlength=rows * length).reshape(rows, length)
    is_chosen_BW = np.zeros((rows, length), np.bool_)
    left_B = quotas_B.copy()
    row = np.arange(rows)
    # The n-th word of all rows at once: as many rounds as the row with the most words needs.
    for order_B in np.sort(np.where(begins_BS, order_BS, _NEVER), axis=1).T:
        row = row[(left_B[row] > 0) & (order_B[row] != _NEVER)]
        if not len(row):
            break
        begin = (order_B[row] & _POSITION_BITS).astype(np.int64)
        word = row, numbers_BS[row, begin]
        fits = sizes_BW[word] <= left_B[row]
        left_B[row] -= np.where(fits, sizes_BW[word], 0)
        is_chosen_BW[word] = fits
    return maskable_BS & np.take_along_axis(is_chosen_BW, numbers_BS, axis=1)


def _replace(tokens_BS: Ints, positions_BP: Ints64, keys_B: UInts64, recipe: MaskRecipe) -> Batch:
    """Replace the tokens at these positions 80/10/10 and pad the targets to P with zeros."""
    rows, width = positions_BP.shape
    is_masked_BP = positions_BP < tokens_BS.shape[1]
    positions_BP = np.where(is_masked_BP, positions_BP, 0)
    drawn_BP = bits(keys_B, REPLACEMENTS, positions_BP)
    # One draw of 64 bits: the upper half decides what replaces the token, the lower half which token.
    coin_BP = drawn_BP >> np.uint64(32)
    low_BP = drawn_BP & np.uint64(0xFFFFFFFF)
    # A product instead of a remainder: uniform up to V / 2^32 (Lemire 2019).
    random_BP = ((low_BP * np.uint64(recipe.vocab_size)) >> np.uint64(32)).astype(np.int32)
    labels_BP = np.take_along_axis(tokens_BS, positions_BP, axis=1).astype(np.int32)
    replaced_BP = np.where(
        coin_BP < np.uint64(0.8 * 2**32),
        np.int32(recipe.special.mask),
        np.where(coin_BP < np.uint64(0.9 * 2**32), random_BP, labels_BP),
    )
    input_ids = np.array(tokens_BS, np.int32)
    row = np.broadcast_to(np.arange(rows)[:, None], positions_BP.shape)
    input_ids[row[is_masked_BP], positions_BP[is_masked_BP]] = replaced_BP[is_masked_BP]
    columns = {"input_ids": input_ids}
    for name, values, dtype in (
        ("masked_lm_positions", positions_BP, np.int32),
        ("masked_lm_ids", np.where(is_masked_BP, labels_BP, 0), np.int32),
        ("masked_lm_weights", is_masked_BP, np.float32),
    ):
        columns[name] = np.zeros((rows, recipe.predictions), dtype)
        columns[name][:, :width] = values
    return columns
