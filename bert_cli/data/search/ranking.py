"""Scores of passages together: two kinds are standardised and added, and the best passages are ranked again.

Shapes: N passages, n of them.
"""

from typing import Any

import numpy as np

from bert_cli.arrays import Floats32, Ints64

# The usual values of BM25.
SATURATION = 1.2
BY_LENGTH = 0.75
LEAST_RARITY = 1e-6  # of a term in half of the passages or more


def rarity_of(present: int, total: int) -> float:
    """Return the rarity of a term that so many of all passages have."""
    return max(LEAST_RARITY, float(np.log((total - present + 0.5) / (present + 0.5))))


def bm25(rarity: Any, times: Any, lengths: Any) -> Any:
    """Return the BM25 of terms by their rarity and times in passages, whose lengths are divided by the mean."""
    limits = SATURATION * (1 - BY_LENGTH + BY_LENGTH * lengths)
    return rarity * times * (SATURATION + 1) / (times + limits)


def combined(lexical: Floats32, meaning: Floats32, weight: float) -> Floats32:
    """Return the scores of passages [N] by both halves, or with the weight 0 or 1 by one; -inf is not found."""
    if weight == 0.0:
        return np.where(lexical > 0.0, lexical, -np.inf)
    if weight == 1.0:
        return meaning
    return weight * _standardised(meaning) + (1.0 - weight) * _standardised(lexical)


def reranked(scores: Floats32, others: Floats32, weight: float) -> Floats32:
    """Return the scores of the best passages with others added, both standardised; the lowest stays the lowest."""
    if not len(scores):
        return scores
    added = scores + weight * scores.std() * _standardised(others)
    return added - added.min() + scores.min()


def _standardised(scores: Floats32) -> Floats32:
    return (scores - scores.mean()) / (scores.std() + np.float32(1e-9))


def best_of(scores: Floats32, top: int) -> list[int]:
    """Return the positions of the highest scores, highest first; equal ones in the order of the passages."""
    top = min(top, len(scores))
    if not top:
        return []
    # All that are as high as the last of them: their order decides.
    least = np.partition(scores, -top)[-top]
    best = np.flatnonzero(scores >= least)
    return best[np.argsort(-scores[best], kind="stable")][:top].tolist()


def once(scores: Floats32, texts: Ints64) -> Floats32:
    """Return the scores with -inf for all but the best passage of each text, by its number; the first of equals."""
    order = np.argsort(-scores, kind="stable")
    kept = order[np.unique(texts[order], return_index=True)[1]]
    best = np.full_like(scores, -np.inf)
    best[kept] = scores[kept]
    return best
