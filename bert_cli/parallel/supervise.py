"""Runs several processes and sees all of them end.

Every process has a line of its own to here (`launched.py`), so asking it to stop is the same on this
host and over ssh, and none outlives the launcher. All that happens, a process' end or a signal, comes
through one queue in the order it happened: the first process that fails is the one to blame, those
that fall after it are not.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import IO, Any, TextIO

from bert_cli.errors import CheckpointError, ConfigError, DataError, DeviceError
from bert_cli.parallel.launched import HELLO, SIGNALS

LAST_LINES = 12  # of standard error, to show whose error it was
KILL_SECONDS = 5.0  # a process may take so long to vanish, then its line is cut
DRAIN_SECONDS = 2.0  # what a process wrote last may take so long to arrive
KINDS = {kind.exit_code: kind for kind in (ConfigError, DataError, CheckpointError, DeviceError)}


@dataclass(frozen=True)
class Process:
    """What is started for one rank."""

    rank: int
    host: str
    words: tuple[str, ...]
    variables: Mapping[str, str]
    """What its environment has beside that of this process."""

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"rank {self.rank} ({self.host})"

    @property
    def line(self) -> str:
        """The same as a command that a person can run."""
        given = [f"{name}={value}" for name, value in self.variables.items()]
        return shlex.join([*(["env", *given] if given else []), *self.words])


def attended(program: Sequence[str], place: int, of: int, grace_seconds: float) -> tuple[str, ...]:
    """The command that runs a program as number `place` of a host's `of` processes, with its line."""
    share, grace = f"{place}/{of}", f"{grace_seconds:g}"
    attendant = (sys.executable, "-m", "bert_cli.parallel.launched")
    return (*attendant, "--share", share, "--grace-seconds", grace, "--", *program)


def supervise(processes: Sequence[Process], grace_seconds: float) -> None:
    """Run the processes; return when all have ended with 0.

    The first that fails is told at once, with what it said last; the others are asked to end and
    killed after `grace_seconds`. SIGTERM, SIGHUP and Ctrl-C ask all to stop, a second one kills.
    Raises the error whose exit code the process had (DeviceError where there is none), and
    KeyboardInterrupt when the processes were stopped before they could end well.
    """
    events: Events = queue.SimpleQueue()
    children: list[Child] = []
    with _signals_to(events):
        try:
            for process in processes:
                children.append(_started(process, events))
            culprit = _see_them_end(children, events, grace_seconds)
        finally:
            _kill([child for child in children if child.waiter.is_alive()])
            for child in children:
                child.drain()
    if culprit is not None:
        raise KINDS.get(culprit.code, DeviceError)(
            f"{culprit.child.process.name}: {_how_it_ended(culprit.code)}; when that is mended the same command "
            f"continues{_silent(children, culprit)}"
        )


@dataclass(frozen=True)
class Ended:
    """A process ended, with this exit code: 128 + N for signal N."""

    child: "Child"
    code: int


Events = queue.SimpleQueue[Ended | signal.Signals]


