"""Configs and command lines of the original example, key by key and as a whole."""

import json
import re
from pathlib import Path

import pytest

from bert_cli.cli import main
from bert_cli.config.data import PreprocessSettings
from bert_cli.config.finetune import ClassifySettings, GlueSettings, SquadSettings
from bert_cli.config.pretrain import PretrainSettings
from bert_cli.config.use import ExportSettings
from bert_cli.errors import ConfigError
from bert_cli.files import with_checksum, write_json_atomically
from bert_cli.parse.load import leaves, load, load_file
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
KINDS = {"pretrain": PretrainSettings, "squad": SquadSettings, "glue": GlueSettings}


def loaded(tmp_path: Path, name: str, *flags: str, **more):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**CONFIGS[name], **more}), encoding="utf-8")
    return load(KINDS[name], ["--config", str(path), *flags], f"bert {name}")


def rejection(tmp_path: Path, name: str, *flags: str, **more) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, name, *flags, **more)
    return str(caught.value)


def at(settings, where: str):
    return dict(leaves(settings.model_dump(mode="json")))[where]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_of_the_original_loads_unchanged_and_has_a_plan(name, tmp_path):
    settings, found = loaded(tmp_path, name)
    batch = CONFIGS[name]["global_batch"]
    assert settings.global_batch.model_dump() == batch
    product = batch["replicas"] * batch["micro_batch_size"] * batch["grad_acc_steps_per_replica"]
    assert workload_of(settings).batch.examples == product
    given = [block for stage in CONFIGS[name]["ipu_config"]["pipeline_stages"] for block in stage]
    blocks = [block for stage in settings.parallel.pipeline_stages for block in stage]
    unused = {"enc_out", "pool"} - set(settings.last_blocks)
    assert blocks == [block for block in given if block not in unused]
    assert found.origins["parallel.pipeline_device_mapping"] == str(tmp_path / "mine.json")
    assert settings.wandb.enabled and settings.wandb.tags == ["a"]
    assert settings.pretrained_ckpt_path == CONFIGS[name].get("bert_model_name")
    assert any(key.endswith("per_pipeline_stage") for key in found.no_effect)
    assert ("enc_out and pool in parallel.pipeline_stages" in found.no_effect) == (name == "squad")
    assert ("max_predictions_per_seq" in found.no_effect) == (name == "squad")


def test_a_config_of_the_original_without_a_length_has_its_number_of_examples(tmp_path):
    longer = BERT | {"max_position_embeddings": 1024}
    for changes, flags, samples in (
        ({}, [], 460_849_152),
        ({"max_seq_length": 384}, [], 34_239_360),
        ({"total_num_train_samples": 7}, [], 7),
        ({}, ["--num-epochs", "2"], None),
        ({"bert_config": longer, "max_seq_length": 1024}, [], None),
    ):
        settings, _ = loaded(tmp_path, "pretrain", *flags, **changes)
        assert settings.total_num_train_samples == samples
    settings, _ = loaded(tmp_path, "squad")
    assert (settings.total_num_train_samples, settings.num_epochs) == (None, 3)


