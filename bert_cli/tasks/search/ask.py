"""`bert search ask`: print the passages that answer a question best."""

import os
import re
import sys
from contextlib import suppress
from pathlib import Path

from bert_cli.config.search import SearchAskSettings
from bert_cli.data.io.files import format_by_name
from bert_cli.data.search import words
from bert_cli.data.search.index import Half, Index
from bert_cli.data.search.passages import Hit
from bert_cli.errors import UNPRINTABLE, printable
from bert_cli.files import is_stdout, output_json
from bert_cli.processes import console, print_error, print_line
from bert_cli.tasks.search.opened import open_index

MOST_BYTES = 50_000_000
"""Of a file whose line is looked up: that takes 0.2 s."""
ROWS = ("json-lines", "csv", "tsv", "parquet")  # formats whose documents are rows
BEGINNING = 8
"""Words of a passage that are found in a file, where its end differs."""
OUTER = re.compile(r"^[\W_]+|[\W_]+$")  # marks around a word


def run(settings: SearchAskSettings) -> None:
    """Print the best passages, on a terminal with the words of the question in bold.

    Raises ConfigError for a question without words, DataError for a damaged index.
    """
    half: Half | None = None
    if settings.words:
        half = "words"
    elif settings.meaning:
        half = "meaning"
    index = open_index(settings.index, half)
    with index.snapshot():
        hits = index.ask(settings.question, settings.top, half)
        paths = [index.file_of(hit.passage)[0] for hit in hits]
    if settings.json_file:
        output_json(settings.json_file, [hit._asdict() for hit in hits])
    if is_stdout(settings.json_file):
        return
    unknown = missing(index, settings.question)
    if unknown:
        plural = "s" if len(unknown) > 1 else ""
        end = "."
        if hits:
            end = ", so perhaps nothing fits."
        print_error(printable(f"No passage has the word{plural} {', '.join(unknown)}{end}"))
    if not hits:
        print_line("No passage has a word or a phrase of the question.")
    for number, (hit, path) in enumerate(zip(hits, paths, strict=True), 1):
        file = os.path.relpath(path)
        if file.startswith(".."):
            file = path
        print_line(printable(f"{number}. {hit.title} ({file}, {place_of(hit, path)})"))
        # One for one, so that the positions of the words stay.
        shown = UNPRINTABLE.sub(
            lambda found: found[0] if found[0] in "\n\t" else "\ufffd", hit.text
        )
        if sys.stdout.isatty():
            from rich.text import Text

            text = Text(shown)
            for start, stop in hit.words:
                text.stylize("bold", start, stop)
            console().print(text, end="\n\n")
        else:
            print_line(f"{shown}\n")


def missing(index: Index, question: str) -> list[str]:
    """Return the words of a question that no passage has in any form."""
    asked = [OUTER.sub("", word) for word in words.parse(question).text.split()]
    with index.snapshot():
        lacking = []
        for word in dict.fromkeys(asked):
            parts = words.without_letters(words.words_of(word))
            terms = map(words.in_any_form, parts)
            if parts and not any(map(index.lexical.frequency, terms)):
                lacking.append(word)
        return lacking


def place_of(hit: Hit, path: str) -> str:
    """Return the place of a passage in its file: the page, the line as editors read it, or the row and characters.

    The line is found by the words, because joined lines have other characters than the file. Of places with the same
    words it is the nearest.
    """
    if hit.page is not None:
        return f"page {hit.page:,}"
    characters = f"characters {hit.start:,}-{hit.stop:,} of its text"
    document = hit.file.removeprefix(path)
    if document:
        kind = "row" if format_by_name(Path(path)) in ROWS else "document"
        return f"{kind} {document[1:]}, {characters}"
    text = ""
    with suppress(OSError, UnicodeDecodeError):
        if os.path.getsize(path) <= MOST_BYTES:
            text = Path(path).read_text(encoding="utf-8")
    parts = hit.text.split()
    for sought in (parts, parts[:BEGINNING]):
        places = [match.start() for match in re.finditer(r"\s+".join(map(re.escape, sought)), text)]
        if places:
            line = 1 + text.count("\n", 0, min(places, key=lambda n: abs(n - hit.start)))
            return f"line {line:,}"
    return characters
