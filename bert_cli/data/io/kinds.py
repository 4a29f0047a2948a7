"""Files that are not text, by the marks at their beginning: what each is, and what to do with it."""

import re
import tarfile
from contextlib import suppress
from pathlib import Path

from bert_cli.errors import DataError

COMPRESSED = re.compile(
    rb"(?P<gzip>\x1f\x8b)|(?P<xz>\xfd7zXZ\0)|(?P<bzip2>BZh[1-9](?:1AY&SY|\x17rE8P))|(?P<zstandard>\x28\xb5\x2f\xfd)"
)
# First bytes -> what the file is, and what to do with it; in lower case. Prose has no such first bytes.
PANDOC = "extract the text first, as with `pandoc FILE -t plain --wrap=none`"
NOT_TEXT = {
    b"%pdf-": ("a PDF, not text", "extract the text first, as with `pdftotext FILE`"),
    b"pk\x03\x04": ("a zip archive, as are docx, odt and epub, not text", PANDOC),
    b"\xd0\xcf\x11\xe0": ("a file of Microsoft Office, not text", "use `soffice --convert-to txt FILE`"),
    b"{\\rtf": ("rich text, not text", PANDOC),
    b"<!doctype html": ("HTML, not text", "extract the text first, as with `trafilatura < FILE`"),
    b"<html": ("HTML, not text", "extract the text first, as with `trafilatura < FILE`"),
    b"<mediawiki": ("a MediaWiki dump", "run `bert extract FILE` first"),
    b"<?xml": ("XML, not text", f"{PANDOC}, or add --input-format plain"),
    b"warc/": ("a WARC file, as are WET files", "write the text of its records first, as with warcio"),
    b"version https://git-lfs": ("a pointer of Git LFS, not the file", "run `git lfs pull`"),
    b"\x7felf": ("a program", "name only files of text, as 'folder/*.txt'"),
}  # fmt: skip
TABLES = {
    b"sqlite format 3\0": "an SQLite database", b"arrow1\0": "an Arrow file", b"\xff\xff\xff\xff": "an Arrow file",
    b"\x89hdf\r\n": "an HDF5 file", b"\x93numpy": "an array of NumPy", b"obj\x01": "an Avro file",
}  # fmt: skip
ARCHIVES = {
    b"7z\xbc\xaf\x27\x1c": "a 7z archive", b"rar!\x1a\x07": "a rar archive", b"!<arch>\n": "an ar archive",
    b"\x04\x22\x4d\x18": "compressed with lz4", b"lzip\x01": "compressed with lzip", b"\x1f\x9d": "a .Z file",
}  # fmt: skip
NOT_TEXT |= {
    mark: (kind, "write its text as Parquet or CSV first") for mark, kind in TABLES.items()
}
NOT_TEXT |= {mark: (kind, "unpack it first") for mark, kind in ARCHIVES.items()}
# Byte order marks, or without one the zero bytes of ASCII letters.
WIDE = {
    "UTF-32": rb"\xff\xfe\0\0|\0\0\xfe\xff",
    "UTF-16": rb"\xff\xfe|\xfe\xff",
    "UTF-16LE": rb"([^\0]\0){4}",
    "UTF-16BE": rb"(\0[^\0]){4}",
}
XML_ROOTS = (b"<mediawiki", b"<!doctype html", b"<html")


def refuse_other_kinds(path: Path, head: bytes, *, is_plain: bool) -> None:
    """Raise DataError for a file that is not text by its marks; with `is_plain`, printable marks are text."""
    first = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:4096].lower()
    if first.startswith(b"<?xml"):
        first = next((first[first.find(tag) :] for tag in XML_ROOTS if tag in first), first)
    mark = next((start for start in NOT_TEXT if first.startswith(start)), None)
    kind, remedy = NOT_TEXT.get(mark or b"", ("", ""))
    if match := COMPRESSED.match(head):
        kind, remedy = f"{match.lastgroup} in another compression", "unpack it first"
    with suppress(tarfile.HeaderError):  # the sum of a header's bytes is in the header
        tarfile.TarInfo.frombuf(head[: tarfile.BLOCKSIZE], "utf-8", "replace")
        kind, remedy = "a tar archive", "unpack it first, as with `tar xf FILE`"
    is_printable = mark is not None and mark.isascii() and mark.decode().isprintable()
    if kind and not (is_plain and is_printable):
        raise DataError(str(path), f"is {kind}", remedy.replace("FILE", path.name))


def check_encoding(head: bytes, where: str) -> None:
    """Raise DataError for text that begins with units of 16 or 32 bits."""
    for name, start in WIDE.items():
        if re.match(start, head):
            remedy = f"convert it with iconv -f {name} -t UTF-8"
            raise DataError(where, f"is {name}, not UTF-8", remedy)


def refuse_array(text: str, where: str) -> None:
    """Raise DataError if a file of JSON lines begins as a JSON array."""
    if text.lstrip("\ufeff \t\r\n").startswith("["):
        raise DataError(where, "is a JSON array", "write one object on each line (jq -c .[])")
