"""Records on object storage: a verified copy on this machine's disk, fetched shard by shard.

`local_copy("s3://bucket/records/128", cache)` gives a folder that is read like any other. Its name
follows from the address and from the remote corpus.json, so a corpus that has changed gets a folder
of its own. Each file is fetched beside its place, compared with the checksum in corpus.json, and
renamed; corpus.json comes last. So a copy is whole or is continued, whoever was killed; what was changed
since is fetched again, as far as sizes and small files tell; and of several processes that want it one
fetches while the others wait. Any address that fsspec knows will do; credentials are its backends' affair.
"""

import hashlib
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bert_cli.data.records.corpus import COPY_LOCK, CORPUS, OFFSETS, parse_corpus
from bert_cli.data.records.tokenizer import FILES as TOKENIZER
from bert_cli.data.records.vocab import VOCAB_FILE
from bert_cli.data.shards.checksums import file_crc32c
from bert_cli.data.shards.progress import plan_disk_space, run_in_threads
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
"""What pip calls the package that fsspec reads a kind of address with."""

AT_ONCE = 8  # files under way: one connection to object storage gives some 50 MB/s
TRIES = 2  # per file: a damaged one is fetched again once
SECONDS_BETWEEN_LOOKS = 0.5
SMALL = 1 << 24
"""Files beside the records of at most so many bytes are compared each time that a copy is opened."""


@dataclass(frozen=True)
class Wanted:
    """A file of the corpus; what is None is not known and not compared."""

    name: str
    bytes: int | None
    crc32c: str | None
    may_lack: bool = False
    is_compared: bool = False
    """Each time, also where it was fetched and verified before."""


def local_copy(url: str, cache: Path) -> Path:
    """Return a folder below `cache` that holds the corpus at `url`, fetching what is missing.

    Raises ConfigError where the package for this kind of address is missing, DataError where the
    corpus cannot be fetched, a file of it is damaged, or the disk has no room.
    """
    remote = Remote(url)
    text = remote.read(CORPUS)
    corpus = parse_corpus(f"{remote.url}/{CORPUS}", text)
    place = f"{_slug(remote.url)}-{_hash(remote.url.encode())[:8]}-"
    folder = cache / f"{place}{_hash(text)[:16]}"
    wanted = _wanted(corpus, remote.url)
    if _is_text(folder / CORPUS, text) and not _missing(wanted, folder):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with _claim(folder):
        missing = _missing(wanted, folder)
        _say(remote.url, corpus, folder, place)
        there = sum(item.bytes or 0 for item in wanted if item not in missing)
        to_fetch = sum(item.bytes or 0 for item in missing)
        print(plan_disk_space("fetch", len(missing), to_fetch, there, folder, "file"), flush=True)
        run_in_threads("fetch", to_fetch, partial(_fetch, remote, folder), missing, AT_ONCE)
        write_atomically(folder / CORPUS, text)
    return folder


def _is_text(path: Path, text: bytes) -> bool:
    try:
        return path.read_bytes() == text
    except FileNotFoundError:
        return False


