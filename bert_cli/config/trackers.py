"""Settings of who else is told how a run goes.

A tracker keeps the figures of many runs in one place, each with its settings. None is on unless it is asked for,
and none can stop a run or change a number of it.
"""

from bert_cli.config.parallel import Settings


class Wandb(Settings):
    """Weights & Biases; WANDB_MODE=offline keeps the figures on this machine."""

    enabled: bool = False
    """Log the run."""
    project: str = "bert"
    """Project that receives the run."""
    entity: str | None = None
    """Team or user that the project belongs to; by default that of the login."""
    name: str | None = None
    """Name of the run; by default the output folder's."""
    tags: list[str] = []
    """Tags of the run."""
