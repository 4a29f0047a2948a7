"""Run several processes as one run, and end all of them together.

`supervise` starts each process, on this host or by a remote shell, through `main` of this file. `main` passes on the
signals that `supervise` writes to its standard input; the end of the input means that the launcher or the connection is
gone. Ends of processes and signals arrive in one queue in their order, so the first process that fails is blamed.
"""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import IO, NamedTuple

from bert_cli.errors import BertError, CheckpointError, ConfigError, DataError, DeviceError
from bert_cli.parallel.devices import gpus_of
from bert_cli.processes import is_repeated, on_stop_signals, open_streams, print_error, print_line

POLL_SECONDS = 0.2
LAST_LINES = 12  # of a failed process' standard error that are shown again
KILL_SECONDS = 5.0  # until a remote shell that does not end is killed
DRAIN_SECONDS = 2.0  # until the last lines of a process that ended have been read
KINDS = {kind.exit_code: kind for kind in (ConfigError, DataError, CheckpointError, DeviceError)}


class Process(NamedTuple):
    """The command of one rank."""

    rank: int
    host: str
    words: Sequence[str]

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host})"


def command_on_host(
    program: Sequence[str], local_rank: int, count: int, grace_seconds: float
) -> list[str]:
    """Return the command that runs a program through `main`, as one of `count` processes of its host."""
    words = ["-m", "bert_cli.parallel.launcher", str(local_rank), str(count), f"{grace_seconds:g}"]
    return [sys.executable, *words, *program]


def supervise(processes: Sequence[Process], grace_seconds: float) -> None:
    """Run the commands of `command_on_host` and return when all have ended with 0.

    When one fails, the others are asked to stop and killed after `grace_seconds`. The first SIGTERM, SIGHUP or Ctrl-C
    asks all to stop, the second kills them. Raises the error with the exit code of the process that failed
    (DeviceError for any other code), and KeyboardInterrupt when processes that were asked to stop could not save.
    """
    events: Events = queue.SimpleQueue()
    children: list[_Child] = []
    before = on_stop_signals(lambda received, _: events.put(signal.Signals(received)))
    try:
        for process in processes:
            children.append(_Child(process, events))
        failed = _wait_for_all(children, events, grace_seconds)
    finally:
        _kill([child for child in children if child.code is None])
        for child in children:
            child.drain()
        for number, handler in before.items():
            signal.signal(number, handler)
    if failed is not None:
        kind = KINDS.get(failed.code or 0, DeviceError)
        how = _how_it_ended(failed.code)
        raise kind(str(failed.process), how, "fix this, then run the same command to continue")


class _Child:
    """A started process, whose output is printed and whose end becomes an event."""

    printing = threading.Lock()

    def __init__(self, process: Process, events: "Events") -> None:
        self.process = process
        self.events = events
        self.code: int | None = None  # 128 + N for signal N; None while it runs
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        try:
            # In a session of its own: Ctrl-C in the terminal reaches the launcher alone.
            self.popen = subprocess.Popen(
                process.words, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True
            )
        except OSError as error:
            where = f"{process.words[0]} (for {process})"
            problem = "cannot be started"
            raise ConfigError(where, f"{problem} ({error.strerror})", "check its name") from error
        self.send(signal.SIGCONT)  # no request, but shows the process that it has a launcher
        self.printers = [
            threading.Thread(target=self._print, args=source, daemon=True)
            for source in ((self.popen.stdout, False), (self.popen.stderr, True))
        ]
        self.waiter = threading.Thread(target=self._wait, daemon=True)
        for thread in (*self.printers, self.waiter):
            thread.start()

    def send(self, number: signal.Signals) -> None:
        assert self.popen.stdin is not None
        with suppress(OSError, ValueError):  # it has ended, or its input is closed
            self.popen.stdin.write(f"{number.name}\n".encode())
            self.popen.stdin.flush()

    def drain(self) -> None:
        """Wait until the output is printed, but not for a leftover child process that holds the output open."""
        until = time.monotonic() + DRAIN_SECONDS
        for thread in self.printers:
            thread.join(max(0.0, until - time.monotonic()))

    def _wait(self) -> None:
        code = self.popen.wait()
        assert self.popen.stdin is not None
        with suppress(OSError):
            self.popen.stdin.close()
        self.code = shell_code(code)
        self.events.put(self)

    def _print(self, source: IO[bytes], is_error: bool) -> None:
        # Reads to the end, whatever happens to the output: a process blocks if nobody reads what it writes.
        with source:
            for line in source:
                text = line.decode("utf-8", "replace").rstrip("\r\n")
                if is_error and text.strip():
                    self.last_lines.append(text)
                with _Child.printing, suppress(Exception):
                    write = print_error if is_error else print_line
                    write(f"[{self.process.rank}] {text}")


Events = queue.SimpleQueue[_Child | signal.Signals]


