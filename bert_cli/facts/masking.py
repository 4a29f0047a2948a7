"""Masking of tokens: which are chosen, and how many an example has room for."""

import math
from typing import Literal

from bert_cli.settings.numbers import Fraction
from bert_cli.settings.settings import Settings

MASK_TOKENS = {(384, 0.15): 56, (512, 0.15): 76}  # by length and fraction, as in BERT's configs


class Masking(Settings):
    """Choice of the masked tokens; for dynamic records these are settings of the run."""

    unit: Literal["token", "word"] = "token"
    """Unit of masking: single tokens, or complete words with all their tokens."""
    probability: Fraction = 0.15
    """Fraction of an example's tokens that are masked, at most P tokens."""
    start_probability: Fraction | None = None
    """Fraction at the first step; it changes linearly to `probability` at the last step."""

    @property
    def highest_probability(self) -> float:
        """Return the highest fraction of tokens that a step masks."""
        return max(self.probability, self.start_probability or 0.0)


def packed_predictions(
    sequence_length: int, sequences: int, predictions: int, probability: float
) -> int:
    """Return the maximum number of masked positions in a pack of at most C sequences.

    A sequence has at most P masked positions, and at most probability times length plus one.
    """
    if sequences == 1:
        return predictions
    return min(sequences * predictions, int(sequence_length * probability) + sequences)


def usual_mask_tokens(length: int, fraction: float) -> int:
    """Return the number of masked positions of an example: that of BERT, or else the fraction of the length."""
    return min(length - 3, MASK_TOKENS.get((length, fraction), math.ceil(length * fraction)))
