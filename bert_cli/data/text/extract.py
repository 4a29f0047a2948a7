"""Turn a MediaWiki dump into text with our converter, or with any program that `--with` names.

The processes that convert a dump of many bzip2 streams also unpack it; any other dump is unpacked and split by this
process. A program gets each chunk as a small dump, and its output is searched for all pages of the chunk. WikiExtractor
is such a program, with a short name (it is AGPL: called, never imported).
"""

import errno
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from bert_cli.config.data import ExtractSettings
from bert_cli.data.io.files import compression_of
from bert_cli.data.io.manifest import Shard, Stats, Step
from bert_cli.data.io.runner import Workers, run_shards
from bert_cli.data.text.templates import read_rules
from bert_cli.data.text.wikipedia import DAMAGED, TITLE, WIKITEXT, Chunk, Dump, find_dump
from bert_cli.data.text.wikitext import PAGE_ID, Site, document, site_of
from bert_cli.errors import ConfigError, DataError, needs_extra
from bert_cli.files import JSONObject, file_crc32c
from bert_cli.processes import kill_program, print_line, start_program
from bert_cli.settings.markers import recorded

CHUNK_BYTES = 16_000_000  # of XML per output file: the unit of restart and of parallel work
PACKED_EXPANSION = 4.0  # bytes of XML in a byte of a packed dump: 3.0 to 5.4 in five of them
TEXT_PER_BYTE = 0.24  # bytes of text for a byte of XML, as in docs/wikipedia.md
SECONDS_PER_CHUNK = 300.0
SECONDS_PER_MEGABYTE = 60.0  # WikiExtractor takes 0.12, or 0.5 a megabyte
PAGES_NAMED = 3  # in a note about lost pages

DOC = re.compile(rb'<doc id="(\d{0,18})" ')
WIKIEXTRACTOR = [sys.executable, "-P", "-m", "wikiextractor.WikiExtractor", "-o", "-"]
WIKIEXTRACTOR += ["--processes", "1", "--quiet", "--no-templates"]


def run(settings: ExtractSettings) -> None:
    """Extract the text of a dump."""
    path = find_dump(settings.dump)
    command = _command(settings)
    dump = Dump(path)
    values: JSONObject = recorded(settings)
    rules: dict[str, str] = {}
    if settings.templates:
        if command:
            where = f"templates ({settings.templates})"
            raise ConfigError(where, "has no effect on another extractor", "leave it out")
        rules = read_rules(settings.templates)
        values["templates"] = file_crc32c(settings.templates)
    extractor = settings.with_program or "bert"
    run_shards(
        Step(
            "extract",
            settings.out,
            settings=values | {"extractor": extractor},
            packages=["wikiextractor"] if extractor == "wikiextractor" else [],
            expected_bytes=bytes_written(path, settings.processes),
        ),
        _shards(dump),
        partial(extract_chunk, header=dump.header, command=command, rules=rules),
        Workers(settings.processes, settings.scheduler),
        total=path.stat().st_size,
        notes=dump.notes,
        check=partial(_check_damage, settings=settings, path=path),
    )


def _check_damage(counts: Stats, settings: ExtractSettings, path: Path) -> None:
    """Raise DataError for a damaged dump, or with --keep-damaged print the loss."""
    damage = [note.partition(f"{path.name} ")[2] for note in counts.notes if DAMAGED in note]
    if not damage:
        return
    more = f", and in {len(damage) - 1} more places" if damage[1:] else ""
    problem = f"{damage[0]}{more}; the text of {counts.documents:,} articles is in {settings.out}"
    if not settings.keep_damaged:
        remedy = "run `bert download` again, or add --keep-damaged to accept that text"
        raise DataError(f"dump ({path})", problem, remedy)
    print_line(f"extract: the dump {problem}")


def _command(settings: ExtractSettings) -> list[str]:
    """Return the command of the program, empty for our converter. Raises ConfigError if it is missing."""
    if settings.with_program is None:
        return []
    where = f"with ({settings.with_program})"
    if settings.with_program == "wikiextractor":
        if find_spec("wikiextractor") is None:
            raise ConfigError(where, needs_extra("wikiextractor"))
        return WIKIEXTRACTOR
    try:
        command = shlex.split(settings.with_program)
    except ValueError as error:
        problem = f"is not a valid command line ({error})"
        raise ConfigError(where, problem, "close the quotation") from error
    if not command or shutil.which(command[0]) is None:
        raise ConfigError(where, "no such program", "install it or use its path")
    return command


