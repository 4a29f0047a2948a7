"""Models and a run for the tests of prediction, export, averages and scores."""

import pytest
from support.hf_models import Models
from support.tiny_models import SENTENCES, pretrain_words, write_model, write_records

from bert_cli.cli import main


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Name -> folder of a random model of transformers with a tokenizer."""
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory):
    """Folder of a model, records and a run of six steps on two replicas, with held-out scores of steps 5 and 6."""
    home = tmp_path_factory.mktemp("pretrained")
    write_model(home / "model")
    write_records(home / "records", SENTENCES * 2, home / "model", masking="static")
    changes = {"validation_dir": home / "records", "evaluate_every_steps": 5}
    changes |= {"evaluation_examples": 30, "global_batch__replicas": 2}
    assert main(pretrain_words(home, **changes, total_num_train_samples=48)) == 0
    return home
