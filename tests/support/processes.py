"""Wait for processes, and kill them."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def wait_for(condition: Callable[[], Any], running: Iterable[Any] = ()) -> None:
    """Wait until the condition holds; none of the running processes may end before.

    Only pytest's limit for a test ends the wait: how long a busy machine takes is no fault.
    """
    while not condition():
        assert all(process.poll() is None for process in running), "a process has ended"
        time.sleep(0.002)


def ready(path: Path) -> str:
    """Return code that writes the number of its process to a file."""
    return (
        "import os, pathlib\n"
        f"partial = pathlib.Path({str(path.with_suffix('.partial'))!r})\n"
        "partial.write_text(str(os.getpid()))\n"
        f"partial.rename({str(path)!r})\n"
    )


def numbers(*paths: Path) -> list[int]:
    """Return the process numbers in these files, when all are written."""
    wait_for(lambda: all(path.exists() for path in paths))
    return [int(path.read_text()) for path in paths]


def assert_gone(*paths: Path) -> None:
    gone = numbers(*paths)
    wait_for(lambda: not any(map(alive, gone)))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False
