"""Documents out of files of any kind: line by line for `bert preprocess`, in large pieces for `bert tokenize`.

`marked_lines` gives every line with what it is, so that a document of any length passes through a
few kilobytes of memory. `text_pieces` gives megabytes of lines at once, a blank line between
documents, which is what encoding at full speed wants. Both read WikiExtractor's <doc> blocks (only
the first of them), plain text, JSON lines and Parquet, packed or not, and say of what cannot be read
in which file and line it is.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

from bert_cli.data.text.files import (
    CLOSE,
    OPEN,
    Part,
    Reading,
    damage_told,
    line_at,
    open_parquet,
    open_part,
)
from bert_cli.errors import DataError

TEXT_PIECE = 1 << 22
"""Bytes of text that are encoded at once; the words of so much text take about 60 MB."""
ROWS = 128
"""Rows of a Parquet file read at once."""

PLACEHOLDER = re.compile(r"\b(?:formula|codice)_\d+\b")
EMPTY_BRACKETS = re.compile(r"\s*\(\s*(?:[,;:/–-]\s*)*\)|\s*\[\s*\]")
# The same without the white space before them, which costs half of the time of `bert preprocess`.
ANY_EMPTY_BRACKETS = re.compile(r"\(\s*(?:[,;:/–-]\s*)*\)|\[\s*\]")
SPACE_BEFORE_STOP = re.compile(r"\s+([,.;:!?)])")
BLANK_LINES = re.compile(r"\n\s*\n")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

Kind = Literal["document", "body", "outside"]
"""What a line is: the beginning of a document, text of its body, or text outside documents."""


def marked_lines(part: Part, reading: Reading) -> Iterator[tuple[Kind, str]]:
    """Give the lines that say something, each with its kind; the beginning of a document is one too.

    DataError naming file and line of what is not UTF-8, broken JSON, without the field, cut off.
    """
    if part.format == "wikiextractor":
        yield from _marked_articles(part)
    elif part.format == "plain":
        yield from _marked_plain(part, one_document=reading.documents == "files")
    else:
        for text in _texts(part, reading.text_field):
            yield "document", ""
            for line in text.split("\n"):
                if stripped := line.strip():
                    yield "body", stripped


def _marked_articles(part: Part) -> Iterator[tuple[Kind, str]]:
    inside = title_is_next = False
    for line in _lines(part):
        if OPEN.fullmatch(line):
            inside = title_is_next = True
            yield "document", line
        elif line == CLOSE:
            inside = False
        elif not line:
            continue
        elif not inside:
            yield "outside", line
        elif title_is_next:
            title_is_next = False
        else:
            yield "body", clean(line)


def _marked_plain(part: Part, *, one_document: bool) -> Iterator[tuple[Kind, str]]:
    fresh = True
    for line in _lines(part):
        if not line:
            fresh = fresh or not one_document
            continue
        if fresh:
            yield "document", ""
            fresh = False
        yield "body", line


def clean(line: str) -> str:
    """Undo WikiExtractor's escapes and take out what stands for nothing."""
    text = line.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    bare = PLACEHOLDER.sub("", text) if "formula_" in text or "codice_" in text else text
    if ANY_EMPTY_BRACKETS.search(bare):
        bare = EMPTY_BRACKETS.sub("", bare)
    return SPACE_BEFORE_STOP.sub(r"\1", bare) if bare != text else text


def text_pieces(part: Part, reading: Reading) -> Iterator[str]:
    """Text of one sentence a line in pieces of whole lines, a blank line between documents.

    A blank line inside a document of JSON, Parquet or a file that is one document is taken out.
    DataError as `marked_lines`, and for WikiExtractor's files, which have no sentences yet.
    """
    if part.format == "wikiextractor":
        raise DataError(
            f"{part.path} (<doc ...>): holds articles, not a sentence a line; give it to "
            "`bert preprocess` first, or say --input-format plain if that is the text"
        )
    if part.format == "plain":
        for text in _blocks(part):
            if reading.documents == "files":
                text = BLANK_LINES.sub("\n", text).strip()
            if text:
                yield text
        return
    held: list[str] = []
    size = 0
    for text in _texts(part, reading.text_field):
        held.append(BLANK_LINES.sub("\n", text).strip())
        size += len(text)
        if size >= TEXT_PIECE:
            yield "\n\n".join(held) + "\n"
            held, size = [], 0
    if held:
        yield "\n\n".join(held) + "\n"


