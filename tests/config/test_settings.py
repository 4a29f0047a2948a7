"""What settings derive, what they reject, the plan of a run, and the standard benchmarks."""

import json
import re
from pathlib import Path

import pytest
from support.settings import merged

from bert_cli.cli import main
from bert_cli.commands import COMMANDS, split_command
from bert_cli.config import finetune
from bert_cli.config.bench import (
    BenchPretrainSettings,
    BenchSquadSettings,
    benchmarks,
    expand_benchmark,
)
from bert_cli.config.data import TokenizeSettings
from bert_cli.config.markers import recorded
from bert_cli.config.pretrain import PretrainSettings
from bert_cli.errors import ConfigError
from bert_cli.parse.load import load
from bert_cli.planning.layout import propose
from bert_cli.planning.workload import laid_out, workload_of

SMALL = {
    "max_seq_length": 32,
    "max_predictions_per_seq": 5,
    "bert_config": {"num_hidden_layers": 2, "max_position_embeddings": 64},
    "global_batch": {"micro_batch_size": 2},
    "optimizer_opts": {"name": "LAMB", "learning_rate": {"max_learning_rate": 0.006}},
}
TINY = ["--config", "pretrain_tiny_128_phase1"]


@pytest.fixture
def config(tmp_path):
    def write(values: dict) -> list[str]:
        path = tmp_path / "c.json"
        path.write_text(json.dumps(values))
        return ["--config", str(path)]

    return write


def rejection(kind, *words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(kind, words, "bert command")
    return str(caught.value)


def layout(stages: list[list[str]], devices: list[int]) -> dict:
    return {"parallel": {"pipeline_stages": stages, "pipeline_device_mapping": devices}}


LAST = ["enc_out", "pool", "heads"]
GROUP = {"architecture": "groupbert", "hidden_size": 96, "intermediate_size": 100}
UNIT = {"scaling": "unit"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_seq_length": 65}, "max_seq_length (c.json): 65 is more than bert_config.max_position_embeddings (64)"),
        ({"max_predictions_per_seq": 30}, "max_predictions_per_seq (c.json): 30 is more than the 29 tokens"),
        ({"optimizer_opts": {"stochastic_rounding": True}}, "has no effect with precision"),
        ({"optimizer_opts": {"name": "AdamW", "no_layer_adaptation": []}}, "has no effect with name"),
        ({"evaluate_every_steps": 5}, "evaluate_every_steps (c.json): has no effect without validation_dir or p"),
        ({"bert_config": {"hidden_size": 64, "num_attention_heads": 5}}, "5 does not divide hidden_size (64)"),
        ({"bert_config": {"conv_group_size": 8}}, "conv_group_size (c.json): has no effect with architecture 'bert'"),
        ({"bert_config": GROUP | {"conv_group_size": 7}}, "conv_group_size (c.json): 7 does not divide hidden_size"),
        ({"bert_config": GROUP | {"ffn_groups": 6}}, "ffn_groups (c.json): 6 does not divide intermediate_size (100)"),
        ({"bert_config": GROUP | {"conv_kernel_size": 4}}, "conv_kernel_size (c.json): 4 is even"),
        ({"bert_config": GROUP | {"conv_groups": 4}}, "conv_groups (c.json): no such setting; did you mean 'conv_"),
        ({"optimizer_opts": {"learning_rate": {"warmup_power": 0.5}}}, "warmup_power (c.json): has no effect without"),
        (layout([["emb"], ["hid*2"], LAST], [0, 1, 2]), "[0, 1, 2] separates emb and heads"),
        (layout([["emb", "hid*3", *LAST]], [0]), "lists emb, hid*3, enc_out, pool, heads; the model has emb, hid*2"),
        (layout([["emb", "hidden*2", *LAST]], [0]), "stage 0 names 'hidden*2', which is not a block"),
        (layout([["emb", "hid*2", *LAST]], [0, 1]), "lists 2 devices for 1 stage; set one for each stage"),
        (layout([["emb"], ["hid*2", *LAST]], [1, 1]), "[1, 1] leaves a device out"),
        ({"parallel": {"pipeline_stages": [["emb", "hid*2", *LAST]]}}, "pipeline_stages (c.json): needs pipeline_dev"),
        ({"generated_dataset": True, "length_buckets": 4}, "length_buckets (c.json): has no effect with generated"),
        ({"dataset_dir": "a", "dataset_cache": "b"}, "dataset_cache (c.json): has no effect without records"),
        ({"engine": "jax", "compile": "nothing"}, "compile (c.json): has no effect without engine tensorflow"),
        ({"engine": "jax", "parallel": {"tensor": 5}}, "5 does not divide bert_config.num_attention_heads (12); choo"),
        ({"engine": "jax", "parallel": {"tensor": [1, 2, 2]}}, "parallel.tensor (c.json)"),
        ({"engine": "jax", "parallel": {"tensor": 0}}, "parallel.tensor"),
        ({"cluster": {"rank": 0}}, "cluster.rank (c.json): has no effect without workers"),
        ({"cluster": {"rank": 2, "workers": ["a:1", "b:1"]}}, "2 is not less than the number of workers, 2"),
        (UNIT | {"bert_config": {"architecture": "groupbert"}}, "architecture (c.json): groupbert cannot be combined"),
        (UNIT | {"bert_config": {"initializer_range": 0.1}}, "initializer_range (c.json): 0.1 cannot be combined with"),
        (UNIT | {"optimizer_opts": {"max_gradient_norm": 1.0}}, "norm (c.json): 1.0 cannot be combined with"),
        (UNIT | {"optimizer_opts": {"loss_scaling": 4096.0}}, "loss_scaling (c.json): 4096.0 cannot be combined with"),
    ],
)  # fmt: skip
def test_training_settings_that_contradict_one_another_are_rejected(changes, message, config):
    text = rejection(PretrainSettings, *config(merged(SMALL, changes)))
    assert message in re.sub(r"/\S*/", "", text) and len(text.splitlines()) == 1


