"""Complete an order from the model and the devices of its run, and take the devices."""

import socket
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import cast

from bert_cli.config.tools import DoctorSettings
from bert_cli.config.training import Order, TrainSettings
from bert_cli.disk import is_writable
from bert_cli.errors import ConfigError, DataError, DeviceError, needs_extra
from bert_cli.parallel.cluster import Processes, Rendezvous
from bert_cli.parallel.runtime import Devices, Layout, Mesh, Runtime
from bert_cli.parse.load import changed
from bert_cli.processes import quiet_imports
from bert_cli.tasks.model.models import Source

ONE_PROCESS = Processes(())


def check_folder(settings: TrainSettings, name: str) -> None:
    """Raise DataError if the folder of a setting cannot be written, before the first step and not after the last."""
    folder = getattr(settings, name)
    if settings.saves and folder is not None and not is_writable(folder):
        remedy = f"use another --{name.replace('_', '-')}"
        raise DataError(f"{name} ({folder})", "cannot be written", remedy)


def check_output_paths(settings: TrainSettings) -> None:
    """Raise ConfigError for a run without a folder, or without its tracker."""
    if settings.saves and settings.wandb.enabled and find_spec("wandb") is None:
        raise ConfigError("wandb.enabled", needs_extra("wandb"))
    if settings.saves and settings.save_ckpt_path is None:
        remedy = "pass --save-ckpt-path, the folder of this run"
        raise ConfigError("save_ckpt_path", "is missing", remedy)


def with_shape_of(order: Order, source: Source | None) -> Order:
    """Return the order with the shape of a model, except for the fields that it sets."""
    if source is None:
        return order
    shape = source.config.model_dump() | order.bert_config.model_dump(exclude_unset=True)
    return changed(order, bert_config=shape)


def runtime(engine: str) -> Runtime:
    """Return the module of an engine's devices and processes, `parallel/ENGINE/mesh`; it imports the framework."""
    with quiet_imports():
        return cast(Runtime, import_module(f"bert_cli.parallel.{engine}.mesh"))


def find_devices(
    settings: TrainSettings | DoctorSettings, processes: Processes = ONE_PROCESS
) -> Devices:
    """Return this process' devices.

    Raises DeviceError with `require_gpu` on a machine that has only its CPU.
    """
    engine = settings.engine
    devices = runtime(engine).devices_here(processes)
    if settings.require_gpu and devices.kind == "CPU":
        where = f"require_gpu (rank {processes.rank} on {socket.gethostname()})"
        problem = f"engine {engine} finds neither a GPU nor a TPU"
        extra = "jax-cuda" if engine == "jax" else "cuda"
        remedy = f"check nvidia-smi, CUDA_VISIBLE_DEVICES and the extra {extra}, or leave it out"
        raise DeviceError(where, problem, remedy)
    return devices


def layout_of(order: TrainSettings) -> Layout:
    """Return the layout of the order."""
    parallel = order.parallel
    stages = parallel.pipeline_stages
    return Layout(
        replicas=order.global_batch.replicas,
        accumulation=order.global_batch.grad_acc_steps_per_replica,
        stage_lengths=None if stages is None else list(map(len, stages)),
        stage_devices=parallel.pipeline_device_mapping or [0],
        tensor_shape=parallel.tensor_shape,
        recomputes=parallel.recompute,
        shard_weights=parallel.shard_weights,
        shard_moments=parallel.replicated_tensor_sharding,
        offload_moments=parallel.optimizer_state_offload,
        compile=order.compile,
    )


def open_mesh(
    order: TrainSettings,
    processes: Processes = ONE_PROCESS,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Mesh:
    """Take the devices of the order's layout and join the other processes."""
    module = runtime(order.engine)
    module.configure_runtime(order.precision, order.deterministic)
    rendezvous = Rendezvous(
        lost_after_seconds=order.cluster.lost_after_seconds,
        register_seconds=order.cluster.start_within_seconds,
        stop_requested=stop_requested,
    )
    return module.open_mesh(processes, layout_of(order), rendezvous)
