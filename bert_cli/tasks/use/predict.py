"""`bert predict`: the predictions for texts, a JSON object per line in the order of the texts.

The inputs come from the command line, a file or standard input, and all are checked before the model is
built. Then they go through it in groups, those of similar length together, and each answer is printed in its
input's order. Standard output has the answers only.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping

from bert_cli.config.finetune import PredictSettings
from bert_cli.data.finetune.squad_windows import read_null_threshold
from bert_cli.data.finetune.tables import (
    file_kind,
    json_object,
    listed,
    read_json_lines,
    read_lines,
    text_of,
)
from bert_cli.data.records.tokenizer import read_tokenizer
from bert_cli.errors import ConfigError, DataError
from bert_cli.tasks.run import start
from bert_cli.tasks.use.answers import ANSWERING, MASK, Input, Row, Use, are_bio
from bert_cli.tasks.use.model import Opened, labels_of, one_device, open_model, task_of

FIELDS = {
    "fill-mask": (("text",), ()),
    "question-answering": (("question", "context"), ()),
    "text-classification": (("text",), ("second",)),
    "token-classification": (("text",), ()),
    "embed": (("text",), ()),
}
"""Task -> required fields of its inputs, and optional ones."""
TASK_OF_SETTING = {
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
"""Batches that are sorted by length together, and printed together."""


def run(settings: PredictSettings) -> None:
    """Answer every input.

    CheckpointError when there is no model, ConfigError when it or a setting does not fit the task, DataError,
    with the line, for an input that cannot be answered.
    """
    source = start.find_source(settings.model, "MODEL")
    task = task_of(source, settings.task)
    _check_settings(settings, task)
    length = _max_seq_length(settings, source)
    inputs = list(read_inputs(settings, task))
    for one in inputs:
        _check_input(one, task)
    tokenizer = read_tokenizer(source.folder)
    size, model_size = len(tokenizer.pieces), source.config.vocab_size
    if size > model_size:
        problem = f"is too large for the model, whose vocabulary has {model_size:,}"
        remedy = "put the files of the tokenizer that it was trained with there"
        raise ConfigError(f"{source.folder} (tokenizer of {size:,} pieces)", problem, remedy)
    settings = _with_threshold(settings, source)
    device = one_device()
    model = open_model(source, task, settings.precision)
    what = f"{task} with {source.folder} ({source.architecture}) on one {device}"
    number = f"{len(inputs):,} input{'s' if len(inputs) > 1 else ''}"
    print(f"{what}, {settings.precision}; {number}", file=sys.stderr, flush=True)
    answer = ANSWERING[task](Use(model, tokenizer, settings, length))
    no_answer = _no_answer(model, task)
    at_once = settings.batch_size * BATCHES_AT_ONCE
    for begin in range(0, len(inputs), at_once):
        group = inputs[begin : begin + at_once]
        texts = [one for one in group if not _is_empty(one, task)]
        answers = iter(answer(texts) if texts else [])
        rows = [
            {**_shown(one), **no_answer} if _is_empty(one, task) else next(answers) for one in group
        ]
        print("\n".join(json.dumps(row, ensure_ascii=_is_ascii()) for row in rows), flush=True)


# --- settings


def _check_settings(settings: PredictSettings, task: str) -> None:
    for name, owner in TASK_OF_SETTING.items():
        if name in settings.model_fields_set and task != owner:
            raise ConfigError(name, f"has no effect with task {task}", "leave it out")
    if task == "question-answering" and settings.text is not None:
        problem = f"has no effect with task {task}"
        raise ConfigError(f"TEXT ({settings.text})", problem, "give --question and --context")


def _with_threshold(settings: PredictSettings, source: start.Source) -> PredictSettings:
    """Return the settings with the threshold that the model's run chose on its development set."""
    if not settings.version_2 or settings.null_score_diff_threshold is not None:
        return settings
    chosen = read_null_threshold(source.folder.parent)
    origin = "chosen by `bert squad`" if chosen is not None else "none was chosen for this model"
    print(f"null_score_diff_threshold {chosen or 0.0:.4f} ({origin})", file=sys.stderr)
    return settings.model_copy(update={"null_score_diff_threshold": chosen or 0.0})


def _max_seq_length(settings: PredictSettings, source: start.Source) -> int:
    most, length = source.config.max_position_embeddings, settings.max_seq_length
    if length is not None and length > most:
        problem = f"is more than the model's {most} positions"
        raise ConfigError(f"max_seq_length ({length})", problem, "lower it")
    return length or most


