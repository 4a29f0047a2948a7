"""What a kind of run gives to the walk of every run that trains.

Its examples and the plan of them, how its model looks on disk, and what it is evaluated on; the rest
is the same for all.
"""

from collections.abc import Callable
from dataclasses import dataclass

from bert_cli.config.plan import Plan
from bert_cli.data.stream.reader import Stream
from bert_cli.parallel.engine import Batch, Engine
from bert_cli.tasks.run import build
from bert_cli.train import checkpoint


@dataclass(frozen=True)
class Job:
    """What a kind of run gives to the walk."""

    plan: Plan
    reader: Stream
    sample: Batch
    """Some micro-batches [M, B, ...] to trace with, one for each replica of this process."""
    form: Callable[[build.Model], checkpoint.Format]
    """How its model looks on disk."""
    evaluate: Callable[[Engine, int], dict[str, float]] | None = None
    """Figures on held-out examples, after a step."""
    held_out: str = ""
    """A fingerprint of those examples: the processes share them."""
    evaluate_every: int | None = None
    """Steps between evaluations; there is one at the end too."""
    best: str | None = None
    """The figure of an evaluation whose highest value decides which checkpoint is kept."""
    labels: int = 2
    """Outputs of a classifier."""
