"""CLUE's tasks of texts and pairs (Xu et al. 2020): fields, labels and metric, and one reader.

Each task is a folder with train.json (OCNLI: train.50k.json), dev.json and test.json, an object a
line. Two tasks have more than texts. CSL's keywords, joined by spaces, are the first text and the
abstract is the second, so that a long abstract is cut before they are. CLUEWSC's two spans are marked
in the text itself, _the noun_ and [the pronoun], as in CLUE's own baselines. Rows that the annotators
gave no label ("-", in CMNLI and OCNLI) are left out and counted.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bert_cli.data.finetune.examples import (
    EMPTY_TEXT,
    TextExamples,
    label_numbers,
    label_word,
    missing_column,
    read_json_lines,
    sorted_labels,
    text_of,
    write_lines,
)
from bert_cli.errors import ConfigError, DataError

UNLABELLED = 'rows that the annotators gave no label ("-"), left out'
FILES = {"train": "train.json", "validation": "dev.json", "test": "test.json"}
LARGEST_TRAIN_FILE = "train.50k.json"
"""OCNLI is published with training sets of five sizes, and without a train.json."""
LABELS_FILE = "labels.json"

Row = Mapping[str, Any]
Texts = tuple[str, str | None]


def _sentence(row: Row, where: str) -> Texts:
    return text_of(row, "sentence", where), None


def _pair(row: Row, where: str) -> Texts:
    return text_of(row, "sentence1", where), text_of(row, "sentence2", where)


def _keywords(row: Row, where: str) -> Texts:
    if "keyword" not in row:
        raise missing_column(where, "keyword", row)
    words = row["keyword"]
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise DataError(f"{where}: 'keyword' is no list of strings; give it as published")
    return " ".join(words), text_of(row, "abst", where)


def _marked(row: Row, where: str) -> Texts:
    text, target = text_of(row, "text", where), row.get("target")
    if not isinstance(target, dict):
        raise DataError(f"{where}: 'target' is no object; give both spans as published")
    spans = []
    for name, opening, closing in (("span1", "_", "_"), ("span2", "[", "]")):
        span, begin = text_of(target, f"{name}_text", where), target.get(f"{name}_index")
        if not isinstance(begin, int) or not span or text[begin : begin + len(span)] != span:
            raise DataError(
                f"{where}: {name} '{span}' is not at character {begin} of the text; get the file again"
            )
        spans.append((begin, begin + len(span), opening, closing))
    # The later one first: its marks move nothing before them.
    for begin, end, opening, closing in sorted(spans, reverse=True):
        text = f"{text[:begin]}{opening}{text[begin:end]}{closing}{text[end:]}"
    return text, None


@dataclass(frozen=True)
class ClueTask:
    """Where a task's texts are, and its labels when they are not told by its files."""

    folders: tuple[str, ...]
    """Names that its folder goes by."""
    texts: Callable[[Row, str], Texts]
    """Of a row, at a place for messages."""
    label_names: tuple[str, ...] | None = ("0", "1")
    """By number; None: those of labels.json or, without one, of train.json."""
    metrics: tuple[str, ...] = ("accuracy",)
    best: str = "accuracy"
    may_lack_label: bool = False
    server_file: str = ""
    """What CLUE's server calls the predictions, by its note on submissions for version 1.1 (2021-09-04): a
    task whose test set has changed has its version in the name. Empty: the task's name tells."""


_NLI = ("entailment", "neutral", "contradiction")

TASKS: Mapping[str, ClueTask] = {
    "afqmc": ClueTask(("afqmc", "afqmc_public"), _pair),
    "tnews": ClueTask(
        ("tnews", "tnews_public"), _sentence, None, server_file="tnews11_predict.json"
    ),
    "iflytek": ClueTask(("iflytek", "iflytek_public"), _sentence, None),
    "cmnli": ClueTask(("cmnli", "cmnli_public"), _pair, _NLI, may_lack_label=True),
    "ocnli": ClueTask(
        ("ocnli", "ocnli_public"),
        _pair,
        _NLI,
        may_lack_label=True,
        server_file="ocnli_50k_predict.json",
    ),
    "wsc": ClueTask(
        ("cluewsc2020", "cluewsc2020_public", "wsc"),
        _marked,
        ("false", "true"),
        server_file="cluewsc11_predict.json",
    ),
    "csl": ClueTask(("csl", "csl_public"), _keywords),
}


