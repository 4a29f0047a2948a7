"""Records on object storage: a verified copy on the local disk.

The name of a copy depends on the address and on the remote corpus.json, so changed records get a new folder. fsspec
fetches each file to a partial file, whose checksum is compared with corpus.json before it is renamed; corpus.json comes
last. So an interrupted copy is continued, a damaged file is fetched again, and of several processes one fetches while
the others wait. fsspec's own caches know neither checksums nor complete folders.
"""

import hashlib
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

from bert_cli.data.io.runner import plan_disk_space, run_in_threads
from bert_cli.data.records.corpus import COPY_LOCK, CORPUS, parse_corpus
from bert_cli.errors import BertError, ConfigError, DataError, needs_extra, redact
from bert_cli.files import (
    DISK_IS_FULL,
    JSONObject,
    LockUnsupportedError,
    atomic_file,
    file_crc32c,
    lock_file,
    write_atomically,
)
from bert_cli.processes import print_error, print_line

CONNECTIONS = 8  # one connection to object storage gives some 50 MB/s
SMALL = 1 << 24  # bytes; smaller files without records are verified when a copy is opened

File = JSONObject  # an entry of corpus.json: name, bytes, crc32c


def local_copy(url: str, cache: Path) -> Path:
    """Return a folder in `cache` that holds the corpus at `url`; fetch the files that it lacks.

    Raises ConfigError if a package is not installed, DataError if a file cannot be fetched, is damaged or does not fit.
    """
    remote = Remote(url)
    text = remote.read(CORPUS)
    corpus = parse_corpus(f"{remote.url}/{CORPUS}", text)
    files: list[File] = [*corpus.get("other_files", []), *corpus["files"]]
    if "other_files" not in corpus or any("crc32c" not in file for file in files):
        remedy = "run `bert index` on the folder that was copied there, and copy it again"
        raise DataError(f"{remote.url}/{CORPUS}", "has no checksums", remedy)
    slug = re.sub(r"[^A-Za-z0-9._-]+", "_", remote.url.split("/")[-1])[-40:] or "corpus"
    prefix = f"{slug}-{hashlib.sha256(remote.url.encode()).hexdigest()[:8]}-"
    folder = cache / f"{prefix}{hashlib.sha256(text).hexdigest()[:16]}"

    def is_complete(file: File) -> bool:
        path = folder / file["name"]
        if not path.is_file() or path.stat().st_size != file["bytes"]:
            return False
        is_compared = file in corpus["other_files"] and file["bytes"] <= SMALL
        return not is_compared or file_crc32c(path) == file["crc32c"]

    is_described = (folder / CORPUS).is_file() and (folder / CORPUS).read_bytes() == text
    if is_described and all(map(is_complete, files)):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder):
        for part in folder.rglob(".*.part"):
            part.unlink(missing_ok=True)  # of a killed process
        for old in sorted(cache.glob(f"{prefix}*")):
            if old != folder:
                print_line(
                    f"fetch: {redact(url)} has changed since it was copied to {old}; remove it if unused"
                )
        left = [file for file in files if not is_complete(file)]
        size = sum(file["bytes"] for file in left)
        there = sum(file["bytes"] for file in files) - size
        print_line(plan_disk_space("fetch", len(left), size, there, folder, "file"))
        run_in_threads("fetch", size, partial(_fetch, remote, folder), left, CONNECTIONS)
        write_atomically(folder / CORPUS, text)
    return folder


class Remote:
    """A folder at an address. Errors of its backend are raised as ConfigError or DataError."""

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
        """Raise the exceptions of any backend as ConfigError or DataError."""
        try:
            yield
        except BertError:
            raise
        except ImportError as error:
            problem = f"a package is not installed ({error})"
            remedy = f"{needs_extra('remote')}, for s3:// and http://; gs:// needs gcsfs, and az:// adlfs"
            raise ConfigError(f"dataset_dir ({where})", problem, remedy) from error
        except FileNotFoundError:
            remedy = "use the address of a complete folder of records, from `bert tokenize` or `bert index`"
            raise DataError(where, "does not exist", remedy) from None
        except Exception as error:
            if isinstance(error, OSError) and error.errno in DISK_IS_FULL:
                raise
            first_line = str(error).strip().split("\n")[0]
            problem = f"cannot be fetched ({type(error).__name__}: {first_line})"
            remedy = "check the address, the network and the credentials; the same command keeps complete files"
            raise DataError(where, problem, remedy) from error


def _fetch(remote: Remote, folder: Path, file: File) -> int:
    """Fetch and verify a file, a second time if it is damaged; return its bytes."""
    target = folder / file["name"]
    target.parent.mkdir(parents=True, exist_ok=True)
    for is_last in (False, True):
        try:
            with atomic_file(target, file["bytes"]) as partial_file:
                remote.fetch(file["name"], partial_file)
                actual = partial_file.stat().st_size, file_crc32c(partial_file)
                if actual != (file["bytes"], file["crc32c"]):
                    expected = f"{file['bytes']} bytes and {file['crc32c']}"
                    received = f"{actual[0]} bytes and checksum {actual[1]} after two downloads"
                    problem = f"has {received}; corpus.json has {expected}"
                    remedy = "copy the file there again, or index the folder it came from again and copy that"
                    raise DataError(f"{remote.url}/{file['name']}", problem, remedy)
            break
        except DataError:
            if is_last:
                raise
    return int(file["bytes"])


def _lock(folder: Path) -> AbstractContextManager[object]:
    """Wait until no other process fetches into the folder; without locks all fetch, each to its own partial files."""
    try:
        return lock_file(folder / COPY_LOCK)
    except BlockingIOError:
        print_error(f"fetch: another process fetches to {folder}; waiting")
        return lock_file(folder / COPY_LOCK, attempts=sys.maxsize)
    except LockUnsupportedError as error:
        print_error(f"fetch: {folder} cannot be locked ({error.strerror})")
        return nullcontext()
