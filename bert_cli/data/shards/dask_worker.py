"""What runs on a worker of a cluster: one shard at a time in a process of its own.

A thread of a dask worker hands its shard to a child process and waits. So the threads of a worker
do not share one interpreter, the worker answers its scheduler while a shard is at work, and a child
that is killed is not a dead worker. A child keeps what it has learnt for its next shard, and it dies
with its worker, and takes the programs it started along, even when that is killed by signal 9.
Whatever is tried again is tried in another folder, so two tries at one shard cannot meet.
"""

import os
import pickle
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from uuid import uuid4

from bert_cli.data.shards.manifest import Stats, package_versions
from bert_cli.data.shards.runner import convert_shard, die_with_parent
from bert_cli.errors import BertError, DataError

SECONDS_IDLE = 60.0
"""A child without work ends; the run that it worked for may have been killed."""
SECONDS_TO_APPEAR = 5.0
"""A network file system may show the files of another machine late."""

CHILD = (
    "import sys; from bert_cli.data.shards.dask_worker import serve; serve(*map(int, sys.argv[1:]))"
)


class ChildDiedError(Exception):
    """The process that had the shard was killed; the text names the machine."""


@dataclass(frozen=True)
class Job:
    """All that a worker must know of one shard; every path is absolute or seen from `folder`."""

    run: str
    """Token of the command that wants it: children are shared within one run."""
    name: str
    """The shard's output, for messages."""
    target: str
    """Name of the file that `convert` is to write."""
    convert: bytes
    """The step's function, pickled by value where it has to be."""
    inputs: tuple[Path, ...]
    room: Path
    """The shard's private folder, which every try makes a folder of its own in."""
    folder: Path
    """Where the command was called."""
    versions: Mapping[str, str]
    """What changes the bytes written: a worker with others is refused."""


def do_shard(job: Job) -> tuple[Stats, Path]:
    """Do a job in a child of this worker; return its counts and the folder its files are in.

    Raises what the step's function raised, DataError where this machine does not see the folders or
    has other versions, ChildDiedError where the child was killed.
    """
    _check(job)
    child = _take(job.run)
    try:
        answer = child.ask(job)
    except (EOFError, OSError):
        child.end()
        raise ChildDiedError(f"{_here()}, process {child.process.pid}") from None
    child.busy = False
    if isinstance(answer, Exception):
        raise answer
    stats: Stats
    made: Path
    stats, made = answer
    return stats, made


def appears(path: Path) -> bool:
    """Whether a path is there, or comes within a few seconds."""
    end = time.monotonic() + SECONDS_TO_APPEAR
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def end_children(run: str) -> None:
    """Kill the children of a run with all they started: it is over, or was stopped."""
    with LOCK:
        OVER.add(run)
        ours = [child for child in CHILDREN if child.run == run]
    for child in ours:
        child.end()


class Child:
    """A process that does shards for one thread of a worker."""

    def __init__(self, run: str) -> None:
        self.run, self.busy = run, True
        self.jobs, jobs = Pipe()
        watched, self.held = Pipe(duplex=False)  # see die_with_parent
        ends = (jobs.fileno(), watched.fileno())
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, *map(str, ends)],
            pass_fds=ends,
            stdin=subprocess.DEVNULL,
        )
        jobs.close()
        watched.close()

    def ask(self, job: Job) -> tuple[Stats, Path] | Exception:
        """Have a job done; EOFError or OSError when the child dies over it."""
        self.jobs.send(job)
        answer: tuple[Stats, Path] | Exception = self.jobs.recv()
        return answer

    def end(self) -> None:
        """Let go of what the child watches, which kills it, and wait until it is gone."""
        self.held.close()
        self.process.wait()
        with LOCK:
            CHILDREN.discard(self)


CHILDREN: set[Child] = set()
OVER: set[str] = set()
"""Runs whose children were ended. A shard of theirs that is only now on its way here gets none."""
LOCK = threading.Lock()


def _take(run: str) -> Child:
    """A child of this run that has nothing to do, or a new one."""
    with LOCK:
        if run in OVER:
            raise ChildDiedError(f"{_here()}, the run is over")
        for child in [*CHILDREN]:
            if child.process.poll() is not None:
                CHILDREN.discard(child)
            elif child.run == run and not child.busy:
                child.busy = True
                return child
        child = Child(run)
        CHILDREN.add(child)
        return child


def _here() -> str:
    return socket.gethostname()


def _check(job: Job) -> None:
    ours = package_versions([name for name in job.versions if name not in ("bert_cli", "python")])
    # Another Python of the same line writes the same bytes.
    others = [f"{n} {ours[n]}, not {v}" for n, v in job.versions.items() if ours[n] != v]
    others = [text for text in others if not text.startswith("python ")]
    if others:
        raise DataError(
            f"worker on {_here()}: has {', '.join(others)}; "
            "install the same versions on all machines, or the bytes may differ"
        )
    for path in (job.room, *job.inputs):
        if not appears(job.folder / path):
            raise DataError(
                f"worker on {_here()}: does not see {job.folder / path}; inputs and outputs must lie "
                "on a file system that all machines share, under the same path"
            )


def serve(jobs_end: int, watched_end: int) -> None:
    """Be a child: do the jobs that come over the first pipe, die when the other one closes."""
    jobs = Connection(jobs_end)
    die_with_parent(Connection(watched_end, writable=False))
    with suppress(EOFError):
        while jobs.poll(SECONDS_IDLE):
            jobs.send(_answer(jobs.recv()))


def _answer(job: Job) -> tuple[Stats, Path] | Exception:
    import cloudpickle

    if job.folder.is_dir():
        os.chdir(job.folder)  # relative paths, such as a vocabulary's, mean what they meant there
    # The shard's own name stays the last part: a step may read it from its path.
    room = job.room / uuid4().hex / job.room.name
    try:
        stats = convert_shard(cloudpickle.loads(job.convert), job.inputs, room, job.target)
        return stats, room / "out"
    except BertError as error:
        return error
    except Exception as error:
        return _told(job, error)


def _told(job: Job, error: Exception) -> Exception:
    """A defect of ours, with its traceback, whichever class it is and whoever has that class."""
    error.add_note(f"(on {_here()}, {job.name})\n{traceback.format_exc()}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{job.name} on {_here()}: {traceback.format_exc()}")
    return error
