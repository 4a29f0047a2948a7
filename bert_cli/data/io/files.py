"""Files of text: recognise their format by their first bytes, open them, split them into parts.

Large files are split between documents and small ones are bundled. A compressed file cannot be read from its
middle and is one part.
"""

import bz2
import io
import json
import lzma
import re
import shutil
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, cast

from bert_cli.data.io.conversion import text_of
from bert_cli.errors import DataError, import_extra

Format = Literal[
    "wikiextractor",
    "plain",
    "json-lines",
    "csv",
    "tsv",
    "parquet",
    "pdf",
    "docx",
    "odt",
    "epub",
    "html",
]

DECODERS: dict[str, Callable[[], Any]] = {
    # 16 for the header of gzip, and 15 for the largest window.
    "gzip": lambda: zlib.decompressobj(31),
    "xz": lzma.LZMADecompressor,
    "bzip2": bz2.BZ2Decompressor,
}
COMPRESSED = re.compile(
    rb"(?P<gzip>\x1f\x8b)|(?P<xz>\xfd7zXZ\0)|(?P<bzip2>BZh[1-9](?:1AY&SY|\x17rE8P))|(?P<zstandard>\x28\xb5\x2f\xfd)"
)
# What a file is, what to do with it, and its first bytes in lower case. Prose has no such first bytes.
NOT_TEXT: list[tuple[str, str, list[str]]] = json.loads(
    Path(__file__).with_name("kinds.json").read_bytes()
)
# Byte order marks, or without one the zero bytes of ASCII letters.
WIDE_CHARACTERS = {
    "UTF-32": rb"\xff\xfe\0\0|\0\0\xfe\xff",
    "UTF-16": rb"\xff\xfe|\xfe\xff",
    "UTF-16LE": rb"([^\0]\0){4}",
    "UTF-16BE": rb"(\0[^\0]){4}",
}
XML_ROOTS = (b"<mediawiki", b"<!doctype html", b"<html", b"<svg")
SUFFIXES = {".gz": "gzip", ".xz": "xz", ".bz2": "bzip2", ".zst": "zstandard", ".zstd": "zstandard"}
NOT_UTF_8 = "save it as UTF-8, as with iconv -f ENCODING -t UTF-8 (EUC-JP, GB18030, LATIN1, ...)"
PARQUET = b"PAR1"
LONGEST_MARK = 16  # bytes; that of bzip2 has ten
JSON_OBJECT = re.compile(r'\{\s*"(?:[^"\\]|\\.)*"\s*:')  # its line may be longer
TABLES: tuple[Format, ...] = ("csv", "tsv")
# Formats whose files are opened as the text that is in them.
DOCUMENTS: tuple[Format, ...] = ("pdf", "docx", "odt", "epub", "html")
# What the beginning of a zip archive has.
WITHIN: dict[Format, bytes] = {
    "epub": b"mimetypeapplication/epub+zip",
    "odt": b"mimetypeapplication/vnd.oasis.opendocument.text",
    "docx": b"word/document.xml",
}
# Suffix of a name -> format; a compression may follow.
NAMED: dict[str, Format] = {
    **{".csv": "csv", ".tsv": "tsv", ".txt": "plain", ".md": "plain", ".parquet": "parquet"},
    **dict.fromkeys((".json", ".jsonl", ".ndjson", ".jsonlines"), "json-lines"),
    **dict.fromkeys((".html", ".htm", ".xhtml"), "html"),
    **{".docx": "docx", ".odt": "odt", ".epub": "epub", ".pdf": "pdf"},
}
HEAD_BYTES = 1 << 20  # unpacked bytes that decide what a file is
PACKED_BYTES = 1 << 16  # bytes of a compressed file that are unpacked at a time
# Bytes of text in a byte of the file: 10 MB of English articles, at each program's default level.
EXPANSION = {"": 1.0, "gzip": 2.75, "xz": 3.6, "bzip2": 3.5, "zstandard": 2.8}
PARQUET_EXPANSION = 1.75  # with snappy, its default; 2.5 with zstandard
OPEN = re.compile(r'<doc (?:[a-z]+="[^"]*" )*title=".*">')
CLOSE = "</doc>"


class DamagedError(Exception):
    """Compressed data are damaged or cut off, in the stream or frame that begins at byte `frame`."""

    def __init__(self, problem: str, frame: int = 0) -> None:
        super().__init__(problem)
        self.frame = frame


