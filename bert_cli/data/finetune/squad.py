"""Questions of SQuAD 1.1 and 2.0 from their JSON files, and the official scores of answers.

F1 and exact match are computed as in `evaluate-v1.1.py` and `evaluate-v2.0.py` of Rajpurkar et al. 2016 and 2018.
The scripts differ when normalization leaves nothing of a text: 1.1 gives F1 0 for two empty texts, 2.0 gives 1. A
missing answer scores 0 in both.
"""

import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from pydantic import BaseModel

from bert_cli.data.finetune.tables import read_text
from bert_cli.errors import DataError
from bert_cli.files import parse_json
from bert_cli.statistics import Examples, Sample, identify, plain, sample_of
from bert_cli.text import remark_of

LISTED_IDS = 3
MISPLACED = "answer{s} whose text is not at answer_start, left out"
MISPLACED_KEPT = "answer{s} whose text is not at answer_start, included, as only texts count"
UNUSABLE = "question{s} left out of training: no answer is at its answer_start"

FORM = (
    '{"data": [{"paragraphs": [{"context": "...", "qas": [{"id": "1", "question": "...", '
    '"answers": [{"text": "...", "answer_start": 0}]}]}]}]}'
)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Answer:
    """A text of the context and the character where it starts."""

    text: str
    answer_start: int


@dataclass(frozen=True)
class Question:
    """A question about a text."""

    id: str
    question: str
    context: str
    answers: tuple[Answer, ...]  # none for an impossible question, and in a test file
    is_impossible: bool
    """Marked so or, without a mark, with no answers in a file where others have some."""


@dataclass(frozen=True)
class Gold:
    """The gold answers of questions."""

    answers: Mapping[str, tuple[str, ...]]  # texts by question id; none: without an answer
    version_2: bool  # whether any question is impossible: the rules of 2.0
    examples: Examples  # those about a paragraph are a group


class _Row(BaseModel, strict=True):
    id: str | int
    question: str
    answers: list[Answer] | None = None
    is_impossible: bool | None = None


class _Paragraph(BaseModel, strict=True):
    context: str
    qas: list[_Row]


class _Article(BaseModel, strict=True):
    paragraphs: list[_Paragraph]


class _File(BaseModel, strict=True):
    data: list[_Article]


def _read(path: Path) -> list[Question]:
    remedy = f"rows and JSON Lines are not read; write it in SQuAD's form: {FORM}"
    parsed = parse_json(str(path), read_text(path).encode(), _File, DataError, remedy)
    paragraphs: list[_Paragraph] = []
    for article in parsed.data:
        paragraphs += article.paragraphs
    has_answers = any(row.answers for paragraph in paragraphs for row in paragraph.qas)
    questions = []
    for paragraph in paragraphs:
        for row in paragraph.qas:
            # Files of SQuAD 1.1 have no mark.
            is_impossible = row.is_impossible
            if is_impossible is None:
                is_impossible = has_answers and row.answers == []
            answers = tuple(row.answers or ())
            question = Question(
                str(row.id), row.question, paragraph.context, answers, is_impossible
            )
            questions.append(question)
    return questions


def read_squad(
    path: Path, *, version_2: bool, training: bool
) -> tuple[list[Question], tuple[str, ...]]:
    """Return the questions of a SQuAD file, and a line for each kind of problem that was left out or tolerated.

    For training, answers whose text is not at their offset are left out, and so are questions without another
    answer; for scoring they are included, because only the text counts. Raises DataError with the field or question.
    """
    questions: list[Question] = []
    names: set[str] = set()
    ids: dict[str, list[str]] = {}
    for question in _read(path):
        fault = _fault(question, names, version_2=version_2, training=training)
        if fault:
            raise DataError(f"{path} (question '{question.id}')", *fault)
        names.add(question.id)
        right = tuple(
            answer
            for answer in question.answers
            if answer.answer_start >= 0
            and answer.text.strip()
            and question.context.startswith(answer.text, answer.answer_start)
        )
        for _ in range(len(question.answers) - len(right)):
            remark = MISPLACED if training else MISPLACED_KEPT
            ids.setdefault(remark, []).append(question.id)
        if not training or len(right) == len(question.answers):
            questions.append(question)
        elif right:
            questions.append(replace(question, answers=right))
        else:
            ids.setdefault(UNUSABLE, []).append(question.id)
    remarks = remark_lines(ids)
    if not questions:
        reasons = "; ".join(remarks) or "the file contains no questions"
        raise DataError(str(path), f"nothing to read: {reasons}", "use another file")
    return questions, remarks


