"""`bert glue`: a task of GLUE or CLUE, scored with its official metrics.

MNLI has a second development set, of other sources than the training set; the checkpoint is chosen on the
matched one. With `do_test` the test set is predicted too, in the form that the benchmark's server accepts.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bert_cli.config.finetune import GlueSettings
from bert_cli.data.finetune.features import Features
from bert_cli.data.finetune.glue import TASKS, read_split, write_server_file
from bert_cli.data.finetune.tables import TextExamples, score
from bert_cli.data.records.tokenizer import TextTokenizer
from bert_cli.tasks.finetune.classify import features_of_texts, write_predictions
from bert_cli.tasks.run import finetune, start
from bert_cli.tasks.run.finetune import Floats, Logits, Result, Scores, Task
from bert_cli.train.metrics import print_line

PUBLISHED_LABELS = {
    "tnews": tuple(str(label) for label in range(100, 117) if label not in (105, 111)),
    "iflytek": tuple(str(label) for label in range(119)),
}
"""Of tasks whose labels are read from files; for synthetic examples, which have no files."""

Sets = Mapping[str, TextExamples]


def run(settings: GlueSettings) -> None:
    """Fine-tune on the task and score it; see `finetune.run` for what it raises."""
    name = str(settings.glue_task)
    labels = PUBLISHED_LABELS.get(name, TASKS[name].label_names)
    finetune.run(settings, build, ("dataset_dir",), labels)


def build(settings: GlueSettings, tokenizer: TextTokenizer, source: start.Source | None) -> Task:
    """Return the task: its sets and their official metrics."""
    name, folder = str(settings.glue_task), settings.dataset_dir
    assert folder is not None
    about = TASKS[name]

    def features(sets: Sets) -> dict[str, Features]:
        return {
            split: features_of_texts(examples, split, settings, tokenizer)
            for split, examples in sets.items()
        }

    splits = [split for split in about.files if split.startswith("validation")]
    development = {split: read_split(folder, name, split) for split in splits}
    tests = about.server_files if settings.do_test else ()
    test = {split: read_split(folder, name, split) for split in tests}
    train = {"train": read_split(folder, name, "train")} if settings.do_training else {}
    names = development["validation"].label_names
    return Task(
        labels=1 if names is None else len(names),
        label_names=names,
        train=features(train).get("train"),
        development=features(development),
        evaluate=partial(_evaluate, name, development, test),
        best=about.best,
        unlabelled=features(test),
    )


def _evaluate(name: str, development: Sets, test: Sets, logits: Logits) -> Result:
    """Return the metrics of each development set; those of the mismatched one have a suffix."""
    scores: Scores = {}
    for split, examples in development.items():
        assert examples.labels is not None
        predictions = _predictions(logits[split], examples.label_names)
        suffix = split.removeprefix("validation")
        values = score(TASKS[name].metrics, examples.labels, predictions)
        scores |= {f"{metric}{suffix}": value for metric, value in values.items()}

    def write(folder: Path, test_logits: Logits) -> None:
        for split, examples in development.items():
            write_predictions(folder, split, examples, logits[split])
        for split, examples in test.items():
            path = folder / TASKS[name].server_files[split]
            predictions = _predictions(test_logits[split], examples.label_names)
            write_server_file(path, name, examples, predictions)
            print_line(f"{split}: {len(examples):,} predictions in {path}")

    return Result(scores, write)


def _predictions(logits: Floats, label_names: Sequence[str] | None) -> npt.NDArray[Any]:
    """Return the label numbers [n], or for regression the numbers themselves, from logits [n, L]."""
    return logits[:, 0] if label_names is None else np.argmax(logits, axis=1)
