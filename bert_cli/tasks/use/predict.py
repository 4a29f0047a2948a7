"""`bert predict`: print or write the predictions for texts, in the order of the texts.

The inputs come from the command line, a file or standard input, and are all checked before the model is built.
Standard output has only the predictions.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from bert_cli.config.use import PredictSettings
from bert_cli.data.finetune import tables
from bert_cli.data.finetune.glue import TASKS
from bert_cli.data.io.files import JSON_OBJECT, TABLES, format_by_name
from bert_cli.data.io.rows import Rows, check_columns, check_text, json_rows, listed
from bert_cli.data.io.wrapping import wrapped_width
from bert_cli.errors import ConfigError, DataError
from bert_cli.facts.heads import SEQUENCE_CLASSIFICATION
from bert_cli.facts.windows import window_error
from bert_cli.parse.load import changed
from bert_cli.processes import print_error
from bert_cli.tasks.model import models, opened, runtimes
from bert_cli.tasks.model.opened import NONE, Input, Predictor, Row
from bert_cli.tasks.model.predictions import predictors
from bert_cli.tasks.use import answers
from bert_cli.text import count, remark_of
from bert_cli.train.checkpoint import read_settings

FIELD = "pass one by --text-column"
# Lines of an input from which hard line breaks are recognised.
LINES_JUDGED = 1000
SINGLE_LABEL = "single_label_classification"
CLASSIFICATION = SEQUENCE_CLASSIFICATION.task
# Batches that are sorted by length together, and printed together.
# 2,048 texts of a batch of 32: enough of similar length for each batch, and answers appear from the start.
BATCHES_AT_ONCE = 64


class Prediction(NamedTuple):
    """What is known of a prediction before the model is built."""

    source: models.Source
    task: str
    task_class: type[Predictor]
    settings: PredictSettings
    """With the defaults of the model's folder."""
    max_seq_length: int


def run(settings: PredictSettings) -> None:
    """Print a prediction for every input.

    Raises CheckpointError if there is no model, ConfigError if the model or a setting does not fit the task, and
    DataError, with the line, for an invalid input.
    """
    prediction = prepare(settings)
    source, task, task_class, settings, _ = prediction
    inputs = list(read_inputs(settings, task_class, task))
    for item in inputs:
        check_input(item, task_class)
        if not is_empty(item, task_class):
            task_class.check(item)
    answered = inputs[task_class.COMPARES :]  # the text that others are compared with has no row
    answers.check(answered, settings.output)
    check_number_of_texts(source, task, inputs)
    predictor = build(prediction, len(inputs))
    what = f"{task} with {source.folder} ({source.architecture})"
    runtime = (
        predictor.model.runtime
        or f"{settings.engine} on one {opened.one_device()}, {settings.precision}"
    )
    print_error(f"{what} by {runtime}; {count(len(inputs), 'input')}")
    taken = answered[-1].taken if answered else ()
    names = (*predictor.empty_answer(), opened.TRUNCATED)
    renamed = [f"'{n}' is '{opened.name_beside(n, taken)}'" for n in names if n in taken]
    if renamed:
        what = f"of the answers {', '.join(renamed)}, because the input has that column"
        print_error(f"{settings.input}: {what}")
    needed = settings.text_column or task_class.FIELDS
    is_table = answers.suffix(settings.output) not in ("", ".jsonl")
    key = opened.name_beside("probabilities", taken)
    with answers.writer(settings.output, settings.input, needed, taken) as write:
        for row in rows_of(predictor, inputs):
            # A table has a column for each label, JSON lines an object.
            columns = {}
            if is_table:
                columns = row.pop(key, {})
            for label, probability in columns.items():
                row[opened.name_beside(f"probability of {label}", taken)] = probability
            write(row)


def rows_of(predictor: Predictor, inputs: Sequence[Input]) -> Iterator[Row]:
    """Yield the rows of inputs, which are answered many at a time."""
    task_class = type(predictor)
    if task_class.COMPARES:
        yield from predictor.answer([item for item in inputs if not is_empty(item, task_class)])
        return
    at_once = predictor.settings.batch_size * BATCHES_AT_ONCE
    for begin in range(0, len(inputs), at_once):
        group = inputs[begin : begin + at_once]
        texts = [item for item in group if not is_empty(item, task_class)]
        predictor.progress.move(begin, len(group), len(inputs))
        rows: Iterator[Row] = iter(())
        if texts:
            rows = iter(predictor.answer(texts))
        for item in group:  # a row without a text has the task's keys without values
            if is_empty(item, task_class):
                yield opened.row_of(item, predictor.empty_answer(), False)
            else:
                yield next(rows)


