"""Turn a dump into text: this process reads and splits it, WikiExtractor works on the chunks.

WikiExtractor has one reader whatever its `--processes`, cannot continue after a stop and loses pages
silently. So the dump is read here (`wikipedia.py`) and split at page boundaries into chunks, each a small
dump with the same header; a chunk is a shard. WikiExtractor 3.1.0 runs on each as a program (it is AGPL:
called, never imported). Every page of a chunk is searched for in the result; a chunk on which it fails is
halved until the page at fault is alone. The output has WikiExtractor's form, `<doc id= url= title=>` blocks
with &amp;, &lt; and &gt; escaped, in AA/wiki_00, AA/wiki_01, ...
"""

import errno
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from bert_cli.config.data import ExtractSettings
from bert_cli.data.shards.manifest import Shard, Stats, Step
from bert_cli.data.shards.runner import Workers, run_shards
from bert_cli.data.text.wikipedia import NAMESPACE, TITLE, Dump, find_dump
from bert_cli.errors import DataError
from bert_cli.files import atomic_file
from bert_cli.processes import kill_program, start_program

FILES_PER_FOLDER = 100
SECONDS_BETWEEN_READS = 0.25
"""Between two reads of WikiExtractor's messages, which must not fill their pipe."""
SECONDS_BETWEEN_CHECKS = 1.0
"""Between two checks of its processes, each of which reads all of /proc."""
SECONDS_ASLEEP = 5.0
"""Time without work after which WikiExtractor is stuck: its processes wait for one that has died."""
PACKED_EXPANSION = 4.0
"""Bytes of XML in a byte of a packed dump: 3.0 to 5.4 in five of them."""
TEXT_PER_BYTE = 0.21
"""Bytes of text for a byte of XML: 20 GB for a packed dump of 24 GB, as docs/wikipedia.md estimates."""
SECONDS_PER_CHUNK, SECONDS_PER_MEGABYTE = 300.0, 60.0  # 8 MB/s is usual, 2 with templates
PAGES_NAMED = 3  # in a note about lost pages
PAGES_FAILED = 20  # of a chunk, left out one by one; more are not the fault of the pages

PAGE = re.compile(rb"<page>.*?</page>", re.DOTALL)
PAGE_ID = re.compile(rb"<id>(\d+)</id>")
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
            settings={
                "expand_templates": settings.expand_templates,
                "chunk_megabytes": settings.chunk_megabytes,
            },
            packages=["wikiextractor"],
            expected_bytes=bytes_written(dump, settings.processes, settings.chunk_megabytes),
        ),
        _chunks(dump, header, settings.chunk_megabytes * 1_000_000, templates),
        partial(extract_chunk, templates=templates),
        Workers(settings.processes, settings.scheduler),
        total=path.stat().st_size,
        notes=dump.notes,
    )


def bytes_written(dump: Dump, processes: int, chunk_megabytes: int) -> int:
    """Return the estimated bytes of the text, and of the chunks that are on the disk at a time.

    Twice as many chunks as processes are in progress.
    """
    size = dump.path.stat().st_size
    expansion = PACKED_EXPANSION if dump.is_packed else 1.0
    text = TEXT_PER_BYTE * size * expansion
    chunks = min(2 * processes * chunk_megabytes * 1e6, size * expansion)
    return round(text + chunks)


def output_name(number: int) -> Path:
    """Return the output of chunk `number`: AA/wiki_00 ... AA/wiki_99, AB/wiki_00, ..., AAA/wiki_00."""
    folder, file = divmod(number, FILES_PER_FOLDER)
    letters = ""
    # As the columns of a spreadsheet are named, from AA on.
    folder += 26
    while folder >= 0:
        folder, letter = divmod(folder, 26)
        letters = chr(65 + letter) + letters
        folder -= 1
    return Path(letters) / f"wiki_{file:02}"


# --- chunks of the dump


def _chunks(dump: Dump, header: bytes, size: int, templates: Path | None) -> Iterator[Shard]:
    if templates is not None:
        count = _collect_templates(dump.path, templates)
        dump.notes.append(f"{count:,} template pages found, for WikiExtractor to expand")
    for number, chunk in enumerate(dump.chunks(size)):
        output = output_name(number)
        yield Shard(
            inputs=(dump.path,),
            output=output,
            arguments={
                "name": output.as_posix(),
                "xml_bytes": chunk.xml_bytes,
                "skipped": {
                    "redirects": chunk.redirects,
                    "pages_of_other_namespaces": chunk.other_namespaces,
                },
            },
            weight=chunk.raw_bytes,
            prepare=partial(_write_chunk, header=header, pages=chunk.pages),
        )


def _write_chunk(folder: Path, header: bytes, pages: list[bytes]) -> tuple[Path, ...]:
    _write_dump(folder / "chunk.xml", header, pages)
    return (folder / "chunk.xml",)


def _write_dump(path: Path, header: bytes, pages: list[bytes]) -> None:
    with open(path, "wb") as file:
        file.write(header)
        for page in pages:
            file.write(page + b"\n")
        file.write(b"</mediawiki>\n")


def _header_without_templates(header: bytes) -> bytes:
    """Return the header with a colon after the name of the template namespace.

    WikiExtractor drops every title that begins with that name ("Template matching", "Modèle réduit").
    With the colon it drops only pages of the namespace, which are not in the chunk anyway.
    """
    match = TEMPLATE_NAMESPACE.search(header)
    if match is None:
        return header
    line = b'\n      <namespace key="10">' + match[1] + b":</namespace>"
    return header[: match.end()] + line + header[match.end() :]


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


