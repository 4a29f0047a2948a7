"""Build a model, an optimizer, an engine and a step from the settings of a run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from bert_cli.config.training import OptimizerOpts, Plan, TrainSettings
from bert_cli.data.shards.manifest import package_versions
from bert_cli.data.stream.reader import ExampleStream
from bert_cli.model.bert import block_names, build_block, named_weights, word_table
from bert_cli.model.fused import compile_fused
from bert_cli.optim.adam import Hyperparameters, Optimizer, weight_rules
from bert_cli.optim.loss_scale import first_loss_scale
from bert_cli.optim.schedule import learning_rate
from bert_cli.parallel.cluster import Processes
from bert_cli.parallel.engine import Engine, Mesh, count
from bert_cli.parallel.tensorflow import mesh as tensorflow_mesh
from bert_cli.parallel.tensorflow.engine import TensorFlowEngine, replicated_weights
from bert_cli.parallel.tensorflow.stage import SavedActivations, Stage, split_blocks
from bert_cli.parallel.tensorflow.update import UpdateOptions, random_bits
from bert_cli.parallel.tensorflow.variables import ReplicatedVariable
from bert_cli.train.step import State, Step, means

PARTS = ("tensorflow", "keras", "numpy", "tokenizers", "safetensors")
# Steps of a trace; the first one still warms up.
TRACED_STEPS = 3


@dataclass(frozen=True)
class Model:
    """The stages of this process' replicas, and the weights of the run by name."""

    replicas: list[list[Stage]]
    weights: Mapping[str, ReplicatedVariable]


class Parts(NamedTuple):
    """The parts of a training run."""

    model: Model
    engine: TensorFlowEngine
    state: State
    step: Step


def never() -> bool:
    """Return False: no stop is requested."""
    return False


def open_mesh(
    settings: TrainSettings, processes: Processes, stop_requested: Callable[[], bool] = never
) -> Mesh:
    """Take the devices that the layout of the settings needs, and join the other processes."""
    options = tensorflow_mesh.RuntimeOptions(
        precision=settings.precision,
        reduce_precision=settings.parallel.reduce_precision,
        deterministic=settings.deterministic,
        cluster=settings.cluster,
    )
    mapping = settings.parallel.pipeline_device_mapping or [0]
    replicas = settings.global_batch.replicas
    return tensorflow_mesh.open_mesh(processes, replicas, mapping, options, stop_requested)


def build_run(
    settings: TrainSettings,
    mesh: Mesh,
    plan: Plan,
    stop_requested: Callable[[], bool] = never,
    labels: int = 2,
) -> Parts:
    """Return all parts of a run at step 0, not traced. Raises ConfigError for weights without a rule."""
    model = build_model(settings, mesh, labels)
    engine = build_engine(model, settings, mesh)
    state = build_state(engine, settings.optimizer_opts)
    return Parts(model, engine, state, build_step(engine, state, settings, plan, stop_requested))


def build_model(settings: TrainSettings, mesh: Mesh, labels: int = 2) -> Model:
    """Return the model of a task, split into stages on the devices, with initial values from the seed.

    `labels` are the outputs of a classifier.
    """
    compile_fused(settings.compile != "nothing")
    replicas = [_build_replica(settings, devices, labels) for devices in mesh.devices]
    return Model(replicas, replicated_weights(replicas))


def _build_replica(settings: TrainSettings, devices: tuple[str, ...], labels: int) -> list[Stage]:
    config, parallel = settings.bert_config, settings.parallel
    names = block_names(config, settings.LAST_BLOCKS)
    single = [["hid" if name.startswith("hid_") else name for name in names]]
    stages = split_blocks(parallel.pipeline_stages or single, names)
    saved: SavedActivations = parallel.recompute_by if parallel.recompute else "all"
    built: list[Stage] = []
    table: Any = None
    for stage, device in zip(stages, parallel.pipeline_device_mapping or [0], strict=True):
        blocks = []
        with tf.device(devices[device]):
            for name in stage:
                block = build_block(
                    name,
                    config,
                    seed=settings.seed,
                    policy=settings.precision,
                    word_table=table if name == "heads" else None,
                    labels=labels,
                    chunks=parallel.embedding_serialization_factor,
                )
                table = word_table(block) if name == "emb" else table
                blocks.append((name, block))
        *body, last = [block for _, block in blocks]
        head = last if stage[-1] == names[-1] else None
        body = body if head is not None else [*body, last]
        weights = named_weights(blocks)
        on_gpu = "GPU" in devices[device]
        compiled = settings.compile == "stages" or (settings.compile == "auto" and on_gpu)
        stage_device = devices[device]
        built.append(
            Stage(body, head, weights, device=stage_device, saved=saved, compiled=compiled)
        )
    return built