TWO_STAGES = layout([["emb", "hid*2"], ["enc_out", "pool", "heads"]], [0, 0])["parallel"]
AUTO = {"layout": "auto", **TWO_STAGES}


@pytest.mark.parametrize(
    ("engine", "parallel", "remedy"),
    [
        ("jax", TWO_STAGES, "pass --parallel.layout auto, or pass --engine tensorflow"),
        ("jax", {"schedule": "GPipe"}, "leave it out, or pass --engine tensorflow"),
        ("jax", {"recompute_by": "stage", "recompute": True}, "leave it out, or pass --engine tensorflow"),
        ("jax", {"optimizer_state_offload": True}, "leave it out, or pass --engine tensorflow"),
        ("jax", {"reduce_precision": "bfloat16"}, "leave it out, or pass --engine tensorflow"),
        ("tensorflow", {"tensor": 2}, "leave it out, or pass --engine jax"),
        ("tensorflow", {"tensor": [2, 2]}, "leave it out, or pass --engine jax"),
        ("tensorflow", {"shard_weights": True}, "leave it out, or pass --engine jax"),
    ],
)  # fmt: skip
def test_an_engine_refuses_the_settings_of_the_other_by_name(engine, parallel, remedy, config):
    other = {"tensorflow": "jax", "jax": "tensorflow"}[engine]
    values = SMALL | {"parallel": parallel}
    assert load(PretrainSettings, config(values | {"engine": other}), "bert command")
    text = rejection(PretrainSettings, *config(values | {"engine": engine}))
    name = next(iter(parallel))
    expected = f"parallel.{name} (c.json): has no effect without engine {other}; {remedy}"
    assert re.sub(r"/\S*/", "", text) == expected


def test_engine_jax_takes_one_stage_or_a_layout_that_is_chosen_and_one_or_two_numbers_of_tensor(
    config,
):
    one = layout([["emb", "hid*2", *LAST]], [0])["parallel"]
    for parallel in (one, AUTO):
        words = config(SMALL | {"engine": "jax", "parallel": parallel})
        assert load(PretrainSettings, words, "bert command")
    for tensor, shape in ((2, (2, 1)), ([2], (2, 1)), ([2, 3], (2, 3))):
        values = SMALL | {"engine": "jax", "parallel": {"tensor": tensor}}
        settings, _ = load(PretrainSettings, config(values), "bert command")
        assert settings.parallel.tensor_shape == shape


def test_a_plain_run_writes_no_settings_of_other_architectures(config):
    """Runs from before them resume, and a file that names the architecture keeps it."""
    dumps = []
    for architecture in ("bert", "groupbert"):
        values = merged(SMALL, {"bert_config": {"architecture": architecture}})
        settings, _ = load(PretrainSettings, config(values), "bert pretrain")
        assert settings.model_dump(exclude_unset=True)["bert_config"] == values["bert_config"]
        dumps.append(settings.model_dump(mode="json"))
    plain, grouped = (dump["bert_config"] for dump in dumps)
    added = {"architecture", "conv_kernel_size", "conv_group_size", "ffn_groups"}
    assert grouped.keys() - plain.keys() == added
    assert "warmup_power" not in dumps[0]["optimizer_opts"]["learning_rate"]


