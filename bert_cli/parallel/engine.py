"""The interface of an engine, and the parts of a step that all engines share; it imports no framework."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from bert_cli.arrays import Array, Floats32, Shape
from bert_cli.errors import DeviceError
from bert_cli.parallel.group import ProcessGroup

if TYPE_CHECKING:
    from bert_cli.model.bert.heads import Head

# Columns of examples, arrays [M, B, ...] of M micro-batches.
Batch = Mapping[str, Array]
# A tensor of the engine's framework.
Tensor = Any
StopRequested = Callable[[], bool]
# Sums or counts over a step, by name.
Sums = dict[str, float]
# The counts of a step by which the head divides its losses.
Divisors = Mapping[str, float]


class StoppedBetweenMicroBatchesError(Exception):
    """A stop was requested during a step. The weights are still unchanged."""


class Weight(Protocol):
    """A weight whose value can be set."""

    @property
    def shape(self) -> Shape:
        """Shape of the value."""

    def assign(self, value: Array) -> None:
        """Set the value."""


class Value(Weight, Protocol):
    """A complete weight or optimizer moment, wherever its parts are stored."""

    @property
    def is_sharded(self) -> bool:
        """Whether each process stores a part: then all processes must read the value, in the same order."""

    def numpy(self) -> Array:
        """Return the value."""


@dataclass(frozen=True, kw_only=True)
class UpdateRequest:
    """The arguments of an update besides its batch.

    `step` counts the completed steps; with the sample index of a micro-batch it decides dropout and rounding.
    `updates` counts the updates that were not skipped. `micro_batches` is the number of micro-batches of the step over
    all processes, `first_micro_batch` the number of micro-batches before the step.
    `stop_requested` may be called between micro-batches.
    """

    step: int = 0
    updates: int = 0
    micro_batches: int = 1
    first_micro_batch: int = 0
    learning_rate: float = 0.0
    loss_scale: float = 1.0
    max_gradient_norm: float | None = None
    stop_requested: StopRequested = lambda: False


class UpdateResult(NamedTuple):
    """The head's sums, their divisors (see `count`), and norms, of the complete step over all processes.

    The gradient norm is taken before clipping and without loss scale. If it is not finite, the update was skipped.
    """

    sums: Sums
    counts: Sums
    gradient_norm: float
    weight_norm: float


class StepResult(NamedTuple):
    """The head's sums over the micro-batches of this process, and squared norms of the complete step."""

    sums: Sums
    gradient_squared: float
    weight_squared: float


