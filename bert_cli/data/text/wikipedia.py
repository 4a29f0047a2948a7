"""Read a MediaWiki dump once, from front to back, and cut it into chunks of whole pages.

One pass decompresses (bzip2 of one or many streams, xz, gzip, or plain), turns UTF-16 into UTF-8,
and hands out pages as they lie in the file. Only articles go into a chunk (namespace 0, no
redirect); the others are counted. What is broken is said in `notes` and what came before it is
kept: a file that ends in the middle of a page loses that page and no other. Memory holds one chunk.
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

RAW_BYTES = 1 << 16  # read at a time; bzip2 makes about 4 times as much of it
LARGEST_PAGE = 1 << 28  # MediaWiki's own limit is 2 MB of text; more means this is no dump
LARGEST_HEADER = 1 << 22
SUFFIXES = (".xml", ".bz2", ".xz", ".gz")

BROKEN = (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error)
NAMESPACE = re.compile(rb"<ns>\s*(-?\d+)\s*</ns>")
TITLE = re.compile(rb"<title>(.*?)</title>", re.DOTALL)
LANGUAGE = re.compile(rb'<mediawiki[^>]*xml:lang="([A-Za-z-]+)"')


class Decoder(Protocol):
    """What the decompressors of bz2, lzma and zlib have in common."""

    @property
    def eof(self) -> bool:
        """Whether the end of one stream was reached."""

    @property
    def unused_data(self) -> bytes:
        """What follows that end."""

    def decompress(self, data: bytes, /) -> bytes:
        """Turn some compressed bytes into as many plain ones as they give."""


# A file is known by its first bytes, for its name may say anything.
DECODERS: dict[bytes, Callable[[], Decoder]] = {
    b"BZh": bz2.BZ2Decompressor,
    b"\xfd7zXZ\x00": lzma.LZMADecompressor,
    b"\x1f\x8b": lambda: zlib.decompressobj(31),
}
FOREIGN = {b"7z\xbc\xaf\x27\x1c": "7z", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip"}


@dataclass
class Chunk:
    """Articles that stand together in the dump, and what was passed over among them."""

    pages: list[bytes] = field(default_factory=list)
    xml_bytes: int = 0
    """XML read for this chunk, whether it was kept or passed over."""
    kept_bytes: int = 0
    raw_bytes: int = 0
    """The part of the (compressed) file that was read for it."""
    redirects: int = 0
    other_namespaces: int = 0


def find_dump(path: Path) -> Path:
    """Return the dump: `path`, or the only one in it when it is a folder."""
    if path.is_dir():
        names = [p for p in sorted(path.iterdir()) if p.suffix in SUFFIXES and p.name[0] != "."]
        if len(names) != 1:
            told = ", ".join(p.name for p in names[:4]) or "none"
            raise DataError(f"dump ({path}): holds {len(names)} dumps ({told}); name one file")
        return names[0]
    if not path.is_file():
        raise DataError(f"dump ({path}): no such file; `bert download` fetches one")
    return path


class Dump:
    """One dump, open for a single pass; `notes` says in words what was found to be wrong."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: list[str] = []
        self.raw_bytes = 0
        self.is_packed = False
        self._blocks = self._utf8()
        self.header, self._rest = self._read_header()

    def chunks(self, size: int) -> Iterator[Chunk]:
        """Cut into chunks of at least `size` bytes of articles; the last one may be smaller."""
        chunk, raw = Chunk(), 0
        for page in self.pages():
            head = page[: page.find(b"<revision")]
            found = NAMESPACE.search(head)
            article = found is not None and found[1] == b"0"
            redirect = b"<redirect" in head
            keep = article and not redirect
            # The next article opens a new chunk, so what is passed over at the end of the
            # file is counted with the last one.
            if keep and chunk.kept_bytes >= size:
                chunk.raw_bytes, raw = self.raw_bytes - raw, self.raw_bytes
                yield chunk
                chunk = Chunk()
            chunk.xml_bytes += len(page)
            if keep:
                chunk.pages.append(page)
                chunk.kept_bytes += len(page)
            elif article:
                chunk.redirects += 1
            else:
                chunk.other_namespaces += 1
        chunk.raw_bytes = self.raw_bytes - raw
        if chunk.pages:
            yield chunk

    def pages(self) -> Iterator[bytes]:
        """Give every `<page>...</page>` as it lies in the file."""
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
                raise DataError(
                    f"dump ({self.path}): page {count + 1} has no end within "
                    f"{LARGEST_PAGE >> 20} MiB; it is no MediaWiki dump, or a broken one"
                )
        if (begin := rest.find(b"<page>")) >= 0:
            found = TITLE.search(rest, begin)
            title = f" ({found[1].decode(errors='replace')})" if found else ""
            self.notes.append(
                f"{self.path.name} is cut in the middle of page {count + 1}{title}: "
                f"that page is lost, the {count:,} before it are kept"
            )
        elif b"</mediawiki>" not in rest:
            self.notes.append(
                f"{self.path.name} ends after {count:,} pages without </mediawiki>: "
                "pages may be missing behind them"
            )

    def _read_header(self) -> tuple[bytes, bytes]:
        """Split off everything before the first page; without <siteinfo> one is made up."""
        text = b""
        for block in self._blocks:
            text += block
            if b"<page>" in text or len(text) > LARGEST_HEADER:
                break
        if b"<mediawiki" not in text[:LARGEST_HEADER]:
            size = self.path.stat().st_size
            why = "; ".join(self.notes) or f"{size:,} bytes without <mediawiki>"
            raise DataError(
                f"dump ({self.path}): is not a MediaWiki dump ({why}); "
                "give a pages-articles file: .xml, .xml.bz2, .xml.xz or .xml.gz"
            )
        begin = text.find(b"<page>")
        if begin < 0:
            raise DataError(f"dump ({self.path}): holds no page; was it cut, or is it only a head?")
        header, rest = text[:begin], text[begin:]
        if b"</siteinfo>" not in header:
            found = LANGUAGE.search(header)
            language = found[1].decode() if found else "en"
            header = _made_up_header(language)
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
        """Decompress; a broken file ends early with a note, after all that could be read."""
        with open(self.path, "rb") as file:
            magic = file.read(8)
            file.seek(0)
            for start, kind in FOREIGN.items():
                if magic.startswith(start):
                    raise DataError(
                        f"dump ({self.path}): is a {kind} file; unpack it, or pack it as .bz2 or .xz"
                    )
            made = [make for start, make in DECODERS.items() if magic.startswith(start)]
            self.is_packed = bool(made)
            decoder = made[0]() if made else None
            while raw := file.read(RAW_BYTES):
                self.raw_bytes += len(raw)
                if decoder is None:
                    yield raw
                    continue
                while raw:
                    if decoder.eof:
                        if not raw.strip(b"\0"):  # padding, as tapes and some mirrors add it
                            break
                        decoder = made[0]()
                    try:
                        block = decoder.decompress(raw)
                    except BROKEN as error:
                        self.notes.append(
                            f"{self.path.name} is broken near byte {self.raw_bytes:,} ({error}): "
                            "only what comes before is read"
                        )
                        return
                    raw = decoder.unused_data
                    yield block
            if decoder is not None and not decoder.eof:
                self.notes.append(
                    f"{self.path.name} breaks off inside its compressed data, "
                    f"at byte {self.raw_bytes:,}: was it downloaded whole?"
                )


def _made_up_header(language: str) -> bytes:
    """Make the little of a header that WikiExtractor needs; without it no page comes back."""
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
