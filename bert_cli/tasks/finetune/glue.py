"""`bert glue`: a task of GLUE or CLUE, scored with its official metrics.

The two benchmarks differ in their files alone. MNLI has a second development set, of other sources
than the training set; the checkpoint is chosen on the matched one. With `do_test` the test set is
predicted too, in the form that the benchmark's server takes.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from bert_cli.config.finetune import CLUE_TASKS, GlueSettings
from bert_cli.data.finetune import clue, glue
from bert_cli.data.finetune.examples import TextExamples
from bert_cli.data.finetune.features import Features
from bert_cli.data.finetune.metrics import score
from bert_cli.data.records.tokenizer import TextTokenizer
from bert_cli.tasks.finetune.task import Logits, Scores, Task
from bert_cli.tasks.finetune.texts import features_of_texts, predictions_of, write_predictions
from bert_cli.tasks.run import finetune, start
from bert_cli.train.metrics import print_line

MISMATCHED = "_mismatched"
# The labels of tasks whose published files tell them; needed where there are no files.
PUBLISHED_LABELS = {
    "tnews": tuple(str(label) for label in range(100, 117) if label not in (105, 111)),
    "iflytek": tuple(str(label) for label in range(119)),
}


def run(settings: GlueSettings) -> None:
    """Fine-tune on the task and score it; see `finetune.run` for what it raises."""
    name = str(settings.glue_task)
    tasks: Mapping[str, clue.ClueTask | glue.GlueTask] = {**glue.TASKS, **clue.TASKS}
    labels = PUBLISHED_LABELS.get(name, tasks[name].label_names)
    finetune.run(settings, build, ("dataset_dir",), labels)


def build(settings: GlueSettings, tokenizer: TextTokenizer, source: start.Source | None) -> Task:
    """The task's sets, with its official metrics."""
    name = str(settings.glue_task)
    sets = ["validation"]
    if name not in CLUE_TASKS and f"validation{MISMATCHED}" in glue.TASKS[name].files:
        sets.append(f"validation{MISMATCHED}")
    development = {split: _read(settings, split) for split in sets}
    tests = {}
    if settings.do_test:
        tests = {split: _read(settings, split) for split in _test_sets(name)}
    train = _read(settings, "train") if settings.do_training else None
    names = development["validation"].label_names

    def features(split: str, examples: TextExamples) -> Features:
        return features_of_texts(examples, split, settings, tokenizer)

    return Task(
        labels=len(names) if names is not None else 1,
        label_names=names,
        train=features("train", train) if train is not None else None,
        development={split: features(split, examples) for split, examples in development.items()},
        score=partial(_score, name, development),
        best=_best(name),
        write=partial(_write, name, development, tests, names),
        more={split: features(split, examples) for split, examples in tests.items()},
    )


def _read(settings: GlueSettings, split: str) -> TextExamples:
    name, folder = str(settings.glue_task), settings.dataset_dir
    assert folder is not None
    read = clue.read_clue if name in CLUE_TASKS else glue.read_glue
    return read(folder, name, split)


def _test_sets(name: str) -> list[str]:
    return ["test"] if name in CLUE_TASKS else list(glue.TASKS[name].server_files)


def _best(name: str) -> str:
    return "accuracy" if name in CLUE_TASKS else glue.TASKS[name].best


def _score(name: str, development: dict[str, TextExamples], logits: Logits) -> Scores:
    """The metrics of each development set, a mismatched one's under names that print_line so."""
    metrics = ("accuracy",) if name in CLUE_TASKS else glue.TASKS[name].metrics
    scores: Scores = {}
    for split, examples in development.items():
        assert examples.labels is not None
        predictions = predictions_of(logits[split], examples.label_names)
        after = MISMATCHED if split.endswith(MISMATCHED) else ""
        found = score(metrics, examples.labels, predictions)
        scores |= {f"{metric}{after}": value for metric, value in found.items()}
    return scores


def _write(
    name: str,
    development: dict[str, TextExamples],
    tests: dict[str, TextExamples],
    label_names: tuple[str, ...] | None,
    folder: Path,
    logits: Logits,
) -> None:
    """What is said of the development sets, and the files for the benchmark's server."""
    for split, examples in development.items():
        write_predictions(folder, split, examples, logits[split])
    for split, examples in tests.items():
        predictions = predictions_of(logits[split], label_names)
        if name in CLUE_TASKS:
            path = folder / clue.server_file(name)
            clue.write_server_file(path, name, examples, predictions)
        else:
            path = folder / glue.TASKS[name].server_files[split]
            glue.write_server_file(path, name, examples, predictions)
        print_line(f"{split}: {len(examples):,} predictions in {path}")
