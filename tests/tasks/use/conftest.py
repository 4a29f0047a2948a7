"""Models and a run for the tests of prediction, export, averages and scores."""

import pytest
from support.hf_models import Models
from support.tiny_models import write_model, write_records

from bert_cli.cli import main

TEXT = ["The good plot was not very fine.", "Bad music is very bad, and it is not fine."] * 40
RUN = [
    "--max-seq-length", "32", "--max-predictions-per-seq", "5", "--global-batch.micro-batch-size", "4",
    "--global-batch.replicas", "2", "--total-num-train-samples", "48", "--checkpoint-every-steps", "1",
    "--keep-checkpoints", "99", "--evaluate-every-steps", "5", "--evaluation-examples", "30",
    "--optimizer-opts.name", "AdamW", "--optimizer-opts.learning-rate.max-learning-rate", "0.003",
]  # fmt: skip


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Name -> folder of a random model of transformers with a tokenizer."""
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory):
    """Folder of a model, records and a run of six steps on two replicas, with held-out scores of steps 5 and 6."""
    home = tmp_path_factory.mktemp("pretrained")
    write_model(home / "model")
    write_records(home / "records", TEXT, home / "model", masking="static")
    flags = {"dataset-dir": "records", "validation-dir": "records", "save-ckpt-path": "run"}
    flags["pretrained-ckpt-path"] = "model"
    words = [word for flag, name in flags.items() for word in (f"--{flag}", str(home / name))]
    assert main(["pretrain", *words, *RUN]) == 0
    return home
