"""Masked tokens of a block of examples (Devlin et al. 2018, "BERT", section 3.1).

Every random bit is a hash of the example's key and a position, so a mask never depends on the other rows of a block:
static records are masked by the same function when they are written as dynamic ones when they are read. A mask covers
single tokens, whole words, or spans of words (Joshi et al. 2020, "SpanBERT", section 3.1).

Shapes: B examples, S positions, P masked positions, V vocabulary size, W words of a row, of which there are at most S.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bert_cli.config.data import Masking
from bert_cli.data.records.random_bits import POSITIONS, REPLACEMENTS, SPANS, Ints, Keys, bits
from bert_cli.data.records.sentence_pairs import SpecialIds

Flags = npt.NDArray[np.bool_]
Int64s = npt.NDArray[np.int64]

_NEVER = np.uint64(0xFFFFFFFFFFFFFFFF)
_POSITION_BITS = np.uint64(0xFFFF)  # S is at most 65535


@dataclass(frozen=True)
class TokenKinds:
    """The properties of a vocabulary's tokens that masks depend on."""

    special: SpecialIds
    vocab_size: int
    is_continuation: Flags | None = None
    """[V] tokens that continue a word; needed for whole words and spans."""


class Masked(NamedTuple):
    """What the model reads and what it predicts."""

    input_ids: npt.NDArray[np.int32]
    """[B, S] tokens with the masked ones replaced."""
    positions: npt.NDArray[np.int32]
    """[B, P] masked positions in ascending order, then zeros."""
    ids: npt.NDArray[np.int32]
    """[B, P] original tokens at these positions, then zeros."""
    weights: npt.NDArray[np.float32]
    """[B, P] 1.0 for a prediction, 0.0 for padding."""


class _Words(NamedTuple):
    """The words of rows, numbered from 0 in each row."""

    begins: Flags
    """[B, S] whether a position begins a word."""
    numbers: Int64s
    """[B, S] the word of a position; without meaning outside words."""
    sizes: Int64s
    """[B, W] tokens of each word; 0 after the last word of a row."""


def mask_examples(
    tokens_BS: Ints,
    lengths_B: Ints,
    first_lengths_B: Ints,
    labels_B: Ints | Flags,
    keys_B: Keys,
    *,
    kinds: TokenKinds,
    masking: Masking,
    predictions: int,
) -> dict[str, npt.NDArray[Any]]:
    """Mask rows of tokens as `mask_tokens` does and return all columns of the examples.

    `first_lengths` count [CLS], segment A and its [SEP]; a label is 1 for a random next. Columns are int32, weights
    float32.
    """
    masked = mask_tokens(tokens_BS, lengths_B, keys_B, kinds, masking, predictions)
    positions = np.arange(tokens_BS.shape[1])
    is_token_BS = positions < lengths_B[:, None]
    return {
        "input_ids": masked.input_ids,
        "input_mask": is_token_BS.astype(np.int32),
        "segment_ids": (is_token_BS & (positions >= first_lengths_B[:, None])).astype(np.int32),
        "masked_lm_positions": masked.positions,
        "masked_lm_ids": masked.ids,
        "masked_lm_weights": masked.weights,
        "next_sentence_labels": labels_B.astype(np.int32),
    }


