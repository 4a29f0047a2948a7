"""Build the parts of a run: optimizer, engine, state and step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module

from bert_cli.config.training import TrainSettings
from bert_cli.facts.optimizers import OPTIMIZERS
from bert_cli.model.arithmetic import scaling
from bert_cli.model.arithmetic.fused import NEVER, WORTH_COMPILING
from bert_cli.model.arithmetic.operations import Operations
from bert_cli.model.build import Outputs, each_block
from bert_cli.optim.optimizer import Hyperparameters, Optimizer, RandomBits, weight_rules
from bert_cli.optim.schedule import first_loss_scale, learning_rate, with_decay
from bert_cli.parallel.engine import Engine
from bert_cli.parallel.runtime import BuildEngine, Mesh, Model
from bert_cli.planning.plan import Plan
from bert_cli.tasks.run.job import Job
from bert_cli.tasks.run.start import factors_of
from bert_cli.train.checkpoint import Format
from bert_cli.train.loop import State, Step


@dataclass(frozen=True)
class Run:
    """A training run with all its parts."""

    job: Job
    engine: Engine
    state: State
    step: Step
    form: Format

    @property
    def is_first_rank(self) -> bool:
        """Return whether this process writes the run's files."""
        return self.engine.group.rank == 0


def build_engine(
    order: TrainSettings, mesh: Mesh, labels: int = 2, *, trains: bool = True
) -> Engine:
    """Return the engine with new weights; `labels` are the outputs of a classifier."""
    module = import_module(f"bert_cli.parallel.{order.engine}.engine")
    build: BuildEngine = module.build_engine
    return build(model_of(order, labels, trains=trains), mesh)


def model_of(order: TrainSettings, labels: int = 2, *, trains: bool = True) -> Model:
    """Return the model of the order."""
    factors = factors_of(order)
    fuse_above = NEVER if order.compile == "nothing" else WORTH_COMPILING
    operations = Operations(fuse_above, factors)
    blocks = partial(
        each_block,
        order.bert_config,
        last_blocks=order.head.last_blocks,
        outputs=Outputs(labels, order.parallel.embedding_serialization_factor),
        seed=order.seed,
        policy=order.precision,
        operations=operations,
    )
    make_optimizer = partial(optimizer_for, order, factors) if trains else None
    return Model(blocks, order.seed, make_optimizer)


def optimizer_for(
    order: TrainSettings, factors: scaling.Table, names: Sequence[str], random_bits: RandomBits
) -> Optimizer:
    """Return the optimizer of the weights with these names; stochastic rounding draws the bits."""
    options = order.optimizer_opts
    kind = OPTIMIZERS[options.name]
    rules = weight_rules(
        names,
        kind,
        no_weight_decay=options.no_weight_decay,
        layer_decay=options.layer_decay,
    )
    # LAMB's ratio has the scale of the weight already; AdamW's rate gets the deviation of Unit Scaling.
    if not kind.has_trust_ratio:
        for name in factors.keys() & rules.keys():
            rules[name] = replace(rules[name], rate=rules[name].rate * factors[name].deviation)
    return Optimizer(
        kind=kind,
        hyperparameters=Hyperparameters(
            beta_1=options.beta_1,
            beta_2=options.beta_2,
            epsilon=options.epsilon,
            weight_decay_rate=options.weight_decay_rate,
        ),
        rules=rules,
        seed=order.seed,
        random_bits=random_bits if options.stochastic_rounding else None,
    )


def build_run(
    order: TrainSettings, mesh: Mesh, plan: Plan, labels: int = 2
) -> tuple[Engine, State, Step]:
    """Return all parts of a run at step 0, not traced; `labels` are the outputs of a classifier."""
    options = order.optimizer_opts
    engine = build_engine(order, mesh, labels)
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
    step = Step(engine, state, plan.micro_batches, rate, options.max_gradient_norm)
    return engine, state, step
