"""The wheel, installed outside a checkout with the oldest packages that it allows; the other tests have the newest."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
CHAIN = """
download dump --sample
extract dump extracted
preprocess extracted sentences
vocab sentences vocab --size 2000
tokenize sentences records --vocab vocab --sequence-length 128 --mask-tokens 20
pretrain --config pretrain_demo_128_phase1 --dataset-dir records --save-ckpt-path run --total-num-train-samples 320
predict run --input masked.txt
doctor
"""


def oldest_versions() -> list[str]:
    """Return a pin of the lowest version of each dependency that pyproject.toml allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = []
    for requirement in map(Requirement, project["dependencies"]):
        lowest = [each.version for each in requirement.specifier if each.operator in (">=", "==")]
        assert len(lowest) == 1, f"{requirement} has no oldest version"
        if requirement.marker is None or requirement.marker.evaluate():
            pins.append(f"{requirement.name}=={lowest[0]}")
    return pins


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run([sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", str(folder), str(ROOT)], folder)
    return next(folder.glob("*.whl"))


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "environment"
    run([sys.executable, "-m", "venv", str(folder)], tmp_path)
    yield folder
    shutil.rmtree(folder)  # 2.6 GB, which pytest would keep for three sessions


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package(wheel):
    words = ["git", "ls-files", "bert_cli"]
    files = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {*files.split()} <= {*zipfile.ZipFile(wheel).namelist()}


@pytest.mark.slow
@pytest.mark.tensorflow
def test_the_wheel_trains_a_model_outside_a_checkout(wheel, environment, tmp_path):
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("\n".join(oldest_versions()))
    install = [str(environment / "bin" / "pip"), "install", "--only-binary=:all:", "--no-compile"]
    run([*install, "--constraint", str(constraints), str(wheel)], tmp_path)
    run([str(environment / "bin" / "pip"), "check"], tmp_path)

    work = tmp_path / "work"
    work.mkdir()
    (work / "masked.txt").write_text("The water [MASK] cold.\n")
    program = str(environment / "bin" / "bert")
    lines = CHAIN.strip().splitlines()
    printed = {line.split()[0]: run([program, *line.split()], work).stdout for line in lines}
    assert "warning  packages" not in printed["doctor"], printed["doctor"]
    assert json.loads(printed["predict"])["masks"][0][0]["word"]
    assert (work / "run" / "step_00000010" / "model.safetensors").is_file()
