"""What all readers of rows share: the encoding of a file, the rows of a CSV or TSV table, the values of JSON lines.

Quotes delimit cells in CSV. In TSV they are text: a quote that is never closed would swallow the rows after it.
"""

import csv
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, dropwhile
from typing import Any

from bert_cli.errors import DataError, nearest
from bert_cli.files import is_utf8

LISTED_NAMES = 20  # names that an error lists; IFLYTEK has 119 labels
LONGEST_CELL = 2**31 - 1  # characters; Python's own limit, 131,072, is less than a long document
DELIMITERS = {"csv": ",", "tsv": "\t", "other": ";|"}
# Byte order marks, or without one the zero bytes of ASCII letters.
WIDE = {
    "UTF-32": rb"\xff\xfe\0\0|\0\0\xfe\xff",
    "UTF-16": rb"\xff\xfe|\xfe\xff",
    "UTF-16LE": rb"([^\0]\0){4}",
    "UTF-16BE": rb"(\0[^\0]){4}",
}


def check_encoding(head: bytes, where: str) -> None:
    """Raise DataError for text that begins with units of 16 or 32 bits."""
    for name, start in WIDE.items():
        if re.match(start, head):
            remedy = f"convert it with iconv -f {name} -t UTF-8"
            raise DataError(where, f"is {name}, not UTF-8", remedy)


def table_rows(
    lines: Iterable[str], source: str, kind: str, needed: Sequence[str], remedy: str = ""
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the (location, columns) of each row of a table of kind csv or tsv, no columns for a blank line.

    Where the header has the needed columns with another delimiter alone, that is used, with quoting. Raises DataError
    with the line; `remedy` is for a column that is absent.
    """
    lines = iter(lines)
    blank = 0
    while (first := next(lines, "")) and not first.strip():
        blank += 1
    marks = (DELIMITERS[kind], *"".join(DELIMITERS.values()))
    headers = {mark: _cells(first.rstrip("\r\n"), mark) for mark in marks}
    complete = (mark for mark, names in headers.items() if {*needed} <= {*names})
    delimiter = next(complete, max(headers, key=lambda mark: len(headers[mark])))
    is_plain = delimiter == marks[0] == "\t"
    rows = _split(chain(["\n"] * blank, [first], lines), source, "" if is_plain else delimiter)
    rows = dropwhile(lambda row: not row[1], rows)
    where, header = next(rows, (source, []))
    check_columns(where, needed, header, remedy)
    for where, row in rows:
        if row and len(row) != len(header):
            problem = f"has {len(row)} cells for {len(header)} columns ({listed(header)})"
            raise DataError(where, problem, "fix the row")
        yield where, dict(zip(header, row, strict=False))


def _cells(line: str, delimiter: str) -> list[str]:
    """Return the cells of a line, one cell if it is not CSV with this delimiter."""
    before = csv.field_size_limit(LONGEST_CELL)
    try:
        return next(csv.reader([line], delimiter=delimiter), [])
    except csv.Error:
        return [line]
    finally:
        csv.field_size_limit(before)


def _split(lines: Iterable[str], source: str, delimiter: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the (location, cells) of each row; without a delimiter it is a tab, and there is no quoting."""
    if not delimiter:
        for number, line in enumerate(lines, 1):
            text = line.removesuffix("\n").removesuffix("\r")
            yield f"{source} (line {number})", text.split("\t") if text else []
        return
    before = csv.field_size_limit(LONGEST_CELL)
    number = 1
    try:
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        for row in reader:
            yield f"{source} (line {number})", row
            number = reader.line_num + 1
    except csv.Error as error:
        remedy = "enclose a text that contains quotes in quotes, and double each quote in it"
        raise DataError(f"{source} (line {number})", f"is not CSV ({error})", remedy) from error
    finally:
        csv.field_size_limit(before)


def check_columns(
    where: str, needed: Iterable[str], columns: Iterable[str], remedy: str = ""
) -> None:
    """Raise DataError for a column that is absent or occurs twice."""
    names = list(columns)
    remedy = remedy or "name the columns in the first line, or give another one"
    for name in needed:
        if name not in names:
            near = nearest(name, names)
            problem = f"has no column '{name}', only {listed(names)}"
            raise DataError(where, problem, f"did you mean '{near}'?" if near else remedy)
        if names.count(name) > 1:
            raise DataError(where, f"has two columns '{name}'", "rename one")


def listed(names: Sequence[str]) -> str:
    """Return the first LISTED_NAMES names in quotes, long ones shortened."""
    more = len(names) - LISTED_NAMES
    shown = ", ".join(
        f"'{textwrap.shorten(name, 40, placeholder='...')}'" for name in names[:LISTED_NAMES]
    )
    return f"{shown} and {more} more" if more > 0 else shown


def refuse_array(text: str, where: str) -> None:
    """Raise DataError if a file of JSON lines begins as a JSON array."""
    if text.lstrip("\ufeff \t\r\n").startswith("["):
        raise DataError(where, "is a JSON array", "write one object on each line (jq -c .[])")


def check_text(value: Any, where: str) -> None:
    """Raise DataError for half of a surrogate pair anywhere in a JSON value, which no file can hold."""
    text = json.dumps(value, ensure_ascii=False)
    if not is_utf8(text):
        half = next(letter for letter in text if not is_utf8(letter))
        raise DataError(where, f"has an unpaired surrogate ({half!r})", "remove it")
