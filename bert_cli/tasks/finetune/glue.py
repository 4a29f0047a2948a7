"""`bert glue`: a task of GLUE or CLUE, with its official metrics.

MNLI has a second, mismatched development set from other sources; the checkpoint is chosen on the matched set. With
`do_test` the test set is predicted too, in the form that the benchmark's server accepts.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np

from bert_cli.arrays import Array
from bert_cli.config.finetune import GlueSettings
from bert_cli.data.finetune.glue import TASKS, read_split, write_server_file
from bert_cli.data.finetune.labels import confidences
from bert_cli.data.finetune.tables import TextExamples
from bert_cli.data.tokens.tokenizer import TextTokenizer
from bert_cli.processes import print_line
from bert_cli.tasks.finetune.texts import (
    baselines_of,
    digest_of,
    features_of_texts,
    score,
    unlabelled,
    write_predictions,
)
from bert_cli.tasks.model import models
from bert_cli.tasks.run import finetune
from bert_cli.tasks.run.finetune_steps import steps_of
from bert_cli.tasks.run.task import Logits, Result, Task
from bert_cli.text import count


def run(settings: GlueSettings) -> None:
    """Fine-tune on a task and score its development sets; raises the errors of `finetune.run`."""
    finetune.run(settings, STEPS)


def build(settings: GlueSettings, tokenizer: TextTokenizer, source: models.Source | None) -> Task:
    """Return the task: its sets and their official metrics."""
    name = str(settings.glue_task)
    folder = settings.dataset_dir
    assert folder is not None
    about = TASKS[name]

    splits = [split for split in about.files if split.startswith("validation")]
    if settings.do_training:
        splits.insert(0, "train")
    if settings.do_test:
        splits += about.server_files
    sets = {split: read_split(folder, name, split) for split in splits}
    without_labels = unlabelled(settings, about.columns, tokenizer, sets)
    features = {
        split: features_of_texts(examples, split, settings, tokenizer)
        for split, examples in sets.items()
    }
    names = sets["validation"].label_names
    # A regression has one output.
    labels = 1 if names is None else len(names)
    return Task(
        labels=labels,
        label_names=names,
        train=features.get("train"),
        train_unlabelled=without_labels,
        development={n: columns for n, columns in features.items() if n.startswith("validation")},
        evaluate=partial(_evaluate, name, sets),
        baselines=partial(baselines_of, sets, about.metrics, source),
        best=about.best,
        held_out=digest_of(sets),
        unlabelled={n: columns for n, columns in features.items() if n in about.server_files},
    )


def _evaluate(name: str, sets: Mapping[str, TextExamples], logits: Logits) -> Result:
    """Return the metrics of each development set, with what writes predictions."""

    def predictions(logits: Logits) -> dict[str, Array]:
        """Return the number of each label or, for regression, the number that is predicted."""
        if TASKS[name].is_regression:
            return {split: values[:, 0] for split, values in logits.items()}
        return {split: np.argmax(values, axis=1) for split, values in logits.items()}

    answers = predictions(logits)
    probabilities = {split: confidences(values) for split, values in logits.items()}

    def write(folder: Path, test_logits: Logits) -> None:
        for split, column in answers.items():
            write_predictions(folder, split, sets[split], column, probabilities[split])
        for split, column in predictions(test_logits).items():
            path = folder / TASKS[name].server_files[split]
            write_server_file(path, name, sets[split], column)
            print_line(f"{split}: {count(len(column), 'prediction')} in {path}")

    return Result(score(TASKS[name].metrics, sets, answers), write)


STEPS = steps_of(build, lambda _: ("dataset_dir",))