class Child:
    """A started process: what it writes is printed, its end is an event."""

    printing = threading.Lock()

    def __init__(self, process: Process, events: Events) -> None:
        self.process, self.events = process, events
        self.did_not_listen = False
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        # A session of its own: Ctrl-C in the terminal is for the launcher alone.
        self.popen = subprocess.Popen(
            process.words,
            env={**os.environ, **process.variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.line = threading.Lock()
        self.tell(HELLO[0])
        streams = ((self.popen.stdout, sys.stdout), (self.popen.stderr, sys.stderr))
        self.readers = [_thread(self._print, *pair) for pair in streams]
        self.waiter = _thread(self._wait)

    def tell(self, number: int) -> None:
        """Send a signal's number down the line; to one that has ended, nothing happens."""
        assert self.popen.stdin is not None
        with self.line, suppress(OSError):
            if not self.popen.stdin.closed:
                os.write(self.popen.stdin.fileno(), bytes([number]))

    def drain(self) -> None:
        """Wait until all it wrote is printed; not for what it left behind with its output in hand."""
        until = time.monotonic() + DRAIN_SECONDS
        for reader in self.readers:
            reader.join(max(0.0, until - time.monotonic()))

    def _wait(self) -> None:
        code = self.popen.wait()
        assert self.popen.stdin is not None
        with self.line:
            # When ssh was killed, what it stood for hears it by this.
            self.popen.stdin.close()
        self.events.put(Ended(self, code if code >= 0 else 128 - code))

    def _print(self, source: IO[bytes], target: TextIO) -> None:
        with source:
            for line in source:
                text = line.decode("utf-8", "replace").rstrip("\r\n")
                if target is sys.stderr and text.strip():
                    self.last_lines.append(text)
                try:
                    with Child.printing:
                        target.write(f"[{self.process.rank}] {text}\n")
                        target.flush()
                except BrokenPipeError:
                    # Read on: a process that nobody listens to waits for ever.
                    self.events.put(signal.SIGPIPE)


def _thread(work: Callable[..., None], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread


def _started(process: Process, events: Events) -> Child:
    try:
        return Child(process, events)
    except OSError as error:
        raise ConfigError(
            f"{process.words[0]} (for {process.name}): cannot be started ({error.strerror}); give a program "
            "that is there"
        ) from error


@contextmanager
def _signals_to(events: Events) -> Iterator[None]:
    """Signals become events; only in the main thread, where they can be."""
    before: dict[int, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        events.put(signal.Signals(number))

    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _see_them_end(children: Sequence[Child], events: Events, grace_seconds: float) -> Ended | None:
    """Whose failure it was, if there was one."""
    codes: dict[Child, int] = {}
    culprit: Ended | None = None
    asked: signal.Signals | None = None
    until: float | None = None
    while len(codes) < len(children):
        left = [child for child in children if child not in codes]
        wait = None if until is None else max(0.0, until - time.monotonic())
        try:
            event = events.get(timeout=wait)
        except queue.Empty:
            _say(f"{_ranks(left)} did not end in {grace_seconds:g} s: killed")
            for child in left:
                child.did_not_listen = True
            _kill(left)
            until = None
            continue
        if isinstance(event, Ended):
            codes[event.child] = event.code
            # One that was still starting when it was asked to stop ends by that very signal.
            stopped = asked is not None and event.code == 128 + signal.SIGTERM
            if event.code and culprit is None and not stopped:
                culprit = event
                _blame(event, [child for child in left if child is not event.child])
                until = time.monotonic() + grace_seconds
        elif not asked and not culprit:
            asked = event
            _say(f"{asked.name}: all are asked to save and end; once more kills them")
            for child in left:
                child.tell(signal.SIGTERM)
        elif event != signal.SIGPIPE:
            _kill(left)
            raise KeyboardInterrupt
    if culprit is None and asked == signal.SIGPIPE:
        raise BrokenPipeError
    if culprit is None and any(codes.values()):
        raise KeyboardInterrupt
    return culprit


def _blame(ended: Ended, others: Sequence[Child]) -> None:
    """Ask the others to end, and say whose error it was."""
    for child in others:
        child.tell(signal.SIGTERM)
    ended.child.drain()
    said = [f"  {line}" for line in ended.child.last_lines]
    then = f"; {_ranks(others)} asked to end" if others else ""
    last = "; it said last:" if said else "; it wrote nothing to standard error"
    head = f"{ended.child.process.name} {_how_it_ended(ended.code)}{then}{last}"
    _say("\n".join([head, *said]))


def _silent(children: Sequence[Child], culprit: Ended) -> str:
    """Who may be behind a loss: one that hangs is missed by the others, which are well and end first."""
    hung = [child for child in children if child.did_not_listen and child is not culprit.child]
    if culprit.code != DeviceError.exit_code or not hung:
        return ""
    return f". The cause may be {_ranks(hung)}, which hung and had to be killed"


def _ranks(children: Sequence[Child]) -> str:
    numbers = ", ".join(str(child.process.rank) for child in children)
    return f"rank{'s' if len(children) > 1 else ''} {numbers}"


def _how_it_ended(code: int) -> str:
    with suppress(ValueError):
        if code > 128:
            name = signal.Signals(code - 128).name
            why = ", as by a machine that is short of memory" if name == "SIGKILL" else ""
            return f"was killed by {name}{why}"
    return f"ended with exit code {code}"


def _kill(children: Sequence[Child]) -> None:
    for child in children:
        child.tell(signal.SIGKILL)
    until = time.monotonic() + KILL_SECONDS
    for child in children:
        child.waiter.join(max(0.0, until - time.monotonic()))
        if child.waiter.is_alive():
            # It does not listen, or its host does not.
            with suppress(ProcessLookupError):
                os.killpg(child.popen.pid, signal.SIGKILL)
            child.waiter.join()


def _say(text: str) -> None:
    with Child.printing:
        print(f"launch: {text}", file=sys.stderr, flush=True)
