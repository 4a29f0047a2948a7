"""Join the lines of the paragraphs of wrapped text.

A break where the next word would have fitted was made by the author: the end of a paragraph, a heading, a list item, a
verse.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from itertools import pairwise

from bert_cli.data.io.margins import (
    FILLED,
    FINAL,
    Row,
    common_length,
    continues,
    fill,
    is_prose,
    row_of,
)

UNFINISHED = 0.8
"""Minimum length of a line that does not end a sentence, as a fraction of the width, instead of FILLED."""
MAX_PARAGRAPH = 1 << 16  # characters, so that a file without paragraphs needs no more memory

WORDS = re.compile(r"\w+(?:-\w+)*")
FIRST_PART = re.compile(r"(?<![\w-])(-*)((?:\w+-)*\w+)([-\u2010])$")
SOFT_HYPHEN = re.compile(r"\u00ad$|[^\w\s]\u2010$")
SECOND_PART = re.compile(r"\w+(?:-\w+)*")
WITHOUT_SPACES = re.compile(r"[\u3000-\u30ff\u3400-\u9fff\uff00-\uffef]{2}")  # Chinese and Japanese


class Joiner:
    """Joins the lines of paragraphs by the width, words and running titles that the head of their file has.

    A hyphen at the end of a line is removed or stays as in other occurrences of the word in the head; for a word
    without other occurrences, the majority of such words decides. Text without margins has a proportional font.
    """

    def __init__(self, head: str, margins: Sequence[int] = ()) -> None:
        self.margins = margins
        lines = [line.strip() for line in head.split("\n")]
        self.width = common_length([len(line) for line in lines if line] or [1])
        self.words = Counter(WORDS.findall(head.lower().replace("\u2010", "-")))
        self.has_hyphens = any(line.endswith("\u2010") for line in lines)
        excesses = [
            self._excess(first[2], second[0])
            for line, following in pairwise(lines)
            if (first := _first_part(line)) and (second := SECOND_PART.match(following))
        ]
        joined, hyphenated = (sum(sign * n > 0 for n in excesses) for sign in (1, -1))
        self.drops_hyphens = joined >= hyphenated
        pages = [list(filter(str.strip, page.split("\n"))) for page in head.split("\f")]
        outer = (line for page in pages[1:] and pages for line in {*page[:2], *page[-2:]})
        titles = Counter(map(_without_digits, outer))
        self.titles = {title for title, count in titles.items() if count > 1}

    def paragraphs(self, lines: Iterable[str]) -> Iterator[str]:
        """Yield each paragraph in a line, and blank lines as they are."""
        rows: list[Row] = []
        size = 0
        for line in self._without_page_breaks(lines):
            row = row_of(line)
            if rows and not (row.text and size < MAX_PARAGRAPH and self._continues(rows, row)):
                yield from self._joined(rows)
                rows = []
                size = 0
            if row.text:
                rows.append(row)
                size += len(row.text)
            else:
                yield ""
        yield from self._joined(rows)

    def _continues(self, rows: Sequence[Row], row: Row) -> bool:
        last = rows[-1]
        if self.margins or row.quote != last.quote:
            return row.quote == last.quote and continues(rows, row, self.margins)
        least = FILLED if FINAL.search(last.text) else UNFINISHED
        return row.text[0].islower() or fill(last.text, row.text, self.width) > least

    def _joined(self, rows: Sequence[Row]) -> list[str]:
        texts = [row.text for row in rows]
        is_joined = texts and (not self.margins or is_prose(rows))
        return [reduce(self._join, texts)] if is_joined else texts

    def _join(self, paragraph: str, line: str) -> str:
        if SOFT_HYPHEN.search(paragraph[-2:]):
            return paragraph[:-1] + line
        first = _first_part(paragraph)
        second = SECOND_PART.match(line)
        if first and second:
            # A minus sign of an option, or one beside true hyphens, was in the text before it was wrapped.
            is_minus = first[1] or (self.has_hyphens and first[3] == "-")
            is_name = first[3] == "\u2010" and (first[2] + second[0]).isupper()
            is_default = self.drops_hyphens and not is_minus and (line[0].islower() or is_name)
            is_split = (self._excess(first[2], second[0]) or is_default) > 0
            return (paragraph[:-1] if is_split else paragraph) + line
        is_bare = WITHOUT_SPACES.fullmatch(paragraph[-1:] + line[:1])
        return paragraph + line if is_bare else f"{paragraph} {line}"

    def _excess(self, first: str, second: str) -> int:
        """Return how much more often the joined word occurs than the hyphenated word."""
        first = first.lower()
        second = second.lower()
        parts = first.rpartition("-")[2], second.partition("-")[0]
        counts = (self.words[a + b] - self.words[f"{a}-{b}"] for a, b in ((first, second), parts))
        return next(filter(None, counts), 0)

    def _without_page_breaks(self, lines: Iterable[str]) -> Iterator[str]:
        """Yield lines without running titles and page numbers, and without a gap in a sentence."""
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
            yield from gap
            yield raw
            last = line
            gap = []


def _first_part(line: str) -> re.Match[str] | None:
    return FIRST_PART.search(line[-100:]) if line.endswith(("-", "\u2010")) else None


def _without_digits(line: str) -> str:
    return re.sub(r"\d+", "0", line.strip())