def read_clue(folder: Path, task: str, split: str) -> TextExamples:
    """A split of a task: train, validation or test.

    `folder` holds the tasks' folders or is the task's own. ConfigError for an unknown task or
    split. DataError, with file and line, for a missing or empty file, broken JSON, a missing field,
    a span that is not where it is said to be, and an unknown label.
    """
    if task not in TASKS:
        raise ConfigError(f"glue_task ({task}): is unknown; choose one of {', '.join(TASKS)}")
    if split not in FILES:
        raise ConfigError(f"split ({split}): is unknown; choose one of {', '.join(FILES)}")
    table, own = TASKS[task], _own_folder(folder, TASKS[task])
    path, labelled = _split_file(own, split), split != "test"
    texts: list[Texts] = []
    words: list[tuple[int, str]] = []
    ids: list[str] = []
    unlabelled = 0
    for number, row in read_json_lines(path):
        where = f"{path} (line {number})"
        word = _word(row, where) if labelled else ""
        if word == "-" and table.may_lack_label:
            unlabelled += 1
            continue
        texts.append(table.texts(row, where))
        words.append((number, word))
        ids.append(str(row.get("id", row.get("idx", number - 1))))
    if not texts:
        raise DataError(f"{path}: holds no labelled row; get the file again")
    names = table.label_names or _label_names(own)
    labels = label_numbers(path, words, names) if labelled else None
    empty = sum("" in (text.strip() for text in pair if text is not None) for pair in texts)
    told = {UNLABELLED: unlabelled, EMPTY_TEXT: empty}
    remarks = {name: count for name, count in told.items() if count}
    first, second = [pair[0] for pair in texts], [pair[1] or "" for pair in texts]
    is_pair = texts[0][1] is not None
    return TextExamples(first, second if is_pair else None, labels, ids, names, remarks)


def _own_folder(folder: Path, table: ClueTask) -> Path:
    return next((folder / name for name in table.folders if (folder / name).is_dir()), folder)


def _split_file(own: Path, split: str) -> Path:
    path, largest = own / FILES[split], own / LARGEST_TRAIN_FILE
    return largest if split == "train" and not path.is_file() and largest.is_file() else path


def _word(row: Row, where: str) -> str:
    if "label" not in row:
        raise missing_column(where, "label", row)
    return label_word(row["label"], where)


def _label_names(own: Path) -> tuple[str, ...]:
    """The labels that the task's own files tell, sorted."""
    listed = own / LABELS_FILE
    path = listed if listed.is_file() else _split_file(own, "train")
    return sorted_labels(_word(row, f"{path} (line {n})") for n, row in read_json_lines(path))


def server_file(task: str) -> str:
    """Name of the file that CLUE's server takes for version 1.1 of the benchmark."""
    return TASKS[task].server_file or f"{task}_predict.json"


def write_server_file(
    path: Path, task: str, examples: TextExamples, predictions: npt.NDArray[np.integer[Any]]
) -> None:
    """Write the test predictions [n], label numbers, as CLUE's server takes them.

    DataError when there is not one for each example, or the file cannot be written.
    """
    names = examples.label_names
    if names is None or len(predictions) != len(examples):
        raise DataError(
            f"{path}: {len(predictions)} predictions for {len(examples)} examples of {task}; "
            "give a label number for each"
        )
    rows = zip(examples.ids, predictions, strict=True)
    write_lines(
        path,
        (
            # Ids are numbers in the files; a name stays one.
            json.dumps({"id": int(name) if name.isdecimal() else name, "label": names[int(number)]})
            for name, number in rows
        ),
    )
