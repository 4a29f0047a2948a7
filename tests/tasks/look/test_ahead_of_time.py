"""`bert plan --compile-for`: its list, its messages, and real compilations for absent devices."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from bert_cli.cli import main
from bert_cli.planning.targets import ACCELERATORS
from bert_cli.tasks.look.ahead_of_time import refused_bytes

ROOT = Path(__file__).parents[3]
TINY = [
    "plan", "--config", "pretrain_tiny_128_phase1", "--engine", "jax", "--parallel.layout", "auto",
    "--bert-config.num-hidden-layers", "1", "--bert-config.vocab-size", "1000", "--optimizer-opts.name", "AdamW",
]  # fmt: skip


def plan(words: list[str], compilers: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(compilers)}
    command = [sys.executable, "-m", "bert_cli", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)


def test_the_list_of_targets_needs_no_run(capsys):
    assert main(["plan", "--list-targets"]) == 0
    printed = capsys.readouterr().out
    assert all(about.title in printed for about in ACCELERATORS.values())


@pytest.mark.slow
def test_an_absent_compiler_is_an_error_that_names_its_extra(tmp_path):
    """The packages are replaced by modules that cannot be imported."""
    for name in ("libtpu", "jax_plugins"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError(name={name!r})")
    for target, extra in (("v5e:2x2", "compile-tpu"), ("h100:2", "compile-cuda")):
        done = plan([*TINY, "--compile-for", target], tmp_path)
        assert done.returncode == 2, done.stderr
        assert f"--compile-for ({target}): needs the extra '{extra}'; pip install" in done.stderr
        assert not done.stdout and "Traceback" not in done.stderr


def test_the_memory_that_a_compiler_refuses_is_read_from_its_message():
    """Both messages are libtpu's."""
    limit = "RESOURCE_EXHAUSTED: Ran out of memory "
    message = f"{limit}on HBM, the total memory required for HLO temporaries (82.40G) exceeds available HBM (15.75G)."
    assert refused_bytes(message) == int(82.4 * 2**30)
    assert refused_bytes(f"{limit}in memory space hbm. Used 512.5M of 15.75G hbm.") == 1025 * 2**19
    assert refused_bytes("INTERNAL: 82.40G") is None


@pytest.fixture(scope="session")
def compilers(tmp_path_factory) -> Path:
    """A folder with the pinned compilers; the test is skipped where the registry does not have them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [project["optional-dependencies"][f"compile-{name}"] for name in ("tpu", "cuda")]
    packages = [package for extra in extras for package in extra if package != "jax==0.10.2"]
    packages.append(f"jax-cuda12-pjrt=={packages[-1].partition('==')[2]}")
    folder = tmp_path_factory.mktemp("compilers")
    words = ["-m", "pip", "install", "--no-deps", "--no-cache-dir", "-q", "--target"]
    words = [sys.executable, *words, str(folder), *packages]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        message = f"the compilers cannot be installed: {done.stderr[-500:]}"
        if os.environ.get("BERT_REQUIRE_SHARED_DATA") == "1":
            pytest.fail(message)
        pytest.skip(message)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5e:2x2", "h100:2"])
def test_a_step_compiles_for_absent_devices(target, compilers):
    done = plan([*TINY, "--compile-for", target], compilers)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^needed by the compiler +[\d.]+ [MG]B$", done.stdout, re.M)
    estimate = re.search(r"^estimated by bert plan .*\(([+-]\d+)%\)$", done.stdout, re.M)
    assert estimate and abs(int(estimate[1])) <= 60  # of a toy, in which little arrays count


@pytest.mark.slow
def test_a_step_that_does_not_fit_ends_with_exit_code_5_and_names_what_saves_memory(compilers):
    words = "--global-batch.micro-batch-size 65536 --global-batch.replicas 1 "
    words += "--global-batch.grad-acc-steps-per-replica 1 --parallel.pipeline-stages null "
    words += "--parallel.pipeline-device-mapping null --parallel.layout given"
    done = plan([*TINY, *words.split(), "--compile-for", "v5e:1x1"], compilers)
    assert done.returncode == 5, done.stderr
    assert "a device needs at least" in done.stderr and "has 17.2 GB; use --" in done.stderr
    assert "Traceback" not in done.stderr
