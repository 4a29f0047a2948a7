"""Documents as passages: whole sentences up to a length, none of which overlap.

A heading begins a passage with what follows it. Running heads of manuals and pictures in base64 are left out.
"""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

from bert_cli.data.io import files
from bert_cli.data.io.documents import HEADING, marked_lines
from bert_cli.data.io.wrapping import GAP

Split = Callable[[str], list[str]]
LENGTH = 1000
"""Characters of a passage, about 200 tokens: models of sentences read 256. A letter of UNSPACED counts WIDE times."""
WIDE = 4
ENOUGH = 400
"""Length of a passage from which the next heading ends it: a list of options is not fifty passages."""
# Letters of scripts without spaces between words: Thai, Lao, Burmese, Khmer, Japanese and Chinese.
UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
IS_UNSPACED = re.compile(f"[{UNSPACED}]")
TITLE_SHOWN = 80  # characters
LONGEST_HEADING = 80  # characters
MOST_HEADINGS = 2  # in a row; more are a list or verse
FINAL = re.compile(r"[.!?;,…。！？；，][\"'”’»」』)\]*_]*$")
TITLE_LINES = 20  # at the beginning of a document
NAMED_TITLE = re.compile(r"(?:#\+title:|\\title\{|= )\s*(.*?)[}=]?\s*", re.IGNORECASE)
# Lines for programs in Org, TeX, reST, roff and scripts; then comments, images and badges.
NO_TITLE = re.compile(r"#\+|#!|\\|<\?|%|:\w|\.\. |\.\\")
UNSEEN = re.compile(r"<!--.*?-->|\[?!\[[^]]*\]\([^)]*\)(?:\]\([^)]*\))?", re.DOTALL)
TAG = re.compile(r"</?[A-Za-z][^<>]*>")
SHORTEST_DATA = 59  # characters; a URL of data may be shorter
DATA = re.compile(r"data:\w+/[\w.+;=-]*,[^\s)\"'<>]*|[A-Za-z0-9+/]{200,}=*|^[A-Za-z0-9+/]{60,}=*$")
WORD = re.compile(r"[^\W_]")


class Hit(NamedTuple):
    """A passage that answers a question."""

    text: str
    title: str
    document: str
    """Name of the file below the folder of its texts, and `:NUMBER` of the document if the file has several."""
    score: float
    """BM25 of words, the cosine of meaning, or the weighted sum of both, standardised."""
    file: str
    """Path of the file, with the number too."""
    start: int
    stop: int
    """Characters of the passage in the text of its document."""
    words: list[tuple[int, int]]
    """Characters of the passage that are words of the question."""
    passage: int
    """Number of the passage in the index, which no other gets."""
    first: int
    """Number of the first passage of its document, by which documents of one name differ."""
    page: int | None = None
    """Page with the most words of the question, or on which the passage begins; None for files without pages."""
    of_document: int | None = None
    """Passages of its document among the best 100; None where nothing was ranked."""


class Document(NamedTuple):
    """The lines of a document, with its title."""

    title: str
    lines: Sequence[str]
    number: int = 1
    """Its row in the file, or its position among the documents of plain text."""
    is_named: bool = False
    """Whether the title stands outside its lines, in a field or in front matter."""
    pages: Sequence[int] | None = None
    """The first character of each page but the first; None for a document without pages."""


class Passage(NamedTuple):
    """Some characters of a document, whose lines end with a line feed."""

    start: int
    stop: int
    text: str


class Unit(NamedTuple):
    """A sentence or a heading."""

    start: int
    stop: int
    is_heading: bool


def documents_of(part: files.Part, reading: files.Reading) -> Iterator[Document]:
    """Yield the documents of a file. Raises DataError for text that cannot be read."""
    title = ""
    number = 0
    lines: list[str] = []
    pages: list[int] = []
    size = 0
    for kind, line in chain(marked_lines(part, reading), [("document", "")]):
        if kind == "document":
            if lines:
                document = Document(title or _title_of(lines), lines, number, is_named=bool(title))
                if part.format == "pdf":
                    document = document._replace(pages=pages)
                yield document
            number += 1
            title = line
            lines = []
            pages = []
            size = 0
        elif kind == "page":
            pages.append(size + int(line))
        elif kind == "body":
            lines.append(line)
            size += len(line) + 1


def pages_of(document: Document, passage: Passage) -> list[int] | None:
    """Return the page on which a passage begins, and its characters that begin others; None without pages."""
    if document.pages is None:
        return None
    first, last = (bisect_right(document.pages, end) for end in (passage.start, passage.stop - 1))
    return [1 + first, *(start - passage.start for start in document.pages[first:last])]


def page_of(pages: Sequence[int], spans: Sequence[tuple[int, int]]) -> int:
    """Return the page of `pages_of` that has the most of some spans of a passage, or on which it begins."""
    first, *starts = pages
    counts = Counter(bisect_right(starts, start) for start, _ in spans)
    return first + max(counts, key=lambda page: counts[page], default=0)


def _title_of(lines: Sequence[str]) -> str:
    """Return the title of a document that states none: its first line, which need not be complete.

    Of a running head it is the first part: MOUNT(8), where the first heading of each manual is NAME.
    """
    title = " ".join(HEADING.sub("", _first_line(lines)).split())
    if len(title) <= TITLE_SHOWN:
        return title
    return f"{title[: TITLE_SHOWN - 1]}…"


