"""Labelled texts: `bert classify` for the user's table, `bert glue` for a task of GLUE or CLUE.

The training file defines the labels of a table; its scores are the accuracy, the macro F1, in which rare and frequent
labels have equal weight, and a confusion matrix. Tasks of GLUE and CLUE have their official metrics. MNLI has a second,
mismatched development set from other sources; the checkpoint is chosen on the matched set. With
`do_test` the test set is predicted too, in the form that the benchmark's server accepts.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bert_cli.arrays import Array, Floats32, Ints
from bert_cli.config.finetune import ClassifySettings, FinetuneSettings, GlueSettings
from bert_cli.data.finetune import simple
from bert_cli.data.finetune.features import Features, cached, encode_texts, texts_hash
from bert_cli.data.finetune.glue import TASKS, read_split, write_server_file
from bert_cli.data.finetune.labels import (
    Decision,
    confidences,
    decide,
    describe_calibration,
    describe_rare,
    kept_decision,
    label_counts,
    read_decision,
    scores_of_labels,
    several_samples,
    weights_of,
)
from bert_cli.data.finetune.split import folds_of, hold_out, warn_of_shared
from bert_cli.data.finetune.tables import (
    Column,
    TextExamples,
    confusion,
    read_table,
    samples_of,
    write_lines,
)
from bert_cli.data.io.rows import listed
from bert_cli.data.tokens.tokenizer import TextTokenizer
from bert_cli.errors import ConfigError
from bert_cli.processes import print_error, print_line
from bert_cli.statistics import Sample
from bert_cli.tasks.finetune.few import of_pairs
from bert_cli.tasks.model import models
from bert_cli.tasks.model.opened import Input
from bert_cli.tasks.model.vectors import open_vectors
from bert_cli.tasks.run import finetune
from bert_cli.tasks.run.task import Logits, Result, Task, half_of
from bert_cli.text import count, remarks_of

# Training rows, below which vectors of the start are a baseline: they cost less than an epoch and one evaluation.
FEW = 500
FOLDED = 1000  # rows of a table, below which all of them are tested
FOLDS = 5
METRICS = "accuracy", "macro_f1"  # of the user's table
MOST_PRINTED = 12  # labels of a printed table; files have all
MOST_CONFUSED = 1000  # labels of a written confusion matrix


def run(settings: ClassifySettings | GlueSettings) -> None:
    """Fine-tune on labelled texts and score held-out texts; raises the errors of `finetune.run`."""
    if isinstance(settings, GlueSettings):
        steps = finetune.steps_of(build_glue, ("dataset_dir",))
    else:
        scores_only = settings.validation_file is not None and not settings.do_training
        steps = finetune.steps_of(build, () if scores_only else ("train_file",))
    finetune.run(settings, steps)


# --- the user's table


def build(
    settings: ClassifySettings, tokenizer: TextTokenizer, source: models.Source | None
) -> Task:
    """Return the task: training rows and validation rows."""
    # A model that is only scored brings its labels and what it has chosen.
    scored = None if settings.do_training else source
    sets, folds = _read(settings, None if scored is None else scored.label_names)
    first = next(iter(sets.values()))
    labels = first.labels
    names = first.label_names
    assert labels is not None and names is not None
    encoded = sets if folds is None else {"train": first}
    more = _unlabelled(settings, settings.text_column, tokenizer, encoded)
    features = {
        name: features_of_texts(rows, name, settings, tokenizer) for name, rows in encoded.items()
    }
    train = features.pop("train", None)
    weights = None
    if train is not None:
        counts = label_counts(labels, len(names)).tolist()
        for number, which in enumerate(
            ("no training text, so nothing learns it", "one training text")
        ):
            few = [name for name, texts in zip(names, counts, strict=True) if texts == number]
            if few:
                print_error(f"warning: {count(len(few), 'label')} with {which}: {listed(few)}")
        if settings.class_weights is not None:
            weights = weights_of(labels, names, settings.class_weights)
            each = weights if train.owner is None else weights[train.owner]
            train = replace(train, labels={**train.labels, "label_weights": each})
    if rare := describe_rare(labels, names):
        print_line(rare)
    stored = None if scored is None else read_decision(scored.folder)
    task = Task(
        len(names),
        names,
        train,
        features,
        partial(_evaluate, sets, stored, folds is not None),
        "macro_f1" if rare or labels.ndim == 2 else "accuracy",
        held_out=_digest(sets),
        train_unlabelled=more,
        baselines=partial(_baselines, sets, METRICS, source, weights, folds),
        halves=settings.do_validation and settings.validation_file is None and folds is None,
        has_several_labels=labels.ndim == 2,
        folds=folds,
    )
    return of_pairs(task, settings, source) if settings.few else task


def _read(
    settings: ClassifySettings, names: Sequence[str] | None
) -> tuple[Mapping[str, TextExamples], Ints | None]:
    """Return the training and validation rows, as "train" and "validation", and the fold of each of few rows.

    In folds all rows are "train", and those that a fold tests "validation".
    """
    train_file = settings.train_file
    validation_file = settings.validation_file
    read = partial(
        read_table,
        text_columns=settings.text_column,
        label_columns=settings.label_column,
        label_separator=settings.label_separator,
    )
    if validation_file is not None and not settings.do_training:
        return {"validation": read(validation_file, label_names=names)}, None
    assert train_file is not None
    train = read(train_file, label_names=names)
    if validation_file is not None:
        held_out = read(validation_file, label_names=train.label_names)
        return {"train": train, "validation": held_out}, None
    if not settings.do_validation:
        return {"train": train}, None
    remarks = remarks_of(train.remarks)
    chooses = settings.evaluate_every_steps or settings.early_stop or settings.distillation.teacher
    if len(train) < FOLDED and settings.held_out_fraction is None and not chooses:
        if not settings.do_training:
            remedy = "pass a --validation-file, or the --held-out-fraction of its training"
            raise ConfigError(str(train_file), "has no rows that no fold trained on", remedy)
        folds = folds_of(train, settings.seeds if settings.seeds > 1 else FOLDS, settings.seed)
        tested = train.take(np.flatnonzero(folds >= 0))
        trainings = folds.max() + 2
        print_line(
            f"validation: {trainings - 1} folds by the seed test {len(tested):,} of the {len(train):,} rows of "
            f"{train_file}, each once{remarks}\n"
            f"run: {trainings} trainings follow, the last on all rows; --held-out-fraction 0.1 is one training"
        )
        return {"train": train, "validation": tested}, folds
    fraction = settings.held_out_fraction or 0.1
    print_line(f"validation: {fraction:.0%} of {train_file}, held out by the seed{remarks}")
    rest, held_out = hold_out(train, fraction, settings.seed)
    return {**({"train": rest} if settings.do_training else {}), "validation": held_out}, None


def _evaluate(
    sets: Mapping[str, TextExamples], stored: Decision | None, folded: bool, logits: Logits
) -> Result:
    """Return the scores of the answers to the held-out texts, by the `stored` decision or one that half of them choose.

    The other half keeps the temperature or not, which changes no answer. With `folded`, each half is answered by the
    other's decision, and the checkpoint has that of all texts. Only what is written is kept of the large logits.
    """
    held_out = sets["validation"]
    values = logits["validation"]
    labels = held_out.labels
    names = held_out.label_names
    examples = held_out.examples
    assert labels is not None and names is not None
    decision, answers = _decided(held_out, values, stored, folded=folded)
    reported = half_of(examples, choosing=False)
    calibration = ""
    probabilities = None
    if labels.ndim == 2:
        reported |= folded
        title = f"labels of {reported.sum():,} texts"
        header = ["label", "texts", "predicted", "precision", "recall", "f1", "threshold"]
        columns = scores_of_labels(labels[reported], answers[reported])
        rows = [*zip(names, *columns, decision.thresholds_of(len(names)), strict=True)]
        file = "labels.jsonl"
        lines = [dict(zip(header, row, strict=True)) for row in rows]
    else:
        title = f"confusion of all {len(held_out):,} held-out texts (columns: predicted)"
        header = ["true", *names]
        counts = confusion(labels, answers, len(names)) if len(names) <= MOST_CONFUSED else []
        rows = [(name, *row) for name, row in zip(names, counts, strict=False)]
        axes = {"labels": list(names), "rows": "true label", "columns": "predicted"}
        file = "confusion.json"
        lines = [{**axes, "counts": counts}] if counts else []
        if stored is None:
            decision = kept_decision(decision, values[reported], labels[reported])
        probabilities = confidences(values, decision.temperature)
        calibration = describe_calibration(decision, values[reported], labels[reported])
    if folded and stored is None and decision != Decision():
        decision = decide(values, labels, names)
        if calibration:
            calibration += f"\nfitted on all texts: temperature {decision.temperature:.4f}"

    def write(folder: Path, _: Logits) -> None:
        if lines:
            write_lines(folder / file, map(json.dumps, lines))
        else:
            print_line(f"{file} is not written: it would have {len(names):,} rows and columns")
        if calibration:
            print_line(calibration)
        _write_predictions(folder, "validation", held_out, answers, probabilities)

    table = ""
    if len(names) <= MOST_PRINTED:  # numbers that are no integers have four digits
        cells = [
            [f"{c:.4f}" if isinstance(c, float) else str(c) for c in row] for row in (header, *rows)
        ]
        width = max(len(cell) for row in cells for cell in row)
        table = "\n".join([title, *("  ".join(f"{c:>{width}}" for c in row) for row in cells)])
    samples = _score(METRICS, sets, {"validation": answers})
    return Result(samples, write, table, decision=decision)


def _decided(
    rows: TextExamples, logits: Floats32, stored: Decision | None = None, *, folded: bool = False
) -> tuple[Decision, Column]:
    """Return the `stored` decision, or the one that half of the texts choose, and the answers by it.

    With `folded`, the answers to this half are by the decision of the other half.
    """
    labels = rows.labels
    names = rows.label_names
    assert labels is not None and names is not None
    choosing = half_of(rows.examples, choosing=True)
    several = labels.ndim == 2
    decision = stored or decide(logits[choosing], labels[choosing], names)
    answers = decision.answers(logits, several=several)
    if folded and not choosing.all():
        opposite = decide(logits[~choosing], labels[~choosing], names)
        answers[choosing] = opposite.answers(logits[choosing], several=several)
    return decision, answers


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
    more = _unlabelled(settings, about.columns, tokenizer, sets)
    features = {
        split: features_of_texts(examples, split, settings, tokenizer)
        for split, examples in sets.items()
    }
    names = sets["validation"].label_names
    return Task(
        labels=1 if names is None else len(names),
        label_names=names,
        train=features.get("train"),
        train_unlabelled=more,
        development={n: columns for n, columns in features.items() if n.startswith("validation")},
        evaluate=partial(_evaluate_glue, name, sets),
        baselines=partial(_baselines, sets, about.metrics, source),
        best=about.best,
        held_out=_digest(sets),
        unlabelled={n: columns for n, columns in features.items() if n in about.server_files},
    )


def _evaluate_glue(name: str, sets: Mapping[str, TextExamples], logits: Logits) -> Result:
    """Return the metrics of each development set, with what writes predictions."""

    def predictions(logits: Logits) -> dict[str, Column]:
        """Return the number of each label or, for regression, the number that is predicted."""
        if TASKS[name].is_regression:
            return {split: values[:, 0] for split, values in logits.items()}
        return {split: np.argmax(values, axis=1) for split, values in logits.items()}

    answers = predictions(logits)
    probabilities = {split: confidences(values) for split, values in logits.items()}

    def write(folder: Path, test_logits: Logits) -> None:
        for split, column in answers.items():
            _write_predictions(folder, split, sets[split], column, probabilities[split])
        for split, column in predictions(test_logits).items():
            path = folder / TASKS[name].server_files[split]
            write_server_file(path, name, sets[split], column)
            print_line(f"{split}: {len(column):,} predictions in {path}")

    return Result(_score(TASKS[name].metrics, sets, answers), write)


# --- both


def _digest(sets: Mapping[str, TextExamples]) -> str:
    digests = (sets[name].examples.digest for name in sets if name.startswith("validation"))
    return " ".join(digests)


def _score(
    metrics: Sequence[str], sets: Mapping[str, TextExamples], answers: Mapping[str, Column]
) -> dict[str, Sample]:
    """Return the metrics of the answers to sets: numbers of labels, scores, or of several labels 0 and 1.

    Names of the mismatched set's metrics have a suffix.
    """
    samples: dict[str, Sample] = {}
    for split, column in answers.items():
        labels = sets[split].labels
        examples = sets[split].examples
        assert labels is not None
        if labels.ndim == 1:
            scored = samples_of(metrics, labels, column, examples)
        else:
            scored = several_samples(labels, column, examples)
        suffix = split.removeprefix("validation")
        samples |= {f"{metric}{suffix}": sample for metric, sample in scored.items()}
    return samples


def _baselines(
    sets: Mapping[str, TextExamples],
    metrics: Sequence[str],
    source: models.Source | None,
    weights: Column | None = None,
    folds: Ints | None = None,
) -> dict[str, Result]:
    """Return the results of the mean, or of the majority class and of regressions, on the development sets.

    The regressions have the `weights` of the run. With `folds`, each is learned as often, from all other rows.
    """
    train = sets["train"]
    labels = train.labels
    assert labels is not None
    names = [name for name in sets if name.startswith("validation")]
    texts = train.joined
    folded = folds is not None
    if folds is None:
        texts = [*texts, *(text for name in names for text in sets[name].joined)]
        folds = np.repeat([-1, 0], [len(train), len(texts) - len(train)])
    numbers = range(folds.max() + 1)
    parts = [(np.flatnonzero(folds[: len(train)] != n), folds == n) for n in numbers]
    inputs: dict[str, Any] = {}
    if train.label_names is not None:
        if simple.takes_long(train.joined, labels):
            print_line("baseline, regression on words: left out, it takes too long")
        else:
            inputs["words"] = np.array(texts, np.object_)
        if len(train) < FEW and source is not None:
            asked = [Input("texts", {"text": text}) for text in texts]
            inputs["vectors of the start"], _ = open_vectors(source, warns=False).of_texts(asked)
    usual = [simple.most_frequent(labels[rows], tested.sum()) for rows, tested in parts]
    columns = {"mean" if train.label_names is None else "majority class": usual}
    for name, values in inputs.items():
        columns[f"regression on {name}"] = [
            simple.by_regression(
                values[rows],
                labels[rows],
                values[tested],
                None if weights is None else weights[rows],
            )
            for rows, tested in parts
        ]
    positions = np.argsort(np.argsort(folds[folds >= 0], kind="stable"))
    ends = np.cumsum([len(sets[name]) for name in names])[:-1]
    results: dict[str, Result] = {}
    for name, predicted in columns.items():
        column = np.concatenate(predicted)[positions]
        answers = dict(zip(names, np.split(column, ends), strict=True))
        if labels.ndim == 2:
            answers = {n: _decided(sets[n], x, folded=folded)[1] for n, x in answers.items()}
        results[name] = Result(_score(metrics, sets, answers))
    return results


def _unlabelled(
    settings: ClassifySettings | GlueSettings,
    columns: Sequence[str],
    tokenizer: TextTokenizer,
    sets: Mapping[str, TextExamples],
) -> Features | None:
    """Return the texts that only the teacher labels; None without any, or if the task's texts are not columns.

    Prints a warning where one of the `sets` has texts that the run trains on.
    """
    scored = {name: examples.rows for name, examples in sets.items() if name != "train"}
    if "train" in sets:
        warn_of_shared("train", sets["train"].rows, scored)
    path = settings.distillation.unlabelled_file
    if path is None or not columns:
        return None
    examples = read_table(path, text_columns=columns)
    warn_of_shared("unlabelled_file", examples.rows, scored)
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

    def build() -> Mapping[str, Array]:
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
    features = Features.of(arrays)
    windows = "" if features.owner is None else f" in {len(features):,} windows"
    print_line(f"{name}: {len(examples):,} {noun}{windows}{remarks_of(remarks)}")
    return features


def _write_predictions(
    folder: Path, name: str, examples: TextExamples, answers: Column, probabilities: Column | None
) -> None:
    """Write the answer to each example with its text; the set "validation_x" goes to predictions_x.jsonl."""
    path = folder / f"predictions{name.removeprefix('validation')}.jsonl"
    assert examples.labels is not None
    names = examples.label_names
    lines = []
    for number, text in enumerate(examples.first):
        row: dict[str, object] = {"id": examples.ids[number], "text": text}
        if examples.second is not None:
            row["second"] = examples.second[number]
        label = examples.labels[number]
        answer = answers[number]
        if names is None:
            # As in the file: 3.8, and not the nearest float32 in 16 digits.
            row |= {"label": float(str(label)), "predicted": float(answer)}
        elif probabilities is None:
            sides = {"labels": label, "predicted": answer}
            row |= {n: [names[k] for k in np.flatnonzero(of)] for n, of in sides.items()}
        else:
            row |= {"label": names[label], "predicted": names[answer]}
            row["probability"] = round(float(probabilities[number]), 6)
        lines.append(json.dumps(row))
    write_lines(path, lines)
    print_line(f"{name}: {len(examples):,} predictions in {path}")
