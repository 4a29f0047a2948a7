"""Build the TensorFlow engine of a run: the stages of each replica, and their updates."""

from typing import Any

import tensorflow as tf

from bert_cli.config.training import TrainSettings
from bert_cli.model.bert import block_names, build_block, named_weights
from bert_cli.model.fused import compile_fused
from bert_cli.parallel.engine import Mesh
from bert_cli.parallel.tensorflow.engine import TensorFlowEngine, replicated_weights
from bert_cli.parallel.tensorflow.stage import Stage
from bert_cli.parallel.tensorflow.update import random_bits
from bert_cli.tasks.run.build import factors_of, optimizer_for


def build_engine(
    settings: TrainSettings, mesh: Mesh, labels: int, *, trains: bool
) -> TensorFlowEngine:
    """Return the engine with new weights."""
    replicas = build_model(settings, mesh, labels)
    names = list(replicated_weights(replicas))
    return TensorFlowEngine(
        replicas,
        mesh,
        seed=settings.seed,
        optimizer=optimizer_for(settings, names, random_bits) if trains else None,
        parallel=settings.parallel,
        compiled=settings.compile != "nothing",
    )


def build_model(settings: TrainSettings, mesh: Mesh, labels: int = 2) -> list[list[Stage]]:
    """Return the stages of each replica on the devices, with initial values from the seed."""
    compile_fused(settings.compile != "nothing")
    return [_build_replica(settings, devices, labels) for devices in mesh.devices]


def _build_replica(settings: TrainSettings, devices: tuple[str, ...], labels: int) -> list[Stage]:
    config = settings.bert_config
    parallel = settings.parallel
    names = block_names(config, settings.last_blocks)
    factors = factors_of(settings)
    rest = iter(names)  # the settings' stages list the same blocks, with `hid` for each layer
    stages = [[next(rest) for _ in stage] for stage in parallel.pipeline_stages or [names]]
    built: list[Stage] = []
    before: dict[str, Any] = {}
    for stage, number in zip(stages, parallel.pipeline_device_mapping or [0], strict=True):
        device = devices[number]
        blocks = {}
        with tf.device(device):
            for name in stage:
                blocks[name] = build_block(
                    name,
                    config,
                    seed=settings.seed,
                    policy=settings.precision,
                    before=before,
                    labels=labels,
                    chunks=parallel.embedding_serialization_factor,
                    factors=factors,
                )
                before[name] = blocks[name]
        weights = named_weights(list(blocks.items()))
        head = blocks.pop(names[-1], None)
        built.append(
            Stage(
                list(blocks.values()),
                head,
                weights,
                device=device,
                saved=parallel.recompute_by if parallel.recompute else "all",
                compiled=settings.compile == "stages"
                or (settings.compile == "auto" and "GPU" in device),
            )
        )
    return built
