"""Facts about this machine, and the findings of `bert doctor` about it.

TensorFlow is not imported, so that a machine on which it cannot be loaded can be examined too.
"""

import platform
import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import psutil

from bert_cli.config.training import Precision
from bert_cli.errors import BertError, DataError, DeviceError
from bert_cli.files import JSONObject
from bert_cli.parallel.devices import CPUINFO, processor_flags
from bert_cli.processes import cpu_count, log_to, print_line
from bert_cli.text import count, format_bytes
from bert_cli.versions import package_versions

PACKAGES = ("tensorflow", "jax", "keras", "numpy", "tokenizers", "transformers")
# Flags of /proc/cpuinfo, on x86 and Arm, that matter for matrix products.
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
# Processor flags for matrix products in 16 bits.
FAST_INSTRUCTIONS = {
    "mixed_bfloat16": {"avx512_bf16", "amx_bf16", "bf16"},
    "mixed_float16": {"avx512_fp16", "amx_fp16", "asimdhp"},
    "float16": {"avx512_fp16", "amx_fp16", "asimdhp"},
}
BFLOAT16_CAPABILITY = 8.0  # CUDA compute capability from which a GPU has products in bfloat16
CGROUP = Path("/sys/fs/cgroup")
# A warning slows a run down or may end it.
Level = Literal["ok", "warning", "error"]
T = TypeVar("T")


@dataclass(frozen=True)
class Finding:
    """The result of one check: a line of `bert doctor`."""

    level: Level
    what: str
    found: str
    remedy: str = ""
    values: Mapping[str, object] = field(default_factory=dict)
    """The values of the check, for --json."""
    kind: type[BertError] = DeviceError
    """Class of an error, which decides the exit code."""

    def __str__(self) -> str:
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.level:<7}  {self.what:<15}  {self.found}{remedy}"

    def as_json(self) -> JSONObject:
        """Return the finding without its class."""
        return {name: value for name, value in vars(self).items() if name != "kind"}


