"""What this machine is, as `bert doctor` says it: a finding a line, each with what to do about it.

Read from the operating system alone: no TensorFlow, so that a machine on which it cannot be loaded can
be looked at too. What a system does not tell is said to be unknown. The tables say which variables of
the environment hurt a run, and which instructions of a processor matter.
"""

import os
import platform
import re
import resource
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import NamedTuple

from bert_cli.config.layout import size
from bert_cli.errors import ConfigError
from bert_cli.processes import cpu_count
from bert_cli.tasks.look.finding import Finding

PACKAGE = "bert-cli"
PYTHONS = ((3, 11), (3, 13))
# Parts whose versions are told also when they are as they should be.
TOLD = ("tensorflow", "keras", "numpy", "tokenizers", "transformers")
# Flags of /proc/cpuinfo, on x86 and Arm, and what they mean for matrix products.
INSTRUCTIONS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_bf16": "bf16 in AVX-512",
    "amx_bf16": "bf16 in AMX",
    "amx_fp16": "fp16 in AMX",
    "avx512_fp16": "fp16 in AVX-512",
    "sve": "SVE",
    "bf16": "bf16 in NEON",
}
OPEN_FILES, SHARED_MEMORY = 1024, 10**9


class Hurts(NamedTuple):
    """A value of a variable that hurts, what it does, and what to do."""

    values: str
    what: str
    remedy: str


HURTFUL = {
    "TF_ENABLE_ONEDNN_OPTS": Hurts(
        "0|false", "turns off the fast matrix products of a CPU", "unset it"
    ),
    "CUDA_VISIBLE_DEVICES": Hurts("|-1|NoDevFiles", "hides every GPU", "unset it to use them"),
    "CUDA_LAUNCH_BLOCKING": Hurts("1", "lets a GPU wait after each operation", "unset it"),
    "NVIDIA_TF32_OVERRIDE": Hurts("0", "makes float32 products on a GPU slower", "unset it"),
    "TF_FORCE_GPU_ALLOW_GROWTH": Hurts(
        "0|false", "takes all memory of a GPU at once, whatever a run needs", "unset it"
    ),
    "TF_XLA_FLAGS": Hurts(
        ".*auto_jit.*",
        "compiles what a run does not expect to be compiled: other times and roundings",
        "unset it",
    ),
}
# Set by the console script itself, or of no weight.
OURS = {"TF_CPP_MIN_LOG_LEVEL", "KERAS_BACKEND", "OMP_NUM_THREADS", "TF_CONFIG"}
FAMILIES = ("TF_", "XLA_", "CUDA_", "NCCL_", "NVIDIA_TF32", "ONEDNN_", "DNNL_")
# Terraform's variables begin like TensorFlow's.
STRANGERS = ("TF_VAR_", "TF_CLI_", "TF_TOKEN_", "TF_LOG", "TF_DATA_DIR", "TF_INPUT", "TF_WORKSPACE")


def look(environment: Mapping[str, str]) -> Iterator[Finding]:
    """All that can be said of this machine without TensorFlow."""
    yield python(sys.version_info[:3])
    yield from packages(requires_of_package())
    yield from processor(processor_text(), cpu_count(), quota())
    total, free = memory()
    yield Finding(
        "ok",
        "memory",
        f"{size(free)} free of {size(total)}",
        figures={"free": free, "total": total},
    )
    yield open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield shared_memory(Path("/dev/shm"))
    yield from variables(environment, cpu_count())


def python(found: tuple[int, ...]) -> Finding:
    """Whether this Python is one of those that the tool is for."""
    told, (first, last) = ".".join(map(str, found)), PYTHONS
    if first <= found[:2] <= last:
        return Finding("ok", "python", f"{told} on {platform.platform()}", figures={"python": told})
    return Finding(
        "error",
        "python",
        f"{told}: not one of 3.11 to 3.13",
        "make an environment with one of those",
        {"python": told},
    )


