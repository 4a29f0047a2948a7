"""The layouts of the shipped configs run with their stages and devices, on a narrow model."""

import pytest
from support.tiny_models import TINY_RUN, flags_of

from bert_cli.cli import main
from bert_cli.config.load import load
from bert_cli.config.training import PretrainSettings

NARROW = {
    **TINY_RUN,
    "bert-config.num-hidden-layers": False,  # as the config says
    "global-batch.replicas": 1,
    "global-batch.grad-acc-steps-per-replica": 8,
    "dry-run": None,
}
SIZES = {
    "pretrain_tiny_128_phase1": [1, 3, 2],
    "pretrain_base_128_phase1": [1, 4, 4, 4, 3],
    "pretrain_large_128_phase1": [4, 7, 7, 7, 3],
    "pretrain_large_512_phase2": [3, 7, 7, 8, 3],
}
"""Blocks of each stage, as in the recreated example."""
TINY, *OTHERS = SIZES


def test_the_layouts_of_the_recreated_example_are_shipped():
    for config, sizes in SIZES.items():
        settings, _ = load(PretrainSettings, ["--config", config, "--generated-dataset"], "test")
        assert [len(stage) for stage in settings.parallel.pipeline_stages] == sizes


# Tracing 24 layers takes most of a minute.
@pytest.mark.parametrize(
    "config", [TINY, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_a_shipped_layout_runs(config, capsys):
    assert main(["pretrain", "--config", config, *flags_of(NARROW)]) == 0
    output = capsys.readouterr().out
    assert output.count("\nstep ") == 2
    # The description of its stages, and micro-batches that pass through them.
    assert "device 0: emb" in output and "schedule 1F1B" in output
