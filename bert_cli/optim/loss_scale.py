"""The number a loss is multiplied by so that small float16 gradients survive, and how it moves.

A static scale stays what it is; a dynamic one is halved when a gradient is not finite and doubled
after 2,000 good steps (Micikevicius et al. 2018, section 3.2). It is one of the four things a run
has that change, so it is a frozen value in the checkpoint and `after` gives the next one. The ranges
of its fields are checked when a checkpoint is read.
"""

from dataclasses import asdict, dataclass, replace
from typing import Annotated

from pydantic import Field, NonNegativeInt

DYNAMIC_START = 2.0**15
GROWTH_STEPS = 2000
SMALLEST = 1.0
LARGEST = 2.0**24  # further doubling would only be undone: float16 ends at 2^16


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """The scale, and the count of what has happened to it."""

    value: Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
    dynamic: bool
    good_steps: NonNegativeInt = 0
    """Steps since the scale last moved."""
    skipped: NonNegativeInt = 0
    """Updates left out since the start of the run because a gradient was not finite."""
    skipped_in_a_row: NonNegativeInt = 0
    """The same since the last good one."""

    def after(self, finite: bool) -> "LossScale":
        """The scale for the next step, given whether this step's gradient was finite."""
        if not finite:
            value = max(SMALLEST, self.value / 2) if self.dynamic else self.value
            return replace(
                self,
                value=value,
                good_steps=0,
                skipped=self.skipped + 1,
                skipped_in_a_row=self.skipped_in_a_row + 1,
            )
        if self.dynamic and self.good_steps + 1 >= GROWTH_STEPS:
            return replace(
                self, value=min(LARGEST, self.value * 2), good_steps=0, skipped_in_a_row=0
            )
        return replace(self, good_steps=self.good_steps + 1, skipped_in_a_row=0)

    def as_json(self) -> dict[str, float | int | bool]:
        """The value for a checkpoint's state.json; `LossScale(**...)` reads it back."""
        return asdict(self)


def first_loss_scale(setting: float | str) -> LossScale:
    """The scale a run starts with: a number stays, `dynamic` starts at 2^15."""
    if setting == "dynamic":
        return LossScale(value=DYNAMIC_START, dynamic=True)
    return LossScale(value=float(setting), dynamic=False)