def _first_line(lines: Sequence[str]) -> str:
    if 0 in running_heads(lines):
        return GAP.split(lines[0].strip())[0]
    shown = UNSEEN.sub("", "\n".join(lines[:TITLE_LINES])).split("\n")
    matches = filter(None, map(NAMED_TITLE.fullmatch, shown))
    titles = (match[1] for match in matches)
    bare = (TAG.sub("", line) if line.startswith("<") else line for line in shown)
    texts = (line for line in bare if WORD.search(line) and not NO_TITLE.match(line))
    return next(chain(titles, texts), lines[0])


def running_heads(lines: Sequence[str]) -> set[int]:
    """Return the numbers of the first and last lines, and of those that recur, with the name of a manual at a margin.

    A manual has its name at both margins of its first or last line.
    """
    outer = [GAP.split(line.strip()) for line in (*lines[:1], *lines[-1:])]
    names = {first for first, *others in outer if others and others[-1] == first}
    if not names:
        return set()
    wide = {n: GAP.split(line.strip()) for n, line in enumerate(lines) if GAP.search(line.strip())}
    counts = Counter(lines[n] for n in wide)
    return {
        n
        for n, parts in wide.items()
        if names & {parts[0], parts[-1]} and (n in (0, len(lines) - 1) or counts[lines[n]] > 1)
    }


def headings_of(lines: Sequence[str]) -> set[int]:
    """Return the numbers of the headings: short lines that end no sentence, before a line that is not short."""
    numbers: set[int] = set()
    row: list[int] = []
    for number, line in enumerate(lines):
        if HEADING.match(line) and len(line) <= LONGEST_HEADING:
            numbers.add(number)
        elif len(line) <= LONGEST_HEADING and not FINAL.search(line):
            row.append(number)
            continue
        else:
            if len(row) <= MOST_HEADINGS:
                numbers.update(row)
        row = []
    return numbers


def passages_of(lines: Sequence[str], split: Split) -> list[Passage]:
    """Return the passages of a document; `split` returns the sentences of a line."""
    text = "\n".join(lines)
    groups: list[list[Unit]] = [[]]
    for unit in _units(lines, split):
        begun = groups[-1]
        if unit is None:
            groups.append([])
            continue
        start = begun[0].start if begun else unit.start
        is_full = width(text[start : unit.stop]) > LENGTH
        ends = is_full or (unit.is_heading and width(text[start : unit.start]) >= ENOUGH)
        stays = not begun or begun[-1].is_heading  # a heading stays with what follows
        if (is_full and len(begun) > 1) or (not stays and ends):
            groups.append([*_last_headings(begun), unit])
        else:
            begun.append(unit)
    spans = [(group[0].start, group[-1].stop) for group in groups if group]
    passages = [Passage(start, stop, text[start:stop]) for start, stop in spans]
    return [passage for passage in passages if WORD.search(passage.text)]


def _last_headings(group: list[Unit]) -> list[Unit]:
    """Take the headings from the end of a group, which belong to what follows; a group of headings alone keeps them."""
    first = len(group)
    while first and group[first - 1].is_heading:
        first -= 1
    if not first:
        return []
    taken = group[first:]
    del group[first:]
    return taken


def characters_left_out(lines: Sequence[str], passages: Sequence[Passage]) -> int:
    """Return how many characters of a document, but for blanks, are in none of its passages."""
    texts = ["".join(passage.text.split()) for passage in passages]
    return sum(len("".join(line.split())) for line in lines) - sum(map(len, texts))


def width(text: str) -> int:
    """Return the length of a text in letters of scripts with spaces."""
    unspaced = () if text.isascii() else IS_UNSPACED.findall(text)
    return len(text) + (WIDE - 1) * len(unspaced)


def _units(lines: Sequence[str], split: Split) -> Iterator[Unit | None]:
    """Yield the headings and sentences of a document, and None for what is left out."""
    heads = running_heads(lines)
    headings = headings_of(lines)
    offset = 0
    for number, line in enumerate(lines):
        if number in heads:
            yield None
        else:
            for start, stop in _around_data(line):
                if start:
                    yield None
                begin = offset + start
                for first, last in _sentences(line[start:stop], split):
                    if last:
                        yield Unit(begin + first, begin + last, number in headings)
        offset += len(line) + 1


def _around_data(line: str) -> Iterator[tuple[int, int]]:
    """Yield the parts of a line around data in base64, such as a picture."""
    start = 0
    matches = DATA.finditer(line) if len(line) > SHORTEST_DATA or ":" in line else ()
    for match in matches:
        is_mixed = all(re.search(kind, match[0]) for kind in ("[a-z]", "[A-Z]", r"\d"))
        if is_mixed or match[0].startswith("data:"):
            yield start, match.start()
            start = match.end()
    yield start, len(line)


def _sentences(line: str, split: Split) -> Iterator[tuple[int, int]]:
    """Yield the characters of each sentence of a line; one that is longer than a passage is cut at spaces."""
    if width(line) < LENGTH // 10:
        yield 0, len(line)
        return
    ends = [0]
    for sentence in split(line):
        found_at = line.find(sentence.strip(), ends[-1])
        if found_at >= 0:  # a splitter may change white space
            ends.append(found_at + len(sentence.strip()))
    for start, stop in pairwise([*(ends[:-1] or [0]), len(line)]):
        start += len(line[start:stop]) - len(line[start:stop].lstrip())
        while width(begun := line[start:stop][:LENGTH]) > LENGTH or stop > start + LENGTH:
            limit = start + LENGTH * len(begun) // width(begun)
            cut = line.rfind(" ", start + 1, limit)
            if cut > 0:
                yield start, cut
                start = cut + 1  # behind the space
            else:
                yield start, limit
                start = limit
        yield start, stop
