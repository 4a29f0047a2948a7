"""Read a MediaWiki dump once, from start to end, in chunks of complete pages.

One pass decompresses (bzip2 of one or many streams, xz, gzip, or plain), converts UTF-16 to UTF-8, and
yields pages in the order of the file. A chunk holds only articles (namespace 0, no redirect); other pages
are counted. `notes` describes damage, and the pages before it are kept: a file that ends in the middle of
a page loses that page alone. Memory holds one chunk.
"""

import bz2
import codecs
import itertools
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from bert_cli.errors import DataError

RAW_BYTES = 1 << 16  # read at a time; bzip2 expands it about four times
LARGEST_PAGE = 1 << 28  # MediaWiki's limit is 2 MB of text
LARGEST_HEADER = 1 << 22
SUFFIXES = (".xml", ".bz2", ".xz", ".gz")

DAMAGE = (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error)
NAMESPACE = re.compile(rb"<ns>\s*(-?\d+)\s*</ns>")
TITLE = re.compile(rb"<title>(.*?)</title>", re.DOTALL)
LANGUAGE = re.compile(rb'<mediawiki[^>]*xml:lang="([A-Za-z-]+)"')


class Decoder(Protocol):
    """The interface of the decompressors of bz2, lzma and zlib."""

    @property
    def eof(self) -> bool:
        """Whether the end of a stream was reached."""

    @property
    def unused_data(self) -> bytes:
        """The data after that end."""

    def decompress(self, data: bytes, /) -> bytes:
        """Return the bytes that `data` decompresses to."""


