"""Records on object storage: a verified copy on the local disk.

`local_copy("s3://bucket/records/128", cache)` returns a folder that is read like any other. Its name
depends on the address and on the remote corpus.json, so changed records get a new folder. fsspec fetches
each file to a partial file, whose checksum is compared with corpus.json before it is renamed; corpus.json
comes last. So an interrupted copy is continued, a damaged file is fetched again, and of several
processes one fetches while the others wait. fsspec's own caches know neither checksums nor complete
folders.
"""

import hashlib
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bert_cli.data.records.corpus import COPY_LOCK, CORPUS, OFFSETS, parse_corpus
from bert_cli.data.records.tokenizer import FILES as TOKENIZER
from bert_cli.data.records.vocab import VOCAB_FILE
from bert_cli.data.shards.manifest import file_crc32c
from bert_cli.data.shards.runner import plan_disk_space, run_in_threads
from bert_cli.errors import BertError, ConfigError, DataError, needs_extra
from bert_cli.files import (
    DISK_IS_FULL,
    LockUnsupportedError,
    atomic_file,
    lock_file,
    write_atomically,
)

BACKENDS = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs",
    "http": "aiohttp", "https": "aiohttp", "hdfs": "pyarrow", "sftp": "paramiko",
}  # fmt: skip
"""Kind of address -> the package that fsspec reads it with."""

CONNECTIONS = 8  # one connection to object storage gives some 50 MB/s
ATTEMPTS = 2  # for each file: a damaged one is fetched again once
SECONDS_BETWEEN_ATTEMPTS = 0.5
SMALL = 1 << 24
"""Files up to so many bytes that are no records are compared each time that a copy is opened."""


@dataclass(frozen=True)
class RemoteFile:
    """A file of the corpus. Size and checksum are None where corpus.json does not have them."""

    name: str
    bytes: int | None
    crc32c: str | None
    is_optional: bool = False
    is_compared: bool = False
    """Compare the checksum each time that the copy is opened."""


class MissingError(DataError):
    """There is no such file at the address."""


def local_copy(url: str, cache: Path) -> Path:
    """Return a folder in `cache` that holds the corpus at `url`; fetch the files that it lacks.

    Raises ConfigError where the package for this kind of address is not installed, and DataError where the
    corpus cannot be fetched, a file of it is damaged, or the disk has too little space.
    """
    remote = Remote(url)
    text = remote.read(CORPUS)
    corpus = parse_corpus(f"{remote.url}/{CORPUS}", text)
    slug = re.sub(r"[^A-Za-z0-9._-]+", "_", remote.url.split("/")[-1])[-40:] or "corpus"
    prefix = f"{slug}-{_hash(remote.url.encode())[:8]}-"
    folder = cache / f"{prefix}{_hash(text)[:16]}"
    files = _files_of(corpus)
    is_described = (folder / CORPUS).is_file() and (folder / CORPUS).read_bytes() == text
    if is_described and not _to_fetch(files, folder):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        missing = _to_fetch(files, folder)
        _print_notes(remote.url, corpus, folder, prefix)
        there = sum(file.bytes or 0 for file in files if file not in missing)
        size = sum(file.bytes or 0 for file in missing)
        print(plan_disk_space("fetch", len(missing), size, there, folder, "file"), flush=True)
        run_in_threads("fetch", size, partial(_fetch, remote, folder), missing, CONNECTIONS)
        write_atomically(folder / CORPUS, text)
    return folder


