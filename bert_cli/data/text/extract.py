"""Turn a MediaWiki dump into text: this process reads and splits it, WikiExtractor works on the chunks.

WikiExtractor has one reader, cannot continue after a stop and loses pages silently. So it runs here on small
dumps of some articles each, as a program (it is AGPL: called, never imported). Every page of a chunk is searched
for in the result; a chunk on which it fails is halved until the page at fault is alone.
"""

import errno
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

from bert_cli.config.data import ExtractSettings
from bert_cli.data.shards.manifest import Shard, Stats, Step
from bert_cli.data.shards.runner import Workers, run_shards
from bert_cli.data.text.files import compression_of
from bert_cli.data.text.wikipedia import NAMESPACE, Dump, find_dump
from bert_cli.errors import DataError
from bert_cli.files import atomic_file
from bert_cli.processes import kill_program, start_program

SECONDS_BETWEEN_CHECKS = 1.0  # a check reads all of /proc
SECONDS_ASLEEP = 5.0  # after which WikiExtractor waits for a process that has died
PACKED_EXPANSION = 4.0  # bytes of XML in a byte of a packed dump: 3.0 to 5.4 in five of them
TEXT_PER_BYTE = 0.21  # bytes of text for a byte of XML, as in docs/wikipedia.md
SECONDS_PER_CHUNK, SECONDS_PER_MEGABYTE = 300.0, 60.0  # 8 MB/s is usual, 2 with templates
PAGES_NAMED = 3  # in a note about lost pages
PAGES_FAILED = 20  # of a chunk, left out one by one; more are not the fault of the pages

PAGE = re.compile(rb"<page>.*?</page>", re.DOTALL)
PAGE_ID = re.compile(rb"<id>(\d+)</id>")
TITLE = re.compile(rb"<title>(.*?)</title>", re.DOTALL)
DOC = re.compile(rb'<doc id="(\d+)" ')
TEMPLATE_NAMESPACE = re.compile(rb'<namespace key="10"[^>]*>([^<]*)</namespace>')


class ToolFailedError(Exception):
    """WikiExtractor stopped, crashed or hung; the text says how."""


def run(settings: ExtractSettings) -> None:
    """Extract the text of a dump. Raises DataError if it is no dump or has no page with text."""
    path = find_dump(settings.dump)
    dump = Dump(path)
    templates = settings.out / ".done" / "templates.xml" if settings.expand_templates else None
    header = dump.header if templates else _header_without_templates(dump.header)
    run_shards(
        Step(
            "extract",
            settings.out,
            settings=settings.model_dump(include={"expand_templates", "chunk_megabytes"}),
            packages=["wikiextractor"],
            expected_bytes=bytes_written(path, settings.processes, settings.chunk_megabytes),
        ),
        _shards(dump, header, settings.chunk_megabytes * 1_000_000, templates),
        partial(extract_chunk, templates=templates),
        Workers(settings.processes, settings.scheduler),
        total=path.stat().st_size,
        notes=dump.notes,
    )


def bytes_written(path: Path, processes: int, chunk_megabytes: int) -> int:
    """Return the estimated bytes of the text, and of the chunks that are on the disk at a time."""
    size = path.stat().st_size * (PACKED_EXPANSION if compression_of(path) else 1.0)
    return round(TEXT_PER_BYTE * size + min(2 * processes * chunk_megabytes * 1e6, size))


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


def _header_without_templates(header: bytes) -> bytes:
    """Return the header with a colon after the name of the template namespace.

    WikiExtractor drops every title that begins with that name ("Template matching", "Modèle réduit").
    With the colon it drops only pages of the namespace, which are not in the chunk anyway.
    """
    with_colon = rb'\g<0>\n      <namespace key="10">\1:</namespace>'
    return TEMPLATE_NAMESPACE.sub(with_colon, header, count=1)


def _shards(dump: Dump, header: bytes, size: int, templates: Path | None) -> Iterator[Shard]:
    if templates is not None:
        count = _collect_templates(dump.path, templates)
        dump.notes.append(f"{count:,} template pages found, for WikiExtractor to expand")
    for number, chunk in enumerate(dump.chunks(size)):
        output = output_name(number)
        other = chunk.other_namespaces
        skipped = {"redirects": chunk.redirects, "pages_of_other_namespaces": other}
        arguments = {"name": output.as_posix(), "xml_bytes": chunk.xml_bytes, "skipped": skipped}
        prepare = partial(_write_chunk, header=header, pages=chunk.pages)
        yield Shard((dump.path,), output, arguments, chunk.raw_bytes, prepare)


def _write_chunk(folder: Path, header: bytes, pages: list[bytes]) -> tuple[Path, ...]:
    path = folder / "chunk.xml"
    path.write_bytes(b"".join([header, *(page + b"\n" for page in pages), b"</mediawiki>\n"]))
    return (path,)


def _collect_templates(path: Path, templates: Path) -> int:
    """Write the pages of namespace 10 into one file, once; return their number."""
    if not templates.exists() or templates.stat().st_mtime_ns < path.stat().st_mtime_ns:
        with atomic_file(templates) as partial, partial.open("wb") as file:
            for page in Dump(path).pages():
                match = NAMESPACE.search(page[: page.find(b"<revision")])
                if match is not None and match[1] == b"10":
                    file.write(page + b"\n")
    with open(templates, "rb") as file:
        return sum(b"</page>" in line for line in file)


