"""`bert predict`: what a model says to texts, a JSON object a line in the order of the texts.

The inputs come from the command line, a file or standard input and are all checked before the model
is built; then they go through it some at a time, those of like length together, and each answer is
printed in its place. Standard output has the answers and nothing else.
"""

import json
import sys
from collections.abc import Iterator, Mapping

from bert_cli.config.tools import PredictSettings
from bert_cli.data.finetune.examples import read_json_lines, read_lines, text_of
from bert_cli.data.finetune.squad_answers import null_threshold_of
from bert_cli.data.records.tokenizer import read_tokenizer
from bert_cli.errors import ConfigError, DataError
from bert_cli.tasks.run import start
from bert_cli.tasks.use.answers import ANSWERING, MASK, Asked, Row, Use, labels_entities
from bert_cli.tasks.use.model import Opened, labels_of, one_device, open_model, task_of

# Task -> what its inputs must have, and what they may have.
FIELDS = {
    "fill-mask": (("text",), ()),
    "question-answering": (("question", "context"), ()),
    "text-classification": (("text",), ("second",)),
    "token-classification": (("text",), ()),
    "embed": (("text",), ()),
}
# Setting -> the task that it is for.
BELONGS = {
    "second": "text-classification",
    "question": "question-answering",
    "top": "fill-mask",
    "pooling": "embed",
    "normalize": "embed",
    "doc_stride": "question-answering",
    "max_query_length": "question-answering",
    "max_answer_length": "question-answering",
    "version_2": "question-answering",
}
BATCHES_AT_ONCE = 64
"""So many batches are sorted by length together, and wait for one another to be printed."""


def run(settings: PredictSettings) -> None:
    """Answer every input.

    Raises CheckpointError when there is no model, ConfigError when it or a setting does not fit the
    task, DataError, with the line, for an input that cannot be answered.
    """
    source = start.find_source(settings.model, "MODEL")
    task = task_of(source, settings.task)
    _refuse_without_effect(settings, task)
    places = _places(settings, source)
    inputs = list(read_inputs(settings, task))
    for asked in inputs:
        _check(asked, task)
    empty = [_is_empty(asked, task) for asked in inputs]
    tokenizer = read_tokenizer(source.folder)
    words = source.config.vocab_size
    if len(tokenizer.pieces) > words:
        raise ConfigError(
            f"{source.folder} (tokenizer of {len(tokenizer.pieces):,} pieces): the model has {words:,} words; "
            "put the tokenizer's files there that it was trained with"
        )
    settings = _with_threshold(settings, source)
    device = one_device()
    model = open_model(source, task, settings.precision)
    told = f"{task} with {source.folder} ({source.architecture}) on one {device}"
    counted = f"{len(inputs):,} input{'s' if len(inputs) > 1 else ''}"
    print(f"{told}, {settings.precision}; {counted}", file=sys.stderr, flush=True)
    answer, nothing = (
        ANSWERING[task](Use(model, tokenizer, settings, places)),
        _nothing(model, task),
    )
    at_once = settings.batch_size * BATCHES_AT_ONCE
    for begin in range(0, len(inputs), at_once):
        batch = range(begin, min(begin + at_once, len(inputs)))
        given = [inputs[number] for number in batch if not empty[number]]
        found = iter(answer(given) if given else [])
        rows = [_row(inputs[number], nothing) if empty[number] else next(found) for number in batch]
        print("\n".join(json.dumps(row, ensure_ascii=_ascii()) for row in rows), flush=True)


def _refuse_without_effect(settings: PredictSettings, task: str) -> None:
    for name, owner in BELONGS.items():
        if name in settings.model_fields_set and task != owner:
            raise ConfigError(f"{name}: has no effect with task {task}; leave it out")
    if task == "question-answering" and settings.text is not None:
        raise ConfigError(
            f"TEXT ({settings.text}): has no effect with task {task}; give --question and --context"
        )


def _with_threshold(settings: PredictSettings, source: start.Source) -> PredictSettings:
    """The settings with the threshold that was chosen on the development set of the model's run."""
    if not settings.version_2 or settings.null_score_diff_threshold is not None:
        return settings
    chosen = null_threshold_of(source.folder.parent)
    told = "chosen by `bert squad`" if chosen is not None else "none was chosen for this model"
    print(f"null_score_diff_threshold {chosen or 0.0:.4f} ({told})", file=sys.stderr)
    return settings.model_copy(update={"null_score_diff_threshold": chosen or 0.0})


def _places(settings: PredictSettings, source: start.Source) -> int:
    there = source.config.max_position_embeddings
    asked = settings.max_seq_length
    if asked is not None and asked > there:
        raise ConfigError(
            f"max_seq_length ({asked}): is more than the model's {there} places; lower it"
        )
    return asked or there