def build_engine(model: Model, settings: TrainSettings, mesh: Mesh) -> TensorFlowEngine:
    """Return the engine that runs the settings' schedule on the mesh and updates the weights."""
    parallel = settings.parallel
    options = UpdateOptions(
        sharded=parallel.replicated_tensor_sharding,
        offloaded=parallel.optimizer_state_offload,
        host=mesh.host,
        reduce_precision=parallel.reduce_precision,
        bucket_bytes=10**6 * parallel.reduce_bucket_megabytes,
        compiled=settings.compile != "nothing",
    )
    return TensorFlowEngine(
        model.replicas,
        mesh,
        seed=settings.seed,
        optimizer=build_optimizer(settings.optimizer_opts, list(model.weights), settings.seed),
        device_mapping=parallel.pipeline_device_mapping or [0],
        options=options,
        schedule=parallel.schedule,
        traced_steps=TRACED_STEPS if parallel.trace is not None else 0,
    )


def build_state(engine: Engine, options: OptimizerOpts) -> State:
    """Return the state at step 0."""
    return State(engine.weights, engine.moments, first_loss_scale(options.loss_scaling))


def build_step(
    engine: Engine,
    state: State,
    settings: TrainSettings,
    plan: Plan,
    stop_requested: Callable[[], bool],
) -> Step:
    """Return the step with the learning rate and limits of the settings."""
    options = settings.optimizer_opts
    rate = learning_rate(
        options.learning_rate.schedule_name,
        plan.peak_learning_rate,
        plan.warmup_steps,
        plan.total_steps,
    )
    return Step(
        engine,
        state,
        micro_batches=plan.micro_batches_per_step,
        learning_rate=rate,
        max_gradient_norm=options.max_gradient_norm,
        max_skipped_steps=settings.max_skipped_steps,
        stop_requested=stop_requested,
    )


def build_optimizer(options: OptimizerOpts, names: list[str], seed: int) -> Optimizer:
    """Return the optimizer with the rule of every weight. Raises ConfigError for weights without one."""
    rules = weight_rules(
        names,
        options.name,
        no_weight_decay=options.no_weight_decay,
        no_layer_adaptation=options.no_layer_adaptation,
        layer_decay=options.layer_decay,
    )
    return Optimizer(
        hyperparameters=Hyperparameters(
            beta_1=options.beta_1,
            beta_2=options.beta_2,
            epsilon=options.epsilon,
            weight_decay_rate=options.weight_decay_rate,
        ),
        rules=rules,
        seed=seed,
        random_bits=random_bits if options.stochastic_rounding else None,
    )


def versions() -> dict[str, str]:
    """Return the versions of the packages that decide the numbers, for state.json."""
    return package_versions(PARTS)


def evaluate(
    engine: Engine, stream: ExampleStream, examples: int, micro_batch_size: int
) -> dict[str, float]:
    """Return means over the first examples of a held-out corpus, which the processes divide among them."""
    total, group = min(examples, stream.epoch_size or examples), engine.group
    starts = range(0, total, micro_batch_size)
    head = engine.head
    sums: dict[str, float] = dict.fromkeys(engine.sum_names, 0.0)
    counts: dict[str, float] = dict.fromkeys((*head.COUNTS, "examples", "tokens"), 0.0)
    for first in starts[group.rank :: group.world_size]:
        rows = stream.rows(np.arange(first, min(total, first + micro_batch_size)))
        for name, value in count(rows, head.COUNTS).items():
            counts[name] += value
        for name, value in engine.evaluate(rows).items():
            sums[name] += value
    reduced = list(map(float, group.all_reduce([*sums.values(), *counts.values()])))
    return means(
        dict(zip(sums, reduced[: len(sums)], strict=True)),
        dict(zip(counts, reduced[len(sums) :], strict=True)),
        head.MEANS,
    )