def extract_chunk(
    inputs: tuple[Path, ...],
    output: Path,
    *,
    name: str,
    xml_bytes: int,
    skipped: Mapping[str, int],
    templates: Path | None = None,
) -> Stats:
    """Run WikiExtractor on a chunk, and compare its pages with those of the result."""
    (dump,) = inputs
    xml = dump.read_bytes()
    begin = xml.find(b"<page>")
    header, pages = xml[:begin], PAGE.findall(xml, begin)
    del xml
    titles = list(map(_id_and_title, pages))
    notes: list[str] = []
    extract = partial(_run_wikiextractor, header=header, folder=dump.parent, templates=templates)
    with open(output, "wb") as file:
        file.writelines(_halves(pages, extract, notes))
    documents, empty = _count_documents(output)
    lost = Counter(page for page, _ in titles) - documents
    if lost:
        names = [f"{page} {title!r}" for page, title in titles if page in lost][:PAGES_NAMED]
        more = ", ..." if lost.total() > PAGES_NAMED else ""
        notes.append(
            f"{lost.total()} of {len(titles)} pages did not come back from WikiExtractor "
            f"({', '.join(names)}{more})"
        )
    counts = {"pages_given": len(titles), "pages_lost": lost.total(), "pages_without_text": empty}
    return Stats(
        documents=documents.total(),
        bytes_in=xml_bytes,
        extra={**counts, **skipped},
        notes=tuple(f"{name}: {note}" for note in notes),
    )


def _halves(
    pages: list[bytes], extract: Callable[[list[bytes]], bytes], notes: list[str]
) -> Iterator[bytes]:
    """Yield the text of `pages`, and of halves and halves of halves where WikiExtractor fails."""
    try:
        yield extract(pages)
    except ToolFailedError as error:
        if len(pages) > 1:
            middle = len(pages) // 2
            yield from _halves(pages[:middle], extract, notes)
            yield from _halves(pages[middle:], extract, notes)
            return
        if len(notes) == PAGES_FAILED:
            problem = f"WikiExtractor fails on page after page ({error})"
            remedy = "check that the disk is not full and that the installation works"
            raise DataError("extract", problem, remedy) from None
        page, title = _id_and_title(pages[0])
        notes.append(f"WikiExtractor fails on page {page} {title!r}, left out: {error}")


def _id_and_title(page: bytes) -> tuple[int, str]:
    number, title = PAGE_ID.search(page), TITLE.search(page)
    return int(number[1]) if number else -1, title[1].decode(errors="replace") if title else ""


def _count_documents(output: Path) -> tuple[Counter[int], int]:
    """Return the number of <doc> blocks by page id, and of those with nothing below their title."""
    documents: Counter[int] = Counter()
    empty = lines = 0
    with open(output, "rb") as file:
        for line in file:
            if match := DOC.match(line):
                documents[int(match[1])] += 1
                lines = 0
            elif line.startswith(b"</doc>"):
                empty += lines < 2
            elif line.strip():
                lines += 1
    return documents, empty


def _run_wikiextractor(
    pages: list[bytes], header: bytes, folder: Path, templates: Path | None
) -> bytes:
    """Run WikiExtractor on some pages and return all of its text.

    When one of its processes dies the others wait forever. The messages come through a pipe, because a full disk
    would lose them. Raises OSError for a full disk, ToolFailedError for anything else.
    """
    (dump,) = _write_chunk(folder, header, pages)
    texts = folder / "text"
    shutil.rmtree(texts, ignore_errors=True)
    command = [sys.executable, "-m", "wikiextractor.WikiExtractor", str(dump.absolute())]
    command += ["-o", str(texts.absolute()), "--bytes", "1000G", "--processes", "1", "--quiet"]
    command += ["--templates", str(templates.absolute())] if templates else ["--no-templates"]
    limit = SECONDS_PER_CHUNK + SECONDS_PER_MEGABYTE * dump.stat().st_size / 1e6
    program = start_program(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert program.stdout is not None
    lines: list[bytes] = []
    reader = threading.Thread(target=lines.extend, args=(program.stdout,))
    reader.start()
    try:
        problem = _watch(program, lines, limit)
    finally:
        kill_program(program)
        reader.join()
        program.stdout.close()
    text = b"".join(lines).decode(errors="replace").strip()
    result = texts / "AA" / "wiki_00"
    if (reason := os.strerror(errno.ENOSPC)) in text:
        raise OSError(errno.ENOSPC, reason, str(result))
    if problem or "Traceback" in text or not result.exists():
        reason = text.splitlines()[-1] if text else "no output"
        raise ToolFailedError(f"{problem or 'no text'} ({reason})")
    return result.read_bytes()


def _watch(program: "subprocess.Popen[bytes]", lines: list[bytes], limit: float) -> str:
    """Wait for the end of a program, or for a problem, and return the problem."""
    last = math.nan
    started = worked = time.monotonic()
    has_crashed = False
    while True:
        try:
            status = program.wait(SECONDS_BETWEEN_CHECKS)
            return f"exit status {status}" if status else ""
        except subprocess.TimeoutExpired:
            now, used = time.monotonic(), _seconds_asleep(program.pid)
        if used != last:
            last, worked = used, now
        if has_crashed:
            return "a crash"
        has_crashed = any(b"Traceback" in line for line in lines)  # its end follows at once
        if now - started > limit:
            return f"no end after {limit:.0f} s"
        if now - worked >= SECONDS_ASLEEP:
            return f"stuck, all its processes asleep for {SECONDS_ASLEEP:.0f} s"


def _seconds_asleep(pid: int) -> float:
    """Return the processor seconds that a process and its children have used if all sleep, else NaN.

    A process that waits for a processor or a disk does not sleep. NaN equals nothing, not even itself.
    """
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        if all(one.status() in ("sleeping", "zombie") for one in family):
            return sum(sum(one.cpu_times()[:2]) for one in family)
    return math.nan
