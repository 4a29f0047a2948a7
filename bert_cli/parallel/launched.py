"""What stands beside each process that `bert launch` starts, on the process' own host.

It takes the process' share of the host (GPUs, else cores), starts it, passes signals on, and ends
with its exit code when it ends. Its standard input is the line to the launcher: each byte is the
number of a signal for the process, and the line's end means that the launcher is gone, so the
process goes too. That holds over ssh as on one host, and needs nothing there but Python.
"""

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from bert_cli.errors import BertError, DeviceError

HELLO = b"\0"
"""The launcher's first byte; where it does not come, a person started this and nobody is waited for."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PR_SET_PDEATHSIG = 1  # of Linux' prctl(2)
NVIDIA_SMI_SECONDS = 60


@dataclass(frozen=True)
class Share:
    """What one of a host's processes uses of it; everything where nothing is said."""

    gpus: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()
    note: str = ""


def share_of_host(place: int, of: int, environment: Mapping[str, str]) -> Share:
    """The share of process number `place` of `of` on this host: GPUs if there are any, else cores.

    Raises DeviceError when the GPUs cannot be divided evenly.
    """
    if of == 1:
        return Share()
    gpus = _gpus(environment)
    if gpus:
        if len(gpus) % of:
            raise DeviceError(
                f"GPUs ({len(gpus)} on {os.uname().nodename}): cannot be divided evenly among {of} processes; "
                "give a number of --processes that divides them, or choose some by CUDA_VISIBLE_DEVICES"
            )
        each = len(gpus) // of
        return Share(gpus=tuple(gpus[place * each : (place + 1) * each]))
    cores = _cores()
    if len(cores) < of:
        return Share(note=f"{of} processes share {len(cores)} cores; none has cores of its own")
    # Equal ones, though a core may stand idle: a sum over two threads rounds otherwise than over three,
    # and replicas have to stay equal to the bit.
    each = len(cores) // of
    return Share(cores=tuple(cores[place * each : (place + 1) * each]))


def _gpus(environment: Mapping[str, str]) -> list[str]:
    """Names of the GPUs that CUDA_VISIBLE_DEVICES leaves, else numbers of all that the driver knows."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        names = [name.strip() for name in chosen.split(",")]
        # As CUDA reads it: what follows a -1 is hidden.
        return [name for name in names[: [*names, "-1"].index("-1")] if name]
    with suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run(
            ["nvidia-smi", "-L"],
            capture_output=True,
            text=True,
            check=True,
            timeout=NVIDIA_SMI_SECONDS,
            env=dict(environment),
        ).stdout
        rows = [line for line in told.splitlines() if line.startswith("GPU ")]
        return [str(number) for number in range(len(rows))]
    return []


def _cores() -> list[int]:
    """The cores that this process may use; the threads of one, and the cores of a socket, side by side."""

    def place(core: int) -> tuple[int, ...]:
        about = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
        with suppress(OSError, ValueError):
            names = ("physical_package_id", "core_id")
            return (*(int((about / name).read_text()) for name in names), core)
        return (0, core, core)

    return sorted(os.sched_getaffinity(0), key=place) if hasattr(os, "sched_getaffinity") else []


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a program as one of a host's processes; its exit code, 128 + N for signal N."""
    parser = argparse.ArgumentParser(
        prog="python -m bert_cli.parallel.launched", allow_abbrev=False
    )
    parser.add_argument("--share", required=True, help="K/N: process K of N on this host, from 0")
    parser.add_argument("--grace-seconds", type=float, default=30.0)
    parser.add_argument("program", nargs="+", help="after --")
    given = parser.parse_args(arguments)
    place, of = map(int, given.share.split("/"))
    try:
        share = share_of_host(place, of, os.environ)
    except BertError as error:
        print(f"bert: {error}", file=sys.stderr)
        return error.exit_code
    if share.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(share.gpus)
    if share.cores:
        os.sched_setaffinity(0, share.cores)
    if share.note and place == 0:
        print(f"launch: {share.note}", file=sys.stderr, flush=True)
    return _attend(given.program, given.grace_seconds)


def _attend(program: Sequence[str], grace_seconds: float) -> int:
    # A group of its own, so that what it started can be ended with it; no threads before this line,
    # because what runs in the child before the program does is only safe without them.
    child = subprocess.Popen(
        program, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=_dying_with(os.getpid())
    )

    def pass_on(number: int, frame: FrameType | None) -> None:
        child.send_signal(number)

    for number in SIGNALS:
        signal.signal(number, pass_on)
    listen = threading.Thread(target=_listen, args=(child, grace_seconds), daemon=True)
    listen.start()
    code = child.wait()
    _kill_group(child)
    return code if code >= 0 else 128 - code


def _dying_with(parent: int) -> Callable[[], None]:
    """What ties a child to the life of its parent, even when that is killed by signal 9 (Linux)."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None

    def tie() -> None:
        if library is not None:
            library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return tie


def _listen(child: "subprocess.Popen[bytes]", grace_seconds: float) -> None:
    # A background job that reads a terminal is stopped by it.
    if os.isatty(0) or _heard() != HELLO:
        return
    while byte := _heard():
        if byte[0] == signal.SIGKILL:
            _kill_group(child)
        else:
            child.send_signal(byte[0])
    child.terminate()
    time.sleep(grace_seconds)
    _kill_group(child)


def _heard() -> bytes:
    with suppress(OSError):
        return os.read(0, 1)
    return b""


def _kill_group(child: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)


if __name__ == "__main__":
    ended = main()
    # At once: the launcher takes the order in which processes end for the order in which they failed.
    sys.stderr.flush()
    os._exit(ended)
