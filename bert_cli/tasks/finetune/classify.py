"""`bert classify`: the labels of texts in a table.

The training file defines the labels. The scores are the accuracy, the macro F1, in which rare and frequent labels have
equal weight, and a confusion matrix.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from bert_cli.arrays import Ints
from bert_cli.config.finetune import ClassifySettings
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
    weights_of,
)
from bert_cli.data.finetune.split import folds_of, hold_out
from bert_cli.data.finetune.tables import (
    TextExamples,
    confusion,
    read_table,
    write_lines,
)
from bert_cli.data.io.rows import listed
from bert_cli.data.tokens.tokenizer import TextTokenizer
from bert_cli.errors import ConfigError, logger
from bert_cli.processes import print_line
from bert_cli.tasks.finetune.few import of_pairs
from bert_cli.tasks.finetune.texts import (
    baselines_of,
    decided,
    digest_of,
    features_of_texts,
    score,
    unlabelled,
    write_predictions,
)
from bert_cli.tasks.model import models
from bert_cli.tasks.run import finetune
from bert_cli.tasks.run.finetune_steps import steps_of
from bert_cli.tasks.run.task import Logits, Result, Task, half_of
from bert_cli.text import count, remarks_of

# A tenth of 1,000 rows shows an accuracy of 0.8 within 0.08; folds of fewer rows score them all.
FOLDED = 1000  # rows of a table, below which all of them are tested
FOLDS = 5
METRICS = "accuracy", "macro_f1"  # of the user's table
MOST_PRINTED = 12  # labels of a printed table; files have all
# A matrix of a million cells; as JSON it is some 3 MB.
MOST_CONFUSED = 1000  # labels of a written confusion matrix


def run(settings: ClassifySettings) -> None:
    """Fine-tune on labelled texts and score held-out texts; raises the errors of `finetune.run`."""
    finetune.run(settings, STEPS)


def required_settings(settings: ClassifySettings) -> Sequence[str]:
    """Return the settings that a run needs."""
    scores_only = settings.validation_file is not None and not settings.do_training
    return () if scores_only else ("train_file",)


def build(
    settings: ClassifySettings, tokenizer: TextTokenizer, source: models.Source | None
) -> Task:
    """Return the task: training rows and validation rows."""
    # A model that is only scored brings its labels and what it has chosen.
    scored = None if settings.do_training else source
    scored_names = None if scored is None else scored.label_names
    sets, folds = _read(settings, scored_names)
    first = next(iter(sets.values()))
    labels = first.labels
    names = first.label_names
    assert labels is not None and names is not None
    encoded = sets if folds is None else {"train": first}
    without_labels = unlabelled(settings, settings.text_column, tokenizer, encoded)
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
                logger.warning(f"warning: {count(len(few), 'label')} with {which}: {listed(few)}")
        if settings.class_weights is not None:
            weights = weights_of(labels, names, settings.class_weights)
            weights_of_rows = weights
            if train.owner is not None:  # several rows of a long text
                weights_of_rows = weights[train.owner]
            train = replace(train, labels={**train.labels, "label_weights": weights_of_rows})
    rare = describe_rare(labels, names)
    if rare:
        logger.info(rare)
    stored = None
    scores_all = False
    if scored is not None:
        stored = read_decision(scored.folder)
        scores_all = settings.validation_file is not None  # the file is scored as it is
    task = Task(
        len(names),
        names,
        train,
        features,
        partial(_evaluate, sets, stored, folded=folds is not None, scores_all=scores_all),
        "macro_f1" if rare or labels.ndim == 2 else "accuracy",
        held_out=digest_of(sets),
        train_unlabelled=without_labels,
        baselines=partial(baselines_of, sets, METRICS, source, weights, folds),
        halves=settings.do_validation and settings.validation_file is None and folds is None,
        has_several_labels=labels.ndim == 2,
        folds=folds,
    )
    if not settings.few:
        return task
    return of_pairs(task, settings, source)


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
        number = settings.seeds if settings.seeds > 1 else FOLDS
        folds = folds_of(train, number, settings.seed)
        tested = train.take(np.flatnonzero(folds >= 0))
        trainings = folds.max() + 2
        logger.info(
            f"validation: {trainings - 1} folds by the seed test {len(tested):,} of the {len(train):,} rows of "
            f"{train_file}, each once{remarks}\n"
            f"run: {trainings} trainings follow, the last on all rows; --held-out-fraction 0.1 is one training"
        )
        return {"train": train, "validation": tested}, folds
    fraction = settings.held_out_fraction or 0.1
    logger.info(f"validation: {fraction:.0%} of {train_file}, held out by the seed{remarks}")
    kept, held_out = hold_out(train, fraction, settings.seed)
    if not settings.do_training:
        return {"validation": held_out}, None
    return {"train": kept, "validation": held_out}, None


def _evaluate(
    sets: Mapping[str, TextExamples],
    stored: Decision | None,
    logits: Logits,
    *,
    folded: bool,
    scores_all: bool,
) -> Result:
    """Return the scores of the answers to the held-out texts, by the `stored` decision or one that half of them choose.

    The other half keeps the temperature or not, which changes no answer. With `folded`, each half has the other's
    decision, and the checkpoint that of all texts. With `scores_all`, the table is of all. No large logits are kept.
    """
    held_out = sets["validation"]
    values = logits["validation"]
    labels = held_out.labels
    names = held_out.label_names
    assert labels is not None and names is not None
    decision, answers = decided(held_out, values, stored, folded=folded)
    reported = half_of(held_out.examples, choosing=False) | scores_all
    calibration = ""
    probabilities = None
    if labels.ndim == 2:
        reported |= folded
        title = f"labels of {count(reported.sum(), 'text')}"
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
        write_predictions(folder, "validation", held_out, answers, probabilities)

    table = ""
    if len(names) <= MOST_PRINTED:
        table = _table(title, [header, *rows])
    return Result(score(METRICS, sets, {"validation": answers}), write, table, decision=decision)


def _table(title: str, rows: Sequence[Sequence[object]]) -> str:
    """Return rows below a title, in columns of equal width; numbers that are no integers have four digits."""
    lines = []
    for row in rows:
        cells = [f"{cell:.4f}" if isinstance(cell, float) else str(cell) for cell in row]
        lines.append(cells)
    width = max(map(len, chain.from_iterable(lines)))
    return "\n".join([title, *("  ".join(f"{cell:>{width}}" for cell in line) for line in lines)])


STEPS = steps_of(build, required_settings)
