"""The steps of pre-training from its order to its plan, which `bert doctor` reports one by one.

Each returns what it has found as text, "" if it had nothing to do.
"""

from typing import Any

import numpy as np

from bert_cli.config.pretrain import PretrainSettings
from bert_cli.data.examples.reader import ExampleStream
from bert_cli.data.tokens.tokenizer import TokenizerFolder
from bert_cli.errors import ConfigError, logger
from bert_cli.parallel.cluster import StoppedWhileJoiningError
from bert_cli.planning import layout
from bert_cli.planning.plan import Plan, make_plan
from bert_cli.processes import print_error
from bert_cli.tasks.run import corpora, resolve
from bert_cli.tasks.run.job import Draft, Steps
from bert_cli.tasks.run.start import find_start
from bert_cli.text import count
from bert_cli.train.loop import StopRequest

SAMPLE = 8  # examples that are read to check the records


def find_folder(draft: Draft[PretrainSettings]) -> str:
    """Check where the run saves."""
    resolve.check_output_paths(draft.order)
    # Ranks above 0 write no checkpoint, and their host may see the folder read-only.
    if draft.processes.rank == 0:
        resolve.check_folder(draft.order, "save_ckpt_path")
    if draft.order.save_ckpt_path is None:
        return "nothing will be saved"
    return ""


def find_model(draft: Draft[PretrainSettings]) -> str:
    """Find the state from which the run starts, and take the sizes of its model."""
    draft.start = find_start(draft.order)
    source = draft.start.source
    draft.order = resolve.with_shape_of(draft.order, source)
    if source is not None:
        return f"from {source.folder}"
    if draft.order.save_ckpt_path is None:
        return ""
    return "none: new weights"


def take_sizes(draft: Draft[PretrainSettings]) -> str:
    """Take the sizes of the records, on which memory and layout depend."""
    configured = draft.order.bert_config
    draft.order = corpora.with_rows_for_records(draft.order, draft.start.source)
    corpora.note_vocabulary(configured, draft.order)
    return ""


def choose_layout(draft: Draft[Any]) -> str:
    """Find the processes of the run, and choose the layout and the micro-batch if they are open."""
    order = draft.order
    processes = draft.processes
    if order.about is not None:
        logger.info(f"{order.about.what}\n{order.about.expect}")
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
        what = "layout"
        if is_auto:
            what = f"micro-batch {order.global_batch.micro_batch_size}"
        logger.info(f"{what}: chosen for {number} x {device_kind} of {memory / 1e9:.1f} GB")
    layout.check_processes(order.global_batch, processes.count)
    text = f"{layout.shape(order)}, idle for {layout.idle(order):.1%} of a step"
    if processes.count > 1:
        text += f"; {count(processes.count, 'process')} from {processes.source}"
    return text


def take_devices(draft: Draft[Any]) -> str:
    """Handle signals, join the other processes and take the devices."""
    draft.stop = draft.stack.enter_context(StopRequest())
    order = draft.order
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
    if is_simulated:
        return layout.simulated(number)
    return f"from {mesh.devices[0][0]}"


def open_records(draft: Draft[PretrainSettings]) -> str:
    """Open the process' part of the examples, whose vocabulary equals or extends the model's."""
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
    held_out = None
    if order.SAVES:
        held_out = corpora.open_held_out(order, name)
    if held_out is None:
        return ""
    _refuse_pairs(order, name, held_out)
    draft.held_out = held_out
    is_paired = draft.stream is not None and draft.stream.has_next_sentences
    if is_paired and not held_out.has_next_sentences:
        logger.info(
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
    return describe_plan(plan)


def describe_plan(plan: Plan) -> str:
    """Return the length and the learning rate of a run in words."""
    return (
        f"{count(plan.total_steps, 'step')} of {plan.step_in_words}; learning rate up to "
        f"{plan.peak_learning_rate:g}, {count(plan.warmup_steps, 'warm-up step')}"
    )


# The steps of pre-training from its order to its plan.
STEPS: Steps = (
    ("save_ckpt_path", find_folder),
    ("model", find_model),
    ("sizes", take_sizes),
    ("layout", choose_layout),
    ("devices", take_devices),
    ("dataset_dir", open_records),
    ("validation_dir", open_held_out),
    ("plan", plan_steps),
)
