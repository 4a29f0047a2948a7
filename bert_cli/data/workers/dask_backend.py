"""Make shards on the workers of a dask cluster: the same function, the same bytes.

This process prepares inputs, renames finished files and writes markers; workers write into folders of OUT, which
all machines share. If a worker dies, Dask gives its shard to another worker, which writes into another folder.
"""

import logging
import os
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import chdir, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from bert_cli.data.io.manifest import Convert, Results, Shard, Stats, Work, make_shard
from bert_cli.errors import ConfigError, DataError, import_extra, logger
from bert_cli.files import JSONObject, read_json
from bert_cli.versions import package_versions

if TYPE_CHECKING:
    from distributed import Client

CONNECT_SECONDS = 30
DISCONNECT_SECONDS = 2.0
SECONDS_TO_APPEAR = 5.0  # a network file system may show the files of another machine late
SHARED_FOLDERS = "use a file system that all machines share under the same path"


def run_on_cluster(
    step: str,
    works: Iterable[Work],
    convert: Convert,
    scheduler: str,
    versions: Mapping[str, str],
) -> Results:
    """Make shards on a cluster whose machines have these versions of the packages."""
    client = _connect(scheduler)
    from cloudpickle import dumps
    from distributed import CancelledError, as_completed
    from distributed.comm import CommClosedError

    # Ctrl-C during a call of the client makes tornado log a NameError; distributed's import sets this level too.
    logging.getLogger("tornado.application").setLevel(logging.CRITICAL)
    function = dumps(convert)
    running: dict[Any, Work] = {}
    futures = as_completed(loop=client.loop)
    is_waiting = False

    def finished(shards_per_worker: int) -> Results:
        """Wait until each worker has fewer shards than that, and move the files of those that are finished."""
        nonlocal is_waiting
        while True:
            workers = _count_workers(client)
            if not workers and not is_waiting:
                is_waiting = True
                logger.warning(f"{step}: the scheduler has no workers; waiting for some")
            if len(running) < max(1, shards_per_worker * max(1, workers)):
                return
            future = next(futures)
            work = running.pop(future)
            yield work, _fetch(future, work, step)

    try:
        for work in works:
            folder = work.folder.absolute()
            folder.mkdir(parents=True, exist_ok=True)
            inputs = tuple(path.absolute() for path in work.prepared.inputs)
            shard = replace(work.prepared, inputs=inputs)
            arguments = (shard, folder, function, Path.cwd(), versions)
            key = f"bert-{step}-{shard.output}-{uuid4().hex}"
            future = client.submit(run_on_worker, *arguments, key=key, pure=False)
            running[future] = work
            futures.add(future)
            yield from finished(shards_per_worker=2)
        yield from finished(shards_per_worker=0)
    except (OSError, CancelledError) as error:
        is_lost = isinstance(error, CommClosedError | CancelledError)
        if client.status == "running" and not is_lost:
            raise
        problem = f"was lost ({_first_line(error)})"
        remedy = "start it and its workers and run the command again; it keeps what is finished"
        raise DataError(f"{step} (scheduler {scheduler})", problem, remedy) from None
    finally:
        # The scheduler then drops what waits, and busy workers end their shard. Another exception may be propagating,
        # which must not be replaced.
        with suppress(Exception):
            client.close(timeout=DISCONNECT_SECONDS)


def _fetch(future: Any, work: Work, step: str) -> Stats:
    """Return the counts of a finished shard, and move its files into its folder."""
    from distributed import KilledWorker

    try:
        stats, results = future.result()
    except KilledWorker as error:
        raise DataError(
            f"{step} ({work.shard.output.as_posix()})",
            f"{error.allowed_failures + 1} workers were killed while they processed this shard "
            f"(the last: {error.last_worker.address}), usually because memory ran out",
            "start the workers with more memory and run the command again; it keeps what is finished",
        ) from None
    _wait_for(results / work.shard.output.name, "this machine")
    os.replace(results, work.folder / "out")
    counts: Stats = stats
    return counts


def _count_workers(client: "Client") -> int:
    """Return the number of workers. Raises DataError for one that has several threads."""
    threads = client.nthreads()
    for worker, count in threads.items():
        if count > 1:
            problem = f"has {count} threads, but every shard needs its own process"
            remedy = f"start it as `dask worker --nworkers {count} --nthreads 1`"
            raise DataError(f"worker ({worker})", problem, remedy)
    return len(threads)


def _connect(scheduler: str) -> "Client":
    """Connect to an address, or to the address in a file that `dask scheduler` wrote."""
    import_extra("distributed", "dask", "executor (dask)")
    from distributed import Client

    where = f"scheduler ({scheduler})"
    path = Path(scheduler)
    address = scheduler
    remedy = "start `dask scheduler` and pass the address that it prints, as tcp://HOST:8786"
    if path.is_file():
        address = str(read_json(path, JSONObject, ConfigError, remedy).get("address"))
    # Not `Client(...)`: a client that cannot connect must be closed, or the process hangs at its end.
    client = Client.__new__(Client)
    try:
        client.__init__(  # type: ignore[misc]
            address, timeout=CONNECT_SECONDS, set_as_default=False, name="bert"
        )
    except (OSError, ValueError, KeyError) as error:
        with suppress(Exception):
            client.close()
        raise DataError(where, f"cannot be reached ({_first_line(error)})", remedy) from None
    return client


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def run_on_worker(
    shard: Shard,
    folder: Path,
    function: bytes,
    command_folder: Path,
    versions: Mapping[str, str],
) -> tuple[Stats, Path]:
    """Make a shard; return its counts and the folder with its files.

    Relative paths start in `command_folder`. Raises DataError where this machine does not see the folders or has other
    versions.
    """
    import cloudpickle

    worker = f"worker on {socket.gethostname()}"
    # Another patch version of Python writes the same bytes.
    names = [name for name in versions if name not in ("bert_cli", "python")]
    installed = package_versions(names) | {"python": versions["python"]}
    differing = [n for n, version in versions.items() if installed[n] != version]
    if differing:
        listed = ", ".join(f"{n} {installed[n]}, not {versions[n]}" for n in differing)
        remedy = "install the same versions on all machines, or the bytes may differ"
        raise DataError(worker, f"has {listed}", remedy)
    for path in (folder, *shard.inputs):
        _wait_for(path, worker)
    attempt = folder / uuid4().hex
    with chdir(command_folder) if command_folder.is_dir() else nullcontext():
        stats = make_shard(shard, attempt, cloudpickle.loads(function))
    return stats, attempt / "out"


def _wait_for(path: Path, machine: str) -> None:
    """Wait some seconds until a path that another machine wrote appears, else raise DataError."""
    end = time.monotonic() + SECONDS_TO_APPEAR
    while not path.exists():
        if time.monotonic() > end:
            raise DataError(machine, f"does not see {path}", SHARED_FOLDERS)
        time.sleep(0.1)