@dataclass(frozen=True)
class Reading:
    """The settings for reading files."""

    format: str = "auto"
    text_field: str = "text"
    documents: str = "blank-lines"  # or `files`: each file is one document
    line_breaks: str = "keep"  # or `join`, or `auto` to join the lines of files that are wrapped


@dataclass(frozen=True)
class Part:
    """A file, or a range of one between documents."""

    path: Path
    format: Format
    compression: str
    size: int  # bytes of the file in this part
    start: int = 0  # first byte of an uncompressed file
    stop: int | None = None  # end of the range; None is the end of the file
    first_line: int = 1  # its number, where errors in a range need it
    margins: tuple[int, ...] | None = None  # its lines are joined; without columns by their length
    fault: str = ""  # of its lines, which nothing can join


# --- format of a file


def compression_of(path: Path) -> str:
    """Return the name of a file's compression, judged by its first bytes, or an empty string."""
    with open(path, "rb") as file:
        match = COMPRESSED.match(file.read(LONGEST_MARK))
    return (match.lastgroup if match else None) or ""


def part_of(path: Path) -> Part:
    """Return a file as plain text with its compression. Raises DataError where its name has another one."""
    size = path.stat().st_size
    compression = compression_of(path)
    expected = SUFFIXES.get(path.suffix.lower(), "")
    if size and expected and not compression:
        raise _other_content(path, expected)
    return Part(path, "plain", compression, size)


def _other_content(path: Path, kind: str) -> DataError:
    problem = f"has a name for {kind}, but its content is not {kind}"
    return DataError(f"{path} (line 1)", problem, "download it again, or rename it")


def format_by_name(path: Path) -> Format | None:
    """Return the format that the suffix of a name stands for, before that of a compression."""
    name = path.stem if path.suffix.lower() in SUFFIXES else path.name
    return NAMED.get(Path(name).suffix.lower())


def recognise(path: Path, reading: Reading) -> Part | None:
    """Return a file with its format, None for an empty file. Raises DataError for a file that is not text."""
    part = part_of(path)
    with report_damage(part), open_part(part) as unpacked:
        head = unpacked.read(HEAD_BYTES)
    if not head:
        return None
    if reading.format == "auto" and (document := _document_format(path, head)):
        part = replace(part, format=document)
        open_part(part)  # fails early for one that cannot be read
        return part
    refuse_other_kinds(path, head, is_plain=reading.format == "plain")
    check_encoding(head, str(path))
    kind = _format_of(path, head) if reading.format == "auto" else cast(Format, reading.format)
    if kind in DOCUMENTS:
        raise _other_content(path, kind)
    first = head[:4096]
    if kind == "json-lines" and first.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        problem = "is a JSON array"
        raise DataError(str(path), problem, "write one object on each line (jq -c .[])")
    if kind != "parquet":
        # With a tenth of zero bytes it is binary in every encoding; a few zero bytes are damage within text.
        if 10 * first.count(0) > len(first) or (b"\r" in head and b"\n" not in head):
            problem = "is not UTF-8 text with line ends (zero bytes or carriage returns alone)"
            remedy = "convert it, as with iconv or tr '\\r' '\\n', or leave it out"
            raise DataError(f"{path} (line 1)", problem, remedy)
        decode(head[: head.rfind(b"\n") + 1], str(path))  # fails early
    return replace(part, format=kind)


def _document_format(path: Path, head: bytes) -> Format | None:
    first = _first_mark(head)
    by_name = format_by_name(path)
    if first.startswith(b"%pdf-") or (by_name == "pdf" and b"%PDF-" in head[:1024]):
        return "pdf"
    if first.startswith(b"pk\3\4"):
        kinds = (kind for kind, mark in WITHIN.items() if mark in head)
        return next(kinds, by_name if by_name in WITHIN else None)
    is_html = first.startswith((b"<!doctype html", b"<html")) or by_name == "html"
    return "html" if is_html else None


def _first_mark(head: bytes) -> bytes:
    """Return the first bytes of a file in lower case, of XML from its root on."""
    first = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:4096].lower()
    if first.startswith(b"<?xml"):
        first = next((first[first.find(tag) :] for tag in XML_ROOTS if tag in first), first)
    return first


