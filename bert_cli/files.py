"""Atomic writes, file locks, JSON files checked against a type, checksums.

Files of earlier runs may have been edited, truncated or replaced, so `read_json` validates them against a type and its
callers need no checks. Every output is written to a partial file and renamed when it is complete.
"""

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, TextIO, TypeVar

import google_crc32c
from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
)

from bert_cli.disk import free_bytes
from bert_cli.errors import BertError, CheckpointError, ConfigError, DataError
from bert_cli.processes import print_error, print_line
from bert_cli.text import format_bytes

# A JSON object whose values are checked where they are read.
JSONObject = dict[str, Any]
JSON = bool | int | float | str | None | Sequence["JSON"] | Mapping[str, "JSON"]
Value = TypeVar("Value")
BLOCK_BYTES = 1 << 20  # read at once for a checksum, the fastest of 64 kB to 16 MB
# The number in every file that a later command reads back: settings.json, corpus.json, manifest.json, state.json and
# the index. Increase it with a change after which such files would be read wrongly.
FORMAT = 1
# The file that completes a checkpoint, and the key of a JSON object for the checksum of its other entries.
STATE = "state.json"
OWN_CHECKSUM = "own_crc32c"
RESTORE = (
    "copy the checkpoint again, or use another; if the folder was changed on purpose, move "
    f"{STATE} out of it"
)
DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT)
SECONDS_BETWEEN_ATTEMPTS = 0.05
# Prefix of the name of a folder that is being written or removed.
PARTIAL = ".partial_"


def _check_inner(name: str) -> str:
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise ValueError("the file is outside the folder")
    return name


# Path of a file inside the folder of the JSON file that names it, relative to that folder.
InnerPath = Annotated[str, AfterValidator(_check_inner)]


# --- the format of files


def check_format(where: str, number: object, expected: int = FORMAT) -> None:
    """Raise ConfigError for a file whose format is not that of this version."""
    if number != expected:
        its_format = "no format"
        if number is not None:
            its_format = f"format {number}"
        problem = "was made by another version of bert"
        raise ConfigError(f"{where} ({its_format})", problem, "make it again")


def _check_own(number: object, info: ValidationInfo) -> object:
    check_format(str(info.context), number)
    return number


# The first field, `format`, of a file of this tool: `read_json` refuses another number before it reads on.
OwnFormat = Annotated[Any, Field(validate_default=True), AfterValidator(_check_own)]


# --- JSON


def read_json(
    path: Path,
    kind: type[Value],
    error: type[BertError],
    remedy: str,
) -> Value:
    """Return the JSON of a file as a value of `kind`: a pydantic model or a type like `dict[str, int]`.

    Raises `error` with the path and `remedy` for a file that cannot be read, is not UTF-8 or JSON,
    nests too deeply, has a key twice in an object, does not match `kind`, or has another checksum than its own
    (`with_checksum`), which is left out.
    """
    try:
        text = path.read_bytes()
    except OSError as failure:
        raise error(str(path), f"cannot be read ({failure.strerror})", remedy) from failure
    return parse_json(str(path), text, kind, error, remedy)


def parse_json(
    source: str, text: bytes, kind: type[Value], error: type[BertError], remedy: str
) -> Value:
    """Return JSON text as a value of `kind`, as `read_json` does; the error names `source`."""
    if OWN_CHECKSUM.encode() in text:
        try:
            record = json_with_unique_keys(text.decode())
        except ValueError as failure:
            raise error(source, f"Invalid JSON: {failure}", remedy) from None
        saved = record.pop(OWN_CHECKSUM, None) if isinstance(record, dict) else None
        # Computed of the parsed value: an editor may indent the file anew.
        actual = json_crc32c(record)
        if saved not in (None, actual):
            problem = f"has changed since it was saved (crc32c {actual}, not {saved})"
            edited = f"if you have edited it, remove {OWN_CHECKSUM} from it"
            raise error(source, problem, f"{remedy}; {edited}")
        text = json.dumps(record).encode()
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(kind)
        value: Value = adapter.validate_json(text, context=source)
        json_with_unique_keys(text.decode())
    except json.JSONDecodeError as failure:
        raise error(source, failure.msg, "change the file") from None
    except ValidationError as failure:
        first = failure.errors()[0]
        field = ".".join(map(str, first["loc"]))
        where = f"{source} ({field})" if field else source
        raise error(where, first["msg"], remedy) from None
    return value


def json_with_unique_keys(text: str) -> Any:
    """Return the value of JSON text. Raises JSONDecodeError also for a key that occurs twice in an object."""

    def to_dict(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
        values: dict[str, JSON] = {}
        for name, value in pairs:
            if name in values:
                raise ValueError(f"the key {name!r} occurs twice in an object")
            values[name] = value
        return values

    try:
        return json.loads(text, object_pairs_hook=to_dict)
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError) as error:  # also an integer of more than 4,300 digits
        raise json.JSONDecodeError(str(error), text, 0) from None


