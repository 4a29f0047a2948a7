"""Reports which rank the others wait for.

Processes enter collectives many times a step. Each publishes once a second, in the store of the
cluster, how many it has entered and what it is doing. A process that has waited in one for a while
prints the ranks that have not entered it. The watchdog ends nothing: whether a process is lost is
decided by the cluster's heartbeats.
"""

import threading
import time

from bert_cli.parallel.engine import ProcessGroup

POLL_SECONDS = 1.0


class Watchdog:
    """A thread that watches a process group; with one process it does nothing. Use it as a context."""

    def __init__(self, group: ProcessGroup, report_after_seconds: float) -> None:
        self.group = group
        self.report_after_seconds = report_after_seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self.group.world_size > 1:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10 * POLL_SECONDS)

    def _watch(self) -> None:
        group = self.group
        published, since, reported = "", time.monotonic(), 0.0
        while not self._ended.wait(POLL_SECONDS):
            progress = f"{group.collectives} {group.activity}"
            try:
                if progress != published:
                    group.publish(progress)
                    published, since, reported = progress, time.monotonic(), 0.0
                waited = time.monotonic() - since
                if group.is_waiting.is_set() and waited - reported >= self.report_after_seconds:
                    reported = waited
                    print(_report(group, waited), flush=True)
            # The store ends with the rank that holds it; the error of the run says so.
            except Exception:
                return


def _report(group: ProcessGroup, waited: float) -> str:
    late = []
    for rank in range(group.world_size):
        if rank == group.rank:
            continue
        collectives, _, activity = group.published_by(rank).partition(" ")
        if not collectives or int(collectives) < group.collectives:
            late.append(f"rank {rank} ({activity or 'nothing published yet'})")
    # If all ranks are in the same collective, the sum itself takes long.
    missing = " and ".join(late) or "the network"
    return f"rank {group.rank} has waited {waited:.0f} s for {missing}"
