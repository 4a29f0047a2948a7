"""The GLUE tasks (Wang et al. 2018): their files, labels and metrics, as tables, and one reader.

The distribution is a folder per task with TSV files whose quotes are text. A labelled row that is
too short is an error, but for QQP, whose published files hold a few broken ones: they are left out
and counted. A test row is never left out, since the server wants a prediction for each. What
`write_server_file` writes is what gluebenchmark.com takes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bert_cli.data.finetune.examples import (
    EMPTY_TEXT,
    Labels,
    TextExamples,
    label_numbers,
    listed,
    missing_column,
    read_lines,
    there_instead,
    write_lines,
)
from bert_cli.errors import ConfigError, DataError

SHORT_ROW = "rows with too few columns, left out"
LONG_ROW = "rows with more columns than the header, the rest of them not read"
FILES = {"train": "train.tsv", "validation": "dev.tsv", "test": "test.tsv"}
MNLI_FILES = {
    "train": "train.tsv",
    "validation": "dev_matched.tsv",
    "validation_mismatched": "dev_mismatched.tsv",
    "test": "test_matched.tsv",
    "test_mismatched": "test_mismatched.tsv",
}
MOST_STSB = 5.0
"""STS-B's similarities are 0 to 5."""


@dataclass(frozen=True)
class GlueTask:
    """Where a task's texts and labels are, and how it is scored."""

    folder: str
    """In the GLUE distribution."""
    texts: tuple[str, ...]
    """One column or two."""
    label: str
    label_names: tuple[str, ...] | None
    """By number, in Hugging Face's order; None: regression."""
    metrics: tuple[str, ...]
    best: str
    """The metric that picks the checkpoint: the one that Devlin et al. 2018, table 1, report."""
    server_files: Mapping[str, str]
    """By split."""
    words: tuple[str, ...] | None = ("0", "1")
    """The labels in the files, by number."""
    files: Mapping[str, str] = field(default_factory=lambda: FILES)
    """By split."""
    index: str = "index"
    """Column of the ids, where there is one."""
    headless: tuple[str, ...] = ()
    """Columns of train.tsv and dev.tsv when these have no header."""
    drops_short: bool = False
    """Labelled rows that are too short are left out and counted."""


_ENTAILS = ("entailment", "not_entailment")
_PAIR = ("sentence1", "sentence2")
_NLI = ("entailment", "neutral", "contradiction")
_DUPLICATE = ("not_duplicate", "duplicate")