def refuse_other_kinds(path: Path, head: bytes, *, is_plain: bool) -> None:
    """Raise DataError for a file that is not text by its marks; with `is_plain`, printable marks are text."""
    first = _first_mark(head).decode("latin-1")
    rows = (row for row in NOT_TEXT if first.startswith(tuple(row[2])))
    kind, remedy, marks = next(rows, ("", "", []))
    mark = next(filter(first.startswith, marks), "\n")
    if match := COMPRESSED.match(head):
        kind = f"{match.lastgroup} in another compression"
        remedy = "unpack it first"
    with suppress(tarfile.HeaderError):  # the sum of a header's bytes is in the header
        tarfile.TarInfo.frombuf(head[: tarfile.BLOCKSIZE], "utf-8", "replace")
        kind = "a tar archive"
        remedy = "unpack it first, as with `tar xf FILE`"
    if kind and not (is_plain and mark.isascii() and mark.isprintable()):
        raise DataError(str(path), f"is {kind}", remedy.replace("FILE", path.name))


def check_encoding(head: bytes, where: str) -> None:
    """Raise DataError for text that begins with units of 16 or 32 bits."""
    for name, start in WIDE_CHARACTERS.items():
        if re.match(start, head):
            remedy = f"convert it with iconv -f {name} -t UTF-8"
            raise DataError(where, f"is {name}, not UTF-8", remedy)


def _format_of(path: Path, head: bytes) -> Format:
    if head.startswith(PARQUET) and b"\0" in head:  # prose has no zeros
        return "parquet"
    text = head.decode(errors="replace").removeprefix("\ufeff").lstrip()
    by_name = format_by_name(path)
    if by_name in (*TABLES, *DOCUMENTS):
        return by_name
    if by_name == "json-lines" or JSON_OBJECT.match(text):
        return "json-lines"
    lines = [line.strip() for line in text.split("\n")]
    if any(map(OPEN.fullmatch, lines)):
        return "wikiextractor"
    if lines[0].startswith("<doc "):
        remedy = f'write <doc id="1" url="..." title="...">, a line with the title, text, {CLOSE}'
        where = f"{path} ({lines[0][:60]!r})"
        raise DataError(where, "contains no document of WikiExtractor", remedy)
    return "wikiextractor" if CLOSE in lines else "plain"  # the head may be within a long article


# --- opening


def open_part(part: Part) -> IO[bytes]:
    """Open the complete file, unpacked, or the text of a document. Reading raises DamagedError."""
    if part.format in DOCUMENTS:
        return io.BytesIO(text_of(part.path, part.format, partial(_read_packed, part)))
    file = open(part.path, "rb")  # noqa: SIM115
    if not part.compression:
        return file
    unpacked = _BlockReader(file, unpack(file, part.compression))
    return cast(IO[bytes], io.BufferedReader(unpacked, 1 << 17))


def _read_packed(part: Part, size: int) -> bytes:
    with report_damage(part), open_part(replace(part, format="plain")) as file:
        return file.read(size)


def unpack(file: IO[bytes], compression: str, stop: int = sys.maxsize) -> Iterator[bytes]:
    """Yield the content of a file up to its byte `stop`, unpacked with all its streams or frames.

    A truncated file, which not all libraries report, raises DamagedError, too.
    """
    decoder = _decoder(compression, file.name) if compression else None
    frame = file.tell()
    while packed := file.read(min(PACKED_BYTES, stop - file.tell())):
        if decoder is None:
            yield packed
            continue
        while packed:
            if decoder.eof:
                if not packed.strip(b"\0"):  # padding, as tapes and some mirrors add it
                    break
                decoder = _decoder(compression, file.name)
                frame = file.tell() - len(packed)
            try:
                block = decoder.decompress(packed)
            except Exception as error:  # of a different class for each library
                place = file.tell() - len(packed)
                raise DamagedError(f"behind byte {place:,}: {error}", frame) from error
            packed = decoder.unused_data
            if block:
                yield block
    if decoder is not None and not decoder.eof:
        raise DamagedError(f"it ends at byte {file.tell():,} within a frame", frame)


def _decoder(compression: str, name: str) -> Any:
    if compression == "zstandard":
        # The largest window, of `zstd --long=31`; the memory is taken by the frames that ask for it.
        decompressor = import_extra("zstandard", "zstandard", name).ZstdDecompressor
        return decompressor(max_window_size=1 << 31).decompressobj()
    return DECODERS[compression]()


class _BlockReader(io.RawIOBase):
    """A file whose content comes from an iterator of blocks."""

    def __init__(self, file: IO[bytes], blocks: Iterator[bytes]) -> None:
        self._file = file
        self._blocks = blocks
        self._block = memoryview(b"")

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        if not self._block:
            self._block = memoryview(next(self._blocks, b""))
        size = min(len(buffer), len(self._block))
        buffer[:size] = self._block[:size]
        self._block = self._block[size:]
        return size