def _fault(
    question: Question, names: set[str], *, version_2: bool, training: bool
) -> tuple[str, str] | None:
    """Return the problem of a question and its remedy, or None."""
    if question.id in names:
        return "comes twice", "use another id for each question"
    if not question.context.strip():
        return "has an empty context", "write its text, or leave out the paragraph"
    if question.is_impossible and not version_2:
        problem = "is marked impossible or has no answer, which SQuAD 1.1 does not allow"
        return problem, "pass --version-2"
    if question.is_impossible and question.answers:
        return "is marked impossible and has answers", "leave out one of them"
    if training and not question.is_impossible and not question.answers:
        return "has no answers", "use a training file"
    return None


def remark_lines(ids: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return a line for each remark, with the number of its questions and the first ids."""
    lines = []
    for remark, names in ids.items():
        shown = list(dict.fromkeys(names))[:LISTED_IDS]
        more = ", ..." if len(names) > len(shown) else ""
        lines.append(f"{remark_of(len(names), remark)} ({', '.join(shown)}{more})")
    return tuple(lines)


def gold_of(questions: Sequence[Question]) -> Gold:
    """Return the gold answers of questions."""
    version_2 = any(row.is_impossible for row in questions)
    for row in questions:
        if not row.answers and not version_2:
            problem = "has no answers to score against"
            raise DataError(f"question '{row.id}'", problem, "use a development file")
    texts = {row.id: tuple(answer.text for answer in row.answers) for row in questions}
    examples = identify(texts, [plain(row.context) for row in questions])
    return Gold(texts, version_2, examples)


def squad_samples(gold: Gold, predictions: Mapping[str, str]) -> dict[str, Sample]:
    """Return F1 and exact match in per cent under the official names of 1.1 or 2.0."""
    scores = np.zeros((len(gold.answers), 2))
    for number, (name, texts) in enumerate(gold.answers.items()):
        if name in predictions:
            scores[number] = best_score(texts, predictions[name], version_2=gold.version_2)
    f1, exact = (sample_of(gold.examples, "ratio", column, 1.0) for column in 100.0 * scores.T)
    if not gold.version_2:
        return {"f1": f1, "exact_match": exact}
    has_answers = np.array([bool(texts) for texts in gold.answers.values()])
    parts = {"": has_answers | True, "HasAns_": has_answers, "NoAns_": ~has_answers}
    samples = {}
    for prefix, rows in parts.items():
        if rows.any():
            samples[f"{prefix}exact"] = exact.take(rows)
            samples[f"{prefix}f1"] = f1.take(rows)
    return samples


def best_score(texts: Iterable[str], prediction: str, *, version_2: bool) -> tuple[float, float]:
    """Return F1 and exact match (0 or 1) of an answer, each the best among the gold texts."""
    golds = [normalize(text) for text in texts]
    if version_2:
        # As evaluate-v2.0.py: gold answers of punctuation alone do not count.
        golds = [text for text in golds if text] or [""]
    answer = normalize(prediction)
    best = max(_f1(text.split(), answer.split(), both_empty=float(version_2)) for text in golds)
    return best, float(answer in golds)


def normalize(text: str) -> str:
    """Return a text normalized for comparison: lower case, no ASCII punctuation or articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def _f1(gold: Sequence[str], answer: Sequence[str], *, both_empty: float) -> float:
    if not gold and not answer:
        return both_empty
    # Each word as often as both have it.
    same = (Counter(gold) & Counter(answer)).total()
    if not same:
        return 0.0
    precision = same / len(answer)
    recall = same / len(gold)
    return 2 * precision * recall / (precision + recall)
