"""Old names of settings: names in Graphcore's example, called "the original", and earlier names in this tool.

A flag is a key in kebab case, so the same table serves config files and command lines.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel

from bert_cli.config.settings import RUN_LENGTHS
from bert_cli.facts.heads import Head
from bert_cli.files import JSONObject

TRUE = ("true", "t", "1", "yes", "y", "on")
FALSE = ("false", "f", "0", "no", "n", "off")


class Old(NamedTuple):
    """A former key: its whole dotted path if it has a new name, else the last part of it."""

    key: str
    new: str = ""
    """Our dotted key. A rename of a group renames everything in it."""
    values: tuple[str, ...] = ()
    """The only values that are accepted; any without them."""
    why: str = ""
    """Why the key does nothing; a key with `values` and without a reason is left out silently."""
    remedy: str = ""
    """What to do instead. Without `values` it refuses the key."""
    is_free: bool = False
    """Whether no weight depends on it, so that runs were recorded with any value."""

    def takes(self, value: object) -> bool:
        """Return whether the key is accepted with a value."""
        return str(value).lower() in self.values if self.values else not self.remedy


IPU_ONLY = "it configures Graphcore's IPUs"
OLD = (
    Old("ipu_config", "parallel"),
    Old("enable_recomputation", "parallel.recompute"),
    Old("parallel.enable_recomputation", "parallel.recompute"),
    Old("optimizer_state_offchip", "parallel.optimizer_state_offload"),
    Old("parallel.optimizer_state_offchip", "parallel.optimizer_state_offload"),
    Old("replicated_tensor_sharding", "parallel.replicated_tensor_sharding"),
    Old("embedding_serialization_factor", "parallel.embedding_serialization_factor"),
    Old("enable_stochastic_rounding", "optimizer_opts.stochastic_rounding"),
    Old("bert_config.max_seq_length", "max_seq_length"),
    Old("bert_config.max_predictions_per_seq", "max_predictions_per_seq"),
    Old("bert_model_name", "pretrained_ckpt_path"),
    Old("ckpt_every_n_steps_per_execution", "checkpoint_every_steps"),
    Old("global_batches_per_log", "log_every_steps"),
    Old("enable_wandb", "wandb.enabled"),
    Old("log_to_wandb", "wandb.enabled"),
    Old("wandb_tags", "wandb.tags"),
    Old("wandb_entity", "wandb.entity"),
    Old("wandb_entity_name", "wandb.entity"),
    Old("wandb_project_name", "wandb.project"),
    Old("wandb_name", "wandb.project"),
    Old("name", "wandb.name"),
    # Earlier names in this tool.
    Old("splitter", "sentence_splitter"),
    Old("held_out_share", "held_out_fraction"),
    Old("output_dir", "save_ckpt_path"),
    # Keys that do nothing.
    Old("matmul_available_memory_proportion_per_pipeline_stage", why=IPU_ONLY),
    Old("matmul_partials_type", why=IPU_ONLY),
    Old("min_remote_tensor_size", why=IPU_ONLY),
    Old("use_outlining", why=IPU_ONLY),
    Old("replace_layers", why=IPU_ONLY),
    Old("fp_exceptions", why=IPU_ONLY),
    Old("show_accuracy", why="accuracy is always shown"),
    Old("logging", why="a run always prints its lines; --log-level sets the level of the libraries"),
    # Parts of the model that the original can switch off.
    Old("use_cls_layer", values=TRUE, why="the model always has the transform of the masked-LM head"),
    Old("use_prediction_bias", values=TRUE, why="the model always has the output bias of the masked-LM head"),
    Old("use_qkv_bias", values=TRUE, why="the model always has the biases of queries, keys and values"),
    Old("use_qkv_split", values=TRUE, why="the model always has queries, keys and values as three weights"),
    Old("use_projection_bias", values=TRUE, why="the model always has the bias of the attention's output"),
    # Former settings with the value that they always have now.
    Old("hidden_act", values=("gelu",)),
    Old("position_embedding_type", values=("absolute",)),
    Old("n_best_size", values=("20",), is_free=True),
    Old("grace_seconds", values=("30", "30.0"), is_free=True),
    Old("reduce_bucket_megabytes", values=("64",), is_free=True),
    Old("decay_shape", values=("1-sqrt",)),
    Old("max_skipped_steps", values=("20",), is_free=True,
        remedy="leave it out; a run ends after 20 gradients in a row that are not finite"),
    Old("trace", values=("none",), is_free=True, remedy="leave it out; `bert bench` measures the parts of a step"),
    Old("expand_templates", values=FALSE,
        remedy="pass --with wikiextractor, or --templates with the text of more templates"),
    Old("texts", values=FALSE,
        remedy="leave it out: an export takes token ids and has the tokenizer; `bert predict` takes --text"),
    Old("compile_only", values=FALSE, remedy="pass --dry-run, which also runs two steps"),
    Old("objective=tsdae", why="is no longer supported, as no measurement shows a gain over simcse",
        remedy="use simcse; finish a run of tsdae with the version that began it"),
    # Keys without an equivalent.
    Old("distillation", remedy="leave it out, or finish a pre-training run that has a teacher with the version "
        "that began it"),
    Old("checkpoint_dir", remedy="set TMPDIR to the folder, as in TMPDIR=FOLDER bert bench ..."),
    Old("push", remedy="leave it out, and upload the folder of the export: hf upload OWNER/NAME OUT"),
    Old("smoothing", remedy="leave it out; a mean is over a fortieth of the curve's steps"),
    Old("budget_hours", remedy="leave it out; `bert init TEXT OUT --hours` chooses a run that fits the hours"),
    Old("train_file",
        remedy="pass --dataset-dir, the folder of the files; `bert index FOLDER` makes .tfrecord files readable"),
    Old("num_train_steps", remedy="pass --total-num-train-samples, the steps times the examples of a step"),
    Old("input_file_path", remedy="it is a positional argument, as in `bert preprocess INPUT OUT`"),
    Old("output_file_path", remedy="it is a positional argument, as in `bert preprocess INPUT OUT`"),
)  # fmt: skip
RENAMES = {old.key: old.new for old in OLD if old.new}
FORMER = {old.key: old for old in OLD if not old.new}
# The former group `distillation` of pre-training, in the file of a run without a teacher.
NO_TEACHER = {"teacher": None, "relations": 1.0}
# Maximum sequence length -> the original's default number of examples of a pre-training run.
DEFAULT_EXAMPLES = {128: 460_849_152, 512: 34_239_360}
# The original's checkpoint interval counts executions of `global_batches_per_log` steps.
EXECUTIONS = "ckpt_every_n_steps_per_execution"
PREDICTIONS = "max_predictions_per_seq"
ROUNDING = "stochastic_rounding"


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


def why_no_effect(path: str, value: object, *, is_recorded: bool) -> str | None:
    """Return why a key with this value does nothing, "" if it has the value that it always has; None for others.

    `is_recorded`: a run wrote the key, whose user cannot leave it out.
    """
    old = FORMER.get(path.rpartition(".")[2])
    if old is not None and old.takes(value):
        return old.why
    if old is not None and is_recorded and old.is_free:
        return f"it is always {old.values[0]}"
    return None


def instead_of(path: str) -> tuple[str, str] | None:
    """Return problem and remedy for an old key or flag, None for any other."""
    key = path.replace("-", "_").removeprefix("no_")
    old = FORMER.get("distillation" if key.startswith("distillation.") else key.rpartition(".")[2])
    if old is None:
        return None
    problem = f"is always {old.values[0]}" if old.values else "no such setting"
    return old.why or problem, old.remedy or "leave it out"


def ignored_keys(*, has_configs: bool) -> dict[str, Literal[1, "*"]]:
    """Return the last part of each key that a command accepts without having the setting, and the words it takes.

    Those of the original's configs and benchmarks are accepted by the commands that have configs.
    """
    keys: dict[str, Literal[1, "*"]] = {PREDICTIONS: "*"} if has_configs else {}
    for old in FORMER.values():
        if old.values and not old.why:
            keys[old.key] = "*" if old.values == FALSE else 1
        elif has_configs and not old.remedy:
            keys[old.key] = "*"
    return keys


def adapt(
    values: JSONObject, renamed: Mapping[str, str], settings: type[BaseModel]
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
        no_effect[PREDICTIONS] = "fine-tuning masks no tokens"
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
        absent = [name for name in ("enc_out", "pool") if name not in blocks]
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
