"""Every layout that is shipped runs, with its own stages and devices, on a model of smaller width."""

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
    """What tells the layout of a config from another."""
    settings, _ = load(PretrainSettings, ["--config", str(path), "--generated-dataset"], "test")
    parallel = settings.parallel
    return json.dumps([parallel.pipeline_stages, parallel.pipeline_device_mapping])


DIFFERENT = {
    stages_of(path): path.stem for path in sorted(configs_folder().glob("pretrain_*.json"))
}
DIFFERENT.pop("[null, null]")  # one device


def test_the_layouts_of_the_example_this_tool_recreates_are_shipped():
    mapped = [json.loads(key) for key in DIFFERENT]
    sizes = [[len(stage) for stage in stages] for stages, _ in mapped]
    for blocks in ([1, 4, 4, 4, 3], [4, 7, 7, 7, 3], [3, 7, 7, 8, 3], [1, 3, 2]):
        assert blocks in sizes


# Of those that cut the same blocks into as many stages on the same devices one is enough: tracing 24
# layers takes a minute.
RUN = {
    (tuple(json.loads(key)[1]), sum(map(len, json.loads(key)[0]))): name
    for key, name in DIFFERENT.items()
}


@pytest.mark.parametrize("config", RUN.values())
def test_a_shipped_layout_runs(config, capsys):
    flags = [word for name, value in NARROW.items() for word in (f"--{name}", str(value))]
    assert main(["pretrain", "--config", config, "--generated-dataset", *flags, "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert told.count("\nstep ") == 2
    stages = json.loads(next(key for key, name in DIFFERENT.items() if name == config))[0]
    # Its stages as a person reads them, and micro-batches that go through them.
    assert stages and "device 0: emb" in told and "schedule 1F1B" in told
