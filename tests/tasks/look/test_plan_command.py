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
from bert_cli.settings.settings import parse_bytes

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


def test_the_model_is_named_and_whether_it_is_the_default(bert):
    for words, model in (
        (["squad"], "model: bert, 12 layers of 768 (default of --bert-config), 108.9 M parameters"),
        (["squad", "--config", "squad_large"], "model: bert, 24 layers of 1024, 334.1 M"),
    ):
        assert bert("plan", *words).out.startswith(model)


def test_a_layout_that_fits_is_confirmed_and_one_that_does_not_is_refused_after_the_table(bert):
    exact = bert(*BASE, "--devices", "16", "--memory", "16GB").out
    assert "fits: device 1 needs" in exact and "unused" not in exact
    text = bert(*BASE, "--devices", "17", "--memory", "16GB").out
    assert "\n1 of 17 devices unused\n" in text
    assert "fits: device 1 needs" in text and "12.8 GB of 16.0 GB are usable" in text
    assert "each replica adds up 440.4 MB of gradients with the others once a step" in text
    for flags, message in (
        (["--memory", "3GB"], "--memory (3.0 GB): device 1 needs"),
        (["--devices", "15"], "--devices (15): the layout needs 16, 4 replicas of 4"),
        (["--processes", "3"], "cannot be divided among 3 processes; "),
    ):
        printed = bert(*BASE, *flags, code=2)
        assert len(rows(printed.out)) == 4 and message in printed.err
    for flag, value, missing in (("--memory", "80GB", "--devices"), ("--devices", "8", "--memory")):
        assert f"pass {missing}" in bert(*BASE, *AUTO, flag, value, code=2).err
    for text in ("80", "80GX", "-1GB", "0GB", "lots"):
        assert "80GB" in bert(*BASE, f"--memory={text}", code=2).err
    sizes = {"24GiB": 24 * 2**30, "1.5 TB": 15 * 10**11, "16e9": 16 * 10**9, "1000000B": 10**6}
    assert {text: parse_bytes(text) for text in sizes} == sizes


def test_the_chosen_layout_as_flags_is_that_layout_and_unused_devices_are_reported(bert, capsys):
    for engine, flags, layout, devices in (
        ("tensorflow", ["--memory", "4GB"], "4 replicas x 2 devices, no", 2),
        ("jax", ["--memory", "3GB", "--parallel.tensor", "2"], "4 replicas x 2 devices in ", 1),
    ):
        base = [*BASE, "--engine", engine]
        text = bert(*base, *AUTO, "--devices", "8", *flags).out
        flags = shlex.split(text.partition("as flags:\n")[2].splitlines()[0])
        assert layout in text and main([*base, *flags]) == 0
        assert rows(capsys.readouterr().out) == rows(text) and len(rows(text)) == devices
    text = bert(*BASE, *AUTO, "--devices", "7", "--memory", "80GB").out
    assert "6 replicas x 1 device, no" in text and "1 of 7 devices unused" in text


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
