"""Wiring: settings become a model, an optimizer, an engine.

Only this floor holds data, model, optimizer and loop in one hand. Each function builds one thing;
the tasks choose which.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from bert_cli.config.plan import Plan
from bert_cli.config.training import OptimizerOpts, TrainSettings
from bert_cli.data.shards.manifest import package_versions
from bert_cli.data.stream.reader import ExampleStream
from bert_cli.model.bert import block_names, build_block, named_weights, word_table
from bert_cli.model.fused import compile_chains
from bert_cli.optim.adam import Hyperparameters, Optimizer, weight_rules
from bert_cli.optim.loss_scale import first_loss_scale
from bert_cli.optim.schedule import learning_rate
from bert_cli.parallel.tensorflow.collectives import Peers, group_of
from bert_cli.parallel.tensorflow.engine import Engine
from bert_cli.parallel.tensorflow.mesh import Mesh
from bert_cli.parallel.tensorflow.moves import random_bits
from bert_cli.parallel.tensorflow.stage import Keeps, Stage, cut
from bert_cli.parallel.tensorflow.trace import Trace
from bert_cli.parallel.tensorflow.update import DeviceUpdate, Keeping
from bert_cli.parallel.tensorflow.variables import Copies, Shares
from bert_cli.train.step import State, Step, Value, count, means

PARTS = ("tensorflow", "keras", "numpy", "tokenizers", "safetensors")


# Steps that are noted when a trace is asked for: the first one still warms up.
TRACED_STEPS = 3


@dataclass(frozen=True)
class Model:
    """The stages of this process' replicas, and the weights of the run by name."""

    replicas: list[list[Stage]]
    weights: Mapping[str, Copies]


class Parts(NamedTuple):
    """What a run that trains consists of."""

    model: Model
    engine: Engine
    state: State
    step: Step


def never() -> bool:
    """Nobody asks this run to stop."""
    return False


def build_run(
    settings: TrainSettings,
    mesh: Mesh,
    plan: Plan,
    asked_to_stop: Callable[[], bool] = never,
    labels: int = 2,
) -> Parts:
    """All parts of a run at step 0, not yet traced. Raises ConfigError for weights without a rule."""
    model = build_model(settings, mesh, labels)
    engine = build_engine(model, settings, mesh)
    state = build_state(model, engine, mesh, settings.optimizer_opts)
    return Parts(model, engine, state, build_step(engine, state, settings, plan, asked_to_stop))


def build_model(settings: TrainSettings, mesh: Mesh, labels: int = 2) -> Model:
    """The model of a task, cut into stages on the devices, with first values from the seed.

    `labels` are the outputs of a classifier.
    """
    compile_chains(settings.compile != "nothing")
    replicas = [_build_replica(settings, devices, labels) for devices in mesh.devices]
    names = {name: None for stage in replicas[0] for name in stage.weights}
    weights = {name: Copies([_find(stages, name) for stages in replicas]) for name in names}
    return Model(replicas, weights)


def _build_replica(settings: TrainSettings, devices: tuple[str, ...], labels: int) -> list[Stage]:
    config, parallel = settings.bert_config, settings.parallel
    names = block_names(config, settings.LAST_BLOCKS)
    whole = [["hid" if name.startswith("hid_") else name for name in names]]
    stages = cut(parallel.pipeline_stages or whole, names)
    keeps: Keeps = parallel.recompute_by if parallel.recompute else "all"
    built: list[Stage] = []
    table: Any = None
    for stage, device in zip(stages, parallel.pipeline_device_mapping or [0], strict=True):
        blocks = []
        with tf.device(devices[device]):
            for name in stage:
                given = table if name == "heads" else None
                block = build_block(
                    name,
                    config,
                    seed=settings.seed,
                    policy=settings.precision,
                    word_table=given,
                    labels=labels,
                    chunks=parallel.embedding_serialization_factor,
                )
                table = word_table(block) if name == "emb" else table
                blocks.append((name, block))
        *body, last = [block for _, block in blocks]
        head = last if stage[-1] == names[-1] else None
        body = body if head is not None else [*body, last]
        weights = named_weights(blocks)
        place = devices[device]
        compiled = settings.compile == "stages" or (settings.compile == "auto" and "GPU" in place)
        built.append(Stage(body, head, weights, device=place, keeps=keeps, compiled=compiled))
    return built