def requires_of_package() -> dict[str, str] | None:
    """Exact versions that this tool was built with, by package; None where it is not installed."""
    try:
        wanted = requires(PACKAGE) or []
    except PackageNotFoundError:
        return None
    found = (re.fullmatch(r"([\w.-]+)==([\w.]+)", one.replace(" ", "")) for one in wanted)
    return {match[1]: match[2] for match in found if match}


def packages(wanted: Mapping[str, str] | None) -> Iterator[Finding]:
    """The parts that are installed, beside the versions that the tool was built with."""
    if wanted is None:
        yield Finding(
            "warning",
            "packages",
            f"{PACKAGE} is not installed, so nothing says which versions it needs",
            "pip install -c requirements.lock -e .",
        )
        wanted = {}
    there = {name: _version(name) for name in (*TOLD, *wanted)}
    told = ", ".join(f"{name} {there[name] or 'absent'}" for name in TOLD)
    yield Finding("ok", "packages", told, figures=there)
    for name, pinned in wanted.items():
        if there[name] is None:
            yield Finding(
                "error", "packages", f"{name} is not installed", f"pip install {name}=={pinned}"
            )
        elif there[name] != pinned:
            yield Finding(
                "warning",
                "packages",
                f"{name} is {there[name]}, and this was built and tested with {pinned}",
                f"pip install {name}=={pinned}",
            )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def processor(cpuinfo: str, number: int, share: float | None) -> Iterator[Finding]:
    """Cores, the instructions that matter, and what a container leaves of the cores.

    `share` is how many cores' time it may take, None for no limit.
    """
    model = re.search(r"^model name\s*: (.*)$", cpuinfo, re.MULTILINE)
    flags = instructions(cpuinfo)
    named = [name for flag, name in INSTRUCTIONS.items() if flag in flags]
    told = f"{model[1] if model else platform.machine()}, {number} core{'' if number == 1 else 's'}"
    figures = {"cores": number, "quota": share, "instructions": named}
    if not flags:
        yield Finding("ok", "processor", f"{told}; its instructions are not known", figures=figures)
    elif not flags & {"avx2", "asimd"}:
        yield Finding(
            "warning",
            "processor",
            f"{told}, without AVX2: matrix products are several times slower",
            "use another machine, or one whose hypervisor lets AVX2 through",
            figures,
        )
    else:
        lacking = " or ".join(name for name in ("AVX-512", "bf16") if name not in " ".join(named))
        without = f", no {lacking}" if lacking else ""
        yield Finding("ok", "processor", f"{told}; {', '.join(named)}{without}", figures=figures)
    if share is not None and share < number:
        yield Finding(
            "warning",
            "processor",
            f"this container may take the time of {share:g} of {number} cores, and TensorFlow starts a "
            "thread for each",
            f"set TF_NUM_INTRAOP_THREADS={max(1, int(share))}, or give it whole cores",
            figures,
        )


def instructions(cpuinfo: str) -> set[str]:
    """Flags of the processor; none where the system does not tell."""
    found = re.search(r"^(?:flags|Features)\s*: (.*)$", cpuinfo, re.MULTILINE)
    return set(found[1].split()) if found else set()


