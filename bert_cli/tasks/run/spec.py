"""What a training run trains on, and its parts after it is built."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bert_cli.config.training import Plan, TrainSettings
from bert_cli.data.stream.reader import Stream
from bert_cli.parallel.engine import Batch, Engine
from bert_cli.tasks.run.build import Model
from bert_cli.train.checkpoint import Format
from bert_cli.train.step import State, Step


@dataclass(frozen=True)
class RunSpec:
    """What a kind of training gives to the run: its examples, their plan, its evaluation."""

    plan: Plan
    stream: Stream
    """The batches of the run, this process' part of them."""
    sample: Batch
    """Micro-batches [M, B, ...] for tracing, one for each replica of this process."""
    form: Callable[[Model], Format]
    """How its model is written to disk."""
    evaluate: Callable[[Engine, int], dict[str, float]] | None = None
    """Returns metrics on held-out examples after a step."""
    held_out: str = ""
    """A fingerprint of those examples, which the processes divide among them."""
    evaluate_every: int | None = None
    """Steps between evaluations; there is one after the last step too."""
    best: str | None = None
    """The metric of an evaluation whose highest value selects the best checkpoint."""
    labels: int = 2
    """Outputs of a classifier."""


@dataclass(frozen=True)
class Run:
    """A training run that is built."""

    settings: TrainSettings
    spec: RunSpec
    engine: Engine
    state: State
    step: Step
    form: Format
    fixed: dict[str, Any]
    """What a checkpoint must share."""

    @property
    def saves(self) -> bool:
        """Return whether the run writes into its folder."""
        return not self.settings.dry_run and not self.settings.compile_only

    @property
    def folder(self) -> Path:
        """Return the run's folder."""
        assert self.settings.save_ckpt_path is not None
        return self.settings.save_ckpt_path

    @property
    def rank(self) -> int:
        """Return the rank of this process."""
        return self.engine.group.rank


@dataclass(frozen=True)
class RunResult:
    """The end of a run."""

    engine: Engine
    state: State
    status: Literal["finished", "stopped", "compiled"]

    @property
    def finished(self) -> bool:
        """Return whether all steps are done."""
        return self.status == "finished"
