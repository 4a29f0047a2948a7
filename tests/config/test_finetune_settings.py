"""The settings of fine-tuning: how long a run is, and what follows from the model."""

import json

import pytest

from bert_cli.config.finetune import ClassifySettings, GlueSettings, SquadSettings
from bert_cli.config.help import help_of
from bert_cli.config.load import load
from bert_cli.errors import ConfigError


@pytest.fixture
def config(tmp_path):
    def write(**values):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(values))
        return ["--config", str(path)]

    return write


@pytest.mark.parametrize(
    ("in_config", "flags", "samples", "epochs"),
    [
        ({}, [], None, 2.0),
        ({"num_epochs": 5}, [], None, 5.0),
        # A flag wins over the config, whichever way it says how long the run is.
        ({"num_epochs": 5}, ["--total-num-train-samples", "40"], 40, 2.0),
        ({"total_num_train_samples": 40}, ["--num-epochs", "5"], None, 5.0),
        ({"total_num_train_samples": 40}, ["--total-num-train-samples", "50"], 50, 2.0),
        # As a run writes it into its settings.json: the default of the other.
        ({"total_num_train_samples": 40, "num_epochs": 2.0}, [], 40, 2.0),
    ],
)
def test_a_run_is_as_long_as_its_epochs_or_its_samples_say(
    config, in_config, flags, samples, epochs
):
    settings, _ = load(SquadSettings, [*config(**in_config), *flags], "bert squad")
    assert (settings.total_num_train_samples, settings.num_epochs) == (samples, epochs)


@pytest.mark.parametrize(
    ("in_config", "flags"),
    [
        ({"total_num_train_samples": 40, "num_epochs": 5}, []),
        ({}, ["--total-num-train-samples", "40", "--num-epochs", "5"]),
    ],
)
def test_two_lengths_from_one_place_are_refused(config, in_config, flags):
    with pytest.raises(ConfigError, match=r"total_num_train_samples \(40\) and num_epochs \(5\)"):
        load(SquadSettings, [*config(**in_config), *flags], "bert squad")


def test_without_a_length_an_example_is_as_long_as_the_model_reads():
    shape = ["--bert-config.max-position-embeddings", "300"]
    assert load(SquadSettings, shape, "bert squad")[0].max_seq_length == 300
    assert load(ClassifySettings, [], "bert classify")[0].max_seq_length == 512
    given = [*shape, "--max-seq-length", "200"]
    assert load(SquadSettings, given, "bert squad")[0].max_seq_length == 200
    assert "512" in help_of(SquadSettings, "squad").partition("--max-seq-length")[2][:400]


def test_the_task_of_glue_is_the_original_s_where_none_is_given():
    assert load(GlueSettings, [], "bert glue")[0].glue_task == "mrpc"


def test_the_test_set_needs_a_folder_of_either_kind():
    assert load(GlueSettings, ["--do-test", "--output-dir", "out"], "bert glue")[0].do_test
    with pytest.raises(ConfigError, match="give --save-ckpt-path or --output-dir"):
        load(GlueSettings, ["--do-test"], "bert glue")
