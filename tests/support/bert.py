"""Run `bert` commands in child processes that do not have to import TensorFlow.

A server process imports TensorFlow, Keras and the commands once, and forks for every request: a command starts
in milliseconds instead of 5 s. TensorFlow starts its threads with its first operation, which only the children run, so
the fork is safe. A child is a process like any other: signals, `kill -9`, exit codes and its own environment.
"""

import atexit
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import pytest

ROOT = Path(__file__).parents[2]


class Process:
    """A forked child with the interface of `subprocess.Popen` in text mode."""

    def __init__(self, request: dict[str, Any], streams: dict[str, Any]) -> None:
        self.args, self.returncode = request["words"], None
        self.stdin: IO[str] | None = None
        self.stdout: IO[str] | None = None
        self.stderr: IO[str] | None = None
        server = _server()  # first: with --fast it skips the test, and nothing may be open then
        ours, theirs = socket.socketpair()
        passed: list[int] = []
        opened: list[int] = []
        for name in ("stdin", "stdout", "stderr"):
            stream = streams.get(name)
            if stream == subprocess.PIPE:
                read, write = os.pipe()
                end, own_end = (read, write) if name == "stdin" else (write, read)
                setattr(self, name, os.fdopen(own_end, "w" if name == "stdin" else "r"))
                opened.append(end)
            elif stream == subprocess.STDOUT:
                end = passed[1]
            elif stream is None or stream == subprocess.DEVNULL:
                end = os.open(os.devnull, os.O_RDWR)
                opened.append(end)
            else:
                end = stream if isinstance(stream, int) else stream.fileno()
            passed.append(end)
        socket.send_fds(server, [json.dumps(request).encode()], [*passed, theirs.fileno()])
        for end in opened:
            os.close(end)
        theirs.close()
        self._replies = ours.detach()
        self.pid = int(_line(self._replies))

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        if self.returncode is None and select.select([self._replies], [], [], 0)[0]:
            self.returncode = int(_line(self._replies))
            os.close(self._replies)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code; negative for a signal."""
        if self.returncode is None:
            if not select.select([self._replies], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.poll()
        assert self.returncode is not None
        return self.returncode

    def communicate(
        self, input: str | None = None, timeout: float | None = None
    ) -> tuple[str | None, str | None]:
        """Write the input, read both streams to their ends, and wait."""
        texts: dict[str, str] = {}
        readers = []
        for name in ("stdout", "stderr"):
            if stream := getattr(self, name):
                read = functools.partial(_read_to_end, name, stream, texts)
                readers.append(threading.Thread(target=read, daemon=True))
                readers[-1].start()
        if self.stdin:
            self.stdin.write(input or "")
            self.stdin.close()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return texts.get("stdout"), texts.get("stderr")

    def send_signal(self, number: int) -> None:
        """Send a signal unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream:
                stream.close()
        self.wait()


def _read_to_end(name: str, stream: IO[str], texts: dict[str, str]) -> None:
    with stream:
        texts[name] = stream.read()


def start_bert(
    *words: object,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    **streams: Any,
) -> Process:
    """Start `bert WORDS`; streams are those of `subprocess.Popen` (default: none)."""
    return _start({"words": [str(word) for word in words]}, env, cwd, streams)


def run_bert(
    *words: object,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    input: str | None = None,
    timeout: float = 240,
) -> subprocess.CompletedProcess[str]:
    """Run `bert WORDS` to its end and return its exit code and what it printed."""
    request = {"words": [str(word) for word in words]}
    return _run(request, env, cwd, input, timeout)


def run_python(
    code: str,
    *words: object,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 240,
) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process that has TensorFlow and Keras imported but not used."""
    request = {"code": code, "words": [str(word) for word in words]}
    return _run(request, env, cwd, None, timeout)


def _run(
    request: dict[str, Any],
    env: Mapping[str, str] | None,
    cwd: Path | None,
    input: str | None,
    timeout: float,
) -> subprocess.CompletedProcess[str]:
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with _start(request, env, cwd, pipes) as process:
        try:
            stdout, stderr = process.communicate(input, timeout)
        finally:
            process.kill()
    assert process.returncode is not None
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def _start(
    request: dict[str, Any],
    env: Mapping[str, str] | None,
    cwd: Path | None,
    streams: dict[str, Any],
) -> Process:
    environment = dict(os.environ if env is None else env)
    return Process(request | {"env": environment, "cwd": str(cwd or Path.cwd())}, streams)


def _line(descriptor: int) -> str:
    """Read one line, byte by byte: what follows it is another answer."""
    found = b""
    while not found.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        assert byte, "the server of forked processes has ended"
        found += byte
    return found.decode()


@functools.cache
def _server() -> socket.socket:
    """Start the server of this test process; it ends when this process ends."""
    if os.environ.get("BERT_TEST_FAST"):
        pytest.skip("--fast: starts a process that imports TensorFlow")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    words = [sys.executable, __file__, str(theirs.fileno())]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    server = subprocess.Popen(words, pass_fds=[theirs.fileno()], env=environment)
    theirs.close()
    assert ours.recv(100) == b"ready", "the server of forked processes did not start"
    atexit.register(lambda: (ours.close(), server.wait()))
    return ours


def serve(requests: socket.socket) -> dict[str, Any] | None:
    """Fork for every request; return the request in the child, and None in the server at its end."""
    requests.send(b"ready")
    children: dict[int, tuple[int, int]] = {}  # pidfd -> pid, descriptor of the answers
    while True:
        for ready in select.select([requests, *children], [], [])[0]:
            if ready is not requests:
                pid, answers = children.pop(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                os.write(answers, b"%d\n" % code)
                os.close(answers)
                os.close(ready)
                continue
            message, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 4)
            if not message:
                return None
            pid = os.fork()
            if pid == 0:
                requests.close()
                for descriptor in (*children, *(answers for _, answers in children.values())):
                    os.close(descriptor)
                os.setsid()
                for number, descriptor in enumerate(descriptors[:3]):
                    os.dup2(descriptor, number)
                for descriptor in set(descriptors):
                    os.close(descriptor)
                return json.loads(message)
            for descriptor in set(descriptors[:3]):
                os.close(descriptor)
            os.write(descriptors[3], b"%d\n" % pid)
            children[os.pidfd_open(pid)] = pid, descriptors[3]


def main() -> int:
    """Import what the commands need, serve, and run the request of a child."""
    from bert_cli.commands import COMMANDS
    from bert_cli.processes import quiet_imports

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["KERAS_BACKEND"] = "tensorflow"
    with quiet_imports():
        for command in COMMANDS.values():
            command.settings_class()
            command.run_function()
    requests = socket.socket(fileno=int(sys.argv[1]))
    request = serve(requests)
    if request is None:
        return 0
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    sys.argv = ["bert", *request["words"]]
    if "code" in request:
        exec(compile(request["code"], "<code>", "exec"), {"__name__": "__main__"})
        return 0
    from bert_cli.cli import main as bert

    return bert()


if __name__ == "__main__":
    sys.exit(main())
