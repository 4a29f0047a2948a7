"""SQuAD 1.1 and 2.0: from the JSON file to questions.

Development files are read for their answers' texts alone, training files for the places too. What
does not fit is an error that names article, paragraph and question, and an answer whose text is not
where it says is counted and told: SQuAD's own offsets are right, those of translations often not.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_cli.data.finetune.examples import read_text
from bert_cli.errors import DataError

SHOWN = 3
"""Ids that a remark lists."""
MISPLACED = "answers whose text is not at their answer_start, left out"
MISPLACED_KEPT = "answers whose text is not at their answer_start, kept: only their text is scored"
UNUSABLE = "questions left out of the training, as none of their answers is at its answer_start"


@dataclass(frozen=True)
class Answer:
    """A text of the context and the character where it starts there."""

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
class Remark:
    """Something that was left out or changed, how often, and the first questions it befell."""

    what: str
    count: int
    first_ids: tuple[str, ...]

    def __str__(self) -> str:
        """One line for the person who runs it."""
        more = ", ..." if self.count > len(self.first_ids) else ""
        return f"{self.count} {self.what} ({', '.join(self.first_ids)}{more})"


class Remarks:
    """Collects ids by what befell them."""

    def __init__(self) -> None:
        self._ids: dict[str, list[str]] = {}

    def add(self, what: str, identity: str) -> None:
        """Note it of a question; it may befall one several times."""
        self._ids.setdefault(what, []).append(identity)

    def all(self) -> tuple[Remark, ...]:
        """In the order of their first coming."""
        return tuple(
            Remark(what, len(ids), tuple(dict.fromkeys(ids))[:SHOWN])
            for what, ids in self._ids.items()
        )


@dataclass(frozen=True)
class Questions:
    """The questions of a file in its order."""

    questions: tuple[Question, ...]
    remarks: tuple[Remark, ...] = ()

    def __len__(self) -> int:
        """Questions q."""
        return len(self.questions)

    @property
    def can_be_scored(self) -> bool:
        """Whether each has its gold answers, or is marked as having none."""
        return all(question.answers or question.is_impossible for question in self.questions)


def read_squad(path: Path, *, version_2: bool, training: bool) -> Questions:
    """The questions of a SQuAD file.

    For training an answer whose text is not at its offset is left out, and a question with it when
    it has no other; both are told in the remarks. Otherwise such answers stay, as only their text
    is scored. DataError naming the question for a missing or odd field, an id that comes twice, an
    impossible question without `version_2`, and for training a question without answers.
    """
    parsed = read_json(path)
    questions: list[Question] = []
    ids: set[str] = set()
    found = Remarks()
    for where, paragraph, row in questions_in(path, parsed):
        context = text_field(paragraph, "context", where)
        if not context.strip():
            raise DataError(f"{where}: its context is empty; mend the paragraph or leave it out")
        question = _question(row, context, where)
        if question.id in ids:
            raise DataError(f"{where}: this id comes twice; give each question its own")
        ids.add(question.id)
        _check_answers(question, where, version_2=version_2, training=training)
        right = tuple(answer for answer in question.answers if _is_at_its_offset(answer, context))
        for _ in range(len(question.answers) - len(right)):
            found.add(MISPLACED if training else MISPLACED_KEPT, question.id)
        if not training or len(right) == len(question.answers):
            questions.append(question)
        elif right:
            questions.append(Question(question.id, question.question, context, right, False))
        else:
            found.add(UNUSABLE, question.id)
    if not questions:
        told = "; ".join(map(str, found.all())) or "holds no questions"
        raise DataError(f"{path}: nothing is left to {'train on' if training else 'read'}: {told}")
    return Questions(tuple(questions), found.all())


def read_json(path: Path) -> Any:
    """What a JSON file holds. DataError with its line when it cannot be read."""
    text = read_text(path)
    try:
        return json.loads(text)
    except RecursionError:
        raise DataError(
            f"{path}: is JSON nested too deeply; take it from its source again"
        ) from None
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path} (line {error.lineno}, column {error.colno}): is no JSON ({error.msg}); "
            "mend it or take it from its source again"
        ) from error


def questions_in(
    origin: Path | str, parsed: Any
) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """Where each question stands, its paragraph, and itself. DataError for any other structure."""
    if not isinstance(parsed, dict) or "data" not in parsed:
        raise DataError(
            f"{origin}: has no 'data'; give a file in SQuAD's form, "
            '{"data": [{"paragraphs": [{"context": ..., "qas": [...]}]}]}'
        )
    for place, article in _objects(parsed, "data", str(origin), "article"):
        title = article.get("title")
        named = f"{place} '{title}'" if isinstance(title, str) else place
        for part, paragraph in _objects(article, "paragraphs", f"{origin} ({named})", "paragraph"):
            inside = f"{named}, {part}"
            for last, row in _objects(paragraph, "qas", f"{origin} ({inside})", "question"):
                number = row.get("id")
                told = f"{inside}, {last}" + (f" '{number}'" if isinstance(number, str) else "")
                yield f"{origin} ({told})", paragraph, row


def _objects(
    owner: Mapping[str, Any], key: str, where: str, kind: str
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The objects of a list, and how each is called."""
    items = owner.get(key)
    if not isinstance(items, list):
        wrong = f"its '{key}' is no list" if key in owner else f"has no '{key}'"
        raise DataError(f"{where}: {wrong}; give a list of {kind}s")
    for number, item in enumerate(items, 1):
        if not isinstance(item, dict):
            raise DataError(f"{where}: {kind} {number} is no JSON object; mend it")
        yield f"{kind} {number}", item


