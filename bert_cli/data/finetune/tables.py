"""Texts with labels: the user's CSV, TSV or JSON table, and the metrics of predicted labels.

A line ends at a line feed only, because real text contains U+2028, U+0085 and form feeds.
"""

import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bert_cli.arrays import Array, Floats32, Ints, Ints8, Ints32
from bert_cli.data.finetune.label_cells import (
    check_spellings,
    from_columns,
    label_numbers,
    labels_of,
    sorted_labels,
)
from bert_cli.data.io import files
from bert_cli.data.io.files import Part, check_encoding
from bert_cli.data.io.rows import MOST_FAULTS, Rows, rows, text_of
from bert_cli.errors import DataError, combine, logger, nearest
from bert_cli.files import report_failure, write_output
from bert_cli.statistics import Examples, Sample, identify, linked_texts, plain, sample_of
from bert_cli.text import count

Labels = Ints32 | Ints8 | Floats32

UNLABELLED = "row{s} with none of the labels, included"
EMPTY_TEXT = "row{s} with an empty text, included"
REPEATED = "row{s} repeating an earlier text"
BLANK = "row{s} without text or label, skipped"
QUOTED = "text{s} in quotes, which are part of the text: TSV has no quoting"
MULTI_HOT = "row{s} with a list of 0 and 1, read as columns named by their numbers from 0"
COLUMN = "name the columns in the first line, or pass one by --text-column or --label-column"
SPREADSHEETS = (".xlsx", ".xlsm", ".xls", ".ods", ".numbers")
MOST_NAMED = 5  # contradictions that a warning names


@dataclass(frozen=True)
class TextExamples:
    """Texts, or pairs of texts, with a label each."""

    first: list[str]
    second: list[str] | None  # None: single texts
    # [n] int32; of several labels 0 and 1 [n, L]; float32 for regression; None: a test file
    labels: Labels | None
    ids: list[str]  # as in the file, or the row's number from 0
    label_names: tuple[str, ...] | None  # by number; None: regression, or a file without labels
    remarks: Mapping[str, int] = field(default_factory=dict)  # problem -> its number of rows

    def __len__(self) -> int:
        """Return the number of examples n."""
        return len(self.first)

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Return both texts of each row; the second of a single text is empty."""
        return [*zip(self.first, self.second or [""] * len(self), strict=True)]

    @cached_property
    def joined(self) -> list[str]:
        """Return each text, or both texts of a pair as one."""
        return [*map(" ".join, self.rows)]

    @cached_property
    def examples(self) -> Examples:
        """Return the identity of the examples; those with a text in common are a group."""
        return identify(self.rows, linked_texts(self.rows))

    def take(self, rows: Sequence[int] | Ints) -> "TextExamples":
        """Return the examples of these rows, in this order, without the remarks about the file."""
        chosen = [int(row) for row in rows]
        second = self.second
        if second is not None:
            second = [second[row] for row in chosen]
        labels = self.labels
        if labels is not None:
            labels = labels[chosen]
        return replace(
            self,
            first=[self.first[row] for row in chosen],
            second=second,
            labels=labels,
            ids=[self.ids[row] for row in chosen],
            remarks={},
        )


def open_file(path: Path) -> Part:
    """Return a person's file. Raises DataError if it is missing, cannot be opened, or is a sheet or a document."""
    is_sheet = path.suffix.lower() in SPREADSHEETS
    if (is_sheet or files.format_by_name(path) in files.DOCUMENTS) and path.is_file():
        form = "spreadsheet" if is_sheet else "document"
        problem = f"is a {form}, not text"
        raise DataError(str(path), problem, "save it as CSV with UTF-8, and use that file")
    with report_failure(str(path), "read", "check the path and the file"):
        if path.exists():
            return files.part_of(path)
    siblings = {sibling.stem: sibling for sibling in path.parent.glob("*")}
    near = nearest(path.stem, siblings)
    remedy = f"did you mean '{siblings[near]}'?" if near else "check the path"
    raise DataError(str(path), "no such file", remedy)


def check_files(settings: Mapping[str, Any]) -> None:
    """Raise DataError for a file of fine-tuning that is absent, or a table without its columns."""
    is_scored = settings["validation_file"] is not None and not settings["do_training"]
    names = ("validation_file",) if is_scored else ("train_file", "validation_file")
    for name in names:
        path = settings[name]
        if path:
            open_file(path)
            if "label_column" in settings:
                columns = [*settings["text_column"], *settings["label_column"]]
                next(table_rows(path, columns, Counter(), remedy=COLUMN), None)


def read_text(path: Path) -> str:
    """Return a file as text, unpacked, without a byte order mark."""
    part = open_file(path)
    with files.report_damage(part), files.open_part(part) as file:
        return decoded(file.read(), str(path))


