"""From an order to a run: `Draft`, the steps that complete it, which `bert doctor` reports one by one, and `Job`."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic

import numpy as np

from bert_cli.config.pretrain import PretrainSettings
from bert_cli.config.training import TrainSettings
from bert_cli.data.examples.reader import ExampleStream, Stream
from bert_cli.data.tokens.tokenizer import TokenizerFolder
from bert_cli.errors import ConfigError
from bert_cli.files import JSONObject
from bert_cli.parallel.cluster import Processes, StoppedWhileJoiningError, find_processes
from bert_cli.parallel.engine import Batch, Engine
from bert_cli.parallel.runtime import Mesh
from bert_cli.planning import layout
from bert_cli.planning.checks import Check
from bert_cli.planning.plan import Plan, make_plan
from bert_cli.processes import print_error, print_line
from bert_cli.settings.markers import FIXED, marked
from bert_cli.statistics import Sample
from bert_cli.tasks.model import models
from bert_cli.tasks.run import corpora, resolve
from bert_cli.tasks.run.resolve import Order
from bert_cli.tasks.run.start import Folder, Start, find_start
from bert_cli.tasks.run.task import Task
from bert_cli.text import count
from bert_cli.train.loop import StopRequest

NEW = Start(Folder(None), None)
PRETRAINING = Task(labels=2, label_names=None, train=None)
SAMPLE = 8  # examples that are read to check the records


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
    task: Task = PRETRAINING
    """What the run is trained for."""
    evaluate: Callable[[Engine, int], Mapping[str, Sample]] | None = None
    """Return metrics on held-out examples after a step."""
    evaluate_every: int | None = None
    """Steps between evaluations; the last step is evaluated, too."""
    early_stop: int | None = None
    """Evaluations in a row without a better score after which the run ends."""
    unigram_entropy: float | None = None
    """Unigram entropy of the masked tokens, None if it cannot be compared with the loss."""
    is_described: bool = False
    """Whether a plan was printed before, as that of another seed or of the folds."""
    unsaved_steps: int = 2
    """Steps of a run that saves nothing."""

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
    stream: ExampleStream | None = None
    held_out: ExampleStream | None = None
    plan: Plan | None = None
    checks: list[Check] = field(default_factory=list)
    """Checks of the text, whose warnings a run prints."""
    lines: list[str] = field(default_factory=list)
    """What a run prints of its steps."""

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
        """Take steps; rank 0 prints their lines and warnings."""
        for _, step in steps:
            step(self)
            warnings = [check.warning for check in self.checks if check.warns]
            for line in (*self.lines, *warnings):
                if self.processes.rank == 0:
                    print_line(line)
            self.lines.clear()
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


# --- the steps; each returns what it has found as text, "" if it had nothing to do


def find_model(draft: Draft[PretrainSettings]) -> str:
    """Find the state from which the run starts, and take the sizes of its model."""
    draft.start = find_start(draft.order)
    source = draft.start.source
    draft.order = resolve.with_shape_of(draft.order, source)
    if source is not None:
        return f"from {source.folder}"
    return "" if draft.order.save_ckpt_path is None else "none: new weights"


def take_sizes(draft: Draft[PretrainSettings]) -> str:
    """Take the sizes of the records, on which memory and layout depend."""
    configured = draft.order.bert_config
    draft.order = corpora.with_rows_for_records(draft.order, draft.start.source)
    draft.lines += corpora.describe_vocabulary(configured, draft.order)
    return ""


def choose_layout(draft: Draft[Any]) -> str:
    """Find the processes of the run, and choose the layout and the micro-batch if they are open."""
    order = draft.order
    processes = draft.processes
    if order.about is not None:
        draft.lines.append(f"{order.about.what}\n{order.about.expect}")
    if order.is_open or order.require_gpu:
        device_kind, number, memory = resolve.find_devices(order, processes)
    if order.is_open:
        number *= processes.count
        # A batch in examples leaves the micro-batch open.
        is_auto = order.global_batch.examples_per_step is not None
        # Dropout depends on the micro-batch, so a resumed run has its checkpoint's.
        if is_auto and (continued := draft.start.folder.newest):
            order = layout.with_micro_batch(order, continued.state.fixed["micro_batch_size"])
        order = layout.choose(order, device_kind, number, memory, processes.count)
        draft.order = order
        what = f"micro-batch {order.global_batch.micro_batch_size}" if is_auto else "layout"
        draft.lines.append(f"{what}: chosen for {number} x {device_kind} of {memory / 1e9:.1f} GB")
        draft.lines += layout.idle_memory(order, device_kind, memory)
    layout.check_processes(order.global_batch, processes.count)
    text = f"{layout.shape(order)}, idle for {layout.idle(order):.1%} of a step"
    if processes.count > 1:
        text += f"; {count(processes.count, 'process')} from {processes.source}"
    return text


def take_devices(draft: Draft[Any]) -> str:
    """Handle signals, join the other processes and take the devices.

    Of several processes only rank 0 prints, as long as the stack of the draft is open.
    """
    draft.stop = draft.stack.enter_context(StopRequest())
    order = draft.order
    if draft.processes.rank > 0:
        nothing = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        draft.stack.enter_context(redirect_stdout(nothing))
    try:
        mesh = resolve.open_mesh(order, draft.processes, draft.stop)
    except StoppedWhileJoiningError:
        print_error("run: stopped before all processes had started; nothing was done")
        raise SystemExit(order.exit_code_when_stopped) from None
    # Installed again: TensorFlow's runtime for several processes replaces the handler of SIGTERM.
    draft.stop.listen()
    draft.mesh = mesh
    number = sum(map(len, mesh.devices))
    is_simulated = mesh.kind == "CPU" and number > 1
    return layout.simulated(number) if is_simulated else f"from {mesh.devices[0][0]}"


def open_records(draft: Draft[PretrainSettings]) -> str:
    """Open the process' part of the examples, whose vocabulary is that of the model or extends it."""
    order = draft.order
    processes = draft.processes
    stream = corpora.open_stream(order, processes.rank, processes.count)
    source = draft.start.source
    if stream.folder is not None:
        draft.tokenizer = TokenizerFolder(stream.folder)
        if source is not None:
            corpora.refuse_another_vocabulary(draft.tokenizer, source, order.save_ckpt_path)
        draft.extend_vocabulary()
    _refuse_pairs(order, "dataset_dir", stream)
    # Damaged records are refused before anything is built.
    # Reads the first records of the permutation, which come from anywhere in the corpus.
    stream.rows(np.arange(SAMPLE))
    draft.stream = stream
    if draft.tokenizer is None:
        return "synthetic examples"
    new_pieces = order.bert_config.vocab_size if order.pretrained_ckpt_path is None else None
    draft.checks += corpora.text_checks(stream, new_pieces)
    paths = ", ".join(order.dataset_paths)
    return f"{paths}: {stream.epoch_size:,} readable records; `bert inspect` shows more"


