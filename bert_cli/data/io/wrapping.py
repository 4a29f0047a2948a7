"""Hard line breaks of plain text: recognise wrapped prose, and join the lines of its paragraphs.

A program that wraps text breaks a line where the next word does not fit. A break where the next word would have fitted
was made by the author: the end of a paragraph, a heading, a list item, a verse. pdftotext joins the two lines of a
hyphenated word, so that a line may be as long as several.
"""

import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise

MIN_BREAKS = 12  # within paragraphs; fewer are no evidence
WIDTHS = range(30, 161)  # characters; of books 45 to 80, of a page of PDF up to 140
FILLED = 0.9
UNFINISHED = 0.8
"""Minimum length of a line, as fractions of the width: proportional fonts vary. A line that does not end a sentence
may be shorter (UNFINISHED)."""
MIN_FILLED = 0.72
MAX_FINAL = 0.4
MAX_BEGUN = 0.6
"""Limits for fractions of the breaks: after a filled line, after the end of a sentence, before a capital, a digit or a
mark. Measured: 60 articles wrapped in 8 ways and 56 PDF files have at least 0.75, at most 0.29, at most 0.44; the same
articles with one sentence per line at most 0.40, at least 0.96, at least 0.98; verse of Shakespeare and Milton 0.89,
0.25, 1."""
MAX_PARAGRAPH = 1 << 16  # characters, so that a file without paragraphs needs no more memory

FINAL = re.compile(r"[.!?:;…。！？：；][\"'”’»」』)\]*_]*$")
WORDS = re.compile(r"\w+(?:-\w+)*")
FIRST_PART = re.compile(r"(\w+)-$")
SECOND_PART = re.compile(r"\w+")
WITHOUT_SPACES = re.compile(r"[\u3000-\u30ff\u3400-\u9fff\uff00-\uffef]{2}")  # Chinese and Japanese


def wrapped_width(text: str) -> int:
    """Return the width at which prose was wrapped, or 0 for text that does not look wrapped."""
    lines = [line.strip() for line in text.split("\n")]
    breaks = [(first, second) for first, second in pairwise(lines) if first and second]
    if len(breaks) < MIN_BREAKS:
        return 0
    width = common_length([len(first) for first, _ in breaks])
    filled = sum(_fill(first, second, width) > FILLED for first, second in breaks)
    final = sum(bool(FINAL.search(first)) for first, _ in breaks)
    begun = sum(second[0].isupper() or not second[0].isalpha() for _, second in breaks)
    count = len(breaks)
    is_filled = filled >= MIN_FILLED * count
    is_prose = final <= MAX_FINAL * count and begun <= MAX_BEGUN * count
    return width if width in WIDTHS and is_filled and is_prose else 0


def common_length(lengths: list[int]) -> int:
    """Return the length L for which the most lines have a length of 0.9 L to L."""
    lengths = sorted(lengths)
    ends = {length: end for end, length in enumerate(lengths, 1)}
    return max(ends, key=lambda length: ends[length] - bisect_left(lengths, 0.9 * length))


def _fill(line: str, following: str, width: int) -> float:
    """Return the length of a line with the first word of the following line, as a fraction of the width."""
    rows = math.ceil(len(line) / (1.1 * width))
    row = len(line) - (rows - 1) * width
    return (row + 1 + len(following.partition(" ")[0])) / width


class Joiner:
    """Joins the lines of paragraphs by the width, words and running titles that the head of their file has.

    A hyphen at the end of a line is removed or stays as in other occurrences of the word in the head; for a word
    without other occurrences, the majority of such words decides.
    """

    def __init__(self, head: str) -> None:
        lines = [line.strip() for line in head.split("\n")]
        self.width = common_length([len(line) for line in lines if line] or [1])
        self.words = Counter(WORDS.findall(head.lower()))
        excesses = [
            self._excess(first[1], second[0])
            for line, following in pairwise(lines)
            if (first := FIRST_PART.search(line)) and (second := SECOND_PART.match(following))
        ]
        joined, hyphenated = (sum(sign * n > 0 for n in excesses) for sign in (1, -1))
        self.drops_hyphens = joined >= hyphenated
        pages = (list(filter(str.strip, page.split("\n"))) for page in head.split("\f"))
        outer = (line for page in pages for line in {*page[:2], *page[-2:]})
        titles = Counter(map(_without_digits, outer))
        self.titles = {title for title, count in titles.items() if count > 1}

    def paragraphs(self, lines: Iterable[str]) -> Iterator[str]:
        """Yield each paragraph in a line, and blank lines as they are."""
        paragraph = last = ""
        for line in self._without_page_breaks(lines):
            if paragraph and not self._continues(last, line, len(paragraph)):
                yield paragraph
                paragraph = ""
            if not line:
                yield ""
            paragraph = self._join(paragraph, line)
            last = line
        if paragraph:
            yield paragraph

    def _continues(self, last: str, line: str, size: int) -> bool:
        if not line or size > MAX_PARAGRAPH:
            return False
        least = FILLED if FINAL.search(last) else UNFINISHED
        return line[0].islower() or _fill(last, line, self.width) > least

    def _join(self, paragraph: str, line: str) -> str:
        first = FIRST_PART.search(paragraph[-100:])
        second = SECOND_PART.match(line)
        if paragraph.endswith("\u00ad"):  # a soft hyphen
            return paragraph[:-1] + line
        if first and second:
            excess = self._excess(first[1], second[0])
            is_word = line[0].islower() and (excess > 0 or (not excess and self.drops_hyphens))
            return (paragraph[:-1] if is_word else paragraph) + line
        is_bare = not paragraph or WITHOUT_SPACES.fullmatch(paragraph[-1:] + line[:1])
        return paragraph + line if is_bare else f"{paragraph} {line}"

    def _excess(self, first: str, second: str) -> int:
        """Return how much more often the joined word occurs than the hyphenated word."""
        first = first.lower()
        second = second.lower()
        return self.words[first + second] - self.words[f"{first}-{second}"]

    def _without_page_breaks(self, lines: Iterable[str]) -> Iterator[str]:
        """Yield stripped lines without running titles and page numbers, and without a gap in a sentence."""
        last = ""
        gap: list[str] = []
        for raw in lines:
            line = raw.strip()
            if not line or _without_digits(raw) in self.titles:
                gap.append(raw)
                continue
            if any("\f" in text for text in (*gap, raw)):
                continues = last and line[0].islower() and not FINAL.search(last)
                gap = [] if continues else [""]
            yield from (text.strip() for text in gap)
            yield line
            last = line
            gap = []


def _without_digits(line: str) -> str:
    return re.sub(r"\d+", "0", line.strip())
