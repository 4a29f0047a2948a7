"""Labelled texts: `bert classify` for the user's table, `bert glue` for a task of GLUE or CLUE.

The training file defines the labels of a table; its scores are the accuracy, the macro F1, in which rare and frequent
labels have equal weight, and a confusion matrix. Tasks of GLUE and CLUE have their official metrics. MNLI has a second,
mismatched development set from other sources; the checkpoint is chosen on the matched set. With
`do_test` the test set is predicted too, in the form that the benchmark's server accepts.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import expit, softmax

from bert_cli.config.finetune import ClassifySettings, FinetuneSettings, GlueSettings
from bert_cli.data.finetune import simple
from bert_cli.data.finetune.features import Features, cached, encode_texts, texts_hash
from bert_cli.data.finetune.glue import TASKS, read_split, write_server_file
from bert_cli.data.finetune.labels import (
    Decision,
    best_temperature,
    best_thresholds,
    describe_calibration,
    describe_rare,
    label_counts,
    read_decision,
    scores_of_labels,
    several_samples,
    weights_of,
)
from bert_cli.data.finetune.tables import (
    Column,
    TextExamples,
    confusion,
    hold_out,
    read_table,
    samples_of,
    write_lines,
)
from bert_cli.data.io.rows import listed
from bert_cli.data.tokens.tokenizer import TextTokenizer
from bert_cli.processes import print_error, print_line
from bert_cli.statistics import Sample
from bert_cli.tasks.finetune.few import of_pairs
from bert_cli.tasks.run import finetune, models
from bert_cli.tasks.run.task import Floats, Logits, Result, Task, half_of
from bert_cli.tasks.run.vectors import vectors_within
from bert_cli.text import count

FEW = 500  # training rows, below which vectors of the start are a baseline
NOTHING = Decision()
MOST_PRINTED = 12  # labels of a printed table; files have all
MOST_CONFUSED = 1000  # labels of a written confusion matrix
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
    # A model that is only scored brings its labels and what it has chosen.
    scored = None if settings.do_training else source
    sets = _read(settings, None if scored is None else scored.label_names)
    more = _unlabelled(settings, settings.text_column, tokenizer)
    first = next(iter(sets.values()))
    labels, names = first.labels, first.label_names
    assert labels is not None and names is not None
    features = {
        name: features_of_texts(rows, name, settings, tokenizer) for name, rows in sets.items()
    }
    train = features.pop("train", None)
    weights = None
    if train is not None:
        _warn_of_few(labels, names)
        if settings.class_weights is not None:
            weights = weights_of(labels, names, settings.class_weights)
            each = weights if train.owner is None else weights[train.owner]
            train = replace(train, labels={**train.labels, "label_weights": each})
    halves = settings.do_validation and settings.validation_file is None
    is_several = labels.ndim == 2
    rare = "" if is_several else describe_rare(labels, names)
    if rare:
        print_line(rare)
    stored = None if scored is None else read_decision(scored.folder)
    evaluate = partial(_evaluate, sets, names, stored)
    if is_several:
        evaluate = partial(_evaluate_several, sets, names, stored, halves)
    task = Task(
        len(names),
        names,
        train,
        features,
        evaluate,
        "macro_f1" if is_several or rare else "accuracy",
        held_out=_digest(sets),
        train_unlabelled=more,
        baselines=partial(_baselines, sets, evaluate, source, weights),
        halves=halves,
        has_several_labels=is_several,
    )
    return of_pairs(task, settings, source) if settings.few else task


def _warn_of_few(labels: Column, names: Sequence[str]) -> None:
    """Print a warning that names the labels of no training text or of one."""
    counts = label_counts(labels, len(names))
    for number, texts in enumerate(("no training text, so nothing learns it", "one training text")):
        few = [names[label] for label in np.flatnonzero(counts == number).tolist()]
        if few:
            print_error(f"warning: {count(len(few), 'label')} with {texts}: {listed(few)}")


def _read(settings: ClassifySettings, names: Sequence[str] | None) -> Mapping[str, TextExamples]:
    """Return the training and validation rows, as "train" and "validation"."""
    train_file = settings.train_file
    validation_file = settings.validation_file
    read = partial(
        read_table,
        text_columns=settings.text_column,
        label_columns=settings.label_column,
        label_separator=settings.label_separator,
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


def _evaluate(
    sets: Mapping[str, TextExamples],
    names: Sequence[str],
    stored: Decision | None,
    logits: Logits,
) -> Result:
    """Return accuracy and macro F1; half of the held-out texts choose the temperature, unless it is stored."""
    held_out = sets["validation"]
    values = logits["validation"]
    labels = held_out.labels
    assert labels is not None
    examples = held_out.examples
    predictions = np.argmax(values, axis=1)
    samples = samples_of(("accuracy", "macro_f1"), labels, predictions, examples)
    decision = stored
    choosing, reported = (half_of(examples, choosing=which) for which in (True, False))
    if decision is None:
        temperature = best_temperature(values[choosing], labels[choosing])
        decision = Decision(temperature=temperature)
    is_small = len(names) <= MOST_CONFUSED
    counts = confusion(labels, predictions, len(names)) if is_small else []

    def write(folder: Path, _: Logits) -> None:
        axes = {"labels": list(names), "rows": "true label", "columns": "predicted"}
        if counts:
            write_lines(folder / "confusion.json", [json.dumps({**axes, "counts": counts})])
        else:
            print_line(f"confusion.json: left out, it would have {len(names):,} rows and columns")
        temperature = decision.temperature
        print_line(describe_calibration(temperature, values, labels, examples, reported))
        write_predictions(folder, "validation", held_out, values / np.float32(temperature))

    chosen = None if stored is not None else decision
    if len(names) > MOST_PRINTED:
        return Result(samples, write, decision=chosen)
    title = f"confusion of {len(held_out):,} texts (columns: predicted)"
    rows = [(name, *row) for name, row in zip(names, counts, strict=True)]
    return Result(samples, write, _table(title, ["true", *names], rows), decision=chosen)


def _table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return rows as text under a title and a header, numbers that are no integers with four digits."""
    form = "{:.4f}".format
    cells = [[form(c) if isinstance(c, float) else str(c) for c in row] for row in (header, *rows)]
    width = max(len(cell) for row in cells for cell in row)
    return "\n".join([title, *("  ".join(f"{cell:>{width}}" for cell in row) for row in cells)])


