"""Read documents from files of any format line by line, and sentences in blocks of megabytes.

`marked_lines` needs a few kilobytes of memory for a document of any length; `bert preprocess` uses it.
`sentence_blocks` has the speed that `bert tokenize` needs.
"""

import html
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, chain, islice
from typing import Literal

from bert_cli.data.io import files
from bert_cli.data.io.rows import rows, text_of
from bert_cli.data.io.wrapping import (
    CUT,
    FENCED,
    MISSING,
    NUMBERED,
    TWO_COLUMNS,
    Joiner,
    ends_within_sentences,
    has_line_numbers,
    has_two_columns,
    margins_of,
    wrapped_width,
)
from bert_cli.errors import DataError

BLOCK_BYTES = 1 << 22  # text that is encoded at once; its tokens take about 60 MB
LINES_BYTES = 1 << 16  # text that is read at once line by line

PLACEHOLDER = re.compile(r"\b(?:formula|codice)_\d+\b")
EMPTY_BRACKETS = re.compile(r"\s*\(\s*(?:[,;:/–-]\s*)*\)|\s*\[\s*\]")
# Without the leading white space, whose search takes half of the time of `bert preprocess`.
ANY_EMPTY_BRACKETS = re.compile(r"\(\s*(?:[,;:/–-]\s*)*\)|\[\s*\]")
SPACE_BEFORE_STOP = re.compile(r"\s+([,.;:!?)])")
SAMPLED_CHARACTERS = 1 << 17  # of a file: they decide whether its lines are wrapped
# The beginnings of files of a corpus, which show its margin together.
POOLED_FILES = 64
POOLED_CHARACTERS = 1 << 13
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MOST_ENTRIES = 200  # lines of front matter
ENTRY = re.compile(r"\s|#|- |[\[\]{}]|[\w.\"'-]+ *[:=]")
QUOTED = re.compile(r"^([\"'])(.*)\1$")
HEADING = re.compile(r"^#{1,6} ")  # its mark
TITLE = "title"  # the column or the field of titles
FIELD_REMEDY = "pass the field with the text as --text-field"

# Kind of a line: that of a document is its title, where it has one; that of a page is the number of characters of the
# next line of the body that are still on the page before.
Kind = Literal["document", "page", "body", "outside"]


def marked_lines(part: files.Part, reading: files.Reading) -> Iterator[tuple[Kind, str]]:
    """Yield (kind, line) of each start of a document and each line with text. Raises DataError with the faulty line."""
    if part.format == "wikiextractor":
        yield from _marked_articles(part)
    elif part.format == "plain":
        yield from _marked_plain(part, reading)
    elif part.format in files.DOCUMENTS:
        for kind, line in _marked_plain(part, replace(reading, documents="files")):
            *pages, _ = line.split("\f")
            yield from (("page", str(size)) for size in accumulate(map(len, pages)))
            if kind == "document" or line.strip("\f"):
                yield kind, line.replace("\f", "")
    else:
        joiner = None
        if part.margins is not None:
            joiner = _joiner(part, reading)
        for title, text in _titled_texts(part, reading.text_field):
            yield "document", title
            lines = text.split("\n")
            paragraphs: Iterable[str] = lines
            if joiner is not None and len(lines) > 1:
                paragraphs = joiner.paragraphs(lines)
            for line in paragraphs:
                stripped = line.strip()
                if stripped:
                    yield "body", stripped


def _marked_articles(part: files.Part) -> Iterator[tuple[Kind, str]]:
    is_inside = title_is_next = False
    for line in map(str.strip, _lines(part)):
        if files.OPEN.fullmatch(line):
            is_inside = title_is_next = True
            yield "document", html.unescape(line.rpartition(' title="')[2].removesuffix('">'))
        elif line == files.CLOSE:
            is_inside = False
        elif not line:
            continue
        elif not is_inside:
            yield "outside", line
        elif title_is_next:
            title_is_next = False
        else:
            yield "body", clean(line)


def _marked_plain(part: files.Part, reading: files.Reading) -> Iterator[tuple[Kind, str]]:
    is_new = True
    if part.start:  # front matter is at the beginning of a file
        title = ""
        lines = _lines(part)
    else:
        title, lines = _after_front_matter(_lines(part))
    if part.margins is not None:
        lines = _joiner(part, reading).paragraphs(lines)
    blanks = None
    if part.format == "pdf":
        blanks = " \t\n\r\v"
    for line in (line.strip(blanks) for line in lines):
        if not line:
            is_new = is_new or reading.documents == "blank-lines"
            continue
        if is_new:
            yield "document", title
            is_new = False
            title = ""
        yield "body", line


def _after_front_matter(lines: Iterator[str]) -> tuple[str, Iterator[str]]:
    """Return the title in the front matter of a file, as Hugo and Jekyll have it, and the lines after that."""
    head = [next(lines, "")]
    title = ""
    mark = head[0].strip()
    entries = MOST_ENTRIES if mark in ("---", "+++") else 0
    for line in islice(lines, entries):
        head.append(line)
        if line.strip() in (mark, "..."):
            return title, lines
        if not ENTRY.match(line):
            break
        key, _, value = line.replace("=", ":", mark == "+++").partition(":")
        if key.strip() == TITLE:
            title = QUOTED.sub(r"\2", value.strip())
    return "", chain(head, lines)


def clean(line: str) -> str:
    """Return a line of WikiExtractor unescaped, without placeholders and empty brackets."""
    text = line.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    bare = text
    if "formula_" in text or "codice_" in text:
        bare = PLACEHOLDER.sub("", text)
    if ANY_EMPTY_BRACKETS.search(bare):
        bare = EMPTY_BRACKETS.sub("", bare)
    if bare == text:
        return text
    return SPACE_BEFORE_STOP.sub(r"\1", bare)


