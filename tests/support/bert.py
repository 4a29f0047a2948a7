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
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any

import pytest

ROOT = Path(__file__).parents[2]
PYTHONPATH = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}


class Process:
    """A forked child with the interface of `subprocess.Popen` in text mode."""

    def __init__(
        self, request: dict[str, Any], env: Mapping[str, str] | None, stdout: Any, stderr: Any
    ) -> None:
        self.returncode: int | None = None
        self.stdout: IO[str] | None = None
        server, _ = _server()  # first: with --fast it skips the test, and nothing may be open then
        request |= {"env": dict(os.environ if env is None else env), "cwd": os.getcwd()}
        ours, theirs = socket.socketpair()
        with open(os.devnull, "r+b") as null, theirs:
            output = stdout or null
            if stdout == subprocess.PIPE:
                read, write = os.pipe()
                self.stdout, output = open(read, encoding="utf-8"), open(write, "wb")  # noqa: SIM115
            error = output if stderr == subprocess.STDOUT else stderr or null
            ends = [end.fileno() for end in (null, output, error, theirs)]
            socket.send_fds(server, [json.dumps(request).encode()], ends)
            if self.stdout:
                output.close()
        self._replies = ours.makefile("r")
        ours.close()
        self.pid = int(self._replies.readline())

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._replies], [], [], 0)[0]:
            self.returncode = int(self._replies.readline())
            self._replies.close()
        return self.returncode

    def wait(self) -> int:
        """Wait for the end and return the exit code; negative for a signal."""
        if self.returncode is None:
            select.select([self._replies], [], [])
            self.poll()
        assert self.returncode is not None
        return self.returncode

    def communicate(self) -> tuple[str, None]:
        assert self.stdout is not None
        with self.stdout:
            text = self.stdout.read()
        self.wait()
        return text, None

    def send_signal(self, number: int) -> None:
        """Send a signal unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        if self.stdout:
            self.stdout.close()
        self.wait()


def start_bert(
    *words: object, env: Mapping[str, str] | None = None, stdout: Any = None, stderr: Any = None
) -> Process:
    """Start `bert WORDS`; a stream is that of `subprocess.Popen`, or none by default."""
    return Process({"words": [str(word) for word in words]}, env, stdout, stderr)


def run_bert(*words: object) -> subprocess.CompletedProcess[str]:
    return run_python(None, *words)


def run_python(
    code: str | None, *words: object, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process that has TensorFlow and Keras imported but not used."""
    request = {"code": code, "words": [str(word) for word in words]}
    with TemporaryFile("w+") as stdout, TemporaryFile("w+") as stderr:
        process = Process(request, env, stdout, stderr)
        try:
            process.wait()
        finally:
            process.kill()
        texts = [stream.seek(0) or stream.read() for stream in (stdout, stderr)]
    assert process.returncode is not None
    return subprocess.CompletedProcess(request["words"], process.returncode, *texts)


def write_program(folder: Path) -> Path:
    """Write a program `bert` into a folder, for a script whose commands are children of the server; return it."""
    _, address = _server()
    words = [sys.executable, "-IS", str(Path(__file__).with_name("program.py")), address]
    program = folder / "bert"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    program.chmod(0o755)
    return program


@functools.cache
def _server() -> tuple[socket.socket, str]:
    """Start the server of this test process; return a connection and its address. It ends when this process ends."""
    if os.environ.get("BERT_TEST_FAST"):
        pytest.skip("--fast: starts a process that imports TensorFlow")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    folder = TemporaryDirectory()
    address = f"{folder.name}/socket"
    words = [sys.executable, __file__, str(theirs.fileno()), address]
    environment = os.environ | PYTHONPATH | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    server = subprocess.Popen(words, pass_fds=[theirs.fileno()], env=environment)
    theirs.close()
    assert ours.recv(100) == b"ready", "the server of forked processes did not start"
    atexit.register(lambda: (ours.close(), server.wait(), folder.cleanup()))
    return ours, address


def serve(requests: socket.socket, address: str) -> dict[str, Any] | None:
    """Fork for every request; return the request in the child, and None in the server at its end.

    A request comes from the test process, or from a program that connects to the address.
    """
    programs = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    programs.bind(address)
    programs.listen()
    requests.send(b"ready")
    children: dict[int, tuple[int, int]] = {}  # pidfd -> pid, descriptor of the answers
    while True:
        for ready in select.select([requests, programs, *children], [], [])[0]:
            if isinstance(ready, int):
                pid, answers = children.pop(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                os.write(answers, b"%d\n" % code)
                os.close(answers)
                os.close(ready)
                continue
            source = requests if ready is requests else programs.accept()[0]
            message, descriptors, _, _ = socket.recv_fds(source, 1 << 20, 4)
            if not message:
                return None
            if source is not requests:
                descriptors.append(source.detach())
            pid = os.fork()
            if pid == 0:
                requests.close()
                programs.close()
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
    from bert_cli.processes import open_streams, quiet_imports

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["KERAS_BACKEND"] = "tensorflow"
    with quiet_imports():
        for command in COMMANDS.values():
            command.settings_class()
            if command.module:
                command.run_function()
    request = serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
    if request is None:
        return 0
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = sys.stderr = None  # those of the server
    open_streams()
    sys.argv = ["bert", *request["words"]]
    if request.get("code"):
        exec(compile(request["code"], "<code>", "exec"), {"__name__": "__main__"})
        return 0
    from bert_cli.cli import main as bert

    return bert()


if __name__ == "__main__":
    sys.exit(main())
