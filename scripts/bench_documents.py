#!/usr/bin/env python3
"""How much of the text of documents is kept, and whether pages are right: bench_documents.py FOLDER [LIBRARY ...].

FOLDER has a folder for each kind of document. The reference of a PDF is pdftotext (poppler-utils), of others pandoc.
Libraries to compare are pypdf, pdfminer, kreuzberg, markitdown, trafilatura and docx, where they are installed.
"""

import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

from bert_cli.data.io import files
from bert_cli.data.io.documents import recognise_lines
from bert_cli.data.search.passages import Document, documents_of
from bert_cli.errors import DataError

WORD = re.compile(r"[^\W_]+")
READING = files.Reading(documents="files", line_breaks="auto")
SPAN = 6  # words that show a page


def main(folder: Path, *libraries: str) -> None:
    print("reader kind files words kept extra order seconds pages right")
    for name in ("bert", *libraries):
        for kind in sorted(path for path in folder.iterdir() if path.is_dir()):
            print(name, kind.name, *_row(READERS[name], sorted(kind.iterdir())), flush=True)


def _row(read: Callable[[Path], str], paths: list[Path]) -> Iterator[str]:
    """Yield the columns of a kind: sums over its files."""
    sums: dict[str, float] = defaultdict(float)
    for path in paths:
        reference = words_of(reference_of(path))
        if not reference:
            print(f"{path}: no reference", file=sys.stderr)
            continue
        start = time.perf_counter()
        try:
            words = words_of(read(path))
        except Exception as error:
            print(f"{path}: {type(error).__name__} {str(error)[:200]}", file=sys.stderr)
            words = []
        sums["seconds"] += time.perf_counter() - start
        sums["files"] += 1
        sums["words"] += len(reference)
        sums["read"] += len(words)
        sums["kept"] += (Counter(reference) & Counter(words)).total()
        sums["pairs"] += (Counter(pairwise(reference)) & Counter(pairwise(words))).total()
        if read is bert and path.suffix == ".pdf":
            pages, right = pages_of(path)
            sums["pages"] += pages
            sums["right"] += right
    yield f"{sums['files']:.0f} {sums['words']:,.0f} {sums['kept'] / sums['words']:.3f}"
    yield f"{1 - sums['kept'] / max(1, sums['read']):.3f} {sums['pairs'] / sums['words']:.3f}"
    yield f"{sums['seconds']:.1f} {sums['pages']:.0f} {sums['right']:.0f}"


def words_of(text: str) -> list[str]:
    return WORD.findall(text.replace("\u00ad", "").lower())


def reference_of(path: Path, *options: str) -> str:
    command = ["pandoc", str(path), "--to", "plain", "--wrap", "none"]
    if path.suffix == ".pdf":
        command = ["pdftotext", *options, str(path), "-"]
    return subprocess.run(command, capture_output=True).stdout.decode(errors="replace")


def bert(path: Path) -> str:
    part = files.recognise(path, READING)
    assert part is not None
    return files.open_part(part).read().decode()


def document_of(path: Path) -> Document:
    part = files.recognise(path, READING)
    assert part is not None
    return next(documents_of(recognise_lines([part], READING)[0], READING))


def pages_of(path: Path) -> tuple[int, int]:
    """Return how many pages have words in their middle that are in the document once, and how many on this page."""
    try:
        document = document_of(path)
    except DataError:
        return 0, 0
    text = "\n".join(document.lines).lower()
    spans = [match.span() for match in WORD.finditer(text)]
    words = [text[start:stop] for start, stop in spans]
    places: dict[tuple[str, ...], list[int]] = {}
    for number in range(len(words) - SPAN):
        places.setdefault(tuple(words[number : number + SPAN]), []).append(spans[number][0])
    pages = right = 0
    for number, page in enumerate(reference_of(path).split("\f"), 1):
        expected = words_of(page)
        middle = len(expected) // 2
        found = places.get(tuple(expected[middle : middle + SPAN]), [])
        if len(expected) > 2 * SPAN and len(found) == 1:
            begun = sum(start <= found[0] for start in document.pages or ())
            pages += 1
            right += 1 + begun == number
    return pages, right


def pypdf(path: Path) -> str:
    import pypdf

    return "\f".join(page.extract_text() for page in pypdf.PdfReader(path).pages)


def pdfminer(path: Path) -> str:
    from pdfminer.high_level import extract_text

    return str(extract_text(path))


def kreuzberg(path: Path) -> str:
    import kreuzberg

    return str(kreuzberg.extract_file_sync(path).content)


def markitdown(path: Path) -> str:
    from markitdown import MarkItDown

    return MarkItDown().convert(path).text_content


def trafilatura(path: Path) -> str:
    import trafilatura

    page = path.read_text(errors="replace")
    return trafilatura.extract(page, include_tables=True) or ""


def docx(path: Path) -> str:
    import docx

    document = docx.Document(str(path))
    cells = [cell.text for table in document.tables for row in table.rows for cell in row.cells]
    return "\n".join([paragraph.text for paragraph in document.paragraphs] + cells)


READERS: dict[str, Callable[[Path], str]] = {
    read.__name__: read
    for read in (bert, pypdf, pdfminer, kreuzberg, markitdown, trafilatura, docx)
}

if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
