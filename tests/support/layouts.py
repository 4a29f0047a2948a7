"""A small model in any layout, as a run builds it, for the tests of this folder."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from bert_cli.config.plan import make_plan
from bert_cli.config.training import PretrainSettings
from bert_cli.model.heads import PretrainingHeads
from bert_cli.parallel.cluster import Processes
from bert_cli.parallel.engine import count
from bert_cli.parallel.tensorflow.engine import TensorFlowEngine
from bert_cli.tasks.run import build, corpora
from bert_cli.train.step import State, Step

S, P, V, B = 16, 3, 50, 2
KEY_BIAS = "attention/key/bias"
MODEL = {
    "vocab_size": V,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": S,
    "initializer_range": 0.2,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# Name -> replicas, stages, devices of the stages.
LAYOUTS: dict[str, tuple[int, list[list[str]] | None, list[int] | None]] = {
    "1x1": (1, None, None),
    "2x1": (2, None, None),
    "4x1": (4, None, None),
    "1x2": (1, [["emb"], ["hid*3"], ["enc_out", "pool", "heads"]], [0, 1, 0]),
    "2x2": (2, [["emb", "hid"], ["hid*2"], ["enc_out", "pool", "heads"]], [0, 1, 0]),
    "1x4": (1, [["emb"], ["hid"], ["hid"], ["hid", "enc_out"], ["pool"], ["heads"]], [0, 1, 2, 3, 0, 0]),
    "5 stages on 4 devices": (1, [["emb"], ["hid"], ["hid"], ["hid"], ["enc_out", "pool", "heads"]], [0, 1, 2, 3, 0]),
    "gather alone": (1, [["emb", "hid*3"], ["enc_out"], ["pool"], ["heads"]], [0, 1, 2, 0]),
}  # fmt: skip


def settings_of(layout: str, micro_batches: int = 4, **changes: Any) -> PretrainSettings:
    """Settings of a run in a layout, with so many micro-batches a step over all replicas."""
    replicas, stages, devices = LAYOUTS[layout]
    model = {**MODEL, **changes.pop("model", {})}
    optimizer = {
        "name": "LAMB",
        "learning_rate": {"max_learning_rate": 0.01},
        **changes.pop("optimizer", {}),
    }
    parallel: dict[str, Any] = {**changes.pop("parallel", {})}
    if stages is not None:
        parallel |= {"pipeline_stages": stages, "pipeline_device_mapping": devices}
    return PretrainSettings.model_validate(
        {
            "generated_dataset": True,
            "bert_config": model,
            "max_seq_length": S,
            "max_predictions_per_seq": P,
            "global_batch": {
                "micro_batch_size": B,
                "replicas": replicas,
                "grad_acc_steps_per_replica": max(1, micro_batches // replicas),
            },
            "parallel": parallel,
            "optimizer_opts": optimizer,
            "total_num_train_samples": 100 * B * micro_batches,
            "seed": 3,
            **changes,
        }
    )  # fmt: skip


def built(
    settings: PretrainSettings, moves: bool = True
) -> tuple[TensorFlowEngine, State, Step, Any]:
    """Engine, state, step and reader of a run, traced; without the update when nothing will move."""
    mesh = build.open_mesh(settings, Processes(()))
    plan = make_plan(settings, None)
    _, engine, state, step = build.build_run(settings, mesh, plan)
    reader = corpora.open_stream(settings, plan.examples_per_step)
    sample = reader.first_micro_batches(len(mesh.devices))
    if moves:
        engine.compile(sample)
    else:
        engine.compile_stages(sample, count(sample, PretrainingHeads.COUNTS))
    return engine, state, step, reader


def gradients(engine: TensorFlowEngine) -> dict[str, np.ndarray]:
    """The accumulated gradients of replica 0 by name, after `reduce`."""
    return {
        name: held[0].numpy()
        for update in engine.updates[0]
        for name, held in update.accumulators.items()
    }


def assert_close(
    a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray], tolerance: float
) -> None:
    """Gradients equal relative to the norm of each tensor.

    The true gradient of an attention key's bias is zero: what is there is rounding, compared with
    the norm of the whole.
    """
    assert a.keys() == b.keys()
    whole = np.sqrt(sum(np.sum(np.square(right, dtype=np.float64)) for right in b.values()))
    for name, right in b.items():
        scale = whole if name.endswith(KEY_BIAS) else np.linalg.norm(right)
        assert np.linalg.norm(a[name] - right) <= tolerance * scale, name


def assert_weights_close(
    a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray], tolerance: float, wander: float
) -> None:
    """Weights equal relative to the norm of each tensor.

    An attention key's bias changes nothing that the model computes. Adam divides the rounding that
    is its gradient by its own size, so it wanders by up to the learning rate a step, `wander` in all.
    """
    assert a.keys() == b.keys()
    for name, right in b.items():
        difference = a[name] - right
        if name.endswith(KEY_BIAS):
            assert np.abs(difference).max() <= wander, name
        else:
            assert np.linalg.norm(difference) <= tolerance * np.linalg.norm(right), name
