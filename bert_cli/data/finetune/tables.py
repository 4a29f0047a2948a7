"""A person's own table of texts and labels: CSV, TSV or JSON, with the columns named.

CSV is read with its quotes, so that a text may hold commas and line ends; TSV without, since there
a quote is text and one that is never closed would swallow the rows behind it. A .jsonl file is an
object a line, a .json file that or one list of objects; .gz behind any of these is unpacked. An
empty text is kept and counted, an empty label is an error. `hold_out` cuts a development set off.
"""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bert_cli.data.finetune.examples import (
    EMPTY_TEXT,
    TextExamples,
    label_numbers,
    label_word,
    listed,
    missing_column,
    read_json_lines,
    read_lines,
    read_text,
    sorted_labels,
    text_of,
)
from bert_cli.data.stream.permutation import permute
from bert_cli.errors import ConfigError, DataError

BLANK = "blank lines, left out"
QUOTED = "texts that stand in quotes, kept as they are: a TSV file has no quoting"
KINDS = (".csv", ".tsv", ".jsonl", ".json")
LONGEST_CELL = 2**31 - 1
"""Characters; Python's own limit, 131,072, is less than a long document."""


@dataclass(frozen=True)
class _Row:
    """The wanted cells of a row."""

    line: int
    """Where it begins; of a JSON list the item, from 1."""
    texts: tuple[str, ...]
    label: str | None


def read_table(
    path: Path,
    *,
    text_columns: Sequence[str],
    label_column: str | None,
    label_names: Sequence[str] | None = None,
) -> TextExamples:
    """The texts, or pairs, of one or two columns, with the labels of another.

    Without a label column there are no labels: a file to predict. Without label names the file
    tells them: sorted, by value when all are whole numbers. ConfigError for no text column or
    more than two. DataError, with file and line, for a file that is missing, empty or of no known
    kind, a missing column (with those there are), a row with too few or too many cells, a missing
    label, a label that is not among the names, and a file that tells fewer than two.
    """
    if len(text_columns) not in (1, 2):
        raise ConfigError(f"text_column ({listed(list(text_columns))}): give one name, or two")
    remarks: dict[str, int] = {}
    kind = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    unit = "item" if kind == ".json" and read_text(path).lstrip().startswith("[") else "line"
    if kind in (".json", ".jsonl"):
        rows = list(_json_rows(path, unit, text_columns, label_column))
    elif kind in KINDS:
        cells = _csv_cells(path, remarks) if kind == ".csv" else _tsv_cells(path)
        rows = list(_rows(path, cells, text_columns, label_column))
        if kind == ".tsv":
            remarks[QUOTED] = sum(_in_quotes(text) for row in rows for text in row.texts)
    else:
        raise DataError(f"{path}: is of no known kind; name it {', '.join(KINDS)}, or one with .gz")
    if not rows:
        raise DataError(f"{path}: holds no rows; give a file that holds examples")
    remarks[EMPTY_TEXT] = sum(any(not text.strip() for text in row.texts) for row in rows)
    words = [(row.line, row.label) for row in rows if row.label is not None]
    names = None
    if label_column is not None:
        names = tuple(label_names) if label_names else _learnt_names(path, label_column, words)
    return TextExamples(
        first=[row.texts[0] for row in rows],
        second=[row.texts[1] for row in rows] if len(text_columns) == 2 else None,
        labels=None if names is None else label_numbers(path, words, names, unit),
        ids=[str(number) for number in range(len(rows))],
        label_names=names,
        remarks={name: count for name, count in remarks.items() if count},
    )


def _learnt_names(path: Path, column: str, words: Sequence[tuple[int, str]]) -> tuple[str, ...]:
    names = sorted_labels(word for _, word in words)
    if len(names) < 2:
        raise DataError(
            f"{path} ({column}): every row has the label '{names[0]}'; give a file with two labels "
            "or more, or another --label-column"
        )
    return names


def _in_quotes(text: str) -> bool:
    return len(text) > 1 and text[0] == text[-1] == '"'


