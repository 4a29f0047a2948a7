"""Turn extracted text into sentences: one a line, a blank line between documents.

Read are `<doc id= url= title=>` ... `</doc>` blocks, line by line, so a file of any size fits in
memory. Of each document: the first line, its title, is dropped; &amp;, &lt; and &gt; are undone
(after the <doc> lines are recognised, so no text can pass for one); `formula_1` and `codice_1`, which
stand where a formula or code was, and brackets that were left empty are taken out; white space
becomes single spaces. A line is split by itself, so no sentence runs over two paragraphs. Headings
stay, as lines such as `History.`: nothing in the text tells them from short paragraphs. Documents
without a sentence are left out and counted, and so are lines outside documents; a file with text and
no document is refused.
"""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal

from bert_cli.config.data import PreprocessSettings
from bert_cli.data.ledger import Shard, Stats, finished_files, recorded_settings
from bert_cli.data.sentences import PARAMETERS, Split, choose_punkt, punkt, sentencex
from bert_cli.data.shards import run_shards
from bert_cli.errors import DataError

OPEN = re.compile(r'<doc (?:[a-z]+="[^"]*" )*title=".*">')
CLOSE = "</doc>"
PLACEHOLDER = re.compile(r"\b(?:formula|codice)_\d+\b")
EMPTY_BRACKETS = re.compile(r"\s*\(\s*(?:[,;:/–-]\s*)*\)|\s*\[\s*\]")
SPACE_BEFORE_STOP = re.compile(r"\s+([,.;:!?)])")
NO_WORD = re.compile(r"[\W_]*")

Kind = Literal["document", "body", "outside"]
"""What a line is: the <doc> that begins a document, text of its body, or text outside documents."""


def run(settings: PreprocessSettings) -> None:
    """Split a folder of extracted text.

    Raises DataError for a file in another format, and if not one sentence came out of the folder.
    """
    files = finished_files(settings.input)
    for path in files:
        refuse_other_formats(path)
    root = settings.input if settings.input.is_dir() else settings.input.parent
    shards = [Shard((path,), Path(f"{path.relative_to(root)}.txt")) for path in files]
    notes: list[str] = []
    parameters = "sentencex"
    if settings.splitter == "punkt":
        corpus = partial(_corpus, files)
        before = recorded_settings(settings.out, "preprocess") or {}
        begun_with = before.get("parameters")
        parameters, note = choose_punkt(settings.language, settings.out, begun_with, corpus)
        notes += [note] if note else []
    else:
        sentencex(settings.language)  # says at once if it is not installed
    run_shards(
        "preprocess",
        shards,
        partial(
            split_file,
            splitter=settings.splitter,
            language=settings.language,
            parameters=settings.out / PARAMETERS if parameters == "learned" else None,
        ),
        out=settings.out,
        processes=settings.processes,
        settings={
            "language": settings.language,
            "splitter": settings.splitter,
            "parameters": parameters,
        },
        versions=["nltk" if settings.splitter == "punkt" else "sentencex"],
        counted="sentences",
        notes=notes,
    )


def split_file(
    inputs: tuple[Path, ...],
    output: Path,
    splitter: str = "punkt",
    language: str = "english",
    parameters: Path | None = None,
) -> Stats:
    """Write the sentences of one extracted file."""
    split: Split = punkt(language, parameters) if splitter == "punkt" else sentencex(language)
    found = documents = sentences = outside = 0
    fresh = False  # whether the document at hand has no sentence yet
    with open(output, "w", encoding="utf-8", newline="\n") as file:
        for kind, line in marked_lines(inputs[0]):
            if kind == "document":
                found += 1
                fresh = True
            if kind != "body":
                outside += kind == "outside"
                continue
            for sentence in split(line):
                text = " ".join(sentence.split())  # U+2028 and its like would break the line
                if NO_WORD.fullmatch(text):
                    continue
                if fresh:
                    file.write("\n" if documents else "")
                    documents += 1
                    fresh = False
                file.write(text + "\n")
                sentences += 1
    extra = {"documents_without_text": found - documents, "lines_outside_documents": outside}
    left_out = f"{inputs[0]}: left out is text outside <doc ...> ... {CLOSE}, lines: {outside}"
    return Stats(documents, sentences, extra=extra, notes=(left_out,) if outside else ())


def refuse_other_formats(path: Path) -> None:
    """Raise DataError for a file that holds text but no document, such as plain text.

    A file of documents is looked at only as far as the first of them.
    """
    strange = ""
    for kind, line in marked_lines(path):
        if kind == "document":
            return
        strange = strange or line
    if strange:
        raise DataError(
            f"{path} ({strange[:60]!r}): holds no document; `bert preprocess` reads what `bert extract` "
            f'writes: <doc id="1" url="..." title="...">, a line with the title, text, {CLOSE}. '
            "Plain text with one sentence a line and a blank line between documents needs no "
            "`bert preprocess`: give it to `bert tokenize`"
        )


def marked_lines(path: Path) -> Iterator[tuple[Kind, str]]:
    """Give the lines that say something, each with its kind; those of bodies are cleaned.

    DataError naming the byte that is not UTF-8.
    """
    inside = title_is_next = False
    with open(path, "rb") as file:
        place = 0
        for raw in file:
            try:
                line = raw.decode().strip()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path} (byte {place + error.start}): not UTF-8; write it as UTF-8"
                ) from error
            place += len(raw)
            if OPEN.fullmatch(line):
                inside = title_is_next = True
                yield "document", line
            elif line == CLOSE:
                inside = False
            elif not line:
                continue
            elif not inside:
                yield "outside", line
            elif title_is_next:
                title_is_next = False
            else:
                yield "body", clean(line)


def clean(line: str) -> str:
    """Undo WikiExtractor's escapes and take out what stands for nothing."""
    text = line.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    bare = EMPTY_BRACKETS.sub("", PLACEHOLDER.sub("", text))
    return SPACE_BEFORE_STOP.sub(r"\1", bare) if bare != text else text


def _corpus(files: list[Path]) -> Iterator[str]:
    for path in files:
        yield from (line for kind, line in marked_lines(path) if kind == "body" and line)
