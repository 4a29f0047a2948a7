"""The process that runs a command: its cores, imports, signals, standard streams and terminal, and its child processes.

A process that is killed by signal 9 cannot end its children. So a child reads from a pipe whose only write end belongs
to the parent: when the parent ends, for whatever reason, the read returns.

What a command prints is either a log or, on standard output, its result. A log that cannot be written (no reader, a
closed terminal, a full disk) is lost, and the command goes on. A result that cannot be written ends the command.
"""

import io
import logging
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, TextIO

from bert_cli.errors import UNPRINTABLE, BertError, DataError, logger, printable

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
# A process gets SIGHUP when its terminal is closed.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
REPEAT_SECONDS = 5.0
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
    open_streams()
    os.setpgid(0, 0)

    def watch() -> None:
        with suppress(EOFError, OSError):
            pipe.recv_bytes()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Import Keras without scikit-learn and matplotlib, TensorFlow with oneDNN, and show standard error of a failure.

    Without these packages TensorFlow and Keras load in two thirds of the time. TensorFlow logs ten lines during its
    import, before any log level applies; `--log-level` and TF_CPP_MIN_LOG_LEVEL=0 show them.
    """
    hidden: dict[str, Any] = {name: None for name in KERAS_WRAPS if name not in sys.modules}
    sys.modules.update(hidden)
    # TensorFlow leaves oneDNN off on a CPU without AVX512_VNNI or AMX. With AVX2 alone a step then takes up to a fifth
    # longer.
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
    # Log messages bury the output of a run; TensorFlow's errors are exceptions too.
    shows_logs = os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", NO_LOGS) != NO_LOGS
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
            with suppress(OSError):
                os.write(descriptor, captured.read())
            raise
        finally:
            os.dup2(descriptor, 2)
            os.close(descriptor)
            for name in hidden:
                sys.modules.pop(name, None)


def on_stop_signals(handler: Callable[[int, Any], object]) -> dict[int, Any]:
    """Install a handler for the requests to stop, and return the handlers before."""
    # What is ignored stays ignored: `nohup` lets a run go on when the terminal is closed.
    heard = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    # A handler that was not set from Python is None.
    return {number: signal.signal(number, handler) or signal.SIG_DFL for number in heard}


def is_repeated(number: int, asked: float) -> bool:
    """Return whether a signal belongs to the request to stop at the time `asked`, by the monotonic clock.

    SLURM and its srun both send SIGTERM. When a terminal is closed, the system and the shell may both send SIGHUP.
    """
    return number != signal.SIGINT and time.monotonic() - asked < REPEAT_SECONDS


class _Output(io.FileIO):
    """Standard output or standard error; no error of the system leaves it while it is a log."""

    result: int | None = None  # the descriptor that is the result of the command, set for all
    lines: Literal["stdout", "stderr", "nowhere"] = (
        "stdout"  # where `print_line` writes, in all threads
    )

    def write(self, data: Any) -> int:
        """Write bytes, or drop them if they are a log that cannot be written.

        For a result raises DataError, or SystemExit(0) if the reader is gone: `bert runs | head` is complete.
        """
        try:
            while (written := super().write(data)) is None:  # another program made it non-blocking
                select.select([], [self], [])
            return written
        except OSError as error:
            if self.fileno() != _Output.result:
                return len(data)
            if isinstance(error, BrokenPipeError):
                raise SystemExit(0) from None
            remedy = "write to another place, or check the disk, and run the command again"
            raise DataError("standard output", str(error.strerror), remedy) from error


def open_streams() -> None:
    """Make standard output and standard error logs that cannot end the process, whoever writes to them.

    Descriptors 0 to 2 that are closed (`>&-`) become /dev/null, so that no file gets their numbers. Call this
    before anything is opened. A stream that was replaced before, as by a test, stays.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None or stream is getattr(sys, f"__{name}__"):
            raw = io.BufferedWriter(_Output(number, "w", closefd=False))
            encoding = stream.encoding if stream else "utf-8"
            text = io.TextIOWrapper(raw, encoding, "backslashreplace", line_buffering=True)
            setattr(sys, name, text)


