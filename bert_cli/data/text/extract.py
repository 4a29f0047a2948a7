"""Turn a MediaWiki dump into text with our converter, or with any program that `--with` names.

The processes that convert a dump of many bzip2 streams also unpack it; any other dump is unpacked and split by this
process. A program gets each chunk as a small dump, and its output is searched for all pages of the chunk.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from bert_cli.data.io.files import compression_of
from bert_cli.data.io.manifest import Shard, Stats
from bert_cli.data.text.wikipedia import DAMAGED, TITLE, WIKITEXT, Chunk, Dump
from bert_cli.data.text.wikitext import PAGE_ID, Site, document, site_of
from bert_cli.data.workers.program import DOC, run_program
from bert_cli.errors import DataError, logger
from bert_cli.text import count

CHUNK_BYTES = 16_000_000  # of XML per output file: the unit of restart and of parallel work
PACKED_EXPANSION = 4.0  # bytes of XML in a byte of a packed dump: 3.0 to 5.4 in five of them
TEXT_PER_BYTE = 0.24  # bytes of text for a byte of XML, as in docs/wikipedia.md
PAGES_NAMED = 3  # in a note about lost pages


def check_damage(counts: Stats, path: Path, out: Path, is_kept: bool) -> None:
    """Raise DataError for a damaged dump, or log the loss if its text is kept."""
    damage = [note.partition(f"{path.name} ")[2] for note in counts.notes if DAMAGED in note]
    if not damage:
        return
    more = f", and in {len(damage) - 1} more places" if damage[1:] else ""
    problem = f"{damage[0]}{more}; the text of {count(counts.documents, 'article')} is in {out}"
    if not is_kept:
        remedy = "run `bert download` again, or add --keep-damaged to accept that text"
        raise DataError(f"dump ({path})", problem, remedy)
    logger.info(f"extract: the dump {problem}")


def bytes_written(path: Path, processes: int) -> int:
    """Return the estimated bytes of the text, and of the chunks that are on the disk at a time."""
    size = float(path.stat().st_size)
    if compression_of(path):
        # An estimate: the size of the unpacked dump is known only at its end.
        size *= PACKED_EXPANSION
    return round(TEXT_PER_BYTE * size + min(2 * processes * CHUNK_BYTES, size))


def output_name(number: int) -> Path:
    """Return the output of chunk `number`: AA/wiki_00 ... AA/wiki_99, AB/wiki_00, ..., AAA/wiki_00."""
    folder, file = divmod(number, 100)
    letters = ""
    # As the columns of a spreadsheet are named, from AA on.
    folder += 26
    while folder >= 0:
        folder, letter = divmod(folder, 26)
        letters = chr(65 + letter) + letters
        folder -= 1
    return Path(letters) / f"wiki_{file:02}"


def shards_of(dump: Dump) -> Iterator[Shard]:
    """Yield a shard for each chunk of a dump; a worker that can unpack the chunk itself gets its range alone."""
    chunks = dump.streams(round(CHUNK_BYTES / PACKED_EXPANSION)) or dump.chunks(CHUNK_BYTES)
    for number, chunk in enumerate(chunks):
        output = output_name(number)
        arguments = {"name": output.as_posix(), "chunk": replace(chunk, pages=[])}
        prepare = None
        if not chunk.streams:
            prepare = partial(_write_pages, pages=chunk.pages)
        yield Shard((dump.path,), output, arguments, chunk.raw_bytes, prepare)


def _write_pages(folder: Path, pages: list[bytes]) -> tuple[Path, ...]:
    path = folder / "pages.xml"
    path.write_bytes(b"\n".join(pages))
    return (path,)


def extract_chunk(
    inputs: tuple[Path, ...],
    output: Path,
    *,
    name: str,
    chunk: Chunk,
    header: bytes,
    command: Sequence[str] = (),
    rules: Mapping[str, str] | None = None,
) -> Stats:
    """Write the text of a chunk, and note the pages that are missing in it.

    The input has the pages of the chunk, or is the dump of which the chunk is a range.
    """
    (path,) = inputs
    notes: list[str] = []
    if chunk.streams:
        dump = Dump(path, chunk.streams, header)
        (chunk,) = dump.chunks(sys.maxsize)
        notes = dump.notes
    else:
        chunk.pages = [page + b"</page>" for page in path.read_bytes().split(b"</page>")[:-1]]
    pages = chunk.pages
    titles = list(map(_identity, pages))
    failures: list[str] = []
    with open(output, "wb") as file:
        if command and pages:
            with TemporaryDirectory(dir=output.parents[1]) as folder:
                where = f"{name} (pages {titles[0][1]} to {titles[-1][1]})"
                dump_path = Path(folder).absolute() / "chunk.xml"
                dump_path.write_bytes(header + b"\n".join([*pages, b"</mediawiki>\n"]))
                file.write(run_program(command, dump_path, where))
        else:
            file.writelines(_documents(pages, site_of(header, rules), failures))
    documents, empty = _count_documents(output)
    lost = Counter(page for page, _ in titles) - documents
    if lost:
        names = [title for page, title in titles if page in lost][:PAGES_NAMED]
        more = ", ..." if lost.total() > PAGES_NAMED else ""
        cause = ""
        if failures:
            cause = f"; the first cannot be converted: {failures[0]}"
        notes.append(
            f"{lost.total()} of {len(titles)} pages are missing from the output ({', '.join(names)}{more}){cause}"
        )
    if 0 < empty == documents.total():
        notes.append(
            f"none of its {empty} pages has text, only templates or pages that they include, as on Wikisource"
        )
    models = chunk.other_models
    notes += [
        f"left out {count(n, 'page')} whose model is {m}, not {WIKITEXT}" for m, n in models.items()
    ]
    counts = {"pages_given": len(titles), "pages_lost": lost.total(), "pages_without_text": empty}
    counts |= {"redirects": chunk.redirects, "pages_of_other_namespaces": chunk.other_namespaces}
    if models:
        counts |= {"pages_of_other_models": models.total()}
    prefixed = tuple(f"{name}: {note}" for note in notes)
    return Stats(documents.total(), bytes_in=chunk.xml_bytes, extra=counts, notes=prefixed)


def _documents(pages: Sequence[bytes], site: Site, failures: list[str]) -> Iterator[bytes]:
    """Yield each page as a <doc> block; a page whose markup the converter fails on adds a line to `failures`."""
    for page in pages:
        try:
            yield document(page, site)
        except Exception as error:  # of any kind: one page of millions must not end the work
            failures.append(f"{type(error).__name__}: {str(error)[:80]}")


def _identity(page: bytes) -> tuple[int, str]:
    """Return the id of a page, and its id and title for a message."""
    match = PAGE_ID.search(page)
    number = -1
    if match:
        number = int(match[1])
    title = TITLE.search(page)
    name = title[1].decode(errors="replace") if title else ""
    return number, f"{number} {name!r}"


def _count_documents(output: Path) -> tuple[Counter[int], int]:
    """Return the number of <doc> blocks by page id, and the number of blocks without text below the title."""
    documents: Counter[int] = Counter()
    empty = lines = 0
    with open(output, "rb") as file:
        for line in file:
            match = DOC.match(line)
            if match:
                documents[int(match[1] or -1)] += 1
                lines = 0
            elif line.startswith(b"</doc>"):
                empty += lines < 2
            elif line.strip():
                lines += 1
    return documents, empty