def decoded(data: bytes, source: str) -> str:
    """Return bytes as text without a byte order mark. Raises DataError for none, and, with the line, for no UTF-8."""
    check_encoding(data, source)
    text = files.decode(data, source).removeprefix("\ufeff")
    if not text.strip():
        raise DataError(source, "is empty", "write examples, such as one on each line")
    return text


def read_lines(path: Path) -> list[str]:
    """Return the lines of a file, as `lines_of`."""
    return lines_of(read_text(path))


def lines_of(text: str) -> list[str]:
    r"""Return the lines of a text without their \n or \r\n, and without blank ones at its end."""
    return [line.removesuffix("\r") for line in text.rstrip("\r\n").split("\n")]


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write a text file completely or not at all. Raises DataError when it cannot be written."""
    write_output(path, "".join(f"{line}\n" for line in lines), "output")


def read_table(
    path: Path,
    *,
    text_columns: Sequence[str],
    label_columns: Sequence[str] = (),
    label_separator: str | None = None,
    label_names: Sequence[str] | None = None,
) -> TextExamples:
    """Return the texts of one column, or pairs of two, with the labels of other columns or without labels.

    Without label names, the sorted labels of the file are the names, or the columns if there are several. Prints a
    warning that names the rows of a text with different labels. Raises DataError with file and line.
    """
    remarks: Counter[str] = Counter()
    rows = _read_rows(path, text_columns, label_columns, label_separator, remarks)
    texts = [row.texts for row in rows]
    if files.format_by_name(path) == "tsv":
        flat = list(chain.from_iterable(texts))
        remarks[QUOTED] = sum(len(text) > 1 and text[0] == text[-1] == '"' for text in flat)
    ids = list(map(str, range(len(texts))))
    if not label_columns:
        return examples_of(texts, None, ids, None, remarks)
    lists = [row.labels for row in rows]
    is_alone = label_names is None and not any(len(labels) > 1 for labels in lists)
    if any(lists) and label_separator is not None and is_alone:
        raise DataError(
            f"{path}: label_separator ('{label_separator}')",
            "does not separate labels: no text has two",
            "do not set it, or set another",
        )
    columns = label_columns if len(label_columns) > 1 else ()
    marked = None
    if not columns:
        marked = from_columns(lists, len(label_names or ()))
    if marked:
        columns = [str(number) for number in range(len(lists[0]))]
        lists = marked
        remarks[MULTI_HOT] = len(lists)
    _warn_of_contradictions(rows, lists)
    words = []
    for row, labels in zip(rows, lists, strict=True):
        words += [(row.where, label) for label in labels]
    check_spellings(words)
    names = tuple(label_names or columns or sorted_labels(word for _, word in words))
    # A classifier of one label is right without a model.
    if len(names) < 2:
        problem = "has no label in any row"
        if names:
            problem = f"has one label, '{names[0]}'"
        raise DataError(
            f"{path} ({label_columns[0]})",
            problem,
            "use a file with two labels or more, or another --label-column",
        )
    numbers = label_numbers(words, names)
    if not rows[0].is_list:
        return examples_of(texts, numbers, ids, names, remarks)
    has_label = multi_hot(numbers, list(map(len, lists)), len(names))
    remarks[UNLABELLED] = int(np.count_nonzero(~has_label.any(1)))
    return examples_of(texts, has_label, ids, names, remarks)


def multi_hot(numbers: Ints32, lengths: Sequence[int], size: int) -> Ints8:
    """Return 0 and 1 [n, size] from the label numbers of all texts in a row, of which each has `lengths`."""
    has_label = np.zeros((len(lengths), size), np.int8)
    texts = np.repeat(np.arange(len(lengths)), lengths)
    has_label[texts, numbers] = 1
    return has_label


class _Row(NamedTuple):
    """A row of a table: its file and line, its texts and its labels."""

    where: str
    texts: tuple[str, ...]
    labels: tuple[str, ...] = ()
    is_list: bool = False
    """Whether the labels are a list, which may be empty; equal in all rows of a table."""


def _read_rows(
    path: Path,
    text_columns: Sequence[str],
    label_columns: Sequence[str],
    label_separator: str | None,
    remarks: Counter[str],
) -> list[_Row]:
    """Return the rows of a table. Raises DataError for the first faults together, or where there are no rows."""
    rows: list[_Row] = []
    faults: list[DataError] = []
    needed = [*text_columns, *label_columns]
    remedy = COLUMN if label_columns else ""
    for where, row in table_rows(path, needed, remarks, remedy=remedy):
        try:
            read = _Row(where, tuple(text_of(row, name, where) for name in text_columns))
            if label_columns:
                labels, is_list = labels_of(row, label_columns, label_separator, where)
                read = read._replace(labels=labels, is_list=is_list)
            if rows and read.is_list != rows[0].is_list:
                problem = "differs from the first row: only one of them has a list of labels"
                raise DataError(where, problem, "write a list in each row, or in none")
            rows.append(read)
        except DataError as error:
            faults.append(error)
            if len(faults) == MOST_FAULTS:
                break
    if faults:
        raise combine(faults)
    if not rows:
        raise DataError(str(path), "contains no rows", "use a file that contains examples")
    return rows


def _warn_of_contradictions(rows: Sequence[_Row], lists: Sequence[tuple[str, ...]]) -> None:
    """Print a warning that names the rows whose text has another label in an earlier row."""
    first: dict[tuple[str, ...], tuple[str, str]] = {}  # text -> the first row with it, its label
    contradictions = []
    for row, labels in zip(rows, lists, strict=True):
        label = " and ".join(sorted({*labels})) or "no label"
        earlier, before = first.setdefault(tuple(map(plain, row.texts)), (row.where, label))
        if label != before:
            contradictions.append(f"{row.where} has {label}, and {earlier} {before}")
    if contradictions:
        shown = "; ".join(contradictions[:MOST_NAMED])
        if len(contradictions) > MOST_NAMED:
            shown += f"; and {len(contradictions) - MOST_NAMED:,} more"
        problem = "with the same text as an earlier row, but another label"
        logger.warning(f"warning: {count(len(contradictions), 'row')} {problem}: {shown}")


def examples_of(
    texts: Sequence[Sequence[str]],
    labels: Labels | None,
    ids: list[str],
    label_names: tuple[str, ...] | None,
    remarks: Counter[str],
) -> TextExamples:
    """Return rows of one text or two as examples; the remarks count rows with an empty text."""
    remarks[EMPTY_TEXT] = sum("" in (text.strip() for text in row) for row in texts)
    remarks[REPEATED] = repeats(texts)
    # Columns of one or two texts a row.
    first, *second = (list(column) for column in zip(*texts, strict=True))
    second_texts = second[0] if second else None
    return TextExamples(first, second_texts, labels, ids, label_names, +remarks)


def repeats(rows: Sequence[Sequence[str]]) -> int:
    """Return how many rows have the texts of an earlier row by `plain`, which are not empty."""
    filled = [row for row in (tuple(map(plain, row)) for row in rows) if any(row)]
    return len(filled) - len({*filled})


def table_rows(
    path: Path,
    needed: Sequence[str],
    remarks: Counter[str],
    optional: Sequence[str] = (),
    remedy: str = "",
) -> Rows:
    """Yield the (location, columns) of each row of a file, as `rows` does; count problems in `remarks`."""
    form = files.format_by_name(path)
    part = open_file(path)
    if form is None:
        names = f"{', '.join(files.NAMED)}, or one of them with {', '.join(files.SUFFIXES)}"
        raise DataError(str(path), "is of an unknown kind", f"name it {names}")
    may_be_blank = form == "plain" or form in files.TABLES
    lines: Iterable[str] = ()
    if form != "parquet":
        # A carriage return alone ends a line of CSV, too.
        newline = "" if form == "csv" else "\n"
        lines = io.StringIO(read_text(path).rstrip("\r\n"), newline)
    for where, row in rows(replace(part, format=form), lines, needed, remedy, optional):
        # One column may have an empty text.
        if may_be_blank and len(row) != 1 and not any(cell.strip() for cell in row.values()):
            remarks[BLANK] += 1
        else:
            yield where, row


def samples_of(
    names: Sequence[str], labels: Array, predictions: Array, examples: Examples
) -> dict[str, Sample]:
    """Return the metrics by name. An undefined metric is 0, never NaN, so that the best checkpoint is well defined.

    `f1` is the F1 of label 1 against label 0, `macro_f1` the mean over the labels that occur.
    """
    pair = labels, predictions
    is_one, is_predicted = (np.equal(column, 1).astype(int) for column in pair)
    columns: dict[str, tuple[Any, ...]] = {
        "accuracy": ("ratio", labels == predictions, 1.0),
        "f1": ("ratio", 2 * is_one * is_predicted, is_one + is_predicted),
        "matthews": ("pearson", *pair),  # of two labels they are equal
    }
    return {name: sample_of(examples, *columns.get(name, (name, *pair))) for name in names}


def confusion(labels: Array, predictions: Array, size: int) -> list[list[int]]:
    """Return the confusion matrix of `size` labels: a row for each label, a column for each prediction."""
    from sklearn.metrics import confusion_matrix

    rows: list[list[int]] = confusion_matrix(labels, predictions, labels=range(size)).tolist()
    return rows
