"""`bert plan`: its output, and its estimate compared with the peak memory of runs."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.tiny_models import TINY_RUN, flags_of

from bert_cli.cli import main
from bert_cli.config.pretrain import PretrainSettings
from bert_cli.config.shipped import configs_folder
from bert_cli.parse.load import load
from bert_cli.planning.memory import estimate

BASE = ["plan", "pretrain", "--config", "pretrain_base_128_phase1"]
AUTO = ["--parallel.layout", "auto"]
SHIPPED = sorted(path.stem for path in configs_folder().glob("pretrain_*.json"))


def rows(text: str) -> list[list[str]]:
    lines = text.partition("\ndevice ")[2].partition("\n\n")[0].splitlines()[1:]
    return [line.split() for line in lines]


def test_every_shipped_config_has_a_plan_whose_terms_add_up(bert, monkeypatch):
    monkeypatch.delenv("DATASETS_DIR", raising=False)
    for name in SHIPPED:
        text = bert("plan", "pretrain", "--config", name).out
        words = ["--config", name, "--generated-dataset"]
        devices = estimate(load(PretrainSettings, words, "bert pretrain")[0])
        assert [row[0] for row in rows(text)] == [str(n) for n in range(len(devices))]
        assert all(10**6 < one.total < 10**12 for one in devices)
        for row in rows(text):
            *terms, total = [round(10 * float(cell.replace(",", ""))) for cell in row[1:7]]
            assert total == sum(terms)


def test_the_chosen_layout_as_flags_is_that_layout(bert, capsys):
    for words, memory, devices in (
        ([], "4GB", 2),
        (["--engine", "jax", "--parallel.tensor", "2"], "3GB", 1),
    ):
        text = bert(*BASE, *words, *AUTO, "--devices", "8", "--memory", memory).out
        flags = shlex.split(text.partition("as flags:\n")[2].splitlines()[0])
        assert main([*BASE, *words, *flags]) == 0
        assert rows(capsys.readouterr().out) == rows(text) and len(rows(text)) == devices


# The peak memory of a process, measured by itself: getrusage of a child includes its parent's.
RUN = """
import sys
from bert_cli.cli import main
assert main(sys.argv[1:]) == 0
print([line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")][0])
"""
TINY = {**TINY_RUN, "total-num-train-samples": 512}
PLAIN = TINY | {
    "max-seq-length": 128, "max-predictions-per-seq": 20, "global-batch.micro-batch-size": 32,
    "bert-config.vocab-size": 2000, "bert-config.hidden-size": 256, "bert-config.num-hidden-layers": 4,
    "bert-config.num-attention-heads": 4, "bert-config.intermediate-size": 1024,
    "bert-config.max-position-embeddings": 512,
}  # fmt: skip
LAYOUTS: dict[str, dict[str, object]] = {
    # So large that the graphs, which the estimate leaves out, matter little.
    "recomputed": {"parallel.recompute": None, "global-batch.micro-batch-size": 128},
    "pipeline of groupbert": {
        "bert-config.architecture": "groupbert",
        "global-batch.micro-batch-size": 16,
        "global-batch.grad-acc-steps-per-replica": 4,
        "parallel.pipeline-stages": '[["emb"], ["hid*2"], ["hid*2", "enc_out", "pool", "heads"]]',
        "parallel.pipeline-device-mapping": "[0, 1, 0]",
    },
}


def peak(flags: dict[str, object]) -> int:
    command = [sys.executable, "-c", RUN, "pretrain", "--dry-run", *flags_of(flags)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return 1024 * int(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def without_a_model() -> int:
    return peak(TINY)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_estimate_is_near_the_peak_memory_of_a_run(layout, without_a_model):
    flags = {**PLAIN, **LAYOUTS[layout]}
    settings, _ = load(PretrainSettings, flags_of(flags), "bert pretrain")
    devices = estimate(settings)
    estimated = sum(one.total for one in devices)
    assert sum(one.activations + one.logits for one in devices) > 0.75 * estimated
    assert estimated == pytest.approx(peak(flags) - without_a_model, rel=0.25)
