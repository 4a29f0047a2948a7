"""Questions of SQuAD 1.1 and 2.0 from their JSON files.

Training needs the characters of an answer, scoring its text alone. A wrong field is an error that names
article, paragraph and question. An answer whose text is not at its offset is reported: the offsets of SQuAD
itself are right, those of translations often are not.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bert_cli.data.finetune.metrics import Gold
from bert_cli.data.finetune.tables import read_text
from bert_cli.errors import DataError

LISTED_IDS = 3
MISPLACED = "answers whose text is not at their answer_start, left out"
MISPLACED_KEPT = (
    "answers whose text is not at their answer_start, included: only their text is scored"
)
UNUSABLE = "questions left out of the training, as none of their answers is at its answer_start"

Object = Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """A text of the context and the character where it starts."""

    text: str
    start: int


@dataclass(frozen=True)
class Question:
    """A question about a text."""

    id: str
    question: str
    context: str
    answers: tuple[Answer, ...]
    """None for an impossible question, and in a test file."""
    is_impossible: bool


@dataclass(frozen=True)
class Questions:
    """The questions of a file in its order."""

    questions: tuple[Question, ...]
    remarks: tuple[str, ...] = ()
    """What was left out or is odd, a line each."""

    def __len__(self) -> int:
        """Return the number of questions q."""
        return len(self.questions)

    @property
    def can_be_scored(self) -> bool:
        """Return whether each question has gold answers or is marked as having none."""
        return all(question.answers or question.is_impossible for question in self.questions)


def remark_lines(ids: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return remark -> question ids as lines with their number and the first ids."""
    lines = []
    for remark, names in ids.items():
        shown = list(dict.fromkeys(names))[:LISTED_IDS]
        more = ", ..." if len(names) > len(shown) else ""
        lines.append(f"{len(names)} {remark} ({', '.join(shown)}{more})")
    return tuple(lines)


def read_squad(path: Path, *, version_2: bool, training: bool) -> Questions:
    """Return the questions of a SQuAD file.

    For training an answer whose text is not at its offset is left out, and the question if it has no other;
    otherwise such answers are included, as only their text is scored. The remarks count them. DataError,
    naming the question, for a missing or wrong field, a repeated id, an impossible question without
    `version_2`, and for training a question without answers.
    """
    questions: list[Question] = []
    names: set[str] = set()
    ids: dict[str, list[str]] = {}
    for where, paragraph, row in questions_in(path, read_json(path)):
        question = _question(paragraph, row, where)
        if question.id in names:
            raise DataError(where, "this id comes twice", "give each question its own")
        names.add(question.id)
        _check_answers(question, where, version_2=version_2, training=training)
        right = tuple(answer for answer in question.answers if _is_at_offset(answer, question))
        for _ in range(len(question.answers) - len(right)):
            ids.setdefault(MISPLACED if training else MISPLACED_KEPT, []).append(question.id)
        if not training or len(right) == len(question.answers):
            questions.append(question)
        elif right:
            questions.append(replace(question, answers=right))
        else:
            ids.setdefault(UNUSABLE, []).append(question.id)
    remarks = remark_lines(ids)
    if not questions:
        reasons = "; ".join(remarks) or "the file contains no questions"
        remedy = "give another file"
        raise DataError(
            str(path), f"nothing to {'train on' if training else 'read'}: {reasons}", remedy
        )
    return Questions(tuple(questions), remarks)


def read_gold(path: Path) -> Gold:
    """Return the gold answers of a SQuAD file. DataError for any other structure, or without answers."""
    answers: list[tuple[str, tuple[str, ...]]] = []
    unanswered, version_2 = "", False
    for where, _, row in questions_in(path, read_json(path)):
        texts = tuple(text_field(answer, "text", where) for answer in _answer_rows(row, where))
        answers.append((text_field(row, "id", where), texts))
        version_2 |= row.get("is_impossible") is True
        unanswered = unanswered or ("" if texts else where)
    if not answers:
        raise DataError(str(path), "contains no questions", "give a development file")
    return _gold(answers, version_2, unanswered)


def gold_of(questions: Questions) -> Gold:
    """Return the gold answers of questions, as `read_gold` does."""
    rows = questions.questions
    answers = [(row.id, tuple(answer.text for answer in row.answers)) for row in rows]
    unanswered = next((f"question '{row.id}'" for row in rows if not row.answers), "")
    return _gold(answers, any(row.is_impossible for row in rows), unanswered)


