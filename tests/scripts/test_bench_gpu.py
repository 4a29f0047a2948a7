"""`scripts/bench_gpu.py`, rehearsed on the CPU: no test has a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/bench_gpu.py"


@pytest.mark.slow
def test_rows_that_have_a_result_are_not_measured_again_and_the_fastest_is_profiled(tmp_path):
    output = tmp_path / "out.jsonl"
    words = [sys.executable, SCRIPT, output, "--rehearse", "--steps", "2", "--rows", "cudnn-128"]
    subprocess.run(words, check=True)
    subprocess.run([*words, "profile"], check=True)
    first, second = map(json.loads, output.read_text().splitlines())
    assert (first["row"], second["row"], second["of"]) == ("cudnn-128", "profile", "cudnn-128")
    assert first["examples_per_second"] > 0 and list(tmp_path.rglob("*.xplane.pb"))
