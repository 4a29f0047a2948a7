#!/usr/bin/env python
r"""Print the words, the leftovers and the speed of `bert extract` and of WikiExtractor, for some dumps.

The reference is the plain text of the paragraphs and list items of a page in wikitextparser's tree: what is left
when templates, tables, references, galleries, formulas, comments, links to files and categories, and headings are
taken out. "Recall" is the fraction of its words that an output has, counted page by page as multisets. "Leftovers"
are matches of the patterns in LEFTOVERS for a million words of output as `bert preprocess` reads it. Speeds are MB
(10^6 bytes) of XML for a second of processor time, of complete processes on the same uncompressed dump, whose runs
alternate; the ratios to WikiExtractor are those of the medians. Of a dump of less than 2 MB they show the start of
Python. --packed measures on the packed files, in MB of these.

    pip install wikitextparser wikiextractor
    scripts/bench_extract.py dumps/ --rounds 3
"""

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from html import unescape
from pathlib import Path

from bert_cli.data.text.documents import marked_lines
from bert_cli.data.text.files import Part, Reading
from bert_cli.data.text.wikipedia import Dump

WORD = re.compile(r"\w+")
LEFTOVERS = {
    "{{ or }}": r"\{\{|\}\}",
    "[[ or ]]": r"\[\[|\]\]",
    "{| or |}": r"\{\||\|\}",
    "table bars": r"\|\||^[|!]",
    "file options": r"\b(?:thumb|thumbnail|upright|frameless|nhỏ|phải|мини|дясно)\s*\||\b\d+px\b",
    "bars": r"\w\|\w",
    "'' ": r"''+",
    "tags": r"</?(?:ref|br|sup|sub|div|span|small|gallery|math|table|nowiki|li|ul|center|font|blockquote|code|i|b)\b",
    "comments": r"<!--|-->",
    "==": r"^==|==$",
    "list marks": r"^[*#]",
    "entities": r"&(?:[a-z]{2,8}|#\d+);",
    "magic words": r"__[A-Z]+__",
    "empty brackets": r"\(\s*[,;]|\(\s*\)",
    "citations": r"\bISBN\s*=|\b(?:accessdate|archiveurl|publisher|url|title|date)\s*=",
    "placeholders": r"\b(?:formula|codice)_\d+",
    "links": r"\[https?://|^(?:File|Image|Category|Thể loại|Tập tin|Hình|Категория|Файл):",
}
PATTERNS = {name: re.compile(text, re.MULTILINE) for name, text in LEFTOVERS.items()}
REFERENCE = ["ref", "gallery", "math", "timeline", "score", "syntaxhighlight", "source", "pre"]
REFERENCE += ["imagemap", "chem"]

Pages = dict[int, str]


def wikitexts(dump: Path) -> Iterator[tuple[int, str]]:
    """Yield id and wikitext of every article."""
    for chunk in Dump(dump).chunks(sys.maxsize):
        for page in chunk.pages:
            number = re.search(rb"<id>(\d+)</id>", page)
            text = re.search(rb"<text[^>]*>(.*)</text>", page, re.DOTALL)
            assert number is not None
            yield int(number[1]), unescape(text[1].decode(errors="replace")) if text else ""


def hidden_names(header: bytes) -> set[str]:
    """Return the lower-cased names of the namespaces whose links show no text."""
    names = re.findall(rb'<namespace key="(?:6|-2|14)"[^>]*>([^<]+)<', header)
    return {"file", "image", "media", "category"} | {name.decode().lower() for name in names}


def is_hidden(title: str, text: str | None, hidden: set[str]) -> bool:
    """Return whether a link shows no text: to a file, a category, or the page of another language."""
    space, colon, _ = title.partition(":")
    name = space.strip().lower()
    is_language = text is None and re.fullmatch(r"[a-z]{2,3}(-[a-z]+)*|simple", name)
    return bool(colon and name and (name in hidden or is_language))


def reference(text: str, hidden: set[str]) -> str:
    """Return the text of paragraphs and list items by the tree of wikitextparser."""
    import wikitextparser
    from wikitextparser._wikitext import DeadIndexError

    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    for tag in REFERENCE:
        text = re.sub(rf"(?is)<{tag}\b[^<>]*/>|<{tag}\b[^<>]*>.*?</{tag}\s*>", "", text)
    for kind in ("templates", "tables", "wikilinks"):
        tree = wikitextparser.parse(text)
        nodes = getattr(tree, kind)
        if kind == "wikilinks":
            nodes = [node for node in nodes if is_hidden(node.title, node.text, hidden)]
        for node in nodes:
            with suppress(DeadIndexError):  # within one that is dropped
                node.string = ""
        text = tree.string
    plain = wikitextparser.parse(text).plain_text()
    lines = (
        line for line in plain.split("\n") if not re.match(r"\s*(=+.*=+\s*$|[|!]|\{\||__)", line)
    )
    return unescape("\n".join(line.lstrip("*#:; ") for line in lines))


