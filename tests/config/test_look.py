"""The settings of what looks: a run's own command line is its check, and a machine needs no run."""

import pytest

from bert_cli.config.load import load
from bert_cli.config.tools import DoctorSettings, InspectSettings
from bert_cli.config.training import PretrainSettings
from bert_cli.errors import ConfigError


def doctor(*words: str) -> DoctorSettings:
    return load(DoctorSettings, words, "bert doctor")[0]


def test_without_a_setting_of_a_run_only_the_machine_is_looked_at(tmp_path):
    assert doctor().machine_only
    assert doctor("--json", str(tmp_path / "x.json")).machine_only
    assert doctor("--no-build").machine_only


def test_a_run_is_looked_at_with_its_own_flags():
    words = ["--config", "pretrain_tiny_128_phase1", "--generated-dataset", "--seed", "7"]
    settings = doctor(*words, "--json", "x.json")
    run = load(PretrainSettings, words, "bert pretrain")[0]
    assert not settings.machine_only
    assert settings.model_dump(include=set(run.model_fields_set)) == run.model_dump(
        include=set(run.model_fields_set)
    )
    assert str(settings.json_file) == "x.json"


def test_half_a_run_is_refused_with_what_it_lacks():
    with pytest.raises(ConfigError, match="max_seq_length: is not given"):
        doctor("--seed", "3")


def test_a_variable_that_is_not_set_is_left_for_the_doctor_to_find(monkeypatch):
    monkeypatch.delenv("DATASETS_DIR", raising=False)
    assert "$DATASETS_DIR" in str(doctor("--config", "pretrain_base_128_phase1").dataset_dir)


@pytest.mark.parametrize("words", [["--sample", "0"], ["--examples", "-1"], ["--seed", "-1"]])
def test_what_cannot_be_inspected_is_refused(words):
    with pytest.raises(ConfigError, match=words[0].removeprefix("--")):
        load(InspectSettings, ["folder", *words], "bert inspect")
