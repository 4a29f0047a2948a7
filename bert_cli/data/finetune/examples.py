"""Texts with labels: what every reader of a task gives, and what the readers share.

GLUE, CLUE and a person's own table differ in their files alone; behind the reader all are
`TextExamples`. A label is a number from there on, and the names tell which. A file is read as lines
of UTF-8 that end at a line feed and nowhere else, because real text holds U+2028, U+0085 and form
feeds. What a reader leaves out or finds odd it counts in `remarks`, for the command to print.
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bert_cli import errors
from bert_cli.errors import DataError
from bert_cli.files import write_atomically

Labels = npt.NDArray[np.int32] | npt.NDArray[np.float32]

EMPTY_TEXT = "rows with an empty text, kept"
SHOWN = 20
"""Names that an error lists; IFLYTEK has 119 labels."""


@dataclass(frozen=True)
class TextExamples:
    """Texts, or pairs of them, with a label each. DataError for none, or for unequal lengths."""

    first: list[str]
    second: list[str] | None
    """None: single texts."""
    labels: Labels | None
    """[n] int32, float32 for regression; None: a test file."""
    ids: list[str]
    """As the file names them, or the row's number from 0."""
    label_names: tuple[str, ...] | None
    """By number; None: regression, or a file without labels."""
    remarks: Mapping[str, int] = field(default_factory=dict)
    """What was left out or is odd, and how often."""

    def __post_init__(self) -> None:
        columns = {"second": self.second, "labels": self.labels, "ids": self.ids}
        for name, column in columns.items():
            if column is not None and len(column) != len(self.first):
                raise DataError(
                    f"{name} ({len(column)}): differs from the {len(self.first)} first texts; "
                    "give each example one of each"
                )
        if not self.first:
            raise DataError("examples (0): there are none; give a file that holds some")

    def __len__(self) -> int:
        """Examples n."""
        return len(self.first)

    def take(self, rows: Sequence[int] | npt.NDArray[np.integer[Any]]) -> "TextExamples":
        """The examples of these rows, in this order; the remarks, of the file, do not go along."""
        chosen = [int(row) for row in rows]
        return replace(
            self,
            first=[self.first[row] for row in chosen],
            second=None if self.second is None else [self.second[row] for row in chosen],
            labels=None if self.labels is None else self.labels[chosen],
            ids=[self.ids[row] for row in chosen],
            remarks={},
        )


def read_text(path: Path) -> str:
    """A whole file as text, unpacked when its name ends in .gz, without its byte order mark.

    DataError when it is missing, empty, no UTF-8 (with the line) or damaged.
    """
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; {there_instead(path)}") from error
    except (OSError, EOFError, zlib.error) as error:
        told = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: cannot be read ({told}); check the path and the file") from error
    try:
        text = data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        byte = data[error.start]
        raise DataError(
            f"{path} (line {line}): byte 0x{byte:02X} is no UTF-8; save the file as UTF-8"
        ) from error
    if not text.strip():
        raise DataError(f"{path}: is empty; give a file that holds examples")
    return text


def there_instead(path: Path) -> str:
    """Return what lies where a file is missing: the nearest names first, in its folder or the one above."""
    folder = next(above for above in path.absolute().parents if above.is_dir())
    names: list[str] = []
    with suppress(OSError):
        names = sorted(one.name for one in folder.iterdir())
    wanted = path.absolute().relative_to(folder).parts[0]
    near = get_close_matches(wanted, names, n=SHOWN, cutoff=0.5)
    names = [*near, *(name for name in names if name not in near)]
    return f"{folder} holds {listed(names) or 'nothing'}; check the path"


def read_lines(path: Path) -> list[str]:
    r"""The lines of a file without their \n or \r\n, and without blank ones at the file's end."""
    return [line.removesuffix("\r") for line in read_text(path).rstrip("\r\n").split("\n")]


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each line's number, from 1, and its JSON object. DataError for a line that is none."""
    for number, line in enumerate(read_lines(path), 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{path} (line {number}): is no JSON ({error}); give one object a line"
            ) from error
        if not isinstance(row, dict):
            raise DataError(f"{path} (line {number}): is {_json_kind(row)}; give one object a line")
        yield number, row


def _json_kind(value: object) -> str:
    kinds = {"list": "a list", "str": "a string", "NoneType": "null", "bool": "true or false"}
    return kinds.get(type(value).__name__, "a number")


def text_of(row: Mapping[str, Any], name: str, where: str) -> str:
    """A JSON object's field that has to be a string; null counts as an empty one."""
    if name not in row:
        raise missing_column(where, name, row)
    value = row[name]
    if value is None:
        return ""
    if not isinstance(value, str):
        kind = "an object" if isinstance(value, dict) else _json_kind(value)
        raise DataError(f"{where}: '{name}' is {kind}; give it as a string")
    return value


def label_word(value: object, where: str) -> str:
    """A label from JSON as a word: true and 3 are "true" and "3". DataError for any other kind."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    kind = "null" if value is None else "a list or an object"
    raise DataError(f"{where}: the label is {kind}; give each row a label")


def missing_column(where: str, name: str, columns: Iterable[str]) -> DataError:
    """The error for a column that is not there: what there is, and the nearest name."""
    there = list(columns)
    return DataError(
        f"{where}: has no column '{name}'; {nearest(name, there)}it has {listed(there)}"
    )


def nearest(name: str, known: Sequence[str]) -> str:
    """`did you mean 'x'? ` when some known name resembles this one, else nothing."""
    near = errors.nearest(name, known)
    return f"did you mean '{near}'? " if near else ""


def listed(names: Sequence[str]) -> str:
    """Names in quotes, the first of them when there are many."""
    told = ", ".join(f"'{name}'" for name in names[:SHOWN])
    return told + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def label_numbers(
    path: Path, rows: Iterable[tuple[int, str]], names: Sequence[str], unit: str = "line"
) -> npt.NDArray[np.int32]:
    """The numbers of labels, given as (line, label). DataError for the first that is unknown.

    `unit` is what the rows are counted in.
    """
    numbers = {name: number for number, name in enumerate(names)}
    found = []
    for line, word in rows:
        if word not in numbers:
            raise DataError(
                f"{path} ({unit} {line}): label '{word}' is unknown; {nearest(word, names)}"
                f"the labels are {listed(list(names))}"
            )
        found.append(numbers[word])
    return np.array(found, np.int32)


def sorted_labels(words: Iterable[str]) -> tuple[str, ...]:
    """Each label once, in numeric order when all are whole numbers, else in that of the letters."""
    once = set(words)
    if all(word.removeprefix("-").isdecimal() for word in once):
        return tuple(sorted(once, key=lambda word: (int(word), word)))
    return tuple(sorted(once))


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write a file whole or not at all, each line ended. DataError when that is not possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, "".join(f"{line}\n" for line in lines).encode())
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written ({error.strerror}); choose another folder"
        ) from error