TASKS: Mapping[str, GlueTask] = {
    "cola": GlueTask(
        "CoLA", ("sentence",), "label", ("unacceptable", "acceptable"),
        ("matthews",), "matthews", {"test": "CoLA.tsv"},
        headless=("source", "label", "star", "sentence"),
    ),
    "mnli": GlueTask(
        "MNLI", _PAIR, "gold_label", _NLI, ("accuracy",), "accuracy",
        {"test": "MNLI-m.tsv", "test_mismatched": "MNLI-mm.tsv"}, words=_NLI, files=MNLI_FILES,
    ),
    "mrpc": GlueTask(
        "MRPC", ("#1 String", "#2 String"), "Quality", ("not_equivalent", "equivalent"),
        ("accuracy", "f1"), "f1", {"test": "MRPC.tsv"},
    ),
    "qnli": GlueTask(
        "QNLI", ("question", "sentence"), "label", _ENTAILS,
        ("accuracy",), "accuracy", {"test": "QNLI.tsv"}, words=_ENTAILS,
    ),
    "qqp": GlueTask(
        "QQP", ("question1", "question2"), "is_duplicate", _DUPLICATE,
        ("accuracy", "f1"), "f1", {"test": "QQP.tsv"}, index="id", drops_short=True,
    ),
    "rte": GlueTask(
        "RTE", _PAIR, "label", _ENTAILS,
        ("accuracy",), "accuracy", {"test": "RTE.tsv"}, words=_ENTAILS,
    ),
    "sst2": GlueTask(
        "SST-2", ("sentence",), "label", ("negative", "positive"),
        ("accuracy",), "accuracy", {"test": "SST-2.tsv"},
    ),
    "stsb": GlueTask(
        "STS-B", _PAIR, "score", None,
        ("pearson", "spearman"), "spearman", {"test": "STS-B.tsv"}, words=None,
    ),
    "wnli": GlueTask(
        "WNLI", _PAIR, "label", ("not_entailment", "entailment"),
        ("accuracy",), "accuracy", {"test": "WNLI.tsv"},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class _Rows:
    """The rows of a TSV file that have their columns, and how many have not or have more."""

    path: Path
    columns: Sequence[str]
    lines: list[int]
    """[n] line of each row."""
    cells: list[list[str]]
    short: int
    long: int

    def column(self, name: str) -> list[str]:
        """One column [n]. DataError when there is none of this name."""
        if name not in self.columns:
            raise missing_column(f"{self.path} (line 1)", name, self.columns)
        place = list(self.columns).index(name)
        return [row[place] for row in self.cells]


def read_glue(folder: Path, task: str, split: str) -> TextExamples:
    """A split of a task: train, validation, test, for MNLI also those that end in _mismatched.

    `folder` is the GLUE distribution or the task's own folder. Labels of a test file are not read.
    ConfigError for an unknown task or split. DataError, with file and line, for a file that is
    missing, empty or lacks a column, for a row that is too short, and for an unknown label.
    """
    table = task_of(task, split)
    path = _split_file(folder, table, split)
    labelled = not split.startswith("test")
    has_header = not (table.headless and labelled)
    rows = _read_rows(
        path, () if has_header else table.headless, drops_short=table.drops_short and labelled
    )
    texts = [rows.column(name) for name in table.texts]
    labels = _labels(rows, table) if labelled else None
    if table.index in rows.columns:
        ids = rows.column(table.index)
    else:
        ids = [str(number) for number in range(len(rows.cells))]
    empty = sum("" in (text.strip() for text in row) for row in zip(*texts, strict=True))
    told = {SHORT_ROW: rows.short, LONG_ROW: rows.long, EMPTY_TEXT: empty}
    remarks = {name: count for name, count in told.items() if count}
    second = texts[1] if len(texts) == 2 else None
    return TextExamples(texts[0], second, labels, ids, table.label_names, remarks)


def task_of(task: str, split: str) -> GlueTask:
    """The task of this name, when it has this split; ConfigError otherwise."""
    if task not in TASKS:
        raise ConfigError(f"glue_task ({task}): is unknown; choose one of {', '.join(TASKS)}")
    if split not in TASKS[task].files:
        known = ", ".join(TASKS[task].files)
        raise ConfigError(f"split ({split}): {task} has none of this name; choose one of {known}")
    return TASKS[task]


def _split_file(folder: Path, table: GlueTask, split: str) -> Path:
    own = folder / table.folder if (folder / table.folder).is_dir() else folder
    path = own / table.files[split]
    if not path.is_file():
        raise DataError(
            f"{path}: no such file; give the folder that holds {table.folder}, or that one itself; "
            f"{there_instead(path)}"
        )
    return path


def _read_rows(path: Path, headless: Sequence[str], *, drops_short: bool) -> _Rows:
    """Split a TSV file; its first line is the header unless the columns are given."""
    lines = read_lines(path)
    first = 0 if headless else 1
    columns = list(headless) or lines[0].split("\t")
    rows = [(number, line.split("\t")) for number, line in enumerate(lines[first:], first + 1)]
    whole = [(number, row) for number, row in rows if len(row) >= len(columns)]
    if len(whole) < len(rows) and not drops_short:
        number, row = next((n, row) for n, row in rows if len(row) < len(columns))
        raise DataError(
            f"{path} (line {number}): has {len(row)} of {len(columns)} columns ({listed(columns)}); "
            "get the file again"
        )
    if not whole:
        raise DataError(f"{path}: holds no rows; get the file again")
    long = sum(len(row) > len(columns) for _, row in whole)
    numbers, cells = [number for number, _ in whole], [row for _, row in whole]
    return _Rows(path, columns, numbers, cells, len(rows) - len(whole), long)


def _labels(rows: _Rows, table: GlueTask) -> Labels:
    told = rows.column(table.label)
    if table.words is not None:
        return label_numbers(rows.path, zip(rows.lines, told, strict=True), table.words)
    scores = np.zeros(len(told), np.float32)
    for place, (line, word) in enumerate(zip(rows.lines, told, strict=True)):
        try:
            scores[place] = float(word)
        except ValueError as error:
            raise DataError(
                f"{rows.path} (line {line}): '{word}' is no score; give a number from 0 to 5"
            ) from error
        if not 0 <= scores[place] <= MOST_STSB:
            raise DataError(
                f"{rows.path} (line {line}): score {word} is not within 0 to 5; mend it"
            )
    return scores


def write_server_file(
    path: Path, task: str, examples: TextExamples, predictions: npt.NDArray[Any]
) -> None:
    """Write the test predictions [n] as the server takes them: `TASKS[task].server_files[split]`.

    Predictions are label numbers, for STS-B similarities, which are clipped to 0 to 5. DataError
    when there is not one for each example, or the file cannot be written.
    """
    if len(predictions) != len(examples):
        raise DataError(
            f"{path}: {len(predictions)} predictions for {len(examples)} examples; give one for each"
        )
    words = TASKS[task].words
    if words is None:
        told = [f"{score:.3f}" for score in np.clip(predictions, 0.0, MOST_STSB)]
    else:
        told = [words[int(number)] for number in predictions]
    rows = (f"{name}\t{word}" for name, word in zip(examples.ids, told, strict=True))
    write_lines(path, ["index\tprediction", *rows])
