"""Texts with labels: the files they come from, and a CSV, TSV or JSON table of one's own.

Every reader of texts (GLUE, CLUE, one's own table) returns `TextExamples`, whose labels are numbers with
names. Files are UTF-8, or .gz of it, and a line ends at a line feed only, because real text contains U+2028,
U+0085 and form feeds. Quotes delimit cells in CSV, so that a text may contain commas and line ends. In TSV
they are text: one that is never closed would swallow the rows after it.
"""

import csv
import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bert_cli.data.stream.permutation import permute
from bert_cli.errors import ConfigError, DataError, nearest
from bert_cli.files import write_atomically

Labels = npt.NDArray[np.int32] | npt.NDArray[np.float32]
Row = Mapping[str, Any]
Cells = Iterator[tuple[int, list[str]]]

EMPTY_TEXT = "rows with an empty text, included"
BLANK = "blank lines, left out"
QUOTED = "texts in quotes, which are part of the text: TSV has no quoting"
KINDS = (".csv", ".tsv", ".jsonl", ".json")
LISTED_NAMES = 20
"""Names that an error lists; IFLYTEK has 119 labels."""
LISTED_FILES = 5
LONGEST_CELL = 2**31 - 1
"""Characters; Python's own limit, 131,072, is less than a long document."""


@dataclass(frozen=True)
class TextExamples:
    """Texts, or pairs of texts, with a label each. DataError for none, or for unequal lengths."""

    first: list[str]
    second: list[str] | None
    """None: single texts."""
    labels: Labels | None
    """[n] int32, float32 for regression; None: a test file."""
    ids: list[str]
    """As in the file, or the row's number from 0."""
    label_names: tuple[str, ...] | None
    """By number; None: regression, or a file without labels."""
    remarks: Mapping[str, int] = field(default_factory=dict)
    """What was left out or is odd -> how often."""

    def __post_init__(self) -> None:
        columns = {"second": self.second, "labels": self.labels, "ids": self.ids}
        for name, column in columns.items():
            if column is not None and len(column) != len(self.first):
                problem = f"differs in length from the {len(self.first)} first texts"
                raise DataError(f"{name} ({len(column)})", problem, "give one for each example")
        if not self.first:
            raise DataError("examples", "there are none", "give a file that contains some")

    def __len__(self) -> int:
        """Return the number of examples n."""
        return len(self.first)

    def take(self, rows: Sequence[int] | npt.NDArray[np.integer[Any]]) -> "TextExamples":
        """Return the examples of these rows, in this order, without the remarks about the file."""
        chosen = [int(row) for row in rows]
        return replace(
            self,
            first=[self.first[row] for row in chosen],
            second=None if self.second is None else [self.second[row] for row in chosen],
            labels=None if self.labels is None else self.labels[chosen],
            ids=[self.ids[row] for row in chosen],
            remarks={},
        )


# --- files


def read_text(path: Path) -> str:
    """Return a file as text, decompressed if its name ends in .gz, without a byte order mark.

    DataError when it is missing, empty, damaged or not UTF-8 (with the line).
    """
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
    except FileNotFoundError:
        raise missing_file(path) from None
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(
            str(path), f"cannot be read ({reason})", "check the path and the file"
        ) from error
    try:
        text = data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        problem = f"byte 0x{data[error.start]:02X} is not UTF-8"
        raise DataError(f"{path} (line {line})", problem, "save the file as UTF-8") from error
    if not text.strip():
        raise DataError(str(path), "is empty", "give a file that contains examples")
    return text


def missing_file(path: Path) -> DataError:
    """Return the error for a missing file, with the nearest file or a few files of its kind."""
    complete = path.absolute()
    folder = next(parent for parent in complete.parents if parent.is_dir())
    wanted = complete.relative_to(folder).parts[0]
    names = sorted(other.name for other in folder.iterdir() if _is_like(other, complete, folder))
    near = nearest(wanted, names)
    if near:
        remedy = f"did you mean '{folder / near}'?"
    elif names:
        remedy = f"give one of {listed(names, LISTED_FILES)} in {folder}"
    else:
        remedy = "check the path"
    return DataError(str(path), "no such file", remedy)


def _is_like(other: Path, path: Path, folder: Path) -> bool:
    """Return whether `other` may be meant: a file of the same kind, or a folder for a missing folder."""
    if path.parent != folder:
        return other.is_dir() and not other.name.startswith(".")
    return file_kind(other) == file_kind(path) and other.is_file()


def file_kind(path: Path) -> str:
    """Return the suffix of a file's name, that before .gz for a compressed file."""
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def read_lines(path: Path) -> list[str]:
    r"""Return the lines of a file without their \n or \r\n, and without blank ones at its end."""
    return [line.removesuffix("\r") for line in read_text(path).rstrip("\r\n").split("\n")]


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each line's number, from 1, and its JSON object. DataError for a line that is none."""
    for number, line in enumerate(read_lines(path), 1):
        yield number, json_object(line, f"{path} (line {number})")


