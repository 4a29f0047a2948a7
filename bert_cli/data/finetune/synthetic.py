"""Synthetic features for fine-tuning: random tokens, with labels for each kind of head."""

import pkgutil
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from bert_cli.arrays import Array, Ints8, Ints32, Ints64
from bert_cli.data.examples.synthetic import FIRST_WORD
from bert_cli.data.finetune.features import Arrays, Features, runs
from bert_cli.facts.heads import Head


class Texts(NamedTuple):
    """Synthetic tokens of n examples, T in all, for which a head's function adds labels."""

    drawn: np.random.Generator
    ids: Ints32
    segments: Ints8
    lengths: Ints64
    first_text: int
    """Tokens before the text of an example: [CLS], a question and [SEP]."""


def synthetic_features(
    head: Head, number: int, *, labels: int, vocab_size: int, sequence_length: int, seed: int
) -> Features:
    """Return synthetic examples for a head: random tokens, with labels for it; three in four have the full length."""
    first_text = min(12, sequence_length // 2 - 1)  # tokens, with [CLS] and [SEP]
    drawn = np.random.default_rng(seed)
    is_short = drawn.random(number) < 0.25
    # The first has the full length, so that epochs of one step have equally long steps.
    is_short[0] = False
    some = drawn.integers(2 * first_text, sequence_length, number)
    lengths = np.where(is_short, some, sequence_length)
    positions = runs(np.zeros_like(lengths), lengths)
    ids = drawn.integers(FIRST_WORD, vocab_size, len(positions), np.int32)
    segments = (positions >= first_text).astype(np.int8)
    add_labels: Callable[[Texts, int], Features] = pkgutil.resolve_name(head.synthetic)
    return add_labels(Texts(drawn, ids, segments, lengths, first_text), labels)


def span_labels(texts: Texts, labels: int) -> Features:
    """Add a span of at most eight tokens after the question."""
    last = texts.lengths - 1
    starts = texts.drawn.integers(texts.first_text, last)
    stops = np.minimum(starts + texts.drawn.integers(0, 8, len(starts)), last)
    spans = {"start_positions": starts.astype(np.int32), "end_positions": stops.astype(np.int32)}
    return Features(texts.ids, texts.segments, np.cumsum(texts.lengths), spans)


def token_labels(texts: Texts, labels: int) -> Features:
    """Add a label for every token but the first and the last of an example, which is a single text."""
    positions = runs(np.zeros_like(texts.lengths), texts.lengths)
    inside = (positions > 0) & (positions < np.repeat(texts.lengths - 1, texts.lengths))
    each = texts.drawn.integers(0, labels, len(texts.ids), np.int32) * inside
    by_token: Arrays = {"labels": each, "label_weights": inside.astype(np.float32)}
    ends = np.cumsum(texts.lengths)
    return Features(texts.ids, np.zeros_like(texts.segments), ends, {}, by_token)


def example_labels(texts: Texts, labels: int) -> Features:
    """Add a label of each example, or with one output a number from 0 to 5."""
    number = len(texts.lengths)
    column: Array = texts.drawn.integers(0, labels, number, np.int32)
    if labels == 1:
        column = texts.drawn.uniform(0.0, 5.0, number).astype(np.float32)
    return Features(texts.ids, texts.segments, np.cumsum(texts.lengths), {"labels": column})
