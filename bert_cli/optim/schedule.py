"""The learning rate as a function of the step.

Step 0 is the first update. Every schedule rises linearly over the warm-up, has its maximum on the step
after it, and then falls: linearly (`up_down`, as in Graphcore's example), along half a cosine
(Loshchilov & Hutter 2017, SGDR, eq. 5 without restarts), or not at all. Values below a minimum of 1e-7 are
replaced by it, so that no update is empty: the first one of a warm-up and the last one of a linear fall have it.
"""

import math
from collections.abc import Callable

from bert_cli.errors import ConfigError, nearest

MINIMUM = 1e-7
"""Smallest learning rate."""

FALLS: dict[str, Callable[[int, int], float]] = {
    "up_down": lambda fallen, steps: (steps - fallen - 1) / steps,
    "constant": lambda fallen, steps: 1.0,
    "cosine": lambda fallen, steps: 0.5 * (1.0 + math.cos(math.pi * min(1.0, fallen / steps))),
}
"""Fraction of the maximum, `fallen` >= 1 steps after it, of a fall over `steps` steps."""


def learning_rate(
    schedule_name: str, max_learning_rate: float, warmup_steps: int, total_steps: int
) -> Callable[[int], float]:
    """Return `value(step) -> learning rate` for a run of `total_steps` steps.

    `schedule_name` is a key of FALLS. Steps past the end have the value of the end.
    Raises ConfigError for an unknown name or a number out of its range.
    """
    if schedule_name not in FALLS:
        near = nearest(schedule_name, FALLS)
        raise ConfigError(
            f"learning_rate.schedule_name ({schedule_name})",
            "there is no such schedule",
            f"did you mean '{near}'?" if near else f"choose one of {', '.join(FALLS)}",
        )
    if not MINIMUM <= max_learning_rate < math.inf:
        raise ConfigError(
            f"learning_rate.max_learning_rate ({max_learning_rate})",
            f"is not a number of at least {MINIMUM}, the smallest learning rate",
            "raise it",
        )
    if total_steps < 1:
        raise ConfigError(
            f"total steps ({total_steps})", "a run has at least one", "train on more samples"
        )
    if not 0 <= warmup_steps <= total_steps:
        raise ConfigError(
            f"warm-up ({warmup_steps} steps)",
            f"is not part of a run of {total_steps} steps",
            "give a warmup_frac from 0 to 1",
        )
    fall = FALLS[schedule_name]

    def value(step: int) -> float:
        if step < warmup_steps:
            return max(MINIMUM, max_learning_rate * step / warmup_steps)
        fallen, steps = step - warmup_steps, max(1, total_steps - warmup_steps)
        return max(MINIMUM, max_learning_rate * (fall(fallen, steps) if fallen else 1.0))

    return value
