"""Where the rows of `bert predict` go: JSON lines, or a table in the form of the input.

A program for spreadsheets reads only the form that it writes, which differs by language: semicolons, a byte order mark.
"""

import csv
import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bert_cli.data.finetune.tables import open_file
from bert_cli.data.io.files import format_by_name, open_part
from bert_cli.data.io.rows import delimiter_of
from bert_cli.errors import DataError
from bert_cli.files import BLOCK_BYTES, JSONObject, atomic_file, report_failure
from bert_cli.processes import print_line

Write = Callable[[JSONObject], Any]


@contextmanager
def writer(
    path: Path | None, like: Path | None, needed: Sequence[str], names: Sequence[str]
) -> Iterator[Write]:
    """Yield what writes a row with some of these `names` to a file, complete or not at all, or to standard output.

    A .csv has the separator and the byte order mark of the input `like`, if that is one, whose `needed` columns were
    read. Raises DataError for a file that cannot be written.
    """
    if path is None:
        # Other letters are escaped where standard output may accept ASCII only.
        is_ascii = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
        yield lambda row: print_line(json.dumps(row, ensure_ascii=is_ascii))
        return
    mark = ""
    delimiter = ","
    if like is not None and format_by_name(like) == "csv":
        with open_part(open_file(like)) as source:
            text = source.read(BLOCK_BYTES).decode("utf-8", "replace")
        mark = text[: text.startswith("\ufeff")]
        lines = io.StringIO(text.removeprefix(mark), "")
        delimiter = delimiter_of(next(filter(str.strip, lines)), "csv", needed)
    where = f"output ({path})"
    with report_failure(where, "written", "choose another place"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as partial, partial.open("w", encoding="utf-8", newline="") as out:
            if path.suffix.lower() == ".jsonl":
                yield lambda row: out.write(json.dumps(row, ensure_ascii=False) + "\n")
                return
            is_tsv = path.suffix.lower() == ".tsv"
            table = csv.writer(out, delimiter=delimiter)

            def write(row: JSONObject) -> None:
                cells = [_cell(row.get(name)) for name in names]
                if not is_tsv:
                    table.writerow(cells)
                elif broken := next((cell for cell in cells if {*cell} & {*"\t\r\n"}), None):
                    problem = f"a .tsv holds no tab and no line break, as in {broken[:40]!r}"
                    raise DataError(where, problem, "pass --output with a .csv")
                else:
                    out.write("\t".join(cells) + "\n")

            if not is_tsv:
                out.write(mark)
            write(dict(zip(names, names, strict=True)))
            yield write


def _cell(value: object) -> str:
    """Return the text of a cell; a list or an object is JSON."""
    if isinstance(value, str | None):
        return value or ""
    return json.dumps(value, ensure_ascii=False)
