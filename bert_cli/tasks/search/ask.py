"""`bert search ask`: print the passages that answer a question best."""

import os
import sys

from bert_cli.config.search import SearchAskSettings
from bert_cli.data.search.index import Half
from bert_cli.errors import UNPRINTABLE, printable
from bert_cli.files import is_stdout, output_json
from bert_cli.processes import console, print_line
from bert_cli.tasks.search.opened import open_index


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
        place = f"characters {hit.start:,}-{hit.stop:,} of its text"
        if hit.page is not None:
            place = f"page {hit.page:,}"
        print_line(printable(f"{number}. {hit.title} ({file}, {place})"))
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
