"""Files of text as people have them: which there are, what each one is, how it opens.

What a file is follows from its first bytes, not from its name: gzip, xz, bzip2 and zstandard by
their magic numbers, Parquet by its own, the rest by the first megabyte of text. What is damaged,
cut off or no text is said with the file and the line where it ends.
"""

import bz2
import gzip
import io
import json
import lzma
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from glob import glob
from pathlib import Path
from typing import IO, Any, Literal, cast, get_args

from bert_cli.data.shards.manifest import finished_files
from bert_cli.errors import ConfigError, DataError, needs_extra

Format = Literal["wikiextractor", "plain", "json-lines", "parquet"]

# First bytes of a compressed file -> its compression, and the names that promise it.
MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\xfd7zXZ\x00": "xz",
    b"BZh": "bzip2",
    b"\x28\xb5\x2f\xfd": "zstandard",
}
SUFFIXES = {".gz": "gzip", ".xz": "xz", ".bz2": "bzip2", ".zst": "zstandard", ".zstd": "zstandard"}
PARQUET = b"PAR1"
JSON_NAMES = (".jsonl", ".ndjson", ".jsonlines")
LOOKED_AT = 1 << 20
"""Bytes of text, unpacked, that tell what a file is."""
LONGEST_LOOK = 1 << 26
"""The same where it may be JSON lines and the first of them is longer."""

OPEN = re.compile(r'<doc (?:[a-z]+="[^"]*" )*title=".*">')
CLOSE = "</doc>"
GLOB = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class Reading:
    """How the user says that files are to be read."""

    format: str = "auto"
    text_field: str = "text"
    documents: str = "blank-lines"
    """What parts the documents of plain text: blank lines, or only the end of a file."""


@dataclass(frozen=True)
class Part:
    """A file, or a range of one between documents."""

    path: Path
    format: Format
    compression: str
    size: int
    """Bytes of the file that it stands for."""
    start: int = 0
    """First byte of an uncompressed file; first row group of a Parquet file."""
    stop: int | None = None
    """End of the range; None is the end of the file."""
    carriage_returns: bool = False
    """Lines end in a carriage return alone, as on Macintoshes of the last century."""


def find_files(given: Path) -> list[Path]:
    """The files of a folder (a finished one, where a step wrote it), a file, or a glob, in order.

    DataError when there are none.
    """
    if given.exists() or not GLOB.search(str(given)):
        return finished_files(given)
    found = sorted(Path(name) for name in glob(str(given), recursive=True))
    files = [path for path in found if path.is_file()]
    if not files:
        raise DataError(f"input ({given}): no file matches; check the pattern, and quote it")
    return files


def find_root(given: Path) -> Path:
    """The folder that the names of files are told from."""
    if given.is_dir():
        return given
    parts = given.parts
    first = next((n for n, part in enumerate(parts) if GLOB.search(part)), len(parts) - 1)
    return given.parent if given.exists() else Path(*parts[:first])


def recognise_all(given: Path, reading: Reading) -> tuple[list[Part], list[str]]:
    """Every file of the input that is not empty, and notes on what is worth saying.

    DataError for a file that cannot be read as text, and when all are empty.
    """
    files = find_files(given)
    known = [(path, recognise(path, reading)) for path in files]
    empty = [path for path, part in known if part is None]
    parts = [part for _, part in known if part is not None]
    if not parts:
        raise DataError(
            f"{empty[0]}: is empty{f', and so are {len(empty) - 1} more' if empty[1:] else ''}; "
            f"input ({given}) holds no text"
        )
    notes = []
    if empty and not (given / "manifest.json").exists():
        notes.append(f"{empty[0]}: is empty and left out; empty files: {len(empty)}")
    kinds = {kind: sum(part.format == kind for part in parts) for kind in get_args(Format)}
    if sum(map(bool, kinds.values())) > 1:
        told = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
        notes.append(f"{given}: holds files of several formats: {told}")
    return parts, notes


def refuse_without_effect(parts: Sequence[Part], said: Collection[str]) -> None:
    """ConfigError for a setting of text that was given and that none of these files needs."""
    kinds = {part.format for part in parts}
    wanted = {"text_field": {"json-lines", "parquet"}, "documents": {"plain"}}
    for name in sorted(wanted.keys() & said):
        if not wanted[name] & kinds:
            raise ConfigError(
                f"--{name.replace('_', '-')}: has no effect, the input is {', '.join(sorted(kinds))}; "
                "leave it out, or say what the files are with --input-format"
            )