def json_object(line: str, where: str) -> dict[str, Any]:
    """Return the JSON object of a line. DataError for anything else."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(where, f"is not JSON ({error})", "give one object per line") from error
    if not isinstance(row, dict):
        raise DataError(where, f"is {_json_kind(row)}", "give one object per line")
    return row


def _json_kind(value: object) -> str:
    kinds = {
        "dict": "an object", "list": "a list", "str": "a string", "NoneType": "null", "bool": "true or false",
    }  # fmt: skip
    return kinds.get(type(value).__name__, "a number")


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write a text file complete or not at all. DataError when that is not possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, "".join(f"{line}\n" for line in lines).encode())
    except OSError as error:
        problem = f"cannot be written ({error.strerror})"
        raise DataError(str(path), problem, "choose another folder") from error


# --- rows


def text_of(row: Row, name: str, where: str) -> str:
    """Return a row's text in a column; null is an empty text. DataError for any other kind."""
    if name not in row:
        raise missing_column(where, name, row)
    value = row[name]
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(where, f"'{name}' is {_json_kind(value)}", "give it as a string")
    return value


def label_of(row: Row, name: str, where: str) -> str:
    """Return a row's label as a word: true and 3 are "true" and "3". DataError for any other kind."""
    if name not in row:
        raise missing_column(where, name, row)
    value = row[name]
    if value is None or isinstance(value, list | dict):
        raise DataError(where, f"the label is {_json_kind(value)}", "give each row a label")
    word = str(value).lower() if isinstance(value, bool) else str(value)
    if not word.strip():
        raise DataError(where, f"'{name}' is empty", "give each row a label")
    return word


def missing_column(where: str, name: str, columns: Iterable[str]) -> DataError:
    """Return the error for a column that is not there."""
    names = list(columns)
    near = nearest(name, names)
    remedy = f"did you mean '{near}'?" if near else "give the name of another column"
    return DataError(where, f"has no column '{name}', only {listed(names)}", remedy)