# --- text of a chunk


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
    header, titles = xml[:begin], _titles(xml[begin:])
    notes: list[str] = []
    try:
        _run_wikiextractor(dump, output, templates)
    except ToolFailedError:
        extract = partial(_extract_pages, header=header, folder=dump.parent, templates=templates)
        with open(output, "wb") as file:
            for text in _halves(PAGE.findall(xml, begin), extract, notes):
                file.write(text)
    del xml
    documents, empty = _count_documents(output)
    lost = Counter(page for page, _ in titles) - documents
    if lost:
        names = [f"{page} {title!r}" for page, title in titles if page in lost][:PAGES_NAMED]
        more = ", ..." if lost.total() > PAGES_NAMED else ""
        notes.append(
            f"{lost.total()} of {len(titles)} pages did not come back from WikiExtractor "
            f"({', '.join(names)}{more})"
        )
    return Stats(
        documents=documents.total(),
        bytes_in=xml_bytes,
        extra={
            "pages_given": len(titles),
            "pages_lost": lost.total(),
            "pages_without_text": empty,
            **skipped,
        },
        notes=tuple(f"{name}: {note}" for note in notes),
    )


def _extract_pages(
    pages: list[bytes], *, header: bytes, folder: Path, templates: Path | None
) -> bytes:
    dump, output = folder / "piece.xml", folder / "piece.out"
    _write_dump(dump, header, pages)
    _run_wikiextractor(dump, output, templates)
    return output.read_bytes()


def _halves(
    pages: list[bytes], extract: Callable[[list[bytes]], bytes], notes: list[str]
) -> Iterator[bytes]:
    """Yield the text of `pages`, and of halves and halves of halves where WikiExtractor fails."""
    try:
        text = extract(pages)
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
        ((page, title),) = _titles(pages[0])
        notes.append(f"WikiExtractor fails on page {page} {title!r}, left out: {error}")
        return
    yield text


def _titles(pages: bytes) -> list[tuple[int, str]]:
    """Return id and title of every page."""
    titles = []
    for page in pages.split(b"</page>")[:-1]:
        number, title = PAGE_ID.search(page), TITLE.search(page)
        name = title[1].decode(errors="replace") if title else ""
        titles.append((int(number[1]) if number else -1, name))
    return titles


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


# --- the program


def _run_wikiextractor(dump: Path, output: Path, templates: Path | None) -> None:
    """Run WikiExtractor on a small dump and write all of its text to `output`.

    When one of its processes dies the others wait forever, and the exit status does not show it. So
    its messages are searched for a traceback, its processes checked for work, and its time is limited.
    The messages come through a pipe, because a full disk would lose them. Raises OSError for a full
    disk, ToolFailedError for anything else.
    """
    folder = dump.with_suffix(".text")
    command = [sys.executable, "-m", "wikiextractor.WikiExtractor", str(dump.absolute())]
    command += ["-o", str(folder.absolute()), "--bytes", "1000G", "--processes", "1", "--quiet"]
    command += ["--templates", str(templates.absolute())] if templates else ["--no-templates"]
    limit = SECONDS_PER_CHUNK + SECONDS_PER_MEGABYTE * dump.stat().st_size / 1e6
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    program = start_program(command, stdout=write_end, stderr=write_end, cwd=dump.parent)
    os.close(write_end)
    try:
        problem, messages = _watch(program, read_end, limit)
    finally:
        kill_program(program)
        os.close(read_end)
    text = messages.decode(errors="replace").strip()
    result = folder / "AA" / "wiki_00"
    if os.strerror(errno.ENOSPC) in text:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(output))
    if problem or "Traceback" in text or not result.exists():
        reason = text.splitlines()[-1] if text else "no output"
        raise ToolFailedError(f"{problem or 'no text'} ({reason})")
    os.replace(result, output)
    result.parent.rmdir()


def _watch(program: "subprocess.Popen[bytes]", pipe: int, limit: float) -> tuple[str, bytes]:
    """Wait for the end of a program, or for a problem; return the problem and the messages."""
    problem, messages, ticks = "", b"", [-1]
    now = next_check = time.monotonic()
    end = now + limit
    while not problem:
        try:
            status = program.wait(SECONDS_BETWEEN_READS)
            problem = f"exit status {status}" if status else ""
            break
        except subprocess.TimeoutExpired:
            has_crashed = b"Traceback" in messages  # as of the last read, so that it is complete
            messages += _read_available(pipe)
        now = time.monotonic()
        if now >= next_check:
            next_check, used = now + SECONDS_BETWEEN_CHECKS, _ticks_asleep(program.pid)
            ticks = [*ticks, used] if used == ticks[-1] else [used]
        if now > end:
            problem = f"no end after {limit:.0f} s"
        elif has_crashed:
            problem = "a crash"
        elif ticks[-1] >= 0 and (len(ticks) - 1) * SECONDS_BETWEEN_CHECKS >= SECONDS_ASLEEP:
            problem = f"stuck, all its processes asleep for {SECONDS_ASLEEP:.0f} s"
    return problem, messages + _read_available(pipe)


def _read_available(pipe: int) -> bytes:
    data = b""
    with suppress(BlockingIOError):
        while block := os.read(pipe, 1 << 16):
            data += block
    return data


def _ticks_asleep(group: int) -> int:
    """Return the processor ticks that a process group has used if all of it sleeps, else -1.

    A process that waits for a processor or a disk does not sleep. Always -1 where there is no /proc.
    """
    ticks = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, process_group, *fields = path.read_text().rpartition(")")[2].split()
            if int(process_group) == group:
                ticks.append(int(fields[8]) + int(fields[9]) if state in "SZ" else -1)
    return -1 if not ticks or -1 in ticks else sum(ticks)
