"""What a process of `bert launch` uses of its host, and how one on another host is run.

`bert launch` starts a process on another host as `ssh HOST python -m bert_cli.parallel.host ... -- PROGRAM`. This
module then starts the program there, passes signals on, and ends it when the connection ends.
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

from bert_cli.errors import BertError, DeviceError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PR_SET_PDEATHSIG = 1  # of prctl(2)
SUPERVISED, STOP = b"supervised\n", b"stop\n"
"""Lines to the standard input of `main`: a launcher is there; stop the program."""
NVIDIA_SMI_SECONDS = 60


@dataclass(frozen=True)
class Devices:
    """The GPUs or cores of a host that one of its processes uses; empty for all of them."""

    gpus: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()
    message: str = ""

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment variables that choose the GPUs."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}


def devices_of(local_rank: int, count: int, environment: Mapping[str, str]) -> Devices:
    """Return the devices of one of `count` processes on this host: GPUs if there are any, else cores.

    Raises DeviceError when the GPUs cannot be divided evenly.
    """
    if count == 1:
        return Devices()
    gpus = _gpus(environment)
    if gpus:
        if len(gpus) % count:
            raise DeviceError(
                f"GPUs ({len(gpus)} on {os.uname().nodename})",
                f"cannot be divided evenly among {count} processes",
                "give a number of --processes that divides them, or choose some by CUDA_VISIBLE_DEVICES",
            )
        each = len(gpus) // count
        return Devices(gpus=tuple(gpus[local_rank * each : (local_rank + 1) * each]))
    cores = _cores()
    if len(cores) < count:
        return Devices(message=f"{count} processes use the same {len(cores)} cores")
    # The same number for each, even if a core stays idle: a sum over two threads rounds otherwise than
    # over three, and replicas have to stay equal to the bit.
    each = len(cores) // count
    return Devices(cores=tuple(cores[local_rank * each : (local_rank + 1) * each]))


def _gpus(environment: Mapping[str, str]) -> list[str]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves, or the numbers of all that the driver lists."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        names = [name.strip() for name in chosen.split(",")]
        # As CUDA reads it: what follows a -1 is hidden.
        return [name for name in names[: [*names, "-1"].index("-1")] if name]
    with suppress(OSError, subprocess.SubprocessError):
        listed = subprocess.run(
            ["nvidia-smi", "-L"],
            capture_output=True,
            text=True,
            check=True,
            timeout=NVIDIA_SMI_SECONDS,
            env=dict(environment),
        ).stdout
        count = sum(line.startswith("GPU ") for line in listed.splitlines())
        return [str(number) for number in range(count)]
    return []


def _cores() -> list[int]:
    """Return the cores that this process may use, with those of a socket and the threads of a core adjacent."""

    def socket_and_core(core: int) -> tuple[int, ...]:
        folder = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
        with suppress(OSError, ValueError):
            names = ("physical_package_id", "core_id")
            return (*(int((folder / name).read_text()) for name in names), core)
        return (0, core, core)

    available = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else []
    return sorted(available, key=socket_and_core)


def remote_program(
    program: Sequence[str], local_rank: int, count: int, grace_seconds: float
) -> tuple[str, ...]:
    """Return the command that runs a program on another host as one of its `count` processes."""
    options = (
        "--local-rank",
        f"{local_rank}",
        "--count",
        f"{count}",
        "--grace",
        f"{grace_seconds:g}",
    )
    return (sys.executable, "-m", "bert_cli.parallel.host", *options, "--", *program)


def kill_group(number: int) -> None:
    """Kill the processes of a group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(number, signal.SIGKILL)


def prepare_child(cores: Sequence[int] = ()) -> Callable[[], None]:
    """Return what a child does before its program starts: take its cores, and die when its parent dies."""
    parent = os.getpid()
    library = ctypes.CDLL(None) if sys.platform == "linux" else None

    def prepare() -> None:
        if cores:
            os.sched_setaffinity(0, cores)
        if library is not None:
            library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a program on this host for a launcher on another one, and return its exit code.

    The launcher writes lines to standard input, and its end means that the launcher or the connection
    is gone: the program is then asked to stop, and killed after the grace period.
    """
    parser = argparse.ArgumentParser(prog="python -m bert_cli.parallel.host", allow_abbrev=False)
    parser.add_argument("--local-rank", type=int, required=True, help="number of the process here")
    parser.add_argument("--count", type=int, required=True, help="processes on this host")
    parser.add_argument("--grace", type=float, required=True, help="seconds from stop to kill")
    parser.add_argument("program", nargs="+", help="after --")
    options = parser.parse_args(arguments)
    try:
        devices = devices_of(options.local_rank, options.count, os.environ)
    except BertError as error:
        print(f"bert: {error}", file=sys.stderr)
        return error.exit_code
    if devices.message and options.local_rank == 0:
        print(f"launch: {devices.message}", file=sys.stderr, flush=True)
    child = subprocess.Popen(
        options.program,
        env={**os.environ, **devices.variables},
        stdin=subprocess.DEVNULL,
        process_group=0,
        preexec_fn=prepare_child(devices.cores),
    )
    for number in SIGNALS:
        signal.signal(number, lambda received, frame: child.send_signal(received))
    threading.Thread(target=_obey, args=(child, options.grace), daemon=True).start()
    code = child.wait()
    kill_group(child.pid)
    return code if code >= 0 else 128 - code


def _obey(child: "subprocess.Popen[bytes]", grace_seconds: float) -> None:
    """Stop the child at a line of standard input, and kill it after its end."""
    # A person who runs the printed command is no launcher; a background job that reads a terminal is suspended.
    if os.isatty(0) or sys.stdin.buffer.readline() != SUPERVISED:
        return
    was_stopped = False
    while sys.stdin.buffer.readline() == STOP:
        child.terminate()
        was_stopped = True
    if not was_stopped:
        child.terminate()
        time.sleep(grace_seconds)
    kill_group(child.pid)


if __name__ == "__main__":
    exit_code = main()
    # Without Python's shutdown: the launcher blames the process whose end it sees first.
    sys.stderr.flush()
    os._exit(exit_code)
