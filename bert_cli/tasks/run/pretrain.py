"""`bert pretrain`: one phase of masked-LM and next-sentence pre-training.

Phase 2 is the same command with other lengths; it starts from the weights of phase 1.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import numpy as np

from bert_cli.config.pretrain import PretrainSettings
from bert_cli.data.examples.reader import ExampleStream
from bert_cli.data.tokens.tokenizer import read_vocabulary, vocabulary_path
from bert_cli.model.bert.heads import Head, PretrainingHeads
from bert_cli.parallel.engine import Batch, Engine
from bert_cli.parallel.engine import count as counts_of
from bert_cli.parallel.group import ProcessGroup
from bert_cli.processes import print_error, print_line
from bert_cli.statistics import Sample, identify, sample_of
from bert_cli.tasks.run import train
from bert_cli.tasks.run.job import Draft, Job
from bert_cli.tasks.run.steps import STEPS
from bert_cli.tasks.run.task import Result, compare, kept_baselines
from bert_cli.train import health, scores
from bert_cli.train.checkpoint import checkpoint_name
from bert_cli.train.metrics import BITS_PER_BYTE


def run(settings: PretrainSettings) -> None:
    """Train to the last step of the phase, or until a stop is requested, and save; compare it with the baseline."""
    with ExitStack() as stack:
        job = resolve(settings, stack)
        train.describe_run(job)
        built, finished = train.run_training(job, stack)
        if finished and job.order.saves and built.is_first_rank:
            samples = scores.read_samples(job.folder)
            if job.task.baselines is not None and "mlm_loss" in samples:
                examples = f"{job.stream.fingerprint} {samples['mlm_loss'].examples.digest}"
                baselines = kept_baselines(job.task, job.folder, examples)
                saved = job.folder / checkpoint_name(built.state.step)
                warning = compare([Result(samples, checkpoint=saved)], baselines, "mlm_loss")
                if warning:
                    print_error(warning)
    if not finished and settings.exit_code_when_stopped:
        raise SystemExit(settings.exit_code_when_stopped)


def resolve(order: PretrainSettings, stack: ExitStack) -> Job:
    """Return the run of an order on its devices, with its examples, its plan and its evaluation.

    Raises ConfigError, DataError, CheckpointError or DeviceError.
    """
    draft = Draft(order, stack)
    draft.take(STEPS)
    order = draft.order
    stream = draft.stream
    plan = draft.plan
    assert stream is not None
    assert plan is not None
    description = stream.describe(plan.examples)
    if description:
        print_line("\n".join(description))
    examples = order.evaluation_examples
    if draft.tokenizer is not None:
        draft.task = replace(draft.task, unigram_entropy=health.unigram_entropy(stream))
    job = draft.job(plan, stream, stream.first_micro_batches(len(draft.mesh.devices)))
    held_out = draft.held_out
    if held_out is None:
        return job
    baselines = partial(unigram, stream, held_out, examples) if order.baselines else None
    return replace(
        job,
        evaluate=partial(evaluate, held_out, examples),
        evaluate_every=order.evaluate_every_steps or plan.total_steps,
        task=replace(job.task, baselines=baselines, held_out=held_out.fingerprint),
    )


def evaluate(
    held_out: ExampleStream, examples: int, engine: Engine, _step: int = 0
) -> dict[str, Sample]:
    """Return means over the first examples of a held-out corpus, which the processes divide among them.

    `bits_per_byte` is the masked-LM loss in bits per byte of the masked pieces: unlike the loss per piece it can be
    compared between vocabularies. An engine adds up the examples of a micro-batch, so each is a row, and a group.
    """
    engine.gather_weights()
    return _means(engine.evaluate, engine.head, held_out, examples, engine.group)


def _means(
    sums_of: Callable[[Batch], Mapping[str, float]],
    head: type[Head],
    held_out: ExampleStream,
    examples: int,
    group: ProcessGroup | None = None,
) -> dict[str, Sample]:
    """Return the means of `evaluate` from a model's sums over the examples of a micro-batch."""
    assert held_out.folder is not None
    text_bytes = read_vocabulary(vocabulary_path(held_out.folder)).text_bytes
    total = min(examples, held_out.epoch_size or examples)
    size = held_out.batching.micro_batch_size
    starts = range(0, total, size)
    names = sorted({over for over, by in head.MEANS.values() if by in head.COUNTS})
    columns = {name: np.zeros(len(starts)) for name in (*names, *head.COUNTS, "bytes")}
    mine = slice(None) if group is None else slice(group.rank, None, group.world_size)
    for row in range(len(starts))[mine]:
        rows = held_out.rows(np.arange(starts[row], min(total, starts[row] + size)))
        masked = rows["masked_lm_ids"][rows["masked_lm_weights"] > 0]
        counts = counts_of(rows, head.COUNTS) | {"bytes": float(text_bytes[masked].sum())}
        for name, value in {**counts, **sums_of(rows)}.items():
            if name in columns:
                columns[name][row] = value
    table = np.stack([*columns.values()])
    if group is not None:
        table = group.all_reduce(table)
    columns = dict(zip(columns, table, strict=True))
    blocks = identify((f"{held_out.fingerprint} {first}" for first in starts), size=total)
    samples = {
        name: sample_of(blocks, "ratio", columns[over], columns[by])
        for name, (over, by) in head.MEANS.items()
        if over in columns and by in columns and columns[by].any()
    }
    if columns["bytes"].any():
        bits = columns["mlm_loss"] / math.log(2)
        samples[BITS_PER_BYTE] = sample_of(blocks, "ratio", bits, columns["bytes"])
    return samples


def unigram(stream: ExampleStream, held_out: ExampleStream, examples: int) -> dict[str, Result]:
    """Return the scores of a model that knows only how frequent each token is in the training examples."""
    assert held_out.folder is not None
    size = len(read_vocabulary(vocabulary_path(held_out.folder)).text_bytes)
    # Each token has a probability, also one that the sample lacks.
    counts = 1.0 + np.bincount(health.masked_tokens(stream), minlength=size)
    losses = -np.log(counts / counts.sum())

    def sums(rows: Batch) -> dict[str, float]:
        tokens = rows["masked_lm_ids"][rows["masked_lm_weights"] > 0]
        is_right = tokens == losses.argmin()
        return {"mlm_loss": losses[tokens].sum(), "mlm_correct": is_right.sum()}

    samples = _means(sums, PretrainingHeads, held_out, examples)
    of_tokens = {name: sample for name, sample in samples.items() if not name.startswith("nsp")}
    return {"frequencies of tokens": Result(of_tokens)}
