"""The shards of a step on the workers of a dask cluster: the same function, the same bytes.

Only this process keeps the books: it prepares inputs, renames what is finished into place and writes
markers and manifest, while workers write into private folders of OUT, which all machines share. A
shard whose worker dies is done again by another one; nothing else is. At most twice as many shards
as the cluster has threads are under way, and workers may come and go during a run.
"""

import json
import os
import re
import sys
import uuid
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_cli.data.shards.dask_worker import ChildDiedError, Job, appears, do_shard, end_children
from bert_cli.data.shards.manifest import OutputFolder, Shard, Stats
from bert_cli.data.shards.runner import Convert, Result, prepare_shard
from bert_cli.errors import ConfigError, DataError, needs_extra

if TYPE_CHECKING:
    from distributed import Client, Future

DEATHS = 3
"""Processes that may die over one shard before it is called the cause. Of whole workers dask counts
as many (`distributed.scheduler.allowed-failures`)."""
SECONDS_TO_ANSWER = 30
ADDRESS = re.compile(r"([a-z][a-z0-9+.-]*://)?(\[[0-9A-Fa-f:.%]+\]|[^\s/:\[\]]+):\d{1,5}/?")
"""host:port, or with a protocol before it."""
SECONDS_BETWEEN_LOOKS = 10


@dataclass
class Flight:
    """A shard under way."""

    shard: Shard
    job: Job
    deaths: int = 0


def on_cluster(
    ledger: OutputFolder, shards: Iterable[Shard], convert: Convert, scheduler: str
) -> Generator[Result, None, None]:
    """Yield each shard when it is finished, with its counts; None where it was whole before.

    Raises ConfigError where dask is missing, DataError where the scheduler does not answer or is
    lost, where workers do not see the folders, or where one shard kills process after process.
    """
    client = _connect(scheduler)
    run, flying = uuid.uuid4().hex, dict[Any, Flight]()
    try:
        function = _pickled(convert)
        for shard in shards:
            if ledger.is_complete(shard):
                yield shard, None
                continue
            job = _job(ledger, shard, function, run)
            flying[_submit(client, ledger.step, job)] = Flight(shard, job)
            while len(flying) >= 2 * max(1, _threads(client)):
                yield from _landed(client, ledger, flying)
        while flying:
            yield from _landed(client, ledger, flying)
    except OSError as error:
        if client.status == "running":
            raise
        raise _lost(ledger, scheduler, error) from None
    except _cancelled() as error:
        raise _lost(ledger, scheduler, error) from None
    finally:
        _withdraw(client, list(flying), run)


def _connect(scheduler: str) -> "Client":
    """Reach the scheduler at an address, or that of a file that `dask scheduler` wrote."""
    try:
        from distributed import Client
    except ModuleNotFoundError:
        raise ConfigError(f"executor (dask): {needs_extra('dask')}") from None
    address = _address_of(scheduler)
    # Made before it begins: one that could not begin is closed here, or it hangs when it is removed.
    client = Client.__new__(Client)
    try:
        client.__init__(  # type: ignore[misc]
            address, timeout=SECONDS_TO_ANSWER, set_as_default=False, name="bert"
        )
    except (OSError, ValueError, KeyError) as error:
        with suppress(Exception):
            client.close()
        told = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"scheduler ({scheduler}): cannot be reached ({told}); start `dask scheduler` and give "
            "the address that it prints, as tcp://HOST:8786"
        ) from None
    return client


def _address_of(scheduler: str) -> str:
    """The address that is given, or that a file has. ConfigError for what is neither."""
    path = os.path.expanduser(scheduler)
    if not os.path.isfile(path):
        if ADDRESS.fullmatch(scheduler):
            return scheduler
        raise ConfigError(
            f"scheduler ({scheduler}): is neither a file that is there nor an address; give the one that "
            "`dask scheduler` prints, as tcp://HOST:8786, or the file of its --scheduler-file"
        )
    try:
        address: Any = json.loads(Path(path).read_text(encoding="utf-8"))["address"]
        if not ADDRESS.fullmatch(address):
            raise ValueError(f"address {address!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"scheduler ({scheduler}): is not a file that `dask scheduler --scheduler-file` wrote "
            f"({type(error).__name__}: {error}); give that one, or the address that it prints"
        ) from None
    return str(address)