def mask_tokens(
    tokens_BS: Ints,
    lengths_B: Ints,
    keys_B: Keys,
    kinds: TokenKinds,
    masking: Masking,
    predictions: int,
) -> Masked:
    """Mask `min(P, max(1, round(0.15 length)))` tokens of each row and replace them 80/10/10.

    [CLS], [SEP] and padding are never masked, but [CLS] and [SEP] count in the length. 80 % of the masked tokens
    become [MASK], 10 % a token drawn from the whole vocabulary, 10 % stay. Whole words are taken in random order as
    long as they fit, so a row may have fewer predictions. The 80/10/10 are drawn once for all tokens of a span.
    """
    positions = np.arange(tokens_BS.shape[1])
    special = kinds.special
    maskable_BS = (
        (tokens_BS != special.cls) & (tokens_BS != special.sep) & (positions < lengths_B[:, None])
    )
    wanted_B = np.clip(np.rint(lengths_B * masking.probability).astype(np.int64), 1, predictions)
    order_BS = (bits(keys_B, POSITIONS, positions) & ~_POSITION_BITS) | positions.astype(np.uint64)
    if masking.unit == "token":
        positions_BP = draws_BP = _choose_tokens(order_BS, maskable_BS, wanted_B, predictions)
    else:
        assert kinds.is_continuation is not None
        words = _find_words(tokens_BS, maskable_BS, kinds.is_continuation)
        order_BS = np.sort(np.where(words.begins, order_BS, _NEVER), axis=1)
        if masking.unit == "word":
            is_masked_BW = _choose_words(order_BS, words, wanted_B)
            positions_BP = _positions_of(is_masked_BW, words, maskable_BS, predictions)
            draws_BP = positions_BP
        else:
            span_begins_BW = _choose_spans(order_BS, words, wanted_B, keys_B, masking)
            positions_BP = _positions_of(span_begins_BW > 0, words, maskable_BS, predictions)
            words_BP = np.take_along_axis(words.numbers, positions_BP % len(positions), axis=1)
            draws_BP = np.take_along_axis(span_begins_BW, words_BP, axis=1)
    return _replace(tokens_BS, positions_BP, draws_BP, keys_B, kinds, predictions)


def _choose_tokens(
    order_BS: Keys, maskable_BS: Flags, wanted_B: Int64s, predictions: int
) -> Int64s:
    """Return the positions of the `wanted` smallest random numbers, ascending, then S."""
    length = order_BS.shape[1]
    most = min(predictions, length)
    order_BS[~maskable_BS] = _NEVER
    smallest_BP = np.sort(np.partition(order_BS, most - 1, axis=1)[:, :most], axis=1)
    is_chosen_BP = (np.arange(most) < wanted_B[:, None]) & (smallest_BP != _NEVER)
    positions_BP = (smallest_BP & _POSITION_BITS).astype(np.int64)
    return np.sort(np.where(is_chosen_BP, positions_BP, length), axis=1)


def _find_words(tokens_BS: Ints, maskable_BS: Flags, is_continuation: Flags) -> _Words:
    """Return the words; a continuation whose first piece was cut off begins a word."""
    rows, length = tokens_BS.shape
    continues_BS = is_continuation[tokens_BS]
    continues_BS[:, 0] = False
    continues_BS[:, 1:] &= maskable_BS[:, :-1]
    begins_BS = maskable_BS & ~continues_BS
    numbers_BS = np.maximum(np.cumsum(begins_BS, axis=1) - 1, 0)
    numbers = (numbers_BS + np.arange(rows)[:, None] * length)[maskable_BS]
    sizes_BW = np.bincount(numbers, minlength=rows * length).reshape(rows, length)
    return _Words(begins_BS, numbers_BS, sizes_BW)


def _word_begins(order_BS: Keys, left_B: Int64s) -> Iterator[tuple[Int64s, Int64s]]:
    """Yield rows that still want tokens with where the next word of each begins, in random order.

    `left_B` is how many tokens each row wants; the caller updates it.
    """
    row = np.arange(len(order_BS))
    for number in range(order_BS.shape[1]):
        begin = order_BS[row, number]
        continues = (left_B[row] > 0) & (begin != _NEVER)
        row, begin = row[continues], begin[continues]
        if not len(row):
            return
        yield row, (begin & _POSITION_BITS).astype(np.int64)


def _choose_words(order_BS: Keys, words: _Words, wanted_B: Int64s) -> Flags:
    """Return which words are masked: in random order, every one that fits in what is left."""
    is_masked_BW = np.zeros(order_BS.shape, np.bool_)
    left_B = wanted_B.copy()
    for row, begin in _word_begins(order_BS, left_B):
        word = words.numbers[row, begin]
        size = words.sizes[row, word]
        fits = size <= left_B[row]
        left_B[row] -= np.where(fits, size, 0)
        is_masked_BW[row, word] = fits
    return is_masked_BW