def listed(names: Sequence[str], most: int = LISTED_NAMES) -> str:
    """Return names in quotes, the first `most` of them."""
    shown = ", ".join(f"'{name}'" for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def label_numbers(
    path: Path, rows: Iterable[tuple[int, str]], names: Sequence[str], unit: str = "line"
) -> npt.NDArray[np.int32]:
    """Return the numbers of (line, label) rows [n]. DataError for the first unknown label."""
    number_of = {name: number for number, name in enumerate(names)}
    numbers = []
    for line, word in rows:
        if word not in number_of:
            near = nearest(word, names)
            raise DataError(
                f"{path} ({unit} {line})",
                f"label '{word}' is unknown; the labels are {listed(list(names))}",
                f"did you mean '{near}'?" if near else "fix the label",
            )
        numbers.append(number_of[word])
    return np.array(numbers, np.int32)


def sorted_labels(words: Iterable[str]) -> tuple[str, ...]:
    """Return each label once, by value if all are integers, else alphabetically."""
    once = set(words)
    if all(word.removeprefix("-").isdecimal() for word in once):
        return tuple(sorted(once, key=lambda word: (int(word), word)))
    return tuple(sorted(once))


# --- a table of one's own


def read_table(
    path: Path,
    *,
    text_columns: Sequence[str],
    label_column: str | None,
    label_names: Sequence[str] | None = None,
) -> TextExamples:
    """Return the texts, or pairs, of one or two columns with the labels of another.

    Without a label column there are no labels: a file to predict. Without label names they are those of the
    file, sorted. ConfigError for no text column or more than two. DataError, with file and line, for a file
    that is missing, empty or of an unknown kind, a missing column, a row with too few or too many cells, a
    missing or unknown label, and a file with fewer than two labels.
    """
    if len(text_columns) not in (1, 2):
        columns = listed(list(text_columns))
        raise ConfigError(f"text_column ({columns})", "names no or too many columns", "give 1 or 2")
    remarks: Counter[str] = Counter()
    wanted = [*text_columns, *([] if label_column is None else [label_column])]
    unit, rows = _rows(path, wanted, remarks)
    texts: list[list[str]] = []
    words: list[tuple[int, str]] = []
    for number, row in rows:
        where = f"{path} ({unit} {number})"
        texts.append([text_of(row, name, where) for name in text_columns])
        if label_column is not None:
            words.append((number, label_of(row, label_column, where)))
    if not texts:
        raise DataError(str(path), "contains no rows", "give a file that contains examples")
    if file_kind(path) == ".tsv":
        remarks[QUOTED] = sum(_in_quotes(text) for row in texts for text in row)
    remarks[EMPTY_TEXT] = sum(any(not text.strip() for text in row) for row in texts)
    names = None
    if label_column is not None:
        names = tuple(label_names) if label_names else _names_in(path, label_column, words)
    return TextExamples(
        first=[row[0] for row in texts],
        second=[row[1] for row in texts] if len(text_columns) == 2 else None,
        labels=None if names is None else label_numbers(path, words, names, unit),
        ids=[str(number) for number in range(len(texts))],
        label_names=names,
        remarks=+remarks,
    )


def _rows(
    path: Path, wanted: Sequence[str], remarks: Counter[str]
) -> tuple[str, Iterator[tuple[int, Row]]]:
    """Return the unit that rows are counted in, and the rows with their numbers from 1."""
    kind = file_kind(path)
    if kind == ".csv":
        return "line", _with_header(path, _csv_cells(path, remarks), wanted)
    if kind == ".tsv":
        cells = ((number, line.split("\t")) for number, line in enumerate(read_lines(path), 1))
        return "line", _with_header(path, cells, wanted)
    if kind == ".json" and read_text(path).lstrip().startswith("["):
        return "item", _json_items(path)
    if kind in (".json", ".jsonl"):
        return "line", read_json_lines(path)
    raise DataError(
        str(path), "is of an unknown kind", f"name it {', '.join(KINDS)}, or one of them with .gz"
    )


def _csv_cells(path: Path, remarks: Counter[str]) -> Cells:
    """Yield the first line and the cells of each row of a CSV file, the header first."""
    before = csv.field_size_limit(LONGEST_CELL)
    begin = 1
    try:
        reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
        for cells in reader:
            if cells:
                yield begin, cells
            else:
                remarks[BLANK] += 1
            begin = reader.line_num + 1
    except csv.Error as error:
        remedy = "put a text with quotes in quotes and double each quote in it"
        raise DataError(f"{path} (line {begin})", f"is not CSV ({error})", remedy) from error
    finally:
        csv.field_size_limit(before)


def _with_header(path: Path, cells: Cells, wanted: Sequence[str]) -> Iterator[tuple[int, Row]]:
    """Yield the rows below a header as column -> cell."""
    first, header = next(cells, (1, []))
    for name in wanted:
        if name not in header:
            raise missing_column(f"{path} (line {first})", name, header)
        if header.count(name) > 1:
            raise DataError(f"{path} (line {first})", f"has two columns '{name}'", "rename one")
    for line, row in cells:
        if len(row) != len(header):
            problem = f"has {len(row)} cells for {len(header)} columns ({listed(header)})"
            raise DataError(f"{path} (line {line})", problem, "fix the row")
        yield line, dict(zip(header, row, strict=True))


def _json_items(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield the number, from 1, and the object of each item of a JSON list."""
    try:
        items = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise DataError(str(path), f"is not JSON ({error})", "fix the file") from error
    for number, row in enumerate(items, 1):
        if not isinstance(row, dict):
            where, problem = f"{path} (item {number})", f"is {_json_kind(row)}"
            raise DataError(where, problem, "give a list of objects")
        yield number, row


def _names_in(path: Path, column: str, words: Sequence[tuple[int, str]]) -> tuple[str, ...]:
    names = sorted_labels(word for _, word in words)
    if len(names) < 2:
        problem = f"every row has the label '{names[0]}'"
        remedy = "give a file with two labels or more, or another --label-column"
        raise DataError(f"{path} ({column})", problem, remedy)
    return names


def _in_quotes(text: str) -> bool:
    return len(text) > 1 and text[0] == text[-1] == '"'


def hold_out(
    examples: TextExamples, fraction: float, seed: int
) -> tuple[TextExamples, TextExamples]:
    """Return the examples to train on and those held out for validation, both in file order.

    Of each label the same fraction is held out, at least one example and never all; the seed decides which.
    ConfigError for a fraction that is not between 0 and 1, DataError when no label has two examples.
    """
    where = f"held_out_fraction ({fraction})"
    if not 0 < fraction < 1:
        raise ConfigError(where, "is not between 0 and 1", "give a fraction such as 0.1")
    strata = np.zeros(len(examples), np.int64)
    if examples.labels is not None and examples.label_names is not None:
        strata = examples.labels.astype(np.int64)
    held = np.zeros(len(examples), np.bool_)
    for stratum in np.unique(strata):
        rows = np.flatnonzero(strata == stratum)
        count = min(max(1, int(fraction * len(rows) + 0.5)), len(rows) - 1)
        held[rows[permute(np.arange(count), len(rows), seed, stratum)]] = True
    if not held.any():
        remedy = "give more examples, or a validation file"
        raise DataError(where, "no label has two examples, one of which could be held out", remedy)
    return examples.take(np.flatnonzero(~held)), examples.take(np.flatnonzero(held))
