"""The BERT recipe: sentence pairs and masks from documents and a seed (Devlin et al. 2018, A.1).

A group's tokens lie in one flat array, sentences are its prefix sums and documents ranges of
sentences; a pair is then five integers, and a pass over 75,000 sentences makes 22,000 of them in 40
ms. Rows of tokens are only gathered, and masked, a block at a time. Every random bit of an example
is a hash of the example's key and the place, so that its mask never depends on which rows stand
beside it: the same function masks records once when they are written and anew each time when they
are read.

Shapes: B examples, S places, P masked places, V words.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bert_cli.data.permutation import GOLDEN, mix

Ints = npt.NDArray[np.integer[Any]]
Keys = npt.NDArray[np.uint64]

# Streams of random bits of one example: which places, what replaces them, where it is cut.
_PLACES, _REPLACEMENTS, _CUTS = (
    np.uint64(0xD1B54A32D192ED03 * number % 2**64) for number in (1, 2, 3)
)
_NOT_CHOSEN = np.uint64(0xFFFFFFFFFFFFFFFF)
_PLACE_BITS = np.uint64(0xFFFF)  # S is at most 65535


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the five special tokens in a vocabulary."""

    pad: int
    unk: int
    cls: int
    sep: int
    mask: int


class Pairs(NamedTuple):
    """Sentence pairs as places of a flat token array; all [examples]."""

    first_start: npt.NDArray[np.int64]
    first_length: npt.NDArray[np.int64]
    second_start: npt.NDArray[np.int64]
    second_length: npt.NDArray[np.int64]
    is_random: npt.NDArray[np.bool_]

    def take(self, rows: Ints | slice) -> "Pairs":
        """The pairs of these rows, in this order."""
        return Pairs(
            self.first_start[rows],
            self.first_length[rows],
            self.second_start[rows],
            self.second_length[rows],
            self.is_random[rows],
        )


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


# --- random bits


def row_keys(numbers: npt.ArrayLike, *names: int | str) -> Keys:
    """Keys of examples [B]: their numbers and what else tells them apart (seed, copy, epoch)."""
    digest = hashlib.blake2b("\0".join(map(str, names)).encode(), digest_size=8).digest()
    base = np.uint64(int.from_bytes(digest, "little"))
    return mix(mix(base + np.atleast_1d(np.asarray(numbers, np.uint64)) * GOLDEN) ^ base)


def _bits(keys_B: Keys, stream: np.uint64, places: Ints) -> Keys:
    """64 random bits for each place of each row: splitmix64 of the row's key, at that place."""
    start_B = mix(keys_B + stream)
    return mix(start_B[:, None] + (places.astype(np.uint64) + np.uint64(1)) * GOLDEN)


# --- pairs


def pair_sentences(
    sentences: Sequence[int],
    documents: Sequence[int],
    *,
    sequence_length: int,
    short_seq_prob: float,
    random: Random,
) -> Pairs:
    """Go once through every document and make its sentence pairs, not yet cut to length.

    `sentences` are the prefix sums of the sentences' tokens (one more than sentences, each longer
    than zero); `documents` the number of the first sentence of each document, and the number of
    sentences at the end. Sentences are collected until they reach a target of S - 3 tokens (in
    `short_seq_prob` of the examples a random one) or the document ends; a random part of them
    becomes A. In half of the cases, and whenever only one sentence was collected, B is text from a
    random place of another document, and the sentences that A left over are put back.

    ValueError when there are fewer than two documents.
    """
    count = len(documents) - 1
    if count < 2:
        raise ValueError(f"{count} documents: a random next sentence must come from another one")
    draw = random.random
    longest = sequence_length - 3
    rows: list[tuple[int, int, int, int, bool]] = []
    for document in range(count):
        start, stop = documents[document], documents[document + 1]
        while start < stop:
            target = longest if draw() >= short_seq_prob else 2 + int(draw() * (longest - 1))
            # The sentence that reaches the target is the last one collected.
            end = bisect_left(sentences, sentences[start] + target, start + 1, stop)
            collected = end - start
            middle = start + 1 + int(draw() * (collected - 1)) if collected > 1 else end
            first, second = sentences[start], sentences[middle]
            if collected > 1 and draw() >= 0.5:
                rows.append((first, second - first, second, sentences[end] - second, False))
                start = end
                continue
            other = int(draw() * (count - 1))
            other += other >= document
            begin, limit = documents[other], documents[other + 1]
            begin += int(draw() * (limit - begin))
            wanted = max(1, target - (second - first))
            until = bisect_left(sentences, sentences[begin] + wanted, begin + 1, limit)
            rows.append(
                (first, second - first, sentences[begin], sentences[until] - sentences[begin], True)
            )
            start = middle
    columns = np.array(rows, np.int64).reshape(-1, 5).T
    return Pairs(columns[0], columns[1], columns[2], columns[3], columns[4].astype(np.bool_))


