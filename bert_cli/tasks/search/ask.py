"""`bert search ask`: print the passages that answer a question best."""

import os
import re
import sys
from contextlib import suppress
from pathlib import Path

from bert_cli.config.search import SearchAskSettings
from bert_cli.data.search.index import Half, Hit
from bert_cli.errors import UNPRINTABLE, printable
from bert_cli.files import is_stdout, output_json
from bert_cli.processes import console, print_line
from bert_cli.tasks.search.opened import open_index

MOST_BYTES = 50_000_000
"""Of a file whose line is looked up: that takes 0.2 s."""
BEGINNING = 8
"""Words of a passage that are found in a file, where its end differs."""


def run(settings: SearchAskSettings) -> None:
    """Print the best passages, on a terminal with the words of the question in bold.

    Raises ConfigError for a question without words, DataError for a damaged index.
    """
    half: Half | None = "words" if settings.words else "meaning" if settings.meaning else None
    hits = open_index(settings.index, half).ask(settings.question, settings.top, half)
    if settings.json_file:
        output_json(settings.json_file, [hit._asdict() for hit in hits])
    if is_stdout(settings.json_file):
        return
    if not hits:
        print_line("No passage has a word or a phrase of the question.")
    for number, hit in enumerate(hits, 1):
        path = os.path.relpath(hit.file)
        file = hit.file if path.startswith("..") else path
        print_line(printable(f"{number}. {hit.title} ({file}{place_of(hit)})"))
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


def place_of(hit: Hit) -> str:
    """Return the place of a passage behind its file: the page, the line as editors read it, or the characters.

    The line is found by the words, because joined lines have other characters than the file. Of places with the same
    words it is the nearest.
    """
    if hit.page is not None:
        return f", page {hit.page:,}"
    text = ""
    with suppress(OSError, UnicodeDecodeError):
        if os.path.getsize(hit.file) <= MOST_BYTES:
            text = Path(hit.file).read_text(encoding="utf-8")
    words = hit.text.split()
    for sought in (words, words[:BEGINNING]):
        places = [match.start() for match in re.finditer(r"\s+".join(map(re.escape, sought)), text)]
        if places:
            line = 1 + text.count("\n", 0, min(places, key=lambda n: abs(n - hit.start)))
            return f":{line}"
    return f", characters {hit.start:,}-{hit.stop:,} of its text"
