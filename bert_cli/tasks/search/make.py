"""`bert search make`: read text into an index, and compute the vectors of its passages.

Each file is a transaction, then each batch of vectors, so that a call that was killed continues.
"""

import json
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from bert_cli.config.search import SearchMakeSettings
from bert_cli.data.io import files, inputs
from bert_cli.data.io.documents import recognise_lines
from bert_cli.data.io.manifest import read_manifest
from bert_cli.data.search import late
from bert_cli.data.search.database import state_of
from bert_cli.data.search.passages import (
    Document,
    Split,
    characters_left_out,
    documents_of,
    passages_of,
)
from bert_cli.data.search.writing import WritableIndex, write_index
from bert_cli.data.text import preprocess
from bert_cli.errors import DataError
from bert_cli.processes import print_line
from bert_cli.tasks.search.vectors import Model, model_of
from bert_cli.text import count, format_duration

AT_ONCE = 512  # passages whose vectors are computed, and committed, together
LINE_SECONDS = 30.0  # aimed at between two lines of the progress: at half the speed it is still a line a minute
SAMPLE = 128  # passages whose tokens show the axes, among all


def run(settings: SearchMakeSettings) -> None:
    """Make the index complete. Raises DataError for text that cannot be read, or none."""
    names: dict[Path, str] = {}
    for source in settings.text:
        manifest = read_manifest(source)
        inputs.refuse_output_inside(source, settings.index, manifest)
        root = inputs.find_root(source)
        paths = inputs.find_files(source, manifest, settings.strict)
        names |= {path.resolve(): path.relative_to(root).as_posix() for path in paths}
    with write_index(settings.index) as index:
        # An absent model is found before the text is read.
        model = Model(str(settings.model)) if settings.model else model_of(index)
        _read(index, names, settings)
        passages = count(index.count("passages"), "passage")
        documents = count(index.count("documents"), "document")
        files_read = index.count("(SELECT DISTINCT file FROM documents)")
        print_line(f"search: {documents} of {count(files_read, 'file')}, {passages}")
        if model:
            has_tokens = settings.token_vectors
            if has_tokens is None:
                has_tokens = index.fact("tokens") != 0
            _embed(index, model, has_tokens)
        else:
            print_line(
                "search: questions are answered by their words (BM25); with --model also by their meaning, which "
                "finds passages with other words (measure both with `bert search score`)"
            )


def _read(index: WritableIndex, names: dict[Path, str], settings: SearchMakeSettings) -> None:
    """Read new and changed files, and remove those that are not among the `names`."""
    form = settings.input_format, settings.text_field, settings.documents
    marks = {str(path): f"{state_of(path)}{(name, *form)!r}" for path, name in names.items()}
    # A file that was left out has its mark and, on another line, its problem.
    rows = index.table.execute("SELECT path, mark FROM files")
    known = {path: mark.partition("\n") for path, mark in rows}
    gone = known.keys() - marks.keys()
    new = {path: mark for path, mark in marks.items() if known.get(path, [""])[0] != mark}
    if new or gone:
        with index.changing():
            index.record(lacks_text=True)  # until every file is read, whatever ends this call
    reading = files.Reading(*form, line_breaks="auto")
    left_out = inputs.LeftOut("search", settings.text, settings.strict)
    recognised = inputs.recognise_each(map(Path, new), reading, left_out)
    parts = list(filter(None, recognised.values()))
    if parts:
        parts = recognise_lines(parts, reading)
        inputs.refuse_without_effect(parts, settings.model_fields_set)
        inputs.report_joined_lines("search", parts, reading)
    if new or gone:
        read = count(len(new) - len(left_out.problems), "new or changed file")
        print_line(f"search: reads {read}, forgets {len(gone):,}")
    if gone:
        with index.changing():
            index.table.executemany("DELETE FROM files WHERE path = ?", [(path,) for path in gone])
    for path in sorted(marks.keys() - new.keys()):
        problem = known[path][2]
        if problem:
            with left_out.unless_text(Path(path)):
                raise DataError(*json.loads(problem))
    readable = {part.path: part for part in parts}
    characters = 0
    for path, mark in new.items():
        with left_out.unless_text(Path(path)), index.changing():
            file = index.add_file(path, names[Path(path)], mark)
            part = readable.get(Path(path))
            if part:
                characters += _add(index, file, documents_of(part, reading))
        error = left_out.problems.get(Path(path))
        if error:
            # Permissions and packages may change without another mark.
            if isinstance(error.__cause__, OSError | ImportError):
                mark = ""
            else:
                mark = f"{mark}\n{json.dumps(error.args)}"
            with index.changing():  # its earlier text is gone
                index.add_file(path, names[Path(path)], mark)
    left_out.report()
    if characters:
        what = "running heads of manuals, pictures in base64, or without a word"
        print_line(f"search: {count(characters, 'character')} in no passage: {what}")
    if index.fact("lacks_text"):
        with index.changing():
            index.record(lacks_text=False)
            index.forget_unused_vectors()
            index.store_postings()
    if not index.count("passages"):
        raise DataError(str(settings.text[0]), "has no text", "use files with sentences")


def _add(index: WritableIndex, file: int, documents: Iterable[Document]) -> int:
    """Add the documents of a file, and return the characters that are left out.

    Its first document shows the language, for which its sentences are split.
    """
    split: Split | None = None
    left_out = 0
    for document in documents:
        if split is None:
            language = preprocess.language_of("\n".join(document.lines)) or "en"
            split = preprocess.splitter_of("sentencex", language)
        if index.reuse(file, document):
            continue
        passages = passages_of(document.lines, split)
        index.add(file, document, passages)
        left_out += characters_left_out(document.lines, passages)
    return left_out


def _embed(index: WritableIndex, model: Model, has_tokens: bool) -> None:
    """Compute the vectors that are missing; all for other weights than before, and where tokens are new or go."""
    is_new = index.fact("weights") != model.weights
    if is_new or index.fact("tokens") != has_tokens:
        with index.changing():
            index.table.execute("DELETE FROM vectors")
            index.record(weights=model.weights, tokens=has_tokens, axes=None)
            if is_new:
                index.record(weight=None)  # another model needs another weight
    if index.fact("model") != model.name:
        with index.changing():
            index.record(model=model.name)
    numbers = index.without_vector()
    missing = len(numbers)
    # Few at first, so that the time left is soon known; they are a sample, which shows the axes.
    sample = numbers[:: max(1, missing // SAMPLE)][:SAMPLE]
    numbers = [*sample, *sorted({*numbers} - {*sample})]
    print_line(f"search: {model.name} computes {count(missing, 'vector')}")
    done = first = 0
    begun = 0.0
    left = ""
    size = min(AT_ONCE, SAMPLE)
    while batch := numbers[done : done + size]:
        started = time.monotonic()
        vectors = model(index.texts(batch), done, missing)
        with index.changing():
            if has_tokens and index.axes is None:
                index.record(axes=late.axes_of(np.concatenate(vectors.tokens)).tobytes())
            index.add_vectors(batch, vectors)
        done += len(batch)
        if first:
            seconds = (time.monotonic() - begun) / (done - first) * (missing - done)
            left = f"; {format_duration(seconds)} left"
        else:
            first = done  # their time is that of loading the model
            begun = time.monotonic()
        print_line(f"search: {done:,} of {missing:,} vectors{left}")
        in_time = int(len(batch) * LINE_SECONDS / (time.monotonic() - started))
        size = max(1, min(AT_ONCE, SAMPLE + done, in_time))
