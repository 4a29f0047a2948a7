"""The settings of a measurement: made-up examples unless a flag names others, and nothing without effect."""

import json

import pytest

from bert_cli.cli import main
from bert_cli.commands import COMMANDS, split_command
from bert_cli.config.bench import (
    KINDS,
    BenchDataSettings,
    BenchPretrainSettings,
    BenchSquadSettings,
    benchmarks,
    expand_benchmark,
)
from bert_cli.config.load import find_config, load
from bert_cli.errors import ConfigError

CONFIG = ["--config", "pretrain_tiny_128_phase1"]


def pretrain(*flags: str) -> BenchPretrainSettings:
    return load(BenchPretrainSettings, [*CONFIG, *flags], "bert bench pretrain")[0]


def test_a_config_that_names_a_corpus_is_measured_on_made_up_examples(monkeypatch):
    monkeypatch.delenv("DATASETS_DIR", raising=False)
    assert pretrain().generated_dataset
    assert not pretrain("--no-generated-dataset").generated_dataset


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        (BenchPretrainSettings, [*CONFIG, "--dataset-dir", "data/128"]),
        (BenchSquadSettings, ["--dataset-dir", "data/squad"]),
        (BenchSquadSettings, ["--config", "squad_base", "--train-file", "train.json"]),
    ],
)
def test_a_flag_that_names_examples_is_measured_on_those(kind, flags):
    assert not load(kind, flags, "bert bench")[0].generated_dataset


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--from", "4"], "from has no effect without sweep"),
        (["--most", "4"], "most has no effect without sweep"),
        (["--memory", "4GB"], "memory has no effect without sweep"),
        (["--sweep", "micro-batch", "--from", "8", "--most", "4"], r"most \(4\) is less than from"),
        (["--sweep", "micro-batch", "--memory", "4 apples"], "no size of a memory"),
        (["--no-checkpoint", "--checkpoint-dir", "x"], "checkpoint_dir has no effect"),
        (["--dry-run"], "dry_run has no effect on a measurement"),
        (["--steps", "0"], "--steps"),
    ],
)
def test_what_would_have_no_effect_is_refused(flags, told):
    with pytest.raises(ConfigError, match=told):
        pretrain(*flags)


def test_megabytes_are_of_made_up_text():
    with pytest.raises(ConfigError, match="megabytes has no effect"):
        load(BenchDataSettings, ["text", "--megabytes", "3"], "bert bench data")


def test_a_command_may_have_two_words():
    assert split_command(["bench", "data", "a"]) == ("bench data", ["a"])
    assert split_command(["bench", "--list"]) == ("bench", ["--list"])
    assert split_command(["data", "a", "b"]) == ("data", ["a", "b"])


@pytest.mark.parametrize("name", benchmarks())
def test_every_standard_benchmark_can_be_read_and_says_what_it_is(name):
    one = benchmarks()[name]
    assert one.kind in KINDS and one.about.endswith(".")
    command, rest = split_command(expand_benchmark(["bench", name]))
    settings, _ = load(COMMANDS[command].settings_class(), rest, f"bert {command}")
    assert command == f"bench {one.kind}"
    assert one.kind == "data" or settings.generated_dataset


def test_a_flag_behind_a_benchmarks_name_wins():
    words = expand_benchmark(["bench", "base_128", "--global-batch.replicas=2", "--steps", "3"])
    assert words.count("--global-batch.replicas") == 0
    settings, _ = load(BenchPretrainSettings, words[2:], "bert bench pretrain")
    assert (settings.global_batch.replicas, settings.steps) == (2, 3)
    assert settings.parallel.layout == "auto"


def test_a_name_that_there_is_not_is_answered_with_the_nearest_one(capsys):
    assert main(["bench", "tiny_129"]) == 2
    assert "did you mean 'tiny_128'?" in capsys.readouterr().err
    assert main(["bench"]) == 2
    assert "bert bench --list" in capsys.readouterr().err


def test_the_list_tells_every_benchmark_with_its_command_line(capsys):
    assert main(["bench", "--list"]) == 0
    told = capsys.readouterr().out.splitlines()
    for name, one in benchmarks().items():
        (line,) = [line for line in told if line.split()[0] == name]
        assert one.about in line and f"bert bench {one.kind}" in line


def test_the_list_of_benchmarks_is_no_config():
    with pytest.raises(ConfigError) as refused:
        load(BenchPretrainSettings, ["--config", "benchmarks"], "bert bench pretrain")
    assert "no such file" in str(refused.value)
    for one in benchmarks().values():
        assert one.config is None or find_config(one.config).is_file()


def test_settings_of_a_measurement_survive_a_change_of_layout_and_shape(tmp_path):
    from bert_cli.config import layout

    json_file = tmp_path / "figures.json"
    settings = pretrain("--parallel.layout", "auto", "--json", str(json_file))
    chosen = layout.propose(settings, 1, 10**11, 1)
    assert chosen.json_file == json_file and chosen.generated_dataset
    assert json.loads(chosen.model_dump_json())["steps"] == settings.steps
