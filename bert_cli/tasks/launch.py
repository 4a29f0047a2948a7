"""`bert launch`: starts a command as several processes, here or on hosts, and sees all of them end.

`commands` says what is started, `supervise` starts it. Every process has a line of its own to the
launcher (`launched.py`), so asking it to stop is the same here and over ssh, and none outlives the
launcher. All that happens, a process' end or a signal, comes through one queue in the order it
happened: the first process that fails is the one to blame, those that fall after it are not.
"""

import json
import os
import queue
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import IO, Any, TextIO

from bert_cli.config.load import load
from bert_cli.config.parallel import LAST_PORT, Cluster, LaunchSettings
from bert_cli.config.schema import PretrainSettings
from bert_cli.errors import BertError, CheckpointError, ConfigError, DataError, DeviceError
from bert_cli.parallel.cluster import find_processes
from bert_cli.tasks.launched import HELLO, SIGNALS, share_of_host

# Commands that can be spread over processes, with their settings.
SPREAD = {"pretrain": PretrainSettings}
REMOTE_PORT = 22_300  # below those that Linux gives to whoever does not ask for one
PASSED = ("DATASETS_DIR",)
LAST_LINES = 12  # of standard error, to show whose error it was
KILL_SECONDS = 5.0  # a process may take so long to vanish, then the line to it is cut
DRAIN_SECONDS = 2.0  # what a process wrote last may take so long to arrive
KINDS = {kind.exit_code: kind for kind in (ConfigError, DataError, CheckpointError, DeviceError)}


@dataclass(frozen=True)
class Process:
    """What is started for one rank."""

    rank: int
    host: str
    words: tuple[str, ...]
    variables: Mapping[str, str]
    """What its environment has beside the launcher's."""

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"rank {self.rank} ({self.host})"

    @property
    def line(self) -> str:
        """The same as a command that a person can run."""
        given = [f"{name}={value}" for name, value in self.variables.items()]
        return shlex.join([*(["env", *given] if given else []), *self.words])


def run(settings: LaunchSettings) -> None:
    """Start all processes, print what they print, return when all have ended well.

    A request to stop goes to all of them. Raises ConfigError for a command that cannot be spread or
    has mistakes, DeviceError when this host cannot be divided, and when a process fails the error
    with its exit code; KeyboardInterrupt when they were killed on request.
    """
    _check(settings)
    processes = commands(settings, os.environ)
    for process in processes:
        print(f"[{process.rank}] {process.line}", flush=True)
    if not settings.dry_run:
        supervise(processes, settings.grace_seconds)


def _check(settings: LaunchSettings) -> None:
    """Find the mistakes of the command here, once, and not in every process."""
    if not settings.command or settings.command[0] not in SPREAD:
        given = settings.command[0] if settings.command else "no command"
        raise ConfigError(
            f"bert launch ({given}): starts {', '.join(SPREAD)}; give it and its options after --, as "
            "`bert launch --processes 2 -- pretrain --config ...`"
        )
    name, *options = settings.command
    asked, _ = load(SPREAD[name], options, f"bert {name}")
    if asked.cluster.workers:
        raise ConfigError("--cluster.workers: bert launch names the processes; leave it out")
    here = find_processes(Cluster(), os.environ)
    if here.count > 1:
        raise ConfigError(
            f"{here.source} (rank {here.rank} of {here.count}): this is one of several processes already; run "
            f"`bert {name}` without launch"
        )


