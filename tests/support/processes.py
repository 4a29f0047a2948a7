"""Wait for processes, and run the tfrecord package in one."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def index_of_tfrecord_package(path: Path) -> str:
    """Return the tfrecord package's index of a record file; it cannot be imported together with TensorFlow."""
    index = path.with_suffix(".reference")
    # Its protobuf classes are older than protobuf 7, which supports them in Python only.
    environment = {**os.environ, "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}
    command = [sys.executable, "-m", "tfrecord.tools.tfrecord2idx", str(path), str(index)]
    subprocess.run(command, check=True, timeout=60, env=environment)
    text = index.read_text()
    index.unlink()
    return text
