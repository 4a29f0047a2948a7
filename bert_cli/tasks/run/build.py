"""Build the parts of a resolved run: optimizer, engine, state and step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import NamedTuple

from bert_cli.config.pretrain import PretrainSettings
from bert_cli.config.training import TrainSettings
from bert_cli.facts.optimizers import OPTIMIZERS
from bert_cli.model import scaling
from bert_cli.model.bert import Outputs, each_block
from bert_cli.model.fused import NEVER, WORTH_COMPILING
from bert_cli.model.operations import Operations
from bert_cli.optim.optimizer import Hyperparameters, Optimizer, RandomBits, weight_rules
from bert_cli.optim.schedule import first_loss_scale, learning_rate, with_decay
from bert_cli.parallel.engine import Engine, UpdateRequest
from bert_cli.parallel.runtime import BuildEngine, Mesh, Model
from bert_cli.planning.plan import Plan
from bert_cli.tasks.run.resolve import ResolvedRun
from bert_cli.train.checkpoint import Format
from bert_cli.train.loop import Prepare, State, Step


class Parts(NamedTuple):
    """The parts of a training run."""

    engine: Engine
    state: State
    step: Step


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


def build_engine(
    settings: TrainSettings, mesh: Mesh, labels: int = 2, *, trains: bool = True
) -> Engine:
    """Return the engine with new weights."""
    module = import_module(f"bert_cli.parallel.{settings.engine}.engine")
    build: BuildEngine = module.build_engine
    return build(model_of(settings, labels, trains=trains), mesh)


def model_of(
    settings: TrainSettings,
    labels: int = 2,
    *,
    trains: bool = True,
    has_values: bool = True,
) -> Model:
    """Return the model of the settings; without `has_values` its weights are zeros."""
    factors = factors_of(settings)
    fuse_above = NEVER if settings.compile == "nothing" else WORTH_COMPILING
    operations = Operations(fuse_above, factors)
    blocks = partial(
        each_block,
        settings.bert_config,
        last_blocks=settings.last_blocks,
        outputs=Outputs(labels, settings.parallel.embedding_serialization_factor),
        seed=settings.seed if has_values else None,
        policy=settings.precision,
        operations=operations,
    )
    make_optimizer = partial(optimizer_for, settings, factors) if trains else None
    return Model(blocks, settings.seed, make_optimizer)


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
        final = options.learning_rate.final_fraction
        rate = with_decay(rate, plan.decay_step, plan.total_steps, final)
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