def _evaluate_several(
    sets: Mapping[str, TextExamples],
    names: Sequence[str],
    stored: Decision | None,
    halves: bool,
    logits: Logits,
) -> Result:
    """Return micro and macro F1 at the stored thresholds, or at those that the held-out texts choose, half of them."""
    held_out = sets["validation"]
    values = logits["validation"]
    labels = held_out.labels
    assert labels is not None
    probabilities = expit(values)
    choosing, reported = (
        half_of(held_out.examples, choosing=which) if halves else np.ones(len(labels), np.bool_)
        for which in (True, False)
    )
    decision = stored
    if decision is None:
        best = best_thresholds(labels[choosing], probabilities[choosing]).tolist()
        decision = Decision(thresholds=dict(zip(names, best, strict=True)))
    thresholds = decision.thresholds_of(names)
    predictions = probabilities > thresholds
    scores = scores_of_labels(labels[reported], predictions[reported])
    header = ["label", "texts", "predicted", "precision", "recall", "f1", "threshold"]
    rows = [[*row] for row in zip(names, *zip(*scores, strict=True), thresholds, strict=True)]

    def write(folder: Path, _: Logits) -> None:
        each = (json.dumps(dict(zip(header, row, strict=True))) for row in rows)
        write_lines(folder / "labels.jsonl", each)
        write_predictions(folder, "validation", held_out, values, decision)

    samples = several_samples(labels, predictions, held_out.examples)
    table = _table(f"labels of {reported.sum():,} texts", header, rows)
    shown = table if len(names) <= MOST_PRINTED else ""
    return Result(samples, write, shown, decision=decision if stored is None else None)


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
    weights: Column | None = None,
) -> dict[str, Result]:
    """Return the results of the mean, or of the majority class and of regressions, on the development sets.

    The regressions have the `weights` of the run.
    """
    train = sets["train"]
    labels = train.labels
    assert labels is not None
    names = [name for name in sets if name.startswith("validation")]
    held_out = [text for name in names for text in sets[name].joined]
    usual = simple.most_frequent(labels, len(held_out))
    columns = {"mean": usual[:, None]}
    if train.label_names is not None:
        size = len(train.label_names)
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
            note = "" if len(learned) == len(train) else f" of {len(learned):,} rows"
            used = rows[: len(learned)]
            each = None if weights is None else weights[used]
            column = simple.by_regression(learned, labels[used], tested, each)
            predicted[f"regression on {name}{note}"] = column
        # As logits, which those of several labels are.
        columns = {
            name: column
            if labels.ndim == 2
            else (column[:, None] == np.arange(size)).astype(np.float32)
            for name, column in predicted.items()
        }
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
    examples = read_table(path, text_columns=columns)
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
    sizes = settings.model_dump(include={"max_seq_length", "doc_stride"})

    def build() -> Mapping[str, npt.NDArray[Any]]:
        texts = examples.first, examples.second
        features, is_cut = encode_texts(tokenizer, *texts, labels, **sizes)
        return {**features.arrays(), "cut": is_cut.sum()}

    made_from = {
        "texts": texts_hash(examples.first, examples.second or []),
        "labels": {n: hashlib.sha256(of.tobytes()).hexdigest() for n, of in labels.items()},
        "tokenizer": tokenizer.fingerprint,
        **sizes,
    }
    arrays = cached(settings.cache_dir, made_from, build)
    remarks = dict(examples.remarks)
    if cut := int(arrays["cut"]):
        remarks[f"longer than {settings.max_seq_length} tokens, cut"] = cut
    more = "".join(f"; {count:,} {remark}" for remark, count in remarks.items())
    features = Features.of(arrays)
    windows = "" if features.owner is None else f" in {len(features):,} windows"
    print_line(f"{name}: {len(examples):,} {noun}{windows}{more}")
    return features


