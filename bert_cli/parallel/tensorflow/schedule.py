"""Who does which micro-batch when: the work of each stage of a pipeline, as a plain list.

A stage goes through its list in order and waits for what a piece of work needs: a forward for the
hidden values from the stage before, a backward for the gradient from the stage after. The last stage
takes a micro-batch forward and at once backward: a turn. Nothing here runs anything, so an order can
be read, counted and tested in microseconds.
"""

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

Kind = Literal["forward", "backward", "turn"]


class Work(NamedTuple):
    """One micro-batch through one stage, one way."""

    kind: Kind
    micro_batch: int
    """Number of the micro-batch among those of the replica's step."""


Schedule = Callable[[int, int, int], list[Work]]


def gpipe(stage: int, stages: int, micro_batches: int) -> list[Work]:
    """All forwards, then all backwards (Huang et al. 2019, GPipe, figure 2c).

    Every stage but the last keeps every micro-batch of the step.
    """
    if stage == stages - 1:
        return _turns(micro_batches)
    forwards = [Work("forward", number) for number in range(micro_batches)]
    return forwards + [Work("backward", number) for number in range(micro_batches)]


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[Work]:
    """Fill the pipeline, then alternate (Narayanan et al. 2019, PipeDream, section 3.2; flushed here).

    Stage k of p keeps at most p - k micro-batches, however many the step has.
    """
    if stage == stages - 1:
        return _turns(micro_batches)
    ahead = min(stages - stage - 1, micro_batches)
    work = [Work("forward", number) for number in range(ahead)]
    for number in range(micro_batches - ahead):
        work += [Work("forward", ahead + number), Work("backward", number)]
    return work + [Work("backward", n) for n in range(micro_batches - ahead, micro_batches)]


SCHEDULES: dict[str, Schedule] = {"1F1B": one_forward_one_backward, "GPipe": gpipe}
"""Setting `parallel.schedule` -> the work of (stage, stages, micro-batches)."""


def most_kept(work: Iterable[Work]) -> int:
    """The most micro-batches that a stage has taken forward and not yet backward."""
    kept = most = 0
    for piece in work:
        # A turn keeps its micro-batch while it lasts.
        kept += piece.kind != "backward"
        most = max(most, kept)
        kept -= piece.kind != "forward"
    return most


def _turns(micro_batches: int) -> list[Work]:
    return [Work("turn", number) for number in range(micro_batches)]
