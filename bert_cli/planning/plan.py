"""The plan of a run: its integers, computed from the settings and the number of examples.

All other code reads the numbers of steps, examples and micro-batches from the plan.
"""

import math
import zlib
from bisect import bisect_right
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from bert_cli.errors import ConfigError
from bert_cli.text import count

if TYPE_CHECKING:  # settings of training, which predictions do without
    from bert_cli.config.training import GlobalBatch, TrainSettings

MOST_EXAMPLES = 1 << 53  # above, a number of examples is not exact in float64
MOST_SIZES = 16  # of a batch that grows: JAX compiles the step for each


@dataclass(frozen=True)
class Segment:
    """Consecutive steps of the same size. A growing batch has several segments."""

    first_step: int
    micro_batches: int
    """Micro-batches of a step, of all replicas together."""
    first_micro_batch: int
    """Micro-batches of the run before the segment."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The integers of a run."""

    total_steps: int
    warmup_steps: int
    examples_per_step: int
    """Global batch: micro-batch x replicas x accumulation."""
    micro_batch_size: int
    micro_batches_per_step: int
    """Micro-batches of all replicas together."""
    corpus_examples: int | None
    """Records in the corpus; None for synthetic examples."""
    peak_learning_rate: float
    """Highest learning rate, after the linear scaling rule."""
    sequences_per_example: float = 1.0
    """Mean number of sequences in a pack over an epoch; 1 without packs."""
    segments: tuple[Segment, ...]
    """The sizes of the steps, in their order."""
    decay_step: int | None = None
    """Step from which the learning rate decays, for the schedule `wsd`."""
    mask_probabilities: tuple[float, float] | None = None
    """Masking probabilities of the first and the last step, if they differ."""

    def segment(self, step: int) -> Segment:
        """Return the segment of a step; steps past the end belong to the last segment."""
        at = bisect_right(self.segments, step, key=lambda segment: segment.first_step)
        return self.segments[max(0, at - 1)]

    def micro_batches(self, step: int) -> range:
        """Return the numbers of a step's micro-batches, counted from the start of the run."""
        segment = self.segment(step)
        first = segment.first_micro_batch + (step - segment.first_step) * segment.micro_batches
        return range(first, first + segment.micro_batches)

    def sample_indices(self, step: int) -> range:
        """Return the sample indices of a step."""
        numbers = self.micro_batches(step)
        size = self.micro_batch_size
        return range(numbers.start * size, numbers.stop * size)

    @property
    def examples(self) -> int:
        """Return the number of examples of the run."""
        return self.sample_indices(self.total_steps).start

    @property
    def step_sizes(self) -> str | None:
        """Return a fingerprint of changing sizes, which must be equal to resume a run; None for equal steps."""
        if len(self.segments) < 2:
            return None
        sizes = repr([astuple(segment) for segment in self.segments])
        return f"{len(self.segments)} sizes, {zlib.crc32(sizes.encode()):08x}"

    def mask_probability(self, step: int) -> float | None:
        """Return the fraction of tokens that a step masks; it changes linearly. None means the settings' fraction."""
        if self.mask_probabilities is None:
            return None
        first, last = self.mask_probabilities
        return first + (last - first) * min(1.0, step / max(1, self.total_steps - 1))

    @property
    def epochs(self) -> float | None:
        """Return the number of epochs; None for synthetic examples."""
        if self.corpus_examples is not None:
            return self.examples / self.corpus_examples
        return None

    @property
    def step_in_words(self) -> str:
        """Return the size of a step as text: examples, or packs and their sequences."""
        if self.sequences_per_example > 1:
            sequences = round(self.examples_per_step * self.sequences_per_example)
            return f"{count(self.examples_per_step, 'pack')}, {count(sequences, 'sequence')}"
        return count(self.examples_per_step, "example")


