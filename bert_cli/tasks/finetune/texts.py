"""Labelled texts: `bert classify` for the user's table, `bert glue` for a task of GLUE or CLUE.

The training file defines the labels of a table; its scores are the accuracy, the macro F1, in which rare and frequent
labels have equal weight, and a confusion matrix. Tasks of GLUE and CLUE have their official metrics. MNLI has a second,
mismatched development set from other sources; the checkpoint is chosen on the matched set. With
`do_test` the test set is predicted too, in the form that the benchmark's server accepts.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import softmax

from bert_cli.config.finetune import ClassifySettings, FinetuneSettings, GlueSettings
from bert_cli.data.finetune import simple
from bert_cli.data.finetune.features import Features, cached, encode_texts, texts_hash
from bert_cli.data.finetune.glue import TASKS, read_split, write_server_file
from bert_cli.data.finetune.tables import (
    TextExamples,
    confusion,
    hold_out,
    read_table,
    samples_of,
    write_lines,
)
from bert_cli.data.tokens.tokenizer import TextTokenizer
from bert_cli.processes import print_line
from bert_cli.statistics import Sample
from bert_cli.tasks.finetune import few
from bert_cli.tasks.run import finetune, models
from bert_cli.tasks.run.task import Floats, Logits, Result, Task
from bert_cli.tasks.run.vectors import vectors_within

FEW = 500  # training rows, below which vectors of the start are a baseline
SECONDS = 10.0  # for these vectors
PUBLISHED_LABELS = {
    "tnews": tuple(str(label) for label in range(100, 117) if label not in (105, 111)),
    "iflytek": tuple(str(label) for label in range(119)),
}
"""Labels of tasks that read them from files; for synthetic examples, which have no files."""


def run(settings: ClassifySettings | GlueSettings) -> None:
    """Fine-tune on labelled texts and score held-out texts; raises the errors of `finetune.run`."""
    if isinstance(settings, GlueSettings):
        name = str(settings.glue_task)
        labels = PUBLISHED_LABELS.get(name, TASKS[name].label_names)
        finetune.run(settings, build_glue, ("dataset_dir",), labels)
    else:
        scores_only = settings.validation_file is not None and not settings.do_training
        finetune.run(settings, build, () if scores_only else ("train_file",), ("0", "1"))


# --- the user's table


def build(
    settings: ClassifySettings, tokenizer: TextTokenizer, source: models.Source | None
) -> Task:
    """Return the task: training rows and validation rows."""
    # A model that is only scored brings its labels.
    names = source.label_names if source is not None and not settings.do_training else None
    sets = _read(settings, names)
    more = _unlabelled(settings, settings.text_column, tokenizer)
    names = next(iter(sets.values())).label_names
    assert names is not None
    features = {
        name: features_of_texts(rows, name, settings, tokenizer) for name, rows in sets.items()
    }
    train = features.pop("train", None)
    evaluate = partial(_evaluate, sets, names)
    task = Task(
        len(names),
        names,
        train,
        features,
        evaluate,
        "accuracy",
        held_out=_digest(sets),
        train_unlabelled=more,
        baselines=partial(_baselines, sets, evaluate, source),
        halves=settings.do_validation and settings.validation_file is None,
    )
    return few.of_pairs(task, settings, source) if settings.few else task


def _read(settings: ClassifySettings, names: Sequence[str] | None) -> Mapping[str, TextExamples]:
    """Return the training and validation rows, as "train" and "validation"."""
    train_file = settings.train_file
    validation_file = settings.validation_file
    read = partial(
        read_table, text_columns=settings.text_column, label_column=settings.label_column
    )
    if validation_file is not None and not settings.do_training:
        return {"validation": read(validation_file, label_names=names)}
    assert train_file is not None
    train = read(train_file, label_names=names)
    if validation_file is not None:
        return {"train": train, "validation": read(validation_file, label_names=train.label_names)}
    if not settings.do_validation:
        return {"train": train}
    fraction = settings.held_out_fraction
    print_line(f"validation: {fraction:.0%} of {train_file}, held out by the seed")
    rest, held_out = hold_out(train, fraction, settings.seed)
    return {**({"train": rest} if settings.do_training else {}), "validation": held_out}


def _evaluate(sets: Mapping[str, TextExamples], names: Sequence[str], logits: Logits) -> Result:
    held_out = sets["validation"]
    values = logits["validation"]
    assert held_out.labels is not None
    predictions = np.argmax(values, axis=1)
    columns = held_out.labels, predictions, held_out.examples
    samples = samples_of(("accuracy", "macro_f1"), *columns)
    counts = confusion(held_out.labels, predictions, len(names))

    def write(folder: Path, _: Logits) -> None:
        axes = {"labels": list(names), "rows": "true label", "columns": "predicted"}
        write_lines(folder / "confusion.json", [json.dumps({**axes, "counts": counts})])
        write_predictions(folder, "validation", held_out, values)

    # A larger matrix is written, but not printed.
    return Result(samples, write, _table(names, counts) if len(names) <= 12 else "")


def _table(names: Sequence[str], counts: Sequence[Sequence[int]]) -> str:
    """Return the confusion matrix as text; rows are the true labels, columns the predicted labels."""
    rows = [["true", *names]]
    rows += [[name, *map(str, row)] for name, row in zip(names, counts, strict=True)]
    width = max(len(cell) for row in rows for cell in row)
    lines = ("  ".join(f"{cell:>{width}}" for cell in row) for row in rows)
    return "\n".join([f"confusion of {sum(map(sum, counts)):,} texts (columns: predicted)", *lines])


# --- GLUE and CLUE


def build_glue(
    settings: GlueSettings, tokenizer: TextTokenizer, source: models.Source | None
) -> Task:
    """Return the task: its sets and their official metrics."""
    name = str(settings.glue_task)
    folder = settings.dataset_dir
    assert folder is not None
    about = TASKS[name]

    splits = ["train"] if settings.do_training else []
    splits += [split for split in about.files if split.startswith("validation")]
    splits += about.server_files if settings.do_test else ()
    sets = {split: read_split(folder, name, split) for split in splits}
    more = _unlabelled(settings, about.columns, tokenizer)
    features = {
        split: features_of_texts(examples, split, settings, tokenizer)
        for split, examples in sets.items()
    }
    names = sets["validation"].label_names
    evaluate = partial(_evaluate_glue, name, sets)
    return Task(
        labels=1 if names is None else len(names),
        label_names=names,
        train=features.get("train"),
        train_unlabelled=more,
        development={n: columns for n, columns in features.items() if n.startswith("validation")},
        evaluate=evaluate,
        baselines=partial(_baselines, sets, evaluate, source),
        best=about.best,
        held_out=_digest(sets),
        unlabelled={n: columns for n, columns in features.items() if n in about.server_files},
    )


def _evaluate_glue(name: str, sets: Mapping[str, TextExamples], logits: Logits) -> Result:
    """Return the metrics of each development set; names of the mismatched set's metrics have a suffix."""
    samples: dict[str, Sample] = {}
    for split, values in logits.items():
        labels = sets[split].labels
        suffix = split.removeprefix("validation")
        assert labels is not None
        predictions = _predictions(values, sets[split].label_names)
        metrics = samples_of(TASKS[name].metrics, labels, predictions, sets[split].examples)
        samples |= {f"{metric}{suffix}": sample for metric, sample in metrics.items()}

    def write(folder: Path, test_logits: Logits) -> None:
        for split, values in logits.items():
            write_predictions(folder, split, sets[split], values)
        for split, values in test_logits.items():
            path = folder / TASKS[name].server_files[split]
            predictions = _predictions(values, sets[split].label_names)
            write_server_file(path, name, sets[split], predictions)
            print_line(f"{split}: {len(predictions):,} predictions in {path}")

    return Result(samples, write)