# --- files of lines


def _raw_lines(part: Part) -> Iterator[tuple[bytes, int]]:
    """The lines of a part, and the byte of the unpacked file where each begins."""
    with damage_told(part), open_part(part) as file:
        if part.start:
            file.seek(part.start)
        place = part.start
        for raw in file:
            if part.stop is not None and place >= part.stop:
                return
            yield raw if place else raw.removeprefix(BYTE_ORDER_MARK), place
            place += len(raw)


def _lines(part: Part) -> Iterator[str]:
    for raw, place in _raw_lines(part):
        yield _decoded(raw, part, place).strip()


def _blocks(part: Part) -> Iterator[str]:
    """Text in pieces of whole lines, without the end of the last."""
    with damage_told(part), open_part(part) as file:
        place = part.start
        if place:
            file.seek(place)
        while wanted := TEXT_PIECE if part.stop is None else min(TEXT_PIECE, part.stop - place):
            data = file.read(wanted)
            if not data:
                return
            if part.stop is None or place + wanted < part.stop:
                data += file.readline()
            text = data.removesuffix(b"\n")
            yield _decoded(text if place else text.removeprefix(BYTE_ORDER_MARK), part, place)
            place += len(data)


def _decoded(raw: bytes, part: Part, place: int) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        wrong = place + error.start
        raise DataError(
            f"{part.path} (line {line_at(part, wrong)}, byte {wrong}): not UTF-8; write it as UTF-8"
        ) from error


# --- texts in fields


def _texts(part: Part, field: str) -> Iterator[str]:
    """The texts of JSON lines or of a Parquet file's rows; a null is a document without text."""
    for text in (_json_texts if part.format == "json-lines" else _parquet_texts)(part, field):
        yield text.replace("\r", "\n") if "\r" in text and "\n" not in text else text


def _json_texts(part: Part, field: str) -> Iterator[str]:
    for raw, place in _raw_lines(part):
        line = _decoded(raw, part, place)
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            why = "nested too deeply" if isinstance(error, RecursionError) else error
            raise DataError(
                f"{part.path} (line {line_at(part, place)}): is not JSON ({why}); mend that line"
            ) from None
        if not isinstance(row, dict) or field not in row:
            has = (
                f"only {', '.join(map(repr, row))[:200]}" if isinstance(row, dict) else "no object"
            )
            raise DataError(
                f"{part.path} (line {line_at(part, place)}): has no field {field!r}, {has}; "
                "say where the text is with --text-field"
            )
        value = row[field]
        if not isinstance(value, str | None):
            raise _no_text(f"{part.path} (line {line_at(part, place)})", field, value)
        if "\\u" in line:
            _refuse_half_letters(value or "", part, place)
        yield value or ""


def _refuse_half_letters(text: str, part: Part, place: int) -> None:
    """DataError for a surrogate alone: of the two escapes that make a letter one."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{part.path} (line {line_at(part, place)}): has \\u{ord(text[error.start]):04x}, which is "
            "half of a letter; mend that line"
        ) from None


def _no_text(where: str, field: str, value: Any) -> DataError:
    kind = type(value).__name__
    return DataError(f"{where}: {field!r} is a {kind}, not a text; name another --text-field")


def _parquet_texts(part: Part, field: str) -> Iterator[str]:
    with open_parquet(part) as file:
        names = file.schema_arrow.names
        if field not in names:
            raise DataError(
                f"{part.path}: has no column {field!r}, only {', '.join(map(repr, names))[:200]}; "
                "say where the text is with --text-field"
            )
        stop = file.metadata.num_row_groups if part.stop is None else part.stop
        row = sum(file.metadata.row_group(number).num_rows for number in range(part.start))
        groups = list(range(part.start, stop))
        batches = file.iter_batches(ROWS, row_groups=groups, columns=[field], use_threads=False)
        for batch in batches:
            for value in batch.column(0):
                row += 1
                try:
                    text = value.as_py()
                except UnicodeDecodeError:
                    raise DataError(
                        f"{part.path} (row {row}): not UTF-8; write it as UTF-8"
                    ) from None
                if not isinstance(text, str | None):
                    raise _no_text(f"{part.path} (row {row})", field, text)
                yield text or ""
