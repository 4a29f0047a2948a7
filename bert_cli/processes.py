"""Child processes that end with their parent, and the number of cores.

A process that is killed by signal 9 cannot end its children. So a child watches the read end of a
pipe whose only write end the parent holds: when the parent ends, however it ends, the read returns.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

# Runs as `python -c GUARD PROGRAM ...`: starts the program in the guard's process group and kills the
# group when standard input, the pipe, closes. 20 ms to start.
GUARD = """
import os, signal, subprocess, sys, threading
def watch():
    while os.read(0, 1): pass
    os.killpg(0, signal.SIGKILL)
threading.Thread(target=watch, daemon=True).start()
status = subprocess.call(sys.argv[1:], stdin=subprocess.DEVNULL)
os._exit(status if status >= 0 else 128 - status)
"""


def cpu_count() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def start_program(command: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
    """Start a program that is killed, with all that it starts, when this process ends.

    It runs in a new process group, whose number is the `pid` of the returned process, so
    Ctrl-C in the terminal does not reach it. `options` are those of `subprocess.Popen`.
    """
    guarded = [sys.executable, "-I", "-S", "-c", GUARD, *command]
    return subprocess.Popen(guarded, stdin=subprocess.PIPE, process_group=0, **options)


def kill_program(program: "subprocess.Popen[bytes]") -> None:
    """Kill a program of `start_program` with all that it started, and wait for its end."""
    with suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    program.wait()
    if program.stdin is not None:
        program.stdin.close()


def die_with_parent(pipe: Connection) -> None:
    """Kill this process and its process group when the write end of `pipe` closes.

    Call it first in a child process; its parent must be the only holder of the write end. The child
    gets a new process group, which also keeps Ctrl-C in the terminal from it.
    """
    os.setpgid(0, 0)

    def watch() -> None:
        with suppress(EOFError, OSError):
            pipe.recv_bytes()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
