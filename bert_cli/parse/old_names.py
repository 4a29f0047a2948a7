"""Names of settings in Graphcore's example.

A flag is a key in kebab case, so the same tables serve config files and command lines.
"""

import math
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from bert_cli.facts.heads import Head
from bert_cli.files import JSONObject
from bert_cli.settings.settings import RUN_LENGTHS

TRUE = ("true", "t", "1", "yes", "y", "on")
FALSE = ("false", "f", "0", "no", "n", "off")
# Their key -> ours. A rename of a group renames everything in it.
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
    "output_dir": "save_ckpt_path",
}
IPU_ONLY = "it configures Graphcore's IPUs"
# Last part of a key that is accepted and does nothing -> why.
IGNORED = {
    "matmul_available_memory_proportion_per_pipeline_stage": IPU_ONLY,
    "matmul_partials_type": IPU_ONLY,
    "min_remote_tensor_size": IPU_ONLY,
    "use_outlining": IPU_ONLY,
    "replace_layers": IPU_ONLY,
    "fp_exceptions": IPU_ONLY,
    "show_accuracy": "accuracy is always shown",
    "logging": "a run always prints its lines; --log-level sets the level of the libraries",
}
# Last part of a switch -> the words for its only value, and why it has no other.
SWITCHES = {
    "use_cls_layer": (TRUE, "the model always has the transform of the masked-LM head"),
    "use_prediction_bias": (TRUE, "the model always has the output bias of the masked-LM head"),
    "use_qkv_bias": (TRUE, "the model always has the biases of queries, keys and values"),
    "use_qkv_split": (TRUE, "the model always has queries, keys and values as three weights"),
    "use_projection_bias": (TRUE, "the model always has the bias of the attention's output"),
    "compile_only": (FALSE, "a run does not only compile; --dry-run also runs two steps"),
}
POSITIONAL = "it is a positional argument, as in `bert preprocess INPUT OUT`"
REMEDIES = {
    "train_file": "pass --dataset-dir, the folder of the files; `bert index FOLDER` makes .tfrecord files readable",
    "num_train_steps": "pass --total-num-train-samples, the steps times the examples of a step",
    "input_file_path": POSITIONAL,
    "output_file_path": POSITIONAL,
}
# Maximum sequence length -> the example's default number of examples of a pre-training run.
DEFAULT_EXAMPLES = {128: 460_849_152, 512: 34_239_360}
# The example's checkpoint interval counts executions of `global_batches_per_log` steps.
EXECUTIONS = "ckpt_every_n_steps_per_execution"
PREDICTIONS = "max_predictions_per_seq"
ROUNDING = "optimizer_opts.stochastic_rounding"
STAGES = "parallel.pipeline_stages"
# Last part of each key that a command with configs accepts without having the setting.
NO_SETTINGS = {PREDICTIONS, *IGNORED, *SWITCHES}


def our_name(path: str) -> str:
    """Return our dotted key for an old one; any other key unchanged."""
    for old, new in RENAMES.items():
        if f"{path}.".startswith(f"{old}."):
            return our_name(new + path.removeprefix(old))
    return path


def why_no_effect(path: str, value: object) -> str | None:
    """Return why a key with this value does nothing; None for others."""
    name = path.rpartition(".")[2]
    if name in SWITCHES:
        words, why = SWITCHES[name]
        if str(value).lower() not in words:
            return None
        return why
    return IGNORED.get(name)


def adapt(
    values: JSONObject, renamed: Mapping[str, str], settings: type[BaseModel]
) -> tuple[JSONObject, dict[str, str]]:
    """Return the values that a command can use, and the reason for each value that is left out.

    `renamed` maps our keys to the old keys that were given. Executions between checkpoints become steps.
    """
    adapted = dict(values)
    no_effect = {}
    every = our_name(EXECUTIONS)
    numbers = [str(adapted.get(every)), str(adapted.get("log_every_steps") or 1)]
    # Flags are texts; validation rejects what is not a number.
    if renamed.get(every) == EXECUTIONS and all(map(str.isdecimal, numbers)):
        adapted[every] = math.prod(map(int, numbers))
    if PREDICTIONS in adapted and PREDICTIONS not in settings.model_fields:
        del adapted[PREDICTIONS]
        no_effect[PREDICTIONS] = "fine-tuning masks no tokens"
    old = renamed.get(ROUNDING)
    if old and adapted.get("precision", "float32") != "float16":
        rounding = adapted.pop(ROUNDING)
        if str(rounding).lower() in TRUE:
            no_effect[old] = "it needs --precision float16; these weights are float32"
    stages = adapted.get(STAGES)
    if STAGES in renamed and isinstance(stages, list):
        head: Head | None = getattr(settings, "HEAD", None)
        blocks = head.last_blocks if head else ()
        absent = [name for name in ("enc_out", "pool") if name not in blocks]
        present: list[Any] = []
        for stage in stages:
            if isinstance(stage, list):
                stage = [name for name in stage if name not in absent]
            present.append(stage)
        adapted[STAGES] = present
        if adapted[STAGES] != stages:
            where = f"{' and '.join(absent)} in parallel.pipeline_stages"
            no_effect[where] = "the model of this task has no such blocks"
    length = str(adapted.get("max_seq_length"))
    is_open = all(adapted.get(name) is None for name in RUN_LENGTHS)
    if renamed and is_open and PREDICTIONS in settings.model_fields and length.isdecimal():
        samples = [n for longest, n in DEFAULT_EXAMPLES.items() if int(length) <= longest]
        if samples:
            adapted[RUN_LENGTHS[0]] = samples[0]
    return adapted, no_effect
