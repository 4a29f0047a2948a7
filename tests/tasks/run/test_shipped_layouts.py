"""Every layout of the shipped configs runs with its stages and devices, on a narrow model."""

import json
from pathlib import Path

import pytest

from bert_cli.cli import main
from bert_cli.config.load import configs_folder, load
from bert_cli.config.training import PretrainSettings

NARROW = {
    "bert-config.hidden-size": 32,
    "bert-config.num-attention-heads": 2,
    "bert-config.intermediate-size": 64,
    "bert-config.vocab-size": 100,
    "bert-config.max-position-embeddings": 32,
    "max-seq-length": 16,
    "max-predictions-per-seq": 3,
    "global-batch.micro-batch-size": 2,
    "global-batch.replicas": 1,
    "global-batch.grad-acc-steps-per-replica": 8,
}


def stages_of(path: Path) -> str:
    """The stages and devices of a config, as JSON."""
    settings, _ = load(PretrainSettings, ["--config", str(path), "--generated-dataset"], "test")
    parallel = settings.parallel
    return json.dumps([parallel.pipeline_stages, parallel.pipeline_device_mapping])


DIFFERENT = {
    stages_of(path): path.stem for path in sorted(configs_folder().glob("pretrain_*.json"))
}
DIFFERENT.pop("[null, null]")  # one device


def test_the_layouts_of_the_recreated_example_are_shipped():
    mapped = [json.loads(key) for key in DIFFERENT]
    sizes = [[len(stage) for stage in stages] for stages, _ in mapped]
    for blocks in ([1, 4, 4, 4, 3], [4, 7, 7, 7, 3], [3, 7, 7, 8, 3], [1, 3, 2]):
        assert blocks in sizes


# One of those that split the same blocks into as many stages on the same devices.
RUN = {
    (tuple(json.loads(key)[1]), sum(map(len, json.loads(key)[0]))): name
    for key, name in DIFFERENT.items()
}


def one_layer_a_stage(stages: list[list[str]]) -> list[list[str]]:
    """The same stages with at most one encoder layer each."""
    return [list(dict.fromkeys(stage)) for stage in stages]


@pytest.mark.parametrize("depth", ["quick", pytest.param("full", marks=pytest.mark.slow)])
@pytest.mark.parametrize("config", RUN.values())
def test_a_shipped_layout_runs(config, depth, capsys):
    """Tracing 24 layers takes most of a minute, so the quick form has one layer a stage."""
    stages = json.loads(next(key for key, name in DIFFERENT.items() if name == config))[0]
    changes = dict(NARROW)
    if depth == "quick":
        stages = one_layer_a_stage(stages)
        changes["bert-config.num-hidden-layers"] = sum(stage.count("hid") for stage in stages)
        changes["parallel.pipeline-stages"] = json.dumps(stages)
    flags = [word for name, value in changes.items() for word in (f"--{name}", str(value))]
    assert main(["pretrain", "--config", config, "--generated-dataset", *flags, "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert output.count("\nstep ") == 2
    # The description of its stages, and micro-batches that pass through them.
    assert stages and "device 0: emb" in output and "schedule 1F1B" in output