def _csv_cells(path: Path, remarks: dict[str, int]) -> Iterator[tuple[int, list[str]]]:
    """Line and cells of each row of a CSV file, the header first."""
    before = csv.field_size_limit(LONGEST_CELL)
    begin = 1
    try:
        reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
        for cells in reader:
            if cells:
                yield begin, cells
            else:
                remarks[BLANK] = remarks.get(BLANK, 0) + 1
            begin = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{path} (line {begin}): is no CSV ({error}); put a text that holds quotes in quotes "
            "and write each of its own twice"
        ) from error
    finally:
        csv.field_size_limit(before)


def _tsv_cells(path: Path) -> Iterator[tuple[int, list[str]]]:
    return ((number, line.split("\t")) for number, line in enumerate(read_lines(path), 1))


def _rows(
    path: Path,
    cells: Iterator[tuple[int, list[str]]],
    text_columns: Sequence[str],
    label_column: str | None,
) -> Iterator[_Row]:
    first, header = next(cells, (1, []))
    wanted = [*text_columns, *([label_column] if label_column is not None else [])]
    for name in wanted:
        if name not in header:
            raise missing_column(f"{path} (line {first})", name, header)
        if header.count(name) > 1:
            raise DataError(f"{path} (line {first}): has two columns '{name}'; rename one")
    places = [header.index(name) for name in wanted]
    for line, row in cells:
        if len(row) != len(header):
            raise DataError(
                f"{path} (line {line}): has {len(row)} cells for {len(header)} columns "
                f"({listed(header)}); mend it"
            )
        found = [row[place] for place in places]
        label = found.pop() if label_column is not None else None
        yield _Row(line, tuple(found), _whole(label, f"{path} (line {line})", label_column))


def _whole(label: str | None, where: str, column: str | None) -> str | None:
    if label is not None and not label.strip():
        raise DataError(f"{where}: '{column}' is empty; give each row a label")
    return label


def _json_rows(
    path: Path, unit: str, text_columns: Sequence[str], label_column: str | None
) -> Iterator[_Row]:
    for number, row in _json_items(path) if unit == "item" else read_json_lines(path):
        where = f"{path} ({unit} {number})"
        texts = tuple(text_of(row, name, where) for name in text_columns)
        label = None
        if label_column is not None:
            if label_column not in row:
                raise missing_column(where, label_column, row)
            label = _whole(label_word(row[label_column], where), where, label_column)
        yield _Row(number, texts, label)


def _json_items(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number, from 1, and object of each item of a file that is one list."""
    try:
        items = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: is no JSON ({error}); mend it") from error
    for number, row in enumerate(items, 1):
        if not isinstance(row, dict):
            raise DataError(f"{path} (item {number}): is no object; give a list of objects")
        yield number, row


def hold_out(examples: TextExamples, share: float, seed: int) -> tuple[TextExamples, TextExamples]:
    """Cut a share of the examples off for validation: training, validation, both in file order.

    Of each label the same share is held out, one example at least but never the last one; which,
    the seed tells. ConfigError for a share that is not between 0 and 1, DataError when no label has
    two examples.
    """
    if not 0 < share < 1:
        raise ConfigError(f"held_out_fraction ({share}): give a share between 0 and 1, such as 0.1")
    strata = np.zeros(len(examples), np.int64)
    if examples.labels is not None and examples.label_names is not None:
        strata = examples.labels.astype(np.int64)
    held = np.zeros(len(examples), np.bool_)
    for stratum in np.unique(strata):
        rows = np.flatnonzero(strata == stratum)
        count = min(max(1, int(share * len(rows) + 0.5)), len(rows) - 1)
        held[rows[permute(np.arange(count), len(rows), seed, stratum)]] = True
    if not held.any():
        raise DataError(
            f"held_out_fraction ({share}): no label has two examples, so none can be spared; give more, or a "
            "validation file"
        )
    return examples.take(np.flatnonzero(~held)), examples.take(np.flatnonzero(held))
