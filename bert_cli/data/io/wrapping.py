"""Recognise wrapped text by its right margin, or by the common length of proportional lines, and join its lines.

A program that wraps text breaks a line where the next word would end behind the margin. So the margin lies between the
end of each such line and the end that it would have with the next word: most of these intervals have a column in
common. Lines that an author ended, as those of code, tables, lists and verse, have none.
"""

import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from itertools import chain, pairwise
from typing import NamedTuple

COLUMNS = range(30, 201)
MIN_EVIDENCE = 12  # broken lines
STRONG_EVIDENCE = 3  # times that a line with a split word or stretched blanks counts
MIN_BROKEN = 0.6  # of the lines that end in the last quarter before the margin, or behind it
MIN_WORDS = 0.6  # of the words of prose consist of letters
SAMPLED_ROWS = 8  # of a paragraph
MAX_UNEVEN = 0.15  # of the lines end a little before or behind the margin, within a sentence
SPLIT_ROOM = 9  # columns: a word need not be split at its last possible syllable
# Limits for fractions of the breaks: after the end of a sentence, before a capital, a digit or a mark.
MAX_FINAL = 0.4
MAX_BEGUN = 0.6
MIN_CUT = 0.2  # of the lines end within a sentence
MAX_LOWER = 0.9  # of the lines begin with a small letter; more if the text has no others
TWO_COLUMNS = "hold two columns"
NUMBERED = "begin with numbers"
# What is wrong with lines; a fault may go on with where.
CUT = "end within sentences"
MISSING = "are missing"

MIN_BREAKS = 12  # within paragraphs; fewer are no evidence
WIDTHS = range(30, 161)  # characters; of books 45 to 80, of a page of PDF up to 140
FILLED = 0.9  # least length of a line, as a fraction of the width: proportional fonts vary
# Least fraction of the breaks after a filled line. Filled breaks, those after the end of a sentence (MAX_FINAL) and
# before a capital, a digit or a mark (MAX_BEGUN), measured: 60 articles wrapped in 8 ways and 56 PDF files have at
# least 0.75, at most 0.29, at most 0.44; the same articles with one sentence per line at most 0.40, at least 0.96, at
# least 0.98; verse of Shakespeare and Milton 0.89, 0.25, 1.
MIN_FILLED = 0.72

FINAL = re.compile(r"[.!?:;…。！？：；][\"'”’»」』)\]*_]*$")
QUOTE = re.compile(r"^(?:> ?)+")
WORD = re.compile(r"[\"'“‘(«]*[^\W\d_]+(?:['’‐-][^\W\d_]+)*[)\"'”’»]*[.,;:!?…]*[)\"'”’»]*")
SPLIT = re.compile(r"\w[-‐\u00ad]$")
BULLET = re.compile(r"[*•·◦▪+–—-]\s+\S")
ITEM = re.compile(r"(?:[*•·◦▪+–—-]|\(?(?:\d{1,3}|[A-Za-z]|[ivx]+)[.)])\s+\S")
STRETCHED = re.compile(r"[^\s.!?:]  +\S")
GAP = re.compile(r" {3,}")
PAIR = re.compile(r"(?:(?! {3}).){13,} {3,}(?! )((?:(?! {3}).){13,})")  # columns with one gap
FENCE = re.compile(r"(?:`{3,}[^`]*|~~~\w*)$")  # of code in Markdown
FENCED = re.compile(r"^ *(```[^`\n]*|~~~\w*)$.*?(^ *(```|~~~)$|\Z)", re.MULTILINE | re.DOTALL)

UNFINISHED = 0.8  # instead of FILLED, for a line that does not end a sentence
MOST_TITLES = 4  # lines around the break of a page, two on each side
MOST_ROWS = 1000  # of a paragraph, so that a file without paragraphs needs no more memory

