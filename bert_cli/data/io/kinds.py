"""Files that are not text, by the marks at their beginning: what each is, and what to do with it."""

import json
import re
import tarfile
from contextlib import suppress
from pathlib import Path

from bert_cli.errors import DataError

COMPRESSED = re.compile(
    rb"(?P<gzip>\x1f\x8b)|(?P<xz>\xfd7zXZ\0)|(?P<bzip2>BZh[1-9](?:1AY&SY|\x17rE8P))|(?P<zstandard>\x28\xb5\x2f\xfd)"
)
NOT_TEXT: dict[bytes, tuple[str, str]] = {
    mark.encode("latin-1"): tuple(row)
    for mark, row in json.loads(Path(__file__).with_suffix(".json").read_bytes()).items()
}
"""First bytes, in lower case -> what the file is, and what to do with it. Prose has no such first bytes."""
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
        kind = f"{match.lastgroup} in another compression"
        remedy = "unpack it first"
    with suppress(tarfile.HeaderError):  # the sum of a header's bytes is in the header
        tarfile.TarInfo.frombuf(head[: tarfile.BLOCKSIZE], "utf-8", "replace")
        kind = "a tar archive"
        remedy = "unpack it first, as with `tar xf FILE`"
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
