"""Turn a dump into text: one reader cuts it, many WikiExtractors work on the pieces.

WikiExtractor has one reader whatever its `--processes`, cannot continue after a stop and loses pages
without a word. So the dump is read here (`dump.py`) and cut at page boundaries into chunks, each a
small dump with the same header; a chunk is a shard, and WikiExtractor 3.1.0 runs on each as a program
of its own (it is AGPL: called, never imported). Every page given is looked for in what comes back;
a chunk it fails on is halved until the page at fault stands alone. The output is WikiExtractor's
form, `<doc id= url= title=>` blocks with &amp;, &lt; and &gt; escaped, in AA/wiki_00, AA/wiki_01, ...
"""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from bert_cli.config.data import ExtractSettings
from bert_cli.data.shards import runner
from bert_cli.data.shards.manifest import Shard, Stats
from bert_cli.data.shards.runner import run_shards
from bert_cli.data.text.wikipedia import NAMESPACE, TITLE, Chunk, Dump, find_dump
from bert_cli.errors import DataError
from bert_cli.files import atomic_file, read_json

FILES_PER_FOLDER = 100
SECONDS_BETWEEN_READS = 0.25
"""Of WikiExtractor's messages, which must not fill their pipe."""
SECONDS_BETWEEN_LOOKS = 1.0
"""At its processes: each look reads all of /proc."""
SECONDS_ASLEEP = 5.0
"""Time without work after which WikiExtractor is stuck: its parts wait for one that has died."""
PACKED_EXPANSION = 4.0
"""Bytes of XML in a byte of a packed dump: 3.0 to 5.4 in five of them."""
TEXT_PER_BYTE = 0.21
"""Bytes of text for a byte of XML: 20 GB for a packed dump of 24 GB, as docs/wikipedia.md reckons."""
SECONDS_PER_CHUNK, SECONDS_PER_MEGABYTE = 300.0, 60.0  # 8 MB/s is usual, 2 with templates
PAGES_NAMED = 3  # in a note about lost pages
PAGES_FAILED = 20  # of one chunk, left out one by one; more is no longer the pages' fault

PAGE_ID = re.compile(rb"<id>(\d+)</id>")
DOC = re.compile(rb'<doc id="(\d+)" ')
TEMPLATE_NAMESPACE = re.compile(rb'<namespace key="10"[^>]*>([^<]*)</namespace>')


class ToolFailedError(Exception):
    """WikiExtractor stopped, crashed or hung on a piece; the text says how."""


def run(settings: ExtractSettings) -> None:
    """Extract the text of a dump. Raises DataError if it is no dump or no page came out of it."""
    path = find_dump(settings.dump)
    dump = Dump(path)
    templates = settings.out / ".done" / "templates.xml" if settings.expand_templates else None
    header = dump.header if templates else _header_without_templates(dump.header)
    run_shards(
        "extract",
        _cut(dump, header, settings.chunk_megabytes * 1_000_000, templates),
        partial(extract_chunk, templates=templates),
        out=settings.out,
        processes=settings.processes,
        settings={
            "expand_templates": settings.expand_templates,
            "chunk_megabytes": settings.chunk_megabytes,
        },
        versions=["wikiextractor"],
        total=path.stat().st_size,
        notes=dump.notes,
        needs=bytes_written(dump, settings),
        scheduler=settings.scheduler,
        own_process=True,  # so that WikiExtractor dies with this process, see shards.py
    )


def bytes_written(dump: Dump, settings: ExtractSettings) -> int:
    """Estimate the bytes of the text, and of the chunks that are on the disk with it at a time.

    Of each chunk there are the articles and their text; twice as many chunks as processes are begun.
    """
    size = dump.path.stat().st_size
    expansion = PACKED_EXPANSION if dump.is_packed else 1.0
    text = TEXT_PER_BYTE * size * expansion
    chunks = min(2 * settings.processes * settings.chunk_megabytes * 1e6, size * expansion)
    return round(text + chunks)


def output_name(number: int) -> Path:
    """Name the output of chunk `number`: AA/wiki_00 ... AA/wiki_99, AB/wiki_00, ..., AAA/wiki_00."""
    folder, file = divmod(number, FILES_PER_FOLDER)
    letters = ""
    # As the columns of a spreadsheet are named, from AA on.
    folder += 26
    while folder >= 0:
        folder, letter = divmod(folder, 26)
        letters = chr(65 + letter) + letters
        folder -= 1
    return Path(letters) / f"wiki_{file:02}"


