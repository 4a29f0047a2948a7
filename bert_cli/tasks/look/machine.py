"""Facts about this machine, and the findings of `bert doctor` about it.

TensorFlow is not imported, so that a machine on which it cannot be loaded can be examined too.
"""

import platform
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import psutil

from bert_cli.config.layout import size
from bert_cli.errors import BertError, ConfigError, DataError, DeviceError
from bert_cli.processes import cpu_count

PACKAGE = "bert-cli"
PYTHONS = ((3, 11), (3, 13))
MAIN_PACKAGES = ("tensorflow", "keras", "numpy", "tokenizers", "transformers")
"""Packages whose versions are reported also when they are as pinned."""
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
"""Flags of /proc/cpuinfo, on x86 and Arm, that matter for matrix products."""
FAST_INSTRUCTIONS = {
    "mixed_bfloat16": {"avx512_bf16", "amx_bf16", "bf16"},
    "mixed_float16": {"avx512_fp16", "amx_fp16", "asimdhp"},
    "float16": {"avx512_fp16", "amx_fp16", "asimdhp"},
}
"""Processor flags for matrix products in 16 bits."""
CGROUP = Path("/sys/fs/cgroup")
Level = Literal["ok", "warning", "error"]
T = TypeVar("T")


class Harmful(NamedTuple):
    """Values of an environment variable that slow a run down, and their effect."""

    values: str
    effect: str


HARMFUL = {
    "TF_ENABLE_ONEDNN_OPTS": Harmful("0|false", "turns off the fast matrix products of a CPU"),
    "CUDA_VISIBLE_DEVICES": Harmful("|-1|NoDevFiles", "hides every GPU"),
    "CUDA_LAUNCH_BLOCKING": Harmful("1", "makes a GPU wait after each operation"),
    "NVIDIA_TF32_OVERRIDE": Harmful("0", "makes float32 products on a GPU slower"),
    "TF_FORCE_GPU_ALLOW_GROWTH": Harmful("0|false", "takes all memory of a GPU at the start"),
    "TF_XLA_FLAGS": Harmful(".*auto_jit.*", "compiles more than the run does, with other rounding"),
}


@dataclass(frozen=True)
class Finding:
    """The result of one check: a line of `bert doctor`."""

    level: Level
    what: str
    found: str
    remedy: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    """The values of the check, for --json."""
    kind: type[BertError] = DeviceError
    """Class of an error, which decides the exit code."""

    def __str__(self) -> str:
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.level:<7}  {self.what:<15}  {self.found}{remedy}"


class Report:
    """The findings so far; each is printed when it is added, unless the report is quiet."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.findings: list[Finding] = []

    def add(self, finding: Finding) -> None:
        """Add a finding."""
        self.findings.append(finding)
        if not self.quiet:
            print(finding, flush=True)

    def ok(self, what: str, found: str, **values: Any) -> None:
        """Add a check that passed."""
        self.add(Finding("ok", what, found, values=values))

    def warn(self, what: str, found: str, remedy: str, **values: Any) -> None:
        """Add a check whose result slows a run down or may end it."""
        self.add(Finding("warning", what, found, remedy, values))

    def error(self, what: str, error: BertError, **values: Any) -> None:
        """Add an error that the run would end with."""
        found = f"{error.where}: {error.problem}" if error.problem else error.where
        found, remedy = (" ".join(text.split()) for text in (found, error.remedy))
        self.add(Finding("error", what, found, remedy, values, type(error)))

    def attempt(self, what: str, act: Callable[[], T], describe: Callable[[T], str]) -> T | None:
        """Call a function of a run; add an ok with its described result, or its error and return None."""
        try:
            value = act()
        except BertError as error:
            self.error(what, error)
            return None
        except OSError as error:
            where = str(error.filename or what)
            self.error(
                what, DataError(where, str(error.strerror), "correct the path or its rights")
            )
            return None
        self.ok(what, describe(value))
        return value


# --- facts


def processor_flags() -> set[str]:
    """Return the instruction flags of the processor; none if the system does not list them."""
    flags = re.search(r"^(?:flags|Features)\s*: (.*)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return set(flags[1].split()) if flags else set()


def cpu_quota() -> float | None:
    """Return the cores' worth of time that the container may use; None without a limit."""
    quota, _, period = _read(CGROUP / "cpu.max").strip().partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def memory() -> tuple[int, int]:
    """Return the total and the free memory in bytes, within the limit of the container."""
    host = psutil.virtual_memory()
    limit, used = (_read(CGROUP / f"memory.{name}").strip() for name in ("max", "current"))
    if limit.isdigit() and used.isdigit() and int(limit) < host.total:
        return int(limit), max(0, min(host.available, int(limit) - int(used)))
    return host.total, host.available


def has_nvidia_driver() -> bool:
    """Return whether NVIDIA's driver is installed."""
    return shutil.which("nvidia-smi") is not None


def file_system(folder: Path) -> str | None:
    """Return the type of the file system that holds a folder; None if unknown."""
    path = folder.absolute().resolve()
    mounts = psutil.disk_partitions(all=True)
    above = [
        (len(one.mountpoint), number, one.fstype)
        for number, one in enumerate(mounts)
        if path.is_relative_to(one.mountpoint)
    ]
    # A later mount on the same point hides the earlier one.
    return max(above)[2] if above else None


def description() -> dict[str, Any]:
    """Return the processor and the memory, as measurements record them."""
    total, free = memory()
    name, values = _processor(processor_flags())
    return {"processor": name, **values, "memory_bytes": total, "free_bytes": free}


