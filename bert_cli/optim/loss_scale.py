"""The factor of the loss that keeps small float16 gradients from vanishing.

A static scale stays; a dynamic one is halved when a gradient is not finite and doubled after 2,000
good steps (Micikevicius et al. 2018, section 3.2). It is a frozen value, stored in the checkpoint, and
`after` returns the next one. The ranges of its fields are checked when a checkpoint is read.
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
    """A loss scale and the counts that decide its changes."""

    value: Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
    dynamic: bool
    good_steps: NonNegativeInt = 0
    """Steps since the scale last changed."""
    skipped: NonNegativeInt = 0
    """Updates skipped since the start of the run because a gradient was not finite."""
    skipped_in_a_row: NonNegativeInt = 0
    """Updates skipped since the last good one."""

    def after(self, finite: bool) -> "LossScale":
        """Return the scale of the next step; `finite` says whether this step's gradients were."""
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
            value = min(LARGEST, self.value * 2)
            return replace(self, value=value, good_steps=0, skipped_in_a_row=0)
        return replace(self, good_steps=self.good_steps + 1, skipped_in_a_row=0)

    def as_json(self) -> dict[str, float | int | bool]:
        """Return the fields for a checkpoint's state.json; `LossScale(**...)` reads them back."""
        return asdict(self)


def first_loss_scale(setting: float | str) -> LossScale:
    """Return the scale of step 0: the number of the setting, or 2^15 for `dynamic`."""
    if setting == "dynamic":
        return LossScale(value=DYNAMIC_START, dynamic=True)
    return LossScale(value=float(setting), dynamic=False)
