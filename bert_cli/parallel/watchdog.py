"""Says which rank the others wait for.

Processes meet many times a step. Each tells the cluster's own store, once a second, how often it has
come to a meeting and what it does; whoever has stood at one for a minute reads what the others told
and names those that have not come. It only speaks: whether a process is alive is the cluster's to
judge, and slow is not lost.
"""

import threading
import time
from types import TracebackType

from bert_cli.parallel.tensorflow.collectives import Peers

EVERY_SECONDS = 1.0


class Watchdog:
    """Watches from a thread, from `with` on; with one process there is nothing to watch."""

    def __init__(self, peers: Peers, say_after_seconds: float) -> None:
        self.peers = peers
        self.say_after_seconds = say_after_seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self.peers.count > 1:
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
            peers = self.peers
            here = f"{peers.arrived} {peers.doing}"
            try:
                if here != told:
                    _tell(peers.rank, here)
                    told, since, said_at = here, time.monotonic(), 0.0
                waited = time.monotonic() - since
                if peers.waiting.is_set() and waited - said_at >= self.say_after_seconds:
                    said_at = waited
                    print(_waiting_for(peers, waited), flush=True)
            # The store is gone with the rank that keeps it; the run's own error says so.
            except Exception:
                return


def _waiting_for(peers: Peers, waited: float) -> str:
    late = []
    for rank in range(peers.count):
        if rank == peers.rank:
            continue
        arrived, _, doing = _ask(rank).partition(" ")
        if not arrived or int(arrived) < peers.arrived:
            late.append(f"rank {rank} ({doing or 'not heard of yet'})")
    # Nobody is late when all stand at the same place: then it is the sum itself that takes long.
    whom = " and ".join(late) if late else "the network"
    return f"rank {peers.rank} has waited {waited:.0f} s for {whom}"


def _tell(rank: int, text: str) -> None:
    from tensorflow.python.eager import context

    store = context.context()
    # The store does not overwrite.
    store.delete_config_key_value(_key(rank))
    store.set_config_key_value(_key(rank), text)


def _ask(rank: int) -> str:
    import tensorflow as tf
    from tensorflow.python.eager import context

    try:
        # Long enough for the moment between deleting and setting.
        return str(context.context().get_config_key_value(_key(rank), 1000))
    except (tf.errors.DeadlineExceededError, tf.errors.NotFoundError):
        return ""


def _key(rank: int) -> str:
    return f"bert_rank_{rank}"