def recognise(path: Path, reading: Reading) -> Part | None:
    """What a file is; None if nothing is in it.

    DataError for what is named as compressed and is not, is binary, or is JSON of another form.
    """
    with open(path, "rb") as file:
        head = file.read(8)
    size = path.stat().st_size
    if not size:
        return None
    compression = next((name for magic, name in MAGIC.items() if head.startswith(magic)), "")
    promised = SUFFIXES.get(path.suffix.lower(), "")
    if promised and not compression:
        raise DataError(
            f"{path} (line 1): is named as {promised} but does not begin as such a file; "
            "get it again, or give it another name if it is not compressed"
        )
    part = Part(path, "plain", compression, size)
    with damage_told(part), open_part(part) as unpacked:
        start = unpacked.read(LOOKED_AT)
        if reading.format == "auto" and _may_be_a_long_object(start):
            start += unpacked.readline(LONGEST_LOOK - len(start))
            _refuse_endless_object(path, start)
    if not start:
        return None
    if b"\r" in start and b"\n" not in start and not start.startswith(PARQUET):
        part = replace(part, carriage_returns=reading.format != "parquet")
        start = start.replace(b"\r", b"\n")
    kind = reading.format if reading.format != "auto" else _format_of(path, start)
    if kind != "parquet" and start[:4096].count(0) > len(start[:4096]) // 10:
        raise DataError(
            f"{path} (line 1): is not UTF-8 text (zero bytes in it); write it as UTF-8, "
            "or name only the files of text, as 'folder/*.txt'"
        )
    return replace(part, format=cast(Format, kind))


def _may_be_a_long_object(start: bytes) -> bool:
    """Whether a line that is not at its end begins as one of JSON lines does."""
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    return len(start) == LOOKED_AT and text.startswith(b"{") and not re.search(rb"[\r\n]", text)


def _refuse_endless_object(path: Path, start: bytes) -> None:
    named = any(suffix.lower() in (*JSON_NAMES, ".json") for suffix in path.suffixes)
    if not named and len(start) >= LONGEST_LOOK and not start.endswith(b"\n"):
        raise DataError(
            f"{path} (line 1): is longer than {LONGEST_LOOK >> 20} MiB, so that it cannot be seen whether it "
            "is JSON; say so with --input-format json-lines, or plain"
        )


def _format_of(path: Path, start: bytes) -> Format:
    if start.startswith(PARQUET):
        return "parquet"
    text = start.decode(errors="replace").removeprefix("\ufeff").lstrip()
    names = [suffix.lower() for suffix in path.suffixes]
    if any(name in names for name in JSON_NAMES):
        return "json-lines"
    if text.startswith("[") and ".json" in names:
        raise DataError(f"{path} (line 1): is one JSON array; write JSON lines, an object a line")
    if text.startswith("{") and (".json" in names or _is_object(text.partition("\n")[0])):
        return "json-lines"
    lines = [line.strip() for line in text.split("\n")]
    if any(map(OPEN.fullmatch, lines)):
        return "wikiextractor"
    if lines[0].startswith("<doc "):
        raise DataError(
            f"{path} ({lines[0][:60]!r}): holds no document that can be read; `bert extract` writes "
            f'<doc id="1" url="..." title="...">, a line with the title, text, {CLOSE}'
        )
    if CLOSE in lines:
        return "wikiextractor"  # begins within a long article
    return "plain"


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except RecursionError:
        return True  # of many levels, which whoever reads the line will refuse
    except ValueError:
        return False


# --- opening


def open_part(part: Part) -> IO[bytes]:
    """The bytes of the whole file, unpacked. ConfigError where a package is missing for that."""
    openers: dict[str, Callable[[Path], Any]] = {
        "": partial(open, mode="rb"),
        "gzip": gzip.open,
        "xz": lzma.open,
        "bzip2": bz2.open,
        "zstandard": _open_zstandard,
    }
    opened = openers[part.compression](part.path)
    if part.carriage_returns:
        return cast(IO[bytes], io.BufferedReader(_LineFeeds(opened), 1 << 17))
    return cast(IO[bytes], opened)


