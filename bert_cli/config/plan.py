"""Settings and the number of examples, turned once into the whole numbers of a run.

Whatever is counted in steps is decided here and nowhere else: how many steps, how many of them warm
up, which micro-batches a step has. The rest of the tool reads a plan and does no arithmetic of its
own. A plan is also what a run prints first, so that a person sees what will happen before it does.
"""

import math
from dataclasses import dataclass

from bert_cli.config.layout import count
from bert_cli.config.training import PretrainSettings, TrainSettings
from bert_cli.errors import ConfigError

# Examples of a run that says nothing else, by the longest sequence they hold for: Graphcore's example's.
DEFAULT_EXAMPLES = {128: 460_849_152, 512: 34_239_360}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The whole numbers of a run."""

    total_steps: int
    """Moves of the weights."""
    warmup_steps: int
    """Steps in which the learning rate climbs."""
    examples_per_step: int
    """Global batch: micro-batch x replicas x accumulation."""
    micro_batch_size: int
    """Examples that run at once."""
    micro_batches_per_step: int
    """Micro-batches of all replicas together."""
    examples: int
    """Examples the whole run reads."""
    corpus_examples: int | None
    """Records in the corpus; None for made-up examples."""
    peak_learning_rate: float
    """Highest learning rate, after the linear scaling rule."""
    sequences_per_example: float = 1.0
    """More than 1 where examples are packs; on average over an epoch."""
    rate_follows_batch: bool = False
    """The peak learning rate was scaled by the sequences of a step."""

    @property
    def epochs(self) -> float | None:
        """How often the run goes through the corpus."""
        return None if self.corpus_examples is None else self.examples / self.corpus_examples

    @property
    def sequences_per_step(self) -> int:
        """The global batch as it counts for the learning rate: packs are several sequences each."""
        return round(self.examples_per_step * self.sequences_per_example)

    @property
    def step_in_words(self) -> str:
        """What a step has: examples, or packs and the sequences in them."""
        if self.sequences_per_example > 1:
            return f"{self.examples_per_step:,} packs, {self.sequences_per_step:,} sequences"
        return f"{self.examples_per_step:,} examples"


def make_plan(
    settings: PretrainSettings, corpus_examples: int | None, sequences_per_example: float = 1.0
) -> Plan:
    """The plan of a pre-training run over a corpus of so many examples (None: made-up ones).

    Raises ConfigError for a sequence length that has no default number of examples.
    """
    asked = settings.total_num_train_samples or _default_examples(settings.max_seq_length)
    return plan_of(settings, asked, corpus_examples, sequences_per_example)


def plan_of(
    settings: TrainSettings,
    examples: int,
    corpus_examples: int | None,
    sequences_per_example: float = 1.0,
) -> Plan:
    """The plan of a run that reads so many examples, rounded up to whole steps.

    Where they are packs, what is asked for is counted in sequences, as the learning rate's batch is
    (Krell et al. 2021, section 3.3): a run of so many samples sees as many, in fewer steps.
    """
    batch = settings.global_batch
    micro_batches = batch.replicas * batch.grad_acc_steps_per_replica
    examples_per_step = batch.micro_batch_size * micro_batches
    sequences = examples_per_step * sequences_per_example
    total_steps = math.ceil(examples / sequences)
    rate = settings.optimizer_opts.learning_rate
    scale = 1.0 if rate.reference_batch_size is None else sequences / rate.reference_batch_size
    return Plan(
        total_steps=total_steps,
        warmup_steps=int(rate.warmup_frac * total_steps),
        examples_per_step=examples_per_step,
        micro_batch_size=batch.micro_batch_size,
        micro_batches_per_step=micro_batches,
        examples=total_steps * examples_per_step,
        corpus_examples=corpus_examples,
        peak_learning_rate=rate.max_learning_rate * scale,
        sequences_per_example=sequences_per_example,
        rate_follows_batch=rate.reference_batch_size is not None,
    )


def _default_examples(sequence_length: int) -> int:
    for longest, examples in DEFAULT_EXAMPLES.items():
        if sequence_length <= longest:
            return examples
    raise ConfigError(
        f"total_num_train_samples: is not given, and there is no default for sequences of {sequence_length}; "
        "give --total-num-train-samples"
    )


def describe(plan: Plan) -> str:
    """The plan in the words of a person, a fact a line."""
    packed = plan.sequences_per_example > 1
    lines = [
        f"{count(plan.total_steps, 'step')} of {plan.step_in_words} "
        f"({count(plan.micro_batches_per_step, 'micro-batch')} of {plan.micro_batch_size})",
        f"learning rate up to {plan.peak_learning_rate:g}, {count(plan.warmup_steps, 'step')} of warm-up",
    ]
    if packed and not plan.rate_follows_batch:
        # Not by itself: how long the packs are is known only now, and a step is what was asked for.
        lines.append(
            f"a pack holds {plan.sequences_per_example:.2f} sequences, so a step has as many times the batch "
            "at the same learning rate: divide grad_acc_steps_per_replica by that, or give "
            "learning_rate.reference_batch_size"
        )
    if plan.corpus_examples is not None:
        epochs = f"{plan.epochs:.3g}"
        lines.append(
            f"{plan.examples:,} {'packs' if packed else 'examples'} out of {plan.corpus_examples:,} "
            f"({epochs} {'epoch' if epochs == '1' else 'epochs'})"
        )
    return "\n".join(f"  {line}" for line in lines)
