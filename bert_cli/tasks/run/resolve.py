"""Resolve a run once: settings completed from its model, its devices and the run that it continues.

A `ResolvedRun` has the complete settings, the examples, the plan and the evaluation; it has no engine yet.
"""

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TypeVar, cast

from bert_cli.config.markers import FIXED, marked
from bert_cli.config.training import TrainSettings
from bert_cli.data.examples.reader import Stream
from bert_cli.data.tokens.tokenizer import TokenizerFolder
from bert_cli.errors import ConfigError, DataError, DeviceError
from bert_cli.files import JSONObject
from bert_cli.parallel.cluster import (
    Processes,
    Rendezvous,
    StoppedWhileJoiningError,
    find_processes,
)
from bert_cli.parallel.engine import Batch, Engine
from bert_cli.parallel.runtime import Devices, Layout, Mesh, Runtime
from bert_cli.parse.load import changed
from bert_cli.planning import layout
from bert_cli.planning.plan import Plan
from bert_cli.planning.workload import laid_out, workload_of
from bert_cli.processes import print_error, print_line, quiet_imports
from bert_cli.tasks.run.folder import Start
from bert_cli.tasks.run.models import Source
from bert_cli.train.loop import Prepare, Step, StopRequest

Settings = TypeVar("Settings", bound=TrainSettings)


@dataclass(frozen=True)
class ResolvedRun:
    """A run with complete settings, examples, plan and evaluation, before its engine is built."""

    settings: TrainSettings
    """With the sizes of the model and of the records, and with the layout."""
    start: Start
    mesh: Mesh
    stop: StopRequest
    plan: Plan
    stream: Stream
    """The batches of the run, this process' part of them."""
    sample: Batch
    """Micro-batches [M, B, ...] for tracing, one for each replica of this process."""
    tokenizer: TokenizerFolder | None
    """The tokenizer that is saved with the model."""
    label_names: Sequence[str] | None = None
    """Class names, `labels` of them; None for regression or unnamed classes."""
    labels: int = 2
    prepare: Prepare = Step.prepare
    evaluate: Callable[[Engine, int], dict[str, float]] | None = None
    """Return metrics on held-out examples after a step."""
    held_out: str = ""
    """Fingerprint of the held-out examples, which the processes divide among them."""
    evaluate_every: int | None = None
    """Steps between evaluations; the last step is evaluated, too."""
    best: str | None = None
    """The metric of an evaluation whose highest value selects the best checkpoint."""
    early_stop: int | None = None
    """Evaluations in a row without a better score after which the run ends."""
    unigram_entropy: float | None = None
    """Unigram entropy of the masked tokens, None if it cannot be compared with the loss."""
    unsaved_steps: int = 2
    """Steps of a run that saves nothing."""

    @cached_property
    def dumped(self) -> JSONObject:
        """Return the settings as JSON, as they are saved."""
        return self.settings.model_dump(mode="json")

    def dumped_with(self, marker: str) -> JSONObject:
        """Return the settings that have a marker, as JSON."""
        names = marked(type(self.settings), marker)
        return {name: value for name, value in self.dumped.items() if name in names}

    @property
    def fixed(self) -> JSONObject:
        """Return the values that must be equal to resume a run: the fixed settings and the numbers that follow."""
        plan = self.plan
        stored_names = {"length_buckets": "length_bins"}
        settings = self.dumped_with(FIXED)
        sizes = {} if plan.step_sizes is None else {"step_sizes": plan.step_sizes}
        return {
            **{stored_names.get(name, name): value for name, value in settings.items()},
            # Dropout is a function of the micro-batch.
            "micro_batch_size": self.settings.global_batch.micro_batch_size,
            "examples_per_step": plan.examples_per_step,
            "total_steps": plan.total_steps,
            "corpus": self.stream.fingerprint,
            **sizes,
        }

    @property
    def folder(self) -> Path:
        """Return the run's folder."""
        assert self.settings.save_ckpt_path is not None
        return self.settings.save_ckpt_path


def check_output_paths(settings: TrainSettings) -> None:
    """Raise ConfigError when the run has no folder to save in, DataError when its trace cannot be written."""
    trace = settings.parallel.trace
    if trace is not None and not is_writable(trace):
        remedy = "choose another file, in an existing folder"
        raise DataError(f"parallel.trace ({trace})", "cannot be written", remedy)
    if settings.saves and settings.save_ckpt_path is None:
        remedy = "give --save-ckpt-path, the folder of this run"
        raise ConfigError("save_ckpt_path", "is not given", remedy)


def is_writable(path: Path) -> bool:
    """Return whether a file can be written, for a check before the first step instead of after the last."""
    folder = next((parent for parent in path.absolute().parents if parent.exists()), path)
    return not path.is_dir() and folder.is_dir() and os.access(folder, os.W_OK)


def with_shape_of(settings: Settings, source: Source | None) -> Settings:
    """Return the settings with the shape of a model, except for the fields that they set."""
    if source is None:
        return settings
    shape = source.config.model_dump() | settings.bert_config.model_dump(exclude_unset=True)
    return changed(settings, bert_config=shape)