def write_predictions(
    folder: Path, name: str, examples: TextExamples, logits: Floats, decision: Decision = NOTHING
) -> None:
    """Write the prediction of each example with its text; the set "validation_x" goes to predictions_x.jsonl."""
    path = folder / f"predictions{name.removeprefix('validation')}.jsonl"
    write_lines(path, (json.dumps(row) for row in _rows(examples, logits, decision)))
    print_line(f"{name}: {len(examples):,} predictions in {path}")


def _rows(
    examples: TextExamples, logits: Floats, decision: Decision
) -> Iterator[Mapping[str, object]]:
    assert examples.labels is not None
    names = examples.label_names
    second = examples.second
    for number, text in enumerate(examples.first):
        row: dict[str, object] = {"id": examples.ids[number], "text": text}
        if second is not None:
            row["second"] = second[number]
        label = examples.labels[number]
        if label.ndim == 1:
            assert names is not None
            has = expit(logits[number]) > decision.thresholds_of(names)
            sides = {"labels": label, "predicted": has}
            yield row | {n: [names[k] for k in np.flatnonzero(of)] for n, of in sides.items()}
            continue
        if names is None:
            # As in the file: 3.8, and not the nearest float32 in 16 digits.
            yield row | {"label": float(str(label)), "predicted": float(logits[number, 0])}
            continue
        best = int(np.argmax(logits[number]))
        probability = round(float(softmax(logits[number])[best]), 6)
        row |= {"label": names[int(label)], "predicted": names[best]}
        yield row | {"probability": probability}
