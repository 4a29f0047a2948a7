"""From an order to a run: `Draft`, which steps complete, and `Job`."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic

from bert_cli.config.training import TrainSettings
from bert_cli.data.examples.reader import ExampleStream, Stream
from bert_cli.data.tokens.tokenizer import TokenizerFolder
from bert_cli.files import JSONObject
from bert_cli.parallel.cluster import Processes, find_processes
from bert_cli.parallel.engine import Batch, Engine
from bert_cli.parallel.runtime import Mesh
from bert_cli.planning.checks import Check
from bert_cli.planning.plan import Plan
from bert_cli.processes import lines_to, print_line
from bert_cli.settings.markers import FIXED, marked
from bert_cli.statistics import Sample
from bert_cli.tasks.model import models
from bert_cli.tasks.run.resolve import Order
from bert_cli.tasks.run.start import Start
from bert_cli.tasks.run.task import Learn, Task
from bert_cli.train.checkpoint import Folder
from bert_cli.train.loop import StopRequest

NEW = Start(Folder(None), None)
PRETRAINING = Task(labels=2, label_names=None, train=None)


@dataclass(frozen=True)
class Job:
    """A run with all its values, before its engine is built."""

    order: TrainSettings
    """Its settings, with the sizes of the model and of the records, and with the layout."""
    start: Start
    mesh: Mesh
    stop: StopRequest
    plan: Plan
    stream: Stream
    """The batches of the run, this process' part of them."""
    sample: Batch
    """Micro-batches [M, B, ...] for tracing, one for each replica of this process."""
    tokenizer: TokenizerFolder | None
    """The tokenizer that is saved with the model."""
    task: Task
    """What the run is trained for."""
    evaluate: Callable[[Engine, int], Mapping[str, Sample]] | None = None
    """Return metrics on held-out examples after a step."""
    evaluate_every: int = sys.maxsize
    """Steps between evaluations; the last step is evaluated, too."""
    early_stop: int | None = None
    """Evaluations in a row without a better score after which the run ends."""

    @cached_property
    def record(self) -> JSONObject:
        """The command and its settings, as they are saved."""
        return {"command": self.order.COMMAND, **self.order.model_dump(mode="json")}

    @property
    def fixed(self) -> JSONObject:
        """Return the values that must be equal to resume a run: the fixed settings and the numbers that follow."""
        plan = self.plan
        sizes = {} if plan.step_sizes is None else {"step_sizes": plan.step_sizes}
        return {
            **self.order.model_dump(mode="json", include=marked(type(self.order), FIXED)),
            # Dropout is a function of the micro-batch.
            "micro_batch_size": self.order.global_batch.micro_batch_size,
            "examples_per_step": plan.examples_per_step,
            "total_steps": plan.total_steps,
            "corpus": self.stream.fingerprint,
            "chosen_on_half": self.task.halves,
            **sizes,
        }

    @property
    def folder(self) -> Path:
        """Return the run's folder."""
        assert self.order.save_ckpt_path is not None
        return self.order.save_ckpt_path


@dataclass
class Draft(Generic[Order]):
    """A run whose order is being completed: a step sets what the steps after it read."""

    order: Order
    """Complete after the steps: with the sizes of the model and of the records, and with the layout."""
    stack: ExitStack = field(default_factory=ExitStack)
    """Ends what the steps have begun."""
    start: Start = NEW
    mesh: Mesh = field(init=False)
    stop: StopRequest = field(init=False)
    tokenizer: TokenizerFolder | None = None
    """The tokenizer of the examples, which is saved with the model; None for synthetic examples."""
    task: Task = PRETRAINING
    learn: Learn | None = None
    """Returns the task with the outputs of its teacher, which the step `teacher` has opened; None without one."""
    stream: ExampleStream | None = None
    held_out: ExampleStream | None = None
    plan: Plan | None = None
    checks: list[Check] = field(default_factory=list)
    """Checks of the text, whose warnings a run prints."""

    @cached_property
    def processes(self) -> Processes:
        """The processes of the run."""
        cluster = self.order.cluster
        return find_processes(os.environ, cluster.workers, cluster.rank)

    def extend_vocabulary(self) -> None:
        """Extend the start by rows for the pieces that the tokenizer has after the model's pieces."""
        if self.start.source and self.tokenizer:
            extended = models.extended(self.start.source, self.tokenizer)
            self.start = replace(self.start, source=extended)

    def take(self, steps: "Steps") -> None:
        """Take steps. Of several processes only rank 0 prints, as long as the stack of the draft is open."""
        if self.processes.rank > 0:
            self.stack.enter_context(lines_to("nowhere"))
        for _, step in steps:
            step(self)
            for check in self.checks:
                if check.warns:
                    print_line(check.warning)
            self.checks.clear()

    def job(self, plan: Plan, stream: Stream, sample: Batch) -> Job:
        """Return the run of the complete order on these examples."""
        return Job(
            order=self.order,
            start=self.start,
            mesh=self.mesh,
            stop=self.stop,
            plan=plan,
            stream=stream,
            sample=sample,
            tokenizer=self.tokenizer,
            task=self.task,
        )


# Steps from an order to a run, by the names of their findings.
Steps = Sequence[tuple[str, Callable[[Draft[Any]], str]]]