# By the first bytes of a file, whatever its name.
DECODERS: dict[bytes, Callable[[], Decoder]] = {
    b"BZh": bz2.BZ2Decompressor,
    b"\xfd7zXZ\x00": lzma.LZMADecompressor,
    b"\x1f\x8b": lambda: zlib.decompressobj(31),
}
FOREIGN = {b"7z\xbc\xaf\x27\x1c": "7z", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip"}


@dataclass
class Chunk:
    """Consecutive articles of the dump, and the number of other pages among them."""

    pages: list[bytes] = field(default_factory=list)
    xml_bytes: int = 0
    """XML of all pages, articles and others."""
    kept_bytes: int = 0
    """XML of the articles."""
    raw_bytes: int = 0
    """Bytes of the (compressed) file that were read for the chunk."""
    redirects: int = 0
    other_namespaces: int = 0


def find_dump(path: Path) -> Path:
    """Return the dump: `path`, or the only dump in a folder."""
    if path.is_dir():
        names = [p for p in sorted(path.iterdir()) if p.suffix in SUFFIXES and p.name[0] != "."]
        if len(names) != 1:
            listed = ", ".join(p.name for p in names[:4]) or "none"
            problem = f"holds {len(names)} dumps ({listed})"
            raise DataError(f"dump ({path})", problem, "give one file")
        return names[0]
    if not path.is_file():
        raise DataError(f"dump ({path})", "no such file", "`bert download` fetches one")
    return path


class Dump:
    """A dump, open for a single pass; `notes` describes its faults."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: list[str] = []
        self.raw_bytes = 0
        self.is_packed = False
        self._blocks = self._utf8()
        self.header, self._rest = self._read_header()

    def chunks(self, size: int) -> Iterator[Chunk]:
        """Yield chunks of at least `size` bytes of articles; the last one may be smaller."""
        chunk, raw = Chunk(), 0
        for page in self.pages():
            head = page[: page.find(b"<revision")]
            match = NAMESPACE.search(head)
            in_namespace = match is not None and match[1] == b"0"
            is_article = in_namespace and b"<redirect" not in head
            # Only an article starts a new chunk, so other pages at the end count with the last one.
            if is_article and chunk.kept_bytes >= size:
                chunk.raw_bytes, raw = self.raw_bytes - raw, self.raw_bytes
                yield chunk
                chunk = Chunk()
            chunk.xml_bytes += len(page)
            if is_article:
                chunk.pages.append(page)
                chunk.kept_bytes += len(page)
            elif in_namespace:
                chunk.redirects += 1
            else:
                chunk.other_namespaces += 1
        chunk.raw_bytes = self.raw_bytes - raw
        if chunk.pages:
            yield chunk

    def pages(self) -> Iterator[bytes]:
        """Yield every `<page>...</page>` of the file."""
        rest, count = b"", 0
        for block in itertools.chain([self._rest], self._blocks):
            rest += block
            start = 0
            while (end := rest.find(b"</page>", start)) >= 0:
                begin = rest.find(b"<page>", start, end)
                start = end + len(b"</page>")
                if begin >= 0:
                    count += 1
                    yield rest[begin:start]
            rest = rest[start:]
            if len(rest) > LARGEST_PAGE:
                problem = f"page {count + 1} has no end within {LARGEST_PAGE >> 20} MiB"
                remedy = "it is no MediaWiki dump, or a damaged one; get it again"
                raise DataError(f"dump ({self.path})", problem, remedy)
        if (begin := rest.find(b"<page>")) >= 0:
            match = TITLE.search(rest, begin)
            title = f" ({match[1].decode(errors='replace')})" if match else ""
            self.notes.append(
                f"{self.path.name} is cut in the middle of page {count + 1}{title}: "
                f"that page is lost, the {count:,} before it are kept"
            )
        elif b"</mediawiki>" not in rest:
            self.notes.append(
                f"{self.path.name} ends after {count:,} pages without </mediawiki>: pages may be missing"
            )

    def _read_header(self) -> tuple[bytes, bytes]:
        """Return the text before the first page, or a default one without <siteinfo>, and the rest."""
        text = b""
        for block in self._blocks:
            text += block
            if b"<page>" in text or len(text) > LARGEST_HEADER:
                break
        if b"<mediawiki" not in text[:LARGEST_HEADER]:
            size = self.path.stat().st_size
            reason = ", ".join(self.notes) or f"{size:,} bytes without <mediawiki>"
            raise DataError(
                f"dump ({self.path})",
                f"is not a MediaWiki dump ({reason})",
                "give a pages-articles file: .xml, .xml.bz2, .xml.xz or .xml.gz",
            )
        begin = text.find(b"<page>")
        if begin < 0:
            remedy = "get it again: it may be truncated"
            raise DataError(f"dump ({self.path})", "holds no page", remedy)
        header, rest = text[:begin], text[begin:]
        if b"</siteinfo>" not in header:
            match = LANGUAGE.search(header)
            language = match[1].decode() if match else "en"
            header = _default_header(language)
            self.notes.append(
                f"{self.path.name} has no <siteinfo>: taken as {language}.wikipedia.org "
                "with the English names of the namespaces"
            )
        return header, rest

    def _utf8(self) -> Iterator[bytes]:
        blocks = self._plain()
        first = b""
        while len(first) < 3 and (block := next(blocks, None)) is not None:
            first += block
        if first[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            decoder = codecs.getincrementaldecoder("utf-16")(errors="replace")
            yield decoder.decode(first).encode()
            for block in blocks:
                yield decoder.decode(block).encode("utf-8", errors="replace")
            return
        yield first.removeprefix(codecs.BOM_UTF8)
        yield from blocks

    def _plain(self) -> Iterator[bytes]:
        """Yield the decompressed data. A damaged file ends early with a note."""
        with open(self.path, "rb") as file:
            magic = file.read(8)
            file.seek(0)
            for start, kind in FOREIGN.items():
                if magic.startswith(start):
                    remedy = "unpack it, or pack it as .bz2 or .xz"
                    raise DataError(f"dump ({self.path})", f"is a {kind} file", remedy)
            decoders = [kind for start, kind in DECODERS.items() if magic.startswith(start)]
            self.is_packed = bool(decoders)
            decoder = decoders[0]() if decoders else None
            while raw := file.read(RAW_BYTES):
                self.raw_bytes += len(raw)
                if decoder is None:
                    yield raw
                    continue
                while raw:
                    if decoder.eof:
                        if not raw.strip(b"\0"):  # padding, as tapes and some mirrors add it
                            break
                        decoder = decoders[0]()
                    try:
                        block = decoder.decompress(raw)
                    except DAMAGE as error:
                        self.notes.append(
                            f"{self.path.name} is damaged near byte {self.raw_bytes:,} ({error}): "
                            "only the data before are read"
                        )
                        return
                    raw = decoder.unused_data
                    yield block
            if decoder is not None and not decoder.eof:
                self.notes.append(
                    f"{self.path.name} breaks off inside its compressed data, "
                    f"at byte {self.raw_bytes:,}: the download may be incomplete"
                )


def _default_header(language: str) -> bytes:
    """Return the header fields without which WikiExtractor returns no page."""
    names = {0: "", 6: "File", 10: "Template", 14: "Category", 828: "Module"}
    lines = [f'      <namespace key="{key}">{name}</namespace>' for key, name in names.items()]
    base = f"https://{language}.wikipedia.org/wiki/Main_Page"
    return "\n".join(
        [
            f'<mediawiki xml:lang="{language}">',
            f"  <siteinfo>\n    <base>{base}</base>\n    <namespaces>",
            *lines,
            "    </namespaces>\n  </siteinfo>\n  ",
        ]
    ).encode()
