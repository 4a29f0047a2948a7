"""From an order to a run: `Draft`, the steps that complete it, which `bert doctor` reports one by one, and `Job`."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple

from bert_cli.config.markers import FIXED, marked
from bert_cli.config.parallel import Cluster
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
from bert_cli.planning.plan import Plan, length_of, make_plan
from bert_cli.planning.workload import Workload, workload_of
from bert_cli.processes import print_error, print_line
from bert_cli.tasks.run import corpora, probe, resolve
from bert_cli.tasks.run.corpora import Corpora
from bert_cli.tasks.run.folder import Folder, Start, find_start
from bert_cli.tasks.run.probe import Probe
from bert_cli.tasks.run.resolve import Order
from bert_cli.text import count
from bert_cli.train.loop import Prepare, Step, StopRequest


class Output(NamedTuple):
    """What a run saves, prints and tracks: settings by their names."""

    saves: bool
    dry_run: bool
    save_ckpt_path: Path | None
    pretrained_ckpt_path: str | None
    checkpoint_every_steps: int | None
    checkpoint_every_minutes: float | None
    keep_checkpoints: int
    keep_every_steps: int | None
    log_every_steps: int
    max_skipped_steps: int
    tensorboard_dir: Path | None
    cluster: Cluster
    pools_by: str | None


@dataclass(frozen=True)
class Job:
    """A run with all its values, before its engine is built."""

    kind: type[TrainSettings]
    """The settings of its command."""
    record: JSONObject
    """Its settings as they are saved: with the sizes of the model and of the records, and with the layout."""
    prints_steps: bool
    """Whether the settings ask for lines of steps beside a progress bar."""
    output: Output
    work: Workload
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
    label_names: Sequence[str] | None = None
    """Class names, `labels` of them; None for regression or unnamed classes."""
    labels: int = 2
    prepare: Prepare = Step.prepare
    evaluate: Callable[[Engine, int], dict[str, float]] | None = None
    """Return metrics on held-out examples after a step."""
    held_out: str = ""
    """Fingerprint of the held-out examples, which the processes divide among them."""
    evaluate_every: int | None = None
    """Steps between evaluations; the last step is evaluated, too."""
    best: str | None = None
    """The metric of an evaluation whose highest value selects the best checkpoint."""
    early_stop: int | None = None
    """Evaluations in a row without a better score after which the run ends."""
    unigram_entropy: float | None = None
    """Unigram entropy of the masked tokens, None if it cannot be compared with the loss."""
    unsaved_steps: int = 2
    """Steps of a run that saves nothing."""

    def marked(self, marker: str) -> JSONObject:
        """Return the settings that have a marker, as JSON."""
        names = marked(self.kind, marker)
        return {name: value for name, value in self.record.items() if name in names}

    @property
    def fixed(self) -> JSONObject:
        """Return the values that must be equal to resume a run: the fixed settings and the numbers that follow."""
        plan = self.plan
        stored_names = {"length_buckets": "length_bins"}
        settings = self.marked(FIXED)
        sizes = {} if plan.step_sizes is None else {"step_sizes": plan.step_sizes}
        return {
            **{stored_names.get(name, name): value for name, value in settings.items()},
            # Dropout is a function of the micro-batch.
            "micro_batch_size": self.work.batch.micro_batch_size,
            "examples_per_step": plan.examples_per_step,
            "total_steps": plan.total_steps,
            "corpus": self.stream.fingerprint,
            **sizes,
        }

    @property
    def folder(self) -> Path:
        """Return the run's folder."""
        assert self.output.save_ckpt_path is not None
        return self.output.save_ckpt_path


@dataclass
class Draft(Generic[Order]):
    """A run whose order is being completed: a step sets what the steps after it read."""

    order: Order
    """Complete after the steps: with the sizes of the model and of the records, and with the layout."""
    start: Start = field(init=False)
    processes: Processes = resolve.ONE_PROCESS
    mesh: Mesh = field(init=False)
    stop: StopRequest = field(init=False)
    read: Corpora = field(default_factory=Corpora)
    configured: Order | None = None
    """The order with the sizes of the model, but not those of the records."""
    tokenizer: TokenizerFolder | None = None
    """The tokenizer of the examples, which is saved with the model; None for synthetic examples."""
    stream: ExampleStream | None = None
    held_out: ExampleStream | None = None
    pairs: Probe | None = None
    plan: Plan | None = None
    lines: list[str] = field(default_factory=list)
    """What a run prints of its steps."""

    def __post_init__(self) -> None:
        """Start in an empty folder: the order has not been followed yet."""
        self.start = Start(Folder(self.order.save_ckpt_path), None, None)

    def job(self, **values: Any) -> Job:
        """Return the run of the complete order, with the other `values` of a Job."""
        order = self.order
        return Job(
            kind=type(order),
            record=order.model_dump(mode="json"),
            prints_steps="log_every_steps" in order.model_fields_set,
            output=Output(*(getattr(order, name) for name in Output._fields)),
            work=workload_of(order),
            start=self.start,
            mesh=self.mesh,
            stop=self.stop,
            tokenizer=self.tokenizer,
            **values,
        )


def find_model(draft: Draft[PretrainSettings]) -> None:
    """Find the state from which the run starts, and take the sizes of its model."""
    draft.start = find_start(draft.order, draft.start.folder)
    draft.order = resolve.with_shape_of(draft.order, draft.start.source)