def _predictions(logits: Floats, label_names: Sequence[str] | None) -> npt.NDArray[Any]:
    """Return the label numbers [n], or for regression the numbers themselves, from logits [n, L]."""
    return logits[:, 0] if label_names is None else np.argmax(logits, axis=1)


# --- both


def _digest(sets: Mapping[str, TextExamples]) -> str:
    digests = (sets[name].examples.digest for name in sets if name.startswith("validation"))
    return " ".join(digests)


def _baselines(
    sets: Mapping[str, TextExamples],
    evaluate: Callable[[Logits], Result],
    source: models.Source | None,
) -> dict[str, Result]:
    """Return the results of the mean, or of the majority class and of regressions, on the development sets."""
    train = sets["train"]
    labels = train.labels
    assert labels is not None
    names = [name for name in sets if name.startswith("validation")]
    held_out = [text for name in names for text in sets[name].joined]
    usual = simple.most_frequent(labels, len(held_out))
    columns = {"mean": usual[:, None]}
    if train.label_names is not None:
        rows = simple.sample_of(train.joined, labels)
        texts = [train.joined[row] for row in rows]
        predicted = {"majority class": usual}
        inputs: dict[str, Any] = {"words": (texts, held_out)}
        if len(train) < FEW and source is not None:
            vectors = vectors_within(SECONDS, source, [*held_out, *texts])
            inputs["vectors of the start"] = np.split(vectors, [len(held_out)])[::-1]
        for name, (learned, tested) in inputs.items():
            if len(learned) == 0:
                print_line(f"baseline, regression on {name}: left out, it takes too long")
                continue
            size = "" if len(learned) == len(train) else f" of {len(learned):,} rows"
            column = simple.by_regression(learned, labels[rows[: len(learned)]], tested)
            predicted[f"regression on {name}{size}"] = column
        one_hot = np.eye(len(train.label_names), dtype=np.float32)
        columns = {name: one_hot[column] for name, column in predicted.items()}
    ends = np.cumsum([len(sets[name]) for name in names])[:-1]
    parts = {name: np.split(column, ends) for name, column in columns.items()}
    return {name: evaluate(dict(zip(names, of, strict=True))) for name, of in parts.items()}