def is_utf8(value: object) -> bool:
    """Return whether a text or path can be written to a JSON file; Linux allows any bytes in a file name."""
    # Bytes of a name that are not UTF-8 are lone surrogates in Python.
    return not isinstance(value, str | Path) or not re.search("[\ud800-\udfff]", str(value))


def is_stdout(path: Path | None) -> bool:
    """Return whether a JSON report goes to standard output, which then holds nothing else."""
    return str(path) == "-"


def output_json(path: Path | None, value: JSON) -> None:
    """Write a JSON report to a file, or print it for `-`; None writes nothing. Raises DataError as `write_output`."""
    text = json.dumps(value, indent=1, ensure_ascii=False)
    if is_stdout(path):
        print_line(text)
    elif path is not None:
        write_output(path, f"{text}\n", "json")


def write_output(path: Path, text: str, setting: str) -> None:
    """Write a text to the file that a setting names. Raises DataError if it cannot be written."""
    with report_failure(f"{setting} ({path})", "written", "choose another place"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode("utf-8"))


@contextmanager
def report_failure(where: str, action: str, remedy: str) -> Iterator[None]:
    """Raise DataError for an OSError of the block, which says why something cannot be read or written."""
    try:
        yield
    except OSError as error:
        raise DataError(where, f"cannot be {action} ({error.strerror})", remedy) from error


# --- checksums


class Checksums(BaseModel):
    """The entries of state.json that verify a checkpoint."""

    format: OwnFormat = None

    crc32c: dict[InnerPath, str]
    """Checksum of each other file."""


def file_crc32c(path: Path) -> str:
    """Return the CRC32C of a file as eight hexadecimal digits."""
    checksum = google_crc32c.Checksum()
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            checksum.update(block)
    return str(checksum.digest().hex())


def json_crc32c(record: JSON) -> str:
    """Return the CRC32C of a value of JSON, whatever its layout on disk."""
    text = json.dumps(record, sort_keys=True)
    return str(google_crc32c.Checksum(text.encode()).digest().hex())


def with_checksum(record: JSONObject) -> JSONObject:
    """Return a JSON object with the checksum of its entries, which `read_json` verifies."""
    return record | {OWN_CHECKSUM: json_crc32c(json.loads(json.dumps(record)))}


def verify_checkpoint(folder: Path, *, but: tuple[str, ...] = ()) -> None:
    """Verify state.json of a checkpoint and its other files, without files whose names end in `but`.

    A folder without state.json, as other programs write a model, is not verified. Raises CheckpointError for a file
    that has changed since it was saved.
    """
    state = folder / STATE
    if state.is_file():
        saved = read_json(state, Checksums, CheckpointError, RESTORE)
        verify_files(folder, {n: c for n, c in saved.crc32c.items() if not n.endswith(but)})


def verify_files(folder: Path, checksums: Mapping[str, str], remedy: str = "") -> None:
    """Raise CheckpointError for a file in a checkpoint that has another checksum than state.json says."""
    for name, crc32c in checksums.items():
        try:
            actual = file_crc32c(folder / name)
        except OSError as error:
            actual = f"cannot be read: {error.strerror}"
        if actual != crc32c:
            problem = f"has changed since it was saved (crc32c {actual}, but {crc32c} in {STATE})"
            raise CheckpointError(str(folder / name), problem, remedy or RESTORE)


def add_to_checkpoint(folder: Path, name: str, content: bytes) -> None:
    """Write a file into a complete checkpoint, with its checksum, unless it has this content already."""
    path = folder / name
    if path.is_file() and path.read_bytes() == content:
        return
    state = read_json(folder / STATE, JSONObject, CheckpointError, RESTORE)
    # Meanwhile the file has no checksum, so that a kill leaves a checkpoint that can be read.
    state["crc32c"].pop(name, None)
    write_json_atomically(folder / STATE, with_checksum(state))
    write_atomically(path, content)
    state["crc32c"][name] = file_crc32c(path)
    write_json_atomically(folder / STATE, with_checksum(state))


# --- writing


@contextmanager
def name_path(path: Path, size: float | None = None) -> Iterator[None]:
    """Add `path` to an OSError of the block without a path, and on a full disk the number of missing bytes.

    `size` estimates the bytes that the block writes; the free bytes are measured after it failed.
    """
    try:
        yield
    except OSError as error:
        # shutil.Error, of several files, has the number in its text alone.
        number = re.search(r"\[Errno (\d+)\]", str(error)) if error.errno is None else None
        code = int(number[1]) if number else error.errno
        reason = error.strerror or str(error)
        # A copy or a rename writes the second path and only reads the first.
        written = str(error.filename2 or error.filename or path)
        if code in DISK_IS_FULL:
            free = free_bytes(path)
            needed = round(size or 0)
            missing = "that is not enough"
            if needed > free:
                sizes = f"{format_bytes(needed - free)} of the {format_bytes(needed)}"
                missing = f"{sizes} to write are missing"
            reason = f"{os.strerror(code)}, {format_bytes(free)} are free and {missing}"
        elif error.filename is not None or code is None:
            raise
        raise OSError(code, reason, written) from error


