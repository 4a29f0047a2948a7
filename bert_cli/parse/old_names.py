"""Old names of settings: names in Graphcore's example, called "the original", and earlier names in this tool.

A flag is a key in kebab case, so the same tables serve config files and command lines.
"""

import math
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from bert_cli.config.settings import RUN_LENGTHS
from bert_cli.facts.heads import Head
from bert_cli.files import JSONObject

# Old dotted key -> ours. A rename of a group renames everything in it.
RENAMES = {
    "ipu_config": "parallel",
    "enable_recomputation": "parallel.recompute",
    "parallel.enable_recomputation": "parallel.recompute",
    "optimizer_state_offchip": "parallel.optimizer_state_offload",
    "parallel.optimizer_state_offchip": "parallel.optimizer_state_offload",
    "replicated_tensor_sharding": "parallel.replicated_tensor_sharding",
    "embedding_serialization_factor": "parallel.embedding_serialization_factor",
    "enable_stochastic_rounding": "optimizer_opts.stochastic_rounding",
    "bert_config.max_seq_length": "max_seq_length",
    "bert_config.max_predictions_per_seq": "max_predictions_per_seq",
    "bert_model_name": "pretrained_ckpt_path",
    "ckpt_every_n_steps_per_execution": "checkpoint_every_steps",
    "global_batches_per_log": "log_every_steps",
    "enable_wandb": "wandb.enabled",
    "log_to_wandb": "wandb.enabled",
    "wandb_tags": "wandb.tags",
    "wandb_entity": "wandb.entity",
    "wandb_entity_name": "wandb.entity",
    "wandb_project_name": "wandb.project",
    "wandb_name": "wandb.project",
    "name": "wandb.name",
    # Earlier names in this tool.
    "splitter": "sentence_splitter",
    "length_bins": "length_buckets",
    "held_out_share": "held_out_fraction",
    "cluster.say_waiting_after_seconds": "cluster.report_waiting_after_seconds",
}
# Last part of a key -> why it is accepted and does nothing.
IPU_ONLY = "it configures Graphcore's IPUs"
NO_EFFECT = {
    "matmul_available_memory_proportion_per_pipeline_stage": IPU_ONLY,
    "matmul_partials_type": IPU_ONLY,
    "min_remote_tensor_size": IPU_ONLY,
    "use_outlining": IPU_ONLY,
    "replace_layers": IPU_ONLY,
    "fp_exceptions": IPU_ONLY,
    "show_accuracy": "accuracy is always shown",
    "logging": "a run always prints its lines; --log-level sets the level of the libraries",
}
# Last part of a key -> the part of the model that the original can switch off.
MODEL_HAS = {
    "use_cls_layer": "the transform of the masked-LM head",
    "use_prediction_bias": "the output bias of the masked-LM head",
    "use_qkv_bias": "the biases of queries, keys and values",
    "use_qkv_split": "queries, keys and values as three weights",
    "use_projection_bias": "the bias of the attention's output",
}
# Last part of the key of a former setting -> the text of the value that it always has now.
ALWAYS = {
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "n_best_size": "20",
    "expand_templates": "false",
}
# Last part of a key or flag without an equivalent, or of a former setting -> the remedy.
INSTEAD = {
    "expand_templates": "give --with wikiextractor, or --templates with the text of more templates",
    "distillation": "leave it out, or finish a pre-training run that has a teacher with the version that began it",
    "checkpoint_dir": "set TMPDIR to the folder, as in TMPDIR=FOLDER bert bench ...",
    "budget_hours": "leave it out; `bert init TEXT OUT --hours` chooses a run that fits the hours",
    "train_file": "give --dataset-dir, the folder of the files; `bert index FOLDER` makes .tfrecord files readable",
    "num_train_steps": "give --total-num-train-samples, the steps times the examples of a step",
    "input_file_path": "it is a positional argument, as in `bert preprocess INPUT OUT`",
    "output_file_path": "it is a positional argument, as in `bert preprocess INPUT OUT`",
}
# Dotted key and former value -> problem and remedy.
FORMER_VALUES = {
    ("objective", "tsdae"): (
        "is no longer supported, as no measurement shows a gain over simcse",
        "give simcse; finish a run of tsdae with the version that began it",
    ),
}
# The former group `distillation` of pre-training, in the file of a run without a teacher.
NO_TEACHER = {"teacher": None, "relations": 1.0}
# Our dotted key -> the original's default, where ours differs.
DEFAULTS = {
    "precision": "float16",
    "parallel.recompute": True,
    "parallel.optimizer_state_offload": True,
    "parallel.embedding_serialization_factor": 2,
    "optimizer_opts.stochastic_rounding": True,
}
# Maximum sequence length -> the original's default number of examples of a pre-training run.
DEFAULT_EXAMPLES = {128: 460_849_152, 512: 34_239_360}
# The original's checkpoint interval counts executions of `global_batches_per_log` steps.
EXECUTIONS = "ckpt_every_n_steps_per_execution"
PREDICTIONS = "max_predictions_per_seq"
NO_MASKS = "fine-tuning masks no tokens"
# Last parts of keys that a command with configs accepts even if it has no such setting; others accept their `FORMER`.
IGNORED = (*NO_EFFECT, *MODEL_HAS, *ALWAYS, PREDICTIONS)
ROUNDING = "stochastic_rounding"
NOT_IN_EVERY_TASK = ("enc_out", "pool")
TRUE = ("true", "t", "1", "yes", "y", "on")
FALSE = ("false", "f", "0", "no", "n", "off")


