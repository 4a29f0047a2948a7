"""Documents as passages: whole sentences up to a length, none of which overlap.

A heading begins a passage with what follows it. Running heads, such as in manuals, are left out.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

from bert_cli.data.io import files
from bert_cli.data.io.documents import marked_lines
from bert_cli.data.io.wrapping import GAP

Split = Callable[[str], list[str]]
LENGTH = 1000
"""Characters of a passage, about 200 tokens: models of sentences read 256. A letter of UNSPACED counts WIDE times."""
WIDE = 4
# Letters of scripts without spaces between words: Thai, Lao, Burmese, Khmer, Japanese and Chinese.
UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
IS_UNSPACED = re.compile(f"[{UNSPACED}]")
TITLE_SHOWN = 80  # characters
LONGEST_HEADING = 80  # characters
MOST_HEADINGS = 2  # in a row; more are a list or verse
FINAL = re.compile(r"[.!?;,…。！？；，][\"'”’»」』)\]*_]*$")
MARKUP = re.compile(r"#{1,6} ")
WORD = re.compile(r"[^\W_]")


class Document(NamedTuple):
    """The lines of a document, with its title."""

    title: str
    lines: Sequence[str]
    number: int = 1
    """Its row, or place, in the file."""
    is_named: bool = False
    """Whether the title is none of its lines."""


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
    for kind, line in chain(marked_lines(part, reading), [("document", "")]):
        if kind == "document":
            if lines:
                yield _document(title, lines, number)
            number += 1
            title = line
            lines = []
        elif kind == "body":
            lines.append(line)


def _document(title: str, lines: Sequence[str], number: int) -> Document:
    """Return a document; without a title of its own it has its first line's, which need not be complete.

    Of a running head it is the first part: MOUNT(8), where the first heading of each manual is NAME.
    """
    is_named = bool(title)
    if not title:
        first = GAP.split(lines[0].strip())[0] if 0 in running_heads(lines) else lines[0]
        title = " ".join(MARKUP.sub("", first).split())
        title = f"{title[: TITLE_SHOWN - 1]}…" if len(title) > TITLE_SHOWN else title
    return Document(title, lines, number, is_named)


def running_heads(lines: Sequence[str]) -> set[int]:
    """Return the numbers of lines with parts at both margins that stand first or last, or recur."""
    wide = [n for n, line in enumerate(lines) if GAP.search(line)]
    counts = Counter(lines[n] for n in wide)
    outer = {0, len(lines) - 1} if len(lines) > 2 else set()
    return {n for n in wide if n in outer or counts[lines[n]] > 1}


def headings_of(lines: Sequence[str]) -> set[int]:
    """Return the numbers of the headings: short lines that end no sentence, before a line that is not short."""
    numbers: set[int] = set()
    row: list[int] = []
    for number, line in enumerate(lines):
        if MARKUP.match(line) and len(line) <= LONGEST_HEADING:
            numbers.add(number)
        elif len(line) <= LONGEST_HEADING and not FINAL.search(line):
            row.append(number)
            continue
        else:
            numbers.update(row if len(row) <= MOST_HEADINGS else ())
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
        is_full = bool(begun) and width(text[begun[0].start : unit.stop]) > LENGTH
        stays = not begun or begun[-1].is_heading  # a heading stays with what follows
        if (is_full and len(begun) > 1) or (not stays and (is_full or unit.is_heading)):
            groups.append([unit])
        else:
            begun.append(unit)
    spans = [(group[0].start, group[-1].stop) for group in groups if group]
    passages = [Passage(start, stop, text[start:stop]) for start, stop in spans]
    return [passage for passage in passages if WORD.search(passage.text)]


def width(text: str) -> int:
    """Return the length of a text in letters of scripts with spaces."""
    return len(text) + (WIDE - 1) * len(IS_UNSPACED.findall(text))


def _units(lines: Sequence[str], split: Split) -> Iterator[Unit | None]:
    """Yield the headings and sentences of a document, and None for a running head."""
    heads = running_heads(lines)
    headings = headings_of(lines)
    offset = 0
    for number, line in enumerate(lines):
        if number in heads:
            yield None
        else:
            for start, stop in _sentences(line, split):
                yield Unit(offset + start, offset + stop, number in headings)
        offset += len(line) + 1


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
            yield start, cut if cut > 0 else limit
            start = cut + 1 if cut > 0 else limit
        yield start, stop