def extract_chunk(inputs: tuple[Path, ...], output: Path, templates: Path | None = None) -> Stats:
    """Run WikiExtractor on one chunk and compare what it was given with what came back."""
    chunk, counts = inputs
    passed_over = read_json(counts, dict[str, int], DataError, "run the same command again")
    text = chunk.read_bytes()
    begin = text.find(b"<page>")
    header, given = text[:begin], _titles(text[begin:])
    notes: list[str] = []
    try:
        _run_wikiextractor(chunk, output, templates)
    except ToolFailedError:
        pages = re.findall(rb"<page>.*?</page>", text[begin:], re.DOTALL)
        with open(output, "wb") as file:
            for piece in _halved(header, pages, chunk.parent, templates, notes):
                file.write(piece)
    del text
    back, empty = _docs(output)
    lost = Counter(page for page, _ in given) - back
    if lost:
        names = [f"{page} {title!r}" for page, title in given if page in lost][:PAGES_NAMED]
        more = ", ..." if lost.total() > PAGES_NAMED else ""
        notes.append(
            f"{lost.total()} of {len(given)} pages did not come back from WikiExtractor "
            f"({', '.join(names)}{more})"
        )
    extra = {
        "pages_given": len(given),
        "pages_lost": lost.total(),
        "pages_without_text": empty,
        "redirects": passed_over["redirects"],
        "pages_of_other_namespaces": passed_over["other_namespaces"],
    }
    place = "/".join(output.parent.parent.name.split("+"))
    return Stats(
        documents=back.total(),
        bytes_in=passed_over["xml_bytes"],
        extra=extra,
        notes=tuple(f"{place}: {note}" for note in notes),
    )


def _cut(dump: Dump, header: bytes, size: int, templates: Path | None) -> Iterator[Shard]:
    if templates is not None:
        count = _collect_templates(dump.path, templates)
        dump.notes.append(f"{count:,} template pages found, for WikiExtractor to expand")
    for number, chunk in enumerate(dump.chunks(size)):
        yield Shard(
            inputs=(dump.path,),
            output=output_name(number),
            prepare=partial(_write_chunk, header=header, chunk=chunk),
            weight=chunk.raw_bytes,
        )


def _write_chunk(folder: Path, header: bytes, chunk: Chunk) -> tuple[Path, ...]:
    _write_dump(folder / "chunk.xml", header, chunk.pages)
    names = ("xml_bytes", "redirects", "other_namespaces")
    counts = folder / "counts.json"
    counts.write_text(json.dumps({name: getattr(chunk, name) for name in names}))
    return folder / "chunk.xml", counts


def _write_dump(path: Path, header: bytes, pages: list[bytes]) -> None:
    with open(path, "wb") as file:
        file.write(header)
        for page in pages:
            file.write(page + b"\n")
        file.write(b"</mediawiki>\n")


def _header_without_templates(header: bytes) -> bytes:
    """Let WikiExtractor take articles whose title begins like the namespace of templates.

    It leaves out any title that begins with that name ("Template matching", "Modèle réduit"). With
    a colon in the name it leaves out only what the namespace has already excluded.
    """
    found = TEMPLATE_NAMESPACE.search(header)
    if found is None:
        return header
    line = b'\n      <namespace key="10">' + found[1] + b":</namespace>"
    return header[: found.end()] + line + header[found.end() :]


def _collect_templates(path: Path, templates: Path) -> int:
    """Write the pages of namespace 10 into one file, once; return how many there are."""
    if not templates.exists() or templates.stat().st_mtime_ns < path.stat().st_mtime_ns:
        with atomic_file(templates) as partial, partial.open("wb") as file:
            for page in Dump(path).pages():
                found = NAMESPACE.search(page[: page.find(b"<revision")])
                if found is not None and found[1] == b"10":
                    file.write(page + b"\n")
    with open(templates, "rb") as file:
        return sum(b"</page>" in line for line in file)


def _titles(pages: bytes) -> list[tuple[int, str]]:
    """Give id and title of every page of a chunk."""
    found = []
    for page in pages.split(b"</page>")[:-1]:
        number, title = PAGE_ID.search(page), TITLE.search(page)
        name = title[1].decode(errors="replace") if title else ""
        found.append((int(number[1]) if number else -1, name))
    return found


