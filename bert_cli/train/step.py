"""The state of a run, and one step of it: an update of the weights by an engine.

A step whose gradient is not finite updates nothing and is counted. It is complete all the same, so that the batches
that follow stay a function of the step.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bert_cli.errors import DeviceError
from bert_cli.optim.loss_scale import LossScale
from bert_cli.parallel.engine import Batch, Engine, UpdateRequest, Value


@dataclass
class State:
    """What changes in a run; everything else is a function of the settings and the step."""

    weights: Mapping[str, Value]
    """By name."""
    moments: Mapping[str, tuple[Value, Value]]
    """The optimizer's two float32 moments of each weight."""
    loss_scale: LossScale
    step: int = 0
    """Steps completed."""


class Step:
    """Runs one step: a call with a batch updates the state and returns the metrics."""

    def __init__(
        self,
        engine: Engine,
        state: State,
        *,
        micro_batches: int,
        learning_rate: Callable[[int], float],
        max_gradient_norm: float | None,
        max_skipped_steps: int,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        """`micro_batches` are those of a step over all processes."""
        self.engine = engine
        self.state = state
        self.micro_batches = micro_batches
        self.learning_rate = learning_rate
        self.max_gradient_norm = max_gradient_norm
        self.max_skipped_steps = max_skipped_steps
        self.stop_requested = stop_requested

    def __call__(self, batch: Batch) -> dict[str, float]:
        """Run a step on this process' part of its batch, arrays [M, B, ...]; return means over the complete step.

        Raises DeviceError after `max_skipped_steps` non-finite gradients in a row, and whatever `Engine.update`
        raises; the state is then that of the step before.
        """
        state, scale = self.state, self.state.loss_scale
        request = UpdateRequest(
            step=state.step,
            updates=state.step - scale.skipped,
            micro_batches=self.micro_batches,
            learning_rate=self.learning_rate(state.step),
            loss_scale=scale.value,
            max_gradient_norm=self.max_gradient_norm,
        )
        result = self.engine.update(batch, request, self.stop_requested)
        state.loss_scale = scale.after(math.isfinite(result.gradient_norm))
        state.step += 1
        self._check_progress()
        return {
            **means(result.sums, result.counts, self.engine.head.MEANS),
            "learning_rate": request.learning_rate,
            "gradient_norm": result.gradient_norm,
            "weight_norm": result.weight_norm,
            "loss_scale": scale.value,
            "skipped": state.loss_scale.skipped,
            "tokens": max(result.counts["tokens"], 1.0),
            "examples": max(result.counts["examples"], 1.0),
        }

    def _check_progress(self) -> None:
        scale = self.state.loss_scale
        if scale.skipped_in_a_row >= self.max_skipped_steps:
            raise DeviceError(
                f"step {self.state.step}",
                f"the gradient was not finite in {scale.skipped_in_a_row} steps in a row (loss scale {scale.value:g})",
                "take the last good checkpoint as --pretrained-ckpt-path of a new run with a lower learning rate, or "
                "with optimizer_opts.loss_scaling lower or dynamic",
            )


def means(
    sums: Mapping[str, float], counts: Mapping[str, float], table: Mapping[str, tuple[str, str]]
) -> dict[str, float]:
    """Return each metric of a head's table: a sum divided by a count.

    A metric is left out if its count is 0 (no example has a next sentence) or if the head has no such sum (a regression
    has no accuracy).
    """
    return {
        name: sums[over] / counts[by]
        for name, (over, by) in table.items()
        if over in sums and counts[by]
    }
