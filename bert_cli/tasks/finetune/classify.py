"""`bert classify`: labelled texts of one's own, from a CSV, TSV or JSON-lines file.

The labels are those of the training file. The score is the accuracy, the macro F1 (which counts a
rare label as much as a frequent one) and a confusion matrix; the predictions stand beside the texts
in predictions.jsonl.
"""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from bert_cli.config.finetune import ClassifySettings
from bert_cli.data.finetune.examples import TextExamples, write_lines
from bert_cli.data.finetune.metrics import confusion, score
from bert_cli.data.finetune.tables import hold_out, read_table
from bert_cli.data.records.tokenizer import TextTokenizer
from bert_cli.tasks.finetune.task import Logits, Scores, Task
from bert_cli.tasks.finetune.texts import features_of_texts, write_predictions
from bert_cli.tasks.run import finetune, start
from bert_cli.train.metrics import print_line

# Of synthetic examples.
LABELS = ("0", "1")
# A matrix of more labels than this is only written.
SHOWN_LABELS = 12


def run(settings: ClassifySettings) -> None:
    """Fine-tune on the rows and score the held-out ones; see `finetune.run` for what it raises."""
    scores_only = settings.validation_file is not None and not settings.do_training
    finetune.run(settings, build, () if scores_only else ("train_file",), LABELS)


def build(
    settings: ClassifySettings, tokenizer: TextTokenizer, source: start.Source | None
) -> Task:
    """The rows of the file, and those to score on."""
    train, development = _read(settings, source)
    names = (development or train).label_names  # type: ignore[union-attr]
    assert names is not None
    if development is None:
        assert train is not None
        kept = features_of_texts(train, "train", settings, tokenizer)
        return Task(len(names), names, kept, {}, score=lambda logits: {}, best="accuracy")
    return Task(
        labels=len(names),
        label_names=names,
        train=features_of_texts(train, "train", settings, tokenizer) if train else None,
        development={
            "validation": features_of_texts(development, "validation", settings, tokenizer)
        },
        score=partial(_score, development),
        best="accuracy",
        show=partial(_show, development, names),
        write=partial(_write, development, names),
    )


def _read(
    settings: ClassifySettings, source: start.Source | None
) -> tuple[TextExamples | None, TextExamples | None]:
    """Rows to train on, and those to score on."""
    columns = {"text_columns": settings.text_column, "label_column": settings.label_column}
    # A model that is only scored has its labels, and its numbers for them.
    names = source.label_names if source is not None and not settings.do_training else None
    if not settings.do_training and settings.validation_file is not None:
        return None, read_table(settings.validation_file, **columns, label_names=names)  # type: ignore[arg-type]
    assert settings.train_file is not None
    train = read_table(settings.train_file, **columns, label_names=names)  # type: ignore[arg-type]
    if settings.validation_file is None and not settings.do_validation:
        return train, None
    if settings.validation_file is None:
        print_line(
            f"validation: {settings.held_out_fraction:.0%} of {settings.train_file}, held out by the seed"
        )
        kept, held_out = hold_out(train, settings.held_out_fraction, settings.seed)
        return kept if settings.do_training else None, held_out
    found = read_table(settings.validation_file, **columns, label_names=train.label_names)  # type: ignore[arg-type]
    return train, found


def _score(development: TextExamples, logits: Logits) -> Scores:
    assert development.labels is not None
    predictions = np.argmax(logits["validation"], axis=1)
    return score(("accuracy", "macro_f1"), development.labels, predictions)


def _confusion(development: TextExamples, names: Sequence[str], logits: Logits) -> list[list[int]]:
    assert development.labels is not None
    predictions = np.argmax(logits["validation"], axis=1)
    return confusion(development.labels, predictions, len(names))


def _show(development: TextExamples, names: Sequence[str], logits: Logits) -> None:
    """The confusion matrix to the terminal."""
    if len(names) <= SHOWN_LABELS:
        print_line(_matrix(names, _confusion(development, names, logits)))


def _write(development: TextExamples, names: Sequence[str], folder: Path, logits: Logits) -> None:
    """The confusion matrix in a file, and the predictions beside the texts."""
    counts = _confusion(development, names, logits)
    told = {"labels": list(names), "rows": "true label", "columns": "predicted", "counts": counts}
    write_lines(folder / "confusion.json", [json.dumps(told)])
    write_predictions(folder, "validation", development, logits["validation"])


def _matrix(names: Sequence[str], counts: Sequence[Sequence[int]]) -> str:
    """Rows are the true labels, columns the predicted ones."""
    width = max(len("true"), *map(len, names), *(len(str(n)) for row in counts for n in row))
    head = "  ".join(f"{name:>{width}}" for name in ["true", *names])
    rows = [
        "  ".join(f"{cell:>{width}}" for cell in [name, *map(str, row)])
        for name, row in zip(names, counts, strict=True)
    ]
    return "\n".join(["confusion (columns: predicted)", head, *rows])
