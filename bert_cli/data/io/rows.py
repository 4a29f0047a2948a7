"""The rows of people's files: CSV, TSV, JSON lines and Parquet, for data steps and for fine-tuning.

Quotes delimit cells in CSV. In TSV they are text: a quote that is never closed would swallow the rows after it.
"""

import csv
import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, dropwhile
from typing import Any

from bert_cli.data.io.files import TABLES, Part, open_parquet
from bert_cli.errors import DataError, combine, did_you_mean
from bert_cli.files import JSONObject
from bert_cli.text import count

LISTED_NAMES = 20  # names that an error lists; IFLYTEK has 119 labels
LONGEST_CELL = 2**31 - 1  # characters; Python's own limit, 131,072, is less than a long document
DELIMITERS = {"csv": ",", "tsv": "\t", "other": ";|"}
MOST_FAULTS = 10  # that an error lists
# Rows may be documents of megabytes.
ROWS_AT_ONCE = 128  # of a Parquet file

Row = Mapping[str, Any]
Cells = Iterator[tuple[str, list[str]]]  # "FILE (line 3)", cells
Rows = Iterator[tuple[str, Row]]  # "FILE (line 3)", columns


def rows(
    part: Part,
    lines: Iterable[str],
    columns: Sequence[str],
    remedy: str = "",
    optional: Sequence[str] = (),
) -> Rows:
    """Yield the (location, columns) of each row of a file with these `lines`, no columns for a blank row.

    JSON lines without text are no rows. The lines of plain text are the rows of a single column. Of Parquet, which is
    read without `lines`, only the needed and the `optional` columns are read. Raises DataError for a column that is
    absent, which JSON may leave out of a row, with a `remedy`.
    """
    source = str(part.path)
    if part.format == "parquet":
        yield from parquet_rows(part, columns, remedy, optional)
    elif part.format in TABLES:
        yield from table_rows(lines, source, part.format, columns, remedy)
    elif part.format == "json-lines":
        yield from json_rows(lines, source, part.first_line)
    elif len(columns) > 1:
        problem = f"has a text on each line, not the columns {listed(columns)}"
        raise DataError(source, problem, "use a table with these columns")
    else:
        for number, line in enumerate(lines, 1):
            text = line.removesuffix("\n").removesuffix("\r")
            yield f"{source} (line {number})", {columns[0]: text} if text.strip() else {}


def json_rows(lines: Iterable[str], source: str, first: int = 1) -> Rows:
    """Yield the (location, JSON object) of each line from number `first` on, or of each item of one JSON array."""
    lines = iter(lines)
    is_first = first == 1
    for number, line in enumerate(lines, first):
        where = f"{source} (line {number})"
        if is_first and line.lstrip().startswith("["):
            for item, value in enumerate(parse(line + "".join(lines), source), 1):
                where = f"{source} (item {item})"
                yield where, check_object(value, where)
        elif line.strip():
            is_first = False
            yield where, check_object(parse(line, where), where)


def table_rows(
    lines: Iterable[str], source: str, kind: str, needed: Sequence[str], remedy: str = ""
) -> Rows:
    """Yield the (location, columns) of each row of a table of kind csv or tsv, no columns for a blank line.

    Where the header has the needed columns with another delimiter alone, that is used, with quoting. Raises DataError
    with the lines of at most MOST_FAULTS rows; `remedy` is for a column that is absent.
    """
    lines = iter(lines)
    blank = 0
    # Blank lines before the header are counted, so that messages have the right line.
    first = next(lines, "")
    while first and not first.strip():
        blank += 1
        first = next(lines, "")
    delimiter = delimiter_of(first, kind, needed)
    is_plain = delimiter == DELIMITERS[kind] == "\t"
    # Without a delimiter: cells of a TSV have no quoting.
    quoted_by = "" if is_plain else delimiter
    rows = split_cells(chain(["\n"] * blank, [first], lines), source, quoted_by)
    rows = dropwhile(lambda row: not row[1], rows)
    where, header = next(rows, (source, []))
    check_columns(where, needed, header, remedy)
    faults: list[DataError] = []
    for where, row in rows:
        if row and len(row) != len(header) and not any(cell.strip() for cell in row):
            row = [""] * len(header)  # spreadsheets write such rows after the last one
        if row == header and len(row) > 1:
            faults.append(DataError(where, "repeats the names of the columns", "leave it out"))
        elif row and len(row) != len(header):
            problem = f"has {count(len(row), 'cell')} for {count(len(header), 'column')} ({listed(header)})"
            faults.append(DataError(where, problem, "fix the row"))
        elif not faults:
            yield where, dict(zip(header, row, strict=False))
        if len(faults) == MOST_FAULTS:
            break
    if faults:
        raise combine(faults)


def delimiter_of(header: str, kind: str, needed: Sequence[str]) -> str:
    """Return what separates the cells of a table of kind csv or tsv with this header."""
    marks = (DELIMITERS[kind], *"".join(DELIMITERS.values()))
    names = header.strip().replace('"', "")
    headers = {mark: names.split(mark) for mark in marks}
    complete = (mark for mark, cells in headers.items() if {*needed} <= {*cells})
    return next(complete, max(headers, key=lambda mark: len(headers[mark])))