class Remote:
    """A folder at an address. The errors of its backend become ours."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        with self.errors_at(self.url):
            from fsspec.core import url_to_fs

            self.files, self.root = url_to_fs(self.url)

    def read(self, name: str) -> bytes:
        """Return the bytes of a small file."""
        with self.errors_at(f"{self.url}/{name}"):
            self.files.invalidate_cache()
            data: bytes = self.files.cat_file(f"{self.root.rstrip('/')}/{name}")
            return data

    def fetch(self, name: str, target: Path) -> None:
        """Copy a file to `target`."""
        with self.errors_at(f"{self.url}/{name}"):
            self.files.get_file(f"{self.root.rstrip('/')}/{name}", str(target))

    @contextmanager
    def errors_at(self, where: str) -> Iterator[None]:
        """Raise exceptions of a backend, which are different for each, as ConfigError or DataError."""
        try:
            yield
        except BertError:
            raise
        except ImportError as error:
            package = BACKENDS.get(re.split(r"::|://", self.url)[0], "fsspec")
            package = "fsspec" if (error.name or "").startswith("fsspec") else package
            raise ConfigError(
                f"dataset_dir ({where})",
                f"the package {package} is not installed",
                f"{needs_extra('remote')}, for s3:// and http://; gs:// is read with the package gcsfs, "
                "az:// with adlfs",
            ) from error
        except FileNotFoundError:
            raise MissingError(
                where,
                "does not exist",
                "give the address of a folder of records that `bert tokenize` or `bert index` has finished",
            ) from None
        except Exception as error:
            if isinstance(error, OSError) and error.errno in DISK_IS_FULL:
                raise
            first_line = str(error).strip().split("\n")[0]
            raise DataError(
                where,
                f"cannot be fetched ({type(error).__name__}: {first_line})",
                "check the address, the network and the credentials, and run the command again: it keeps "
                "the files that are complete",
            ) from error


def _files_of(corpus: Mapping[str, Any]) -> list[RemoteFile]:
    """Return the files that reading the corpus or making a tokenizer needs."""
    shards = [RemoteFile(e["name"], e["bytes"], e.get("crc32c")) for e in corpus["files"]]
    if "beside" in corpus:
        return [
            RemoteFile(e["name"], e["bytes"], e["crc32c"], is_compared=e["bytes"] <= SMALL)
            for e in corpus["beside"]
        ] + shards
    others = (name for name in TOKENIZER if name != VOCAB_FILE)
    return [
        RemoteFile(OFFSETS, 8 * corpus["records"], None),
        RemoteFile(VOCAB_FILE, None, None),
        *(RemoteFile(name, None, None, is_optional=True) for name in others),
        *shards,
    ]


def _to_fetch(files: list[RemoteFile], folder: Path) -> list[RemoteFile]:
    """Return the files that are missing, have another size, or are small and have another checksum."""

    def is_complete(file: RemoteFile) -> bool:
        path = folder / file.name
        if not path.is_file():
            return file.is_optional and (folder / CORPUS).exists()
        if file.bytes not in (None, path.stat().st_size):
            return False
        return not file.is_compared or file_crc32c(path) == file.crc32c

    return [file for file in files if not is_complete(file)]


def _fetch(remote: Remote, folder: Path, file: RemoteFile) -> int:
    """Fetch and verify a file; return its bytes."""
    target = folder / file.name
    target.parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(ATTEMPTS):
        try:
            with atomic_file(target, file.bytes) as partial:
                remote.fetch(file.name, partial)
                _verify(partial, file, f"{remote.url}/{file.name}")
            return target.stat().st_size
        except MissingError:
            if file.is_optional:
                return 0
            raise
        except DataError:
            if attempt == ATTEMPTS - 1:
                raise
    raise AssertionError


def _verify(path: Path, file: RemoteFile, where: str) -> None:
    size = path.stat().st_size
    wrong = f"has {size} bytes, not {file.bytes}" if file.bytes not in (None, size) else ""
    if not wrong and file.crc32c is not None and (checksum := file_crc32c(path)) != file.crc32c:
        wrong = f"has the checksum {checksum}, not {file.crc32c}"
    if wrong:
        raise DataError(
            where,
            f"{wrong} as in its corpus.json, also when it was fetched again",
            "copy the file there again, or run `bert index` on the folder it came from and copy that",
        )


def _print_notes(url: str, corpus: Mapping[str, Any], folder: Path, prefix: str) -> None:
    """Print what to know before gigabytes are fetched."""
    for old in sorted(folder.parent.glob(f"{prefix}*")):
        if old != folder:
            print(f"fetch: {url} has changed since it was copied to {old}; remove that when unused")
    if any("crc32c" not in entry for entry in corpus["files"]):
        print(
            f"fetch: {url}/{CORPUS} has no checksums, so sizes alone are compared; `bert index` adds them"
        )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Wait until no other process fetches into the folder, and remove partial files of killed ones.

    Where the file system has no locks all processes fetch, each to its own partial files.
    """
    with ExitStack() as stack:
        is_waiting = False
        while True:
            try:
                stack.enter_context(lock_file(folder / COPY_LOCK))
                for part in folder.rglob(".*.part"):
                    part.unlink(missing_ok=True)
                break
            except BlockingIOError:
                if not is_waiting:
                    print(f"fetch: another process fetches to {folder}; waiting", file=sys.stderr)
                is_waiting = True
                time.sleep(SECONDS_BETWEEN_ATTEMPTS)
            except LockUnsupportedError as error:
                print(f"fetch: {folder} cannot be locked ({error.strerror})", file=sys.stderr)
                break
        yield


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
