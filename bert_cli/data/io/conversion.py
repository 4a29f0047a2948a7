"""The text of documents (PDF, Word, OpenDocument, EPUB, HTML), which `converter.py` reads in a process of its own.

That process has limits of memory and time, so that no document can take more; after one that ended it, another begins.
Each process of `bert` reads a document once: its text stays in a file without a name.
"""

import atexit
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bert_cli.errors import DataError, install_command
from bert_cli.processes import start_reader

PACKAGES = {
    "pdf": ("a PDF", "pypdfium2"),
    "docx": ("a file of Word", "lxml"),
    "odt": ("an OpenDocument text", "lxml"),
    "epub": ("an EPUB book", "lxml"),
    "html": ("HTML", "lxml"),
}
"""Format -> what it is, and the package of the extra `documents` that reads it."""
SECONDS = 120.0  # of processor time for a document; PDFium reads some hundred pages a second
MEMORY = 1 << 31  # bytes of the process
MOST_BYTES = 1 << 29  # of a document
TOO_LARGE = "export it as plain text, or split it"


def text_of(path: Path, kind: str, read: Callable[[int], bytes]) -> bytes:
    """Return the text of a document, whose first bytes `read` returns. Raises DataError for one without text."""
    what, package = PACKAGES[kind]
    if find_spec(package) is None:
        problem = f"is {what}, which needs the extra 'documents'"
        raise DataError(str(path), problem, install_command("documents")) from ImportError(package)
    status = path.stat()
    try:
        return _converter().text_of((path, status.st_size, status.st_mtime_ns), kind, read)
    except DataError as error:
        raise DataError(str(path), f"is {what} that {error.problem}", error.remedy) from None


class _Converter:
    """The process that reads documents, and the texts that it has read."""

    def __init__(self) -> None:
        self._process: Any = None
        self._file = tempfile.TemporaryFile()  # noqa: SIM115
        self._places: dict[object, tuple[int, int]] = {}
        atexit.register(self.end)

    def text_of(self, key: object, kind: str, read: Callable[[int], bytes]) -> bytes:
        """Return the text of a document that is known under a key."""
        if key not in self._places:
            text = self._convert(kind, read(MOST_BYTES + 1)).encode()
            begin = self._file.seek(0, os.SEEK_END)
            self._file.write(text)
            self._file.flush()
            self._places[key] = (begin, len(text))
        start, size = self._places[key]
        return os.pread(self._file.fileno(), size, start)

    def _convert(self, kind: str, data: bytes) -> str:
        if len(data) > MOST_BYTES:
            raise DataError("", f"has more than {MOST_BYTES >> 20} MiB", TOO_LARGE)
        if self._process is None:
            script = str(Path(__file__).with_name("converter.py"))
            self._process = start_reader([sys.executable, "-P", script, str(MEMORY)])
        with suppress(BrokenPipeError):
            request = json.dumps((kind, len(data), SECONDS)).encode()
            self._process.stdin.write(request + b"\n" + data)
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            limit = f"{MEMORY >> 20} MiB of memory"
            if self.end() == -signal.SIGPROF:
                limit = f"{SECONDS:.0f} seconds"
            raise DataError("", f"ended its reader: it may need more than {limit}", TOO_LARGE)
        document = json.loads(answer)
        if "text" not in document:
            raise DataError("", document["problem"], document["remedy"])
        return str(document["text"])

    def end(self) -> int:
        """End the process, and return its exit status."""
        process = self._process
        self._process = None
        if process is None:
            return 0
        process.kill()  # it may be within a document
        with suppress(BrokenPipeError), process:
            process.wait()
        return int(process.returncode)


_converter = lru_cache(maxsize=1)(_Converter)