def _unlabelled(
    settings: ClassifySettings | GlueSettings, columns: Sequence[str], tokenizer: TextTokenizer
) -> Features | None:
    """Return the texts that only the teacher labels; None without any, or if the task's texts are not columns."""
    path = settings.distillation.unlabelled_file
    if path is None or not columns:
        return None
    examples = read_table(path, text_columns=columns, label_column=None)
    return features_of_texts(examples, "unlabelled", settings, tokenizer)


def features_of_texts(
    examples: TextExamples,
    name: str,
    settings: FinetuneSettings,
    tokenizer: TextTokenizer,
    noun: str = "examples",
) -> Features:
    """Return the examples as features; print their number and what was left out or truncated."""
    labels = {} if examples.labels is None else {"labels": examples.labels}
    length = settings.max_seq_length

    def build() -> Mapping[str, npt.NDArray[Any]]:
        texts = examples.first, examples.second
        features, cut = encode_texts(tokenizer, *texts, labels, max_seq_length=length)
        return {**features.arrays(), "cut": np.array(cut)}

    made_from = {
        "texts": texts_hash(examples.first, examples.second or []),
        "labels": None if examples.labels is None else examples.labels.tolist(),
        "tokenizer": tokenizer.fingerprint,
        "max_seq_length": length,
    }
    arrays = cached(settings.cache_dir, made_from, build)
    remarks = dict(examples.remarks)
    if cut := int(arrays["cut"]):
        remarks[f"longer than {length} tokens, cut"] = cut
    more = "".join(f"; {count:,} {remark}" for remark, count in remarks.items())
    print_line(f"{name}: {len(examples):,} {noun}{more}")
    return Features.of(arrays)


def write_predictions(folder: Path, name: str, examples: TextExamples, logits: Floats) -> None:
    """Write the prediction of each example with its text; the set "validation_x" goes to predictions_x.jsonl."""
    path = folder / f"predictions{name.removeprefix('validation')}.jsonl"
    write_lines(path, (json.dumps(row) for row in _rows(examples, logits)))
    print_line(f"{name}: {len(examples):,} predictions in {path}")


def _rows(examples: TextExamples, logits: Floats) -> Iterator[Mapping[str, object]]:
    assert examples.labels is not None
    names = examples.label_names
    second = examples.second
    probabilities = softmax(logits, axis=1)
    for number, text in enumerate(examples.first):
        row: dict[str, object] = {"id": examples.ids[number], "text": text}
        if second is not None:
            row["second"] = second[number]
        label = examples.labels[number]
        if names is None:
            # As in the file: 3.8, and not the nearest float32 in 16 digits.
            yield row | {"label": float(str(label)), "predicted": float(logits[number, 0])}
            continue
        best = int(np.argmax(probabilities[number]))
        probability = round(float(probabilities[number, best]), 6)
        row |= {"label": names[int(label)], "predicted": names[best]}
        yield row | {"probability": probability}