def prepare(settings: PredictSettings) -> Prediction:
    """Find the model and its task, and take defaults from its folder.

    Raises CheckpointError if there is no model, ConfigError if the model or a setting does not fit the task.
    """
    source = models.as_trained(models.find_source(settings.model, "MODEL"))
    task = opened.task_of(source, settings.task)
    task_class = predictors()[task]
    positions = source.config.max_position_embeddings
    # A setting of another task would be ignored silently, so it is refused.
    known = _all_fields().union(*(of.SETTINGS for of in predictors().values()))
    for name in sorted(known - _fields_of(task_class) - {*task_class.SETTINGS}):
        if name in settings.model_fields_set:
            raise ConfigError(name, f"has no effect with task {task}", "leave it out")
    length = settings.max_seq_length or 0
    if length > positions:
        problem = f"is more than the model's {positions} positions"
        raise ConfigError(f"max_seq_length ({length})", problem, "lower it")
    if task_class.COMPARES and settings.text is None:
        remedy = "pass a TEXT with which to compare the texts of --input"
        raise ConfigError("text", "is missing", remedy)
    problem_type = source.described.get("problem_type") or SINGLE_LABEL
    if settings.none_below is not None and (
        problem_type != SINGLE_LABEL or NONE in (source.label_names or ())
    ):
        problem = f"needs a model for {SINGLE_LABEL} without a label '{NONE}'"
        raise ConfigError(f"none_below ({settings.none_below})", problem, "leave it out")
    defaults = task_class.read_defaults(source, settings)
    longest = min(positions, defaults.pop("max_seq_length", positions))
    length = length or longest
    explicit = settings.model_dump(exclude_unset=True, exclude_none=True)
    defaults["text_column"] = default_columns(source, settings.input, task)
    settings = changed(settings, **{n: v for n, v in defaults.items() if n not in explicit})
    error = None
    if settings.doc_stride is not None:
        error = window_error(length, settings.doc_stride)
    if error:
        raise ConfigError("max_seq_length", *error)
    return Prediction(source, task, task_class, settings, length)


def build(prediction: Prediction, texts: int | None = None) -> Predictor:
    """Build the model of a prediction with its weights, on one device, for so many `texts`.

    They are answered without an engine if one can do so and no setting asks for the other.
    """
    source, task, task_class, settings, length = prediction
    tokenizer = models.read_tokenizer_for(source.config, source.tokenizer)
    model: opened.OpenedModel | None = None
    if settings.precision == "float32" and "engine" not in settings.model_fields_set:
        model = runtimes.open_without_engine(source, task, texts)
    if model is None:
        is_library = opened.one_device() == "CPU" and opened.backend() == "tensorflow"
        model = opened.open_model(source, task, settings.precision, uses_library=is_library)
    return task_class(model, tokenizer, settings, length)


def _fields_of(task_class: type[Predictor]) -> set[str]:
    return {*task_class.FIELDS, *task_class.OPTIONAL}


def _all_fields() -> set[str]:
    """Return the fields that some task reads."""
    return set().union(*map(_fields_of, predictors().values()))


# --- inputs


def read_inputs(
    settings: PredictSettings, task_class: type[Predictor], task: str, remedy: str = FIELD
) -> Iterator[Input]:
    """Yield the inputs in order. Raises ConfigError if there are none, DataError if they cannot be read.

    The `remedy` is for a table without a column of the task.
    """
    if settings.question is not None and settings.context is not None:
        fields = {"question": settings.question, "context": settings.context}
        yield Input("--question, --context", fields)
        return
    if settings.text is not None:
        fields = {"text": settings.text}
        if settings.second is not None:
            fields["second"] = settings.second
        yield Input("TEXT", fields)
        if not task_class.COMPARES:
            return
    path = settings.input
    where = "standard input" if path is None else str(path)
    if path is not None and format_by_name(path) not in (None, "plain"):
        yield from _of_table(path, settings.text_column, task_class, task, remedy)
        return
    if settings.text_column is not None:
        raise ConfigError("text_column", f"has no effect on the lines of {where}", "leave it out")
    if path is not None:
        lines = tables.read_lines(path)
    elif sys.stdin is None or sys.stdin.isatty():
        what = "a TEXT after MODEL"
        if "text" not in task_class.FIELDS:
            what = " and ".join(f"--{name}" for name in task_class.FIELDS)
        remedy = f"pass {what}, --input FILE, or texts on standard input"
        raise ConfigError("text", "is missing", remedy)
    else:
        lines = tables.lines_of(tables.decoded(sys.stdin.buffer.read(), where))
    if "text" not in task_class.FIELDS:
        yield from _of_rows(json_rows(lines, where), {}, task_class, task, "")
        return
    if JSON_OBJECT.match(lines[0]):
        remedy = "pass a file with the suffix .jsonl as --input"
        raise DataError(f"{where} (line 1)", "is a JSON object, not a text", remedy)
    if wrapped_width("\n".join(lines[:LINES_JUDGED])):
        problem = "its lines end within sentences, but each line is read as one text"
        remedy = "write each text on one line, or as JSON lines with the key text"
        print_error(f"warning: {where}: {problem}; {remedy}")
    for number, line in enumerate(lines, 1):
        yield Input(f"{where} (line {number})", {"text": line})