def _pickled(convert: Convert) -> bytes:
    import cloudpickle

    data: bytes = cloudpickle.dumps(convert)
    return data


def _job(ledger: OutputFolder, shard: Shard, function: bytes, run: str) -> Job:
    room = ledger.work_folder(shard).absolute()
    inputs = prepare_shard(ledger, shard)
    room.mkdir(parents=True, exist_ok=True)
    return Job(
        run=run,
        name=shard.output.as_posix(),
        target=shard.output.name,
        convert=function,
        inputs=tuple(path.absolute() for path in inputs),
        room=room,
        folder=Path.cwd(),
        versions=ledger.versions,
    )


def _submit(client: "Client", step: str, job: Job) -> "Future":
    key = f"bert-{step}-{job.name}-{uuid.uuid4().hex}"
    return client.submit(do_shard, job, key=key, pure=False)


def _threads(client: "Client") -> int:
    return sum(client.nthreads().values())


def _landed(client: "Client", ledger: OutputFolder, flying: dict[Any, Flight]) -> Iterator[Result]:
    """Wait until a shard or more are finished; hand them over, try again what a killed child had."""
    for future in _wait(client, ledger.step, list(flying)):
        flight = flying[future]
        try:
            stats = _bring_home(ledger, flight, future)
        except ChildDiedError as error:
            del flying[future]
            flight.deaths += 1
            if flight.deaths >= DEATHS:
                raise _deadly(ledger, flight, flight.deaths, str(error)) from None
            flying[_submit(client, ledger.step, flight.job)] = flight
            continue
        del flying[future]
        yield flight.shard, stats


def _wait(client: "Client", step: str, futures: list["Future"]) -> "set[Future]":
    from distributed import wait

    told = False
    while True:
        try:
            with client.as_current():
                landed = wait(futures, timeout=SECONDS_BETWEEN_LOOKS, return_when="FIRST_COMPLETED")
            done: set[Future] = landed.done
            return done
        except TimeoutError:
            if not told and not _threads(client):
                told = True
                print(f"{step}: the scheduler has no workers; waiting for some", file=sys.stderr)


def _bring_home(ledger: OutputFolder, flight: Flight, future: "Future") -> Stats:
    """Put the files of a finished shard where the ledger looks for them."""
    from distributed import KilledWorker

    stats: Stats
    made: Path
    try:
        stats, made = future.result()
    except KilledWorker as error:
        last = error.last_worker.address
        raise _deadly(ledger, flight, error.allowed_failures + 1, last) from None
    if not appears(made / flight.job.target):
        raise DataError(
            f"{made / flight.job.target}: a worker wrote it and it is not here; inputs and outputs must "
            "lie on a file system that all machines share, under the same path"
        )
    os.replace(made, flight.job.room / "out")
    return stats


def _deadly(ledger: OutputFolder, flight: Flight, deaths: int, last: str) -> DataError:
    return DataError(
        f"{ledger.step} ({flight.job.name}): {deaths} workers were killed while they had this shard "
        f"(the last: {last}), most often for want of memory; give the workers more memory or fewer "
        "threads and run the command again, it keeps what is finished"
    )


def _lost(ledger: OutputFolder, scheduler: str, error: BaseException) -> DataError:
    told = str(error).splitlines()[0] if str(error) else type(error).__name__
    return DataError(
        f"{ledger.step} (scheduler {scheduler}): was lost ({told}); start it and its workers and run "
        "the command again, it keeps what is finished"
    )


def _cancelled() -> type[BaseException]:
    from distributed import CancelledError

    found: type[BaseException] = CancelledError
    return found


def _withdraw(client: "Client", futures: list["Future"], run: str) -> None:
    """Take back what is under way, and end the processes that this run has on the workers."""
    # The run is over, or something else is on its way up: nothing may go before it.
    with suppress(Exception):
        if client.status == "running":
            client.cancel(futures, force=True)
            client.run(end_children, run, on_error="ignore")
    with suppress(Exception):
        client.close()
