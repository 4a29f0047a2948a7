"""Repeated text in a sample of records, with known numbers of copies."""

import numpy as np
import pytest

from bert_cli.data.examples.repeats import LEAST_RUNS, N, repeats
from bert_cli.data.random import row_keys
from bert_cli.data.records.masking import MaskRecipe, mask_examples
from bert_cli.data.tokens.notation import SpecialIds
from bert_cli.facts.masking import Masking

LENGTH, VOCABULARY = 40, 5000


def rows_of(tokens_nS, numbers) -> dict:
    """Return examples with masks that depend on their numbers."""
    lengths = np.full(len(tokens_nS), tokens_nS.shape[1])
    recipe = MaskRecipe(SpecialIds(*range(5)), VOCABULARY, Masking(), 8)
    keys = row_keys(numbers, "mask", 1, 0)
    return mask_examples(tokens_nS, lengths, lengths, np.zeros(len(lengths), int), keys, recipe)


def texts(count: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(5, VOCABULARY, (count, LENGTH))


def sampled(tokens_nS, count: int) -> float:
    """Return the estimate from `count` random records of these."""
    chosen = np.random.default_rng(2).permutation(len(tokens_nS))[:count]
    return repeats(rows_of(tokens_nS[chosen], chosen), len(tokens_nS))


def test_the_copies_are_counted_under_other_masks_and_at_other_positions():
    once = texts(2000)
    assert sampled(once, 2000) == 0.0
    assert sampled(np.repeat(once[:400], 5, axis=0), 2000) == pytest.approx(4.0)
    moved = np.concatenate([np.roll(once[:1000], shift, axis=1) for shift in (0, 5)])
    assert 0.6 < sampled(moved, 2000) <= 1.0
    # Copies within a record: two halves that are the same.
    assert 0.5 < sampled(np.concatenate([once[:, : LENGTH // 2]] * 2, axis=1), 2000) < 1.0


def test_a_sample_estimates_the_copies_in_all_records():
    tenfold = np.repeat(texts(2000), 10, axis=0)
    assert sampled(tenfold, len(tenfold)) == pytest.approx(9.0)
    assert 3.5 < sampled(tenfold, 2000) < 9.0
    assert sampled(texts(20_000), 2000) == 0.0


def test_too_few_records_and_chance_are_no_repetition():
    few = np.repeat(texts(1), 10, axis=0)
    assert len(few) * (LENGTH - N + 1) < LEAST_RUNS and sampled(few, 10) == 0.0
    chance = texts(2000)
    chance[0] = chance[1]
    assert repeats(rows_of(chance, np.arange(2000)), 10_000_000) == 0.0
    assert repeats(rows_of(texts(2000)[:, : N - 1], np.arange(2000)), 2000) == 0.0