def sentence_blocks(part: files.Part) -> Iterator[str]:
    """Yield text of one sentence per line in blocks of complete lines, without the end of the last line.

    A document has one paragraph per line.
    """
    if part.format not in files.DOCUMENTS:
        yield from _blocks(part, BLOCK_BYTES)
        return
    reading = files.Reading(line_breaks="auto")
    lines = marked_lines(recognise_lines([part], reading)[0], reading)
    yield "\n".join(HEADING.sub("", line) for kind, line in lines if kind == "body")


def _blocks(part: files.Part, size: int) -> Iterator[str]:
    """Yield the text of a part in blocks of complete lines. Raises DataError with the line that is not UTF-8."""
    with files.report_damage(part), files.open_part(part) as file:
        offset = part.start
        if offset:
            file.seek(offset)
        while True:
            left = size
            if part.stop is not None:
                left = max(0, part.stop - offset)
            data = file.read(min(size, left))
            if not data:
                return
            if not data.endswith(b"\n"):  # nor need `stop` be the end of a line
                data += file.readline()
            text = data.removesuffix(b"\n")
            if not offset:
                text = text.removeprefix(BYTE_ORDER_MARK)
            yield files.decode(text, part, offset)
            offset += len(data)


def _lines(part: files.Part) -> Iterator[str]:
    for block in _blocks(part, LINES_BYTES):
        for line in block.split("\n"):
            yield f"{line}\n"


def recognise_lines(parts: Sequence[files.Part], reading: files.Reading) -> list[files.Part]:
    """Return the files with the margins of their hard line breaks, or with what is wrong with their lines.

    A file without a margin of its own has that of the corpus, if its lines agree. Raises DataError for a faulty field.
    """
    if reading.line_breaks == "keep":
        return list(parts)
    plain = [part for part in parts if part.format not in files.DOCUMENTS]
    pool: list[files.Part] = []
    if plain and len(parts) > 1:
        # Rounded up, so that there are at most so many.
        every = -(-len(plain) // POOLED_FILES)
        pool = plain[::every]
    common = margins_of("\n\n".join(sample_of(part, reading, POOLED_CHARACTERS) for part in pool))
    return [_judge_lines(part, sample_of(part, reading), reading, common) for part in parts]


def _judge_lines(
    part: files.Part, text: str, reading: files.Reading, common: tuple[int, ...]
) -> files.Part:
    """Return a file with the margins that its first text was wrapped at, or that are `common`, or with its fault."""
    if part.format == "pdf":  # the lines of a page are not paragraphs
        pages = sample_of(part, reading, -1).partition("\n---\n")[2].split("\f")
        empty = sum(not page.strip() for page in pages)
        fault = ""
        if empty:
            fault = f"{MISSING} on {empty:,} of {len(pages):,} pages"
        return replace(part, margins=margins_of(text), fault=fault)
    if part.format in files.DOCUMENTS:
        return part
    is_joined = reading.line_breaks == "join" and part.format != "wikiextractor"
    if has_line_numbers(text):
        return replace(part, fault=NUMBERED)
    if not is_joined and has_two_columns(text):
        return replace(part, fault=TWO_COLUMNS)
    margins = margins_of(text, common)
    if margins or is_joined or wrapped_width(text):
        return replace(part, margins=margins)
    if ends_within_sentences(text):
        return replace(part, fault=CUT)
    return replace(part, fault="")


def sample_of(part: files.Part, reading: files.Reading, size: int = SAMPLED_CHARACTERS) -> str:
    """Return the beginning of a file's text, at most `size` characters; fields are separated by blank lines."""
    if part.format == "wikiextractor":
        return ""
    whole = replace(part, start=0, stop=None)
    if part.format in ("plain", *files.DOCUMENTS):
        with files.report_damage(whole), files.open_part(whole) as file:
            text = file.read(size).decode(errors="replace")
            if part.format == "plain":
                return FENCED.sub("", text)
            return text
    texts: list[str] = []
    for _, text in _titled_texts(whole, reading.text_field):
        texts.append(text[:size])
        size -= len(texts[-1])
        if size <= 0:
            break
    return "\n\n".join(texts)


def _joiner(part: files.Part, reading: files.Reading) -> Joiner:
    """Return what joins the lines of a part, with the words at the beginning of its complete file."""
    size = files.HEAD_BYTES if part.format in ("plain", "pdf") else SAMPLED_CHARACTERS
    head = sample_of(part, reading, size)
    return Joiner(head, part.margins or (), is_paged=part.format == "pdf")


def _titled_texts(part: files.Part, field: str) -> Iterator[tuple[str, str]]:
    """Yield the title, "" without one, and the text of each row; a null is a document without text."""
    try:
        for where, row in rows(part, _lines(part), [field], FIELD_REMEDY, [TITLE]):
            if not row and part.format in files.TABLES:
                continue
            text = text_of(row, field, where, FIELD_REMEDY)
            title = None
            if field != TITLE:
                title = row.get(TITLE)
            has_title = isinstance(title, str | int) and not isinstance(title, bool)
            shown = ""
            if has_title:
                shown = " ".join(str(title).split())
            if "\r" in text and "\n" not in text:
                text = text.replace("\r", "\n")
            yield shown, text
    except DataError:
        is_range = part.format == "json-lines" and part.start > 0
        if is_range and part.first_line == 1:  # lines are counted for an error alone
            first_line = files.line_number(part, part.start)
            for _ in _titled_texts(replace(part, first_line=first_line), field):
                pass
        raise