@contextmanager
def open_parquet(part: Part) -> Iterator[Any]:
    """Yield a pyarrow ParquetFile. Raises ConfigError without pyarrow, DataError for a damaged file."""
    pyarrow = import_extra("pyarrow", "parquet", str(part.path))
    from pyarrow import parquet

    with report_damage(part), open_part(part) as raw, tempfile.TemporaryFile() as unpacked:
        if part.compression:  # the metadata is at the end
            shutil.copyfileobj(raw, unpacked)
        try:
            # Read page by page: a row group may be larger than the memory.
            source = unpacked if part.compression else raw
            with parquet.ParquetFile(source, buffer_size=1 << 20, pre_buffer=False) as file:
                yield file
        except (pyarrow.ArrowInvalid, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the disk, not the data
            raise DamagedError(str(error).strip().partition("\n")[0]) from error


@contextmanager
def report_damage(part: Part) -> Iterator[None]:
    """Raise DataError for damaged or truncated data."""
    try:
        yield
    except DamagedError as error:
        kind = part.compression or part.format
        problem = f"the {kind} data are damaged or cut off ({error})"
        raise DataError(str(part.path), problem, "download or copy the file again") from error


def decode(data: bytes, source: Part | str, offset: int = 0) -> str:
    """Return bytes from byte `offset` of an unpacked file on as text. Raises DataError with the line if not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = 1 + data.count(b"\n", 0, error.start)
        if isinstance(source, Part):
            line += line_number(source, offset) - 1
            source = str(source.path)
        problem = f"byte 0x{data[error.start]:02X} is not UTF-8"
        raise DataError(f"{source} (line {line})", problem, NOT_UTF_8) from error


def line_number(part: Part, offset: int) -> int:
    """Return the number, from 1, of the line with byte `offset` of the unpacked file."""
    lines = 1
    with open_part(part) as file:
        while data := file.read(min(1 << 20, offset)):
            lines += data.count(b"\n")
            offset -= len(data)
    return lines


# --- splitting and bundling


def split_part(part: Part, size: int, reading: Reading, *, anywhere: bool = False) -> list[Part]:
    """Split a file of twice `size` or more into ranges of about `size`, between documents.

    With `anywhere` a document may be split at a line, if no end of a document is near. Compressed files, tables,
    Parquet and plain files that are one document are not split.
    """
    is_document = part.format == "plain" and reading.documents == "files" and not anywhere
    # A header names the columns.
    is_whole = is_document or part.format in (*TABLES, "parquet", *DOCUMENTS)
    if part.compression or is_whole or part.size < 2 * size:
        return [part]
    # A part is at most an eighth larger than asked, and the last one half.
    near = size // 8 if anywhere else part.size
    starts = [0]
    with open_part(part) as file:
        for offset in range(size, part.size - size // 2, size):
            # A document may be longer than a part.
            if offset > starts[-1]:
                starts.append(_document_start(file, offset, part.format, near))
    starts = [start for start in starts if start < part.size]
    return [
        replace(part, start=start, stop=stop, size=stop - start)
        for start, stop in zip(starts, [*starts[1:], part.size], strict=True)
    ]


def _document_start(file: IO[bytes], offset: int, kind: Format, near: int) -> int:
    """Return the start of the first document from `offset` on, or of a line if none is within `near`."""
    # One byte before: if the offset is the start of a line, that line is not skipped.
    file.seek(offset - 1)
    start = first = offset - 1 + len(file.readline())
    after_blank = False
    for line in file:
        text = line.decode(errors="replace").strip()
        if (
            kind == "json-lines"
            or (kind == "plain" and after_blank and text)
            or (kind == "wikiextractor" and OPEN.fullmatch(text))
        ):
            return start
        if start - first > near:
            return first
        after_blank = not text
        start += len(line)
    return start


def text_bytes(part: Part) -> float:
    """Return the estimated bytes of text in a part."""
    packed = PARQUET_EXPANSION if part.format == "parquet" else 1.0
    return part.size * EXPANSION[part.compression] * packed


def bundle(parts: Sequence[Part], size: float) -> list[list[Part]]:
    """Return neighbouring parts in bundles of at most `size` bytes of text, or of one part."""
    bundles: list[list[Part]] = []
    total = 0.0
    for part in parts:
        if not bundles or total + text_bytes(part) > size:
            bundles.append([])
            total = 0.0
        bundles[-1].append(part)
        total += text_bytes(part)
    return bundles
