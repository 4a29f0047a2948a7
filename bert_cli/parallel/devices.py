"""The devices of a host: GPUs and the part of one process, memory, processor flags; and the reuse of freed memory."""

import ctypes
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from bert_cli.errors import DeviceError
from bert_cli.versions import package_versions

if TYPE_CHECKING:  # loads psutil
    from bert_cli.parallel.cluster import Processes

T = TypeVar("T")
CPUINFO = Path("/proc/cpuinfo")
# Instructions of float32 arithmetic. Those for products alone (AMX) change only gradients, which all ranks sum.
VECTORS = re.compile("avx2?|avx512(f|bw|cd|dq|vl)|fma4?|f16c|asimd|sve2?")
# Options of glibc's mallopt(3).
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4
M_ARENA_MAX = -8


def gpus_of(local_rank: int, count: int, environment: Mapping[str, str]) -> list[str]:
    """Return the GPUs of one of `count` processes on this host; empty without GPUs, and for a single process."""
    # A single process finds its GPUs itself.
    if count == 1:
        return []
    return divide_gpus(visible_gpus(environment), local_rank, count)


def divide_gpus(gpus: list[T], local_rank: int, count: int) -> list[T]:
    """Return the part of the GPUs of this host that is for one of its `count` processes."""
    if len(gpus) % count:
        raise DeviceError(
            f"GPUs ({len(gpus)} on {os.uname().nodename})",
            f"cannot be divided evenly among {count} processes",
            "use a number of --processes that divides them, or choose some by CUDA_VISIBLE_DEVICES",
        )
    size = len(gpus) // count
    return gpus[local_rank * size : (local_rank + 1) * size]


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves, or the numbers of all that the driver lists."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        names = [name.strip() for name in chosen.split(",")]
        # As CUDA reads it: devices after a -1 are hidden.
        return [name for name in names[: [*names, "-1"].index("-1")] if name]
    try:
        words = ["nvidia-smi", "-L"]
        done = subprocess.run(words, capture_output=True, check=True, timeout=60, env=environment)
    except (OSError, subprocess.SubprocessError):
        return []
    return [str(number) for number in range(len(re.findall(b"^GPU ", done.stdout, re.MULTILINE)))]


def device_memory(kind: str, processes: "Processes") -> int:
    """Return the bytes of the smallest visible GPU, from its driver, or a process' part of this host's memory."""
    if kind == "CPU":
        # Of the host, not of the container: `bert doctor` knows the limit of a container.
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return memory // len(processes.local_ranks)
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    if os.environ.get("CUDA_VISIBLE_DEVICES"):
        command += ["-i", os.environ["CUDA_VISIBLE_DEVICES"]]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
        # The driver counts in MiB. Of unequal GPUs the smallest decides, since all get the same layout.
        return min(int(line) for line in done.stdout.split()) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise DeviceError(
            "nvidia-smi",
            f"does not report the memory of the GPUs ({error})",
            "set pipeline_stages instead of parallel.layout auto",
        ) from error


def part_of_gpus(gpus: list[T], processes: "Processes") -> list[T]:
    """Return the GPUs that a process may use: all visible ones, or a part where its host's processes see all."""
    count = len(processes.local_ranks)
    variables = os.environ
    # SLURM's `--gres=gpu:4` shows all four to each task; other schedulers have divided them already.
    has_all = variables.get("SLURM_GPUS_ON_NODE") == str(len(gpus)) and "SLURM_PROCID" in variables
    if count == 1 or ("CUDA_VISIBLE_DEVICES" in variables and not has_all):
        return gpus
    return divide_gpus(gpus, processes.local_ranks.index(processes.rank), count)


def processor_flags(cpuinfo: str) -> set[str]:
    """Return the instruction flags of the processor in the text of /proc/cpuinfo; none if it does not list them."""
    flags = re.search(r"^(?:flags|Features)\s*: (.*)$", cpuinfo, re.MULTILINE)
    if flags:
        return set(flags[1].split())
    return set()


def traits_of_results(engine: str, accelerators: Sequence[str]) -> dict[str, str]:
    """Return what the last bits of an update depend on: versions, and accelerators or the processor's instructions."""
    names = ["keras", "numpy", engine]
    if engine == "jax":
        names.append("jaxlib")
    versions = {**package_versions(names), "python": ""}  # of Python any does
    traits = {f"version of {name}": number for name, number in versions.items() if number}
    if accelerators:
        return {**traits, "kind of accelerator": " ".join(sorted(set(accelerators)))}
    flags: set[str] = set()
    if CPUINFO.is_file():
        flags = processor_flags(CPUINFO.read_text())
    return {**traits, "set of instructions": " ".join(sorted(filter(VECTORS.fullmatch, flags)))}


def keep_freed_memory() -> None:
    """Make the C library reuse freed memory instead of returning it to the kernel, which zeroes each new page."""
    # Steps on CPUs take 6 to 15 % less (docs/lab/speed.md). The process never becomes smaller.
    c_library = ctypes.CDLL(None)
    if hasattr(c_library, "gnu_get_libc_version"):
        c_library.mallopt(M_MMAP_MAX, 0)  # allocate large blocks on the heap too
        c_library.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)  # do not return free memory at its end
        c_library.mallopt(M_ARENA_MAX, 1)  # one heap, so that threads reuse one another's memory
