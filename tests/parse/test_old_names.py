"""Configs and command lines of the original example, key by key and as a whole."""

import json
from operator import attrgetter
from pathlib import Path

import pytest
from support.orders import Meanings, order, refusal, rows_of, value_of
from support.settings import RUN

from bert_cli.cli import main
from bert_cli.config.pretrain import PretrainSettings
from bert_cli.errors import ConfigError
from bert_cli.files import with_checksum, write_json_atomically
from bert_cli.parse.load import load_file
from bert_cli.parse.old_names import FORMER, RENAMES
from bert_cli.planning.workload import workload_of

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
    assert settings.global_batch.model_dump() == batch
    product = batch["replicas"] * batch["micro_batch_size"] * batch["grad_acc_steps_per_replica"]
    assert workload_of(settings).batch.examples == product
    given = [block for stage in CONFIGS[name]["ipu_config"]["pipeline_stages"] for block in stage]
    blocks = [block for stage in settings.parallel.pipeline_stages for block in stage]
    unused = {"enc_out", "pool"} - set(settings.last_blocks)
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
    assert set(RENAMES) - tried == {"ipu_config", "splitter", "held_out_share"}


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


def test_two_names_of_a_setting_are_rejected():
    text = refused("pretrain", log_every_steps=3)
    assert "global_batches_per_log: is the old name of log_every_steps, which is also set" in text
    text = refused("pretrain --wandb-project-name p --wandb-name=n")
    assert "also set (--wandb-project-name)" in text
    for flags in ("--no-enable-wandb --wandb.enabled", "--no-wandb.enabled --enable-wandb"):
        text = refused(f"pretrain {flags}")
        assert "--enable-wandb: is the old name of --wandb.enabled, which" in text


def test_two_names_with_one_value_are_one_setting_as_in_the_settings_of_an_old_run():
    for old in (None, "runs/a"):
        settings, _ = loaded("glue", output_dir=old, save_ckpt_path="runs/a")
        assert str(settings.save_ckpt_path) == "runs/a"
    text = refused("glue", output_dir="b", save_ckpt_path="runs/a")
    assert "output_dir: is the old name of save_ckpt_path, which is also set" in text


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
    "other commands have old names, too": [
        ("preprocess a b --splitter lines", {}, "sentence_splitter", "lines"),
        ("classify --held-out-share 0.3", {}, "held_out_fraction", 0.3),
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


IGNORED = [name for name, old in FORMER.items() if old.why and not old.remedy]


@pytest.mark.parametrize("name", IGNORED)
def test_a_key_without_effect_is_reported_in_a_file_and_as_a_flag(name):
    old = FORMER[name]
    flag = f"--{name.replace('_', '-')}"
    assert loaded("pretrain", **{name: bool(old.values)})[1].no_effect[name] == old.why
    words = "true" if old.values else "0.2 0.3"
    settings, found = loaded(f"pretrain {flag} {words} --seed 5")
    assert (found.no_effect[flag], settings.seed) == (old.why, 5)
    if old.values:
        refusals = [refused(f"pretrain {flag} false"), refused("pretrain", **{name: False})]
        refusals.append(refused(f"pretrain --no-bert-config.{flag[2:]}"))
        assert all(f"): {old.why}; leave it out" in text for text in refusals)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("n_best_size", 20, "n_best_size (--n-best-size): is always 20; leave it out"),
        ("parallel.reduce_bucket_megabytes", 64, "(--parallel.reduce-bucket-megabytes): is always 64; leave it"),
        ("max_skipped_steps", 20, "a run ends after 20 gradients in a row that are not finite"),
        ("decay_shape", "1-sqrt", "decay-shape): is always 1-sqrt; leave it out"),
        ("bert_config.hidden_act", "gelu", "(--bert-config.hidden-act): got '21'; input should be"),
    ],
)  # fmt: skip
def test_a_former_setting_is_accepted_with_the_value_that_it_always_has(key, value, message):
    group, _, name = key.rpartition(".")
    flag = f"--{key.replace('_', '-')}"
    for more in ({}, {group: {name: value}} if group else {name: value}):
        _, found = loaded(f"squad {flag} {value}", **more)
        assert not any(name in where for where in found.no_effect)
    text = refused(f"squad {flag} 21")
    assert message in text and len(text.splitlines()) == 1


def test_a_run_recorded_with_another_value_of_a_former_setting_loads():
    record = loaded("pretrain")[0].model_dump(mode="json")
    path = Path("settings.json")
    write_json_atomically(path, record)
    settings = load_file(PretrainSettings, path)
    record |= {"max_skipped_steps": 5, "decay_shape": "1-sqrt"}
    record["parallel"]["trace"] = "step"
    write_json_atomically(path, record)
    with pytest.raises(ConfigError, match=r"trace .*: is always none; leave it out"):
        load_file(PretrainSettings, path)
    write_json_atomically(path, with_checksum(record))
    assert load_file(PretrainSettings, path) == settings
    again, found = order("pretrain --config settings.json")
    assert again.parallel == settings.parallel
    expected = {"max_skipped_steps": "it is always 20", "parallel.trace": "it is always none"}
    assert found.no_effect == expected
    write_json_atomically(path, with_checksum(record | {"decay_shape": "linear"}))
    with pytest.raises(ConfigError, match=r"decay_shape .*: is always 1-sqrt"):
        load_file(PretrainSettings, path)


def test_a_run_from_before_relations_went_loads_without_a_teacher_only():
    expected, _ = loaded("pretrain")
    for group in ({}, {"teacher": None}, {"teacher": None, "relations": 1.0}):
        assert loaded("pretrain", distillation=group)[0] == expected
    message = refused("pretrain", distillation={"teacher": "runs/large"})
    assert "c.json): no such setting; leave it out, or finish a pre-training run that" in message
    assert "distillation" in refused("pretrain", distillation={"relations": 2.0})


def test_stochastic_rounding_of_the_original_needs_float16():
    name = "enable_stochastic_rounding"
    _, found = loaded("pretrain", **{name: True})
    assert "weights are float32" in found.no_effect[name]
    settings, found = loaded("pretrain --precision float16", **{name: True})
    assert settings.optimizer_opts.stochastic_rounding and name not in found.no_effect


def test_a_flag_without_effect_is_reported(capsys):
    loaded("pretrain")
    assert main(["plan", "pretrain", "--config", "c.json", "--logging", "INFO"]) == 0
    assert "--logging has no effect here: a run always prints its lines" in capsys.readouterr().out
