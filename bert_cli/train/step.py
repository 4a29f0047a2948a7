"""One update of the weights: a step's micro-batches, their gradient, one move or none.

`State` holds the four things of a run that change. The step counts first, over all processes, what its
loss is divided by (masked tokens, examples), lets the engine add up the gradients of its micro-batches,
divides out the loss scale, and asks of the whole gradient, once, whether it is finite and how long it
is. A gradient that is not finite moves nothing and is counted; the step is over all the same, so that
the stream stays a function of it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from bert_cli.errors import DeviceError
from bert_cli.optim.adam import clip_factor
from bert_cli.optim.loss_scale import LossScale
from bert_cli.parallel.tensorflow.engine import Engine

Batch = Mapping[str, npt.NDArray[Any]]


class Value(Protocol):
    """A weight or a moment of the run, whole, wherever it lies."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""

    def numpy(self) -> npt.NDArray[Any]:
        """Return the value."""

    def assign(self, value: npt.NDArray[Any]) -> None:
        """Set the value."""


@dataclass
class State:
    """What changes in a run; everything else is a function of the settings and the step."""

    weights: Mapping[str, Value]
    """By name."""
    moments: Mapping[str, tuple[Value, Value]]
    """The optimizer's two float32 moments of each weight."""
    loss_scale: LossScale
    step: int = 0
    """Steps done."""


class Step:
    """Runs one step on a state. Calling it with a batch moves the state and returns the figures."""

    def __init__(
        self,
        engine: Engine,
        state: State,
        *,
        micro_batches: int,
        learning_rate: Callable[[int], float],
        max_gradient_norm: float | None,
        max_skipped_steps: int,
        asked_to_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.engine = engine
        self.state = state
        self.micro_batches = micro_batches
        self.learning_rate = learning_rate
        self.max_gradient_norm = max_gradient_norm
        self.max_skipped_steps = max_skipped_steps
        self.asked_to_stop = asked_to_stop

    def __call__(self, batch: Batch) -> dict[str, float]:
        """One step on this process' part of its batch, arrays [M, B, ...]; means over the whole step.

        Raises DeviceError after `max_skipped_steps` non-finite gradients in a row, when a
        micro-batch does not fit the device or when a process is lost, and
        StoppedBetweenMicroBatchesError when asked to stop half way; the state is then untouched.
        """
        state, peers = self.state, self.engine.peers
        # A step without a masked token, or a labelled word, has a loss of 0 and not of 0 / 0.
        counted = _totalled(peers.total, count(batch, self.engine.head.COUNTS))
        counts = {name: max(number, 1.0) for name, number in counted.items()}
        scale = state.loss_scale
        whole_scale = raised(scale.value, self.micro_batches)
        position = state.step * self.micro_batches + peers.rank * len(batch["input_ids"])
        peers.doing = f"step {state.step + 1}"
        sums = self.engine.play(batch, position, counts, whole_scale, self.asked_to_stop)
        # In 16 bits gradients travel as they would be without accumulation.
        squared = self.engine.reduce(scale.value / whole_scale) / whole_scale**2
        sums = _totalled(peers.total, sums)
        rate = self.learning_rate(state.step)
        finite = math.isfinite(squared)
        if finite:
            updates = state.step - scale.skipped
            factor = clip_factor(squared, self.max_gradient_norm or math.inf) / whole_scale
            weighed = self.engine.move(factor, rate, updates, state.step)
        else:
            self.engine.clear()
            weighed = self.engine.weigh()
        state.loss_scale = scale.after(finite)
        state.step += 1
        self._refuse_to_go_on_without_progress()
        return {
            **means(sums, counted, self.engine.head.MEANS),
            "learning_rate": rate,
            "gradient_norm": math.sqrt(squared),
            "weight_norm": math.sqrt(weighed),
            "loss_scale": scale.value,
            "skipped": state.loss_scale.skipped,
            "tokens": counts["tokens"],
            "examples": counts["examples"],
        }

    def compile(self, batch: Batch) -> None:
        """Trace and compile all that a step needs, on its first micro-batch; nothing moves."""
        self.engine.compile(batch, count(batch, self.engine.head.COUNTS))

    def _refuse_to_go_on_without_progress(self) -> None:
        scale = self.state.loss_scale
        if scale.skipped_in_a_row >= self.max_skipped_steps:
            raise DeviceError(
                f"step {self.state.step}: the gradient was not finite in {scale.skipped_in_a_row} steps in a row "
                f"(loss scale {scale.value:g}); take the last good checkpoint as --pretrained-ckpt-path of a new "
                "run with a lower learning rate, or with optimizer_opts.loss_scaling lower or dynamic"
            )


def count(batch: Batch, columns: Mapping[str, str]) -> dict[str, float]:
    """What the losses of a batch [..., B, S] are divided by: its examples, and by name the sums of columns.

    A pack counts as all its sequences; a column of weights that is not there stands for ones. The real
    tokens are counted too, for the pace.
    """
    # 1, and in a pack the number of its last sequence.
    examples = float(np.sum(np.max(batch["input_mask"], axis=-1)))
    sums = {
        name: float(np.sum(batch[column])) if column in batch else examples
        for name, column in columns.items()
    }
    return {
        **sums,
        "examples": examples,
        "tokens": float(np.count_nonzero(batch["input_mask"])),
    }


def _totalled(
    total: Callable[[npt.ArrayLike], npt.NDArray[np.float64]], numbers: Mapping[str, float]
) -> dict[str, float]:
    """The numbers added up over all processes."""
    return dict(zip(numbers, map(float, total(list(numbers.values()))), strict=True))


def raised(loss_scale: float, micro_batches: int) -> float:
    """What the loss of a micro-batch is multiplied by, so that the scale means the same in any step.

    A micro-batch's loss is its share of the whole step's. Raised by their number too (the power of
    two below it, so that nothing rounds), its float16 gradients stand where those of a step of one
    micro-batch would. At 2,040 micro-batches a scale of 4096 alone is worth 2: measured, a gradient
    in float16 off by 13 % instead of 0.1 %.
    """
    return loss_scale * 2 ** (micro_batches.bit_length() - 1)


def means(
    sums: Mapping[str, Any], counts: Mapping[str, float], figures: Mapping[str, tuple[str, str]]
) -> dict[str, float]:
    """Each figure as the head says: a sum of its own over the count it belongs to.

    A mean is left out where its count is 0 (no example has a next sentence) or the head has no such sum
    (a regression has no accuracy).
    """
    return {
        name: float(sums[over]) / counts[by]
        for name, (over, by) in figures.items()
        if over in sums and counts[by]
    }