def _choose_spans(
    order_BS: Keys, words: _Words, wanted_B: Int64s, keys_B: Keys, masking: Masking
) -> Int64s:
    """Return the position where the span of each masked word begins; 0 for a word that is not masked.

    Joshi et al. 2020, section 3.1: a length and a first word are drawn until enough is masked. First words come in
    random order, which is the same as drawing them and rejecting masked ones. A span ends early with its segment,
    before a masked word, and before a word that does not fit in what is left.
    """
    length = order_BS.shape[1]
    within = np.arange(min(masking.longest_span, length))
    # Sizes of 0 after the last word, so that a span may reach beyond it.
    sizes_BW = np.pad(words.sizes, ((0, 0), (0, len(within))))
    begins_BW = np.sort(np.where(words.begins, np.arange(length), length), axis=1)
    # Positions between a word and the one before it: not 0 where a [SEP] separates them.
    gaps_BW = np.zeros_like(sizes_BW)
    gaps_BW[:, 1:length] = begins_BW[:, 1:] - begins_BW[:, :-1] - words.sizes[:, :-1]
    span_begins_BW = np.zeros_like(sizes_BW)
    left_B = wanted_B.copy()
    for row, begin in _word_begins(order_BS, left_B):
        begin = begin[:, None]
        lengths = _span_lengths(bits(keys_B[row], SPANS, begin), masking)
        span = row[:, None], words.numbers[row[:, None], begin] + within
        sizes = sizes_BW[span]
        fits = (within < lengths) & (sizes > 0) & (span_begins_BW[span] == 0)
        fits &= (within == 0) | (gaps_BW[span] == 0)
        fits &= np.cumsum(sizes, axis=1) <= left_B[row][:, None]
        fits = np.logical_and.accumulate(fits, axis=1)
        left_B[row] -= np.where(fits, sizes, 0).sum(axis=1)
        span_begins_BW[span] = np.where(fits, begin, span_begins_BW[span])
    return span_begins_BW[:, :length]


def _span_lengths(drawn: Keys, masking: Masking) -> Int64s:
    """Return words of spans; each length is `1 - span_stop` times as likely as the one before."""
    likelihoods = (1.0 - masking.span_stop) ** np.arange(masking.longest_span)
    upto = np.cumsum(likelihoods)[:-1] / likelihoods.sum()
    return 1 + np.searchsorted((upto * 2**53).astype(np.uint64), drawn >> np.uint64(11), "right")


def _positions_of(
    is_masked_BW: Flags, words: _Words, maskable_BS: Flags, predictions: int
) -> Int64s:
    """Return the positions of the masked words, ascending, then S."""
    length = maskable_BS.shape[1]
    is_masked_BS = maskable_BS & np.take_along_axis(is_masked_BW, words.numbers, axis=1)
    return np.sort(np.where(is_masked_BS, np.arange(length), length), axis=1)[:, :predictions]


def _replace(
    tokens_BS: Ints,
    positions_BP: Int64s,
    draws_BP: Int64s,
    keys_B: Keys,
    kinds: TokenKinds,
    predictions: int,
) -> Masked:
    """Replace the tokens at these positions 80/10/10 and pad the targets to P with zeros.

    The kind of replacement is drawn at the position in `draws`, a random token at its own position.
    """
    rows, length = tokens_BS.shape
    most = positions_BP.shape[1]
    is_masked_BP = positions_BP < length
    positions_BP = np.where(is_masked_BP, positions_BP, 0)
    coin_BP = bits(keys_B, REPLACEMENTS, draws_BP) >> np.uint64(32)
    low_BP = bits(keys_B, REPLACEMENTS, positions_BP) & np.uint64(0xFFFFFFFF)
    random_BP = ((low_BP * np.uint64(kinds.vocab_size)) >> np.uint64(32)).astype(np.int32)
    labels_BP = np.take_along_axis(tokens_BS, positions_BP, axis=1).astype(np.int32)
    replaced_BP = np.where(
        coin_BP < np.uint64(0.8 * 2**32),
        np.int32(kinds.special.mask),
        np.where(coin_BP < np.uint64(0.9 * 2**32), random_BP, labels_BP),
    )
    input_ids = np.array(tokens_BS, np.int32)
    row = np.broadcast_to(np.arange(rows)[:, None], positions_BP.shape)
    input_ids[row[is_masked_BP], positions_BP[is_masked_BP]] = replaced_BP[is_masked_BP]
    positions = np.zeros((rows, predictions), np.int32)
    ids = np.zeros((rows, predictions), np.int32)
    weights = np.zeros((rows, predictions), np.float32)
    positions[:, :most] = positions_BP
    ids[:, :most] = np.where(is_masked_BP, labels_BP, 0)
    weights[:, :most] = is_masked_BP
    return Masked(input_ids, positions, ids, weights)