def commands(settings: LaunchSettings, environment: Mapping[str, str]) -> list[Process]:
    """What is started for each rank; ranks count host by host.

    Raises DeviceError when this host's GPUs cannot be divided, ConfigError for a port or a variable
    that is not to be had.
    """
    of = settings.processes
    if settings.hosts:
        first = REMOTE_PORT if settings.port is None else settings.port
        names, ports = (
            [host.rpartition("@")[2] for host in settings.hosts],
            range(first, first + of),
        )
    else:
        share_of_host(0, of, environment)
        names, ports = ["127.0.0.1"], _ports_here(of, settings.port)
    workers = [f"{name}:{port}" for name in names for port in ports]
    processes = []
    for rank in range(len(workers)):
        variables = {"PYTHONUNBUFFERED": "1"}
        if len(workers) > 1:
            task = {"type": "worker", "index": rank}
            variables["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
        program = (sys.executable, "-m", "bert_cli", *settings.command)
        words = attended(program, rank % of, of, settings.grace_seconds)
        if not settings.hosts:
            processes.append(Process(rank, "this host", words, variables))
            continue
        host = settings.hosts[rank // of]
        variables |= _passed(settings.pass_variables, environment)
        given = [f"{name}={value}" for name, value in variables.items()]
        line = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(['env', *given, *words])}"
        words = (*shlex.split(settings.remote_shell), host, line)
        processes.append(Process(rank, host, words, {}))
    return processes


def attended(program: Sequence[str], place: int, of: int, grace_seconds: float) -> tuple[str, ...]:
    """The command that runs a program as one of a host's processes, with its line to the launcher."""
    share, grace = f"{place}/{of}", f"{grace_seconds:g}"
    attendant = (sys.executable, "-m", "bert_cli.tasks.launched")
    return (*attendant, "--share", share, "--grace-seconds", grace, "--", *program)


def _ports_here(count: int, first: int | None) -> list[int]:
    """Ports that are free on this host now: those from `first` on, else any."""
    with ExitStack() as held:
        ports = []
        for number in range(count):
            asked = 0 if first is None else first + number
            trial = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind(("", asked))
            except OSError as error:
                raise ConfigError(
                    f"--port ({asked}): cannot be used here ({error.strerror}); leave it out to find free ones"
                ) from error
            ports.append(trial.getsockname()[1])
    assert max(ports) <= LAST_PORT
    return ports


def _passed(names: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    absent = [name for name in names if name not in environment]
    if absent:
        raise ConfigError(
            f"pass_variables ({absent[0]}): is not set here; export it or leave it out"
        )
    return {name: environment[name] for name in (*PASSED, *names) if name in environment}


@dataclass(frozen=True)
class Ended:
    """A process ended, with this exit code: 128 + N for signal N."""

    child: "Child"
    code: int


Event = Ended | signal.Signals
Events = queue.SimpleQueue[Event]


class Child:
    """A started process: what it writes is printed, its end is an event."""

    def __init__(self, process: Process, events: Events, printing: threading.Lock) -> None:
        self.process, self.events, self.printing = process, events, printing
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
        self.tell(HELLO[0])
        streams = ((self.popen.stdout, sys.stdout), (self.popen.stderr, sys.stderr))
        self.readers = [_thread(self._print, *pair) for pair in streams]
        self.waiter = _thread(self._wait)

    def tell(self, number: int) -> None:
        """Send a signal's number down the line; to one that has ended, nothing happens."""
        assert self.popen.stdin is not None
        with suppress(OSError, ValueError):
            self.popen.stdin.write(bytes([number]))
            self.popen.stdin.flush()

    def drain(self, seconds: float = DRAIN_SECONDS) -> None:
        """Wait until all it wrote is printed; not for what it left behind with its output in hand."""
        until = time.monotonic() + seconds
        for reader in self.readers:
            reader.join(max(0.0, until - time.monotonic()))

    def _wait(self) -> None:
        code = self.popen.wait()
        self.events.put(Ended(self, code if code >= 0 else 128 - code))

    def _print(self, source: IO[bytes], target: TextIO) -> None:
        hung_up = False
        for line in source:
            text = line.decode("utf-8", "replace").rstrip("\r\n")
            if target is sys.stderr and text.strip():
                self.last_lines.append(text)
            try:
                with self.printing:
                    if not hung_up:
                        target.write(f"[{self.process.rank}] {text}\n")
                        target.flush()
            except BrokenPipeError:
                # Read on, or the process would wait for us for ever.
                hung_up = True
                self.events.put(signal.SIGPIPE)


def _thread(work: Any, *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread


def supervise(processes: Sequence[Process], grace_seconds: float) -> None:
    """Run the processes; return when all have ended with 0.

    The first that fails is told at once, with what it said last; the others are asked to end and
    killed after `grace_seconds`. SIGTERM, SIGHUP and Ctrl-C ask all to stop, a second one kills.
    Raises the error whose exit code the process had (DeviceError where there is none), and
    KeyboardInterrupt when the processes were stopped before they could end well.
    """
    events: Events = queue.SimpleQueue()
    printing = threading.Lock()
    children: list[Child] = []
    with _signals_to(events):
        try:
            for process in processes:
                children.append(_started(process, events, printing))
            culprit = _see_them_end(children, events, grace_seconds)
        finally:
            _kill([child for child in children if child.waiter.is_alive()])
            for child in children:
                child.drain()
                child.close()
    if culprit is not None:
        how = _how_it_ended(culprit.code)
        raise KINDS.get(culprit.code, DeviceError)(
            f"{culprit.child.process.name}: {how}; mend what it said last and run it again: it continues"
        )


def _started(process: Process, events: Events, printing: threading.Lock) -> Child:
    try:
        return Child(process, events, printing)
    except OSError as error:
        raise ConfigError(
            f"{process.words[0]} (for {process.name}): cannot be started ({error.strerror}); "
            "--remote-shell names the program that runs a command on a host"
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
        try:
            event = events.get(
                timeout=None if until is None else max(0.0, until - time.monotonic())
            )
        except queue.Empty:
            names = ", ".join(str(child.process.rank) for child in left)
            _say(f"rank {names} did not end in {grace_seconds:g} s: killed")
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
        elif asked or culprit:
            _kill(left)
            raise KeyboardInterrupt
        else:
            asked = event
            _say(f"{asked.name}: all are asked to save and end; once more kills them")
            for child in left:
                child.tell(signal.SIGTERM)
    if asked == signal.SIGPIPE and culprit is None:
        raise BrokenPipeError
    if culprit is None and any(codes.values()):
        raise KeyboardInterrupt
    return culprit


def _blame(ended: Ended, others: Sequence[Child]) -> None:
    """Say whose error it was, and ask the others to end."""
    for child in others:
        child.tell(signal.SIGTERM)
    ended.child.drain()
    said = [f"[{ended.child.process.rank}]   {line}" for line in ended.child.last_lines]
    what = "it said last:" if said else "it wrote nothing to standard error"
    then = "; the others are asked to end" if others else ""
    head = f"{ended.child.process.name} {_how_it_ended(ended.code)}{then}; {what}"
    _say("\n".join([head, *said]))


def _how_it_ended(code: int) -> str:
    with suppress(ValueError):
        if code > 128:
            name = signal.Signals(code - 128).name
            why = ", as a machine does that is short of memory" if name == "SIGKILL" else ""
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
    print(f"launch: {text}", file=sys.stderr, flush=True)
