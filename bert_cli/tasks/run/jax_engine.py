"""Build the JAX engine of a run: its devices, the blocks of the model, and their update."""

import os
from collections.abc import Callable
from dataclasses import replace

import jax

from bert_cli.config.training import TrainSettings
from bert_cli.model.bert import build_blocks, named_weights
from bert_cli.model.fused import compile_fused
from bert_cli.parallel.cluster import Processes
from bert_cli.parallel.engine import Mesh
from bert_cli.parallel.jax import mesh as runtime
from bert_cli.parallel.jax.engine import JaxEngine, random_bits
from bert_cli.parallel.jax.mesh import devices_here
from bert_cli.tasks.run.build import OptimizerOf
from bert_cli.tasks.run.start import factors_of

__all__ = ["devices_here"]

# The first saves memory on a CPU: else XLA computes all chunks of the vocabulary at once, in 1.7 times the memory.
FLAGS = (
    "--xla_cpu_enable_concurrency_optimized_scheduler=false",
    "--xla_gpu_deterministic_ops=true",
)


def open_mesh(
    settings: TrainSettings, processes: Processes, stop_requested: Callable[[], bool]
) -> Mesh:
    """Take the devices of the settings' layout and join the other processes."""
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if flags[:1] in ("", "-") and FLAGS[0] not in flags:  # not the name of a file
        os.environ["XLA_FLAGS"] = " ".join([flags, *FLAGS[: 1 + settings.deterministic]])
    replicas = settings.global_batch.replicas
    return runtime.open_mesh(
        processes, replicas, settings.parallel, settings.cluster, stop_requested
    )


def build_engine(
    settings: TrainSettings, mesh: Mesh, labels: int, optimizer: OptimizerOf | None
) -> JaxEngine:
    """Return the engine with new weights; without an optimizer it does not train."""
    compile_fused(True)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        blocks = build_blocks(
            settings.bert_config,
            last_blocks=settings.LAST_BLOCKS,
            seed=settings.seed,
            policy=settings.precision,
            labels=labels,
            chunks=settings.parallel.embedding_serialization_factor,
            factors=factors_of(settings),
        )
    made = optimizer and optimizer(list(named_weights(blocks)))
    if made and settings.optimizer_opts.stochastic_rounding:
        made = replace(made, random_bits=random_bits)
    return JaxEngine(
        blocks,
        mesh,
        seed=settings.seed,
        optimizer=made,
        parallel=settings.parallel,
        accumulation=settings.global_batch.grad_acc_steps_per_replica,
    )


def device_memory(mesh: Mesh) -> tuple[int, int]:
    """Return the most bytes that an accelerator of this process uses now, and has used."""
    devices = jax.local_devices()[: sum(map(len, mesh.devices))]
    used = [device.memory_stats() or {} for device in devices]
    now, peak = "bytes_in_use", "peak_bytes_in_use"
    return max(one.get(now, 0) for one in used), max(one.get(peak, 0) for one in used)


def synchronize() -> None:
    """Do nothing: a step waits for its results."""


def device_names() -> list[str]:
    """Return the names of the accelerators."""
    return [one.device_kind for one in jax.local_devices() if one.platform != "cpu"]


def cpu_mesh() -> Mesh:
    """Return a mesh of the CPU alone."""
    return Mesh(1, (("jax:CPU:0",),), "", Processes(()))
