"""`bert squad`: answers as spans of a paragraph, SQuAD 1.1 and 2.0, with the official scores.

A long paragraph is read through several windows, and a question's answer is the best span of all of
them. predictions.json and nbest_predictions.json have the form that the official scripts read; with
version_2 a threshold, chosen on the development set, decides when no answer is given.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bert_cli.config.finetune import SquadSettings
from bert_cli.data.finetune.features import cached, file_hash
from bert_cli.data.finetune.squad import Questions, read_squad
from bert_cli.data.finetune.squad_answers import (
    NULL_THRESHOLD,
    Answers,
    answers,
    best_null_threshold,
    with_null_threshold,
)
from bert_cli.data.finetune.squad_score import Gold, gold_of, score
from bert_cli.data.finetune.squad_windows import (
    Windows,
    arrays_of_windows,
    make_windows,
    windows_of,
)
from bert_cli.data.records.tokenizer import TextTokenizer
from bert_cli.errors import ConfigError
from bert_cli.files import write_json_atomically
from bert_cli.tasks.finetune.task import Logits, Scores, Task
from bert_cli.tasks.run import finetune, start
from bert_cli.train.metrics import print_line

# version_2 -> names of the official files.
FILES = {
    False: {"train_file": "train-v1.1.json", "validation_file": "dev-v1.1.json"},
    True: {"train_file": "train-v2.0.json", "validation_file": "dev-v2.0.json"},
}
SET = "validation"


def run(settings: SquadSettings) -> None:
    """Fine-tune on the questions and score the answers; see `finetune.run` for what it raises."""
    finetune.run(settings, build)


@dataclass(frozen=True)
class _Development:
    """The questions to score on, and the windows that they are read through."""

    questions: Questions
    gold: Gold
    windows: Windows
    settings: SquadSettings

    def score(self, logits: Logits) -> Scores:
        """The official scores in per cent, with version_2 at the best threshold."""
        found, _ = self._answers(logits)
        return {**score(self.gold, found.predictions)}

    def write(self, folder: Path, logits: Logits) -> None:
        """The answers, the best few of each question, and how sure the model is of none."""
        found, threshold = self._answers(logits)
        write_json_atomically(folder / "predictions.json", found.predictions)
        write_json_atomically(folder / "nbest_predictions.json", found.nbest)
        told = "predictions.json and nbest_predictions.json"
        if threshold is not None:
            write_json_atomically(folder / "null_odds.json", found.null_odds)
            told += f"; no answer where it scores {threshold:.4f} better than the best one"
        print_line(f"{SET}: {len(self.questions):,} answers in {folder}/{told}")

    def keep(self, folder: Path, logits: Logits) -> None:
        """Write the threshold for "no answer", which `bert predict` uses too."""
        threshold = self._answers(logits)[1] if self.settings.version_2 else None
        if threshold is not None:
            write_json_atomically(folder / NULL_THRESHOLD, {"threshold": threshold})

    def _answers(self, logits: Logits) -> tuple[Answers, float | None]:
        settings = self.settings
        found = answers(
            self.questions,
            self.windows,
            logits[SET][:, 0],
            logits[SET][:, 1],
            n_best=settings.n_best_size,
            max_answer_length=settings.max_answer_length,
            version_2=settings.version_2,
            null_threshold=None,
        )
        if not settings.version_2:
            return found, None
        threshold = settings.null_score_diff_threshold
        if threshold is None:
            best = best_null_threshold(found.null_odds, found.predictions, self.questions)
            threshold = best.f1_threshold
        kept = with_null_threshold(found.predictions, found.null_odds, threshold)
        return Answers(kept, found.nbest, found.null_odds), threshold


def build(settings: SquadSettings, tokenizer: TextTokenizer, source: start.Source | None) -> Task:
    """The windows of both files, with the official scores."""
    train = None
    if settings.do_training:
        train = _read(settings, tokenizer, "train_file")[1].features
    if not settings.do_validation:
        return Task(2, None, train, {}, score=lambda logits: {}, best="f1")
    questions, windows = _read(settings, tokenizer, "validation_file")
    held_out = _Development(questions, gold_of(questions), windows, settings)
    sets = {SET: windows.features}
    return Task(
        2, None, train, sets, held_out.score, best="f1", write=held_out.write, keep=held_out.keep
    )


def _read(
    settings: SquadSettings, tokenizer: TextTokenizer, which: str
) -> tuple[Questions, Windows]:
    """The questions of a file and their windows; says how many, and what was left out."""
    path, training = _file(settings, which), which == "train_file"
    questions = read_squad(path, version_2=settings.version_2, training=training)
    cut: Mapping[str, int] = {
        "max_seq_length": settings.max_seq_length,
        "doc_stride": settings.doc_stride,
        "max_query_length": settings.max_query_length,
    }

    def make() -> Windows:
        return make_windows(questions, tokenizer, training=training, **cut)

    made_from = {
        "file": file_hash(path),
        "tokenizer": tokenizer.fingerprint,
        "version_2": settings.version_2,
        "training": training,
        **cut,
    }
    arrays, _ = cached(settings.cache_dir, made_from, lambda: arrays_of_windows(make()))
    windows = windows_of(arrays)
    print_line(f"{which}: {len(questions):,} questions in {len(windows.features):,} windows")
    for remark in (*questions.remarks, *windows.remarks):
        print_line(f"  {remark}")
    return questions, windows


def _file(settings: SquadSettings, which: str) -> Path:
    given: Path | None = getattr(settings, which)
    if given is not None:
        return given
    if settings.dataset_dir is None:
        flag = which.replace("_", "-")
        raise ConfigError(f"{which}: is not given; give --{flag}, or --dataset-dir with both files")
    return settings.dataset_dir / FILES[settings.version_2][which]
