"""Labels as people and programs write them: words, numbers, lists in cells, and columns of 0 and 1."""

import ast
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from decimal import Decimal

import numpy as np

from bert_cli.arrays import Ints32
from bert_cli.data.io import files
from bert_cli.data.io.rows import Row, check_columns, check_text, listed
from bert_cli.errors import DataError, did_you_mean
from bert_cli.statistics import plain

ZERO_OR_ONE = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}
# A list, a tuple, a set or bytes, as Python and pandas write them into a cell.
WRITTEN = re.compile(r"""\[.*\]|\(.*,.*\)|\{.*\}|b(['"]).*\1|set\(\)""", re.DOTALL)
CALL = re.compile(r"\w+\(([\[{].*[\]}])(?:, *\w+=.*)?\)", re.DOTALL)  # array([...], dtype=object)
NO_COMMA = re.compile(r"""['"]\s+['"]""")  # between the items of NumPy's lists
MISSING = ("", "nan", "<na>", "#n/a")  # labels in lower case, as pandas and spreadsheets write them


def label_of(row: Row, name: str, where: str) -> str:
    """Return a row's label as `word_of`. Raises DataError for a column that is absent, too."""
    check_columns(where, [name], row)
    return word_of(row[name], name, where)


def word_of(value: object, name: str, where: str) -> str:
    """Return a label as a word without outer white space: true, 3 and 3.0 are "true", "3" and "3"."""
    if isinstance(value, bytes):
        value = files.decode(value, where)
    elif isinstance(value, float) and value.is_integer():
        value = int(value)
    word = str(value)
    if isinstance(value, bool):  # as in JSON
        word = word.lower()
    word = word.strip()
    if value is None or isinstance(value, list | dict) or word.lower() in MISSING:
        problem = f"'{name}' is empty or not a label ({repr(value)[:40]})"
        raise DataError(where, problem, "write a label in each row, or leave the row out")
    check_text(word, where)
    return word


def number_of(word: str, where: str, *limits: float) -> float:
    """Return a score as a number. Raises DataError for another word, and for a number outside of two limits, if any."""
    low, high = limits or (-sys.float_info.max, sys.float_info.max)
    with suppress(ValueError):
        value = float(word)
        if low <= value <= high:
            return value
    inside = ""
    if limits:
        inside = " from {:g} to {:g}".format(*limits)
    raise DataError(where, f"score '{word}' is not a number{inside}", "fix the row")


def labels_of(
    row: Row, columns: Sequence[str], separator: str | None, where: str
) -> tuple[tuple[str, ...], bool]:
    """Return a row's labels, and whether it may have several: a list, a text with a separator, columns of 0 and 1."""
    check_columns(where, columns, row)
    if len(columns) > 1:
        words = {name: word_of(row[name], name, where).lower() for name in columns}
        for name, word in words.items():
            if word not in ZERO_OR_ONE:
                remedy = "write 1 where the text has this label, or name one --label-column"
                raise DataError(where, f"'{name}' is '{word}', not 0 or 1", remedy)
        return tuple(name for name, word in words.items() if ZERO_OR_ONE[word]), True
    (name,) = columns
    value = row[name]
    if isinstance(value, str):
        value = CALL.sub(r"\1", value.strip())
        if WRITTEN.fullmatch(value):  # by Python or pandas
            with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
                value = ast.literal_eval(NO_COMMA.sub("'+'", value))  # which it refuses
            if isinstance(value, str) and value[0] in "[{":
                problem = f"'{name}' looks like a list, but cannot be read as one ({value[:40]})"
                raise DataError(where, problem, """write it as ["a", "b"], or without brackets""")
    if isinstance(value, str) and separator is not None:
        value = [word for word in value.split(separator) if word.strip()]
    if isinstance(value, list | tuple | set):
        return tuple(word_of(word, name, where) for word in value), True
    return (word_of(value, name, where),), False


def from_columns(lists: Sequence[tuple[str, ...]], size: int) -> list[tuple[str, ...]] | None:
    """Return the numbers of the columns that have 1, where labels are lists of 0 and 1 of one length; None elsewhere.

    As labels, 0 and 1 would be on every text. The length is at least two, and `size` unless that is 0.
    """
    lengths = {len(row) for row in lists}
    longest = max(lengths)
    words: set[str] = set()
    for row in lists:
        words.update(word.lower() for word in row)
    if lengths != {size or longest} or longest < 2 or not words <= {*ZERO_OR_ONE}:
        return None
    return [
        tuple(str(n) for n, word in enumerate(row) if ZERO_OR_ONE[word.lower()]) for row in lists
    ]


def label_numbers(rows: Iterable[tuple[str, str]], names: Sequence[str]) -> Ints32:
    """Return the numbers [n] of labels, given as (location, label). Raises DataError for an unknown label."""
    number_of = {name: number for number, name in enumerate(names)}
    numbers = []
    for where, word in rows:
        if word not in number_of:
            problem = f"label '{word}' is unknown; the labels are {listed(names)}"
            raise DataError(where, problem, did_you_mean(word, names, "fix the label"))
        numbers.append(number_of[word])
    return np.array(numbers, np.int32)


def check_spellings(words: Iterable[tuple[str, str]]) -> None:
    """Raise DataError for labels, as (location, label), that differ only in case, white space or number format."""
    spellings: dict[object, tuple[str, str]] = {}
    for where, word in words:
        spelled: object = plain(word)
        with suppress(ArithmeticError):  # of a word that is not a number
            spelled = Decimal(word.replace("_", "x")).normalize()
        before, earlier = spellings.setdefault(spelled, (word, where))
        if before != word:
            problem = f"label '{word}' is spelled '{before}' in {earlier}"
            raise DataError(where, problem, "use one spelling, or rename one")


def sorted_labels(words: Iterable[str]) -> tuple[str, ...]:
    """Return each label once, by value if all are integers, else alphabetically."""
    once = set(words)
    if all(word.removeprefix("-").isdecimal() for word in once):
        return tuple(sorted(once, key=lambda word: (int(word), word)))
    return tuple(sorted(once))