class Remote:
    """A folder at an address; whatever goes wrong there is told as a mistake that can be mended."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.kind = re.split(r"::|://", url)[0]
        with self._told(self.url):
            from fsspec.core import url_to_fs

            self.files, self.root = url_to_fs(self.url)

    def read(self, name: str) -> bytes:
        """The bytes of a small file."""
        with self._told(f"{self.url}/{name}"):
            self.files.invalidate_cache()
            data: bytes = self.files.cat_file(self._path(name))
            return data

    def fetch(self, name: str, target: Path) -> None:
        """Copy a file to `target`."""
        with self._told(f"{self.url}/{name}"):
            self.files.get_file(self._path(name), str(target))

    def _path(self, name: str) -> str:
        return f"{self.root.rstrip('/')}/{name}"

    @contextmanager
    def _told(self, where: str) -> Iterator[None]:
        """Turn what a backend raises into our errors; each has exceptions of its own."""
        try:
            yield
        except BertError:
            raise
        except ImportError as error:
            package = BACKENDS.get(self.kind, "fsspec")
            package = "fsspec" if (error.name or "").startswith("fsspec") else package
            raise ConfigError(
                f"dataset_dir ({where}): the package {package} is not installed; "
                f"{needs_extra('remote')}, for s3:// and http://; gs:// is read with the package gcsfs, "
                "az:// with adlfs"
            ) from error
        except FileNotFoundError:
            raise MissingError(
                f"{where}: does not exist; give the address of a folder of records that "
                "`bert tokenize` or `bert index` has finished"
            ) from None
        except Exception as error:
            if isinstance(error, OSError) and error.errno in DISK_IS_FULL:
                raise
            told = str(error).strip().split("\n")[0]
            raise DataError(
                f"{where}: cannot be fetched ({type(error).__name__}: {told}); check the address, the "
                "network and the credentials, and run the command again, it keeps what is whole"
            ) from error


class MissingError(DataError):
    """There is no such file at the address."""


def _wanted(corpus: Mapping[str, Any], url: str) -> list[Wanted]:
    """Every file that reading the corpus needs, or that a tokenizer is made of."""
    shards = [Wanted(e["name"], e["bytes"], e.get("crc32c")) for e in corpus["files"]]
    if "beside" in corpus:
        return [
            Wanted(e["name"], e["bytes"], e["crc32c"], is_compared=e["bytes"] <= SMALL)
            for e in corpus["beside"]
        ] + shards
    others = (name for name in TOKENIZER if name != VOCAB_FILE)
    return [
        Wanted(OFFSETS, 8 * corpus["records"], None),
        Wanted(VOCAB_FILE, None, None),
        *(Wanted(name, None, None, may_lack=True) for name in others),
        *shards,
    ]


def _missing(wanted: list[Wanted], folder: Path) -> list[Wanted]:
    """What is not in the folder, or is small and not what it was; all of it was verified once."""

    def is_there(item: Wanted) -> bool:
        if item.may_lack and (folder / CORPUS).exists():
            return True
        path = folder / item.name
        try:
            if item.bytes not in (None, path.stat().st_size):
                return False
            return not item.is_compared or file_crc32c(path) == item.crc32c
        except FileNotFoundError:
            return False

    return [item for item in wanted if not is_there(item)]


def _fetch(remote: Remote, folder: Path, item: Wanted) -> int:
    """Fetch a file, verify it, put it in its place; return its bytes."""
    target = folder / item.name
    target.parent.mkdir(parents=True, exist_ok=True)
    trouble: DataError | None = None
    for _ in range(TRIES):
        try:
            with atomic_file(target, item.bytes) as partial:
                remote.fetch(item.name, partial)
                _verify(partial, item, f"{remote.url}/{item.name}")
            return target.stat().st_size
        except MissingError:
            if item.may_lack:
                return 0
            raise
        except DataError as error:
            trouble = error
    assert trouble is not None
    raise trouble


def _verify(path: Path, item: Wanted, where: str) -> None:
    size = path.stat().st_size
    wrong = f"has {size} bytes, not {item.bytes}" if item.bytes not in (None, size) else ""
    if not wrong and item.crc32c is not None and (found := file_crc32c(path)) != item.crc32c:
        wrong = f"has the checksum {found}, not {item.crc32c}"
    if wrong:
        raise DataError(
            f"{where}: {wrong} as its corpus.json says, and so it was when fetched again; copy the "
            "file there again, or run `bert index` on the folder it came from and copy that"
        )


def _say(url: str, corpus: Mapping[str, Any], folder: Path, place: str) -> None:
    """Say what the person may want to know before gigabytes are moved."""
    for old in sorted(folder.parent.glob(f"{place}*")):
        if old != folder:
            print(f"fetch: {url} has changed since it was copied to {old}; remove that when unused")
    unknown = sum("crc32c" not in entry for entry in corpus["files"])
    if unknown:
        print(
            f"fetch: {url}/{CORPUS} has no checksums, so sizes alone are compared; "
            "`bert index` adds them"
        )


@contextmanager
def _claim(folder: Path) -> Iterator[None]:
    """Let one process fetch into a folder; the others wait, and what it was killed over is removed.

    Where the file system has no locks all of them fetch, each beside the others: slower, no less safe.
    """
    with ExitStack() as stack:
        is_waiting = False
        while True:
            try:
                stack.enter_context(lock_file(folder / COPY_LOCK))
                for part in folder.rglob(".*.part"):
                    with suppress(FileNotFoundError):
                        part.unlink()
                break
            except BlockingIOError:
                if not is_waiting:
                    print(f"fetch: another process fetches to {folder}; waiting", file=sys.stderr)
                is_waiting = True
                time.sleep(SECONDS_BETWEEN_LOOKS)
            except LockUnsupportedError as error:
                print(f"fetch: {folder} cannot be locked ({error.strerror})", file=sys.stderr)
                break
        yield


def _slug(url: str) -> str:
    """The end of an address in letters that any file system takes."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", url.split("/")[-1])[-40:] or "corpus"


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
