"""The order of work in a pipeline: for each stage a plain list of forward and backward passes of micro-batches.

A stage goes through its list in order. A forward pass waits for the hidden values from the stage before, a backward
pass for the gradient from the stage after. The last stage runs forward and backward of a micro-batch in one. Nothing
here computes anything, so a schedule is tested in microseconds.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

Kind = Literal["forward", "backward", "forward-backward"]


class Work(NamedTuple):
    """One pass of a micro-batch through a stage."""

    kind: Kind
    micro_batch: int
    """Number of the micro-batch among those of the replica's step."""


Schedule = Callable[[int, int, int], list[Work]]
"""(stage, stages, micro-batches) -> the work of the stage."""


def gpipe(stage: int, stages: int, micro_batches: int) -> list[Work]:
    """Return all forwards, then all backwards (Huang et al. 2019, GPipe, figure 2c).

    Every stage but the last saves activations of every micro-batch of the step.
    """
    if stage == stages - 1:
        return _last_stage(micro_batches)
    forwards = [Work("forward", number) for number in range(micro_batches)]
    return forwards + [Work("backward", number) for number in range(micro_batches)]


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[Work]:
    """Return a filled pipeline that alternates (Narayanan et al. 2019, PipeDream, section 3.2; with a flush).

    Stage k of p saves activations of at most p - k micro-batches, however many the step has.
    """
    if stage == stages - 1:
        return _last_stage(micro_batches)
    ahead = min(stages - stage - 1, micro_batches)
    work = [Work("forward", number) for number in range(ahead)]
    for number in range(micro_batches - ahead):
        work += [Work("forward", ahead + number), Work("backward", number)]
    return work + [Work("backward", n) for n in range(micro_batches - ahead, micro_batches)]


def _last_stage(micro_batches: int) -> list[Work]:
    return [Work("forward-backward", number) for number in range(micro_batches)]


SCHEDULES: dict[str, Schedule] = {"1F1B": one_forward_one_backward, "GPipe": gpipe}
