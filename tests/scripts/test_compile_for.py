"""`scripts/compile_for.py`, for the processors of this machine: the compilers of other devices are not installed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.tiny_models import TINY_RUN, flags_of

SCRIPT = Path(__file__).parents[2] / "scripts/compile_for.py"


@pytest.mark.slow
def test_the_step_of_a_run_compiles_from_shapes_and_its_bytes_are_printed():
    words = [*flags_of(TINY_RUN), "--global-batch.replicas", "1", "--parallel.recompute"]
    done = subprocess.run([sys.executable, SCRIPT, "cpu", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sizes = re.search(r"a device needs ([\d.]+) GB: .*'argument': (\d+)", done.stdout)
    assert 0 < int(sizes[2]) <= 1e9 * float(sizes[1]) + 5e5
    assert "bert plan says " in done.stdout
