"""Run several processes as one run, and end all of them together.

Ends of processes and signals arrive in one queue in their order: the first process that fails is
blamed, and those that fail because of it are not. A process on this host
is killed by the kernel when the launcher dies; one on another host is ended by `host.main` when its
connection ends.
"""

import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from subprocess import DEVNULL, PIPE
from types import FrameType
from typing import IO, TextIO

from bert_cli.errors import CheckpointError, ConfigError, DataError, DeviceError
from bert_cli.parallel.host import SIGNALS, STOP, SUPERVISED, kill_group, prepare_child

POLL_SECONDS = 0.2
LAST_LINES = 12  # of a failed process' standard error that are shown again
KILL_SECONDS = 5.0  # until a remote shell that does not end is killed
DRAIN_SECONDS = 2.0  # until the last lines of a process that ended have been read
KINDS = {kind.exit_code: kind for kind in (ConfigError, DataError, CheckpointError, DeviceError)}


@dataclass(frozen=True)
class Process:
    """The command of one rank."""

    rank: int
    host: str
    words: tuple[str, ...]
    variables: Mapping[str, str]
    """Environment variables in addition to those of this process."""
    cores: tuple[int, ...] = ()
    is_remote: bool = False
    """Whether `words` are a remote shell that runs `host.main`."""

    @property
    def name(self) -> str:
        """Return its name in messages."""
        return f"rank {self.rank} ({self.host})"

    @property
    def line(self) -> str:
        """Return the command for a shell."""
        assigned = [f"{name}={value}" for name, value in self.variables.items()]
        return shlex.join([*(["env", *assigned] if assigned else []), *self.words])


def supervise(processes: Sequence[Process], grace_seconds: float) -> None:
    """Run the processes and return when all have ended with 0.

    When one fails, its last lines are printed, the others are asked to stop and killed after
    `grace_seconds`. The first SIGTERM, SIGHUP or Ctrl-C asks all to stop, the second kills them.
    Raises the error with the exit code of the process that failed (DeviceError for any other code),
    and KeyboardInterrupt when processes that were asked to stop could not save.
    """
    events: Events = queue.SimpleQueue()
    children: list[_Child] = []

    def put(number: int, frame: FrameType | None) -> None:
        events.put(signal.Signals(number))

    before = {number: signal.signal(number, put) for number in SIGNALS}
    try:
        # All are started before the first thread: only then is their `preexec_fn` safe.
        for process in processes:
            children.append(_Child(process, events))
        for child in children:
            child.start_threads()
        failed = _wait_for_all(children, events, grace_seconds)
    finally:
        _kill([child for child in children if child.code is None])
        for child in children:
            child.drain()
        for number, handler in before.items():
            signal.signal(number, handler)
    if failed is not None:
        raise KINDS.get(failed.code or 0, DeviceError)(
            failed.process.name,
            _how_it_ended(failed.code),
            f"when that is fixed the same command continues{_hung(children, failed)}",
        )