def truncate_pairs(pairs: Pairs, longest: int, keys: Keys) -> Pairs:
    """Cut every pair to `longest` tokens.

    One by one from the longer segment (B if equal), from front or back at random. The lengths that
    remain follow without walking; how many tokens go from the front is a count of random bits.
    """
    first, second = pairs.first_length, pairs.second_length
    # A segment gives way until it is as short as the other, then both in turn, B first.
    first_kept = np.where(
        first + second <= longest, first, np.clip(longest - second, (longest + 1) // 2, first)
    )
    first_kept = np.minimum(first, first_kept)
    second_kept = np.minimum(second, longest - first_kept)
    first_front = _heads(first - first_kept, keys, 0)
    second_front = _heads(second - second_kept, keys, 1)
    return Pairs(
        pairs.first_start + first_front,
        first_kept,
        pairs.second_start + second_front,
        second_kept,
        pairs.is_random,
    )


def _heads(tosses: npt.NDArray[np.int64], keys: Keys, side: int) -> npt.NDArray[np.int64]:
    """How many of so many tosses of a coin show heads, for each row: 64 tosses a draw."""
    heads = np.zeros(len(tosses), np.int64)
    rows = np.flatnonzero(tosses)
    left = tosses[rows]
    draw = 0
    while len(rows):
        bits = _bits(keys[rows], _CUTS, np.array([2 * draw + side]))[:, 0]
        unused = np.maximum(64 - left, 0).astype(np.uint64)
        heads[rows] += np.bitwise_count(bits >> unused)
        rows, left = rows[left > 64], left[left > 64] - 64
        draw += 1
    return heads


def gather(
    tokens: Ints, pairs: Pairs, special: SpecialIds, sequence_length: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Rows `[CLS] A [SEP] B [SEP]` with padding [B, S], and their lengths [B]."""
    places = np.arange(sequence_length)
    first = pairs.first_length[:, None]
    in_first = places <= first
    source = places + np.where(
        in_first, pairs.first_start[:, None] - 1, pairs.second_start[:, None] - first - 2
    )
    lengths = pairs.first_length + pairs.second_length + 3
    rows_BS = tokens.take(source, mode="clip").astype(np.int32)
    rows_BS[places >= lengths[:, None]] = special.pad
    rows = np.arange(len(lengths))
    rows_BS[:, 0] = special.cls
    rows_BS[rows, pairs.first_length + 1] = special.sep
    rows_BS[rows, lengths - 1] = special.sep
    return rows_BS, lengths


# --- masks


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
    masked_lm_prob: float = 0.15,
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
        masked_lm_prob=masked_lm_prob,
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
    masked_lm_prob: float = 0.15,
    is_continuation: npt.NDArray[np.bool_] | None = None,
) -> Masked:
    """Choose `min(P, max(1, round(0.15 length)))` places of each row and replace them 80/10/10.

    As in Devlin et al. 2018, section 3.1. Never [CLS], [SEP] or padding; 80 % become [MASK], 10 % a
    word drawn from the whole vocabulary, 10 % stay. The length counts the special tokens. With
    `is_continuation` [V] (pieces that continue a word) whole words are chosen: words in random
    order, those that do not fit in what is left are passed over, so that a row may have fewer
    predictions, none if its every word has more pieces than predictions are wanted.
    """
    sequence_length = tokens_BS.shape[1]
    places = np.arange(sequence_length)
    allowed_BS = (
        (tokens_BS != special.cls) & (tokens_BS != special.sep) & (places < lengths_B[:, None])
    )
    wanted_B = np.clip(np.rint(lengths_B * masked_lm_prob).astype(np.int64), 1, predictions)
    order_BS = (_bits(keys_B, _PLACES, places) & ~_PLACE_BITS) | places.astype(np.uint64)
    if is_continuation is None:
        places_BP = _single_places(
            order_BS, allowed_BS, wanted_B, min(predictions, sequence_length)
        )
    else:
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
    bits_BP = _bits(keys_B, _REPLACEMENTS, places_BP)
    coin_BP = bits_BP >> np.uint64(32)
    word_BP = ((bits_BP & np.uint64(0xFFFFFFFF)) * np.uint64(vocab_size)) >> np.uint64(32)
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