@contextmanager
def atomic_file(path: Path, size: float | None = None) -> Iterator[Path]:
    """Yield the path of a partial file, and rename it to `path` when the block succeeds.

    Readers of `path` see the old file or the new file, never a part. The partial file is removed when the block fails,
    and after a kill by the next call for the same `path`. OSErrors are raised as by `name_path`.
    """
    with name_path(path, size), _own_partial(path) as partial:
        yield partial
        fsync_paths([partial])
        os.replace(partial, path)


@contextmanager
def atomic_folder(path: Path, size: float | None = None) -> Iterator[Path]:
    """Yield a partial folder, and rename it to `path` when the block succeeds.

    Only an empty folder is replaced. The files are forced to the disk before the rename, so that a power cut cannot
    leave a damaged folder of that name. The partial folder is removed when the block fails, and after a kill by the
    next call for the same `path`. OSErrors are raised as by `name_path`, ConfigError if another command has written
    `path` meanwhile.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with name_path(path, size), _own_partial(path) as lock:
        partial = path.with_name(f"{PARTIAL}{lock.stem[1:]}")
        try:
            partial.mkdir()
            yield partial
            # Folders too: the names of files are data of their folder.
            fsync_paths([*partial.rglob("*"), partial])
            if path.exists():
                check_new_folder(path)  # another command may have written it meanwhile
            os.replace(partial, path)
            fsync_paths([path.parent])
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _own_partial(path: Path) -> Iterator[Path]:
    """Yield the partial file of `path`, locked, and remove it; the lock ends with the process.

    Removed before: partial files, and folders with the same random digits, of processes that are gone. Without locks
    none is known to be gone.
    """
    pattern = re.compile(rf"\.(?:partial_)?({re.escape(path.name)}\.[0-9a-f]{{12}})(?:\.part)?")
    for match in filter(None, map(pattern.fullmatch, os.listdir(path.parent))):
        leftover = path.with_name(f".{match[1]}.part")
        with suppress(OSError), lock_file(leftover):
            shutil.rmtree(path.with_name(f"{PARTIAL}{match[1]}"), ignore_errors=True)
            leftover.unlink()
    partial = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")
    with ExitStack() as stack:
        stack.callback(partial.unlink, missing_ok=True)
        with suppress(LockUnsupportedError):
            # Another process may hold it for an instant, to see whether it is locked.
            stack.enter_context(lock_file(partial, attempts=5))
        yield partial


def check_new_folder(out: Path, remedy: str = "use a new one") -> None:
    """Raise ConfigError if an output folder exists and is not empty."""
    if out.is_symlink() or out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise ConfigError(f"out ({out})", "exists and is not an empty folder", remedy)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file completely or not at all."""
    with atomic_file(path, len(data)) as partial:
        partial.write_bytes(data)


def write_json_atomically(path: Path, value: JSON) -> None:
    """Write an indented JSON file completely or not at all."""
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    write_atomically(path, text.encode("utf-8"))


def fsync_paths(paths: Iterable[Path]) -> None:
    """Force files and folders from the page cache to the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# --- locks


def lock_file(path: Path, attempts: int = 1) -> TextIO:
    """Return a lock file, created if absent, with an exclusive lock that ends when it is closed.

    The lock also ends with the process, even by signal 9. The content is kept. Raises BlockingIOError when another
    process holds the lock at the last attempt, OSError for a symbolic link, which could lock a file elsewhere, and
    LockUnsupportedError on a network file system without locks.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.fdopen(os.open(path, flags, 0o666), "r+", encoding="utf-8")
    try:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return file
            except BlockingIOError:
                attempts -= 1
                if attempts < 1:
                    raise
                time.sleep(SECONDS_BETWEEN_ATTEMPTS)
            except OSError as error:
                raise LockUnsupportedError(error.errno, error.strerror) from None
    except BaseException:
        file.close()
        raise


@contextmanager
def hold_lock(path: Path, busy: BertError, attempts: int = 1) -> Iterator[None]:
    """Hold the lock of `lock_file`; raise `busy` while another process holds it, and warn where there are no locks."""
    with ExitStack() as stack:
        try:
            stack.enter_context(lock_file(path, attempts))
        except BlockingIOError:
            raise busy from None
        except LockUnsupportedError as error:
            print_error(f"{path} cannot be locked ({error.strerror}); let no other process use it")
        yield


class LockUnsupportedError(OSError):
    """The file system has no locks, like some network file systems."""


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of a file; `attempts` of `lock_file` allow for the lock of this check."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # no such file, or a file system without locks
    return False