WORDS = re.compile(r"\w+(?:-\w+)*")
FIRST_PART = re.compile(r"(?<![\w-])(-*)((?:\w+-)*\w+)([-\u2010])$")
SOFT_HYPHEN = re.compile(r"\u00ad$|[^\w\s]\u2010$")
WITHOUT_SPACES = re.compile(r"[\u3000-\u30ff\u3400-\u9fff\uff00-\uffef]{2}")  # Chinese and Japanese


class Row(NamedTuple):
    """A line with the columns of its text, which count behind the marks of a quoted mail."""

    quote: str
    indent: int
    end: int
    text: str
    feed: str = ""  # before it, where a page begins


Break = tuple[Row, Row]


def row_of(line: str, feed: str = "") -> Row:
    """Return the line without blanks around it and without the marks of a quoted mail."""
    line = line.expandtabs().rstrip()
    bare = line
    if line.startswith(">"):
        bare = QUOTE.sub("", line)
    text = bare.lstrip()
    return Row(line.removesuffix(bare), len(bare) - len(text), len(bare), text, feed)


def _rows_of(text: str) -> list[Row]:
    rows = map(row_of, text.split("\n"))
    return [row for row in rows if row.text]


def margins_of(text: str, common: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Return the columns at which prose was wrapped, most frequent first; none for text that is not wrapped."""
    rows = [row_of(line) for line in text.split("\n")]
    breaks = [(a, b) for a, b in pairwise(rows) if _shows_margin(a, b)]
    margins: list[int] = []
    rest = breaks
    columns = list(COLUMNS)
    while columns:
        margin = _margin_of(rest, columns)
        if not margin:
            break
        margins.append(margin)
        rest = [(a, b) for a, b in rest if not is_broken(a, b, margins)]
        # A text may have a second margin, as of a quotation; one within a tenth is the same.
        columns = [n for n in columns if n > margin / 2 and abs(n - margin) > 0.1 * margin]
    if margins and supports(breaks, margins):
        return tuple(margins)
    if common and supports(breaks, common):
        return common
    return ()


def wrapped_width(text: str) -> int:
    """Return the width at which prose in a proportional font was wrapped, or 0 for text that does not look wrapped."""
    lines = [Row("", 0, len(text), text) for text in map(str.strip, text.split("\n"))]
    breaks = [(first, second) for first, second in pairwise(lines) if first.text and second.text]
    if len(breaks) < MIN_BREAKS:
        return 0
    # Without columns: in a proportional font lines of one width differ in their number of letters.
    width = common_length([first.end for first, _ in breaks])
    filled = sum(fill(first.text, second.text, width) > FILLED for first, second in breaks)
    is_wrapped = filled >= MIN_FILLED * len(breaks) and _are_prose(breaks, 0)
    if not is_wrapped or width not in WIDTHS:
        return 0
    return width


def common_length(lengths: list[int]) -> int:
    """Return the length L for which the most lines have a length of 0.9 L to L."""
    lengths = sorted(lengths)
    ends = {length: end for end, length in enumerate(lengths, 1)}
    return max(ends, key=lambda length: ends[length] - bisect_left(lengths, 0.9 * length))


def fill(line: str, following: str, width: int) -> float:
    """Return the length of a line with the first word of the following line, as a fraction of the width.

    pdftotext joins the two lines of a hyphenated word, so that a line may be as long as several.
    """
    # Of a line that was joined, only the last row counts.
    rows = math.ceil(len(line) / (1.1 * width))
    row = len(line) - (rows - 1) * width
    return (row + 1 + len(following.partition(" ")[0])) / width


def has_two_columns(text: str) -> bool:
    """Return whether most lines have one wide gap, and all gaps end in about the same column."""
    rows = _rows_of(text)
    starts: Counter[int] = Counter()
    for row in rows:
        pair = PAIR.fullmatch(row.text)
        if pair:
            starts[row.end - len(pair[1])] += 1
    # The second column of proportional fonts starts a column more or less to the right.
    count = max((starts[n - 1] + starts[n] + starts[n + 1] for n in list(starts)), default=0)
    # Most lines, and enough of them: two rows can be a table.
    return count > max(MIN_EVIDENCE, len(rows) / 2)


def has_line_numbers(text: str) -> bool:
    """Return whether most lines begin with the number after that of the line before, as on pleading paper."""
    rows = list(filter(None, map(str.split, text.split("\n"))))
    numbers = [int(row[0]) if row[0].isdecimal() else -1 for row in rows]
    count = sum(b == a + 1 > 0 for a, b in pairwise(numbers))
    return count > max(MIN_EVIDENCE, len(rows) / 2)


def ends_within_sentences(text: str) -> bool:
    """Return whether many lines of prose end within a sentence; not for text that is all in lower case."""
    rows = _rows_of(text)
    begun = sum(row.text[0].islower() for row in rows)
    cut = sum(
        not FINAL.search(first.text) and second.text[0].islower() and is_prose((first, second))
        for first, second in pairwise(rows)
        if len(first.text) > COLUMNS.start
    )
    return cut >= max(3, MIN_CUT * len(rows)) and begun <= MAX_LOWER * len(rows)


def _shows_margin(first: Row, second: Row) -> bool:
    if not first.text or not second.text or first[:2] != second[:2]:
        return False
    begin_alike = not second.text[0].isalnum() and first.text[0] == second.text[0]
    return not begin_alike and not _are_cells(first, second)


def _are_cells(first: Row, second: Row) -> bool:
    """Return whether two lines have a wide gap that ends in the same column, as rows of a table do."""
    if "   " not in first.text:
        return False
    gaps, others = (
        {row.indent + gap.end() for gap in GAP.finditer(row.text)} for row in (first, second)
    )
    return bool(gaps & others)


def _margin_of(breaks: Sequence[Break], columns: Sequence[int]) -> int:
    """Return the column that the most of the lines were broken at, or 0 if they show none."""
    lines = Counter(first.end for first, _ in breaks if STRETCHED.search(first.text))
    for first, second in breaks:
        for end in {first.end, first.end + len(first.quote)}:
            lines.update(range(end, end + _room(first, second) + 1))
    margin = max(columns, key=lambda column: lines[column])
    broken = [(a, b) for a, b in breaks if is_broken(a, b, (margin,))]
    weight = len(broken)
    for row, _ in broken:
        if SPLIT.search(row.text) or (row.end == margin and STRETCHED.search(row.text)):
            # A word that is cut by a hyphen, or spaces that stretch a line, are made by a program that wraps.
            weight += STRONG_EVIDENCE - 1
    if weight >= MIN_EVIDENCE and _are_prose(broken):
        return margin
    return 0


def _are_prose(broken: Sequence[Break], slack: int = 2) -> bool:
    """Return whether few breaks are after the end of a sentence, or before a word that may begin one."""
    final = sum(bool(FINAL.search(first.text)) for first, _ in broken)
    begun = sum(second.text[0].isupper() or not second.text[0].isalpha() for _, second in broken)
    count = len(broken)
    return final <= MAX_FINAL * count + slack and begun <= MAX_BEGUN * count + slack


def supports(breaks: Sequence[Break], margins: Sequence[int]) -> bool:
    """Return whether most long lines were broken at the margins, and are prose."""
    broken = [(a, b) for a, b in breaks if is_broken(a, b, margins)]
    near = sum(a.end > 0.75 * min(margins) for a, _ in breaks)
    # In a proportional font the lines of a paragraph are shorter and longer than at one margin.
    first = margins[0]
    others = [(a, b) for a, b in breaks if not is_broken(a, b, (first,))]
    uneven = sum(
        0.85 * first < a.end < 1.1 * first and b.text[0].islower() and is_prose((a, b))
        for a, b in others
    )
    is_even = uneven <= MAX_UNEVEN * (len(breaks) - len(others))
    is_wrapped = len(broken) >= MIN_BROKEN * near and is_even
    return bool(broken) and is_wrapped and _are_prose(broken)


def _room(first: Row, second: Row) -> int:
    """Return the columns that the next word, or a part of it, would have taken with a blank, less one."""
    room = len(second.text.partition(" ")[0])
    if SPLIT.search(first.text) and second.text[0].islower():
        return max(room, SPLIT_ROOM)
    return room


def is_broken(first: Row, second: Row, margins: Iterable[int]) -> bool:
    """Return whether the first line ends where one of the margins left no room for the second line's first word."""
    room = _room(first, second)
    ends = (first.end, first.end + len(first.quote))  # wrapped before it was quoted, or after
    return any(0 <= margin - end <= room for margin in margins for end in ends)


def continues(rows: Sequence[Row], row: Row, margins: Sequence[int]) -> bool:
    """Return whether a line continues the paragraph or the item of a list that consists of `rows`."""
    last = rows[-1]
    if _starts_item(rows, row) or _are_cells(last, row):
        return False
    offset = row.indent - last.indent
    if offset and len(rows) > 1:
        return False
    if not offset or last.text[max(0, offset - 1) : max(0, offset)] == " ":  # behind an item's mark
        if is_broken(last, row, margins):
            return True
        is_edited = len(rows) > 1 and row.text[0].islower() and last.end > MIN_BROKEN * min(margins)
        return is_edited and not FINAL.search(last.text)
    # A first line may have been indented after the text was wrapped.
    unindented = last._replace(end=last.end + min(0, offset))
    return any(is_broken(line, row, [max(margins)]) for line in (last, unindented))


def _starts_item(rows: Sequence[Row], row: Row) -> bool:
    if not ITEM.match(row.text):
        return False
    is_next = rows[0].indent == row.indent and bool(ITEM.match(rows[0].text))
    return is_next or bool(BULLET.match(row.text) and FINAL.search(rows[-1].text))


def is_prose(rows: Sequence[Row]) -> bool:
    """Return whether most words consist of letters, other than in code."""
    words = list(chain.from_iterable(row.text.split() for row in rows[:SAMPLED_ROWS]))
    count = sum(word.isalpha() or bool(WORD.fullmatch(word)) for word in words)
    return count >= MIN_WORDS * len(words)


# --- joining


class Joiner:
    """Joins the lines of paragraphs by the width, words and running titles that the head of their file has.

    A hyphen at the end of a line is removed or stays as in other occurrences of the word in the head; for a word
    without other occurrences, the majority of such words decides. Text without margins has a proportional font.
    With `is_paged`, a form feed stays where a page begins.
    """

    def __init__(self, head: str, margins: Sequence[int] = (), *, is_paged: bool = False) -> None:
        self.margins = margins
        self.feed = "\f" if is_paged else ""
        lines = [line.strip() for line in head.split("\n")]
        lengths = [len(line) for line in lines if line] or [1]
        self.width = max(lengths)
        if len(lengths) > MIN_BREAKS:
            self.width = common_length(lengths)
        self.words = Counter(WORDS.findall(head.lower().replace("\u2010", "-")))
        self.has_hyphens = any(line.endswith("\u2010") for line in lines)
        excesses = []
        for line, following in pairwise(lines):
            first = _first_part(line)
            second = WORDS.match(following)
            if first and second:
                excesses.append(self._excess(first[2], second[0]))
        self.drops_hyphens = sum((n > 0) - (n < 0) for n in excesses) >= 0
        pages = [list(filter(str.strip, page.split("\n"))) for page in head.split("\f")]
        outer = ([*page[:2], *page[-2:]] for page in pages)
        titles = Counter(chain.from_iterable({*map(_without_digits, page)} for page in outer))
        self.titles = {title for title, count in titles.items() if count > 1}

    def paragraphs(self, lines: Iterable[str]) -> Iterator[str]:
        """Yield each paragraph in a line; blank lines, and code between fences or with a vertical tab, as they are."""
        rows: list[Row] = []
        is_fenced = False
        for line in self._without_page_breaks(lines):
            row = row_of(line.replace("\f", ""), self.feed * line.count("\f"))
            is_fence = bool(FENCE.match(row.text))
            is_fenced ^= is_fence
            is_code = is_fenced or is_fence or "\v" in line
            joins = row.text and len(rows) < MOST_ROWS and not is_code
            if rows and not (joins and self._continues(rows, row)):
                yield from self._joined(rows)
                rows = []
            if row.text and not is_code:
                rows.append(row)
            else:
                yield row.text and row.feed + row.text
        yield from self._joined(rows)

    def _continues(self, rows: Sequence[Row], row: Row) -> bool:
        last = rows[-1]
        if self.margins or row.quote != last.quote:
            return row.quote == last.quote and continues(rows, row, self.margins)
        least = UNFINISHED
        if FINAL.search(last.text):
            least = FILLED
        return row.text[0].islower() or fill(last.text, row.text, self.width) > least

    def _joined(self, rows: Sequence[Row]) -> list[str]:
        texts = [row.feed + row.text for row in rows]
        is_joined = texts and (not self.margins or is_prose(rows))
        if not is_joined:
            return texts
        return [reduce(self._join, texts)]

    def _join(self, paragraph: str, line: str) -> str:
        text = line.lstrip("\f")
        joined = self._join_words(paragraph, text)
        if text == line:
            return joined
        begin = joined.rfind(" ", 0, len(paragraph) + 1) + 1  # of a word that both pages have
        return joined[:begin] + line[: len(line) - len(text)] + joined[begin:]

    def _join_words(self, paragraph: str, line: str) -> str:
        if SOFT_HYPHEN.search(paragraph[-2:]):
            return paragraph[:-1] + line
        first = _first_part(paragraph)
        second = WORDS.match(line)
        if first and second:
            # A minus sign of an option, or one beside true hyphens, was in the text before it was wrapped.
            is_minus = first[1] or (self.has_hyphens and first[3] == "-")
            is_name = first[3] == "\u2010" and (first[2] + second[0]).isupper()
            is_default = self.drops_hyphens and not is_minus and (line[0].islower() or is_name)
            is_split = (self._excess(first[2], second[0]) or is_default) > 0
            if is_split:
                return paragraph[:-1] + line
            return paragraph + line
        is_bare = WITHOUT_SPACES.fullmatch(paragraph[-1:] + line[:1])
        if is_bare:
            return paragraph + line
        return f"{paragraph} {line}"

    def _excess(self, first: str, second: str) -> int:
        """Return how much more often the joined word occurs than the hyphenated word."""
        first = first.lower()
        second = second.lower()
        parts = first.rpartition("-")[2], second.partition("-")[0]
        for a, b in ((first, second), parts):
            difference = self.words[a + b] - self.words[f"{a}-{b}"]
            if difference:
                return difference
        return 0

    def _without_page_breaks(self, lines: Iterable[str]) -> Iterator[str]:
        """Yield lines without running titles and page numbers, and without a gap in a sentence."""
        last = ""
        gap: list[str] = []
        for raw in lines:
            line = raw.strip()
            if not line or _without_digits(raw) in self.titles:
                gap.append(raw)
                continue
            feeds = sum(text.count("\f") for text in (*gap, raw))
            # More lines than that are rows of numbers, which differ from titles in nothing.
            if feeds and sum(bool(text.strip()) for text in gap) <= MOST_TITLES * feeds:
                continues = last and line[0].islower() and not FINAL.search(last)
                gap = [] if continues else [""]
                raw = "\f" * feeds + raw.replace("\f", "")
            yield from gap
            yield raw
            last = line
            gap = []
        if not last:  # pages of nothing else
            yield from gap


def _first_part(line: str) -> re.Match[str] | None:
    if not line.endswith(("-", "\u2010")):
        return None
    return FIRST_PART.search(line[-100:])


def _without_digits(line: str) -> str:
    return re.sub(r"\d+", "0", line.strip())