def set_result(is_result: bool) -> None:
    """Say whether standard output is the result of the command, or else a log."""
    _Output.result = 1 if is_result else None


class _Nowhere(io.StringIO):
    def write(self, text: str) -> int:
        return len(text)


@contextmanager
def lines_to(target: Literal["stdout", "stderr", "nowhere"]) -> Iterator[None]:
    """Let `print_line`, tables and the bar of a run write elsewhere until the context ends; other libraries do not."""
    before = _Output.lines
    _Output.lines = target
    try:
        yield
    finally:
        _Output.lines = before


def line_stream() -> TextIO:
    """Return the stream to which `print_line` writes."""
    if _Output.lines == "nowhere":
        return _Nowhere()
    return sys.stdout if _Output.lines == "stdout" else sys.stderr


def print_line(text: str) -> None:
    """Print to standard output, which is a log or the result of the command; control characters are escaped."""
    print(_lines_of(text), file=line_stream(), flush=True)


def print_error(text: str) -> None:
    """Print to standard error, a log; control characters are escaped."""
    print(_lines_of(text), file=sys.stderr, flush=True)


def _lines_of(text: str) -> str:
    """Return lines without what controls a terminal, also in a name or a label; JSON stays the same JSON."""
    return UNPRINTABLE.sub(
        lambda match: match[0] if match[0] in "\n\t" else f"\\u{ord(match[0]):04x}", text
    )


class _Log(logging.Handler):
    """Passes each text of the log, and whether it is a warning, to a function."""

    def __init__(self, show: Callable[[str, bool], None]) -> None:
        super().__init__()
        self.show = show

    def emit(self, record: logging.LogRecord) -> None:
        self.show(record.getMessage(), record.levelno >= logging.WARNING)


def _print_logged(text: str, is_warning: bool) -> None:
    write = print_error if is_warning else print_line
    write(text)


@contextmanager
def log_to(show: Callable[[str, bool], None]) -> Iterator[None]:
    """Pass each text of the log, and whether it is a warning, to a function until the context ends."""
    printing = logger.handlers
    logger.handlers = [_Log(show)]
    try:
        yield
    finally:
        logger.handlers = printing


logger.setLevel(logging.INFO)
logger.propagate = False  # --log-level is for the libraries of others
logger.addHandler(_Log(_print_logged))


def answer_lines(answer: Callable[[bytes], str]) -> None:
    """Answer each line of standard input on standard output; an answer that is empty is not printed.

    Whatever else prints from now on, also a library in C, prints to standard error.
    """
    output = os.dup(1)
    os.dup2(2, 1)
    with suppress(BrokenPipeError), open(output, "w", encoding="ascii") as answers:
        for line in open(0, "rb", closefd=False):  # noqa: SIM115
            text = answer(line)
            if text:
                print(text, file=answers, flush=True)


def note(text: str) -> None:
    """Print to standard error from a signal handler, which may have interrupted a print."""
    with suppress(OSError):
        os.write(2, f"{text}\n".encode())


def console(width: int = 100, stream: TextIO | None = None) -> "Console":
    """Return a console on a stream, by default that of `print_line`, without markup.

    `width` is the width of a line without a terminal.
    """
    from rich.console import Console

    file = stream or line_stream()
    terminal = file.isatty()
    is_coloured = terminal and not os.environ.get("NO_COLOR")
    if terminal:
        width = shutil.get_terminal_size().columns
    return Console(
        file=file,
        width=width,
        force_terminal=terminal,
        color_system="auto" if is_coloured else None,
        highlight=False,
        markup=False,
        emoji=False,
    )


def print_help(text: str) -> None:
    """Print a help text; on a terminal its headings and flags are coloured."""
    if not line_stream().isatty():
        print_line(text.rstrip("\n"))
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
    print_line("\n".join(line.rstrip() for line in captured.get().splitlines()))