class Engine(ABC):
    """Computes steps, evaluations and predictions of one model on the devices of a mesh."""

    group: ProcessGroup
    seed: int
    """Seed of the run, for dropout and other random numbers of a step."""
    head: "Head"
    weights: Mapping[str, Value]
    asks_before_each_micro_batch = False
    """Whether `update` calls `stop_requested` before each micro-batch."""
    compiles_in_first_step = False
    """Whether the first update compiles what it needs, so that `compile` before it only costs a micro-batch more."""

    record: Callable[[str], AbstractContextManager[object]] = nullcontext
    """Entered around each part of an update: `forward_backward`, `reduction`, `optimizer`."""

    @property
    @abstractmethod
    def slots(self) -> Mapping[str, Value]:
        """The slots of the optimizer for each weight, by their names in a checkpoint."""

    @abstractmethod
    def compile(self, batch: Batch) -> None:
        """Trace and compile everything that a step needs, on one micro-batch for each local replica."""

    @abstractmethod
    def gather_weights(self) -> None:
        """Make the weights of `evaluate` and `predict` complete in each process; all processes must call it."""

    def update(self, batch: Batch, request: UpdateRequest) -> UpdateResult:
        """Update the weights with the gradient of a step; `batch` is this process' part of the step's batch.

        All processes skip the update when the gradient is not finite. Raises StoppedBetweenMicroBatchesError if a stop
        is requested on any process, DeviceError if a micro-batch does not fit the memory or a process is lost.
        """
        # What the watchdog of another rank prints, if that rank waits for this one.
        self.group.activity = f"step {request.step + 1}"
        # Before the first forward pass: every loss is divided by the count of the complete step.
        counts = self._all_reduced(count(batch, self.head.COUNTS))
        # Without a masked or labelled token, the loss is 0 and not 0 / 0.
        divisors = {name: max(number, 1.0) for name, number in counts.items()}
        result = self._run_step(batch, request, divisors)
        sums = self._all_reduced(result.sums)
        norms = math.sqrt(result.gradient_squared), math.sqrt(result.weight_squared)
        return UpdateResult(sums, counts, *norms)

    @abstractmethod
    def _run_step(self, batch: Batch, request: UpdateRequest, divisors: Divisors) -> StepResult:
        """Compute the gradient of a step, with losses divided by `divisors`, and update the weights."""

    @abstractmethod
    def forward(self, batch: Batch, request: UpdateRequest) -> Floats32:
        """Return the head's logits [M, ...] of this process' micro-batches with the dropout of `update`."""

    @abstractmethod
    def evaluate(self, micro_batch: Batch) -> Sums:
        """Return the head's sums for examples [B, ...], on this process alone, without dropout."""

    @abstractmethod
    def predict(self, examples: Batch) -> Any:
        """Return the head's logits for examples [B, ...], on this process alone."""

    def means(self, sums: Sums, counts: Sums) -> Sums:
        """Return each metric of the head: a sum divided by a count, if there is a sum and the count is not 0."""
        return {
            name: sums[over] / counts[by]
            for name, (over, by) in self.head.MEANS.items()
            if over in sums and counts[by]
        }

    def first_index(self, batch: Batch, request: UpdateRequest) -> int:
        """Return the sample index of this process' first micro-batch."""
        return request.first_micro_batch + self.group.rank * len(batch["input_ids"])

    @contextmanager
    def reporting_out_of_memory(self) -> Iterator[None]:
        """Turn the framework's error about memory into DeviceError."""
        try:
            yield
        except Exception as error:
            if not self._is_out_of_memory(error):
                raise
            raise DeviceError(
                "global_batch.micro_batch_size",
                "the run does not fit the device's memory",
                "lower it and raise grad_acc_steps_per_replica, set --parallel.recompute, or ask `bert plan` for a "
                "layout",
            ) from error

    @abstractmethod
    def _is_out_of_memory(self, error: Exception) -> bool:
        """Return whether an error of the framework says that the device's memory is full."""

    def _all_reduced(self, numbers: Sums) -> Sums:
        totals = self.group.all_reduce(list(numbers.values()))
        return dict(zip(numbers, map(float, totals), strict=True))


def count(batch: Batch, columns: Mapping[str, str]) -> Sums:
    """Return the counts of a batch [..., B, S]: `examples`, non-padding `tokens`, and sums of columns by name.

    Each sequence of a pack is an example. An absent column of weights counts 1 for each example.
    """
    # The attention mask numbers the sequences of a pack from 1.
    examples = float(np.sum(np.max(batch["input_mask"], axis=-1)))
    sums = {}
    for name, column in columns.items():
        sums[name] = float(np.sum(batch[column])) if column in batch else examples
    tokens = float(np.count_nonzero(batch["input_mask"]))
    return {**sums, "examples": examples, "tokens": tokens}


def scaled_for_accumulation(loss_scale: float, micro_batches: int) -> float:
    """Return the factor of a micro-batch's loss in a step of `micro_batches` micro-batches."""
    # The loss is divided by the counts of the complete step. Multiplied by the number of micro-batches (the power of
    # two below it, so that nothing rounds), float16 gradients are as large as in a step of one micro-batch: with 2,040
    # their error is 0.1 % instead of 13 %.
    return loss_scale * 2 ** (micro_batches.bit_length() - 1)
