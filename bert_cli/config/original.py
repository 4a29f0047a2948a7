"""The settings of Graphcore's example, "the original" below: our names, what has no effect, what to give instead.

`RENAMES` turns a key into ours, `NO_EFFECT` and `MODEL_HAS` name what is accepted and does nothing, `INSTEAD`
what cannot be taken over, `DEFAULTS` where a config of the original means another value than ours does by
saying nothing. A flag is a key in kebab case, so the same tables read config files and command lines.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from bert_cli.errors import ConfigError

# Old dotted key -> ours. A rename of a group moves everything under it.
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
    "wandb_entity_name": "wandb.entity",
    "wandb_project_name": "wandb.project",
    "wandb_name": "wandb.project",
    "name": "wandb.name",
}
# Last part of a key -> why it is accepted and does nothing.
ITS_HARDWARE = "only Graphcore's IPUs have it"
NO_EFFECT = {
    "matmul_available_memory_proportion_per_pipeline_stage": ITS_HARDWARE,
    "matmul_partials_type": ITS_HARDWARE,
    "min_remote_tensor_size": ITS_HARDWARE,
    "use_outlining": ITS_HARDWARE,
    "replace_layers": ITS_HARDWARE,
    "fp_exceptions": ITS_HARDWARE,
    "show_accuracy": "accuracy is always shown",
    "logging": "a run always prints its lines; --log-level is for those of the libraries",
}
# Last part of a key -> what it switches off in the original, and every model here has.
MODEL_HAS = {
    "use_cls_layer": "the transform of the masked-LM head",
    "use_prediction_bias": "the output bias of the masked-LM head",
    "use_qkv_bias": "the biases of queries, keys and values",
    "use_qkv_split": "queries, keys and values as three weights",
    "use_projection_bias": "the bias of the attention's output",
}
# Last part of a key or flag that cannot be taken over -> what to give.
INSTEAD = {
    "train_file": "give --dataset-dir, the folder of the files; `bert index FOLDER` makes .tfrecord files readable",
    "num_train_steps": "give --total-num-train-samples, the steps times the examples of a step",
    "input_file_path": "it is a positional argument, as in `bert preprocess INPUT OUT`",
    "output_file_path": "it is a positional argument, as in `bert preprocess INPUT OUT`",
}
# Our dotted key -> the original's default, where ours is another.
DEFAULTS = {
    "precision": "float16",
    "parallel.recompute": True,
    "parallel.optimizer_state_offload": True,
    "parallel.embedding_serialization_factor": 2,
    "optimizer_opts.stochastic_rounding": True,
}
# The original counts checkpoints in executions, each of as many steps as lie between two logs.
EXECUTIONS = "ckpt_every_n_steps_per_execution"
PREDICTIONS, NO_MASKS = "max_predictions_per_seq", "fine-tuning masks no words"
ROUNDING = "stochastic_rounding"
NOT_OF_THE_TASK = ("enc_out", "pool")
TRUE = ("true", "t", "1", "yes", "y", "on")
FALSE = ("false", "f", "0", "no", "n", "off")


def our_name(path: str) -> str:
    """Return the dotted key here of a dotted key of the original; any other key as it is."""
    for old, new in RENAMES.items():
        if path == old or path.startswith(f"{old}."):
            return our_name(new + path.removeprefix(old))
    return path


def why_no_effect(path: str, value: Any) -> str | None:
    """Return why a key with this value is accepted and does nothing; None for any other key."""
    name = path.rpartition(".")[2]
    if name in MODEL_HAS and str(value).lower() in TRUE:
        return f"the model always has {MODEL_HAS[name]}"
    return NO_EFFECT.get(name)


def instead_of(path: str) -> str | None:
    """Return what to say of an old key or flag that cannot be taken over; None for any other."""
    name = path.replace("-", "_").removeprefix("no_").rpartition(".")[2]
    if name in MODEL_HAS:
        return f"the model always has {MODEL_HAS[name]}; leave it out"
    return f"no such setting; {INSTEAD[name]}" if name in INSTEAD else None


def both_names(old: str, where: str, other: str) -> ConfigError:
    """Return the error for a setting that is given under an old name and under another one."""
    return ConfigError(
        f"{old}: is the old name of {where}, which is given too ({other}); keep one of them"
    )


def our_words(
    words: Sequence[str], settings: type[BaseModel]
) -> tuple[list[str], dict[str, str], dict[str, str]]:
    """Return a command line with our flags, the flags without effect and why, and our key -> old key.

    `--no-OLD` is the `--no-` form of ours. A flag without effect goes with the words behind it.
    Raises ConfigError for a setting under two names.
    """
    ours: list[str] = []
    flags: dict[str, str] = {}  # our key -> its name in the flag
    no_effect: dict[str, str] = {}
    renamed: dict[str, str] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        old = flag.removeprefix("--").replace("-", "_")
        is_off = old.startswith("no_")
        old = old.removeprefix("no_")
        where = our_name(old)
        behind = next((n for n, one in enumerate(rest) if one.startswith("--")), len(rest))
        given = value if equals else " ".join(rest[:behind])
        if not flag.startswith("--"):
            ours.append(word)
            continue
        reason = why_no_effect(where, "false" if is_off else given or "true")
        if where == PREDICTIONS and PREDICTIONS not in settings.model_fields:
            reason = NO_MASKS
        if reason is not None:
            no_effect[flag] = reason
            rest = rest if equals else rest[behind:]
            continue
        other = flags.setdefault(where, old)
        if other != old:
            pair = (old, where, other) if old != where else (other, where, old)
            raise both_names(*(f"--{one.replace('_', '-')}" for one in pair))
        if where != old:
            renamed[where] = old
            word = f"--{'no-' if is_off else ''}{where.replace('_', '-')}{equals}{value}"
        ours.append(word)
    return ours, no_effect, renamed


def fitted(
    values: Mapping[str, Any], renamed: Mapping[str, str], settings: type[BaseModel]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Leave out what a config of the original says and the command cannot use; what, and why.

    Executions between checkpoints become steps.
    """
    kept, no_effect = dict(values), {}
    every = our_name(EXECUTIONS)
    counts = [str(one) for one in (kept.get(every), kept.get("log_every_steps") or 1)]
    # Flags come as text; validation refuses what is no count.
    if renamed.get(every) == EXECUTIONS and all(re.fullmatch(r"\d+", one) for one in counts):
        kept[every] = math.prod(map(int, counts))
    if PREDICTIONS in kept and PREDICTIONS not in settings.model_fields:
        del kept[PREDICTIONS]
        no_effect[PREDICTIONS] = NO_MASKS
    options, layout = kept.get("optimizer_opts"), kept.get("parallel")
    old = renamed.get(f"optimizer_opts.{ROUNDING}")
    if old and isinstance(options, Mapping) and kept.get("precision", "float32") != "float16":
        kept["optimizer_opts"] = {name: one for name, one in options.items() if name != ROUNDING}
        if str(options[ROUNDING]).lower() in TRUE:
            no_effect[old] = "weights are float32; with --precision float16 it has"
    key = "parallel.pipeline_stages"
    if (
        key in renamed
        and isinstance(layout, Mapping)
        and isinstance(layout["pipeline_stages"], list)
    ):
        strangers = [
            name for name in NOT_OF_THE_TASK if name not in getattr(settings, "LAST_BLOCKS", ())
        ]
        stages = [
            [name for name in stage if name not in strangers] if isinstance(stage, list) else stage
            for stage in layout["pipeline_stages"]
        ]
        if stages != layout["pipeline_stages"]:
            kept["parallel"] = {**layout, "pipeline_stages": stages}
            no_effect[f"{' and '.join(strangers)} in {key}"] = "the model of this task has none"
    return kept, no_effect
