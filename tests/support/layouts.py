"""A small model in any layout, built as a run builds it."""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from support.settings import RUN, SHAPE, merged, plan_of, small_run

from bert_cli.config.pretrain import PretrainSettings
from bert_cli.model.bert.heads import PretrainingHeads
from bert_cli.parallel.engine import Batch, count
from bert_cli.parallel.tensorflow.engine import TensorFlowEngine
from bert_cli.tasks.run import build, corpora
from bert_cli.tasks.run.resolve import open_mesh
from bert_cli.train.loop import State, Step

S, P, V, B = 16, 3, 50, 2
KEY_BIAS = "attention/key/bias"
MODEL = SHAPE | {"vocab_size": V, "max_position_embeddings": S, "initializer_range": 0.2}
SHALLOW = {"num_hidden_layers": 1}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# Name -> replicas, stages, device of each stage.
LAYOUTS: dict[str, tuple[int, list[list[str]] | None, list[int] | None]] = {
    "1x1": (1, None, None),
    "2x1": (2, None, None),
    "2x2": (2, [["emb", "hid"], ["hid"], ["enc_out", "pool", "heads"]], [0, 1, 0]),
    "5 stages on 4 devices": (1, [["emb"], ["hid"], ["hid", "enc_out"], ["pool"], ["heads"]], [0, 1, 2, 3, 0]),
}  # fmt: skip


def settings_of(layout: str, micro_batches: int = 4, **changes: Any) -> PretrainSettings:
    """Return the settings of a run in a layout, with so many micro-batches a step over all replicas."""
    replicas, stages, devices = LAYOUTS[layout]
    accumulation = max(1, micro_batches // replicas)
    values = {
        "generated_dataset": True,
        "bert_config": MODEL,
        "max_predictions_per_seq": P,
        "global_batch": {"replicas": replicas, "grad_acc_steps_per_replica": accumulation},
        "parallel": {"pipeline_stages": stages, "pipeline_device_mapping": devices},
        "total_num_train_samples": 100 * B * micro_batches,
        "seed": 3,
    }
    names = {"model": "bert_config", "optimizer": "optimizer_opts"}
    changed = {names.get(name, name): value for name, value in changes.items()}
    return small_run(merged(RUN, values), **changed)


def untraced(settings: PretrainSettings) -> tuple[TensorFlowEngine, State, Step, Any]:
    plan = plan_of(settings, None)
    return *build.build_run(settings, open_mesh(settings), plan), corpora.open_stream(settings)


def built(
    settings: PretrainSettings, updates: bool = True
) -> tuple[TensorFlowEngine, State, Step, Any]:
    """Return a run, traced; without `updates` only the stages are traced."""
    engine, state, step, reader = untraced(settings)
    sample = reader.first_micro_batches(len(engine.mesh.devices))
    if updates:
        engine.compile(sample)
    else:
        engine.compile_stages(sample, count(sample, PretrainingHeads.COUNTS))
    return engine, state, step, reader


def engine_of(
    layout: str = "1x1", micro_batches: int = 4, **changes: Any
) -> tuple[TensorFlowEngine, Any]:
    """Return an engine and a stream for gradients; engines are shared by all tests of a process."""
    return _engine_of(json.dumps([layout, micro_batches, changes], sort_keys=True))


@cache
def _engine_of(described: str) -> tuple[TensorFlowEngine, Any]:
    layout, micro_batches, changes = json.loads(described)
    engine, _, _, reader = built(settings_of(layout, micro_batches, **changes), updates=False)
    return engine, reader


def accumulate(
    engine: TensorFlowEngine, batch: Batch, first_index: int = 0
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    engine.clear_gradients()
    sums = engine.accumulate(batch, first_index, count(batch, PretrainingHeads.COUNTS), 1.0)
    squared = engine.all_reduce_gradients()
    complete = gradients(engine)
    norm = sum(np.square(gradient, dtype=np.float64).sum() for gradient in complete.values())
    np.testing.assert_allclose(squared, norm, rtol=1e-5)
    return sums, complete


def gradients(engine: TensorFlowEngine) -> dict[str, np.ndarray]:
    """Return the accumulated gradients of replica 0 by name, complete after `all_reduce_gradients`."""
    return {
        name: accumulators[0].numpy()
        for update in engine.updates[0]
        for name, accumulators in update.accumulators.items()
    }


def assert_close(
    a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray], tolerance: float
) -> None:
    """Assert that gradients are equal relative to the norm of each tensor.

    An attention key's bias changes no output: its gradient is rounding, and is compared with the norm of all gradients.
    """
    assert a.keys() == b.keys()
    norm = np.sqrt(sum(np.sum(np.square(right, dtype=np.float64)) for right in b.values()))
    for name, right in b.items():
        scale = norm if name.endswith(KEY_BIAS) else np.linalg.norm(right)
        assert np.linalg.norm(a[name] - right) <= tolerance * scale, name