def with_layout(settings: Settings, devices: Devices, processes: int, start: Start) -> Settings:
    """Return the settings with the layout and the micro-batch that they leave open.

    `devices` belong to one process. Dropout depends on the micro-batch, so a resumed run has its checkpoint's.
    """
    kind, number, memory = devices
    work = workload_of(settings)
    if start.continued is not None and work.batch.examples_per_step is not None:
        work = layout.with_micro_batch(work, start.fixed.get("micro_batch_size", 1))
    chosen = layout.choose(work, kind, processes * number, memory, processes)
    return laid_out(settings, chosen)


def runtime(engine: str) -> Runtime:
    """Return the module of an engine's devices and processes, `parallel/ENGINE/mesh`; it imports the framework."""
    with quiet_imports():
        return cast(Runtime, import_module(f"bert_cli.parallel.{engine}.mesh"))


def find_devices(engine: str, processes: Processes, *, require_gpu: bool) -> Devices:
    """Return this process' devices.

    Raises DeviceError with `require_gpu` on a machine that has only its CPU.
    """
    devices = runtime(engine).devices_here(processes)
    if require_gpu and devices.kind == "CPU":
        where = f"require_gpu (rank {processes.rank} on {socket.gethostname()})"
        problem = f"engine {engine} finds neither a GPU nor a TPU"
        extra = "jax-cuda" if engine == "jax" else "cuda"
        remedy = f"check nvidia-smi, CUDA_VISIBLE_DEVICES and the extra {extra}, or leave it out"
        raise DeviceError(where, problem, remedy)
    return devices


def layout_of(settings: TrainSettings) -> Layout:
    """Return the layout that the settings describe."""
    parallel = settings.parallel
    stages = parallel.pipeline_stages
    return Layout(
        replicas=settings.global_batch.replicas,
        accumulation=settings.global_batch.grad_acc_steps_per_replica,
        stage_lengths=None if stages is None else list(map(len, stages)),
        stage_devices=parallel.pipeline_device_mapping or [0],
        schedule=parallel.schedule,
        tensor_shape=parallel.tensor_shape,
        saved=parallel.recompute_by if parallel.recompute else "all",
        shard_weights=parallel.shard_weights,
        shard_moments=parallel.replicated_tensor_sharding,
        offload_moments=parallel.optimizer_state_offload,
        reduce_precision=parallel.reduce_precision,
        compile=settings.compile,
        # The first of three steps still warms up.
        traced_steps=0 if parallel.trace is None else 3,
    )


def open_mesh(
    settings: TrainSettings,
    processes: Processes,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Mesh:
    """Take the devices of the settings' layout and join the other processes."""
    layout.check_processes(settings.global_batch, processes.count)
    module = runtime(settings.engine)
    module.configure_runtime(settings.precision, settings.deterministic)
    cluster = settings.cluster
    rendezvous = Rendezvous(
        bind_address=cluster.bind_address,
        report_after_seconds=cluster.report_waiting_after_seconds,
        lost_after_seconds=cluster.lost_after_seconds,
        stop_requested=stop_requested,
    )
    return module.open_mesh(processes, layout_of(settings), rendezvous)


def take_devices(
    settings: Settings, start: Start, stack: ExitStack
) -> tuple[Settings, Mesh, StopRequest]:
    """Handle signals, find the other processes, choose the layout and take the devices.

    Of several processes only rank 0 prints, as long as `stack` is open.
    """
    stop = stack.enter_context(StopRequest())
    cluster = settings.cluster
    processes = find_processes(os.environ, cluster.workers, cluster.rank)
    if processes.rank > 0:
        stack.enter_context(redirect_stdout(open(os.devnull, "w", encoding="utf-8")))  # noqa: SIM115
    if settings.about is not None:
        print_line(f"{settings.about.what}\n{settings.about.expect}")
    is_open = workload_of(settings).is_open
    if is_open or settings.require_gpu:
        devices = find_devices(settings.engine, processes, require_gpu=settings.require_gpu)
    if is_open:
        kind, number, memory = devices
        is_auto = settings.global_batch.examples_per_step is not None
        settings = with_layout(settings, devices, processes.count, start)
        what = f"micro-batch {settings.global_batch.micro_batch_size}" if is_auto else "layout"
        chosen_for = f"{processes.count * number} x {kind} of {memory / 1e9:.1f} GB"
        lines = [f"{what}: chosen for {chosen_for}"]
        lines += layout.idle_memory(workload_of(settings), kind, memory)
        print_line("\n".join(lines))
    try:
        mesh = open_mesh(settings, processes, stop)
    except StoppedWhileJoiningError:
        text = "run: stopped before all processes had started; nothing was done"
        print_error(text)
        raise SystemExit(settings.exit_code_when_stopped) from None
    # Installed again: TensorFlow's runtime for several processes replaces the handler of SIGTERM.
    stop.listen()
    return settings, mesh, stop