def _processor(flags: set[str]) -> tuple[str, dict[str, Any]]:
    """Return the processor as text, and its number of cores, quota and instructions."""
    number = cpu_count()
    named = [name for flag, name in INSTRUCTIONS.items() if flag in flags]
    model = re.search(r"^model name\s*: (.*)$", _read("/proc/cpuinfo"), re.MULTILINE)
    text = f"{model[1] if model else platform.machine()}, {number} core{'s' * (number > 1)}"
    if flags:
        missing = " or ".join(name for name in ("AVX-512", "bf16") if name not in " ".join(named))
        text += f"; {', '.join(named) or 'none of ' + ', '.join(INSTRUCTIONS.values())}"
        text += f", no {missing}" if named and missing else ""
    else:
        text += "; its instructions are unknown"
    return text, {"cores": number, "quota": cpu_quota(), "instructions": named}


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# --- checks


def check_machine(report: Report, environment: Mapping[str, str]) -> None:
    """Check Python, the installed packages, the processor, the memory and the environment."""
    check_python(report, sys.version_info[:3])
    check_packages(report, pinned_packages())
    check_processor(report)
    total, free = memory()
    report.ok("memory", f"{size(free)} free of {size(total)}", free=free, total=total)
    check_environment(report, environment)


def check_python(report: Report, found: tuple[int, ...]) -> None:
    """Check the version of Python."""
    text, (first, last) = ".".join(map(str, found)), PYTHONS
    if first <= found[:2] <= last:
        report.ok("python", f"{text} on {platform.platform()}", python=text)
        return
    problem = "is not supported, only 3.11 to 3.13 are"
    error = DeviceError(text, problem, "create an environment with one of those")
    report.error("python", error, python=text)


def pinned_packages() -> dict[str, str] | None:
    """Return package -> version that this tool requires; None if the tool is not installed."""
    try:
        required = requires(PACKAGE) or []
    except PackageNotFoundError:
        return None
    pins = (re.fullmatch(r"([\w.-]+)==([\w.]+)", one.replace(" ", "")) for one in required)
    return {pin[1]: pin[2] for pin in pins if pin}


def check_packages(report: Report, pinned: Mapping[str, str] | None) -> None:
    """Compare the installed packages with the required versions."""
    if pinned is None:
        report.warn(
            "packages",
            f"{PACKAGE} is not installed, so the required versions are unknown",
            "pip install -c requirements.lock -e .",
        )
        pinned = {}
    installed = {name: _version(name) for name in (*MAIN_PACKAGES, *pinned)}
    text = ", ".join(f"{name} {installed[name] or 'absent'}" for name in MAIN_PACKAGES)
    report.ok("packages", text, **installed)
    for name, pin in pinned.items():
        remedy = f"pip install {name}=={pin}"
        if installed[name] is None:
            report.error("packages", DeviceError(name, "is not installed", remedy))
        elif installed[name] != pin:
            report.warn("packages", f"{name} is {installed[name]}; {pin} was tested", remedy)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def check_processor(report: Report) -> None:
    """Check the instructions of the processor, and how much of its cores a container may use."""
    flags = processor_flags()
    text, values = _processor(flags)
    if flags and not flags & {"avx2", "asimd"}:
        report.warn(
            "processor",
            f"{text}, no AVX2: matrix products are several times slower",
            "use another machine, or a hypervisor that passes AVX2 through",
            **values,
        )
    else:
        report.ok("processor", text, **values)
    quota, number = values["quota"], values["cores"]
    if quota is not None and quota < number:
        report.warn(
            "processor",
            f"the container may use the time of {quota:g} of {number} cores, but TensorFlow starts a thread for each",
            f"set TF_NUM_INTRAOP_THREADS={max(1, int(quota))}, or give the container complete cores",
            **values,
        )


def check_environment(report: Report, environment: Mapping[str, str]) -> None:
    """Check the environment variables that slow a run down or stop it."""
    what = "environment"
    for name, harmful in HARMFUL.items():
        value = environment.get(name)
        if value is not None and re.fullmatch(harmful.values, value.strip(), re.IGNORECASE):
            report.warn(what, f"{name} ({value}): {harmful.effect}", "unset it")
    threads = environment.get("TF_NUM_INTRAOP_THREADS", "")
    if threads.isdigit() and 0 < int(threads) < cpu_count():
        report.warn(
            what,
            f"TF_NUM_INTRAOP_THREADS ({threads}): an operation uses {threads} of {cpu_count()} cores",
            "unset it, unless several runs share this machine",
        )
    backend = environment.get("KERAS_BACKEND", "tensorflow")
    if backend != "tensorflow":
        where = f"KERAS_BACKEND ({backend})"
        report.error(what, ConfigError(where, "training uses the tensorflow backend", "unset it"))


def check_precision(report: Report, precision: str, kind: str) -> None:
    """Check that the processor has instructions for the precision; a GPU is assumed to."""
    flags, fast = processor_flags(), FAST_INSTRUCTIONS.get(precision)
    if kind == "GPU" or fast is None or not flags or flags & fast:
        report.ok("precision", precision)
        return
    better = "mixed_bfloat16" if flags & FAST_INSTRUCTIONS["mixed_bfloat16"] else "float32"
    report.warn(
        "precision",
        f"{precision}: this processor has no instructions for it, so it is no faster than float32",
        f"give --precision {better}, unless this is a trial of a GPU run",
    )