def bytes_written(path: Path, processes: int) -> int:
    """Return the estimated bytes of the text, and of the chunks that are on the disk at a time."""
    size = path.stat().st_size * (PACKED_EXPANSION if compression_of(path) else 1.0)
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


def _shards(dump: Dump) -> Iterator[Shard]:
    chunks = dump.streams(round(CHUNK_BYTES / PACKED_EXPANSION)) or dump.chunks(CHUNK_BYTES)
    for number, chunk in enumerate(chunks):
        output = output_name(number)
        arguments = {"name": output.as_posix(), "chunk": replace(chunk, pages=[])}
        prepare = None if chunk.streams else partial(_write_pages, pages=chunk.pages)
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
                file.write(_run_program(command, dump_path, where))
        else:
            file.writelines(_documents(pages, site_of(header, rules), failures))
    documents, empty = _count_documents(output)
    lost = Counter(page for page, _ in titles) - documents
    if lost:
        names = [title for page, title in titles if page in lost][:PAGES_NAMED]
        more = ", ..." if lost.total() > PAGES_NAMED else ""
        cause = f"; the first cannot be converted: {failures[0]}" if failures else ""
        notes.append(
            f"{lost.total()} of {len(titles)} pages are missing from the output ({', '.join(names)}{more}){cause}"
        )
    if 0 < empty == documents.total():
        notes.append(
            f"none of its {empty} pages has text, only templates or pages that they include, as on Wikisource"
        )
    models = chunk.other_models
    notes += [f"left out {n} pages whose model is {m}, not {WIKITEXT}" for m, n in models.items()]
    counts = {"pages_given": len(titles), "pages_lost": lost.total(), "pages_without_text": empty}
    counts |= {"redirects": chunk.redirects, "pages_of_other_namespaces": chunk.other_namespaces}
    counts |= {"pages_of_other_models": models.total()} if models else {}
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
    number = int(match[1]) if match else -1
    title = TITLE.search(page)
    return number, f"{number} {title[1].decode(errors='replace') if title else ''!r}"


def _count_documents(output: Path) -> tuple[Counter[int], int]:
    """Return the number of <doc> blocks by page id, and the number of blocks without text below the title."""
    documents: Counter[int] = Counter()
    empty = lines = 0
    with open(output, "rb") as file:
        for line in file:
            if match := DOC.match(line):
                documents[int(match[1] or -1)] += 1
                lines = 0
            elif line.startswith(b"</doc>"):
                empty += lines < 2
            elif line.strip():
                lines += 1
    return documents, empty


def _run_program(command: Sequence[str], path: Path, where: str) -> bytes:
    """Run a program on a dump of some pages and return its <doc> blocks.

    If a process of WikiExtractor dies, its other processes wait forever. Raises OSError for a full disk.
    """
    limit = SECONDS_PER_CHUNK + SECONDS_PER_MEGABYTE * path.stat().st_size / 1e6
    text = path.with_name("text")
    messages = path.with_name("messages")
    with text.open("wb") as out, messages.open("wb") as err:
        program = start_program([*command, str(path)], stdout=out, stderr=err)
        try:
            status = program.wait(limit)
            problem = f"exit status {status}" if status else ""
        except subprocess.TimeoutExpired:
            problem = f"did not finish within {limit:.0f} s"
        finally:
            kill_program(program)
    message = messages.read_text(errors="replace").strip()
    if (reason := os.strerror(errno.ENOSPC)) in message:
        raise OSError(errno.ENOSPC, reason, str(path))
    blocks = text.read_bytes()
    if problem or "Traceback" in message:
        reason = message.splitlines()[-1] if message else "no message"
        problem = f"{problem or 'a crash'} ({reason})"
    elif not DOC.search(blocks):
        problem = "it writes no <doc> blocks"
    if problem:
        remedy = "correct the program: it must take a dump as its last argument and print the text"
        raise DataError(where, f"the program fails ({problem})", remedy)
    return blocks
