"""Input files of text: find them, recognise their format, open them, split them into parts.

The format follows from a file's first bytes, not from its name: magic numbers for gzip, xz, bzip2,
zstandard and Parquet, the first megabyte of text for the rest. Large files are split between documents
and small ones are bundled, so that many processes can read one large file and a million small ones make
no million shards. A compressed file cannot be read from its middle and is one part.
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

from bert_cli.data.shards.manifest import MANIFEST, Shard, finished_files
from bert_cli.errors import ConfigError, DataError, install_command

Format = Literal["wikiextractor", "plain", "json-lines", "parquet"]

MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\xfd7zXZ\x00": "xz",
    b"BZh": "bzip2",
    b"\x28\xb5\x2f\xfd": "zstandard",
}
SUFFIXES = {".gz": "gzip", ".xz": "xz", ".bz2": "bzip2", ".zst": "zstandard", ".zstd": "zstandard"}
PARQUET = b"PAR1"
JSON_NAMES = (".jsonl", ".ndjson", ".jsonlines")
HEAD_BYTES = 1 << 20
"""Unpacked bytes that decide what a file is."""
LONGEST_HEAD = 1 << 26
"""The same where the first line is longer and may be one of JSON lines."""
# Bytes of text in a byte of the file: 10 MB of English articles, at each program's default level.
EXPANSION = {"": 1.0, "gzip": 2.75, "xz": 3.6, "bzip2": 3.5, "zstandard": 2.8}
PARQUET_EXPANSION = 1.75
"""The same for Parquet with its default compression, snappy; 2.5 with zstandard."""

OPEN = re.compile(r'<doc (?:[a-z]+="[^"]*" )*title=".*">')
CLOSE = "</doc>"
GLOB = re.compile(r"[*?\[]")
DAMAGE = (EOFError, zlib.error, lzma.LZMAError, OSError)


@dataclass(frozen=True)
class Reading:
    """The settings of how files are read."""

    format: str = "auto"
    text_field: str = "text"
    documents: str = "blank-lines"
    """What separates the documents of plain text: `blank-lines`, or `files`, each of which is one."""


@dataclass(frozen=True)
class Part:
    """A file, or a range of one between documents."""

    path: Path
    format: Format
    compression: str
    size: int
    """Bytes of the file in this part."""
    start: int = 0
    """First byte of an uncompressed file; first row group of a Parquet file."""
    stop: int | None = None
    """End of the range; None is the end of the file."""


Outputs = list[tuple[Path, list[Part]]]
"""The outputs of a step, each with the parts that it is made of."""


# --- which files


def find_files(source: Path) -> list[Path]:
    """Return the files of a folder, a single file, or the matches of a pattern, in a fixed order.

    Of a step's folder they are its outputs. Raises DataError when there are none.
    """
    if source.exists() or not GLOB.search(str(source)):
        return finished_files(source)
    paths = sorted(Path(name) for name in glob(str(source), recursive=True))
    files = [path for path in paths if path.is_file()]
    if not files:
        raise DataError(f"input ({source})", "no file matches", "check the pattern, and quote it")
    return files


def find_root(source: Path) -> Path:
    """Return the folder that the names of output files are relative to."""
    if source.is_dir():
        return source
    parts = source.parts
    first = next((n for n, part in enumerate(parts) if GLOB.search(part)), len(parts) - 1)
    return source.parent if source.exists() else Path(*parts[:first])


def recognise_all(source: Path, reading: Reading) -> tuple[list[Part], list[str]]:
    """Return every file of the input that is not empty, and notes for the manifest.

    Raises DataError for a file that cannot be read as text, and when all are empty.
    """
    files = [(path, recognise(path, reading)) for path in find_files(source)]
    empty = [path for path, part in files if part is None]
    parts = [part for _, part in files if part is not None]
    if not parts:
        more = f" and {len(empty) - 1} more files are" if empty[1:] else " is"
        raise DataError(f"input ({source})", f"{empty[0]}{more} empty", "give files with text")
    notes = []
    if empty and not (source / MANIFEST).exists():
        notes.append(f"{empty[0]}: is empty and left out; empty files: {len(empty)}")
    formats = {kind: sum(part.format == kind for part in parts) for kind in get_args(Format)}
    if sum(map(bool, formats.values())) > 1:
        counts = ", ".join(f"{count} {kind}" for kind, count in formats.items() if count)
        notes.append(f"{source}: holds files of several formats: {counts}")
    return parts, notes


def refuse_without_effect(parts: Sequence[Part], names: Collection[str]) -> None:
    """Raise ConfigError for a setting in `names` that applies to none of these files."""
    formats = {part.format for part in parts}
    applies = {"text_field": {"json-lines", "parquet"}, "documents": {"plain"}}
    for name in sorted(applies.keys() & names):
        if not applies[name] & formats:
            raise ConfigError(
                f"--{name.replace('_', '-')}",
                f"has no effect, the input is {', '.join(sorted(formats))}",
                "leave it out, or give the format of the files as --input-format",
            )


# --- format of a file


def recognise(path: Path, reading: Reading) -> Part | None:
    """Return the format of a file, None for an empty one.

    Raises DataError for a compressed suffix without compression, binary data, lines that end in
    carriage returns, and JSON that is not one object per line.
    """
    with open(path, "rb") as file:
        magic = file.read(8)
    size = path.stat().st_size
    if not size:
        return None
    compression = next((name for start, name in MAGIC.items() if magic.startswith(start)), "")
    expected = SUFFIXES.get(path.suffix.lower(), "")
    if expected and not compression:
        raise DataError(
            f"{path} (line 1)",
            f"is named as {expected} but does not begin as such a file",
            "get it again, or give it another name if it is not compressed",
        )
    part = Part(path, "plain", compression, size)
    with report_damage(part), open_part(part) as unpacked:
        head = unpacked.read(HEAD_BYTES)
        if reading.format == "auto" and _may_be_long_object(head):
            head += unpacked.readline(LONGEST_HEAD - len(head))
            _refuse_endless_object(path, head)
    if not head:
        return None
    kind = reading.format if reading.format != "auto" else _format_of(path, head)
    if kind != "parquet":
        _refuse_other_encodings(path, head)
    return replace(part, format=cast(Format, kind))


def _refuse_other_encodings(path: Path, head: bytes) -> None:
    where = f"{path} (line 1)"
    if head[:4096].count(0) > len(head[:4096]) // 10:
        raise DataError(
            where,
            "is not UTF-8 text (zero bytes in it)",
            "write it as UTF-8, or name only the files of text, as 'folder/*.txt'",
        )
    if b"\r" in head and b"\n" not in head:
        problem = "has lines that end in carriage returns alone"
        raise DataError(where, problem, "convert it: tr '\\r' '\\n' < FILE > NEW_FILE")


def _may_be_long_object(head: bytes) -> bool:
    """Return whether the head is the beginning of a line that may be one of JSON lines."""
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    return len(head) == HEAD_BYTES and text.startswith(b"{") and b"\n" not in text


def _refuse_endless_object(path: Path, head: bytes) -> None:
    is_json = any(suffix.lower() in (*JSON_NAMES, ".json") for suffix in path.suffixes)
    if not is_json and len(head) >= LONGEST_HEAD and not head.endswith(b"\n"):
        raise DataError(
            f"{path} (line 1)",
            f"is longer than {LONGEST_HEAD >> 20} MiB, so its format cannot be recognised",
            "give --input-format json-lines, or plain",
        )


def _format_of(path: Path, head: bytes) -> Format:
    if head.startswith(PARQUET):
        return "parquet"
    text = head.decode(errors="replace").removeprefix("\ufeff").lstrip()
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if any(name in suffixes for name in JSON_NAMES):
        return "json-lines"
    where = f"{path} (line 1)"
    if text.startswith("[") and ".json" in suffixes:
        raise DataError(where, "is one JSON array", "write JSON lines, one object per line")
    if text.startswith("{") and (".json" in suffixes or _is_object(text.partition("\n")[0])):
        return "json-lines"
    lines = [line.strip() for line in text.split("\n")]
    if any(map(OPEN.fullmatch, lines)):
        return "wikiextractor"
    if lines[0].startswith("<doc "):
        raise DataError(
            f"{path} ({lines[0][:60]!r})",
            "holds no document that can be read",
            f'`bert extract` writes <doc id="1" url="..." title="...">, a line with the title, text, {CLOSE}',
        )
    return "wikiextractor" if CLOSE in lines else "plain"  # the head may be within a long article


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except RecursionError:
        return True  # nested too deeply, which reading the line reports
    except ValueError:
        return False


# --- opening


def open_part(part: Part) -> IO[bytes]:
    """Open the complete file, unpacked. Raises ConfigError where a package is missing for that."""
    openers: dict[str, Callable[[Path], Any]] = {
        "": partial(open, mode="rb"),
        "gzip": gzip.open,
        "xz": lzma.open,
        "bzip2": bz2.open,
        "zstandard": _open_zstandard,
    }
    return cast(IO[bytes], openers[part.compression](part.path))


def _open_zstandard(path: Path) -> IO[bytes]:
    try:
        import zstandard
    except ImportError:
        problem = "is compressed with zstandard, which needs the extra 'zstandard'"
        remedy = f"{install_command('zstandard')}, or unpack it"
        raise ConfigError(str(path), problem, remedy) from None
    return cast(IO[bytes], io.BufferedReader(_BlockReader(_unpack(path, zstandard)), 1 << 17))


def _unpack(path: Path, zstandard: Any) -> Iterator[bytes]:
    """Yield the content of all frames. The package's own reader does not report a file that is cut off."""
    frame = None
    with path.open("rb") as file:
        while packed := file.read(1 << 16):
            while packed:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                try:
                    yield frame.decompress(packed)
                except zstandard.ZstdError as error:
                    raise OSError(str(error)) from error
                packed = frame.unused_data
                frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("it ends within a frame")


