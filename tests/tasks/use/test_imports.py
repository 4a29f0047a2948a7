"""The start of a command loads only what the command uses: imports are most of the time of a short command."""

import importlib.metadata
import subprocess
import sys

import pytest

from bert_cli.cli import main

SETTINGS = {
    "pydantic",
    "pydantic_core",
    "annotated_types",
    "typing_extensions",
    "typing_inspection",
}
SEARCH = SETTINGS | {"numpy", "google_crc32c"}
PREDICT = SEARCH | {"safetensors", "ml_dtypes", "threadpoolctl", "tokenizers"}
STARTS = {
    "--help": (set(), ""),
    "search ask index cat --words": (
        SEARCH,
        "tasks.run tasks.model model train config.use config.training",
    ),
    "predict MODEL cat": (
        PREDICT,
        "config.training config.pretrain config.finetune parallel.cluster",
    ),
}
"""Command -> the packages that it may load, and the modules of this package that it may not."""
LOADED = """
import sys
before = {*sys.modules}
from bert_cli.cli import main
assert main(sys.argv[1:]) == 0
print(*{*sys.modules} - before)
"""


@pytest.mark.parametrize("command", STARTS)
def test_a_command_loads_only_what_it_uses(models, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cat.txt").write_text("The cat sat on the mat.\n")
    if "index" in command:
        assert main(["search", "make", "index", "cat.txt"]) == 0
    words = command.replace("MODEL", str(models["bare"])).split()
    done = subprocess.run([sys.executable, "-c", LOADED, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    modules = {*done.stdout.splitlines()[-1].split()}
    packages = {name.partition(".")[0] for name in modules}
    installed = {*importlib.metadata.packages_distributions()} - {"bert_cli"}
    allowed, refused = STARTS[command]
    assert packages & installed - allowed == set()
    assert modules & {f"bert_cli.{name}" for name in refused.split()} == set()
    assert allowed - packages == set()
