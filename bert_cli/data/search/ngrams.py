"""BM25 of character 4-grams, by which the best passages of a question are ranked again.

A word has a space at both ends. Among the few passages that words have found, 4-grams tell the endings of long words,
parts of compounds and words with typing errors apart.

Shapes: n texts, G different 4-grams of a question.
"""

import re
from collections.abc import Sequence

import numpy as np

from bert_cli.arrays import Floats32
from bert_cli.data.search.passages import UNSPACED
from bert_cli.data.search.words import NO_WORD, folded

LENGTH = 4  # characters
# The usual values of BM25, as SQLite has them.
SATURATION = 1.2
BY_LENGTH = 0.75
BETWEEN_WORDS = re.compile(f"[{NO_WORD}{UNSPACED}]+")


def ngram_scores(question: str, texts: Sequence[str]) -> Floats32:
    """Return the BM25 [n] of texts; the document frequency of a 4-gram is counted in these texts alone."""
    asked, *spaced = (
        f" {BETWEEN_WORDS.sub(' ', folded(text)).strip()} " for text in (question, *texts)
    )
    ngrams = {asked[n : n + LENGTH] for n in range(len(asked) - LENGTH + 1)}
    counts = np.array([[text.count(ngram) for ngram in sorted(ngrams)] for text in spaced])
    present = (counts > 0).sum(0)  # [G]
    rarity = np.log1p((len(texts) - present + 0.5) / (present + 0.5))
    lengths = np.array([[len(text)] for text in spaced])  # [n, 1]
    limits = SATURATION * (1 - BY_LENGTH + BY_LENGTH * lengths / lengths.mean())
    return (rarity * counts * (SATURATION + 1) / (counts + limits)).sum(1, dtype=np.float32)