# Old key -> a value of it, our key and the value there.
VALUES = {
    "ipu_config.shard_weights": (False, "parallel.shard_weights", False),
    "enable_recomputation": (True, "parallel.recompute", True),
    "ipu_config.enable_recomputation": (True, "parallel.recompute", True),
    "optimizer_state_offchip": (True, "parallel.optimizer_state_offload", True),
    "ipu_config.optimizer_state_offchip": (True, "parallel.optimizer_state_offload", True),
    "replicated_tensor_sharding": (True, "parallel.replicated_tensor_sharding", True),
    "embedding_serialization_factor": (2, "parallel.embedding_serialization_factor", 2),
    "enable_stochastic_rounding": (False, "optimizer_opts.stochastic_rounding", False),
    "bert_config.max_seq_length": (64, "max_seq_length", 64),
    "bert_config.max_predictions_per_seq": (9, "max_predictions_per_seq", 9),
    "bert_model_name": ("a/b", "pretrained_ckpt_path", "a/b"),
    "ckpt_every_n_steps_per_execution": (50, "checkpoint_every_steps", 50),
    "global_batches_per_log": (7, "log_every_steps", 7),
    "enable_wandb": (False, "wandb.enabled", False),
    "log_to_wandb": (True, "wandb.enabled", True),
    "wandb_tags": (["x", "y"], "wandb.tags", ["x", "y"]),
    "wandb_entity": ("us", "wandb.entity", "us"),
    "wandb_entity_name": ("us", "wandb.entity", "us"),
    "wandb_project_name": ("TF2", "wandb.project", "TF2"),
    "wandb_name": ("TF2", "wandb.project", "TF2"),
    "name": ("first", "wandb.name", "first"),
    "output_dir": ("runs/a", "save_ckpt_path", "runs/a"),
    "length_bins": (4, "length_buckets", 4),
    "cluster.say_waiting_after_seconds": (5.0, "cluster.report_waiting_after_seconds", 5.0),
}


def test_an_old_name_sets_ours_in_a_file_and_as_a_flag(tmp_path):
    tried = {*VALUES, *(old.replace("ipu_config", "parallel") for old in VALUES)}
    assert set(RENAMES) - tried == {"ipu_config", "splitter", "held_out_share"}
    words = ["a", "b", "--splitter", "lines"]
    assert load(PreprocessSettings, words, "bert preprocess")[0].sentence_splitter == "lines"
    words = ["--held-out-share", "0.3"]
    assert load(ClassifySettings, words, "bert classify")[0].held_out_fraction == 0.3
    path = tmp_path / "c.json"
    for old, (value, where, ours) in VALUES.items():
        small = {
            "max_seq_length": 128, "max_predictions_per_seq": 20, "global_batch": {"micro_batch_size": 2},
            "optimizer_opts": {"name": "AdamW", "learning_rate": ADAM},
        }  # fmt: skip
        small.pop(where, None)
        group, _, key = old.rpartition(".")
        path.write_text(json.dumps(small | ({group: {key: value}} if group else {key: value})))
        settings, _ = load(PretrainSettings, ["--config", str(path)], "bert pretrain")
        assert at(settings, where) == ours, old
        path.write_text(json.dumps(small))
        text = value if isinstance(value, str) else json.dumps(value)
        words = [f"--{old.replace('_', '-')}", text]
        settings, found = load(PretrainSettings, ["--config", str(path), *words], "bert pretrain")
        assert at(settings, where) == ours, old
        assert found.origins.get(where, words[0]) == words[0]


def test_two_names_of_a_setting_are_rejected(tmp_path):
    text = rejection(tmp_path, "pretrain", log_every_steps=3)
    assert "global_batches_per_log: is the old name of log_every_steps, which is also set" in text
    text = rejection(tmp_path, "pretrain", "--wandb-project-name", "p", "--wandb-name=n")
    assert "also set (--wandb-project-name)" in text
    for flags in ("--no-enable-wandb", "--wandb.enabled"), ("--no-wandb.enabled", "--enable-wandb"):
        text = rejection(tmp_path, "pretrain", *flags)
        assert "--enable-wandb: is the old name of --wandb.enabled, which" in text


def test_two_names_with_one_value_are_one_setting_as_in_the_settings_of_an_old_run(tmp_path):
    for old in (None, "runs/a"):
        settings, _ = loaded(tmp_path, "glue", output_dir=old, save_ckpt_path="runs/a")
        assert str(settings.save_ckpt_path) == "runs/a"
    text = rejection(tmp_path, "glue", output_dir="b", save_ckpt_path="runs/a")
    assert "output_dir: is the old name of save_ckpt_path, which is also set" in text


EXECUTIONS, STEPS = "ckpt_every_n_steps_per_execution", "global_batches_per_log"