def quota() -> float | None:
    """Cores' time that a container may take; None without a limit."""
    told = _text("/sys/fs/cgroup/cpu.max").split()
    if not told:
        old = Path("/sys/fs/cgroup/cpu")
        told = [_text(old / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    if len(told) != 2 or not told[0].isdigit() or not told[1].isdigit():
        return None
    return int(told[0]) / int(told[1])


def memory() -> tuple[int, int]:
    """Bytes of memory in all, and free, within the limits of a container."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    told = re.search(r"^MemAvailable:\s*(\d+) kB", _text("/proc/meminfo"), re.MULTILINE)
    free = 1024 * int(told[1]) if told else total
    root = Path("/sys/fs/cgroup")
    for limit, used in (
        (root / "memory.max", root / "memory.current"),
        (root / "memory/memory.limit_in_bytes", root / "memory/memory.usage_in_bytes"),
    ):
        most, taken = _text(limit).strip(), _text(used).strip()
        if most.isdigit() and taken.isdigit() and int(most) < total:
            total, free = int(most), min(free, int(most) - int(taken))
    return total, max(0, free)


def open_files(soft: int, hard: int) -> Finding:
    """How many files a process may have open: a reader one, a run of many processes a few each."""
    figures = {"soft": soft, "hard": hard}
    endless = resource.RLIM_INFINITY
    if soft != endless and soft < OPEN_FILES:
        most = OPEN_FILES if hard == endless else min(hard, OPEN_FILES)
        return Finding(
            "warning",
            "open files",
            f"at most {soft:,}, which libraries of a run over several GPUs or hosts use up",
            f"ulimit -n {most}",
            figures,
        )
    return Finding(
        "ok", "open files", "no limit" if soft == endless else f"at most {soft:,}", figures=figures
    )


def shared_memory(folder: Path) -> Finding:
    """Room in /dev/shm, through which the GPUs of a host exchange gradients."""
    if not folder.is_dir():
        return Finding("ok", "shared memory", f"there is no {folder}")
    found = shutil.disk_usage(folder)
    figures = {"free": found.free, "total": found.total}
    told = f"{size(found.free)} free of {size(found.total)} in {folder}"
    if found.free >= SHARED_MEMORY:
        return Finding("ok", "shared memory", told, figures=figures)
    return Finding(
        "warning",
        "shared memory",
        f"{told}, too little for several GPUs",
        "start the container with --shm-size=1g or --ipc=host, or remove what fills it",
        figures,
    )


def variables(environment: Mapping[str, str], number: int) -> Iterator[Finding]:
    """What is set in the environment and hurts a run; what else is set, in one line."""
    what, known = "environment", set(OURS)
    for name, hurts in HURTFUL.items():
        value = environment.get(name)
        if value is not None and re.fullmatch(hurts.values, value.strip(), re.IGNORECASE):
            known.add(name)
            yield Finding("warning", what, f"{name} ({value}): {hurts.what}", hurts.remedy)
    threads = environment.get("TF_NUM_INTRAOP_THREADS", "")
    if threads.isdigit() and 0 < int(threads) < number:
        known.add("TF_NUM_INTRAOP_THREADS")
        yield Finding(
            "warning",
            what,
            f"TF_NUM_INTRAOP_THREADS ({threads}): an operation uses {threads} of {number} cores",
            "unset it, unless several runs share this machine",
        )
    backend = environment.get("KERAS_BACKEND", "tensorflow")
    if backend != "tensorflow":
        yield Finding(
            "error",
            what,
            f"KERAS_BACKEND ({backend}): training runs on tensorflow",
            "unset it",
            kind=ConfigError,
        )
    if "OMP_NUM_THREADS" in environment:
        # Measured: with 1 TensorFlow's products still run on both cores, as its pool is its own.
        yield Finding(
            "ok",
            what,
            f"OMP_NUM_THREADS ({environment['OMP_NUM_THREADS']}): TensorFlow does not read it, but "
            "TF_NUM_INTRAOP_THREADS",
        )
    # By name only: a value may be a secret.
    others = sorted(
        name
        for name in environment
        if name.startswith(FAMILIES) and not name.startswith(STRANGERS) and name not in known
    )
    if others:
        yield Finding("ok", what, f"also set: {', '.join(others)}")


def file_system(folder: Path, mounts: str) -> str | None:
    """Kind of the file system that a folder is on, from the text of /proc/mounts; None if unknown."""
    path = str(folder.absolute().resolve())
    found = [line.split()[1:3] for line in mounts.splitlines() if len(line.split()) > 2]
    above = [
        (len(point), place, kind)
        for place, (point, kind) in enumerate(found)
        if path == point or path.startswith(point.rstrip("/") + "/")
    ]
    # Of two mounts on one point the later one is seen.
    return max(above)[2] if above else None


def processor_text() -> str:
    """The text of /proc/cpuinfo, empty where there is none."""
    return _text("/proc/cpuinfo")


def mounts() -> str:
    """The text of /proc/mounts, empty where there is none."""
    return _text("/proc/mounts")


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