def _wait_for_all(
    children: Sequence[_Child], events: Events, grace_seconds: float
) -> _Child | None:
    """Wait until all have ended; return the first process that failed, None if none failed."""
    running = list(children)
    failed: _Child | None = None
    # When a stop was requested: a scheduler repeats its signal within seconds.
    asked: float | None = None
    until = float("inf")
    while running:
        try:
            # With a timeout: a signal just before the wait does not interrupt it.
            event = events.get(timeout=POLL_SECONDS)
        except queue.Empty:
            if time.monotonic() > until:
                _kill(running)
                _print_line(f"{_ranks(running)} did not end in {grace_seconds:g} s: killed")
                until = float("inf")
            continue
        if isinstance(event, _Child):
            running.remove(event)
            # A process that was still starting has no handler and ends by the request itself.
            was_stopped = asked is not None and event.code == 128 + signal.SIGTERM
            if event.code and failed is None and not was_stopped:
                failed = event
                _send(running, signal.SIGTERM)
                _report(failed, running)
                # Longer than a checkpoint takes: the others save before they end.
                until = time.monotonic() + grace_seconds
        elif asked is None and failed is None:
            asked = time.monotonic()
            _send(running, signal.SIGTERM)
            _print_line(f"{event.name}: all processes save and stop; a second request kills them")
        elif asked is None or not is_repeated(event, asked):
            _kill(running)
            raise KeyboardInterrupt
    if failed is None and any(child.code for child in children):
        raise KeyboardInterrupt
    return failed


def _send(children: Sequence[_Child], number: signal.Signals) -> None:
    for child in children:
        child.send(number)


def _kill(children: Sequence[_Child]) -> None:
    _send(children, signal.SIGKILL)
    until = time.monotonic() + KILL_SECONDS
    for child in children:
        child.waiter.join(max(0.0, until - time.monotonic()))
        child.popen.kill()


def _report(failed: _Child, others: Sequence[_Child]) -> None:
    """Print how a process ended, and repeat its last lines."""
    failed.drain()
    stopped = f"; {_ranks(others)} asked to stop" if others else ""
    last = "it wrote nothing to standard error"
    if failed.last_lines:
        last = "its last lines:"
    head = f"{failed.process} {_how_it_ended(failed.code)}{stopped}; {last}"
    _print_line("\n  ".join([head, *failed.last_lines]))


def _ranks(children: Sequence[_Child]) -> str:
    numbers = ", ".join(str(child.process.rank) for child in children)
    if len(children) > 1:
        return f"ranks {numbers}"
    return f"rank {numbers}"


def shell_code(code: int) -> int:
    """Return the exit code of a process as a shell does: 128 and the number of the signal that killed it."""
    if code < 0:  # Python negates the number
        return 128 - code
    return code


def _how_it_ended(code: int | None) -> str:
    # A program may itself return a code above 128, which does not mean a signal.
    with suppress(ValueError):
        if code and code > 128:
            name = signal.Signals(code - 128).name
            cause = ""
            if name == "SIGKILL":
                cause = ", usually because the machine ran out of memory"
            return f"was killed by {name}{cause}"
    return f"ended with exit code {code}"


def _print_line(text: str) -> None:
    with _Child.printing:
        print_error(f"launch: {text}")


def main(local_rank: int, count: int, grace_seconds: float, program: Sequence[str]) -> int:
    """Run a program on this host with its part of the devices, and return its exit code."""
    try:
        gpus = gpus_of(local_rank, count, os.environ)
    except BertError as error:
        print_error(f"bert: {error}")
        return error.exit_code
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    else:
        cores = cores_of(local_rank, count)
        if cores:
            os.sched_setaffinity(0, cores)
    # In a group of its own, which is killed with all that the program has started.
    child = subprocess.Popen(program, stdin=DEVNULL, process_group=0)
    on_stop_signals(lambda received, _: child.send_signal(received))
    threading.Thread(target=_obey, args=(child, grace_seconds), daemon=True).start()
    code = child.wait()
    _kill_group(child)
    return shell_code(code)


def _obey(child: "subprocess.Popen[bytes]", grace_seconds: float) -> None:
    """Pass on the signals named on standard input; when it ends, stop the program, and kill it after a while."""
    # Do not read standard input when it is a terminal: the command was started by hand.
    if os.isatty(0) or not sys.stdin.buffer.readline():
        return
    for line in sys.stdin.buffer:
        child.send_signal(signal.Signals[line.decode().strip()])
    child.terminate()
    time.sleep(grace_seconds)
    _kill_group(child)


def _kill_group(child: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)


def cores_of(local_rank: int, count: int) -> list[int]:
    """Return the cores of one of `count` processes on this host; empty for all cores."""
    # All get the same number, even if a core stays idle: a sum over two threads rounds differently than over three.
    if count == 1 or not hasattr(os, "sched_getaffinity"):
        return []
    # The cores of a socket and the threads of a core are adjacent.
    cores = sorted(os.sched_getaffinity(0), key=_socket_and_core)
    if len(cores) < count and local_rank == 0:
        _print_line(f"{count} processes use the same {len(cores)} cores")
    each = len(cores) // count
    return cores[local_rank * each : (local_rank + 1) * each]


def _socket_and_core(core: int) -> tuple[int, ...]:
    folder = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
    with suppress(OSError, ValueError):
        return (*(int((folder / n).read_text()) for n in ("physical_package_id", "core_id")), core)
    return (0, core, core)


if __name__ == "__main__":
    open_streams()
    rank_here, processes_here, grace, *command = sys.argv[1:]
    exit_code = main(int(rank_here), int(processes_here), float(grace), command)
    # Without Python's shutdown, which takes time: the launcher blames the process that ends first.
    os._exit(exit_code)