def _gold(answers: Sequence[tuple[str, tuple[str, ...]]], version_2: bool, unanswered: str) -> Gold:
    """Refuse a question without answers, unless some are impossible: then it counts as one of these."""
    if unanswered and not version_2:
        raise DataError(unanswered, "has no answers to score against", "give a development file")
    return Gold(answers, version_2)


def read_json(path: Path) -> Any:
    """Return the value of a JSON file. DataError with its line when it cannot be read."""
    remedy = "fix it or get the file again"
    try:
        return json.loads(read_text(path))
    except RecursionError:
        raise DataError(str(path), "is JSON nested too deeply", remedy) from None
    except json.JSONDecodeError as error:
        where = f"{path} (line {error.lineno}, column {error.colno})"
        raise DataError(where, f"is not JSON ({error.msg})", remedy) from error


def questions_in(path: Path, parsed: Any) -> Iterator[tuple[str, Object, Object]]:
    """Yield where each question is, its paragraph, and itself. DataError for any other structure."""
    if not isinstance(parsed, dict) or "data" not in parsed:
        remedy = 'give a SQuAD file, {"data": [{"paragraphs": [{"context": ..., "qas": [...]}]}]}'
        raise DataError(str(path), "has no 'data'", remedy)
    for article_name, article in _objects(parsed, "data", str(path), "article"):
        title = article.get("title")
        if isinstance(title, str):
            article_name += f" '{title}'"
        where = f"{path} ({article_name})"
        for part, paragraph in _objects(article, "paragraphs", where, "paragraph"):
            inside = f"{article_name}, {part}"
            for name, row in _objects(paragraph, "qas", f"{path} ({inside})", "question"):
                own = f" '{row['id']}'" if isinstance(row.get("id"), str) else ""
                yield f"{path} ({inside}, {name}{own})", paragraph, row


def _objects(owner: Object, key: str, where: str, kind: str) -> Iterator[tuple[str, Object]]:
    """Yield the objects of a list, each with its kind and number."""
    items = owner.get(key)
    if not isinstance(items, list):
        problem = f"'{key}' is not a list" if key in owner else f"has no '{key}'"
        raise DataError(where, problem, f"give a list of {kind}s")
    for number, item in enumerate(items, 1):
        if not isinstance(item, dict):
            raise DataError(where, f"{kind} {number} is not a JSON object", "fix it")
        yield f"{kind} {number}", item


def text_field(owner: Object, key: str, where: str) -> str:
    """Return a field that must be a text. DataError otherwise, and for half a surrogate pair."""
    value = owner.get(key)
    if not isinstance(value, str):
        problem = f"'{key}' is not a string" if key in owner else f"has no '{key}'"
        raise DataError(where, problem, "give it as a string")
    try:
        # JSON can spell half a character, "\ud83d", which no tokenizer accepts.
        value.encode()
    except UnicodeEncodeError as error:
        problem = f"'{key}' has half a surrogate pair at character {error.start}"
        raise DataError(where, problem, "fix it") from error
    return value


def _answer_rows(row: Object, where: str) -> list[Object]:
    """Return a question's answers as in the file; a test file has none."""
    if row.get("answers") is None:
        return []
    return [answer for _, answer in _objects(row, "answers", where, "answer")]


def _question(paragraph: Object, row: Object, where: str) -> Question:
    context = text_field(paragraph, "context", where)
    if not context.strip():
        raise DataError(where, "the context is empty", "fix the paragraph or leave it out")
    answers = []
    for answer in _answer_rows(row, where):
        start = answer.get("answer_start")
        if not isinstance(start, int):
            problem = "an answer has no integer 'answer_start'"
            raise DataError(where, problem, "give the character where the answer starts")
        answers.append(Answer(text_field(answer, "text", where), start))
    impossible = row.get("is_impossible", False)
    if not isinstance(impossible, bool):
        raise DataError(where, "'is_impossible' is neither true nor false", "fix it")
    name, text = text_field(row, "id", where), text_field(row, "question", where)
    return Question(name, text, context, tuple(answers), impossible)


def _check_answers(question: Question, where: str, *, version_2: bool, training: bool) -> None:
    if question.is_impossible and not version_2:
        problem = "is marked impossible, which SQuAD 1.1 does not have"
        raise DataError(where, problem, "give --version-2")
    if question.is_impossible and question.answers:
        raise DataError(where, "is marked impossible and has answers", "leave one of them out")
    if training and not question.answers and not question.is_impossible:
        raise DataError(where, "has no answers", "give a training file")


def _is_at_offset(answer: Answer, question: Question) -> bool:
    is_inside = answer.start >= 0 and bool(answer.text.strip())
    return is_inside and question.context.startswith(answer.text, answer.start)