def commands(dump: Path, home: Path) -> dict[str, list[str]]:
    """Return the command of each extractor, which writes into the folder of its name."""
    python = [sys.executable, "-m"]
    single = ["--processes", "1"]
    plain = ["--no-templates", "--quiet", "--bytes", "1000G"]
    theirs = [*python, "wikiextractor.WikiExtractor", str(dump), "-o", str(home / "wikiextractor")]
    return {
        "bert": [*python, "bert_cli", "extract", str(dump), str(home / "bert"), *single],
        "wikiextractor": [*theirs, *single, *plain],
    }


def measure(command: list[str]) -> float:
    """Run a process and its children; return their seconds of processor time."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            sys.exit(f"{command} failed:\n{log.read()[-2000:].decode()}")
    return usage.ru_utime + usage.ru_stime


def read_output(path: Path) -> Pages:
    """Return the text of every page, as `bert preprocess` reads it."""
    pages: dict[int, list[str]] = {}
    current: list[str] = []
    for file in sorted(path.rglob("wiki_[0-9][0-9]")):
        for kind, line in marked_lines(
            Part(file, "wikiextractor", "", file.stat().st_size), Reading()
        ):
            if kind == "document":
                number = re.search(r'id="(\d+)"', line)
                assert number is not None
                current = pages.setdefault(int(number[1]), [])
            elif kind == "body":
                current.append(line)
    return {number: "\n".join(lines) for number, lines in pages.items()}


def words(text: str) -> Counter[str]:
    # Powers and indices are characters of their own in our output (10⁶), and digits in the reference.
    return Counter(WORD.findall(unicodedata.normalize("NFKC", text)))


def judge(pages: Pages, truth: Pages) -> tuple[int, float, Counter[str]]:
    """Return the words of the pages, the fraction of the reference's that they have, and the leftovers."""
    kept = total = count = 0
    leftovers: Counter[str] = Counter()
    for number, text in truth.items():
        expected = words(text)
        extracted = words(pages.get(number, ""))
        kept += (expected & extracted).total()
        total += expected.total()
        count += extracted.total()
        for name, pattern in PATTERNS.items():
            leftovers[name] += len(pattern.findall(pages.get(number, "")))
    return count, kept / max(1, total), leftovers


def uncompressed(dump: Path, home: Path) -> Path:
    """Write the articles of a dump as one XML file, which every extractor reads."""
    reader, path = Dump(dump), home / "dump.xml"
    pages = [page for chunk in reader.chunks(sys.maxsize) for page in chunk.pages]
    path.write_bytes(reader.header + b"\n".join(pages) + b"\n</mediawiki>\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dumps", type=Path, help="folder of MediaWiki dumps, or one of them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--packed", action="store_true", help="read the dumps as they are")
    args = parser.parse_args()
    files = sorted(args.dumps.iterdir()) if args.dumps.is_dir() else [args.dumps]
    print("| dump | extractor | words | recall | leftovers | MB/s | ratio |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for file in files:
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder)
            dump = file if args.packed else uncompressed(file, home)
            hidden = hidden_names(Dump(dump).header)
            truth = {number: reference(text, hidden) for number, text in wikitexts(dump)}
            seconds: dict[str, list[float]] = {}
            for _ in range(args.rounds):
                for name, command in commands(dump, home).items():
                    shutil.rmtree(home / name, ignore_errors=True)
                    seconds.setdefault(name, []).append(measure(command))
            size = dump.stat().st_size / 1e6
            baseline = statistics.median(seconds["wikiextractor"])
            for name in seconds:
                count, kept, leftovers = judge(read_output(home / name), truth)
                median = statistics.median(seconds[name])
                rate = 1e6 * leftovers.total() / max(1, count)
                numbers = [f"{count:,}", f"{kept:.2%}", f"{rate:,.0f}"]
                numbers += [f"{size / median:.2f}", f"{baseline / median:.2f}"]
                label = file.name.partition("-latest")[0].partition(".")[0]
                print("|", " | ".join([label, name, *numbers]), "|", flush=True)


if __name__ == "__main__":
    main()
