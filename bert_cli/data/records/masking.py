"""Masked tokens of examples (Devlin et al. 2018, section 3.1), for a block of them at once.

Every random bit is a hash of the example's key and the place, so that a mask never depends on which
rows stand beside it: the same function masks records once when they are written and anew each time
when they are read. What is chosen as a whole is a piece, a word, or a span of words (Joshi et al.
2020, "SpanBERT", section 3.1).

Shapes: B examples, S places, P masked places, V words.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bert_cli.config.data import Masking
from bert_cli.data.records.random_bits import PLACES, REPLACEMENTS, SPANS, Ints, Keys, bits
from bert_cli.data.records.sentence_pairs import SpecialIds

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


class _Words(NamedTuple):
    """The words of rows, numbered from 0 in each row."""

    starts: npt.NDArray[np.bool_]
    """[B, S] whether a place begins a word."""
    numbers: npt.NDArray[np.int64]
    """[B, S] the word that a place belongs to; of no meaning where no word is."""
    sizes: npt.NDArray[np.int64]
    """[B, S] pieces of each word, by its number; 0 where a row has no more words."""


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
    every word has more pieces than predictions are wanted. Of spans, which are of such words, the
    80/10/10 are drawn once for all places of a span.
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
        decided_BP = places_BP
    else:
        assert is_continuation is not None
        words = _find_words(tokens_BS, allowed_BS, is_continuation)
        order_BS = np.sort(np.where(words.starts, order_BS, _NOT_CHOSEN), axis=1)
        heads_BS = None
        if masking.unit == "word":
            taken_BS = _take_words(order_BS, words, wanted_B)
        else:
            heads_BS = _take_spans(order_BS, words, wanted_B, keys_B, masking)
            taken_BS = heads_BS > 0
        chosen_BS = allowed_BS & np.take_along_axis(taken_BS, words.numbers, axis=1)
        places_BP = np.sort(np.where(chosen_BS, places, sequence_length), axis=1)[:, :predictions]
        decided_BP = places_BP
        if heads_BS is not None:
            numbers_BP = np.take_along_axis(words.numbers, places_BP % sequence_length, axis=1)
            decided_BP = np.take_along_axis(heads_BS, numbers_BP, axis=1)
    return _replace(
        tokens_BS,
        places_BP,
        decided_BP,
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


def _find_words(
    tokens_BS: Ints, allowed_BS: npt.NDArray[np.bool_], is_continuation: npt.NDArray[np.bool_]
) -> _Words:
    """Words of the allowed places; what was cut off from its word begins one."""
    rows, length = tokens_BS.shape
    follows_BS = is_continuation[tokens_BS]
    follows_BS[:, 0] = False
    follows_BS[:, 1:] &= allowed_BS[:, :-1]
    starts_BS = allowed_BS & ~follows_BS
    numbers_BS = np.maximum(np.cumsum(starts_BS, axis=1) - 1, 0)
    numbers = (numbers_BS + np.arange(rows)[:, None] * length)[allowed_BS]
    sizes_BS = np.bincount(numbers, minlength=rows * length).reshape(rows, length)
    return _Words(starts_BS, numbers_BS, sizes_BS)


def _turns(
    order_BS: Keys, left_B: npt.NDArray[np.int64]
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """The rows that still want places, and where each one's next word begins, until none has both.

    `left_B` is what they want; whoever is given a turn takes from it.
    """
    row = np.arange(len(order_BS))
    for turn in range(order_BS.shape[1]):
        start = order_BS[row, turn]
        goes_on = (left_B[row] > 0) & (start != _NOT_CHOSEN)
        row, start = row[goes_on], start[goes_on]
        if not len(row):
            return
        yield row, (start & _PLACE_BITS).astype(np.int64)


def _take_words(
    order_BS: Keys, words: _Words, wanted_B: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """[B, S] whether a word is masked: in random order, as many as fit."""
    taken_BS = np.zeros(order_BS.shape, np.bool_)
    left_B = wanted_B.copy()
    for row, place in _turns(order_BS, left_B):
        word = words.numbers[row, place]
        size = words.sizes[row, word]
        fits = size <= left_B[row]
        left_B[row] -= np.where(fits, size, 0)
        taken_BS[row, word] = fits
    return taken_BS


def _take_spans(
    order_BS: Keys,
    words: _Words,
    wanted_B: npt.NDArray[np.int64],
    keys_B: Keys,
    masking: Masking,
) -> npt.NDArray[np.int64]:
    """[B, S] the place where the span of each masked word begins, 0 for a word that is not masked.

    Joshi et al. 2020, section 3.1: a length is drawn and a word to start with, until enough is
    masked. Starts come in random order, which is the same as drawing them and passing over those
    already masked. A span ends early with its segment, before a word that is masked already, and
    before one that does not fit in what is left.
    """
    length = order_BS.shape[1]
    within = np.arange(min(masking.longest_span, length))
    # Past the last word are sizes of 0, so that a span may look further than there are words.
    sizes_BS = np.pad(words.sizes, ((0, 0), (0, len(within))))
    begins_BS = np.sort(np.where(words.starts, np.arange(length), length), axis=1)
    # Places between a word and the one before it: where it is not 0, a [SEP] parts them.
    gaps_BS = np.zeros_like(sizes_BS)
    gaps_BS[:, 1:length] = begins_BS[:, 1:] - begins_BS[:, :-1] - words.sizes[:, :-1]
    heads_BS = np.zeros_like(sizes_BS)
    left_B = wanted_B.copy()
    for row, start in _turns(order_BS, left_B):
        place = start[:, None]
        span = words.numbers[row[:, None], place] + within
        lengths = _span_lengths(bits(keys_B[row], SPANS, place), masking)
        at = row[:, None], span
        sizes = sizes_BS[at]
        fits = (within < lengths) & (sizes > 0) & (heads_BS[at] == 0)
        fits &= (within == 0) | (gaps_BS[at] == 0)
        fits &= np.cumsum(sizes, axis=1) <= left_B[row][:, None]
        fits = np.logical_and.accumulate(fits, axis=1)
        left_B[row] -= np.where(fits, sizes, 0).sum(axis=1)
        heads_BS[at] = np.where(fits, place, heads_BS[at])
    return heads_BS[:, :length]


def _span_lengths(drawn: Keys, masking: Masking) -> npt.NDArray[np.int64]:
    """Words of spans, 1 to the longest, each length `1 - span_stop` times as likely as the one before."""
    shares = (1.0 - masking.span_stop) ** np.arange(masking.longest_span)
    upto = np.cumsum(shares)[:-1] / shares.sum()
    return 1 + np.searchsorted((upto * 2**53).astype(np.uint64), drawn >> np.uint64(11), "right")


def _replace(
    tokens_BS: Ints,
    places_BP: npt.NDArray[np.int64],
    decided_BP: npt.NDArray[np.int64],
    keys_B: Keys,
    *,
    special: SpecialIds,
    vocab_size: int,
    predictions: int,
) -> Masked:
    """Replace the chosen places 80/10/10 and pad the targets to P with zeros.

    Which of the three is drawn at the place in `decided`, a word at the place itself.
    """
    rows, length = tokens_BS.shape
    most = places_BP.shape[1]
    chosen_BP = places_BP < length
    places_BP = np.where(chosen_BP, places_BP, 0)
    drawn_BP = bits(keys_B, REPLACEMENTS, places_BP)
    coin_BP = bits(keys_B, REPLACEMENTS, decided_BP) >> np.uint64(32)
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
