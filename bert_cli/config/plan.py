"""The plan of a run: its integers, computed from the settings and the number of examples.

Steps, warm-up steps and micro-batches are computed only here; the rest of the tool reads the plan. A run
prints it before the first step.
"""

import math
from dataclasses import dataclass

from bert_cli.config.layout import count
from bert_cli.config.training import PretrainSettings, TrainSettings
from bert_cli.errors import ConfigError

# Default number of examples by the maximum sequence length, from Graphcore's example.
DEFAULT_EXAMPLES = {128: 460_849_152, 512: 34_239_360}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The integers of a run."""

    total_steps: int
    """Updates of the weights."""
    warmup_steps: int
    """Steps in which the learning rate rises."""
    examples_per_step: int
    """Global batch: micro-batch x replicas x accumulation."""
    micro_batch_size: int
    """Examples that a replica processes at once."""
    micro_batches_per_step: int
    """Micro-batches of all replicas together."""
    examples: int
    """Examples that the run reads."""
    corpus_examples: int | None
    """Records in the corpus; None for synthetic examples."""
    peak_learning_rate: float
    """Highest learning rate, after the linear scaling rule."""
    sequences_per_example: float = 1.0
    """Mean number of sequences in a pack over an epoch; 1 without packs."""
    rate_follows_batch: bool = False
    """The peak learning rate was scaled by the sequences of a step."""

    @property
    def epochs(self) -> float | None:
        """Return the number of epochs; None for synthetic examples."""
        return None if self.corpus_examples is None else self.examples / self.corpus_examples

    @property
    def sequences_per_step(self) -> int:
        """Return the global batch in sequences, which the learning rate depends on."""
        return round(self.examples_per_step * self.sequences_per_example)

    @property
    def step_in_words(self) -> str:
        """Return the size of a step as text: examples, or packs and their sequences."""
        if self.sequences_per_example > 1:
            return f"{self.examples_per_step:,} packs, {self.sequences_per_step:,} sequences"
        return f"{self.examples_per_step:,} examples"


def make_plan(
    settings: PretrainSettings, corpus_examples: int | None, sequences_per_example: float = 1.0
) -> Plan:
    """Return the plan of a pre-training run on a corpus of this size (None: synthetic examples).

    Raises ConfigError for a sequence length that has no default number of examples.
    """
    examples = settings.total_num_train_samples or _default_examples(settings.max_seq_length)
    return plan_of(settings, examples, corpus_examples, sequences_per_example)


def plan_of(
    settings: TrainSettings,
    examples: int,
    corpus_examples: int | None,
    sequences_per_example: float = 1.0,
) -> Plan:
    """Return the plan of a run that reads this many examples, rounded up to full steps.

    With packs, examples and the batch of the learning rate are counted in sequences (Krell et al. 2021,
    section 3.3), so a run of packs sees as many samples in fewer steps.
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
    problem = f"is not given, and there is no default for sequence length {sequence_length}"
    raise ConfigError("total_num_train_samples", problem, "give --total-num-train-samples")


def describe(plan: Plan) -> str:
    """Return the plan as text, one fact on each line."""
    packed = plan.sequences_per_example > 1
    lines = [
        f"{count(plan.total_steps, 'step')} of {plan.step_in_words} "
        f"({count(plan.micro_batches_per_step, 'micro-batch')} of {plan.micro_batch_size})",
        f"learning rate up to {plan.peak_learning_rate:g}, {count(plan.warmup_steps, 'step')} of warm-up",
    ]
    if packed and not plan.rate_follows_batch:
        # Not changed automatically: the length of packs is known only now, and the settings fix the step.
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