def _docs(output: Path) -> tuple[Counter[int], int]:
    """Count the <doc> blocks of a file by page id, and those with nothing below their title."""
    back: Counter[int] = Counter()
    empty = lines = 0
    with open(output, "rb") as file:
        for line in file:
            if found := DOC.match(line):
                back[int(found[1])] += 1
                lines = 0
            elif line.startswith(b"</doc>"):
                empty += lines < 2
            elif line.strip():
                lines += 1
    return back, empty


def _halved(
    header: bytes, pages: list[bytes], folder: Path, templates: Path | None, notes: list[str]
) -> Iterator[bytes]:
    """Give the text of `pages`, in halves and halves of halves where WikiExtractor fails."""
    chunk, output = folder / "piece.xml", folder / "piece.out"
    _write_dump(chunk, header, pages)
    try:
        _run_wikiextractor(chunk, output, templates)
    except ToolFailedError as error:
        if len(pages) == 1:
            ((page, title),) = _titles(pages[0])
            if len(notes) == PAGES_FAILED:
                raise DataError(
                    f"extract: WikiExtractor fails on page after page ({error}); "
                    "is the disk full, or the installation broken?"
                ) from None
            notes.append(f"WikiExtractor fails on page {page} {title!r}, left out: {error}")
            return
        middle = len(pages) // 2
        yield from _halved(header, pages[:middle], folder, templates, notes)
        yield from _halved(header, pages[middle:], folder, templates, notes)
        return
    yield output.read_bytes()


def _run_wikiextractor(chunk: Path, output: Path, templates: Path | None) -> None:
    """Run the program on one small dump, its whole text into `output`.

    A worker of it that dies leaves the rest waiting for ever, and the exit status says nothing; so its
    messages are watched for a traceback, its processes for one that is not asleep, and its time is
    limited. The messages come through a pipe, because a full disk would not take them. Raises OSError
    for a full disk, ToolFailedError for anything else.
    """
    folder = chunk.with_suffix(".text")
    line = [sys.executable, "-m", "wikiextractor.WikiExtractor", str(chunk.absolute())]
    line += ["-o", str(folder.absolute()), "--bytes", "1000G", "--processes", "1", "--quiet"]
    line += ["--templates", str(templates.absolute())] if templates else ["--no-templates"]
    limit = SECONDS_PER_CHUNK + SECONDS_PER_MEGABYTE * chunk.stat().st_size / 1e6
    end = time.monotonic() + limit
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    program = subprocess.Popen(
        line, stdout=writing, stderr=writing, process_group=0, cwd=chunk.parent
    )
    os.close(writing)
    runner.PROGRAMS.add(program.pid)
    trouble, messages, ticks, next_look = "", b"", [-1], 0.0
    while not trouble:
        try:
            status = program.wait(SECONDS_BETWEEN_READS)
            trouble = f"exit status {status}" if status else ""
            break
        except subprocess.TimeoutExpired:
            crashed = b"Traceback" in messages  # at the read before, so that it is written out
            messages += _read_available(reading)
            now = time.monotonic()
            if now >= next_look:
                next_look, used = now + SECONDS_BETWEEN_LOOKS, _ticks_asleep(program.pid)
                ticks = [*ticks, used] if used == ticks[-1] else [used]
            if now > end:
                trouble = f"no end after {limit:.0f} s"
            elif crashed:
                trouble = "a crash"
            elif ticks[-1] >= 0 and (len(ticks) - 1) * SECONDS_BETWEEN_LOOKS >= SECONDS_ASLEEP:
                trouble = f"stuck, all its processes asleep for {SECONDS_ASLEEP:.0f} s"
    if trouble:
        _kill(program)
    runner.PROGRAMS.discard(program.pid)
    messages += _read_available(reading)
    os.close(reading)
    text = messages.decode(errors="replace").strip()
    made = folder / "AA" / "wiki_00"
    if os.strerror(errno.ENOSPC) in text:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(output))
    if trouble or "Traceback" in text or not made.exists():
        reason = text.splitlines()[-1] if text else "no output"
        raise ToolFailedError(f"{trouble or 'no text'} ({reason})")
    os.replace(made, output)
    made.parent.rmdir()


def _read_available(pipe: int) -> bytes:
    """Return what a pipe that does not block holds now."""
    data = b""
    with suppress(BlockingIOError):
        while piece := os.read(pipe, 1 << 16):
            data += piece
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


def _kill(program: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    program.wait()
