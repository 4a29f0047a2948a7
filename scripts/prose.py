"""Print words, mean words a sentence and numbers per 100 words of the pages, or of the files that are passed.

Words are counted as by `wc -w`. Sentences and numbers are those of the running text: no code, tables or headings. A
code span is one word, and a number inside it does not count.
"""

import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"^ *```.*?^ *```$|<!--.*?-->|^ *(?:\||#|!\[).*?$", re.DOTALL | re.MULTILINE)


class Prose(NamedTuple):
    """Counts of a text: all words, and words, sentences and numbers of its running text."""

    all_words: int
    words: int
    sentences: int
    numbers: int

    @property
    def mean(self) -> float:
        """Mean words a sentence."""
        return self.words / max(1, self.sentences)


def count(text: str) -> Prose:
    """Return the counts of a page in Markdown."""
    running = re.sub(r"\]\([^)]*\)", "", OUTSIDE.sub("\n\n", text))
    running = re.sub(r"`[^`]*`", "code", running).replace("[", "").replace("*", "")
    parts = re.split(r"\n\s*\n|^\s*(?:[-*]|\d+\.)\s", running, flags=re.MULTILINE)
    sentences = [words for part in parts for words in re.split(r"(?<=[.!?])[\")]*\s+", part)]
    words = [sentence.split() for sentence in sentences if re.search(r"\w", sentence)]
    every = [word for sentence in words for word in sentence]
    return Prose(
        len(text.split()), len(every), len(words), sum(bool(re.search(r"\d", w)) for w in every)
    )


def main() -> None:
    """Print a row for each page and one for all."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = {path: path.read_text("utf-8") for path in map(Path, sys.argv[1:] or pages)}
    rows = {str(path.resolve().relative_to(ROOT)): count(text) for path, text in texts.items()}
    rows["all"] = Prose(*map(sum, zip(*rows.values(), strict=True)))
    print(f"{'page':34} {'words':>6} {'a sentence':>10} {'numbers in 100':>14}")
    for name, prose in rows.items():
        density = 100 * prose.numbers / max(1, prose.words)
        print(f"{name:34} {prose.all_words:6,} {prose.mean:10.1f} {density:14.1f}")


if __name__ == "__main__":
    main()