@pytest.mark.parametrize("where", ["--dataset-dir", "--validation-dir"])
def test_a_cache_is_for_records_at_an_address(where, config):
    flags = [*config(SMALL | {"dataset_dir": "a"}), where, "s3://bucket/a", "--dataset-cache", "b"]
    assert load(PretrainSettings, flags, "bert pretrain")[0].dataset_cache == Path("b")


def test_a_run_has_a_number_of_epochs_or_of_samples(config):
    for in_config, flags, samples, epochs in (
        ({}, [], None, 2.0),
        # A flag overrides the config, whichever of the two lengths it gives.
        ({"num_epochs": 5}, ["--total-num-train-samples", "40"], 40, 2.0),
        ({"total_num_train_samples": 40}, ["--num-epochs", "5"], None, 5.0),
        ({"total_num_train_samples": 40}, ["--total-num-train-samples", "50"], 50, 2.0),
        # As in the settings.json of a run: the default of the other.
        ({"total_num_train_samples": 40, "num_epochs": 2.0}, [], 40, 2.0),
    ):
        settings, _ = load(finetune.SquadSettings, [*config(in_config), *flags], "bert squad")
        assert (settings.total_num_train_samples, settings.num_epochs) == (samples, epochs)
    flags = ["--total-num-train-samples", "40", "--num-epochs", "5"]
    both = config({"total_num_train_samples": 40, "num_epochs": 5})
    for words in (flags, both):
        assert "both set the length" in rejection(finetune.SquadSettings, *words)


def test_a_measurement_uses_synthetic_examples_unless_a_flag_names_others(monkeypatch):
    monkeypatch.delenv("DATASETS_DIR", raising=False)
    for kind, flags, synthetic in (
        (BenchPretrainSettings, TINY, True),
        (BenchPretrainSettings, [*TINY, "--no-generated-dataset"], False),
        (BenchPretrainSettings, [*TINY, "--dataset-dir", "data/128"], False),
        (BenchSquadSettings, ["--config", "squad_base", "--train-file", "train.json"], False),
    ):
        assert load(kind, flags, "bert bench")[0].generated_dataset == synthetic, flags
    flags = [*TINY, "--parallel.layout", "auto", "--json", "x.json"]
    given = load(BenchPretrainSettings, flags, "bert bench")[0]
    chosen = laid_out(given, propose(workload_of(given), "GPU", 1, 10**11, 1))
    assert chosen.json_file == Path("x.json") and chosen.generated_dataset


def test_a_standard_benchmark_is_a_named_command_line_that_flags_override(capsys):
    assert main(["bench", "--list"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    for name, (_, words) in benchmarks().items():
        command, rest = split_command(expand_benchmark(["bench", name]))
        assert command == " ".join(words[:2]) and f"bert {command}" in lines[name]
        settings, _ = load(COMMANDS[command].settings_class(), rest, f"bert {command}")
        assert settings.generated_dataset
    for words, message in ((["tiny_129"], "did you mean 'tiny_128'?"), ([], "bert bench --list")):
        assert main(["bench", *words]) == 2
        assert message in capsys.readouterr().err
    words = expand_benchmark(["bench", "base_128", "--global-batch.replicas=2", "--steps", "3"])
    settings, _ = load(BenchPretrainSettings, words[2:], "bert bench pretrain")
    assert (settings.global_batch.replicas, settings.steps) == (2, 3)
    assert settings.parallel.layout == "auto"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], 20),
        (["--sequence-length", "384"], 56),
        (["--sequence-length", "512"], 76),
        (["--sequence-length", "64"], 10),
        (["--sequence-length", "512", "--masked-lm-prob", "0.3"], 154),
        (["--sequence-length", "512", "--mask-tokens", "20"], 20),
    ],
)
def test_the_number_of_masked_tokens_follows_from_the_length(flags, expected):
    words = ["in", "out", "--vocab", "vocab", *flags]
    assert load(TokenizeSettings, words, "bert tokenize")[0].mask_tokens == expected


def test_a_manifest_records_marked_settings_and_later_ones_only_where_they_are_set():
    paths = {"input": "a", "out": "b", "vocab": "c", "processes": 7}
    usual = recorded(TokenizeSettings.model_validate(paths))
    assert usual["masking"] == "static" and usual["random_seed"] == 12345
    assert not {*paths, "executor", "nsp", "text_field", "documents"} & {*usual}
    chosen = recorded(TokenizeSettings.model_validate({**paths, "nsp": False, "text_field": "x"}))
    assert chosen == {**usual, "nsp": False, "text_field": "x"}
