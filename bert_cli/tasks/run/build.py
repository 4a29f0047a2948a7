"""Build the parts of a run from its settings: optimizer, engine, state and step.

A run is built from a `ResolvedRun`; `evaluate` scores held-out examples.
"""

import math
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from bert_cli.config.markers import FIXED, marked
from bert_cli.config.optimizers import OPTIMIZERS
from bert_cli.config.pretrain import PretrainSettings
from bert_cli.config.training import TrainSettings
from bert_cli.data.stream.reader import ExampleStream, Stream
from bert_cli.errors import DeviceError
from bert_cli.files import JSONObject
from bert_cli.model import scaling
from bert_cli.model.bert import block_names, build_block
from bert_cli.model.fused import NEVER, WORTH_COMPILING
from bert_cli.optim.optimizer import Hyperparameters, Optimizer, RandomBits, weight_rules
from bert_cli.optim.schedule import first_loss_scale, learning_rate, with_decay
from bert_cli.parallel.cluster import Processes, Rendezvous
from bert_cli.parallel.engine import Batch, Block, Engine, UpdateRequest, count
from bert_cli.parallel.runtime import BuildEngine, Devices, Layout, Mesh, Model, Runtime
from bert_cli.planning.layout import check_processes
from bert_cli.planning.plan import Plan
from bert_cli.processes import quiet_imports
from bert_cli.tasks.run.models import Source
from bert_cli.train.checkpoint import Format
from bert_cli.train.loop import Prepare, State, Step, StopRequest
from bert_cli.train.metrics import BITS_PER_BYTE


class Parts(NamedTuple):
    """The parts of a training run."""

    engine: Engine
    state: State
    step: Step


@dataclass(frozen=True)
class ResolvedRun:
    """A run with complete settings, examples, plan and evaluation, before its engine is built."""

    settings: TrainSettings
    """With the sizes of the model and of the records, and with the layout."""
    source: Source | None
    """The model that the run starts from; None for new weights."""
    mesh: Mesh
    stop: StopRequest
    plan: Plan
    stream: Stream
    """The batches of the run, this process' part of them."""
    sample: Batch
    """Micro-batches [M, B, ...] for tracing, one for each replica of this process."""
    tokenizer: Path | None
    """The folder whose tokenizer is saved with the model."""
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
    unigram_entropy: float | None = None
    """Unigram entropy of the masked tokens, None if it cannot be compared with the loss."""
    unsaved_steps: int = 2
    """Steps of a run that saves nothing."""
    branch: Path | None = None
    """The checkpoint of another run that a new run continues with a decaying learning rate."""

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


@dataclass(frozen=True)
class Run:
    """A training run with all its parts."""

    resolved: ResolvedRun
    engine: Engine
    state: State
    step: Step
    form: Format

    def compile(self) -> None:
        """Trace and compile all functions of a step."""
        resolved = self.resolved
        self.engine.compile(resolved.prepare(self.engine, resolved.sample, UpdateRequest()))

    @property
    def is_first_rank(self) -> bool:
        """Return whether this process writes the run's files."""
        return self.engine.group.rank == 0


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
        reduce_bucket_bytes=10**6 * parallel.reduce_bucket_megabytes,
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
    check_processes(settings.global_batch, processes.count)
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


def build_engine(
    settings: TrainSettings, mesh: Mesh, labels: int = 2, *, trains: bool = True
) -> Engine:
    """Return the engine with new weights. Raises ConfigError if the optimizer has no rule for a weight."""
    config = settings.bert_config
    factors = factors_of(settings)

    def make_block(name: str, before: Mapping[str, Block]) -> Block:
        return build_block(
            name,
            config,
            seed=settings.seed,
            policy=settings.precision,
            before=before,
            labels=labels,
            chunks=settings.parallel.embedding_serialization_factor,
            factors=factors,
            fuse_above=NEVER if settings.compile == "nothing" else WORTH_COMPILING,
        )

    names = block_names(config, settings.last_blocks)
    make_optimizer = partial(optimizer_for, settings, factors) if trains else None
    module = import_module(f"bert_cli.parallel.{settings.engine}.engine")
    build: BuildEngine = module.build_engine
    model = Model(names, make_block, settings.seed, make_optimizer)
    return build(model, mesh)


def factors_of(settings: TrainSettings) -> scaling.Table:
    """Return the factors of Unit Scaling, none without it."""
    if not isinstance(settings, PretrainSettings) or settings.scaling is None:
        return {}
    return scaling.factors(settings.bert_config, settings.scaling, settings.micro_batch_shape)