def _of_table(
    path: Path, columns: Sequence[str] | None, task_class: type[Predictor], task: str, remedy: str
) -> Iterator[Input]:
    """Yield the inputs of a table. Its `columns`, if any, have the task's fields, in their order."""
    fields = [*task_class.FIELDS, *task_class.OPTIONAL]
    if columns and not len(task_class.FIELDS) <= len(columns) <= len(fields):
        problem = f"names {count(len(columns), 'column')} for task {task}"
        raise ConfigError("text_column", problem, f"name those of {listed(fields)}")
    column_of = {}
    if columns is not None or format_by_name(path) in TABLES:
        column_of = dict(zip(fields, columns or fields, strict=False))
    remarks: Counter[str] = Counter()
    needed = columns or task_class.FIELDS
    if format_by_name(path) in TABLES:
        remedy = f"name the columns in the first line, or {remedy}"
    rows = tables.table_rows(path, needed, remarks, sorted(_all_fields()), remedy)
    yield from _of_rows(rows, column_of, task_class, task, remedy)
    for remark, number in (+remarks).items():
        print_error(f"{path}: {remark_of(number, remark)}")


def _of_rows(
    rows: Rows, column_of: Mapping[str, str], task_class: type[Predictor], task: str, remedy: str
) -> Iterator[Input]:
    """Yield the inputs of rows, which have the fields in these columns or, without any, under their own names.

    The `remedy` is for an absent one.
    """
    taken: set[str] = set()
    for where, row in rows:
        fields = row
        if column_of:
            check_columns(where, [column_of[name] for name in task_class.FIELDS], row, remedy)
            fields = {field: row[name] for field, name in column_of.items() if name in row}
        taken.update(row)
        context: str | None = "context"
        if column_of:
            context = column_of.get("context")
        columns = {name: value for name, value in row.items() if name != context}
        yield replace(
            input_of(fields, where, task_class, task, remedy), columns=columns, taken=taken
        )


def trained_columns(source: models.Source) -> list[str]:
    """Return the columns of texts on which a classifier was trained, none where they are not known."""
    saved = read_settings(source.folder).settings
    task = TASKS.get(saved.get("glue_task", ""))
    columns = saved.get("text_column") or source.described.get("text_column") or []
    if task:
        return [*task.columns]
    return columns


def default_columns(source: models.Source, path: Path | None, task: str) -> list[str] | None:
    """Return the columns in which a table or JSON lines have the texts for a classifier, None for the usual ones."""
    form = format_by_name(path) if path else None
    if form not in (*TABLES, "json-lines") or task != CLASSIFICATION:
        return None
    columns = trained_columns(source)
    if path and form == "json-lines":
        _, first = next(tables.table_rows(path, (), Counter()), ("", {}))
        if columns == ["text"] or ("text" in first and not {*columns} <= {*first}):
            return None
    return columns or None


def check_number_of_texts(source: models.Source, task: str, inputs: Sequence[Input]) -> None:
    """Print a warning for inputs of one text, if the model is known to be trained on pairs.

    Raises DataError for a pair if it is known to be trained on single texts.
    """
    trained = 0
    if task == CLASSIFICATION:
        trained = len(trained_columns(source))
    pairs = [item for item in inputs if item.fields.get("second")]
    if trained == 1 and pairs:
        problem = f"has a second text, but {source.folder} was trained on single texts"
        raise DataError(pairs[0].where, problem, "leave the second text out, or join the two")
    alone = len(inputs) - len(pairs)
    if trained == 2 and alone:
        print_error(
            f"warning: {source.folder} was trained on pairs of texts, but {count(alone, 'input')} of "
            f"{len(inputs):,} have no second text; pass --second, or 'second' in JSON lines"
        )


def input_of(
    row: Mapping[str, Any], where: str, task_class: type[Predictor], task: str, remedy: str = ""
) -> Input:
    """Return the fields of a row. Raises DataError for one that is missing, no string, or of another task."""
    foreign = sorted((_all_fields() - _fields_of(task_class)) & set(row))
    if foreign:
        reads = f"which reads {listed(task_class.FIELDS)}"
        problem = f"'{foreign[0]}' is not read by task {task}, {reads}"
        raise DataError(where, problem, "remove it or choose its task")
    check_columns(where, task_class.FIELDS, row, remedy)
    names = [
        *task_class.FIELDS,
        *(name for name in task_class.OPTIONAL if row.get(name) is not None),
    ]
    return Input(where, {name: tables.text_of(row, name, where) for name in names})


def check_input(item: Input, task_class: type[Predictor]) -> None:
    """Raise DataError for an invalid input, before anything is computed; an empty line or row is valid."""
    if is_empty(item, task_class) and not item.where.endswith(")"):  # FILE (line 3)
        raise DataError(item.where, "is empty", "write a text")
    for text in item.fields.values():
        check_text(text, item.where)


def is_empty(item: Input, task_class: type[Predictor]) -> bool:
    """Return whether a required text is empty; the second text of a pair may be empty."""
    return any(not item.fields[name].strip() for name in task_class.FIELDS)
