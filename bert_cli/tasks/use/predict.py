"""`bert predict`: print the predictions for texts, a JSON object per line in the order of the texts.

The inputs come from the command line, a file or standard input, and are all checked before the model is built.
Standard output has only the predictions.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from bert_cli.config.finetune import QUESTION_SPECIALS, PredictSettings
from bert_cli.config.load import changed
from bert_cli.data.finetune import embeddings, tables
from bert_cli.data.finetune.squad_windows import read_null_threshold, read_window_sizes
from bert_cli.data.text.wrapping import wrapped_width
from bert_cli.errors import ConfigError, DataError, count
from bert_cli.tasks.run import models
from bert_cli.tasks.use.model import (
    MASK,
    PREDICTIONS,
    Input,
    Opened,
    Predictor,
    Row,
    labels_of,
    one_device,
    open_model,
    rank,
    task_of,
)

LINES_JUDGED = 1000
"""Lines of an input from which hard line breaks are recognised."""
FIELDS = {
    "fill-mask": (("text",), ()),
    "question-answering": (("question", "context"), ()),
    "text-classification": (("text",), ("second",)),
    "token-classification": (("text",), ()),
    "embed": (("text",), ()),
    "similarity": (("text",), ()),
}
"""Task -> required and optional fields of its inputs."""
KNOWN_FIELDS = {name for groups in FIELDS.values() for group in groups for name in group}
SETTINGS: Mapping[str, tuple[str, ...]] = {
    "fill-mask": ("top",),
    "question-answering": ("doc_stride", "max_query_length", "max_answer_length", "version_2"),
    "embed": ("pooling", "normalize"),
    "similarity": ("pooling", "top"),
}
"""Task -> settings that have an effect on this task only."""
FILLS_MASKS = ("ForMaskedLM", "ForPreTraining")
"""Endings of architecture names whose models give no useful vectors of texts."""
BY_MODEL = ("pooling", "normalize", "doc_stride", "max_query_length", "max_answer_length")
"""Settings whose defaults come from the model's folder."""
BATCHES_AT_ONCE = 64
"""Batches that are sorted by length together, and printed together."""


def run(settings: PredictSettings) -> None:
    """Print a prediction for every input.

    Raises CheckpointError if there is no model, ConfigError if the model or a setting does not fit the task, and
    DataError, with the line, for an invalid input.
    """
    source = models.find_source(settings.model, "MODEL")
    task = task_of(source, settings.task)
    described: dict[str, Any] = {}
    if task in ("embed", "similarity"):
        described = embeddings.read_embedding(source.folder)
    elif task == "question-answering":
        described = read_window_sizes(source.folder.parent)
    positions = source.config.max_position_embeddings
    _check_settings(settings, task, positions)
    if task in ("embed", "similarity") and source.architecture.endswith(FILLS_MASKS):
        problem = "was trained to fill masks, so the similarities of its vectors hardly differ"
        print(
            f"warning: {source.folder} {problem}; train it with `bert embed` first", file=sys.stderr
        )
    length = min(positions, described.pop("max_seq_length", positions))
    length = settings.max_seq_length or length
    described |= settings.model_dump(exclude_unset=True, exclude_none=True, include=set(BY_MODEL))
    if task == "question-answering":
        described = _sizes_that_fit(settings, length) | described
    settings = changed(settings, **described)
    inputs = list(_read_inputs(settings, task))
    for item in inputs:
        _check_input(item, task)
    tokenizer = models.read_tokenizer_for(source.config, source.folder)
    if settings.version_2 and settings.null_score_diff_threshold is None:
        chosen = read_null_threshold(source.folder.parent)
        origin = "none was chosen for this model" if chosen is None else "chosen by `bert squad`"
        print(f"null_score_diff_threshold {chosen or 0.0:.4f} ({origin})", file=sys.stderr)
        settings = changed(settings, null_score_diff_threshold=chosen or 0.0)
    device = one_device()
    model = open_model(source, task, settings.precision)
    what = f"{task} with {source.folder} ({source.architecture}) on one {device}"
    number = count(len(inputs), "input")
    print(f"{what}, {settings.precision}; {number}", file=sys.stderr, flush=True)
    predictor = Predictor(task, model, tokenizer, settings, length)
    # Other letters are escaped where standard output may accept ASCII only.
    is_ascii = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
    at_once = settings.batch_size * BATCHES_AT_ONCE
    if task == "similarity":
        for row in rank(predictor, [item for item in inputs if not _is_empty(item, task)]):
            print(json.dumps(row, ensure_ascii=is_ascii), flush=True)
        return
    for begin in range(0, len(inputs), at_once):
        group = inputs[begin : begin + at_once]
        texts = [item for item in group if not _is_empty(item, task)]
        answers = iter(PREDICTIONS[task](predictor, texts) if texts else [])
        rows = [
            _empty_row(item, model, task) if _is_empty(item, task) else next(answers)
            for item in group
        ]
        print("\n".join(json.dumps(row, ensure_ascii=is_ascii) for row in rows), flush=True)


