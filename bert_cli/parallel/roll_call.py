"""Waits until all processes of a run have been started, before TensorFlow joins them.

TensorFlow would wait by itself, but without an end, without a word and without hearing a signal. So
every process first listens on its own port and tries those of the others, in plain Python, where a
person is told for whom it waits and can stop it. Nothing is sent.
"""

import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from bert_cli.errors import DeviceError
from bert_cli.parallel.cluster import Processes

# How long processes wait for one another to be started.
REGISTER_SECONDS = 300
# How often one that waits tries again, and looks whether it was asked to stop.
LOOK_UP_SECONDS = 0.5
CONNECT_SECONDS = 2.0


class StoppedWhileJoiningError(Exception):
    """Someone asked to stop while the processes waited for one another; nothing has begun."""


def call_the_roll(
    processes: Processes,
    say_after: float,
    asked_to_stop: Callable[[], bool] = lambda: False,
    interface: str | None = None,
) -> None:
    """Wait until a connection to every other process can be made, and say for whom when it takes long.

    TensorFlow would wait for them by itself, but without an end, without a word and without hearing a
    signal: it holds the interpreter's lock and SIGTERM meanwhile (measured: ten minutes, then kill -9).
    Raises StoppedWhileJoiningError when asked to stop, DeviceError when the own port is taken or when
    someone does not come within REGISTER_SECONDS.
    """
    others = dict(enumerate(processes.workers))
    own = others.pop(processes.rank)
    began = said = time.monotonic()
    with _listening(own) as listener:
        if interface is not None:
            with suppress(OSError):  # said by `listen_only_on`; nothing is sent here
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())
        while True:
            others = {rank: at for rank, at in others.items() if not _is_there(at)}
            if not others:
                return
            if asked_to_stop():
                raise StoppedWhileJoiningError
            missing = ", ".join(f"rank {rank} ({at})" for rank, at in others.items())
            now = time.monotonic()
            if now - began > REGISTER_SECONDS:
                raise DeviceError(
                    f"cluster ({missing}): did not come within {REGISTER_SECONDS} s; check that all processes are "
                    "started and reach one another"
                )
            if now - said > say_after:
                said = now
                print(
                    f"cluster: rank {processes.rank} ({own}) has waited {now - began:.0f} s for {missing} to start",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(LOOK_UP_SECONDS)


def _listening(worker: str) -> socket.socket:
    """The own port, so that the others see that someone is there; the runtime takes it over."""
    port = int(worker.rpartition(":")[2])
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=128)
    except OSError as error:
        raise DeviceError(
            f"cluster ({worker}): its port cannot be taken ({error.strerror}); end what has it, or choose another"
        ) from error


def _is_there(worker: str) -> bool:
    host, _, port = worker.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS):
            return True
    except OSError:
        return False