def take_sizes(draft: Draft[PretrainSettings]) -> None:
    """Take the sizes of the records, on which memory and layout depend."""
    draft.configured = draft.order
    draft.order = corpora.with_sizes_of_records(draft.order, draft.start.source, draft.read)


def take_devices(draft: Draft[Any], stack: ExitStack) -> None:
    """Handle signals, find the other processes, choose the layout and take the devices.

    Of several processes only rank 0 prints, as long as `stack` is open.
    """
    draft.stop = stack.enter_context(StopRequest())
    order = draft.order
    cluster = order.cluster
    processes = draft.processes = find_processes(os.environ, cluster.workers, cluster.rank)
    if processes.rank > 0:
        stack.enter_context(redirect_stdout(open(os.devnull, "w", encoding="utf-8")))  # noqa: SIM115
    if order.about is not None:
        print_line(f"{order.about.what}\n{order.about.expect}")
    is_open = workload_of(order).is_open
    if is_open or order.require_gpu:
        devices = resolve.find_devices(order.engine, processes, require_gpu=order.require_gpu)
    if is_open:
        kind, number, memory = devices
        is_auto = order.global_batch.examples_per_step is not None
        order = draft.order = resolve.with_layout(order, devices, processes.count, draft.start)
        what = f"micro-batch {order.global_batch.micro_batch_size}" if is_auto else "layout"
        chosen_for = f"{processes.count * number} x {kind} of {memory / 1e9:.1f} GB"
        lines = [f"{what}: chosen for {chosen_for}"]
        lines += layout.idle_memory(workload_of(order), kind, memory)
        print_line("\n".join(lines))
    try:
        draft.mesh = resolve.open_mesh(workload_of(order), processes, cluster, draft.stop)
    except StoppedWhileJoiningError:
        print_error("run: stopped before all processes had started; nothing was done")
        raise SystemExit(order.exit_code_when_stopped) from None
    # Installed again: TensorFlow's runtime for several processes replaces the handler of SIGTERM.
    draft.stop.listen()


def open_records(draft: Draft[PretrainSettings]) -> None:
    """Open the process' part of the examples, whose vocabulary is that of the model or extends it."""
    order = draft.order
    rank = draft.processes.rank
    stream = corpora.open_stream(order, rank, draft.processes.count, draft.read)
    configured = draft.configured or order
    draft.lines += corpora.describe_vocabulary(configured, order, stream)
    source = draft.start.source
    if stream.folder is not None:
        draft.tokenizer = draft.read.folder(stream.folder).tokenizer
        if source is not None:
            corpora.refuse_another_vocabulary(draft.tokenizer, source, order.save_ckpt_path)
        draft.start = draft.start.extended(draft.tokenizer)
    if order.new_rows_only_steps and order.decay_from is None:
        draft.order = order.model_copy(update={"known_rows": draft.start.known_rows})
        steps = count(order.new_rows_only_steps, "step")
        rows = f"the rows from {draft.order.known_rows:,} on"
        draft.lines.append(f"new rows: the first {steps} train only {rows}")
    _refuse_pairs(order, "dataset_dir", stream)
    draft.stream = stream


def open_held_out(draft: Draft[PretrainSettings]) -> None:
    """Open the evaluation examples, if there are any."""
    order = draft.order
    held_out = corpora.open_held_out(order, read=draft.read) if order.SAVES else None
    if held_out is None:
        return
    _refuse_pairs(order, "validation_dir", held_out)
    draft.held_out = held_out
    has_pairs = draft.stream is not None and draft.stream.has_next_sentences
    if has_pairs and not held_out.has_next_sentences:
        draft.lines.append(
            f"validation_dir ({order.validation_dir}): has no sentence pairs, so no next-sentence score; "
            "make it without --no-nsp to get one"
        )


def _refuse_pairs(order: PretrainSettings, name: str, stream: ExampleStream) -> None:
    """Raise ConfigError for records with sentence pairs, which a model without segments reads as one text."""
    has_segments = order.bert_config.type_vocab_size > 1
    if has_segments or stream.folder is None or not stream.has_next_sentences:
        return
    problem = "has sentence pairs, and this model has no segments"
    raise ConfigError(f"{name} ({stream.folder})", problem, "make it with bert tokenize --no-nsp")


def read_pairs(draft: Draft[PretrainSettings]) -> None:
    """Read the minimal pairs of the probe, if there is one."""
    order = draft.order
    if order.SAVES and order.probe is not None and draft.tokenizer is not None:
        draft.pairs = probe.read_probe(order, draft.tokenizer)
        draft.lines.append(f"probe: {draft.pairs.describe()}")


def plan_steps(draft: Draft[PretrainSettings]) -> None:
    """Make the plan, and the stream follow it; a length in examples needs no records."""
    order = draft.order
    stream = draft.stream
    size = None if stream is None else stream.epoch_size
    sequences = 1.0 if stream is None else stream.sequences_per_example
    length = length_of(order, order.decay_from)
    draft.plan = make_plan(workload_of(order), length, size, sequences)
    if stream is not None:
        stream.follow(draft.plan)


STEPS: tuple[tuple[str, Callable[[Draft[PretrainSettings]], None]], ...] = (
    ("dataset_dir", open_records),
    ("validation_dir", open_held_out),
    ("probe", read_pairs),
    ("plan", plan_steps),
)
"""The steps after `find_model`, `take_sizes` and the choice of devices and layout, by the names of their findings."""