class _BlockReader(io.RawIOBase):
    """A file whose content comes from an iterator of blocks."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._block = blocks, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer and return the number of bytes, 0 at the end."""
        while not self._block:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._block = block
        size = min(len(buffer), len(self._block))
        buffer[:size], self._block = self._block[:size], self._block[size:]
        return size


@contextmanager
def open_parquet(part: Part) -> Iterator[Any]:
    """Yield a pyarrow ParquetFile. Raises ConfigError without pyarrow, DataError for a damaged file."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        problem = "is a Parquet file, which needs the extra 'parquet'"
        raise ConfigError(str(part.path), problem, install_command("parquet")) from None
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
            reason = str(error).strip().splitlines()[0]
            problem = f"is damaged or cut off, or no Parquet file ({reason})"
            raise DataError(str(part.path), problem, "get it again") from error


@contextmanager
def report_damage(part: Part) -> Iterator[None]:
    """Raise DataError with the last readable line for damaged or truncated compressed data."""
    try:
        yield
    except DAMAGE as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk, not the data
        problem = f"the {part.compression} data are damaged or cut off ({error})"
        where = f"{part.path} (after line {_count_lines(part)})"
        raise DataError(where, problem, "get the file again") from error


def _count_lines(part: Part) -> int:
    """Return the number of lines that can be read from a damaged file."""
    lines = 0
    try:
        with open_part(part) as file:
            while data := file.read1(1 << 16):  # type: ignore[attr-defined]
                lines += data.count(b"\n")
    except DAMAGE:
        pass
    return lines


def line_number(part: Part, offset: int) -> int:
    """Return the number, from 1, of the line with byte `offset` of the unpacked file."""
    lines = 1
    with open_part(part) as file:
        while offset > 0 and (data := file.read(min(1 << 20, offset))):
            lines, offset = lines + data.count(b"\n"), offset - len(data)
    return lines


# --- splitting and bundling


def split_part(part: Part, size: int, reading: Reading, *, anywhere: bool = False) -> list[Part]:
    """Split a file of twice `size` or more into ranges of about `size`, between documents.

    With `anywhere` a document may be split at a line, where no end of one is near. Compressed files
    and plain files that are one document are not split; Parquet files between row groups.
    """
    is_document = part.format == "plain" and reading.documents == "files" and not anywhere
    if part.compression or is_document or part.size < 2 * size:
        return [part]
    if part.format == "parquet":
        return _split_row_groups(part, size)
    near = size // 8 if anywhere else part.size
    starts = [0]
    with open_part(part) as file:
        for offset in range(size, part.size - size // 2, size):
            if offset > starts[-1]:
                starts.append(_document_start(file, offset, part.format, near))
    starts = [start for start in starts if start < part.size]
    return [
        replace(part, start=start, stop=stop, size=stop - start)
        for start, stop in zip(starts, [*starts[1:], part.size], strict=True)
    ]


def _document_start(file: IO[bytes], offset: int, kind: Format, near: int) -> int:
    """Return the start of the first document from `offset` on, or of a line if none is within `near`."""
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


def _split_row_groups(part: Part, size: int) -> list[Part]:
    with open_parquet(part) as file:
        count = file.metadata.num_row_groups
        sizes = [file.metadata.row_group(n).total_byte_size for n in range(count)]
    compression = part.size / max(1, sum(sizes))
    parts, start, total = [], 0, 0.0
    for number, unpacked in enumerate(sizes):
        total += unpacked * compression
        if total >= size or number == count - 1:
            parts.append(replace(part, start=start, stop=number + 1, size=round(total)))
            start, total = number + 1, 0.0
    return parts or [part]


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


def shard_of(output: Path, parts: Sequence[Part], **arguments: Any) -> Shard:
    """Return the shard that makes `output` of `parts`, which its function gets with `arguments`."""
    inputs = tuple(dict.fromkeys(part.path for part in parts))
    size = sum(part.size for part in parts)
    return Shard(inputs, output, {"parts": list(parts), **arguments}, size)