# --- inputs


def read_inputs(settings: PredictSettings, task: str) -> Iterator[Input]:
    """Yield the inputs in order. ConfigError when there are none, DataError for unreadable ones."""
    if settings.question is not None and settings.context is not None:
        fields = {"question": settings.question, "context": settings.context}
        yield Input("--question, --context", fields)
    elif settings.text is not None:
        second = {} if settings.second is None else {"second": settings.second}
        yield Input("TEXT", {"text": settings.text, **second})
    elif settings.input is not None:
        path = settings.input.expanduser()
        if file_kind(path) == ".jsonl" or task == "question-answering":
            yield from _objects(read_json_lines(path), task, str(path))
        else:
            yield from _lines(read_lines(path), str(path))
    else:
        yield from _from_standard_input(task)


def _from_standard_input(task: str) -> Iterator[Input]:
    if sys.stdin is None or sys.stdin.isatty():
        what = "--question and --context" if task == "question-answering" else "a TEXT after MODEL"
        remedy = f"give {what}, --input FILE, or texts on standard input"
        raise ConfigError("text", "is missing", remedy)
    where = "standard input"
    try:
        text = sys.stdin.buffer.read().decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise DataError(where, f"is not UTF-8 ({error})", "convert it") from error
    if not text.strip():
        raise DataError(where, "is empty", "give texts, one per line")
    lines = [line.removesuffix("\r") for line in text.rstrip("\r\n").split("\n")]
    if task == "question-answering":
        numbered = enumerate(lines, 1)
        rows = (
            (number, json_object(line, f"{where} (line {number})")) for number, line in numbered
        )
        yield from _objects(rows, task, where)
    else:
        yield from _lines(lines, where)


def _lines(lines: Iterable[str], where: str) -> Iterator[Input]:
    for number, line in enumerate(lines, 1):
        yield Input(f"{where} (line {number})", {"text": line})


def _objects(
    rows: Iterable[tuple[int, Mapping[str, object]]], task: str, where: str
) -> Iterator[Input]:
    """Yield the task's fields of JSON objects; fields that no task has are ignored."""
    needed, optional = FIELDS[task]
    known = {name for fields in FIELDS.values() for group in fields for name in group}
    for number, row in rows:
        line = f"{where} (line {number})"
        foreign = sorted((known & set(row)) - {*needed, *optional})
        if foreign:
            problem = f"'{foreign[0]}' is not read by task {task}, which reads {listed(needed)}"
            raise DataError(line, problem, "remove it or choose its task")
        names = [*needed, *(name for name in optional if name in row)]
        yield Input(line, {name: text_of(row, name, line) for name in names})


def _check_input(one: Input, task: str) -> None:
    """Refuse an input that cannot be answered, before anything is computed; an empty line is answered."""
    is_empty = _is_empty(one, task)
    if is_empty and "(line " not in one.where:
        raise DataError(one.where, "is empty", "give it a text")
    for text in one.fields.values():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            problem = f"has half a character ({error.object[error.start]!r})"
            raise DataError(one.where, problem, "remove it") from error
    if task == "fill-mask" and not is_empty and MASK not in one.fields["text"]:
        raise DataError(one.where, f"has no {MASK}", "put one in place of a word")


# --- answers


def _is_empty(one: Input, task: str) -> bool:
    """Return whether a required text is empty; the second of a pair may be."""
    return any(not one.fields[name].strip() for name in FIELDS[task][0])


def _shown(one: Input) -> Row:
    return {name: text for name, text in one.fields.items() if name != "context"}


def _no_answer(model: Opened, task: str) -> Row:
    """Return the answer to an empty text: the task's keys without values."""
    names = model.label_names
    if task == "fill-mask":
        return {"masks": []}
    if task == "question-answering":
        return {"answer": "", "probability": None, "start": None, "end": None}
    if task == "token-classification":
        return {"words": [], **({"entities": []} if are_bio(names) else {})}
    if task == "embed":
        return {"embedding": None}
    if names is None:
        return {"score" if labels_of(model.source) == 1 else "scores": None}
    if model.source.described.get("problem_type") == "multi_label_classification":
        return {"labels": [], "probabilities": {}}
    return {"label": None, "probability": None, "probabilities": {}}


def _is_ascii() -> bool:
    """Return whether standard output may accept ASCII only; other letters are then escaped."""
    return (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