def _sizes_that_fit(settings: PredictSettings, length: int) -> dict[str, int]:
    """Return sizes for windows of `length`: at most half of it for the question, and half the rest for the stride."""
    query = min(settings.max_query_length, length // 2)
    stride = min(settings.doc_stride, max(1, (length - QUESTION_SPECIALS - query) // 2))
    return {"max_query_length": query, "doc_stride": stride}


def _check_settings(settings: PredictSettings, task: str, positions: int) -> None:
    """Refuse settings without effect on the task, and texts longer than the model's positions."""
    accepted = {*FIELDS[task][0], *FIELDS[task][1], *SETTINGS.get(task, ())}
    for name in sorted(KNOWN_FIELDS.union(*SETTINGS.values()) - accepted):
        if name in settings.model_fields_set:
            raise ConfigError(name, f"has no effect with task {task}", "leave it out")
    if (length := settings.max_seq_length or positions) > positions:
        problem = f"is more than the model's {positions} positions"
        raise ConfigError(f"max_seq_length ({length})", problem, "lower it")
    if task == "similarity" and settings.text is None:
        raise ConfigError("text", "is missing", "give a TEXT to compare the texts of --input with")


# --- inputs


def _read_inputs(settings: PredictSettings, task: str) -> Iterator[Input]:
    """Yield the inputs in order. Raises ConfigError if there are none, DataError if they cannot be read."""
    is_json = task == "question-answering"
    if settings.question is not None and settings.context is not None:
        fields = {"question": settings.question, "context": settings.context}
        yield Input("--question, --context", fields)
        return
    if settings.text is not None:
        second = {} if settings.second is None else {"second": settings.second}
        yield Input("TEXT", {"text": settings.text, **second})
        if task != "similarity":  # which compares it with other texts
            return
    if settings.input is not None:
        path = settings.input
        where = str(path)
        lines = tables.read_lines(path)
        is_json = is_json or tables.file_kind(path) == ".jsonl"
    else:
        where = "standard input"
        lines = _standard_input(task)
    if is_json:
        yield from _objects(lines, where, task)
        return
    lines = list(lines)
    if wrapped_width("\n".join(lines[:LINES_JUDGED])):
        problem = "its lines end within sentences, and each line is taken as one text"
        remedy = "write each text on one line, or as JSON lines with the key text"
        print(f"warning: {where}: {problem}; {remedy}", file=sys.stderr)
    for number, line in enumerate(lines, 1):
        yield Input(f"{where} (line {number})", {"text": line})


def _standard_input(task: str) -> list[str]:
    if sys.stdin is None or sys.stdin.isatty():
        what = "--question and --context" if task == "question-answering" else "a TEXT after MODEL"
        remedy = f"give {what}, --input FILE, or texts on standard input"
        raise ConfigError("text", "is missing", remedy)
    try:
        text = sys.stdin.buffer.read().decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise DataError("standard input", f"is not UTF-8 ({error})", "convert it") from error
    if not text.strip():
        raise DataError("standard input", "is empty", "give texts, one per line")
    return [line.removesuffix("\r") for line in text.rstrip("\r\n").split("\n")]


def _objects(lines: Iterable[str], where: str, task: str) -> Iterator[Input]:
    """Yield the task's fields of JSON objects; fields that no task has are ignored."""
    needed, optional = FIELDS[task]
    for line, row in tables.json_lines(lines, where):
        foreign = sorted((KNOWN_FIELDS & set(row)) - {*needed, *optional})
        if foreign:
            reads = f"which reads {tables.listed(needed)}"
            problem = f"'{foreign[0]}' is not read by task {task}, {reads}"
            raise DataError(line, problem, "remove it or choose its task")
        names = [*needed, *(name for name in optional if name in row)]
        yield Input(line, {name: tables.text_of(row, name, line) for name in names})


def _check_input(item: Input, task: str) -> None:
    """Raise DataError for an invalid input, before anything is computed; an empty line is valid."""
    is_empty = _is_empty(item, task)
    if is_empty and "(line " not in item.where:
        raise DataError(item.where, "is empty", "give it a text")
    for text in item.fields.values():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            problem = f"has an unpaired surrogate ({error.object[error.start]!r})"
            raise DataError(item.where, problem, "remove it") from error
    if task == "fill-mask" and not is_empty and MASK not in item.fields["text"]:
        raise DataError(item.where, f"has no {MASK}", "put one in place of a word")


def _is_empty(item: Input, task: str) -> bool:
    """Return whether a required text is empty; the second text of a pair may be empty."""
    return any(not item.fields[name].strip() for name in FIELDS[task][0])


def _empty_row(item: Input, model: Opened, task: str) -> Row:
    """Return the row of an empty text: the task's keys without values."""
    label: Row = {"label": None, "probability": None, "probabilities": {}}
    if model.label_names is None:
        label = {"score" if labels_of(model.source) == 1 else "scores": None}
    elif model.has_several_labels:
        label = {"labels": [], "probabilities": {}}
    answers: dict[str, Row] = {
        "fill-mask": {"masks": []},
        "question-answering": {"answer": "", "probability": None, "start": None, "end": None},
        "text-classification": label,
        "token-classification": {"words": [], **({"entities": []} if model.has_bio_labels else {})},
        "embed": {"embedding": None},
    }
    fields = {name: text for name, text in item.fields.items() if name != "context"}
    return {**fields, **answers[task]}
