"""Read a MediaWiki dump in one pass, packed or not, and split it between pages into chunks of articles."""

import codecs
import html
import itertools
import mmap
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bert_cli.data.io.files import SUFFIXES, DamagedError, compression_of, unpack
from bert_cli.data.io.inputs import visible_files
from bert_cli.errors import DataError

LARGEST_PAGE = 1 << 28  # MediaWiki's limit is 2 MB of text
LARGEST_HEADER = 1 << 22
FIRST_STREAMS = 1 << 24  # bytes searched for the second stream; the first stream has the header

DAMAGED = "is damaged or cut off"  # in every note of lost text
STREAM = re.compile(rb"BZh[1-9]1AY&SY")  # begins a stream of bzip2; by chance, once in 10^22 bytes

INDEX = "-index.txt"  # in the name of the index of a multistream dump
# A redirect without its tag: in English, or in any language a page with nothing but that line and templates below.
REDIRECT = re.compile(
    rb"<text[^>]*>\s*+#(?:(?i:redirect)\s*+:?\s*+\[\[|[^\s#*:;\[\]{}|<&]++\s*+:?\s*+\[\[[^\[\]\n]*\]\]"
    rb"(?>(?:\s|\{\{[^{}]*\}\}|\[\[[^\[\]]*\]\])*)</text>)"
)
NAMESPACE = re.compile(rb"<ns>\s*(-?\d+)\s*</ns>")
LANGUAGE = re.compile(rb'<mediawiki[^>]*xml:lang="([A-Za-z-]+)"')
TITLE = re.compile(rb"<title>(.*?)</title>", re.DOTALL)
NAMESPACE_NAME = re.compile(rb'<namespace key="-?[1-9]\d*"[^>]*>([^<]+)<')
REVISION = re.compile(rb"<revision\b(?>[^<]*(?:<(?!/revision>)[^<]*)*)</revision>")
TIMESTAMP = re.compile(rb"<timestamp>\s*([^<]*)")
MODEL = re.compile(rb"<model>\s*([^<]*?)\s*</model>")
WIKITEXT = "wikitext"


def find_dump(path: Path) -> Path:
    """Return the dump: `path`, or the only dump in a folder."""
    if path.is_dir():
        suffixes = (".xml", *SUFFIXES)
        files = [file for file in visible_files(path) if file.suffix in suffixes]
        dumps = [file for file in files if INDEX not in file.name]
        if len(dumps) != 1:
            names = ", ".join(dump.name for dump in dumps[:4])
            problem = "holds no dump"
            if dumps:
                problem = f"holds {len(dumps)} dumps ({names})"
            raise DataError(f"dump ({path})", problem, "use one file")
        return dumps[0]
    if not path.is_file():
        raise DataError(f"dump ({path})", "no such file", "run `bert download`, or use a dump")
    return path


@dataclass
class Chunk:
    """Consecutive articles of the dump, and the number of other pages among them."""

    pages: list[bytes] = field(default_factory=list)  # each with its newest revision alone
    article_bytes: int = 0
    xml_bytes: int = 0  # of all pages
    raw_bytes: int = 0  # read of the (compressed) file
    redirects: int = 0
    other_namespaces: int = 0
    other_models: Counter[str] = field(default_factory=Counter)  # pages by their content model
    streams: tuple[int, int] | None = None  # its range in the file, instead of its pages