def open_held_out(draft: Draft[PretrainSettings], name: str = "validation_dir") -> str:
    """Open the evaluation examples, if there are any; messages call them `name`."""
    order = draft.order
    held_out = corpora.open_held_out(order, name) if order.SAVES else None
    if held_out is None:
        return ""
    _refuse_pairs(order, name, held_out)
    draft.held_out = held_out
    is_paired = draft.stream is not None and draft.stream.has_next_sentences
    if is_paired and not held_out.has_next_sentences:
        draft.lines.append(
            f"validation_dir ({order.validation_dir}): has no sentence pairs, so no next-sentence score; "
            "make it without --no-nsp to get one"
        )
    return f"{held_out.epoch_size:,} records"


def _refuse_pairs(order: PretrainSettings, name: str, stream: ExampleStream) -> None:
    """Raise ConfigError for records with sentence pairs, which a model without segments reads as one text."""
    has_segments = order.bert_config.type_vocab_size > 1
    if not has_segments and stream.folder is not None and stream.has_next_sentences:
        problem = "has sentence pairs, and this model has no segments"
        remedy = "make it with bert tokenize --no-nsp"
        raise ConfigError(f"{name} ({stream.folder})", problem, remedy)


def plan_steps(draft: Draft[PretrainSettings]) -> str:
    """Make the plan, and the stream follow it; a length in examples needs no records."""
    order = draft.order
    stream = draft.stream
    if stream is not None:
        sizes = stream.epoch_size, stream.sequences_per_example
        plan = make_plan(order, *sizes)
        stream.follow(plan)
    elif order.num_epochs is None:
        plan = make_plan(order, None)
    else:
        return ""
    draft.plan = plan
    return (
        f"{count(plan.total_steps, 'step')} of {plan.step_in_words}; learning rate up to "
        f"{plan.peak_learning_rate:g}, {count(plan.warmup_steps, 'warm-up step')}"
    )


# The steps of pre-training from its order to its plan.
STEPS: Steps = (
    ("model", find_model),
    ("sizes", take_sizes),
    ("layout", choose_layout),
    ("devices", take_devices),
    ("dataset_dir", open_records),
    ("validation_dir", open_held_out),
    ("plan", plan_steps),
)
