"""What command lines and configs mean: a line, a config, the names of settings, and their values."""

import json
from pathlib import Path

from support.orders import Meanings, rows_of, value_of
from support.settings import RUN

SMALL = RUN | {
    "global_batch": {"micro_batch_size": 2, "replicas": 1, "grad_acc_steps_per_replica": 3},
    "bert_config": {"num_hidden_layers": 2},
}
DEMO = "pretrain --config pretrain_demo_128_phase1"
TOKENIZE = "tokenize in out --vocab v.txt"
DESCRIBED = SMALL | {
    "about": {"what": "base", "command": "bert pretrain --config base.json", "expect": "little"},
    "dataset_dir": "a",
}
STEP = SMALL | {"global_batch": {"micro_batch_size": 4, "examples_per_step": 64}}
SIZES = ("micro_batch_size", "replicas", "grad_acc_steps_per_replica", "examples_per_step")
BATCH = " ".join(f"global_batch.{name}" for name in SIZES)
ACCUMULATION = "--global-batch.grad-acc-steps-per-replica 3"
AUTO = "pretrain --global-batch.micro-batch-size=auto"
LENGTH = "total_num_train_samples num_epochs"
SAMPLES = SMALL | {"total_num_train_samples": 540}
TWO_LENGTHS = {"num_epochs": 3, "total_num_train_samples": None}  # as in the settings.json of a run
JAX = SMALL | {"engine": "jax"}
LAST = ["hid*2", "enc_out", "pool", "heads"]
ONE_STAGE = {"pipeline_stages": [["emb", *LAST]], "pipeline_device_mapping": [0]}
REPLACED = ONE_STAGE | {"pipeline_stages": [["emb"], LAST], "layout": "auto"}
MEANINGS: Meanings = {
    "the last of equal flags counts": [
        (f"{DEMO} --seed 1 --seed=2", {}, "seed", 2),
        (f"{DEMO} --dry-run --no-dry-run", {}, "dry_run", False),
        (f"{DEMO} --wandb.enabled --wandb.enabled=false", {}, "wandb.enabled", False),
        (f"{DEMO} --dry-run --seed 3", {}, "dry_run", True),
    ],
    "a list is flags, words between commas, or JSON": [
        (f"{DEMO} --wandb.tags a,b --wandb.tags c", {}, "wandb.tags", ["a", "b", "c"]),
        (f"""{DEMO} --wandb.tags '["a,b"]'""", {}, "wandb.tags", ["a,b"]),
        (f"""{DEMO} --wandb.tags '"a,b", c d'""", {}, "wandb.tags", ["a,b", "c d"]),
        (f"{DEMO} --wandb.tags []", {}, "wandb.tags", []),
        (f"{DEMO} --dataset-dir a --dataset-dir b", {}, "dataset_paths", ["a", "b"]),
        (f"""{DEMO} --dataset-dir '[{{"path": "a", "weight": 2}}, "b"]'""", {}, "dataset_paths", ["a", "b"]),
    ],
    "a number may be one of several types": [
        (f"{DEMO} --optimizer-opts.loss-scaling 8", {}, "optimizer_opts.loss_scaling", 8.0),
    ],
    "a group is JSON, which its members override": [
        (f"""{DEMO} --global-batch '{{"micro_batch_size": 4}}'""", {}, "global_batch.micro_batch_size", 4),
        (f"""{DEMO} --global-batch.replicas 2 --global-batch '{{"replicas": 3}}'""", {}, "global_batch.replicas", 2),
    ],
    "a positional argument may stand between flags": [
        (TOKENIZE, {}, "input out vocab", (Path("in"), Path("out"), "v.txt")),
        ("runs a --json - b", {}, "folders json_file", ([Path("a"), Path("b")], Path("-"))),
        ("predict a --top 3 '-5, [MASK]'", {}, "text", "-5, [MASK]"),
    ],
    "a word after a switch is an argument, not its value": [
        ("tokenize --cased true out --vocab v", {}, "cased input", (True, Path("true"))),
        ("tokenize --cased=false true out --vocab v", {}, "cased", False),
        ("index --check a", {}, "check", True),
    ],
    "the number of masked tokens follows from the length": [
        (TOKENIZE, {}, "mask_tokens", 20),
        (f"{TOKENIZE} --sequence-length 384", {}, "mask_tokens", 56),
        (f"{TOKENIZE} --sequence-length 512", {}, "mask_tokens", 76),
        (f"{TOKENIZE} --sequence-length 64", {}, "mask_tokens", 10),
        (f"{TOKENIZE} --sequence-length 512 --masked-lm-prob 0.3", {}, "mask_tokens", 154),
        (f"{TOKENIZE} --sequence-length 512 --mask-tokens 20", {}, "mask_tokens", 20),
    ],
    "a measurement reads the examples of the run; standard benchmarks have synthetic ones": [
        ("bench pretrain --config pretrain_tiny_128_phase1", {}, "generated_dataset", False),
        ("bench pretrain --config bench_base_128", {}, "generated_dataset", True),
        ("bench pretrain --config bench_base_128 --steps 3", {}, "steps parallel.layout", (3, "auto")),
    ],
    "the description of a config is dropped when a flag changes its values": [
        ("pretrain", DESCRIBED, "about.what", "base"),
        ("pretrain --dataset-dir b", DESCRIBED, "about.what", "base"),
        ("pretrain --save-ckpt-path c", DESCRIBED, "about.what", "base"),
        ("pretrain --dry-run", DESCRIBED, "about.what", "base"),
        ("pretrain --total-num-train-samples 9", DESCRIBED, "about", None),
        ("pretrain --global-batch.replicas 2", DESCRIBED, "about", None),
    ],
    "the run folder has by default the name of the config": [
        ("pretrain", SMALL, "save_ckpt_path", Path("checkpoints/c")),
        ("pretrain", SMALL | {"save_ckpt_path": "b"}, "save_ckpt_path", Path("b")),
    ],
    "the accumulation follows from the examples of a step": [
        ("pretrain", STEP, BATCH, (4, 1, 16, None)),
        ("pretrain --global-batch.replicas 2", STEP, BATCH, (4, 2, 8, None)),
        (f"pretrain {ACCUMULATION}", STEP, BATCH, (4, 1, 3, None)),
        ("pretrain --global-batch.examples-per-step 32", STEP, BATCH, (4, 1, 8, None)),
        # Until the memory is known.
        (AUTO, STEP, BATCH, (1, 1, 64, 64)),
        (AUTO, SMALL, "global_batch.examples_per_step", 1 * 2 * 3),
        *((AUTO, RUN | {"global_batch": {size: 5}}, "global_batch.examples_per_step", 5) for size in SIZES[:3]),
    ],
    "a length replaces the one of the file below": [
        ("pretrain", {"extends": "base.json"}, LENGTH, (540, None)),
        ("pretrain", {"extends": "base.json", "num_epochs": 3}, LENGTH, (None, 3.0)),
        ("pretrain --total-num-train-samples 40", {"extends": "base.json", "num_epochs": 3}, LENGTH, (40, None)),
        ("pretrain --num-epochs 2", {"extends": "base.json"}, LENGTH, (None, 2.0)),
        ("pretrain", {"extends": "base.json"} | TWO_LENGTHS, LENGTH, (None, 3.0)),
        ("squad", {}, LENGTH, (None, 2.0)),
        # A flag overrides the config, whichever of the two lengths it gives.
        ("squad --total-num-train-samples 40", {"num_epochs": 5}, LENGTH, (40, 2.0)),
        ("squad --num-epochs 5", {"total_num_train_samples": 40}, LENGTH, (None, 5.0)),
        ("squad --total-num-train-samples 50", {"total_num_train_samples": 40}, LENGTH, (50, 2.0)),
        # As in the settings.json of a run: the default of the other.
        ("squad", {"total_num_train_samples": 40, "num_epochs": 2.0}, LENGTH, (40, 2.0)),
    ],
    "engine jax takes one stage, a layout that is chosen, and one or two numbers of tensor": [
        ("pretrain", JAX | {"parallel": ONE_STAGE}, "parallel.tensor_shape", (1, 1)),
        ("pretrain", JAX | {"parallel": REPLACED}, "parallel.tensor_shape", (1, 1)),
        ("pretrain", JAX | {"parallel": {"tensor": 2}}, "parallel.tensor_shape", (2, 1)),
        ("pretrain", JAX | {"parallel": {"tensor": [2]}}, "parallel.tensor_shape", (2, 1)),
        ("pretrain", JAX | {"parallel": {"tensor": [2, 3]}}, "parallel.tensor_shape", (2, 3)),
    ],
}  # fmt: skip


@rows_of(MEANINGS)
def test_a_command_line_and_a_config_mean(line, config, names, value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DATASETS_DIR", raising=False)
    Path("base.json").write_text(json.dumps(SAMPLES))
    assert value_of(line, config, names) == value
