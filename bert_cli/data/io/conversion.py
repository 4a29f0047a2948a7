"""The text of documents (PDF, Word, OpenDocument, EPUB, HTML), which `converter.py` reads in a process of its own.

That process has limits of memory and time, so that no document can take more; after one that ended it, another begins.
Each process of `bert` reads a document once: its text stays in a file without a name.
"""

import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bert_cli.data.io.converter import TOO_LARGE
from bert_cli.errors import DataError, install_command

# Format -> what it is, and the package of the extra `documents` that reads it.
PACKAGES = {
    "pdf": ("a PDF", "pypdfium2"),
    "docx": ("a file of Word", "lxml"),
    "odt": ("an OpenDocument text", "lxml"),
    "epub": ("an EPUB book", "lxml"),
    "html": ("HTML", "lxml"),
}
SECONDS = 120.0  # of processor time for a document; PDFium reads some hundred pages a second
MEMORY = 1 << 31  # bytes of the process
MOST_BYTES = 1 << 29  # of a document


def text_of(path: Path, kind: str, read: Callable[[int], bytes]) -> bytes:
    """Return the text of a document, whose first bytes `read` returns. Raises DataError for one without text."""
    what, package = PACKAGES[kind]
    if find_spec(package) is None:
        problem = f"is {what}, which needs the extra 'documents'"
        raise DataError(str(path), problem, install_command("documents")) from ImportError(package)
    status = path.stat()
    key = path, status.st_size, status.st_mtime_ns
    reader = _reader()
    if key not in reader.stored:
        answer, *remedy = reader.answer(kind, read(MOST_BYTES + 1))
        if remedy:
            raise DataError(str(path), f"is {what} that {answer}", *remedy)
        text = answer.encode()
        start = reader.file.seek(0, os.SEEK_END)
        reader.file.write(text)
        reader.file.flush()
        reader.stored[key] = start, len(text)
    start, size = reader.stored[key]
    return os.pread(reader.file.fileno(), size, start)


class _Reader:
    """The process that reads documents, and a file of their texts: where each begins, and its bytes."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115
        self.stored: dict[object, tuple[int, int]] = {}
        self._process: Any = None
        atexit.register(self.end)

    def answer(self, kind: str, data: bytes) -> list[str]:
        """Return the text of a document, or the problem and the remedy."""
        line = b""
        if len(data) <= MOST_BYTES:
            if self._process is None:
                script = str(Path(__file__).with_name("converter.py"))
                command = [sys.executable, "-P", script, str(MEMORY)]
                # It answers until its standard input, a pipe from this process, ends.
                pipe = subprocess.PIPE
                self._process = subprocess.Popen(
                    command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL
                )
            with suppress(BrokenPipeError):
                request = json.dumps((kind, len(data), SECONDS)).encode()
                self._process.stdin.write(request + b"\n" + data)
                self._process.stdin.flush()
            line = self._process.stdout.readline()
        if line:
            return list(json.loads(line))
        self.end()
        limits = f"{MOST_BYTES >> 20} MiB, {MEMORY >> 20} MiB of memory or {SECONDS:.0f} seconds"
        return [f"ended its reader: it has or needs more than {limits}", TOO_LARGE]

    def end(self) -> None:
        """End the process, which may be within a document."""
        if self._process is not None:
            self._process.kill()
            with suppress(BrokenPipeError), self._process:
                self._process.wait()
            self._process = None


_reader = lru_cache(maxsize=1)(_Reader)