def optimizer_for(
    settings: TrainSettings,
    factors: scaling.Table,
    names: Sequence[str],
    random_bits: RandomBits,
) -> Optimizer:
    """Return the optimizer of the weights with these names; stochastic rounding draws the bits."""
    options = settings.optimizer_opts
    kind = OPTIMIZERS[options.name]
    rules = weight_rules(
        names,
        kind,
        no_weight_decay=options.no_weight_decay,
        no_layer_adaptation=options.no_layer_adaptation,
        layer_decay=options.layer_decay,
    )
    if not kind.has_trust_ratio:
        for name in factors.keys() & rules.keys():
            rules[name] = replace(rules[name], rate=rules[name].rate * factors[name].rate)
    if steps := getattr(settings, "new_rows_only_steps", 0):
        known = getattr(settings, "known_rows", 0)
        free = {"emb/word/embeddings": known * settings.bert_config.hidden_size}
        free |= {name: known for name in names if name.endswith("/masked_lm/bias")}
        rules = {
            name: replace(rule, frozen_steps=steps, first_free=free.get(name, rule.first_free))
            for name, rule in rules.items()
        }
    return Optimizer(
        kind=kind,
        hyperparameters=Hyperparameters(
            beta_1=options.beta_1,
            beta_2=options.beta_2,
            epsilon=options.epsilon,
            weight_decay_rate=options.weight_decay_rate,
        ),
        rules=rules,
        seed=settings.seed,
        random_bits=random_bits if options.stochastic_rounding else None,
    )


def build_run(
    settings: TrainSettings,
    mesh: Mesh,
    plan: Plan,
    stop_requested: Callable[[], bool] = lambda: False,
    labels: int = 2,
    prepare: Prepare = Step.prepare,
) -> Parts:
    """Return all parts of a run at step 0, not traced; `labels` are the outputs of a classifier."""
    options = settings.optimizer_opts
    engine = build_engine(settings, mesh, labels)
    state = State(engine.weights, engine.slots, first_loss_scale(options.loss_scaling))
    rate = learning_rate(
        options.learning_rate.schedule_name,
        plan.peak_learning_rate,
        plan.warmup_steps,
        plan.total_steps,
        options.learning_rate.warmup_power,
    )
    if plan.decay_step is not None:
        shape = options.learning_rate.decay_shape
        rate = with_decay(rate, shape, plan.decay_step, plan.total_steps)
    step = Step(
        engine,
        state,
        micro_batches=plan.micro_batches,
        learning_rate=rate,
        max_gradient_norm=options.max_gradient_norm,
        max_skipped_steps=settings.max_skipped_steps,
        stop_requested=stop_requested,
        prepare=prepare,
    )
    return Parts(engine, state, step)


def evaluate(
    engine: Engine,
    stream: ExampleStream,
    examples: int,
    micro_batch_size: int,
    text_bytes: npt.NDArray[np.int64] | None = None,
) -> dict[str, float]:
    """Return means over the first examples of a held-out corpus, which the processes divide among them.

    With the bytes of each piece [V], `bits_per_byte` is the masked-LM loss in bits per byte of the masked pieces:
    unlike the loss per piece it can be compared between vocabularies.
    """
    engine.gather_weights()
    total = min(examples, stream.epoch_size or examples)
    group = engine.group
    head = engine.head
    sums = dict.fromkeys(sorted({over for over, _ in head.MEANS.values()}), 0.0)
    counts = dict.fromkeys((*head.COUNTS, "examples", "tokens", "bytes"), 0.0)
    starts = range(0, total, micro_batch_size)
    for first in starts[group.rank :: group.world_size]:
        rows = stream.rows(np.arange(first, min(total, first + micro_batch_size)))
        for name, value in count(rows, head.COUNTS).items():
            counts[name] += value
        if text_bytes is not None:
            masked = rows["masked_lm_ids"][rows["masked_lm_weights"] > 0]
            counts["bytes"] += float(text_bytes[masked].sum())
        for name, value in engine.evaluate(rows).items():
            sums[name] += value
    reduced = list(map(float, group.all_reduce([*sums.values(), *counts.values()])))
    summed = dict(zip(sums, reduced, strict=False))
    counts = dict(zip(counts, reduced[len(sums) :], strict=True))
    metrics = engine.means(summed, counts)
    if counts["bytes"]:
        bits = metrics["mlm_loss"] * counts["masked"] / math.log(2)
        metrics[BITS_PER_BYTE] = bits / counts["bytes"]
    return metrics
