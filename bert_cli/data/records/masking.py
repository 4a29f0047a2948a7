"""Masked tokens of a block of examples (Devlin et al. 2018, "BERT", section 3.1).

Every random bit is a hash of the example's key and a position, so a mask depends neither on the other rows of a block
nor on the process that draws it. A mask covers single tokens, whole words, or spans of words (Joshi et al. 2020,
"SpanBERT", section 3.1).

Shapes: B examples, S positions, P masked positions, V vocabulary size, W words of a row, at most S.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bert_cli.config.data import Masking
from bert_cli.data.random import Ints, Keys, Numbers, bits
from bert_cli.data.records.formats import Batch
from bert_cli.data.tokens.tokenizer import SpecialIds

Flags = npt.NDArray[np.bool_]

STRIDE = np.array(0xD1B54A32D192ED03, np.uint64)
POSITIONS, REPLACEMENTS, CUTS, SPANS = STRIDE * np.arange(1, 5, dtype=np.uint64)
"""Purposes of random bits: masked positions, their replacements, cuts of segments, lengths of spans."""
_NEVER = np.uint64(0xFFFFFFFFFFFFFFFF)
_POSITION_BITS = np.uint64(0xFFFF)  # S is at most 65535


@dataclass(frozen=True)
class MaskRecipe:
    """The values besides the tokens that masks depend on: vocabulary and settings."""

    special: SpecialIds
    vocab_size: int
    masking: Masking
    predictions: int  # P, the most masked positions of an example
    is_continuation: Flags | None = None  # [V] tokens that continue a word, for words and spans

    def with_probability(self, probability: float | None) -> "MaskRecipe":
        """Return the recipe with another fraction of masked tokens, unless that is None."""
        if probability is None:
            return self
        return replace(self, masking=self.masking.model_copy(update={"probability": probability}))


class _Words(NamedTuple):
    """The words of rows, numbered from 0 in each row."""

    begins: Flags  # [B, S] whether a position begins a word
    numbers: Numbers  # [B, S] the word of a position; without meaning outside words
    sizes: Numbers  # [B, W] tokens of each word; 0 after the last word of a row


def mask_examples(
    tokens_BS: Ints,
    lengths_B: Ints,
    first_lengths_B: Ints,
    labels_B: Ints | Flags,
    keys_B: Keys,
    recipe: MaskRecipe,
) -> Batch:
    """Mask rows of tokens and return all columns of the examples, int32 and weights float32.

    `first_lengths` count [CLS], segment A and its [SEP]; a label is 1 for a random next. Of each row
    `min(P, max(1, round(0.15 length)))` tokens are masked. [CLS], [SEP] and padding never are, but [CLS] and [SEP]
    count in the length. 80 % of the masked tokens become [MASK], 10 % any token of the vocabulary, 10 % stay, drawn
    once for a span. Whole words are taken in random order as long as they fit, so a row may have fewer predictions.
    """
    positions = np.arange(tokens_BS.shape[1])
    is_token_BS = positions < lengths_B[:, None]
    special = recipe.special
    masking = recipe.masking
    predictions = recipe.predictions
    maskable_BS = is_token_BS & (tokens_BS != special.cls) & (tokens_BS != special.sep)
    quotas_B = np.clip(np.rint(lengths_B * masking.probability).astype(np.int64), 1, predictions)
    order_BS = (bits(keys_B, POSITIONS, positions) & ~_POSITION_BITS) | positions.astype(np.uint64)
    if masking.unit == "token":
        positions_BP = draws_BP = _choose_tokens(order_BS, maskable_BS, quotas_B, predictions)
    else:
        assert recipe.is_continuation is not None
        words = _find_words(tokens_BS, maskable_BS, recipe.is_continuation)
        span_begins_BW = _choose_spans(order_BS, words, quotas_B, keys_B, masking)
        begins_BS = np.take_along_axis(span_begins_BW, words.numbers, axis=1)
        is_masked_BS = maskable_BS & (begins_BS > 0)
        sorted_BS = np.sort(np.where(is_masked_BS, positions, len(positions)), axis=1)
        positions_BP = draws_BP = sorted_BS[:, :predictions]
        if masking.unit == "span":
            draws_BP = np.take_along_axis(begins_BS, positions_BP % len(positions), axis=1)
    return {
        "input_mask": is_token_BS.astype(np.int32),
        "segment_ids": (is_token_BS & (positions >= first_lengths_B[:, None])).astype(np.int32),
        "next_sentence_labels": labels_B.astype(np.int32),
        **_replace(tokens_BS, positions_BP, draws_BP, keys_B, recipe),
    }


def _choose_tokens(
    order_BS: Keys, maskable_BS: Flags, quotas_B: Numbers, predictions: int
) -> Numbers:
    """Return the positions of the `quotas` [B] smallest random numbers, ascending, then S."""
    length = order_BS.shape[1]
    width = min(predictions, length)
    order_BS[~maskable_BS] = _NEVER
    smallest_BP = np.sort(np.partition(order_BS, width - 1, axis=1)[:, :width], axis=1)
    is_chosen_BP = (np.arange(width) < quotas_B[:, None]) & (smallest_BP != _NEVER)
    positions_BP = (smallest_BP & _POSITION_BITS).astype(np.int64)
    return np.sort(np.where(is_chosen_BP, positions_BP, length), axis=1)


def continuations(tokens_BS: Ints, is_text_BS: Flags, is_continuation_V: Flags) -> Flags:
    """Return the positions that continue a word; a continuation whose first piece was truncated begins one."""
    continues_BS = is_text_BS & is_continuation_V[tokens_BS]
    continues_BS[:, 0] = False
    continues_BS[:, 1:] &= is_text_BS[:, :-1]
    return continues_BS


def unmasked(batch: Batch) -> npt.NDArray[np.int32]:
    """Return the tokens [B, S] of masked examples before masking."""
    tokens_BS = np.array(batch["input_ids"], np.int32)
    row, column = np.nonzero(batch["masked_lm_weights"] > 0)
    tokens_BS[row, batch["masked_lm_positions"][row, column]] = batch["masked_lm_ids"][row, column]
    return tokens_BS


def _find_words(tokens_BS: Ints, maskable_BS: Flags, is_continuation: Flags) -> _Words:
    rows, length = tokens_BS.shape
    begins_BS = maskable_BS & ~continuations(tokens_BS, maskable_BS, is_continuation)
    numbers_BS = np.maximum(np.cumsum(begins_BS, axis=1) - 1, 0)
    numbers = (numbers_BS + np.arange(rows)[:, None] * length)[maskable_BS]
    sizes_BW = np.bincount(numbers, minlength=rows * length).reshape(rows, length)
    return _Words(begins_BS, numbers_BS, sizes_BW)


def _choose_spans(
    order_BS: Keys, words: _Words, quotas_B: Numbers, keys_B: Keys, masking: Masking
) -> Numbers:
    """Return the position where the span of each masked word begins; 0 for a word that is not masked.

    Joshi et al. 2020, section 3.1: a length and a first word are drawn until enough is masked. A span ends early with
    its segment, before a masked word, and before a word that does not fit. Whole words are spans of one word.
    """
    length = order_BS.shape[1]
    longest = min(masking.longest_span, length) if masking.unit == "span" else 1
    within = np.arange(longest)
    # Sizes of 0 after the last word, so that a span may reach beyond it.
    sizes_BW = np.pad(words.sizes, ((0, 0), (0, longest)))
    begins_BW = np.sort(np.where(words.begins, np.arange(length), length), axis=1)
    # Positions between a word and the previous word: not 0 where a [SEP] separates them.
    gaps_BW = np.zeros_like(sizes_BW)
    gaps_BW[:, 1:length] = begins_BW[:, 1:] - begins_BW[:, :-1] - words.sizes[:, :-1]
    span_begins_BW = np.zeros_like(sizes_BW)
    left_B = quotas_B.copy()
    row = np.arange(len(order_BS))
    for order_B in np.sort(np.where(words.begins, order_BS, _NEVER), axis=1).T:
        wants_more = (left_B[row] > 0) & (order_B[row] != _NEVER)
        row = row[wants_more]
        if not len(row):
            break
        begin = (order_B[row] & _POSITION_BITS).astype(np.int64)[:, None]
        lengths = _span_lengths(bits(keys_B[row], SPANS, begin), masking) if longest > 1 else 1
        span = row[:, None], words.numbers[row[:, None], begin] + within
        sizes = sizes_BW[span]
        fits = (within < lengths) & (sizes > 0) & (span_begins_BW[span] == 0)
        fits &= (within == 0) | (gaps_BW[span] == 0)
        fits &= np.cumsum(sizes, axis=1) <= left_B[row][:, None]
        fits = np.logical_and.accumulate(fits, axis=1)
        left_B[row] -= np.where(fits, sizes, 0).sum(axis=1)
        span_begins_BW[span] = np.where(fits, begin, span_begins_BW[span])
    return span_begins_BW[:, :length]


def _span_lengths(drawn: Keys, masking: Masking) -> Numbers:
    """Return the words per span; a length is `1 - span_stop` times as likely as the length before it."""
    likelihoods = (1.0 - masking.span_stop) ** np.arange(masking.longest_span)
    upto = np.cumsum(likelihoods)[:-1] / likelihoods.sum()
    return 1 + np.searchsorted((upto * 2**53).astype(np.uint64), drawn >> np.uint64(11), "right")


def _replace(
    tokens_BS: Ints, positions_BP: Numbers, draws_BP: Numbers, keys_B: Keys, recipe: MaskRecipe
) -> Batch:
    """Replace the tokens at these positions 80/10/10 and pad the targets to P with zeros.

    The kind of replacement is drawn at the position in `draws`, a random token at its own position.
    """
    rows, width = positions_BP.shape
    is_masked_BP = positions_BP < tokens_BS.shape[1]
    positions_BP = np.where(is_masked_BP, positions_BP, 0)
    coin_BP = bits(keys_B, REPLACEMENTS, draws_BP) >> np.uint64(32)
    low_BP = bits(keys_B, REPLACEMENTS, positions_BP) & np.uint64(0xFFFFFFFF)
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
