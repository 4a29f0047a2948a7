"""`bert squad`: answers as spans of a paragraph, SQuAD 1.1 and 2.0, with the official scores.

A long paragraph is read through several windows, and a question's answer is the best span of all of them.
predictions.json and nbest_predictions.json have the form that the official scripts read; with version_2 a
threshold, chosen on the development set, decides when no answer is given.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from bert_cli.config.finetune import SquadSettings
from bert_cli.data.finetune.features import cached, file_hash
from bert_cli.data.finetune.metrics import Gold, squad_scores
from bert_cli.data.finetune.squad import Questions, gold_of, read_squad
from bert_cli.data.finetune.squad_answers import (
    NULL_THRESHOLD,
    Answers,
    answers,
    best_null_threshold,
    with_null_threshold,
)
from bert_cli.data.finetune.squad_windows import (
    Windows,
    arrays_of_windows,
    make_windows,
    windows_of,
)
from bert_cli.data.records.tokenizer import TextTokenizer
from bert_cli.errors import ConfigError
from bert_cli.files import JSON, write_json_atomically
from bert_cli.tasks.finetune.task import Logits, Result, Task
from bert_cli.tasks.run import finetune, start
from bert_cli.train.metrics import print_line

FILES = {
    False: {"train_file": "train-v1.1.json", "validation_file": "dev-v1.1.json"},
    True: {"train_file": "train-v2.0.json", "validation_file": "dev-v2.0.json"},
}
"""version_2 -> names of the official files."""
SET = "validation"


def run(settings: SquadSettings) -> None:
    """Fine-tune on the questions and score the answers; see `finetune.run` for what it raises."""
    finetune.run(settings, build)


def build(settings: SquadSettings, tokenizer: TextTokenizer, source: start.Source | None) -> Task:
    """Return the task: the windows of both files."""
    train = None
    if settings.do_training:
        train = _read(settings, tokenizer, "train_file")[1].features
    if not settings.do_validation:
        return Task(2, None, train, best="f1")
    questions, windows = _read(settings, tokenizer, "validation_file")
    evaluate = partial(_evaluate, settings, questions, windows, gold_of(questions))
    return Task(2, None, train, {SET: windows.features}, evaluate, best="f1")


def _read(
    settings: SquadSettings, tokenizer: TextTokenizer, which: str
) -> tuple[Questions, Windows]:
    """Return the questions of a file and their windows; print how many, and what was left out."""
    path, training = _file(settings, which), which == "train_file"
    questions = read_squad(path, version_2=settings.version_2, training=training)
    sizes: Mapping[str, int] = {
        "max_seq_length": settings.max_seq_length,
        "doc_stride": settings.doc_stride,
        "max_query_length": settings.max_query_length,
    }
    made_from = {
        "file": file_hash(path),
        "tokenizer": tokenizer.fingerprint,
        "version_2": settings.version_2,
        "training": training,
        **sizes,
    }
    arrays = cached(
        settings.cache_dir,
        made_from,
        lambda: arrays_of_windows(make_windows(questions, tokenizer, training=training, **sizes)),
    )
    windows = windows_of(arrays)
    print_line(f"{which}: {len(questions):,} questions in {len(windows.features):,} windows")
    for remark in (*questions.remarks, *windows.remarks):
        print_line(f"  {remark}")
    return questions, windows


def _file(settings: SquadSettings, which: str) -> Path:
    path: Path | None = getattr(settings, which)
    if path is not None:
        return path
    if settings.dataset_dir is None:
        remedy = f"give --{which.replace('_', '-')}, or --dataset-dir with both files"
        raise ConfigError(which, "is missing", remedy)
    return settings.dataset_dir / FILES[settings.version_2][which]


def _evaluate(
    settings: SquadSettings, questions: Questions, windows: Windows, gold: Gold, logits: Logits
) -> Result:
    """Return the official scores in per cent, with version_2 at the best threshold."""
    result = answers(
        questions,
        windows,
        logits[SET][:, 0],
        logits[SET][:, 1],
        n_best=settings.n_best_size,
        max_answer_length=settings.max_answer_length,
        version_2=settings.version_2,
        null_threshold=None,
    )
    threshold, run_files = None, dict[str, JSON]()
    if settings.version_2:
        threshold = settings.null_score_diff_threshold
        if threshold is None:
            best = best_null_threshold(result.null_odds, result.predictions, questions)
            threshold = best.f1_threshold
        chosen = with_null_threshold(result.predictions, result.null_odds, threshold)
        result = Answers(chosen, result.nbest, result.null_odds)
        run_files[NULL_THRESHOLD] = {"threshold": threshold}
    scores = {**squad_scores(gold, result.predictions)}
    return Result(scores, partial(_write, result, threshold), run_files=run_files)


def _write(result: Answers, threshold: float | None, folder: Path, _: Logits) -> None:
    """Write the answers, the best few of each question, and the odds that there is none."""
    write_json_atomically(folder / "predictions.json", result.predictions)
    write_json_atomically(folder / "nbest_predictions.json", result.nbest)
    more = ""
    if threshold is not None:
        write_json_atomically(folder / "null_odds.json", result.null_odds)
        more = f"; no answer where it scores {threshold:.4f} better than the best one"
    files = f"{folder}/predictions.json and nbest_predictions.json"
    print_line(f"{SET}: {len(result.predictions):,} answers in {files}{more}")
