"""The tasks of GLUE (Wang et al. 2018) and CLUE (Xu et al. 2020): one table and one reader.

A labelled row that is too short is an error, except in QQP, whose published files have a few: they are left out
and counted, like CLUE's rows without a label. A test row is never left out: the server expects a prediction for
every row.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter

from bert_cli.data.finetune import tables
from bert_cli.data.finetune.label_cells import label_numbers, label_of, number_of, sorted_labels
from bert_cli.data.io.rows import Row, check_columns, split_cells
from bert_cli.errors import DataError

SHORT_ROW = "row{s} with too few columns, left out"
LONG_ROW = "row{s} with more columns than the header, which are ignored"
UNLABELLED = 'row{s} without a label of the annotators ("-"), left out'
GLUE_FILES = {"train": "train.tsv", "validation": "dev.tsv", "test": "test.tsv"}
LARGEST_TRAIN_FILE = "train.50k.json"  # of OCNLI, which has no train.json
LABELS_FILE = "labels.json"
DOWNLOAD = "download the file again"
HIGHEST_SIMILARITY = 5.0  # STS-B's similarities are 0 to 5


@dataclass(frozen=True)
class Task:
    """The files, columns, labels and metrics of a task, as glue.json has them."""

    folders: tuple[str, ...]  # accepted names of its folder
    columns: tuple[str, ...]  # of the texts
    label_names: tuple[str, ...] | None  # None: read from the files, or regression
    server_files: Mapping[str, str]  # split -> file that the benchmark's server accepts
    label: str = "label"  # column of the labels
    labels: tuple[str, ...] | None = None  # spelling in the files, if not the names
    metrics: tuple[str, ...] = ("accuracy",)
    best: str = "accuracy"  # in GLUE the metric of Devlin et al. 2019, table 1
    files: Mapping[str, str] = field(default_factory=lambda: GLUE_FILES)  # split -> file
    ids: tuple[str, ...] = ("index",)  # possible columns of the ids
    headless: tuple[str, ...] = ()  # columns of labelled files without a header
    may_lack_columns: bool = False  # labelled rows that are too short are left out
    may_lack_label: bool = False  # labelled rows whose label is "-" are left out
    is_regression: bool = False


def _keywords(row: Row, where: str) -> tuple[str, str]:
    """Return CSL's keywords and its abstract; a pair that is too long loses the end of the abstract."""
    check_columns(where, ["keyword"], row, DOWNLOAD)
    keywords = row["keyword"]
    if not isinstance(keywords, list) or not all(isinstance(word, str) for word in keywords):
        raise DataError(where, "has no list of words in the column 'keyword'", DOWNLOAD)
    return " ".join(keywords), tables.text_of(row, "abst", where)


def _marked(row: Row, where: str) -> tuple[str]:
    """Return CLUEWSC's text with _the noun_ and [the pronoun] marked, as in CLUE's own baselines."""
    text = tables.text_of(row, "text", where)
    check_columns(where, ["target"], row, DOWNLOAD)
    target = row["target"]
    if not isinstance(target, dict):
        raise DataError(where, "has no object in the column 'target'", DOWNLOAD)
    spans = []
    for name, marks in (("span1", "__"), ("span2", "[]")):
        span = tables.text_of(target, f"{name}_text", where)
        begin = target.get(f"{name}_index")
        if not isinstance(begin, int) or not span or text[begin : begin + len(span)] != span:
            problem = f"{name} '{span}' is not at character {begin} of the text"
            raise DataError(where, problem, DOWNLOAD)
        spans.append((begin, begin + len(span), marks))
    # From the right, so that the marks do not shift the other span.
    for begin, end, marks in sorted(spans, reverse=True):
        text = f"{text[:begin]}{marks[0]}{text[begin:end]}{marks[1]}{text[end:]}"
    return (text,)


TASKS = TypeAdapter(dict[str, Task]).validate_json(Path(__file__).with_suffix(".json").read_bytes())
# Task -> what makes one text or two from a row and its location, where columns alone do not suffice.
MAKE_TEXTS: Mapping[str, Callable[[Row, str], tuple[str, ...]]] = {
    "csl": _keywords,
    "wsc": _marked,
}


