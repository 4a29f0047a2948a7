"""Wait for processes, and run the tfrecord package in one."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import bert_cli


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


def kill_after_a_shard(program: str, out: Path) -> None:
    """Run Python code that writes shards to `out`, and kill it with signal 9 when the first is complete."""
    environment = os.environ | {"PYTHONPATH": str(Path(bert_cli.__file__).parents[1])}
    with subprocess.Popen([sys.executable, "-c", program], env=environment) as process:
        end = time.monotonic() + 30
        while not list((out / ".done").rglob("*.shard")):
            assert time.monotonic() < end
            time.sleep(0.001)
        process.kill()


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