def test_checkpoints_are_counted_in_executions_of_as_many_steps_as_a_log(tmp_path):
    for parent, own, flags, expected in (
        ({STEPS: 5}, {EXECUTIONS: 20}, [], (100, 5)),
        ({EXECUTIONS: 20, STEPS: 5}, {"checkpoint_every_steps": 7}, [], (7, 5)),
        ({}, {EXECUTIONS: 20, STEPS: 5}, ["--log-every-steps", "3"], (60, 3)),
        ({}, {STEPS: 5}, ["--ckpt-every-n-steps-per-execution", "20"], (100, 5)),
    ):
        base = {name: value for name, value in CONFIGS["pretrain"].items() if name != STEPS}
        (tmp_path / "parent.json").write_text(json.dumps(base | parent))
        path = tmp_path / "mine.json"
        path.write_text(json.dumps({"extends": "parent.json", **own}))
        settings, _ = load(PretrainSettings, ["--config", str(path), *flags], "bert pretrain")
        assert (settings.checkpoint_every_steps, settings.log_every_steps) == expected
    for more in ({EXECUTIONS: 20, STEPS: None}, {EXECUTIONS: "x", STEPS: 2}):
        assert "mine.json): got " in rejection(tmp_path, "pretrain", **more)


def test_a_key_without_effect_is_reported_in_a_file_and_as_a_flag(tmp_path):
    for name, old in FORMER.items():
        values = old.values
        reason = old.why
        if not reason or old.remedy:
            continue
        flag = f"--{name.replace('_', '-')}"
        assert loaded(tmp_path, "pretrain", **{name: bool(values)})[1].no_effect[name] == reason
        words = ("true",) if values else ("0.2", "0.3")
        settings, found = loaded(tmp_path, "pretrain", flag, *words, "--seed", "5")
        assert (found.no_effect[flag], settings.seed) == (reason, 5)
        refused = ([flag, "false"], [f"--no-bert-config.{flag[2:]}"]) if values else ()
        for words in refused:
            assert f"): {reason}; leave it out" in rejection(tmp_path, "pretrain", *words)
        if values:
            text = rejection(tmp_path, "pretrain", **{name: False})
            assert f"): {reason}; leave it out" in text


def test_a_former_setting_is_accepted_with_the_value_that_it_always_has(tmp_path):
    for key, value, refusal in (
        ("n_best_size", 20, "n_best_size (--n-best-size): is always 20; leave it out"),
        (
            "parallel.reduce_bucket_megabytes",
            64,
            "(--parallel.reduce-bucket-megabytes): is always 64; leave it",
        ),
        ("max_skipped_steps", 20, "a run ends after 20 gradients in a row that are not finite"),
        ("decay_shape", "1-sqrt", "decay-shape): is always 1-sqrt; leave it out"),
        ("bert_config.hidden_act", "gelu", "(--bert-config.hidden-act): got '21'; input should be"),
    ):
        group, _, name = key.rpartition(".")
        flag = f"--{key.replace('_', '-')}"
        for more in ({}, {group: {name: value}} if group else {name: value}):
            _, found = loaded(tmp_path, "squad", flag, str(value), **more)
            assert not any(name in where for where in found.no_effect)
        message = rejection(tmp_path, "squad", flag, "21")
        assert refusal in message and len(message.splitlines()) == 1


def test_a_run_recorded_with_another_value_of_a_former_setting_loads(tmp_path):
    record = loaded(tmp_path, "pretrain")[0].model_dump(mode="json")
    path = tmp_path / "settings.json"
    write_json_atomically(path, record)
    settings = load_file(PretrainSettings, path)
    record |= {"max_skipped_steps": 5, "decay_shape": "1-sqrt"}
    record["parallel"]["trace"] = "step"
    write_json_atomically(path, record)
    with pytest.raises(ConfigError, match=r"trace .*: is always none; leave it out"):
        load_file(PretrainSettings, path)
    write_json_atomically(path, with_checksum(record))
    assert load_file(PretrainSettings, path) == settings
    again, found = load(PretrainSettings, ["--config", str(path)], "bert pretrain")
    assert again.parallel == settings.parallel
    expected = {"max_skipped_steps": "it is always 20", "parallel.trace": "it is always none"}
    assert found.no_effect == expected
    write_json_atomically(path, with_checksum(record | {"decay_shape": "linear"}))
    with pytest.raises(ConfigError, match=r"decay_shape .*: is always 1-sqrt"):
        load_file(PretrainSettings, path)