class Report:
    """The findings so far; each is printed when it is added, unless the report is quiet."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.findings: list[Finding] = []

    def _add(self, finding: Finding) -> None:
        self.findings.append(finding)
        if not self.quiet:
            print_line(str(finding))

    def add(self, level: Level, what: str, text: str, remedy: str = "", **values: object) -> None:
        """Add the result of a check, with a remedy unless it passed."""
        self._add(Finding(level, what, text, "" if level == "ok" else remedy, values))

    def error(self, what: str, error: BertError) -> None:
        """Add an error with which the run would end."""
        problem = error.where
        if error.problem:
            problem = f"{error.where}: {error.problem}"
        problem, remedy = (" ".join(text.split()) for text in (problem, error.remedy))
        self._add(Finding("error", what, problem, remedy, kind=type(error)))

    def attempt(self, what: str, act: Callable[[], T]) -> T | None:
        """Call a function of a run; add what it logs, and its text or its error.

        Returns None after a BertError or an OSError.
        """

        def add_logged(text: str, is_warning: bool) -> None:
            if is_warning:
                self.add("warning", what, " ".join(text.removeprefix("warning: ").split()))
                return
            for line in text.splitlines():
                self.add("ok", what, line.removeprefix("run:").strip())

        try:
            with log_to(add_logged):
                value = act()
        except BertError as error:
            self.error(what, error)
            return None
        except OSError as error:
            remedy = "correct the path or its rights"
            self.error(what, DataError(str(error.filename or what), str(error.strerror), remedy))
            return None
        if isinstance(value, str) and value:
            self.add("ok", what, value)
        return value


# --- facts


def fastest_precision(kind: str) -> Precision:
    """Return the fastest precision: bfloat16, or float16 on older GPUs and float32 on older CPUs."""
    if kind == "CPU":
        has_bfloat16 = processor_flags(_read(CPUINFO)) & FAST_INSTRUCTIONS["mixed_bfloat16"]
        if has_bfloat16:
            return "mixed_bfloat16"
        return "float32"
    if kind != "GPU" or shutil.which("nvidia-smi") is None:
        return "mixed_bfloat16"
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    capabilities = map(float, re.findall(r"\d+\.\d+", shown))
    is_old = any(capability < BFLOAT16_CAPABILITY for capability in capabilities)
    if is_old:
        return "mixed_float16"
    return "mixed_bfloat16"


def memory() -> tuple[int, int]:
    """Return the total and the free memory in bytes, within the limit of the container."""
    host = psutil.virtual_memory()
    limit, used = (_read(CGROUP / f"memory.{name}").strip() for name in ("max", "current"))
    if limit.isdigit() and used.isdigit() and int(limit) < host.total:
        return int(limit), max(0, min(host.available, int(limit) - int(used)))
    return host.total, host.available


def resident_bytes() -> tuple[int, int]:
    """Return the memory of this process: now and at its peak.

    The peak is VmHWM if there is /proc: the peak of getrusage includes the memory of the parent before exec.
    """
    now = psutil.Process().memory_info().rss
    peak = re.search(r"^VmHWM:\s*(\d+) kB", _read("/proc/self/status"), re.MULTILINE)
    # Bytes on macOS, the only other system that the tool runs on.
    return now, 1024 * int(peak[1]) if peak else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def description() -> JSONObject:
    """Return the processor and the memory, in the form that measurements record."""
    flags = processor_flags(_read(CPUINFO))
    number = cpu_count()
    total, free = memory()
    known = [name for flag, name in INSTRUCTIONS.items() if flag in flags]
    model = re.search(r"^model name\s*: (.*)$", _read(CPUINFO), re.MULTILINE)
    of_these = ", ".join(INSTRUCTIONS.values())
    text = f"{model[1] if model else platform.machine()}, {count(number, 'core')}; "
    text += ", ".join(known) or (f"none of {of_these}" if flags else "its instructions are unknown")
    quota = re.match(r"(\d+) (\d+)", _read(CGROUP / "cpu.max"))
    return {
        "processor": text,
        "cores": number,
        "quota": int(quota[1]) / int(quota[2]) if quota else None,
        "instructions": known,
        "memory_bytes": total,
        "free_bytes": free,
    }


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# --- checks


def check_machine(report: Report) -> None:
    """Report the versions of the packages and the memory, and check the processor."""
    versions = package_versions(PACKAGES)
    python = versions["python"]
    report.add("ok", "python", f"{python} on {platform.platform()}", python=python)
    text = ", ".join(f"{name} {versions[name]}" for name in PACKAGES)
    report.add("ok", "packages", text, **versions)
    check_processor(report)
    total, free = memory()
    text = f"{format_bytes(free)} free of {format_bytes(total)}"
    report.add("ok", "memory", text, free=free, total=total)


def check_processor(report: Report) -> None:
    """Check the instructions of the processor, and the number of cores that a container may use."""
    flags = processor_flags(_read(CPUINFO))
    described = description()
    values = {name: described[name] for name in ("cores", "quota", "instructions")}
    number = described["cores"]
    quota = described["quota"]
    text = described["processor"]
    # Without /proc/cpuinfo nothing is known, and nothing is said.
    is_slow = bool(flags) and not flags & {"avx2", "asimd"}
    if is_slow:
        text += ", no AVX2: matrix products are several times slower"
    remedy = "use another machine, or a hypervisor that passes AVX2 through"
    report.add("warning" if is_slow else "ok", "processor", text, remedy, **values)
    if quota is not None and quota < number:
        problem = f"the container may use the time of {quota:g} of {number} cores"
        problem += ", but TensorFlow starts a thread for each"
        remedy = f"set TF_NUM_INTRAOP_THREADS={max(1, int(quota))}, or assign whole cores to the container"
        report.add("warning", "processor", problem, remedy, **values)


def check_engine(report: Report, engine: str, kind: str) -> None:
    """Compare the engine with the devices that it runs on."""
    if kind == "CPU" and engine == "jax":
        text = "jax is slower than TensorFlow on a CPU (docs/engines.md)"
        remedy = "pass --engine tensorflow, unless the run divides weights among devices"
        report.add("warning", "engine", text, remedy)
    else:
        report.add("ok", "engine", engine)


def check_precision(report: Report, precision: str, kind: str) -> None:
    """Check that the processor has instructions for the precision; a GPU is assumed to."""
    flags = processor_flags(_read(CPUINFO))
    fast = FAST_INSTRUCTIONS.get(precision)
    if kind == "GPU" or fast is None or not flags or flags & fast:
        report.add("ok", "precision", precision)
        return
    better = "mixed_bfloat16" if flags & FAST_INSTRUCTIONS["mixed_bfloat16"] else "float32"
    problem = "this processor has no instructions for it, so it is no faster than float32"
    remedy = f"pass --precision {better}, unless this is a trial of a GPU run"
    report.add("warning", "precision", f"{precision}: {problem}", remedy)