def text_field(owner: Mapping[str, Any], key: str, where: str) -> str:
    """A field that has to be a text. DataError otherwise, and for half of a surrogate pair."""
    value = owner.get(key)
    if not isinstance(value, str):
        wrong = f"its '{key}' is no string" if key in owner else f"has no '{key}'"
        raise DataError(f"{where}: {wrong}; give it as a string")
    try:
        # JSON may spell half a character, "\ud83d", which no tokenizer takes.
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: its '{key}' holds half a surrogate pair at character {error.start}; mend it"
        ) from error
    return value


def answer_rows(row: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    """A question's answers as the file has them; a test file has none."""
    if row.get("answers") is None:
        return []
    return [answer for _, answer in _objects(row, "answers", where, "answer")]


def _question(row: Mapping[str, Any], context: str, where: str) -> Question:
    answers = []
    for answer in answer_rows(row, where):
        start = answer.get("answer_start")
        if not isinstance(start, int):
            raise DataError(
                f"{where}: an answer has no whole number as 'answer_start'; give the character "
                "where it starts"
            )
        answers.append(Answer(text_field(answer, "text", where), start))
    impossible = row.get("is_impossible", False)
    if not isinstance(impossible, bool):
        raise DataError(f"{where}: its 'is_impossible' is neither true nor false; mend it")
    name, text = text_field(row, "id", where), text_field(row, "question", where)
    return Question(name, text, context, tuple(answers), impossible)


def _check_answers(question: Question, where: str, *, version_2: bool, training: bool) -> None:
    if question.is_impossible and not version_2:
        raise DataError(
            f"{where}: is marked impossible, which SQuAD 1.1 does not know; give --version-2"
        )
    if question.is_impossible and question.answers:
        raise DataError(f"{where}: is marked impossible and has answers; leave one of them out")
    if training and not question.answers and not question.is_impossible:
        raise DataError(f"{where}: has no answers; give a file that is made for training")


def _is_at_its_offset(answer: Answer, context: str) -> bool:
    return (
        answer.start >= 0
        and bool(answer.text.strip())
        and context.startswith(answer.text, answer.start)
    )
