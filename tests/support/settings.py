"""The settings of a small run of pre-training, and changes to them."""

from typing import Any

from bert_cli.config.pretrain import PretrainSettings
from bert_cli.parse.load import Loaded, validate
from bert_cli.planning.plan import Plan, make_plan

SHAPE = {
    "vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 32,
}  # fmt: skip
RUN: dict[str, Any] = {
    "max_seq_length": 16,
    "max_predictions_per_seq": 4,
    "global_batch": {"micro_batch_size": 2},
    "optimizer_opts": {"name": "LAMB", "learning_rate": {"max_learning_rate": 0.01}},
}


def merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return values with changes; a group of settings is changed, and not replaced."""
    result = dict(values)
    for name, value in changes.items():
        is_group = isinstance(value, dict) and isinstance(values.get(name), dict)
        result[name] = merged(values[name], value) if is_group else value
    return result


def small_run(run: dict[str, Any] = RUN, /, **changes: Any) -> PretrainSettings:
    return validate(PretrainSettings, Loaded(merged(run, changes), {}))


def plan_of(settings: Any, corpus_examples: int | None, sequences_per_example: float = 1.0) -> Plan:
    return make_plan(settings, corpus_examples, sequences_per_example)
