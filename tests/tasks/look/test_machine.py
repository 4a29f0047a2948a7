"""What is said of a machine, on descriptions of several of them and on this one."""

import os
from pathlib import Path

import pytest

from bert_cli.errors import ConfigError
from bert_cli.tasks.look import machine
from bert_cli.tasks.look.finding import Finding

ENDLESS = machine.resource.RLIM_INFINITY
NEW = "processor : 0\nmodel name\t: Fast 9\nflags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16\n"
OLD = "model name\t: Slow 1\nflags\t\t: fpu sse2\n"
MIDDLING = "model name\t: Usual 3\nflags\t\t: avx2 fma\n"
ARM = "processor : 0\nFeatures\t: fp asimd bf16 sve\n"
MOUNTS = """/dev/sda1 / ext4 rw 0 0
tmpfs /dev/shm tmpfs rw 0 0
server:/export /data nfs4 rw 0 0
/dev/sdb1 /data/fast xfs rw 0 0
overlay /over overlay rw 0 0
/dev/sdc1 /over ext4 rw 0 0
"""


def levels(findings: object) -> list[str]:
    return [finding.level for finding in findings]


def test_this_machine_is_looked_at_without_an_error():
    found = list(machine.look({}))
    assert [one.what for one in found][:2] == ["python", "packages"]
    assert "error" not in levels(found)
    assert all(str(one).count("\n") == 0 for one in found)


@pytest.mark.parametrize(
    ("version", "level"),
    [((3, 10, 4), "error"), ((3, 11, 0), "ok"), ((3, 13, 9), "ok"), ((3, 14, 0), "error")],
)
def test_a_python_that_the_tool_is_not_for_is_an_error(version, level):
    assert machine.python(version).level == level


def test_a_package_of_another_version_is_a_warning_and_one_that_is_absent_an_error():
    wanted = machine.requires_of_package()
    assert wanted is not None and "tensorflow" in wanted and "wandb" in wanted
    assert "torch" not in wanted and "sentencex" not in wanted
    assert levels(machine.packages(wanted)) == ["ok"]
    found = list(machine.packages({"numpy": "1.0.0", "no-such-package": "2.0"}))
    assert levels(found) == ["ok", "warning", "error"]
    assert "this was built and tested with 1.0.0" in found[1].found
    assert found[1].remedy == "pip install numpy==1.0.0"
    assert found[2].remedy == "pip install no-such-package==2.0"
    assert levels(machine.packages(None)) == ["warning", "ok"]


@pytest.mark.parametrize(
    ("text", "level", "told"),
    [
        (NEW, "ok", "Fast 9, 8 cores; AVX2, AVX-512, bf16 in AVX-512, bf16 in AMX"),
        (MIDDLING, "ok", "Usual 3, 8 cores; AVX2, no AVX-512 or bf16"),
        (OLD, "warning", "without AVX2"),
        (ARM, "ok", "SVE, bf16 in NEON"),
        ("", "ok", "its instructions are not known"),
    ],
)
def test_instructions_that_matter_are_told(text, level, told):
    found = list(machine.processor(text, 8, None))
    assert levels(found) == [level] and told in found[0].found


def test_a_container_that_may_take_less_than_its_cores_is_warned_of():
    found = list(machine.processor(NEW, 16, 2.5))
    assert levels(found) == ["ok", "warning"]
    assert "2.5 of 16 cores" in found[1].found and "=2" in found[1].remedy
    assert levels(machine.processor(NEW, 16, 16.0)) == ["ok"]


def test_the_limits_of_a_container_are_its_memory(monkeypatch):
    texts = {
        "/proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 2000000 kB\n",
        "/sys/fs/cgroup/memory.max": "3000000000\n",
        "/sys/fs/cgroup/memory.current": "2500000000\n",
    }
    monkeypatch.setattr(machine, "_text", lambda path: texts.get(str(path), ""))
    assert machine.memory() == (3 * 10**9, 5 * 10**8)
    texts["/sys/fs/cgroup/memory.max"] = "max\n"
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert machine.memory() == (total, 1024 * 2_000_000)


