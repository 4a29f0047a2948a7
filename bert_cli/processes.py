"""The process that runs a command: its cores, imports and terminal, and its child processes.

A process that is killed by signal 9 cannot end its children. So a child reads from a pipe whose only write end belongs
to the parent: when the parent ends, for whatever reason, the read returns.
"""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

from bert_cli.errors import BertError, printable

if TYPE_CHECKING:  # slow imports, which `bert --help` does not need
    from multiprocessing.connection import Connection

    from rich.console import Console

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
KERAS_WRAPS = ("sklearn", "matplotlib")
NO_LOGS = "3"  # the TF_CPP_MIN_LOG_LEVEL that hides all messages below a fatal error


def cpu_count() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def start_program(command: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
    """Start a program in a new process group; the group is killed when this process ends."""
    guarded = [sys.executable, "-I", "-S", "-c", GUARD, *command]
    return subprocess.Popen(guarded, stdin=subprocess.PIPE, process_group=0, **options)


def kill_program(program: "subprocess.Popen[bytes]") -> None:
    """Kill the process group of a program of `start_program`, and wait for the program's end."""
    with suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    program.wait()
    if program.stdin is not None:
        program.stdin.close()


def die_with_parent(pipe: "Connection") -> None:
    """Give this process a new group, and kill the group when the parent's write end of `pipe` closes."""
    os.setpgid(0, 0)

    def watch() -> None:
        with suppress(EOFError, OSError):
            pipe.recv_bytes()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Import Keras without scikit-learn and matplotlib, and hide standard error unless an import fails.

    Without these packages TensorFlow and Keras load in two thirds of the time. TensorFlow logs ten lines during its
    import, before any log level applies; `--log-level` and TF_CPP_MIN_LOG_LEVEL=0 show them.
    """
    hidden: dict[str, Any] = {name: None for name in KERAS_WRAPS if name not in sys.modules}
    sys.modules.update(hidden)
    shows_logs = os.environ.get("TF_CPP_MIN_LOG_LEVEL", NO_LOGS) != NO_LOGS
    sys.stderr.flush()
    descriptor = os.dup(2)
    with tempfile.TemporaryFile() as captured:
        if not shows_logs:
            os.dup2(captured.fileno(), 2)
        try:
            yield
        except BertError:  # its message says everything
            raise
        except BaseException:
            captured.seek(0)
            os.write(descriptor, captured.read())
            raise
        finally:
            os.dup2(descriptor, 2)
            os.close(descriptor)
            for name in hidden:
                sys.modules.pop(name, None)


def print_line(text: str) -> None:
    """Print to standard output, and continue if its reader is gone (`| head`, a closed window)."""
    _write(text, sys.stdout)


def print_error(text: str) -> None:
    """Print to standard error, and continue if its reader is gone."""
    _write(text, sys.stderr)


def _write(text: str, stream: TextIO) -> None:
    try:
        print(text, file=stream, flush=True)
    except OSError as error:
        # The pipe has no reader, or the terminal is closed.
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def console(width: int = 100, stream: TextIO | None = None) -> "Console":
    """Return a console on standard output or a stream, without markup; `width` is the line width without a terminal."""
    from rich.console import Console

    file = stream or sys.stdout
    terminal = file.isatty()
    return Console(
        file=file,
        width=shutil.get_terminal_size().columns if terminal else width,
        force_terminal=terminal,
        color_system="auto" if terminal and not os.environ.get("NO_COLOR") else None,
        highlight=False,
        markup=False,
        emoji=False,
    )


def print_help(text: str) -> None:
    """Print a help text; on a terminal its headings and flags are coloured."""
    if not sys.stdout.isatty():
        print(text.rstrip("\n"))
        return
    from rich.text import Text

    marked = Text(text.rstrip("\n"))
    marked.highlight_regex(re.compile(r"^\S[^\n]*:$", re.MULTILINE), "bold")
    marked.highlight_regex(r"(?<![\w.-])--?[a-z][\w.-]*", "cyan")
    console().print(marked, soft_wrap=True)


def print_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()
) -> None:
    """Print rows under their heads, a line each without a terminal; `right` has the right-aligned columns."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(printable, row))
    out = console(width=10_000)
    if out.is_terminal:
        out.print(table)
        return
    with out.capture() as captured:
        out.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))