def read_split(folder: Path, name: str, split: str) -> tables.TextExamples:
    """Return a split of a task: train, validation, test; for MNLI also validation_mismatched and test_mismatched.

    `folder` contains the folders of the tasks, or is the folder of this task. Labels of a test file are not read.
    Raises DataError, with file and line, for a file that differs from the published format.
    """
    task = TASKS[name]
    path = _find_file(folder, task, split)
    is_labelled = not split.startswith("test")
    remarks: Counter[str] = Counter()
    texts: list[tuple[str, ...]] = []
    words: list[tuple[str, str]] = []
    ids: list[str] = []
    for number, (where, row) in enumerate(_rows(path, task, remarks, is_labelled)):
        if is_labelled:
            word = label_of(row, task.label, where)
            if word == "-" and task.may_lack_label:
                remarks[UNLABELLED] += 1
                continue
            words.append((where, word))
        if name in MAKE_TEXTS:
            texts.append(MAKE_TEXTS[name](row, where))
        else:
            texts.append(tuple(tables.text_of(row, column, where) for column in task.columns))
        ids.append(next((str(row[column]) for column in task.ids if column in row), str(number)))
    if not texts:
        raise DataError(str(path), "contains no labelled rows", DOWNLOAD)
    names = task.label_names
    if names is None and not task.is_regression:
        names = _label_names(path.parent, task)
    labels: tables.Labels | None = None
    if is_labelled and task.is_regression:
        scores = [number_of(word, where, 0.0, HIGHEST_SIMILARITY) for where, word in words]
        labels = np.array(scores, np.float32)
    elif is_labelled:
        labels = label_numbers(words, task.labels or names or ())
    return tables.examples_of(texts, labels, ids, names, remarks)


def _find_file(folder: Path, task: Task, split: str) -> Path:
    task_folder = next((folder / name for name in task.folders if (folder / name).is_dir()), folder)
    names = [task.files[split]]
    if split == "train":
        names.append(LARGEST_TRAIN_FILE)
    for name in names:
        if (task_folder / name).is_file():
            return task_folder / name
    remedy = f"use the folder that contains {task.folders[0]}, or {task.folders[0]} itself"
    raise DataError(str(task_folder / names[0]), "no such file", remedy)


def _rows(path: Path, task: Task, remarks: Counter[str], is_labelled: bool) -> tables.Rows:
    """Yield the (location, columns) of each row of a TSV or JSON-lines file."""
    if path.suffix == ".json":
        yield from tables.table_rows(path, (), Counter())
        return
    rows = split_cells(tables.read_lines(path), str(path), "")
    headless: tuple[str, ...] = ()
    if is_labelled:
        headless = task.headless
    columns = headless or next(rows)[1]
    needed = list(task.columns)
    if is_labelled:
        needed.append(task.label)
    check_columns(f"{path} (line 1)", needed, columns)
    for where, cells in rows:
        if len(cells) >= len(columns):
            remarks[LONG_ROW] += len(cells) > len(columns)
            yield where, dict(zip(columns, cells, strict=False))
        elif is_labelled and task.may_lack_columns:
            remarks[SHORT_ROW] += 1
        else:
            problem = f"has {len(cells)} of {len(columns)} columns"
            raise DataError(where, problem, DOWNLOAD)


def _label_names(folder: Path, task: Task) -> tuple[str, ...]:
    """Return the labels of labels.json or, if it is absent, the sorted labels of the training file."""
    path = folder / LABELS_FILE
    if not path.is_file():
        path = _find_file(folder, task, "train")
    words = (
        label_of(row, task.label, where) for where, row in tables.table_rows(path, (), Counter())
    )
    return sorted_labels(words)


def write_server_file(
    path: Path, name: str, examples: tables.TextExamples, predictions: tables.Array
) -> None:
    """Write the test predictions [n] of a task as its server accepts them: see `Task.server_files`.

    Predictions are label numbers or, for STS-B, similarities, which are clipped to 0 to 5.
    """
    task = TASKS[name]
    if task.is_regression:
        words = [f"{score:.3f}" for score in np.clip(predictions, 0.0, HIGHEST_SIMILARITY)]
    else:
        labels = task.labels or examples.label_names or ()
        words = [labels[int(number)] for number in predictions]
    pairs = zip(examples.ids, words, strict=True)
    if path.suffix == ".tsv":
        lines = (f"{identity}\t{word}" for identity, word in pairs)
        tables.write_lines(path, ["index\tprediction", *lines])
        return
    # Ids are numbers in the files.
    rows = []
    for text, word in pairs:
        rows.append({"id": int(text) if text.isdecimal() else text, "label": word})
    tables.write_lines(path, (json.dumps(row) for row in rows))
