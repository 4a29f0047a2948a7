"""Configs and command lines of the original example, key by key and as a whole."""

import json
from operator import attrgetter
from pathlib import Path

import pytest
from support.orders import Meanings, order, refusal, rows_of, value_of
from support.settings import RUN

from bert_cli.parse.old_names import IGNORED, RENAMES, SWITCHES

ADAM = {"schedule_name": "up_down", "max_learning_rate": 2e-5, "warmup_frac": 0.1}
BERT = {
    "hidden_size": 768, "vocab_size": 30400, "num_attention_heads": 12, "num_hidden_layers": 12,
    "intermediate_size": 3072, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 512, "type_vocab_size": 2, "initializer_range": 0.02,
    "layer_norm_eps": 1e-12, "position_embedding_type": "absolute",
}  # fmt: skip


HID = ["hid"] * 4
# Configs of the original's shape: what all have, and that of each task.
COMMON = {
    "global_batch": {"replicas": 4, "micro_batch_size": 32, "grad_acc_steps_per_replica": 510},
    "optimizer_opts": {"name": "AdamW", "weight_decay_rate": 0.01, "learning_rate": ADAM},
    "seed": 1984, "global_batches_per_log": 1, "enable_wandb": True, "wandb_tags": ["a"],
    "dataset_dir": "./cache/",
}  # fmt: skip
LAST_STAGES = {
    "pretrain": [HID, ["enc_out", "pool", "heads"]],
    "squad": [[*HID, "enc_out", "pool"], ["qa_head"]],
    "glue": [HID, ["pool", "glue_head"]],
}
TASKS: dict[str, dict[str, object]] = {
    "pretrain": {
        "bert_config": BERT, "max_seq_length": 128, "max_predictions_per_seq": 20, "replace_layers": True,
        "use_outlining": True, "matmul_partials_type": "half", "fp_exceptions": False,
        "min_remote_tensor_size": 50000, "logging": "INFO", "use_prediction_bias": True,
    },
    "squad": {"bert_model_name": "bert-large-uncased", "num_epochs": 3, "max_predictions_per_seq": 20},
    "glue": {"bert_model_name": "bert-base-uncased", "num_epochs": 3},
}  # fmt: skip
CONFIGS = {
    name: {
        **COMMON,
        **TASKS[name],
        "ipu_config": {
            "pipeline_stages": [["emb"], HID, HID, *last],
            "pipeline_device_mapping": [0, 1, 2, 3, 0],
            "matmul_available_memory_proportion_per_pipeline_stage": [0.28, 0.26],
            "replicated_tensor_sharding": False,
        },
    }
    for name, last in LAST_STAGES.items()
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def loaded(line: str, **more):
    """Return what a command line makes of the original's config for its command, with more keys."""
    return order(line, CONFIGS[line.split()[0]] | more)


def refused(line: str, **more) -> str:
    return refusal(line, CONFIGS[line.split()[0]] | more)


def text_at(settings, where: str) -> str:
    return str(attrgetter(where)(settings))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_of_the_original_loads_unchanged_and_has_a_plan(name):
    settings, found = loaded(name)
    batch = CONFIGS[name]["global_batch"]
    assert settings.global_batch.model_dump(exclude_unset=True) == batch
    product = batch["replicas"] * batch["micro_batch_size"] * batch["grad_acc_steps_per_replica"]
    assert settings.global_batch.examples == product
    given = [block for stage in CONFIGS[name]["ipu_config"]["pipeline_stages"] for block in stage]
    blocks = [block for stage in settings.parallel.pipeline_stages for block in stage]
    unused = {"enc_out", "pool"} - set(settings.head.last_blocks)
    assert blocks == [block for block in given if block not in unused]
    assert found.origins["parallel.pipeline_device_mapping"] == "c.json"
    assert settings.wandb.enabled and settings.wandb.tags == ["a"]
    assert settings.pretrained_ckpt_path == CONFIGS[name].get("bert_model_name")
    assert any(key.endswith("per_pipeline_stage") for key in found.no_effect)
    assert ("enc_out and pool in parallel.pipeline_stages" in found.no_effect) == (name == "squad")
    assert ("max_predictions_per_seq" in found.no_effect) == (name == "squad")


# Old key -> our key and a value.
VALUES = {
    "ipu_config.shard_weights": ("parallel.shard_weights", False),
    "enable_recomputation": ("parallel.recompute", True),
    "ipu_config.enable_recomputation": ("parallel.recompute", True),
    "optimizer_state_offchip": ("parallel.optimizer_state_offload", True),
    "ipu_config.optimizer_state_offchip": ("parallel.optimizer_state_offload", True),
    "replicated_tensor_sharding": ("parallel.replicated_tensor_sharding", True),
    "embedding_serialization_factor": ("parallel.embedding_serialization_factor", 2),
    "enable_stochastic_rounding": ("optimizer_opts.stochastic_rounding", False),
    "bert_config.max_seq_length": ("max_seq_length", 64),
    "bert_config.max_predictions_per_seq": ("max_predictions_per_seq", 9),
    "bert_model_name": ("pretrained_ckpt_path", "a/b"),
    "ckpt_every_n_steps_per_execution": ("checkpoint_every_steps", 50),
    "global_batches_per_log": ("log_every_steps", 7),
    "enable_wandb": ("wandb.enabled", False),
    "log_to_wandb": ("wandb.enabled", True),
    "wandb_tags": ("wandb.tags", ["x", "y"]),
    "wandb_entity": ("wandb.entity", "us"),
    "wandb_entity_name": ("wandb.entity", "us"),
    "wandb_project_name": ("wandb.project", "TF2"),
    "wandb_name": ("wandb.project", "TF2"),
    "name": ("wandb.name", "first"),
    "output_dir": ("save_ckpt_path", "runs/a"),
}


def test_every_old_name_is_tried():
    tried = {*VALUES, *(old.replace("ipu_config", "parallel") for old in VALUES)}
    assert set(RENAMES) - tried == {"ipu_config"}


@pytest.mark.parametrize("old", VALUES)
def test_an_old_name_sets_ours_in_a_file_and_as_a_flag(old):
    where, value = VALUES[old]
    small = {name: default for name, default in RUN.items() if name != where}
    group, _, key = old.rpartition(".")
    in_file = {group: {key: value}} if group else {key: value}
    assert text_at(order("pretrain", small | in_file)[0], where) == str(value)
    flag = f"--{old.replace('_', '-')}"
    text = value if isinstance(value, str) else json.dumps(value)
    settings, found = order(["pretrain", flag, text], small)
    assert text_at(settings, where) == str(value)
    assert found.origins.get(where, flag) == flag


EXECUTIONS, STEPS = "ckpt_every_n_steps_per_execution", "global_batches_per_log"
PRETRAIN, SQUAD, GLUE = CONFIGS.values()
OPEN = {name: value for name, value in PRETRAIN.items() if name != STEPS}
LONG = {"bert_config": BERT | {"max_position_embeddings": 1024}, "max_seq_length": 1024}
LENGTH = "total_num_train_samples num_epochs"
INTERVALS = "checkpoint_every_steps log_every_steps"
MEANINGS: Meanings = {
    "a config of the original without a length has its number of examples": [
        ("pretrain", PRETRAIN, LENGTH, (460_849_152, None)),
        ("pretrain", PRETRAIN | {"max_seq_length": 384}, LENGTH, (34_239_360, None)),
        ("pretrain", PRETRAIN | {"total_num_train_samples": 7}, LENGTH, (7, None)),
        ("pretrain --num-epochs 2", PRETRAIN, LENGTH, (None, 2)),
        ("pretrain", PRETRAIN | LONG, LENGTH, (None, None)),
        ("squad", SQUAD, LENGTH, (None, 3)),
    ],
    "checkpoints are counted in executions of as many steps as a log": [
        ("pretrain", {"extends": "5_steps.json", EXECUTIONS: 20}, INTERVALS, (100, 5)),
        ("pretrain", {"extends": "20_times_5.json", "checkpoint_every_steps": 7}, INTERVALS, (7, 5)),
        ("pretrain --log-every-steps 3", OPEN | {EXECUTIONS: 20, STEPS: 5}, INTERVALS, (60, 3)),
        ("pretrain --ckpt-every-n-steps-per-execution 20", OPEN | {STEPS: 5}, INTERVALS, (100, 5)),
    ],
    "a command line of the original's README and benchmarks works": [
        ("pretrain --dataset-dir a --total-num-train-samples 3 --enable-wandb false", PRETRAIN, "wandb.enabled", False),
        ("squad --enable-wandb true --wandb-entity us", SQUAD, "wandb.entity", "us"),
        ("pretrain --wandb-name mine --name first --logging DEBUG", PRETRAIN, "wandb.name", "first"),
        ("pretrain --ipu-config.matmul-available-memory-proportion-per-pipeline-stage 0.2", PRETRAIN, "seed", 1984),
        ("pretrain --generated-dataset=true --compile-only false", PRETRAIN, "generated_dataset", True),
        ("squad --do-validation true --pretrained-ckpt-path ./c/2/", SQUAD, "pretrained_ckpt_path", "./c/2/"),
        ("squad --do-training=no --save-ckpt-path a/", SQUAD, "save_ckpt_path", Path("a")),
        ("glue --glue-task mrpc --do-validation true --do-test false", GLUE, "glue_task", "mrpc"),
    ],
}  # fmt: skip


@rows_of(MEANINGS)
def test_a_command_line_and_a_config_of_the_original_mean(line, config, names, value):
    Path("5_steps.json").write_text(json.dumps(OPEN | {STEPS: 5}))
    Path("20_times_5.json").write_text(json.dumps(OPEN | {EXECUTIONS: 20, STEPS: 5}))
    assert value_of(line, config, names) == value


def test_a_number_of_executions_that_is_no_number_is_rejected():
    for more in ({EXECUTIONS: 20, STEPS: None}, {EXECUTIONS: "x", STEPS: 2}):
        assert "c.json): got " in refused("pretrain", **more)


REASONS = IGNORED | {name: why for name, (_, why) in SWITCHES.items()}


@pytest.mark.parametrize("name", REASONS)
def test_a_key_without_effect_is_reported_in_a_file_and_as_a_flag(name):
    flag, why = f"--{name.replace('_', '-')}", REASONS[name]
    (words, *_) = SWITCHES.get(name, (["0.2 0.3"],))
    is_on = words[0] == "true"
    assert loaded("pretrain", **{name: is_on})[1].no_effect[name] == why
    settings, found = loaded(f"pretrain {flag} {words[0]} --seed 5")
    assert (found.no_effect[flag], settings.seed) == (why, 5)
    if name in SWITCHES:
        other = str(not is_on).lower()
        refusals = [refused(f"pretrain {flag} {other}"), refused("pretrain", **{name: not is_on})]
        refusals.append(refused(f"pretrain --bert-config.{flag[2:]} {other}"))
        assert all(f"): {why}; leave it out" in text for text in refusals)


def test_stochastic_rounding_of_the_original_needs_float16():
    name = "enable_stochastic_rounding"
    _, found = loaded("pretrain", **{name: True})
    assert "weights are float32" in found.no_effect[name]
    settings, found = loaded("pretrain --precision float16", **{name: True})
    assert settings.optimizer_opts.stochastic_rounding and name not in found.no_effect