@pytest.mark.parametrize(
    ("texts", "share"),
    [
        ({"/sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2.5),
        ({"/sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        (
            {
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000\n",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            1.5,
        ),
        ({"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n"}, None),
        ({}, None),
    ],
)
def test_the_time_that_a_container_may_take_is_read(texts, share, monkeypatch):
    monkeypatch.setattr(machine, "_text", lambda path: texts.get(str(path), ""))
    assert machine.quota() == share


@pytest.mark.parametrize(
    ("soft", "hard", "level", "remedy"),
    [
        (256, 4096, "warning", "ulimit -n 1024"),
        (256, 512, "warning", "ulimit -n 512"),
        (256, ENDLESS, "warning", "ulimit -n 1024"),
        (1024, 4096, "ok", ""),
        (ENDLESS, ENDLESS, "ok", ""),
    ],
)
def test_a_low_limit_of_open_files_is_warned_of(soft, hard, level, remedy):
    found = machine.open_files(soft, hard)
    assert (found.level, found.remedy) == (level, remedy)


def test_little_shared_memory_is_warned_of(tmp_path, monkeypatch):
    assert machine.shared_memory(tmp_path / "absent").level == "ok"
    for free, level in ((64 * 10**6, "warning"), (8 * 10**9, "ok")):
        usage = machine.shutil.disk_usage(tmp_path)._replace(free=free)
        monkeypatch.setattr(machine.shutil, "disk_usage", lambda _, usage=usage: usage)
        assert machine.shared_memory(tmp_path).level == level


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TF_ENABLE_ONEDNN_OPTS", "0"),
        ("CUDA_VISIBLE_DEVICES", ""),
        ("CUDA_VISIBLE_DEVICES", "-1"),
        ("TF_XLA_FLAGS", "--tf_xla_auto_jit=2"),
        ("TF_NUM_INTRAOP_THREADS", "1"),
        ("TF_FORCE_GPU_ALLOW_GROWTH", "false"),
        ("NVIDIA_TF32_OVERRIDE", "0"),
    ],
)
def test_a_variable_that_hurts_is_warned_of_with_its_value(name, value):
    found = list(machine.variables({name: value}, 8))
    assert levels(found) == ["warning"]
    assert f"{name} ({value})" in found[0].found and "unset it" in found[0].remedy


def test_variables_that_do_no_harm_are_named_and_their_values_kept_secret():
    harmless = {"CUDA_VISIBLE_DEVICES": "0,1", "TF_ENABLE_ONEDNN_OPTS": "1", "HOME": "/root"}
    found = list(machine.variables(harmless | {"TF_VAR_password": "x"}, 8))
    assert levels(found) == ["ok"]
    assert found[0].found == "also set: CUDA_VISIBLE_DEVICES, TF_ENABLE_ONEDNN_OPTS"
    assert levels(machine.variables({"TF_NUM_INTRAOP_THREADS": "8"}, 8)) == ["ok"]


def test_another_backend_is_an_error_of_settings():
    (found,) = machine.variables({"KERAS_BACKEND": "jax"}, 8)
    assert found.level == "error" and found.kind is ConfigError


def test_a_number_of_threads_that_is_not_read_is_said_to_do_nothing():
    (found,) = machine.variables({"OMP_NUM_THREADS": "1"}, 8)
    assert found.level == "ok" and "TensorFlow does not read it" in found.found


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/home/me/runs", "ext4"),
        ("/dev/shm/run", "tmpfs"),
        ("/data/runs", "nfs4"),
        ("/data/fast/runs", "xfs"),
        ("/data/faster", "nfs4"),
        ("/over/runs", "ext4"),
    ],
)
def test_the_file_system_of_a_folder_is_that_of_the_longest_mount_and_the_last(folder, kind):
    assert machine.file_system(Path(folder), MOUNTS) == kind
    assert machine.file_system(Path(folder), "") is None


def test_a_finding_is_one_line_with_its_remedy():
    assert str(Finding("ok", "python", "3.12")).split() == ["ok", "python", "3.12"]
    assert str(Finding("warning", "disk", "full", "make room")).endswith("full; make room")