class Dump:
    """A dump of one or many streams in UTF-8 or UTF-16, open for a single pass; `notes` describes its faults.

    A file that ends within a page loses only this page. A damaged file loses the bytes from the damage to the next
    bzip2 stream; Wikipedia's dumps consist of many streams. With `streams`, only this range of bytes is read, a range
    that `streams()` returned, and `header` is the header of the file.
    """

    def __init__(
        self, path: Path, streams: tuple[int, int] | None = None, header: bytes = b""
    ) -> None:
        self.path = path
        self.notes: list[str] = []
        self.is_utf16 = False
        self._raw_bytes = 0
        self._start, self._stop = streams or (0, path.stat().st_size)
        self._blocks = self._utf8(self._unpacked())
        self._is_range = streams is not None
        self.header = header
        self._rest = b""
        if not streams:
            self.header, self._rest = self._read_header()
        self._prefixes = set(map(_normal, NAMESPACE_NAME.findall(self.header)))

    def chunks(self, size: int) -> Iterator[Chunk]:
        """Yield chunks of at least `size` bytes of articles (namespace 0, no redirect)."""
        chunk = Chunk()
        raw = 0
        for page in self.pages():
            head = page[: page.find(b"<revision")]
            match = NAMESPACE.search(head)
            if match:
                in_namespace = match[1] == b"0"
            else:  # old dumps lack <ns>
                title = TITLE.search(head)
                name = title[1] if title else b""
                prefix, colon, _ = name.partition(b":")
                in_namespace = not colon or _normal(prefix) not in self._prefixes
            text = page.find(b"<text", len(head))
            is_redirect = b"<redirect" in head or REDIRECT.match(page, text)
            match = MODEL.search(page, len(head))
            model = WIKITEXT
            if match:
                model = match[1].decode(errors="replace")
            is_article = in_namespace and not is_redirect and model == WIKITEXT
            # Only an article starts a new chunk, so other pages at the end count with the last one.
            if is_article and chunk.article_bytes >= size:
                chunk.raw_bytes = self._raw_bytes - raw
                raw = self._raw_bytes
                yield chunk
                chunk = Chunk()
            chunk.xml_bytes += len(page)
            if is_article:
                chunk.pages.append(page)
                chunk.article_bytes += len(page)
            elif not in_namespace:
                chunk.other_namespaces += 1
            elif is_redirect:
                chunk.redirects += 1
            else:
                chunk.other_models[model] += 1
        chunk.raw_bytes = self._raw_bytes - raw
        if chunk.pages or chunk.other_models or self._is_range:
            yield chunk

    def streams(self, size: int) -> list[Chunk]:
        """Return ranges of about `size` bytes that can be unpacked separately, none if the file has no such ranges.

        Wikipedia's multistream dumps have a bzip2 stream for every 100 pages. Streams are found by their first bytes,
        so the index file of such a dump is not needed; it may be missing, truncated or belong to another dump.
        """
        if compression_of(self.path) != "bzip2" or self.is_utf16:
            return []
        second = self._next_stream(1, FIRST_STREAMS)
        if second is None:
            return []
        block = next(Dump(self.path, (second, self._stop))._blocks, b"")
        if not block.lstrip().startswith(b"<page>"):
            return []  # as pbzip2 writes them, which may begin within a page
        starts = [0]
        start = self._next_stream(size)
        while start is not None:
            starts.append(start)
            start = self._next_stream(start + size)
        ranges = itertools.pairwise([*starts, self._stop])
        return [Chunk(raw_bytes=stop - start, streams=(start, stop)) for start, stop in ranges]

    def pages(self) -> Iterator[bytes]:
        """Yield every `<page>...</page>` of the file, with its newest revision alone."""
        rest = bytearray()
        count = 0
        for block in itertools.chain([self._rest], self._blocks):
            if not block:  # the page has lost its end
                rest.clear()
            searched = max(0, len(rest) - len(b"</page>"))
            rest += block
            start = 0
            while (end := rest.find(b"</page>", max(start, searched))) >= 0:
                begin = rest.find(b"<page>", start, end)
                start = end + len(b"</page>")
                if begin >= 0:
                    count += 1
                    yield _with_newest_revision(bytes(rest[begin:start]))
            del rest[:start]
            if len(rest) > LARGEST_PAGE:  # of a full history
                rest = bytearray(_with_newest_revision(bytes(rest)))
            if len(rest) > LARGEST_PAGE:
                problem = f"page {count + 1} has no end within {LARGEST_PAGE >> 20} MiB"
                remedy = "it is not a MediaWiki dump, or it is damaged; download it again"
                raise DataError(f"dump ({self.path})", problem, remedy)
        is_last = self._stop == self.path.stat().st_size
        if not is_last and rest.strip():
            problem = f"a bzip2 stream ends within a page, at byte {self._stop:,}"
            raise DataError(f"dump ({self.path})", problem, "unpack it first, with bunzip2")
        is_reported = any(DAMAGED in note for note in self.notes)
        if is_last and b"</mediawiki>" not in rest and not is_reported:
            problem = f"(no </mediawiki>): pages may be missing after the last of {count:,}"
            self.notes.append(f"{self.path.name} {DAMAGED} {problem}")

    def _read_header(self) -> tuple[bytes, bytes]:
        """Return the text before the first page, or a default one without <siteinfo>, and the rest."""
        text = b""
        for block in self._blocks:
            text += block
            if b"<page>" in text or len(text) > LARGEST_HEADER:
                break
        begin = text.find(b"<page>")
        if begin < 0 or b"<mediawiki" not in text[:begin]:
            problem = f"is not a MediaWiki dump ({', '.join(self.notes) or 'no <mediawiki> with a <page>'})"
            remedy = "use a pages-articles file: .xml, .xml.bz2, .xml.xz, .xml.gz or .xml.zst"
            raise DataError(f"dump ({self.path})", problem, remedy)
        header = text[:begin]
        rest = text[begin:]
        if b"</siteinfo>" not in header:
            match = LANGUAGE.search(header)
            language = "en"
            if match:
                language = match[1].decode()
            header = _default_header(language)
            self.notes.append(
                f"{self.path.name} has no <siteinfo>: taken as {language}.wikipedia.org "
                "with the English names of the namespaces"
            )
        return header, rest

    def _unpacked(self) -> Iterator[bytes]:
        """Yield the unpacked blocks, and an empty block where blocks are lost."""
        start: int | None = self._start
        while start is not None:
            try:
                with open(self.path, "rb") as file:
                    file.seek(start)
                    for block in unpack(file, compression_of(self.path), self._stop):
                        self._raw_bytes = file.tell()
                        yield block
                return
            except DamagedError as error:
                following = self._next_stream(error.frame + 1)
                lost = "after that"
                if following:
                    lost = f"between byte {error.frame:,} and byte {following:,}"
                self.notes.append(f"{self.path.name} {DAMAGED} ({error}): pages {lost} are missing")
                start = None
                if following and following < self._stop:
                    start = following
            yield b""

    def _next_stream(self, start: int, end: int = sys.maxsize) -> int | None:
        """Return the first byte of the next bzip2 stream before an end, None where there is none."""
        with open(self.path, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        match = STREAM.search(data, start, end)
        if not match:
            return None
        return match.start()

    def _utf8(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        first = b""
        for block in blocks:
            first += block
            if len(first) >= 3:
                break
        if first[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            self.is_utf16 = True
            decoder = codecs.getincrementaldecoder("utf-16")(errors="replace")
            for block in itertools.chain([first], blocks):
                yield decoder.decode(block).encode("utf-8", errors="replace")
            return
        yield first.removeprefix(codecs.BOM_UTF8)
        yield from blocks


def _with_newest_revision(page: bytes) -> bytes:
    """Return a page, or the begin of one, with the revision of its latest time, the last one among equals."""
    if page.find(b"<revision", page.find(b"<revision") + 1) < 0:
        return page
    revisions = list(REVISION.finditer(page))
    if len(revisions) < 2:  # the others are not complete
        return page

    def saved(revision: re.Match[bytes]) -> bytes:
        time = TIMESTAMP.search(revision[0])
        if time:
            return time[1]
        return b""

    newest = max(reversed(revisions), key=saved)
    return page[: revisions[0].start()] + newest[0] + page[revisions[-1].end() :]


def _normal(name: bytes) -> str:
    return html.unescape(name.decode(errors="replace")).replace("_", " ").strip().casefold()


def _default_header(language: str) -> bytes:
    """Return the header fields that WikiExtractor needs to return any page."""
    names = {0: "", 2: "User", 4: "Wikipedia", 6: "File", 8: "MediaWiki", 10: "Template"}
    names |= {12: "Help", 14: "Category", 100: "Portal", 828: "Module"}
    names |= {key + 1: f"{name} talk".strip().capitalize() for key, name in names.items()}
    lines = "".join(f'<namespace key="{key}">{name}</namespace>\n' for key, name in names.items())
    base = f"https://{language}.wikipedia.org/wiki/Main_Page"
    return (
        f'<mediawiki xml:lang="{language}">\n<siteinfo>\n<base>{base}</base>\n'
        f"<namespaces>\n{lines}</namespaces>\n</siteinfo>\n"
    ).encode()
