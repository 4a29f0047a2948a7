#!/usr/bin/env python
"""Measure what stripping accents changes in the words of many languages, and how many characters cover their text.

    pip install wordfreq==3.1.1
    scripts/bench_languages.py

The words and their frequencies are those of the package wordfreq, so each number is a fraction of running text.
"""

import sys
from collections import Counter

from bert_cli.data.records.vocab import COVERAGE, LETTERS


def main() -> int:
    """Print a line for each language."""
    try:
        from wordfreq import available_languages, get_frequency_dict
    except ImportError:
        print("bench_languages: needs wordfreq; run `pip install wordfreq==3.1.1`", file=sys.stderr)
        return 1
    from tokenizers.normalizers import BertNormalizer

    strip = BertNormalizer(False, False, True, False).normalize_str
    print(f"language  words changed  characters for {COVERAGE:.2%}  covered by {LETTERS:,}")
    for language in sorted(available_languages("best")):
        words = get_frequency_dict(language, "best")
        changed = sum(often for word, often in words.items() if strip(word) != word)
        letters: Counter[str] = Counter()
        for word, often in words.items():
            for letter in word:
                letters[letter] += often  # type: ignore[assignment]
        counts = sorted(letters.values(), reverse=True)
        total, covered, needed = sum(counts), 0.0, 0
        while covered < COVERAGE * total:
            covered, needed = covered + counts[needed], needed + 1
        part = sum(counts[:LETTERS]) / total
        print(f"{language:<8}  {changed / sum(words.values()):13.1%}  {needed:21,}  {part:16.2%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
