"""`bert pretrain`: one phase of masked-LM and next-sentence pre-training.

Phase 2 is the same command with other lengths; it starts from the weights of phase 1.
"""

import math
from contextlib import ExitStack

import numpy as np

from bert_cli.config.pretrain import PretrainSettings
from bert_cli.data.examples.reader import ExampleStream
from bert_cli.data.tokens.tokenizer import read_vocabulary, vocabulary_path
from bert_cli.errors import ConfigError
from bert_cli.parallel.engine import Engine
from bert_cli.parallel.engine import count as counts_of
from bert_cli.parse.load import changed
from bert_cli.processes import print_line
from bert_cli.tasks.run import corpora, probe, train
from bert_cli.tasks.run.corpora import Corpora
from bert_cli.tasks.run.folder import Folder, find_start
from bert_cli.tasks.run.resolve import (
    ResolvedRun,
    check_output_paths,
    take_devices,
    with_shape_of,
)
from bert_cli.tasks.run.teacher import relations_of
from bert_cli.text import count
from bert_cli.train import health
from bert_cli.train.metrics import BITS_PER_BYTE, PROBE


def run(settings: PretrainSettings) -> None:
    """Train to the last step of the phase, or until a stop is requested, and save."""
    check_output_paths(settings)
    with ExitStack() as stack:
        resolved = resolve(settings, stack)
        _, status = train.run_training(resolved, stack)
    if status == "stopped" and settings.exit_code_when_stopped:
        raise SystemExit(settings.exit_code_when_stopped)


def resolve(settings: PretrainSettings, stack: ExitStack) -> ResolvedRun:
    """Return the run of these settings on its devices, with its examples, its plan and its evaluation.

    Raises ConfigError, DataError, CheckpointError or DeviceError.
    """
    start = find_start(settings, Folder(settings.save_ckpt_path))
    read = Corpora()
    configured = with_shape_of(settings, start.source)
    sized = corpora.with_sizes_of_records(configured, start.source, read)
    settings, mesh, stop = take_devices(sized, start, stack)
    stream = corpora.open_stream(settings, mesh.processes.rank, mesh.processes.count, read)
    records = None if stream.folder is None else read.folder(stream.folder)
    for line in corpora.describe_vocabulary(configured, settings, stream):
        print_line(line)
    if start.source is not None and records is not None:
        corpora.refuse_another_vocabulary(records, start.source, settings.save_ckpt_path)
        start = start.extended(records.tokenizer)
    if settings.new_rows_only_steps and settings.decay_from is None:
        settings = changed(settings, known_rows=start.known_rows)
        steps = count(settings.new_rows_only_steps, "step")
        rows = f"the rows from {settings.known_rows:,} on"
        print_line(f"new rows: the first {steps} train only {rows}")
    held_out = corpora.open_held_out(settings, read=read) if settings.SAVES else None
    if settings.bert_config.type_vocab_size == 1:
        _refuse_pairs("dataset_dir", stream)
        _refuse_pairs("validation_dir", held_out)
    if held_out is not None and stream.has_next_sentences and not held_out.has_next_sentences:
        print_line(
            f"validation_dir ({settings.validation_dir}): has no sentence pairs, so no next-sentence score; "
            "make it without --no-nsp to get one"
        )
    is_probed = settings.SAVES and settings.probe is not None
    pairs = probe.read_probe(settings, records.tokenizer) if is_probed and records else None
    if pairs is not None:
        print_line(f"probe: {pairs.describe()}")
    plan = corpora.plan_for(settings, stream)
    if description := stream.describe(plan.examples):
        print_line("\n".join(description))
    if records is not None:
        for check in corpora.text_checks(stream, settings):
            if check.warns:
                print_line(check.warning)

    def score(engine: Engine, step: int) -> dict[str, float]:
        values = (
            {} if held_out is None else evaluate(engine, held_out, settings.evaluation_examples)
        )
        if pairs is not None:
            values[PROBE] = probe.accuracy(probe.log_likelihoods(engine, pairs))
        return values

    return ResolvedRun(
        settings,
        start,
        mesh,
        stop,
        plan=plan,
        stream=stream,
        sample=stream.first_micro_batches(len(mesh.devices)),
        tokenizer=None if records is None else records.tokenizer,
        prepare=relations_of(settings, stream),
        evaluate=None if held_out is None and pairs is None else score,
        held_out="" if pairs is None else pairs.sentences.fingerprint,
        evaluate_every=settings.evaluate_every_steps,
        unigram_entropy=None if records is None else health.unigram_entropy(stream),
    )


def _refuse_pairs(name: str, stream: ExampleStream | None) -> None:
    """Raise ConfigError for records with sentence pairs, which a model without segments reads as one text."""
    if stream is None or stream.folder is None or not stream.has_next_sentences:
        return
    problem = "has sentence pairs, and this model has no segments"
    raise ConfigError(f"{name} ({stream.folder})", problem, "make it with bert tokenize --no-nsp")


def evaluate(engine: Engine, held_out: ExampleStream, examples: int) -> dict[str, float]:
    """Return means over the first examples of a held-out corpus, which the processes divide among them.

    `bits_per_byte` is the masked-LM loss in bits per byte of the masked pieces: unlike the loss per piece it can be
    compared between vocabularies.
    """
    assert held_out.folder is not None
    text_bytes = read_vocabulary(vocabulary_path(held_out.folder)).text_bytes
    engine.gather_weights()
    total = min(examples, held_out.epoch_size or examples)
    size = held_out.batching.micro_batch_size
    group = engine.group
    head = engine.head
    # Held-out examples have no teacher, so no relation loss.
    names = {over for over, by in head.MEANS.values() if by in head.COUNTS}
    sums = dict.fromkeys(sorted(names), 0.0)
    counts = dict.fromkeys((*head.COUNTS, "examples", "tokens", "bytes"), 0.0)
    for first in range(0, total, size)[group.rank :: group.world_size]:
        rows = held_out.rows(np.arange(first, min(total, first + size)))
        for name, value in counts_of(rows, head.COUNTS).items():
            counts[name] += value
        masked = rows["masked_lm_ids"][rows["masked_lm_weights"] > 0]
        counts["bytes"] += float(text_bytes[masked].sum())
        for name, value in engine.evaluate(rows).items():
            sums[name] += value
    reduced = list(map(float, group.all_reduce([*sums.values(), *counts.values()])))
    summed = dict(zip(sums, reduced, strict=False))
    counts = dict(zip(counts, reduced[len(sums) :], strict=True))
    metrics = engine.means(summed, counts)
    if counts["bytes"]:
        bits = metrics["mlm_loss"] * counts["masked"] / math.log(2)
        metrics[BITS_PER_BYTE] = bits / counts["bytes"]
    return metrics
