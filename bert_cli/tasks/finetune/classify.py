"""`bert classify`: labelled texts of one's own, from a CSV, TSV or JSON-lines file.

The labels are those of the training file. The scores are the accuracy and the macro F1, in which a rare label
weighs as much as a frequent one; a confusion matrix and the predictions of each text are written too.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from bert_cli.config.finetune import ClassifySettings
from bert_cli.data.finetune.metrics import confusion, score
from bert_cli.data.finetune.tables import TextExamples, hold_out, read_table, write_lines
from bert_cli.data.records.tokenizer import TextTokenizer
from bert_cli.tasks.finetune.task import (
    Floats,
    Logits,
    Result,
    Task,
    features_of_texts,
    write_predictions,
)
from bert_cli.tasks.run import finetune, start
from bert_cli.train.metrics import print_line

SYNTHETIC_LABELS = ("0", "1")
MOST_SHOWN_LABELS = 12
"""A larger confusion matrix is written, but not printed."""


def run(settings: ClassifySettings) -> None:
    """Fine-tune on the rows and score the held-out ones; see `finetune.run` for what it raises."""
    scores_only = settings.validation_file is not None and not settings.do_training
    finetune.run(settings, build, () if scores_only else ("train_file",), SYNTHETIC_LABELS)


def build(
    settings: ClassifySettings, tokenizer: TextTokenizer, source: start.Source | None
) -> Task:
    """Return the task: the rows to train on and to score on."""
    # A model that is only scored has its labels already.
    names = source.label_names if source is not None and not settings.do_training else None
    train, development = _read(settings, names)
    names = next(rows.label_names for rows in (development, train) if rows is not None)
    assert names is not None
    task = Task(
        labels=len(names),
        label_names=names,
        train=features_of_texts(train, "train", settings, tokenizer) if train else None,
        best="accuracy",
    )
    if development is None:
        return task
    features = features_of_texts(development, "validation", settings, tokenizer)
    evaluate = partial(_evaluate, development, names)
    return replace(task, development={"validation": features}, evaluate=evaluate)


def _read(
    settings: ClassifySettings, names: Sequence[str] | None
) -> tuple[TextExamples | None, TextExamples | None]:
    """Return the rows to train on, and those to score on."""
    train_file, validation_file = settings.train_file, settings.validation_file
    read = partial(
        read_table, text_columns=settings.text_column, label_column=settings.label_column
    )
    if validation_file is not None and not settings.do_training:
        return None, read(validation_file, label_names=names)
    assert train_file is not None
    train = read(train_file, label_names=names)
    if validation_file is not None:
        return train, read(validation_file, label_names=train.label_names)
    if not settings.do_validation:
        return train, None
    fraction = settings.held_out_fraction
    print_line(f"validation: {fraction:.0%} of {train_file}, held out by the seed")
    rest, held_out = hold_out(train, fraction, settings.seed)
    return rest if settings.do_training else None, held_out


def _evaluate(development: TextExamples, names: Sequence[str], logits: Logits) -> Result:
    assert development.labels is not None
    values = logits["validation"]
    predictions = np.argmax(values, axis=1)
    scores = score(("accuracy", "macro_f1"), development.labels, predictions)
    counts = confusion(development.labels, predictions, len(names))
    table = _table(names, counts) if len(names) <= MOST_SHOWN_LABELS else ""
    return Result(scores, partial(_write, development, names, counts, values), table)


def _write(
    development: TextExamples,
    names: Sequence[str],
    counts: Sequence[Sequence[int]],
    values: Floats,
    folder: Path,
    _: Logits,
) -> None:
    """Write the confusion matrix, and the predictions with their texts."""
    axes = {"labels": list(names), "rows": "true label", "columns": "predicted"}
    write_lines(folder / "confusion.json", [json.dumps({**axes, "counts": counts})])
    write_predictions(folder, "validation", development, values)


def _table(names: Sequence[str], counts: Sequence[Sequence[int]]) -> str:
    """Return the confusion matrix as text; rows are the true labels, columns the predicted ones."""
    width = max(len("true"), *map(len, names), *(len(str(n)) for row in counts for n in row))
    rows = [["true", *names]]
    rows += [[name, *map(str, row)] for name, row in zip(names, counts, strict=True)]
    lines = ("  ".join(f"{cell:>{width}}" for cell in row) for row in rows)
    return "\n".join(["confusion (columns: predicted)", *lines])
