"""Folders that are made once by a worker, for the tests of several files; a test that changes one copies it first."""

import json

import pytest
from support.tiny_models import SENTENCES, pretrain_words, write_model, write_records

from bert_cli.cli import main
from bert_cli.files import with_checksum


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory):
    """Folder of a model, records and a run of six steps, with held-out scores of steps 5 and 6.

    It was trained on one replica, which takes 4 s less. Its settings say two: no reader of a run needs the devices.
    """
    home = tmp_path_factory.mktemp("pretrained")
    write_model(home / "model")
    write_records(home / "records", SENTENCES * 2, home / "model", masking="static")
    changes = {"validation_dir": home / "records", "evaluate_every_steps": 5}
    changes |= {"evaluation_examples": 30, "global_batch__grad_acc_steps_per_replica": 2}
    assert main(pretrain_words(home, **changes, total_num_train_samples=48)) == 0
    settings = json.loads((home / "run/settings.json").read_text())
    del settings["own_crc32c"]
    settings["global_batch"] |= {"replicas": 2, "grad_acc_steps_per_replica": 1}
    (home / "run/settings.json").write_text(json.dumps(with_checksum(settings)))
    return home