def read_inputs(settings: PredictSettings, task: str) -> Iterator[Asked]:
    """The inputs in order. ConfigError when none are given, DataError for what cannot be read."""
    if settings.question is not None and settings.context is not None:
        given = {"question": settings.question, "context": settings.context}
        yield Asked("--question, --context", given)
    elif settings.text is not None:
        second = {} if settings.second is None else {"second": settings.second}
        yield Asked("TEXT", {"text": settings.text, **second})
    elif settings.input is not None:
        path = settings.input.expanduser()
        name = path.stem if path.suffix == ".gz" else path.name
        if name.endswith(".jsonl") or task == "question-answering":
            yield from _objects(read_json_lines(path), task, str(path))
        else:
            yield from _lines(read_lines(path), str(path))
    else:
        yield from _from_standard_input(task)


def _from_standard_input(task: str) -> Iterator[Asked]:
    if sys.stdin is None or sys.stdin.isatty():
        what = "--question and --context" if task == "question-answering" else "a TEXT behind MODEL"
        raise ConfigError(
            f"text: is not given; give {what}, --input FILE, or texts on standard input"
        )
    where = "standard input"
    try:
        text = sys.stdin.buffer.read().decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: is no UTF-8 ({error}); convert it") from error
    if not text.strip():
        raise DataError(f"{where}: is empty; give texts, one a line")
    lines = [line.removesuffix("\r") for line in text.rstrip("\r\n").split("\n")]
    if task != "question-answering":
        yield from _lines(lines, where)
        return
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{where} (line {number}): is no JSON ({error}); give an object a line, with question and context"
            ) from error
        if not isinstance(row, dict):
            raise DataError(f"{where} (line {number}): is no JSON object; give one a line")
        yield from _objects(iter([(number, row)]), task, where)


def _lines(lines: list[str], where: str) -> Iterator[Asked]:
    for number, line in enumerate(lines, 1):
        yield Asked(f"{where} (line {number})", {"text": line})


def _objects(
    rows: Iterator[tuple[int, Mapping[str, object]]], task: str, where: str
) -> Iterator[Asked]:
    """The task's fields of JSON objects; fields that no task knows are the person's own."""
    needed, more = FIELDS[task]
    known = {name for fields in FIELDS.values() for group in fields for name in group}
    for number, row in rows:
        place = f"{where} (line {number})"
        foreign = sorted((known & set(row)) - {*needed, *more})
        if foreign:
            raise DataError(
                f"{place}: '{foreign[0]}' has no place in task {task}, which reads {', '.join(needed)}; "
                "remove it or choose the task that it is for"
            )
        names = [*needed, *(name for name in more if name in row)]
        yield Asked(place, {name: text_of(row, name, place) for name in names})


def _is_empty(asked: Asked, task: str) -> bool:
    """Whether a text that the task needs is empty; a second one may be."""
    return any(not asked.fields[name].strip() for name in FIELDS[task][0])


def _row(asked: Asked, nothing: Row) -> Row:
    shown = {name: text for name, text in asked.fields.items() if name != "context"}
    return {**shown, **nothing}


def _nothing(model: Opened, task: str) -> Row:
    """The answer to an empty text: what the task says of a text, without a value."""
    names = model.label_names
    if task == "fill-mask":
        return {"masks": []}
    if task == "question-answering":
        return {"answer": "", "probability": None, "start": None, "end": None}
    if task == "token-classification":
        return {"words": [], **({"entities": []} if labels_entities(names) else {})}
    if task == "embed":
        return {"embedding": None}
    if names is None:
        return {"score" if labels_of(model.source) == 1 else "scores": None}
    if model.source.described.get("problem_type") == "multi_label_classification":
        return {"labels": [], "probabilities": {}}
    return {"label": None, "probability": None, "probabilities": {}}


def _check(asked: Asked, task: str) -> None:
    """Refuse an input that cannot be answered, before anything is run; an empty line can."""
    is_empty = _is_empty(asked, task)
    if is_empty and "(line " not in asked.where:
        raise DataError(f"{asked.where}: is empty; give it a text")
    for text in asked.fields.values():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{asked.where}: has half a character ({error.object[error.start]!r}); remove it"
            ) from error
    if task == "fill-mask" and not is_empty and MASK not in asked.fields["text"]:
        raise DataError(f"{asked.where}: has no {MASK}; put one where a word is to be found")


def _ascii() -> bool:
    """Whether standard output takes only ASCII for sure; other letters are then escaped."""
    return (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
