"""Write files complete or not at all, read JSON against a type, open lock files, say sizes.

A file that a run left behind may have been edited, cut or replaced: `read_json` validates it against a
type, so that what is wrong becomes an error with the path and no caller checks fields by hand. A write
that the system refuses names no file: `naming` adds the path and, on a full disk, the missing bytes.
"""

import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, TextIO, TypeVar

from pydantic import AfterValidator, TypeAdapter, ValidationError

from bert_cli.errors import BertError

JSON = bool | int | float | str | None | Sequence["JSON"] | Mapping[str, "JSON"]
Value = TypeVar("Value")
DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT)


def _stay_inside(name: str) -> str:
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise ValueError("a file outside the folder is named")
    return name


InnerPath = Annotated[str, AfterValidator(_stay_inside)]
"""The path of a file relative to the folder of the JSON that names it, and inside that folder."""


def read_json(path: Path, kind: type[Value], error: type[BertError], remedy: str) -> Value:
    """Return the JSON of a file as a value of `kind`: a pydantic model or a type like `dict[str, int]`.

    Raises `error`, with the path, what is wrong and `remedy`, for a file that cannot be read, is not
    UTF-8 or JSON, nests too deeply, or does not match `kind`.
    """
    try:
        return parse_json(str(path), path.read_bytes(), kind, error, remedy)
    except OSError as failure:
        raise error(f"{path}: cannot be read ({failure.strerror}); {remedy}") from failure


def parse_json(
    source: str, text: bytes, kind: type[Value], error: type[BertError], remedy: str
) -> Value:
    """Return JSON text as a value of `kind`, as `read_json` does; `source` is named in the error."""
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(kind)
        value: Value = adapter.validate_json(text)
    except ValidationError as failure:
        first = failure.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise error(f"{source}{f' ({where})' if where else ''}: {first['msg']}; {remedy}") from None
    return value


def open_lock(path: Path) -> TextIO:
    """Open a lock file for locking, create it if absent, and leave its content as it is.

    Raises OSError for a symbolic link, which would let a lock create or lock a file elsewhere.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "r+", encoding="utf-8")


@contextmanager
def naming(path: Path, size: float | None = None) -> Iterator[None]:
    """Raise an OSError of the block again with a path and, on a full disk, the missing bytes.

    `size` estimates the bytes that the block writes; the free bytes are those after it has failed.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror
        if error.errno in DISK_IS_FULL:
            free, needed = free_bytes(path), round(size or 0)
            lacks = f"{amount(needed - free)} of the {amount(needed)} to write are missing"
            lacks = lacks if needed > free else "that is not enough"
            reason = f"{os.strerror(error.errno)}, {amount(free)} are free and {lacks}"
        elif error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, reason, str(error.filename or path)) from error


@contextmanager
def written_beside(path: Path, size: float | None = None) -> Iterator[Path]:
    """Give the path of a partial file to write, which becomes `path` when the block succeeds.

    Readers of `path` find the old file or the new one, never a part. The partial file is removed when
    the block fails. Raises OSError with the path; `size` is that of `naming`.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")
    with naming(path, size):
        try:
            yield partial
            with partial.open("rb+") as file:
                os.fsync(file.fileno())
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def force_to_disk(paths: Iterable[Path]) -> None:
    """Write files and the entries of folders from the page cache to the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file complete or not at all. Raises OSError with the path and the missing bytes."""
    with written_beside(path, len(data)) as partial:
        partial.write_bytes(data)


def write_json_atomically(path: Path, value: JSON) -> None:
    """Write JSON complete or not at all, indented and in UTF-8. Raises OSError with the path."""
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    write_atomically(path, text.encode("utf-8"))


def free_bytes(folder: Path) -> int:
    """Return the bytes that this user may still write on a folder's disk; it need not exist yet."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def amount(size: int) -> str:
    """Return a number of bytes as text: 950 bytes, 12 kB, 3.4 MB, 120 GB."""
    units = ("bytes", "kB", "MB", "GB", "TB")
    value, step = float(size), 0
    while value >= 999.5 and step + 1 < len(units):
        value, step = value / 1000, step + 1
    exact = step == 0 or value >= 9.95
    return f"{value:,.0f} {units[step]}" if exact else f"{value:.1f} {units[step]}"
