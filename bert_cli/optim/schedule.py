"""The numbers that change from step to step: the learning rate, and the factor of the loss.

Every schedule rises over the warm-up, linearly or with another power, reaches its maximum on the next step, and then
falls: linearly (as in Graphcore's example), along half a cosine (Loshchilov & Hutter 2017, SGDR, eq. 5), only over
the last steps (Hu et al. 2024, MiniCPM, section 4.3), or not at all. 1e-7 is its minimum: no update is empty.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field, NonNegativeInt

from bert_cli.errors import ConfigError

# A learning rate as a function of the step.
Rate = Callable[[int], float]
MINIMUM = 1e-7  # smallest learning rate

# PyTorch's GradScaler starts at 2^16 and doubles after as many steps.
DYNAMIC_START = 2.0**15
GROWTH_STEPS = 2000
SMALLEST = 1.0
LARGEST = 2.0**24  # further doubling would only be undone: float16 ends at 2^16

# Fraction of the maximum, `fallen` >= 1 steps after it, of a fall over `steps` steps.
FALLS: dict[str, Callable[[int, int], float]] = {
    "up_down": lambda fallen, steps: (steps - fallen - 1) / steps,
    "constant": lambda fallen, steps: 1.0,
    "wsd": lambda fallen, steps: 1.0,  # until its decay
    "cosine": lambda fallen, steps: 0.5 * (1.0 + math.cos(math.pi * min(1.0, fallen / steps))),
}


def learning_rate(
    name: str, max_learning_rate: float, warmup_steps: int, total_steps: int, power: float = 1.0
) -> Rate:
    """Return `value(step) -> learning rate` for a run of `total_steps` steps.

    `name` is a key of FALLS, `power` the power of the warm-up. Steps past the end have the value of the end. Raises
    ConfigError for a maximum below the minimum.
    """
    if not MINIMUM <= max_learning_rate < math.inf:
        raise ConfigError(
            f"learning_rate.max_learning_rate ({max_learning_rate})",
            f"is not a number of at least {MINIMUM}, the smallest learning rate",
            "raise it",
        )
    fall = FALLS[name]

    def value(step: int) -> float:
        if step < warmup_steps:
            curve = (max(1, step) / warmup_steps) ** (power - 1)  # exactly 1 without a power
            return max(MINIMUM, max_learning_rate * step / warmup_steps * curve)
        fallen = step - warmup_steps
        steps = max(1, total_steps - warmup_steps)
        # Exactly the maximum in the first step after the warm-up.
        factor = fall(fallen, steps) if fallen else 1.0
        return max(MINIMUM, max_learning_rate * factor)

    return value


def with_decay(rate: Rate, first_step: int, total_steps: int, final_fraction: float = 0.0) -> Rate:
    """Return a rate that falls from `first_step` on to a fraction of `rate`, by 1 - sqrt(x) (Hägele et al. 2024, 4)."""
    steps = total_steps - first_step

    def value(step: int) -> float:
        done = min(1.0, max(0, step + 1 - first_step) / steps)
        fraction = final_fraction + (1.0 - final_fraction) * (1.0 - math.sqrt(done))
        return max(MINIMUM, rate(step) * fraction)

    return value


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """The factor of the loss that keeps small float16 gradients from vanishing, and the counts that decide its changes.

    A static scale stays; a dynamic one is halved when a gradient is not finite and doubled after 2,000 good steps
    (Micikevicius et al. 2018, section 3.2). The ranges of the fields are checked when a checkpoint is read.
    """

    value: Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
    dynamic: bool
    good_steps: NonNegativeInt = 0  # steps since the scale last changed
    skipped: NonNegativeInt = 0  # updates without a finite gradient since the start
    skipped_in_a_row: NonNegativeInt = 0  # updates skipped since the last good one

    def after(self, finite: bool) -> "LossScale":
        """Return the scale of the next step; `finite` is whether the gradients of this step were finite."""
        value = self.value
        good_steps = self.good_steps + 1
        if self.dynamic and not finite:
            value = max(SMALLEST, value / 2)
        # Doubling more often would skip more updates: each time the scale is too large costs one.
        elif self.dynamic and good_steps >= GROWTH_STEPS:
            value = min(LARGEST, value * 2)
            good_steps = 0
        if not finite:
            good_steps = 0
        skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        return replace(
            self,
            value=value,
            good_steps=good_steps,
            skipped=self.skipped + (not finite),
            skipped_in_a_row=skipped_in_a_row,
        )


def first_loss_scale(setting: float | str) -> LossScale:
    """Return the scale of step 0: the number of the setting, or 2^15 for `dynamic`."""
    if setting == "dynamic":
        return LossScale(value=DYNAMIC_START, dynamic=True)
    return LossScale(value=float(setting), dynamic=False)
