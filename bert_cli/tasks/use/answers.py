"""Where the rows of `bert predict` go: JSON lines, or a table in the form of the input.

A program for spreadsheets reads only the form that it writes, which differs by language: semicolons, a byte order mark.
"""

import csv
import io
import json
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from errno import EACCES, EISDIR
from itertools import chain
from pathlib import Path
from typing import Any

from bert_cli.data.finetune.tables import open_file
from bert_cli.data.io.files import format_by_name, open_part
from bert_cli.data.io.rows import check_text, delimiter_of
from bert_cli.disk import is_writable
from bert_cli.errors import DataError
from bert_cli.files import BLOCK_BYTES, JSONObject, atomic_file, report_failure
from bert_cli.processes import print_line
from bert_cli.tasks.model.opened import Input

Write = Callable[[JSONObject], Any]


def check(inputs: Iterable[Input], path: Path | None) -> None:
    """Raise DataError for a file that cannot be written, and for an input that it cannot hold."""
    with report_failure(f"output ({path})", "written", "choose another place"):
        if path is not None and path.is_dir():
            raise IsADirectoryError(EISDIR, "it is a folder")
        if path is not None and not is_writable(path.parent):
            raise PermissionError(EACCES, "its folder is read-only")
    for item in inputs:
        _cells([*item.shown, *item.shown.values()], item.where, path)


@contextmanager
def writer(
    path: Path | None, like: Path | None, needed: Sequence[str], taken: Container[str]
) -> Iterator[Write]:
    """Yield what writes a row to a file, complete or not at all, or to standard output.

    A table has the columns of all rows, those `taken` from the input first. A .csv has the separator and the byte order
    mark of the input `like`, if that is one, whose `needed` columns were read. Raises DataError for a faulty file.
    """
    if path is None:
        # JSON can write any letter in ASCII, so a narrow standard output loses nothing.
        is_ascii = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
        yield lambda row: print_line(json.dumps(row, ensure_ascii=is_ascii))
        return
    mark = ""
    delimiter = ","
    if like is not None and format_by_name(like) == "csv":
        with open_part(open_file(like)) as source:
            text = source.read(BLOCK_BYTES).decode("utf-8", "replace")
        # The mark if the text begins with it, else nothing.
        mark = text[: text.startswith("\ufeff")]
        lines = io.StringIO(text.removeprefix(mark), "")
        delimiter = delimiter_of(next(filter(str.strip, lines)), "csv", needed)
    with report_failure(f"output ({path})", "written", "choose another place"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as partial, partial.open("w", encoding="utf-8", newline="") as out:
            if suffix(path) == ".jsonl":
                yield lambda row: out.write(json.dumps(row, ensure_ascii=False) + "\n")
                return
            rows: list[JSONObject] = []
            yield rows.append
            names = list(dict.fromkeys(chain.from_iterable(rows)))
            names.sort(key=lambda name: name not in taken)
            rows.insert(0, {name: name for name in names})
            table = csv.writer(out, delimiter=delimiter)
            if suffix(path) != ".tsv":
                out.write(mark)
            for number, row in enumerate(rows):  # 0 is the header
                cells = _cells(map(row.get, names), f"output ({path}, row {number})", path)
                if suffix(path) == ".tsv":
                    out.write("\t".join(cells) + "\n")
                else:
                    table.writerow(cells)


def suffix(path: Path | None) -> str:
    """Return the end of a file's name, which decides its form; "" for standard output, which has JSON lines."""
    if path is None:
        return ""
    return path.suffix.lower()


def _cells(values: Iterable[object], where: str, path: Path | None) -> list[str]:
    """Return the texts of cells. Raises DataError for one that the file cannot hold."""
    cells = [*map(_cell, values)]
    for cell in cells:
        check_text(cell, where)
        if suffix(path) == ".tsv" and {*cell} & {*"\t\r\n"}:
            problem = f"a .tsv holds no tab and no line break, as in {cell[:40]!r}"
            raise DataError(where, problem, "pass --output with a .csv")
    return cells


def _cell(value: object) -> str:
    """Return the text of a cell; a list or an object is JSON."""
    if isinstance(value, str | None):
        return value or ""
    return json.dumps(value, ensure_ascii=False)