def _find(stages: list[Stage], name: str) -> tf.Variable:
    return next(stage.weights[name] for stage in stages if name in stage.weights)


def build_engine(model: Model, settings: TrainSettings, mesh: Mesh) -> Engine:
    """The engine that plays the settings' schedule on the mesh and moves the weights."""
    parallel = settings.parallel
    optimizer = build_optimizer(settings.optimizer_opts, list(model.weights), settings.seed)
    keeping = Keeping(
        sharded=parallel.replicated_tensor_sharding,
        offloaded=parallel.optimizer_state_offload,
        host=mesh.host,
        reduce_precision=parallel.reduce_precision,
        bucket_bytes=10**6 * parallel.reduce_bucket_megabytes,
        compiled=settings.compile != "nothing",
    )
    mapping = parallel.pipeline_device_mapping or [0]
    updates = []
    for replica, stages in enumerate(model.replicas):
        row = []
        for device in range(len(mesh.devices[replica])):
            here = [stage for stage, on in zip(stages, mapping, strict=True) if on == device]
            # A device may have nothing but the gather of the masked places, which has no weights.
            if any(stage.weights for stage in here):
                group = group_of(mesh, replica, device)
                row.append(DeviceUpdate(here, group, optimizer, keeping))
        updates.append(row)
    return Engine(
        model.replicas,
        updates,
        Peers(mesh),
        seed=settings.seed,
        schedule=parallel.schedule,
        trace=Trace(TRACED_STEPS) if parallel.trace is not None else None,
    )


def build_state(model: Model, engine: Engine, mesh: Mesh, options: OptimizerOpts) -> State:
    """The four things at step 0."""
    moments = {
        name: _moments(name, engine, mesh, weight.shape) for name, weight in model.weights.items()
    }
    return State(model.weights, moments, first_loss_scale(options.loss_scaling))


def _moments(name: str, engine: Engine, mesh: Mesh, shape: tuple[int, ...]) -> tuple[Value, Value]:
    holders = [next(on for on in row if name in on.moments) for row in engine.updates]
    first, second = ([holder.moments[name][which] for holder in holders] for which in (0, 1))
    if not holders[0].sharded:
        return Copies(first), Copies(second)
    part = (shape, mesh.first_replica, mesh.replicas, engine.peers)
    return Shares(first, *part), Shares(second, *part)


def build_step(
    engine: Engine,
    state: State,
    settings: TrainSettings,
    plan: Plan,
    asked_to_stop: Callable[[], bool],
) -> Step:
    """One update with the optimizer and schedule of the settings."""
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
        asked_to_stop=asked_to_stop,
    )


def build_optimizer(options: OptimizerOpts, names: list[str], seed: int) -> Optimizer:
    """The optimizer with the rule of every weight. Raises ConfigError for weights without one."""
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
    """Versions of the parts that decide the numbers, for state.json."""
    return package_versions(PARTS)


def evaluate(
    engine: Engine, stream: ExampleStream, examples: int, micro_batch_size: int
) -> dict[str, float]:
    """Means over the first examples of a held-out corpus, without dropout; the processes share them."""
    total, peers = min(examples, stream.epoch_size or examples), engine.peers
    starts = range(0, total, micro_batch_size)
    head = engine.head
    sums: dict[str, float] = dict.fromkeys(engine.sum_names, 0.0)
    counts: dict[str, float] = dict.fromkeys((*head.COUNTS, "examples", "tokens"), 0.0)
    for first in starts[peers.rank :: peers.count]:
        rows = stream.rows(np.arange(first, min(total, first + micro_batch_size)))
        for name, value in count(rows, head.COUNTS).items():
            counts[name] += value
        for name, value in engine.evaluate(rows).items():
            sums[name] += value
    found = list(map(float, peers.total([*sums.values(), *counts.values()])))
    return means(
        dict(zip(sums, found[: len(sums)], strict=True)),
        dict(zip(counts, found[len(sums) :], strict=True)),
        head.MEANS,
    )
