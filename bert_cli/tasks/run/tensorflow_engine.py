"""Build the TensorFlow engine of a run: its devices, the stages of each replica, and their updates."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import tensorflow as tf

from bert_cli.config.training import TrainSettings
from bert_cli.model.bert import block_names, build_block, named_weights, word_table
from bert_cli.model.fused import compile_fused
from bert_cli.parallel.cluster import Processes
from bert_cli.parallel.engine import Mesh
from bert_cli.parallel.tensorflow import mesh as runtime
from bert_cli.parallel.tensorflow.engine import TensorFlowEngine, replicated_weights
from bert_cli.parallel.tensorflow.mesh import devices_here
from bert_cli.parallel.tensorflow.stage import Stage
from bert_cli.parallel.tensorflow.update import random_bits
from bert_cli.tasks.run.build import OptimizerOf
from bert_cli.tasks.run.start import factors_of

__all__ = ["devices_here"]


def open_mesh(
    settings: TrainSettings, processes: Processes, stop_requested: Callable[[], bool]
) -> Mesh:
    """Take the devices of the settings' layout and join the other processes."""
    runtime.configure_runtime(settings.precision, settings.deterministic)
    replicas = settings.global_batch.replicas
    return runtime.open_mesh(
        processes, replicas, settings.parallel, settings.cluster, stop_requested
    )


def build_engine(
    settings: TrainSettings, mesh: Mesh, labels: int, optimizer: OptimizerOf | None
) -> TensorFlowEngine:
    """Return the engine with new weights; without an optimizer it does not train."""
    replicas = build_model(settings, mesh, labels)
    made = optimizer and optimizer(list(replicated_weights(replicas)))
    if made and settings.optimizer_opts.stochastic_rounding:
        made = replace(made, random_bits=random_bits)
    return TensorFlowEngine(
        replicas,
        mesh,
        seed=settings.seed,
        optimizer=made,
        parallel=settings.parallel,
        compiled=settings.compile != "nothing",
    )


def build_model(settings: TrainSettings, mesh: Mesh, labels: int = 2) -> list[list[Stage]]:
    """Return the stages of each replica on the devices, with initial values from the seed."""
    compile_fused(settings.compile != "nothing")
    return [_build_replica(settings, devices, labels) for devices in mesh.devices]


def _build_replica(settings: TrainSettings, devices: tuple[str, ...], labels: int) -> list[Stage]:
    config, parallel = settings.bert_config, settings.parallel
    names, factors = block_names(config, settings.LAST_BLOCKS), factors_of(settings)
    rest = iter(names)  # the settings' stages list the same blocks, with `hid` for each layer
    stages = [[next(rest) for _ in stage] for stage in parallel.pipeline_stages or [names]]
    built: list[Stage] = []
    table: Any = None
    for stage, number in zip(stages, parallel.pipeline_device_mapping or [0], strict=True):
        device, blocks = devices[number], {}
        with tf.device(device):
            for name in stage:
                blocks[name] = build_block(
                    name,
                    config,
                    seed=settings.seed,
                    policy=settings.precision,
                    word_table=table if name == "heads" else None,
                    labels=labels,
                    chunks=parallel.embedding_serialization_factor,
                    factors=factors,
                )
                table = word_table(blocks[name]) if name == "emb" else table
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


def device_memory(mesh: Mesh) -> tuple[int, int]:
    """Return the most bytes that a GPU of this process uses now, and has used."""
    gpus = [f"GPU:{name.rpartition(':')[2]}" for row in mesh.devices for name in row]
    used = [tf.config.experimental.get_memory_info(gpu) for gpu in gpus]
    return max(one["current"] for one in used), max(one["peak"] for one in used)


def synchronize() -> None:
    """Wait until the GPUs have finished; a CPU computes synchronously."""
    if tf.config.list_logical_devices("GPU"):
        tf.test.experimental.sync_devices()


def device_names() -> list[str]:
    """Return the names of the GPUs."""
    return [
        str(tf.config.experimental.get_device_details(gpu).get("device_name", gpu.name))
        for gpu in tf.config.list_physical_devices("GPU")
    ]


def cpu_mesh() -> Mesh:
    """Return a mesh of the CPU alone."""
    if tf.config.list_physical_devices("GPU"):
        # Otherwise TensorFlow takes all their memory with its first operation.
        tf.config.set_visible_devices([], "GPU")
    cpu = tf.config.list_logical_devices("CPU")[0].name
    return Mesh(1, ((cpu,),), cpu, Processes(()))
