"""The steps that complete the order of a pre-training run, which `bert doctor` reports one by one."""

from collections.abc import Callable
from dataclasses import dataclass, field

from bert_cli.config.pretrain import PretrainSettings
from bert_cli.data.examples.reader import ExampleStream
from bert_cli.errors import ConfigError
from bert_cli.parallel.cluster import Processes
from bert_cli.parse.load import changed
from bert_cli.planning.plan import Plan, length_of, make_plan
from bert_cli.planning.workload import workload_of
from bert_cli.tasks.run import corpora, probe
from bert_cli.tasks.run.corpora import Corpora, RecordFolder
from bert_cli.tasks.run.folder import Folder, Start, find_start
from bert_cli.tasks.run.probe import Probe
from bert_cli.tasks.run.resolve import with_shape_of
from bert_cli.text import count


@dataclass
class Draft:
    """A run whose order is being completed: a step sets what the steps after it read."""

    settings: PretrainSettings
    """Complete after the steps: with the sizes of the model and of the records, and with the layout."""
    start: Start
    processes: Processes = field(default_factory=lambda: Processes(()))
    read: Corpora = field(default_factory=Corpora)
    configured: PretrainSettings | None = None
    """The settings with the sizes of the model, but not those of the records."""
    stream: ExampleStream | None = None
    held_out: ExampleStream | None = None
    pairs: Probe | None = None
    plan: Plan | None = None
    lines: list[str] = field(default_factory=list)
    """What a run prints of its steps."""

    @property
    def records(self) -> RecordFolder | None:
        """The first folder of the examples; None for synthetic ones."""
        folder = None if self.stream is None else self.stream.folder
        return None if folder is None else self.read.folder(folder)


def drafted(order: PretrainSettings) -> Draft:
    """Return the draft of an order of which nothing is known yet."""
    return Draft(order, Start(Folder(order.save_ckpt_path), None, None))


def find_model(draft: Draft) -> None:
    """Find the state from which the run starts, and take the sizes of its model."""
    draft.start = find_start(draft.settings, draft.start.folder)
    draft.settings = with_shape_of(draft.settings, draft.start.source)


def take_sizes(draft: Draft) -> None:
    """Take the sizes of the records, on which memory and layout depend."""
    source = draft.start.source
    draft.configured = draft.settings
    draft.settings = corpora.with_sizes_of_records(draft.settings, source, draft.read)


def open_records(draft: Draft) -> None:
    """Open the process' part of the examples, whose vocabulary is that of the model or extends it."""
    settings = draft.settings
    rank = draft.processes.rank
    stream = corpora.open_stream(settings, rank, draft.processes.count, draft.read)
    configured = draft.configured or settings
    draft.lines += corpora.describe_vocabulary(configured, settings, stream)
    source = draft.start.source
    if source is not None and stream.folder is not None:
        records = draft.read.folder(stream.folder)
        corpora.refuse_another_vocabulary(records, source, settings.save_ckpt_path)
        draft.start = draft.start.extended(records.tokenizer)
    if settings.new_rows_only_steps and settings.decay_from is None:
        draft.settings = changed(settings, known_rows=draft.start.known_rows)
        steps = count(settings.new_rows_only_steps, "step")
        rows = f"the rows from {draft.settings.known_rows:,} on"
        draft.lines.append(f"new rows: the first {steps} train only {rows}")
    _refuse_pairs(settings, "dataset_dir", stream)
    draft.stream = stream


def open_held_out(draft: Draft) -> None:
    """Open the evaluation examples, if there are any."""
    settings = draft.settings
    held_out = corpora.open_held_out(settings, read=draft.read) if settings.SAVES else None
    if held_out is None:
        return
    _refuse_pairs(settings, "validation_dir", held_out)
    draft.held_out = held_out
    has_pairs = draft.stream is not None and draft.stream.has_next_sentences
    if has_pairs and not held_out.has_next_sentences:
        draft.lines.append(
            f"validation_dir ({settings.validation_dir}): has no sentence pairs, so no next-sentence score; "
            "make it without --no-nsp to get one"
        )


def _refuse_pairs(settings: PretrainSettings, name: str, stream: ExampleStream) -> None:
    """Raise ConfigError for records with sentence pairs, which a model without segments reads as one text."""
    has_segments = settings.bert_config.type_vocab_size > 1
    if has_segments or stream.folder is None or not stream.has_next_sentences:
        return
    problem = "has sentence pairs, and this model has no segments"
    raise ConfigError(f"{name} ({stream.folder})", problem, "make it with bert tokenize --no-nsp")


def read_pairs(draft: Draft) -> None:
    """Read the minimal pairs of the probe, if there is one."""
    settings = draft.settings
    if settings.SAVES and settings.probe is not None and draft.records is not None:
        draft.pairs = probe.read_probe(settings, draft.records.tokenizer)
        draft.lines.append(f"probe: {draft.pairs.describe()}")


def plan_steps(draft: Draft) -> None:
    """Make the plan, and the stream follow it; a length in examples needs no records."""
    settings = draft.settings
    if draft.stream is None:
        length = length_of(settings, settings.decay_from)
        draft.plan = make_plan(workload_of(settings), length, None)
    else:
        draft.plan = corpora.plan_for(settings, draft.stream)


STEPS: tuple[tuple[str, Callable[[Draft], None]], ...] = (
    ("dataset_dir", open_records),
    ("validation_dir", open_held_out),
    ("probe", read_pairs),
    ("plan", plan_steps),
)
"""The steps after `find_model`, `take_sizes` and the choice of devices and layout, by the names of their findings."""