class _Child:
    """A started process, whose output is printed and whose end becomes an event."""

    printing = threading.Lock()

    def __init__(self, process: Process, events: "Events") -> None:
        self.process, self.events = process, events
        self.code: int | None = None  # 128 + N for signal N; None while it runs
        self.was_killed = False
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self.threads: list[threading.Thread] = []
        try:
            self.popen = subprocess.Popen(
                process.words,
                env={**os.environ, **process.variables},
                stdin=PIPE if process.is_remote else DEVNULL,
                stdout=PIPE,
                stderr=PIPE,
                # In a session of its own, Ctrl-C in the terminal reaches the launcher alone.
                start_new_session=True,
                preexec_fn=prepare_child(process.cores),
            )
        except OSError as error:
            raise ConfigError(
                f"{process.words[0]} (for {process.name})",
                f"cannot be started ({error.strerror})",
                "check the name of the program",
            ) from error
        self._write(SUPERVISED)

    def start_threads(self) -> None:
        """Print its output and report its end, from threads."""
        for target, *arguments in (
            (self._print, self.popen.stdout, sys.stdout),
            (self._print, self.popen.stderr, sys.stderr),
            (self._wait,),
        ):
            self.threads.append(threading.Thread(target=target, args=arguments, daemon=True))
            self.threads[-1].start()

    def request_stop(self) -> None:
        """Ask the process to save and end."""
        if self.process.is_remote:
            self._write(STOP)
        else:
            self.popen.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process and all that it started."""
        self.was_killed = True
        if self.popen.stdin is not None:
            self._write(STOP)
            with suppress(OSError):
                self.popen.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self.popen.wait(KILL_SECONDS)
        kill_group(self.popen.pid)
        self.popen.wait()

    def drain(self) -> None:
        """Wait until its output is printed, but not for a process it left behind that holds its output open."""
        until = time.monotonic() + DRAIN_SECONDS
        if not self.threads:  # another process could not be started
            self.start_threads()
        for thread in self.threads[:2]:
            thread.join(max(0.0, until - time.monotonic()))

    def _write(self, line: bytes) -> None:
        if self.popen.stdin is not None:
            with suppress(OSError, ValueError):  # it has ended, or its input is closed
                self.popen.stdin.write(line)
                self.popen.stdin.flush()

    def _wait(self) -> None:
        code = self.popen.wait()
        kill_group(self.popen.pid)
        if self.popen.stdin is not None:
            with suppress(OSError):
                self.popen.stdin.close()  # when the remote shell was killed its host sees this
        self.code = code if code >= 0 else 128 - code
        self.events.put(self)

    def _print(self, source: IO[bytes], target: TextIO) -> None:
        with source:
            for line in source:
                text = line.decode("utf-8", "replace").rstrip("\r\n")
                if target is sys.stderr and text.strip():
                    self.last_lines.append(text)
                try:
                    with _Child.printing:
                        target.write(f"[{self.process.rank}] {text}\n")
                        target.flush()
                except BrokenPipeError:
                    # Keep reading: a process whose output nobody reads blocks.
                    self.events.put(signal.SIGPIPE)


Events = queue.SimpleQueue[_Child | signal.Signals]


def _wait_for_all(
    children: Sequence[_Child], events: Events, grace_seconds: float
) -> _Child | None:
    """Return the first process that failed when all have ended, None when none did."""
    running = list(children)
    failed: _Child | None = None
    request: signal.Signals | None = None
    until: float | None = None
    while running:
        try:
            # With a timeout: a signal just before the wait does not interrupt it.
            event = events.get(timeout=POLL_SECONDS)
        except queue.Empty:
            if until is not None and time.monotonic() > until:
                _print_line(f"{_ranks(running)} did not end in {grace_seconds:g} s: killed")
                _kill(running)
                until = None
            continue
        if isinstance(event, _Child):
            running.remove(event)
            # A process that was still starting has no handler and ends by the request itself.
            was_stopped = request is not None and event.code == 128 + signal.SIGTERM
            if event.code and failed is None and not was_stopped:
                failed = event
                _stop_others(failed, running)
                until = time.monotonic() + grace_seconds
        elif request is None and failed is None:
            request = event
            _print_line(f"{request.name}: all processes save and stop; once more kills them")
            for child in running:
                child.request_stop()
        elif event != signal.SIGPIPE:
            _kill(running)
            raise KeyboardInterrupt
    if failed is None and request == signal.SIGPIPE:
        raise BrokenPipeError
    if failed is None and any(child.code for child in children):
        raise KeyboardInterrupt
    return failed


def _stop_others(failed: _Child, others: Sequence[_Child]) -> None:
    """Ask the other processes to stop, and print what the failed one wrote last."""
    for child in others:
        child.request_stop()
    failed.drain()
    lines = [f"  {line}" for line in failed.last_lines]
    stopped = f"; {_ranks(others)} asked to stop" if others else ""
    last = "; its last lines:" if lines else "; it wrote nothing to standard error"
    head = f"{failed.process.name} {_how_it_ended(failed.code)}{stopped}{last}"
    _print_line("\n".join([head, *lines]))


def _kill(children: Sequence[_Child]) -> None:
    """Kill processes at the same time."""
    threads = [threading.Thread(target=child.kill) for child in children]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _hung(children: Sequence[_Child], failed: _Child) -> str:
    """Return the ranks that may be behind a lost process: the others notice one that hangs, and end first."""
    hung = [child for child in children if child.was_killed]
    if failed.code != DeviceError.exit_code or not hung:
        return ""
    return f". The cause may be {_ranks(hung)}, which hung and had to be killed"


def _ranks(children: Sequence[_Child]) -> str:
    numbers = ", ".join(str(child.process.rank) for child in children)
    return f"rank{'s' if len(children) > 1 else ''} {numbers}"


def _how_it_ended(code: int | None) -> str:
    with suppress(ValueError):
        if code and code > 128:
            name = signal.Signals(code - 128).name
            cause = ", as by a machine that is short of memory" if name == "SIGKILL" else ""
            return f"was killed by {name}{cause}"
    return f"ended with exit code {code}"


def _print_line(text: str) -> None:
    with _Child.printing:
        print(f"launch: {text}", file=sys.stderr, flush=True)