def split_cells(lines: Iterable[str], source: str, delimiter: str) -> Cells:
    """Yield the (location, cells) of each row; without a delimiter it is a tab, and there is no quoting."""
    if not delimiter:
        for number, line in enumerate(lines, 1):
            text = line.removesuffix("\n").removesuffix("\r")
            yield f"{source} (line {number})", text.split("\t") if text else []
        return
    # A limit of the process: it is put back at the end.
    before = csv.field_size_limit(LONGEST_CELL)
    where = f"{source} (line 1)"
    try:
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        # The location of a row is known before it is read: the line after the last one.
        for row_number, row in enumerate(reader, 2):
            yield where, row
            line_number = reader.line_num + 1
            # A spreadsheet counts rows, and a cell with line breaks has several lines.
            also = f", row {row_number}"
            if line_number == row_number:
                also = ""
            where = f"{source} (line {line_number}{also})"
    except csv.Error as error:
        remedy = "enclose a text that contains quotes in quotes, and double each quote in it"
        raise DataError(where, f"is not CSV ({error})", remedy) from error
    finally:
        csv.field_size_limit(before)


def parquet_rows(
    part: Part, columns: Sequence[str], remedy: str = "", optional: Sequence[str] = ()
) -> Rows:
    """Yield the (location, columns) of each row of a Parquet file.

    Numbers of labels become their names, where the `datasets` of Hugging Face has described them.
    """
    with open_parquet(part) as file:
        labels = _label_names(file.schema_arrow.metadata or {})
        names = file.schema_arrow.names
        check_columns(str(part.path), columns, names, remedy)
        columns = [*columns, *({*optional} & {*names} - {*columns})]
        number = 0
        for batch in file.iter_batches(ROWS_AT_ONCE, columns=columns, use_threads=False):
            for values in zip(*batch.columns, strict=True):
                number += 1
                where = f"{part.path} (row {number})"
                try:
                    row = [value.as_py() for value in values]
                except ValueError as error:
                    raise DataError(where, f"is not UTF-8 ({error})", "fix the row") from None
                cells = dict(zip(batch.schema.names, row, strict=True))
                yield where, cells | {n: _named(cells[n], labels[n]) for n in labels if n in cells}


def _label_names(metadata: Mapping[bytes, bytes]) -> dict[str, list[str]]:
    """Return the names of labels, by column, that a Parquet file of the `datasets` library has in its metadata."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        # Of a list, the type of its items.
        types = {name: column.get("feature", column) for name, column in features.items()}
        return {name: t["names"] for name, t in types.items() if t.get("_type") == "ClassLabel"}
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}


def _named(value: Any, names: Sequence[str]) -> Any:
    """Return the names of label numbers, None for a number without a name."""
    if isinstance(value, list):
        return [_named(item, names) for item in value]
    if isinstance(value, int):
        if not 0 <= value < len(names):
            return None
        return names[value]
    return value


def parse(text: str, where: str) -> Any:
    """Return the value of JSON text. Raises DataError for any other text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(where, f"is not JSON ({error})", "correct it or copy it again") from error


def check_object(value: object, where: str) -> JSONObject:
    """Return a JSON value that is an object. Raises DataError for any other value."""
    if not isinstance(value, dict):
        raise DataError(where, "is not a JSON object", "write one object per line or item")
    return value


def text_of(row: Row, name: str, where: str, remedy: str = "") -> str:
    """Return a row's text in a column; null is an empty text. Raises DataError for other types."""
    if name not in row:
        check_columns(where, [name], row, remedy)
    value = row[name]
    if not isinstance(value, str | None):
        raise DataError(where, f"'{name}' is not a string", remedy or "write it as a string")
    check_text(value or "", where)
    return value or ""


def check_columns(
    where: str, needed: Iterable[str], columns: Iterable[str], remedy: str = ""
) -> None:
    """Raise DataError for a column that is absent or occurs twice."""
    names = list(columns)
    remedy = remedy or "name the columns in the first line, or name another one"
    for name in needed:
        if name not in names:
            problem = f"has no column '{name}', only {listed(names)}"
            raise DataError(where, problem, did_you_mean(name, names, remedy))
        if names.count(name) > 1:
            raise DataError(where, f"has two columns '{name}'", "rename one")


def listed(names: Sequence[str]) -> str:
    """Return the first LISTED_NAMES names in quotes, long ones shortened."""
    more = len(names) - LISTED_NAMES
    short = [textwrap.shorten(name, 40, placeholder="...") for name in names[:LISTED_NAMES]]
    shown = ", ".join(f"'{name}'" for name in short)
    if more <= 0:
        return shown
    return f"{shown} and {more} more"


def check_text(text: str, where: str) -> None:
    """Raise DataError for a text with half of a surrogate pair, which no file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        problem = f"has an unpaired surrogate ({text[error.start]!r})"
        raise DataError(where, problem, "remove it") from None