def our_name(path: str) -> str:
    """Return our dotted key for an old one; any other key unchanged."""
    for old, new in RENAMES.items():
        if f"{path}.".startswith(f"{old}."):
            return our_name(new + path.removeprefix(old))
    return path


def old_names_of(path: str) -> list[str]:
    """Return the old keys of a setting."""
    names = [path]
    for name in names:  # finds also the old names that are appended meanwhile
        names += [
            old + name.removeprefix(new)
            for old, new in RENAMES.items()
            if f"{name}.".startswith(f"{new}.")
        ]
    return names[1:]


def is_former(path: str, value: Any) -> bool:
    """Return whether a key is that of a former setting with the value that it always has."""
    name = path.rpartition(".")[2]
    text = str(value)
    return name in ALWAYS and ALWAYS[name] == ("false" if text.lower() in FALSE else text)


def why_no_effect(path: str, value: Any) -> str | None:
    """Return why a key with this value is accepted and does nothing; None for any other key."""
    name = path.rpartition(".")[2]
    if name in MODEL_HAS and str(value).lower() in TRUE:
        return f"the model always has {MODEL_HAS[name]}"
    return NO_EFFECT.get(name)


def instead_of(path: str) -> tuple[str, str] | None:
    """Return problem and remedy for an old key or flag without an equivalent; None for any other."""
    key = path.replace("-", "_").removeprefix("no_")
    name = "distillation" if key.startswith("distillation.") else key.rpartition(".")[2]
    if name in MODEL_HAS:
        return f"the model always has {MODEL_HAS[name]}", "leave it out"
    if name in ALWAYS:
        return f"is always {ALWAYS[name]}", INSTEAD.get(name, "leave it out")
    return ("no such setting", INSTEAD[name]) if name in INSTEAD else None


def adapt(
    values: Mapping[str, Any], renamed: Mapping[str, str], settings: type[BaseModel]
) -> tuple[JSONObject, dict[str, str]]:
    """Return the values that a command can use, and the reason for each value that is left out.

    `renamed` maps our keys to the old keys that were given. Executions between checkpoints become steps.
    """
    adapted = dict(values)
    no_effect = {}
    group = adapted.get("distillation")
    has_group = "distillation" in settings.model_fields
    if not has_group and isinstance(group, Mapping) and group.items() <= NO_TEACHER.items():
        del adapted["distillation"]
    every = our_name(EXECUTIONS)
    numbers = [str(adapted.get(every)), str(adapted.get("log_every_steps") or 1)]
    # Flags are texts; validation rejects what is not a number.
    if renamed.get(every) == EXECUTIONS and all(map(str.isdecimal, numbers)):
        adapted[every] = math.prod(map(int, numbers))
    if PREDICTIONS in adapted and PREDICTIONS not in settings.model_fields:
        del adapted[PREDICTIONS]
        no_effect[PREDICTIONS] = NO_MASKS
    options = adapted.get("optimizer_opts")
    old = renamed.get(f"optimizer_opts.{ROUNDING}")
    if old and isinstance(options, Mapping) and adapted.get("precision", "float32") != "float16":
        adapted["optimizer_opts"] = {n: value for n, value in options.items() if n != ROUNDING}
        if str(options[ROUNDING]).lower() in TRUE:
            no_effect[old] = "it needs --precision float16; these weights are float32"
    layout: Any = adapted.get("parallel")
    stages = layout.get("pipeline_stages") if isinstance(layout, Mapping) else None
    if "parallel.pipeline_stages" in renamed and isinstance(stages, list):
        head: Head | None = getattr(settings, "HEAD", None)
        blocks = head.last_blocks if head else ()
        absent = [name for name in NOT_IN_EVERY_TASK if name not in blocks]
        without = [
            [name for name in stage if name not in absent] if isinstance(stage, list) else stage
            for stage in stages
        ]
        if without != stages:
            adapted["parallel"] = {**layout, "pipeline_stages": without}
            where = f"{' and '.join(absent)} in parallel.pipeline_stages"
            no_effect[where] = "the model of this task has no such blocks"
    length = str(adapted.get("max_seq_length"))
    is_open = all(adapted.get(name) is None for name in RUN_LENGTHS)
    if renamed and is_open and PREDICTIONS in settings.model_fields and length.isdecimal():
        samples = [n for longest, n in DEFAULT_EXAMPLES.items() if int(length) <= longest]
        adapted |= {RUN_LENGTHS[0]: samples[0]} if samples else {}
    return adapted, no_effect
