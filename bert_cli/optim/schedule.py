"""The learning rate as a function of the step; nothing is remembered between calls.

Step 0 is the first update. Every schedule rises linearly over the steps of the warm-up, has its maximum
on the step after them, and differs only in what follows. The first update sees value(0), which would be
exactly zero with a warm-up, and the last one value(total_steps - 1). A floor of 1e-7 replaces every
smaller value, so that no update is an empty one. The linear fall is that of Graphcore's example: the last step has
the floor, and the step after the maximum is two parts of the fall below it.
"""

import math
from collections.abc import Callable

from bert_cli.errors import ConfigError, nearest

FLOOR = 1e-7
"""Smallest learning rate ever given out."""

FALLS: dict[str, Callable[[int, int], float]] = {
    "up_down": lambda fallen, steps: (steps - fallen - 1) / steps,
    "constant": lambda fallen, steps: 1.0,
    "cosine": lambda fallen, steps: 0.5 * (1.0 + math.cos(math.pi * min(1.0, fallen / steps))),
}
"""Fraction of the maximum, `fallen` >= 1 steps after it, where the fall has `steps` steps."""


def learning_rate(
    schedule_name: str, max_learning_rate: float, warmup_steps: int, total_steps: int
) -> Callable[[int], float]:
    """Return `value(step) -> learning rate` for a run of `total_steps` steps.

    `schedule_name` is a key of FALLS. The fall is linear (`up_down`, that of Graphcore's example), half a cosine
    (Loshchilov & Hutter 2017, SGDR, eq. 5 without restarts) or none. Steps past the end stay at the
    end's value.
    Raises ConfigError for an unknown name or a number out of its range.
    """
    if schedule_name not in FALLS:
        near = nearest(schedule_name, FALLS)
        hint = f"did you mean '{near}'?" if near else f"choose one of {', '.join(FALLS)}"
        raise ConfigError(
            f"learning_rate.schedule_name ({schedule_name}): no such schedule; {hint}"
        )
    if not FLOOR <= max_learning_rate < math.inf:
        raise ConfigError(
            f"learning_rate.max_learning_rate ({max_learning_rate}): is not a number of at least "
            f"{FLOOR}, the smallest learning rate used; raise it"
        )
    if total_steps < 1:
        raise ConfigError(
            f"total steps ({total_steps}): a run has at least one; train on more samples"
        )
    if not 0 <= warmup_steps <= total_steps:
        raise ConfigError(
            f"warm-up ({warmup_steps} steps): is not part of a run of {total_steps}; "
            "give a warmup_frac from 0 to 1"
        )
    fall = FALLS[schedule_name]

    def value(step: int) -> float:
        if step < warmup_steps:
            return max(FLOOR, max_learning_rate * step / warmup_steps)
        fallen, steps = step - warmup_steps, max(1, total_steps - warmup_steps)
        return max(FLOOR, max_learning_rate * (fall(fallen, steps) if fallen else 1.0))

    return value
