"""The facts about a machine and the findings of `bert doctor` about it, for this machine and simulated ones."""

import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from bert_cli.errors import DataError
from bert_cli.tasks.look import machine
from bert_cli.tasks.look.machine import Finding, Report

NEW = "processor : 0\nmodel name\t: Fast 9\nflags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16\n"


def findings(check, *arguments) -> list[Finding]:
    report = Report(quiet=True)
    check(report, *arguments)
    return report.findings


def levels(check, *arguments) -> list[str]:
    return [one.level for one in findings(check, *arguments)]


@pytest.fixture
def files(monkeypatch) -> dict[str, str]:
    texts = {"/proc/cpuinfo": NEW}
    monkeypatch.setattr(machine, "_read", lambda path: texts.get(str(path), ""))
    monkeypatch.setattr(machine, "cpu_count", lambda: 8)
    return texts


def test_the_memory_of_a_process_is_measured():
    # In its own process: this one may use memory again that it has freed.
    code = (
        "from bert_cli.tasks.look.machine import resident_bytes\n"
        "before = resident_bytes()\n"
        "data = bytearray(b'x') * (64 * 2**20)\n"
        "print(*before, *resident_bytes())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    now, peak, after, peak_after = map(int, done.stdout.split())
    assert after - now > 32 * 2**20 and peak_after >= max(peak, after - 2**20)


def test_the_instructions_that_matter_are_listed(files):
    for text, level, part in (
        (NEW, "ok", "Fast 9, 8 cores; AVX2, AVX-512, bf16 in AVX-512, bf16 in AMX"),
        ("model name : U\nflags : avx2 fma\n", "ok", "U, 8 cores; AVX2"),
        ("model name : Slow\nflags : fpu sse2\n", "warning", "no AVX2"),
        ("processor : 0\nFeatures\t: fp asimd bf16 sve\n", "ok", "SVE, bf16 in NEON"),
        ("", "ok", "its instructions are unknown"),
    ):
        files["/proc/cpuinfo"] = text
        (finding,) = findings(machine.check_processor)
        assert finding.level == level and part in finding.found
    for precision, flag, kind, level in (
        ("mixed_bfloat16", "avx2", "CPU", "warning"),
        ("mixed_bfloat16", "amx_bf16", "CPU", "ok"),
        ("mixed_float16", "avx512_bf16", "CPU", "warning"),
        ("float16", "avx2", "GPU", "ok"),
    ):
        files["/proc/cpuinfo"] = f"flags : fpu {flag}\n"
        assert levels(machine.check_precision, precision, kind) == [level]


def test_the_fastest_precision_is_one_that_every_device_has(files, monkeypatch):
    monkeypatch.setattr(machine.shutil, "which", lambda name: f"/usr/bin/{name}")
    for shown, precision in (("8.0\n9.0\n", "mixed_bfloat16"), ("8.0\n7.5\n", "mixed_float16")):
        done = SimpleNamespace(stdout=shown)
        monkeypatch.setattr(machine.subprocess, "run", lambda *_, done=done, **__: done)
        assert machine.fastest_precision("GPU") == precision
    assert machine.fastest_precision("CPU") == "mixed_bfloat16"
    files["/proc/cpuinfo"] = "flags : fpu avx2\n"
    assert machine.fastest_precision("CPU") == "float32"


def test_the_limits_of_a_container_count(files, monkeypatch):
    for quota, cores in (("max 100000\n", None), ("", None), ("250000 100000\n", 2.5)):
        files["/sys/fs/cgroup/cpu.max"] = quota
        results = findings(machine.check_processor)
        assert results[0].values["quota"] == cores and len(results) == (2 if cores else 1)
    assert "2.5 of 8 cores" in results[1].found and "=2" in results[1].remedy
    host = SimpleNamespace(total=9 * 10**9, available=2 * 10**9)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: host)
    assert machine.memory() == (9 * 10**9, 2 * 10**9)
    files["/sys/fs/cgroup/memory.current"] = "2500000000\n"
    files["/sys/fs/cgroup/memory.max"] = "3000000000\n"
    assert machine.memory() == (3 * 10**9, 5 * 10**8)


def test_jax_on_a_cpu_is_warned_of():
    (slow,) = findings(machine.check_engine, "jax", "CPU")
    assert slow.level == "warning" and "--engine tensorflow" in slow.remedy
    for engine, kind in (("tensorflow", "CPU"), ("tensorflow", "GPU"), ("jax", "GPU")):
        assert levels(machine.check_engine, engine, kind) == ["ok"]


def test_an_error_of_the_system_becomes_a_finding():
    report = Report(quiet=True)

    def fail() -> None:
        raise PermissionError(13, "denied", "/x")

    assert report.attempt("corpus", fail) is None
    assert report.findings[0].kind is DataError and report.findings[0].found == "/x: denied"
