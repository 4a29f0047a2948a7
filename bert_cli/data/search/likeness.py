"""How like texts are to a question by their letters: what words share beyond their first letters.

BM25 of groups of four letters, with a space at both ends of a word. Among the few passages that words have found, it
knows the end of a long word, a part of a compound and a word with a typing error.

Shapes: n texts, G different groups of a question.
"""

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bert_cli.data.search.passages import UNSPACED
from bert_cli.data.search.words import NO_WORD, folded

LETTERS = 4  # of a group
# The usual values of BM25, as SQLite has them.
SATURATION = 1.2
BY_LENGTH = 0.75
BETWEEN_WORDS = re.compile(f"[{NO_WORD}{UNSPACED}]+")


def likeness(question: str, texts: Sequence[str]) -> npt.NDArray[np.float32]:
    """Return the BM25 [n] of texts; the rarity of a group is counted in these texts alone."""
    asked, *spaced = (
        f" {BETWEEN_WORDS.sub(' ', folded(text)).strip()} " for text in (question, *texts)
    )
    groups = {asked[n : n + LETTERS] for n in range(len(asked) - LETTERS + 1)}
    counts = np.array([[text.count(group) for group in sorted(groups)] for text in spaced])
    present = (counts > 0).sum(0)  # [G]
    rarity = np.log1p((len(texts) - present + 0.5) / (present + 0.5))
    lengths = np.array([[len(text)] for text in spaced])  # [n, 1]
    limits = SATURATION * (1 - BY_LENGTH + BY_LENGTH * lengths / lengths.mean())
    return (rarity * counts * (SATURATION + 1) / (counts + limits)).sum(1, dtype=np.float32)