def test_a_run_from_before_relations_went_loads_without_a_teacher_only(tmp_path):
    expected, _ = loaded(tmp_path, "pretrain")
    for group in ({}, {"teacher": None}, {"teacher": None, "relations": 1.0}):
        assert loaded(tmp_path, "pretrain", distillation=group)[0] == expected
    message = rejection(tmp_path, "pretrain", distillation={"teacher": "runs/large"})
    assert "mine.json): no such setting; leave it out, or finish a pre-training run that" in message
    assert "distillation" in rejection(tmp_path, "pretrain", distillation={"relations": 2.0})


def test_stochastic_rounding_of_the_original_needs_float16(tmp_path):
    flags = ["--precision", "float16"]
    old = {"enable_stochastic_rounding": True}
    _, found = loaded(tmp_path, "pretrain", **old)
    assert "weights are float32" in found.no_effect["enable_stochastic_rounding"]
    settings, found = loaded(tmp_path, "pretrain", *flags, **old)
    assert settings.optimizer_opts.stochastic_rounding
    assert "enable_stochastic_rounding" not in found.no_effect


# Command lines of its README and its benchmarks: config, flags, and either a setting with its value or
# what the refusal says.
COMMANDS = [
    ("pretrain", ["--dataset-dir", "a", "--total-num-train-samples", "300000", "--enable-wandb", "false"],
     ("wandb.enabled", False)),
    ("squad", ["--enable-wandb", "true", "--wandb-entity", "us"], ("wandb.entity", "us")),
    ("pretrain", ["--wandb-name", "mine", "--name", "first", "--logging", "DEBUG"], ("wandb.name", "first")),
    ("pretrain", ["--ipu-config.matmul-available-memory-proportion-per-pipeline-stage", "0.2"], ("seed", 1984)),
    ("pretrain", ["--generated-dataset=true", "--compile-only", "false"], ("generated_dataset", True)),
    ("pretrain", ["--train-file", "00.tfrecord", "--num-train-steps", "4"], "pass --dataset-dir, the folder"),
    ("pretrain", ["--num-train-steps", "4"], "--total-num-train-samples, the steps times the examples"),
    ("pretrain", ["--ipu-config"], "(--ipu-config): is a group of settings; set a value of the group, such as "),
    ("squad", ["--do-validation", "true", "--pretrained-ckpt-path", "./c/2/"], ("pretrained_ckpt_path", "./c/2/")),
    ("squad", ["--do-training=no", "--save-ckpt-path", "a/"], ("save_ckpt_path", "a")),
    ("glue", ["--glue-task", "mrpc", "--do-validation", "true", "--do-test", "false"], ("glue_task", "mrpc")),
]  # fmt: skip


def test_a_command_line_of_the_original_works_or_has_a_remedy(tmp_path, capsys):
    for name, flags, expected in COMMANDS:
        if isinstance(expected, str):
            assert expected in rejection(tmp_path, name, *flags)
        else:
            assert str(at(loaded(tmp_path, name, *flags)[0], expected[0])) == str(expected[1])
    loaded(tmp_path, "pretrain")
    assert main(["plan", "--config", str(tmp_path / "mine.json"), "--logging", "INFO"]) == 0
    assert "--logging has no effect here: a run always prints its lines" in capsys.readouterr().out


def test_a_flag_of_a_former_feature_is_accepted_while_off_and_else_refused_with_what_to_do():
    words = ["model", "out", "--format", "saved-model"]
    load(ExportSettings, [*words, "--no-texts"], "bert export")
    for flags, message in (
        (["--texts"], "--texts): is always false; leave it out: an export takes token ids "),
        (
            ["--push", "me/mine"],
            "(--push): no such setting; leave it out, and upload the folder of ",
        ),
        (["--push=me/mine"], "the folder of the export: hf upload OWNER/NAME OUT"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            load(ExportSettings, [*words, *flags], "bert export")