@contextmanager
def damage_told(part: Part) -> Iterator[None]:
    """Turn what the unpackers raise for damaged data into a DataError with the file's last good line."""
    try:
        yield
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk, not the data
        line, _ = _readable_lines(part)
        raise DataError(
            f"{part.path} (after line {line}): the {part.compression} data are damaged or cut off "
            f"({error}); get the file again"
        ) from error


def _readable_lines(part: Part) -> tuple[int, int]:
    """Lines and bytes that can still be unpacked from a damaged file."""
    lines = size = 0
    try:
        with open_part(part) as file:
            while data := file.read1(1 << 16):  # type: ignore[attr-defined]
                lines, size = lines + data.count(b"\n"), size + len(data)
    except (EOFError, zlib.error, lzma.LZMAError, OSError):
        pass
    return lines, size


def line_at(part: Part, place: int) -> int:
    """Number of the line, from 1, that byte `place` of the unpacked file is in; reads up to there."""
    lines = 1
    with open_part(part) as file:
        while place > 0 and (data := file.read(min(1 << 20, place))):
            lines, place = lines + data.count(b"\n"), place - len(data)
    return lines


class _LineFeeds(io.RawIOBase):
    """Line feeds for carriage returns, byte for byte, so that places in the file stay what they are."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._after_return = file, False

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._file.seekable()

    def seek(self, place: int, whence: int = 0) -> int:
        """Go to a byte."""
        self._after_return = False
        return self._file.seek(place, whence)

    def tell(self) -> int:
        """The byte that is read next."""
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer; 0 at the end. A line feed after a return ends no second line."""
        data = self._file.read(len(buffer))
        read = data.replace(b"\r\n", b" \n").replace(b"\r", b"\n")
        if self._after_return and data.startswith(b"\n"):
            read = b" " + read[1:]
        self._after_return = data.endswith(b"\r")
        buffer[: len(read)] = read
        return len(read)


def _open_zstandard(path: Path) -> IO[bytes]:
    try:
        import zstandard
    except ImportError:
        raise ConfigError(
            f"{path}: is compressed with zstandard, which {needs_extra('zstandard')}, or unpack it"
        ) from None
    return cast(IO[bytes], io.BufferedReader(_Zstandard(path, zstandard), 1 << 17))


class _Zstandard(io.RawIOBase):
    """Unpacks frame after frame; the package's own reader ends without a word where a file was cut off."""

    def __init__(self, path: Path, package: Any) -> None:
        self._file, self._package = path.open("rb"), package
        self._frame = package.ZstdDecompressor().decompressobj()
        self._begun, self._left = False, b""

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer; 0 at the end. EOFError for a file that ends within a frame."""
        while not self._left:
            data = (self._frame.unused_data if self._frame.eof else b"") or self._file.read(1 << 16)
            if self._frame.eof:
                self._frame, self._begun = self._package.ZstdDecompressor().decompressobj(), False
            if not data:
                if self._begun:
                    raise EOFError("it ends within a frame")
                return 0
            try:
                self._left, self._begun = self._frame.decompress(data), True
            except self._package.ZstdError as error:
                raise OSError(str(error)) from error
        taken = self._left[: len(buffer)]
        self._left = self._left[len(taken) :]
        buffer[: len(taken)] = taken
        return len(taken)


@contextmanager
def open_parquet(part: Part) -> Iterator[Any]:
    """A pyarrow ParquetFile. ConfigError without pyarrow, DataError for a file that is damaged."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(
            f"{part.path}: is a Parquet file, which {needs_extra('parquet')}"
        ) from None
    with damage_told(part), open_part(part) as raw, tempfile.TemporaryFile() as whole:
        if part.compression:  # its table of contents is at the end
            shutil.copyfileobj(raw, whole)
        try:
            # Pages one by one: a row group may be larger than the memory.
            source = whole if part.compression else raw
            with parquet.ParquetFile(source, buffer_size=1 << 20, pre_buffer=False) as file:
                yield file
        except (pyarrow.ArrowInvalid, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the disk, not the data
            raise DataError(
                f"{part.path}: is damaged or cut off, or no Parquet file "
                f"({str(error).strip().splitlines()[0]}); get it again"
            ) from error
