"""BM25 of character 4-grams, by which the best passages of a question are ranked again.

A word has a space at both ends. Among the few passages that words have found, 4-grams tell the endings of long words,
parts of compounds and words with typing errors apart.

Shapes: n texts, G different 4-grams of a question.
"""

import re
from collections.abc import Sequence

import numpy as np

from bert_cli.arrays import Floats32, UInts64
from bert_cli.data.search.passages import UNSPACED
from bert_cli.data.search.ranking import bm25
from bert_cli.data.search.words import NO_WORD, folded

LENGTH = 4  # characters
SHIFTS = np.uint64(1) << np.arange(0, 64, 16, dtype=np.uint64)
BETWEEN_WORDS = re.compile(f"[{NO_WORD}{UNSPACED}]+")


def ngram_scores(question: str, texts: Sequence[str]) -> Floats32:
    """Return the BM25 [n] of texts; the document frequency of a 4-gram is counted in these texts alone."""
    asked, *spaced = (
        f" {BETWEEN_WORDS.sub(' ', folded(text)).strip()} " for text in (question, *texts)
    )
    sizes = np.array([len(text) for text in spaced])
    ngrams = np.unique(_codes(asked))
    codes = _codes("\0".join(spaced))
    columns = np.minimum(np.searchsorted(ngrams, codes), len(ngrams) - 1)
    is_asked = ngrams[columns] == codes
    rows = np.repeat(np.arange(len(texts)), sizes + 1)[: len(codes)]
    cells = rows * len(ngrams) + columns
    counts = np.bincount(cells, is_asked, len(texts) * len(ngrams)).reshape(len(texts), -1)
    present = (counts > 0).sum(0)  # [G]
    lengths = sizes[:, None] / sizes.mean()
    rarity = np.log1p((len(texts) - present + 0.5) / (present + 0.5))
    return bm25(rarity, counts, lengths).sum(1, dtype=np.float32)


def _codes(text: str) -> UInts64:
    """Return a number for each 4-gram of a text, which differs between those of the first 65,536 characters."""
    letters = np.frombuffer(text.ljust(LENGTH).encode("utf-32-le"), np.uint32).astype(np.uint64)
    return np.lib.stride_tricks.sliding_window_view(letters, LENGTH) @ SHIFTS
