"""The BERT recipe: sentence pairs from documents and a seed (Devlin et al. 2018, "BERT", A.1).

Text without documents becomes single segments (Liu et al. 2019, "RoBERTa", 4.2). The tokens of a group of documents
are one flat array, sentences are its prefix sums and documents ranges of sentences. A pair is five integers.

Shapes: B examples, S positions.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import NamedTuple

import numpy as np

from bert_cli.arrays import Bools, Ints, Ints32, Ints64, UInts64
from bert_cli.data.random import bits
from bert_cli.data.records.masking import CUTS
from bert_cli.data.tokens.notation import SpecialIds

# Prefix sums of the tokens per sentence, or of the sentences per document.
Ends = Sequence[int]


class Pairs(NamedTuple):
    """Sentence pairs as ranges of a flat token array, columns [examples]; a single segment's second length is 0."""

    first_start: Ints64
    first_length: Ints64
    second_start: Ints64
    second_length: Ints64
    is_random: Bools

    @property
    def tokens(self) -> int:
        """Tokens of all pairs together."""
        return int(self.first_length.sum() + self.second_length.sum())

    def take(self, rows: Ints | slice) -> "Pairs":
        """Return the pairs of these rows, in this order."""
        return Pairs._make(column[rows] for column in self)


def _as_pairs(rows: list[tuple[int, int, int, int, bool]]) -> Pairs:
    columns = np.array(rows, np.int64).reshape(-1, 5).T
    return Pairs._make([*columns[:4], columns[4].astype(np.bool_)])


def pair_sentences(
    sentences: Ends, documents: Ends, longest: int, short_seq_prob: float, random: Random
) -> Pairs:
    """Return the sentence pairs of one pass over all documents (at least two), not yet truncated.

    Sentences are collected until they reach a target of `longest` tokens (in `short_seq_prob` of the examples a random
    one) or the document ends; a random part of them becomes A. In half of the cases, and whenever only one was
    collected, B is text of another document from a random sentence on, and the sentences that A left over are used
    again.
    """
    count = len(documents) - 1
    draw = random.random
    rows: list[tuple[int, int, int, int, bool]] = []
    for document in range(count):
        start = documents[document]
        stop = documents[document + 1]
        while start < stop:
            # For each example anew: drawn for a document, its rows would all be short, and their number vary by
            # several per cent.
            target = longest
            if draw() < short_seq_prob:
                target = 2 + int(draw() * (longest - 1))
            # The sentence that reaches the target is the last one collected.
            end = bisect_left(sentences, sentences[start] + target, start + 1, stop)
            collected = end - start
            middle = end
            if collected > 1:
                middle = start + 1 + int(draw() * (collected - 1))
            first = sentences[start]
            second = sentences[middle]
            if collected > 1 and draw() >= 0.5:
                rows.append((first, second - first, second, sentences[end] - second, False))
                start = end
                continue
            # Any document but this one.
            random_document = int(draw() * (count - 1))
            random_document += random_document >= document
            begin = documents[random_document]
            limit = documents[random_document + 1]
            begin += int(draw() * (limit - begin))
            needed = max(1, target - (second - first))
            until = bisect_left(sentences, sentences[begin] + needed, begin + 1, limit)
            second_length = sentences[until] - sentences[begin]
            rows.append((first, second - first, sentences[begin], second_length, True))
            start = middle
    return _as_pairs(rows)


def fill_sentences(
    sentences: Ends, documents: Ends, longest: int, short_seq_prob: float, random: Random
) -> Pairs:
    """Return single segments of consecutive sentences from one pass over every document.

    A segment has as many complete sentences of a document as fit into `longest` tokens (in `short_seq_prob` of the
    examples into a random smaller target, but at least one): the DOC-SENTENCES of Liu et al. 2019, section 4.2. Longer
    sentences fill several segments, so every token is in exactly one example.
    """
    draw = random.random
    rows: list[tuple[int, int, int, int, bool]] = []
    for document, limit in pairwise(documents):
        start = sentences[document]
        stop = sentences[limit]
        below = document
        while start < stop:
            target = longest
            if draw() < short_seq_prob:
                target = 2 + int(draw() * (longest - 1))
            # The last end of a sentence within the target, else the next end.
            end = bisect_right(sentences, start + target, below + 1, limit + 1) - 1
            if sentences[end] <= start:
                end += 1
            length = min(sentences[end] - start, longest)
            rows.append((start, length, 0, 0, False))
            start += length
            below = end - 1
            if start == sentences[end]:
                below = end
    return _as_pairs(rows)


def truncated_lengths(
    first: Ints64, second: Ints64, longest: Ints64 | int
) -> tuple[Ints64, Ints64]:
    """Return the lengths [n] of pairs whose longer text, the second if equal, loses tokens until both fit."""
    # A text shrinks to the length of the other one, then both in turn.
    # Of two long texts each gets half, and the first one more if the sum is odd.
    least = np.minimum(first, (longest + 1) // 2)
    new_first = np.clip(longest - second, least, first)
    return new_first, np.minimum(second, longest - new_first)


def truncate_pairs(pairs: Pairs, longest: int, keys: UInts64) -> Pairs:
    """Truncate every pair to `longest` tokens, one by one from the longer segment (B if equal), at a random end."""
    first = pairs.first_length
    second = pairs.second_length
    new_first, new_second = truncated_lengths(first, second, longest)
    return Pairs(
        pairs.first_start + _count_heads(first - new_first, keys, 0),
        new_first,
        pairs.second_start + _count_heads(second - new_second, keys, 1),
        new_second,
        pairs.is_random,
    )


def _count_heads(tosses: Ints64, keys: UInts64, side: int) -> Ints64:
    """Return the number of heads in `tosses` coin tosses for each row; a draw gives 64 tosses."""
    heads = np.zeros(len(tosses), np.int64)
    rows = np.flatnonzero(tosses)
    left = tosses[rows]
    draw = 0
    while len(rows):
        drawn = bits(keys[rows], CUTS, np.array([2 * draw + side]))[:, 0]
        # The number of ones in so many random bits is the number of heads.
        unused = np.maximum(64 - left, 0).astype(np.uint64)
        heads[rows] += np.bitwise_count(drawn >> unused)
        rows = rows[left > 64]
        left = left[left > 64] - 64
        draw += 1
    return heads


def gather(
    tokens: Ints, pairs: Pairs, special: SpecialIds, sequence_length: int
) -> tuple[Ints32, Ints64]:
    """Return rows `[CLS] A [SEP] B [SEP]` or `[CLS] A [SEP]` with padding [B, S], and their lengths [B]."""
    positions = np.arange(sequence_length)
    first = pairs.first_length[:, None]
    # [B, S] the index of each token in the flat array; special tokens overwrite some later.
    source = positions + np.where(
        positions <= first, pairs.first_start[:, None] - 1, pairs.second_start[:, None] - first - 2
    )
    lengths = pairs.first_length + pairs.second_length + np.where(pairs.second_length > 0, 3, 2)
    rows_BS = tokens.take(source, mode="clip").astype(np.int32)
    rows_BS[positions >= lengths[:, None]] = special.pad
    rows = np.arange(len(lengths))
    rows_BS[:, 0] = special.cls
    rows_BS[rows, pairs.first_length + 1] = special.sep
    rows_BS[rows, lengths - 1] = special.sep
    return rows_BS, lengths
