"""`bert squad`: answers as spans of a paragraph, SQuAD 1.1 and 2.0, with the official scores.

A long paragraph is read through several windows, and the answer is the best span of all windows of the question.
predictions.json and nbest_predictions.json have the form that the official scripts read; with version_2 a
threshold, chosen on the development set, decides when no answer is given.
"""

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bert_cli.config.finetune import SquadSettings
from bert_cli.data.finetune import squad_windows
from bert_cli.data.finetune.features import cached
from bert_cli.data.finetune.split import warn_of_shared
from bert_cli.data.finetune.squad import Gold, Question, gold_of, read_squad, squad_samples
from bert_cli.data.tokens.tokenizer import TextTokenizer
from bert_cli.errors import ConfigError, logger
from bert_cli.files import write_json_atomically
from bert_cli.processes import print_line
from bert_cli.tasks.model import models
from bert_cli.tasks.run import finetune
from bert_cli.tasks.run.finetune_steps import steps_of
from bert_cli.tasks.run.task import Logits, Result, Task
from bert_cli.text import count


def run(settings: SquadSettings) -> None:
    """Fine-tune on the questions and score the answers; raises the errors of `finetune.run`."""
    finetune.run(settings, STEPS)


def build(settings: SquadSettings, tokenizer: TextTokenizer, source: models.Source | None) -> Task:
    """Return the task: the windows of both files."""
    train = None
    if settings.do_training:
        learned, windows = _read(settings, tokenizer, training=True)
        train = windows.features
    if not settings.do_validation:
        return Task(2, None, train, best="f1")
    questions, windows = _read(settings, tokenizer, training=False)
    if settings.do_training:
        trained, scored = ([[row.context] for row in rows] for rows in (learned, questions))
        warn_of_shared("train_file", trained, {"validation_file": scored})
    evaluate = partial(_evaluate, settings, questions, windows, gold_of(questions))
    return Task(2, None, train, {"validation": windows.features}, evaluate, best="f1")


def _read(
    settings: SquadSettings, tokenizer: TextTokenizer, *, training: bool
) -> tuple[Sequence[Question], squad_windows.Windows]:
    """Return the questions of a file and their windows; print their numbers and what was left out."""
    which = "validation_file"
    split = "dev"
    path = settings.validation_file
    if training:
        which = "train_file"
        split = "train"
        path = settings.train_file
    if path is None:
        if settings.dataset_dir is None:
            remedy = f"pass --{which.replace('_', '-')}, or --dataset-dir with both files"
            raise ConfigError(which, "is missing", remedy)
        version = "v2.0" if settings.version_2 else "v1.1"
        path = settings.dataset_dir / f"{split}-{version}.json"
    questions, remarks = read_squad(path, version_2=settings.version_2, training=training)
    sizes = settings.model_dump(include={"max_seq_length", "doc_stride", "max_query_length"})
    made_from = {
        "file": hashlib.sha256(path.read_bytes()).hexdigest(),
        "tokenizer": tokenizer.fingerprint,
        "version_2": settings.version_2,
        "training": training,
        **sizes,
    }
    arrays = cached(
        settings.cache_dir,
        made_from,
        lambda: squad_windows.arrays_of_windows(
            squad_windows.make_windows(questions, tokenizer, training=training, **sizes)
        ),
    )
    windows = squad_windows.windows_of(arrays)
    logger.info(
        f"{which}: {count(len(questions), 'question')} in {count(len(windows.features), 'window')}"
    )
    too_long = squad_windows.long_answers(questions, windows, settings.max_answer_length)
    for remark in (*remarks, *windows.remarks, *too_long):
        logger.info(f"  {remark}")
    return questions, windows


def _evaluate(
    settings: SquadSettings,
    questions: Sequence[Question],
    windows: squad_windows.Windows,
    gold: Gold,
    logits: Logits,
) -> Result:
    """Return the official scores in per cent, with version_2 at the threshold, by default the best one."""
    limits = settings.model_dump(include={"max_answer_length", "version_2"})
    result = squad_windows.answers(questions, windows, logits["validation"], **limits)
    predictions = result.predictions
    threshold = settings.null_score_diff_threshold
    run_files = {}
    note = ""
    if settings.version_2:
        if threshold is None:
            note = ", with the threshold of no answer chosen on the same questions"
            threshold = squad_windows.best_null_threshold(result.null_odds, predictions, questions)
        predictions = squad_windows.with_null_threshold(predictions, result.null_odds, threshold)
        run_files[squad_windows.NULL_THRESHOLD] = {"threshold": threshold}

    def write(folder: Path, _: Logits) -> None:
        write_json_atomically(folder / "predictions.json", predictions)
        write_json_atomically(folder / "nbest_predictions.json", result.nbest)
        ending = ""
        if threshold is not None:
            write_json_atomically(folder / "null_odds.json", result.null_odds)
            ending = f"; no answer if it scores {threshold:.4f} more than the best answer"
        files = f"{folder}/predictions.json and nbest_predictions.json"
        print_line(f"validation: {count(len(predictions), 'answer')} in {files}{ending}")

    samples = squad_samples(gold, predictions)
    counts = {
        name.replace("exact", "total"): sample.examples.size
        for name, sample in samples.items()
        if name.endswith("exact")  # of 2.0
    }
    return Result(samples, write, run_files=run_files, counts=counts, note=note)


STEPS = steps_of(build)
