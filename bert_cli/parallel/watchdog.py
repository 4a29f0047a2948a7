"""Says which rank the others wait for.

Processes meet many times a step. Each tells the cluster's own store, once a second, how often it has
come to a meeting and what it does; whoever has stood at one for a minute reads what the others told
and names those that have not come. It only speaks: whether a process is alive is the cluster's to
judge, and slow is not lost.
"""

import threading
import time
from types import TracebackType

from bert_cli.parallel.engine import ProcessGroup

EVERY_SECONDS = 1.0


class Watchdog:
    """Watches from a thread, from `with` on; with one process there is nothing to watch."""

    def __init__(self, group: ProcessGroup, say_after_seconds: float) -> None:
        self.group = group
        self.say_after_seconds = say_after_seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self.group.world_size > 1:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10 * EVERY_SECONDS)

    def _watch(self) -> None:
        told, since, said_at = "", time.monotonic(), 0.0
        while not self._ended.wait(EVERY_SECONDS):
            group = self.group
            here = f"{group.collectives} {group.activity}"
            try:
                if here != told:
                    group.publish(here)
                    told, since, said_at = here, time.monotonic(), 0.0
                waited = time.monotonic() - since
                if group.is_waiting.is_set() and waited - said_at >= self.say_after_seconds:
                    said_at = waited
                    print(_waiting_for(group, waited), flush=True)
            # The store is gone with the rank that keeps it; the run's own error says so.
            except Exception:
                return


def _waiting_for(group: ProcessGroup, waited: float) -> str:
    late = []
    for rank in range(group.world_size):
        if rank == group.rank:
            continue
        arrived, _, doing = group.published_by(rank).partition(" ")
        if not arrived or int(arrived) < group.collectives:
            late.append(f"rank {rank} ({doing or 'not heard of yet'})")
    # Nobody is late when all stand at the same place: then it is the sum itself that takes long.
    whom = " and ".join(late) if late else "the network"
    return f"rank {group.rank} has waited {waited:.0f} s for {whom}"