def make_plan(
    order: "TrainSettings", corpus_examples: int | None, sequences_per_example: float = 1.0
) -> Plan:
    """Return the plan of a run on a corpus of this size (None: synthetic examples), rounded up to full steps.

    With packs, examples and the batch of the learning rate are counted in sequences (Krell et al. 2021,
    section 3.3), so a run of packs reads the same number of samples in fewer steps. Raises ConfigError if the length of
    the run is unknown.
    """
    epoch = None
    if corpus_examples is not None:
        epoch = corpus_examples * sequences_per_example
    batch = order.global_batch
    where = f"num_epochs ({order.num_epochs or 0:g})"
    if order.total_num_train_samples is not None:
        samples = order.total_num_train_samples
    elif order.num_epochs is None:
        remedy = "set --num-epochs, passes over the records, or --total-num-train-samples"
        problem = "is not set, and neither is total_num_train_samples"
        raise ConfigError("num_epochs", problem, remedy)
    elif epoch is None:
        problem = "has no effect on synthetic examples, which have no epochs"
        raise ConfigError(where, problem, "set --total-num-train-samples")
    elif order.num_epochs * epoch > MOST_EXAMPLES:
        raise ConfigError(where, "makes a run without end", "lower it")
    else:
        samples = max(1, round(order.num_epochs * epoch))
    segments, total_steps = _segments(batch, samples, sequences_per_example)
    rate = order.optimizer_opts.learning_rate
    scale = 1.0
    if rate.reference_batch_size is not None:
        scale = batch.examples * sequences_per_example / rate.reference_batch_size
    decay_step = None
    if rate.schedule_name == "wsd":
        decay_step = total_steps - max(1, int(rate.decay_frac * total_steps))
    return Plan(
        total_steps=total_steps,
        warmup_steps=int(rate.warmup_frac * total_steps),
        examples_per_step=batch.examples,
        micro_batch_size=batch.micro_batch_size,
        micro_batches_per_step=batch.replicas * batch.grad_acc_steps_per_replica,
        corpus_examples=corpus_examples,
        peak_learning_rate=rate.max_learning_rate * scale,
        sequences_per_example=sequences_per_example,
        segments=segments,
        decay_step=decay_step,
        mask_probabilities=order.mask_probabilities,
    )


def _segments(
    batch: "GlobalBatch", samples: int, sequences_per_example: float
) -> tuple[tuple[Segment, ...], int]:
    """Return the segments of a run that reads so many sequences, and its number of steps.

    A growing batch has up to MOST_SIZES sizes before the last; each size is used for the same number of sequences.
    """
    last = batch.grad_acc_steps_per_replica
    first = max(1, round(last * (batch.start_fraction or 1.0)))
    # Not more sizes than there are whole numbers of micro-batches between both.
    sizes = min(MOST_SIZES, last - first)
    if batch.start_fraction and not sizes:
        problem = f"has no effect on an accumulation of {count(last, 'micro-batch')}"
        remedy = "lower it, accumulate more, or leave it out"
        where = f"global_batch.start_fraction ({batch.start_fraction})"
        raise ConfigError(where, problem, remedy)
    segments = []
    # Sequences until the batch is full.
    growth = batch.growth_frac * samples
    step = before = 0
    read = 0.0
    while read < samples:
        size = min(sizes, int(sizes * read / growth))
        accumulation = last
        end: float = samples
        if size < sizes:
            accumulation = first + round((last - first) * size / sizes)
            end = min(samples, growth * (size + 1) / sizes)
        micro_batches = batch.replicas * accumulation
        sequences = micro_batches * batch.micro_batch_size * sequences_per_example
        steps = max(1, math.ceil((end - read) / sequences))
        segments.append(Segment(step, micro_batches, before))
        step += steps
        before += steps * micro_batches
        read += steps * sequences
    return tuple(segments), step


def describe(plan: Plan) -> str:
    """Return the plan as text, one fact on each line."""
    up_to = "" if plan.step_sizes is None else "up to "
    lines = [
        f"{count(plan.total_steps, 'step')} of {up_to}{plan.step_in_words} "
        f"({count(plan.micro_batches_per_step, 'micro-batch')} of {plan.micro_batch_size})",
        f"learning rate up to {plan.peak_learning_rate:g}, {count(plan.warmup_steps, 'step')} of warm-up",
    ]
    smallest = plan.segments[0]
    largest = plan.segments[-1]
    if smallest != largest:
        grown = f"{count(largest.micro_batches, 'micro-batch')} by step {largest.first_step:,}"
        lines.append(f"the batch grows from {smallest.micro_batches} to {grown}")
    if plan.decay_step is not None:
        lines.append(f"the learning rate decays from step {plan.decay_step:,}")
    if plan.mask_probabilities is not None:
        start, end = plan.mask_probabilities
        lines.append(f"masks {start:.1%} of the tokens in the first step and {end:.1%} in the last")
    if plan.corpus_examples is not None:
        epochs = f"{plan.epochs:.3g}"
        what = "packs" if plan.sequences_per_example > 1 else "examples"
        noun = "epoch" if epochs == "1" else "epochs"
        lines.append(f"{plan.examples:,} {what}, {epochs} {noun} of {plan.corpus_examples:,}")
    return "\n".join(f"  {line}" for line in lines)
