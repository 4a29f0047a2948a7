"""What the records decide, packs and vocabulary, is known before anything is built."""

import json

import pytest

from bert_cli.config.memory import estimate
from bert_cli.config.training import PretrainSettings
from bert_cli.data.stream.stored import as_stored


def asked(**changes):
    run = {
        "max_seq_length": 128,
        "max_predictions_per_seq": 20,
        "global_batch": {"micro_batch_size": 4},
        "optimizer_opts": {"name": "LAMB", "learning_rate": {"max_learning_rate": 0.001}},
    }
    return PretrainSettings.model_validate(run | changes)


@pytest.fixture
def packed(tmp_path):
    (tmp_path / "corpus.json").write_text(json.dumps({"max_sequences_per_pack": 3}))
    return str(tmp_path)


def test_a_packed_folder_counts_as_if_the_setting_had_been_given(packed, tmp_path):
    alone = asked(dataset_dir=packed)
    found = as_stored(alone)
    assert found.max_sequences_per_pack == 3
    said = asked(dataset_dir=packed, max_sequences_per_pack=3)
    assert estimate(found) == estimate(said) != estimate(alone)
    several = [{"path": str(tmp_path / "none"), "weight": 1.0}, {"path": packed, "weight": 1.0}]
    assert as_stored(asked(dataset_dir=several)).max_sequences_per_pack == 3


@pytest.mark.parametrize("text", [None, "no JSON", "[]", "{}"])
def test_a_folder_that_says_nothing_changes_nothing(text, tmp_path):
    if text is not None:
        (tmp_path / "corpus.json").write_text(text)
    settings = asked(dataset_dir=str(tmp_path))
    assert as_stored(settings) is settings


def test_the_records_decide_the_vocabulary_where_the_settings_do_not(tmp_path):
    (tmp_path / "corpus.json").write_text(json.dumps({"vocab_size": 4096}))
    folder = str(tmp_path)
    found = as_stored(asked(dataset_dir=folder, bert_config={"hidden_size": 48}))
    assert (found.bert_config.vocab_size, found.bert_config.hidden_size) == (4096, 48)
    settings = asked(dataset_dir=folder, bert_config={"vocab_size": 30400})
    assert as_stored(settings) is settings


def test_what_the_settings_say_stays(packed):
    settings = asked(dataset_dir=packed, max_sequences_per_pack=2)
    assert as_stored(settings).max_sequences_per_pack == 2
