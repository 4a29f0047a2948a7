"""Fine-tuning, the same for all tasks.

The model is the encoder of the model that the run starts from, with a head for the task. It is scored on the
development set after each epoch. At the end the best checkpoint's predictions are written, and its scores printed as
one JSON object.
"""

import json
import shutil
import statistics
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bert_cli.arrays import Floats32
from bert_cli.config.finetune import FinetuneSettings
from bert_cli.data.examples.reader import Batching
from bert_cli.data.finetune.features import Features
from bert_cli.data.finetune.labels import DECISION
from bert_cli.data.finetune.readers import FeatureReader
from bert_cli.data.io.arrays import read_arrays, write_arrays
from bert_cli.files import (
    add_to_checkpoint,
    atomic_file,
    with_checksum,
    write_json_atomically,
)
from bert_cli.parallel.engine import Batch, Engine
from bert_cli.parallel.runtime import Mesh
from bert_cli.planning.plan import Plan, make_plan
from bert_cli.processes import print_error, print_line
from bert_cli.statistics import interval
from bert_cli.tasks.model import models
from bert_cli.tasks.run import build as assemble
from bert_cli.tasks.run import train
from bert_cli.tasks.run.build import Run
from bert_cli.tasks.run.finetune_steps import another_model, training_examples
from bert_cli.tasks.run.job import Draft, Job, Steps
from bert_cli.tasks.run.resolve import runtime
from bert_cli.tasks.run.task import (
    CHOSEN_ON_SAME,
    FOLD,
    Result,
    Scorer,
    Task,
    compare,
    kept_baselines,
)
from bert_cli.tasks.run.teacher import label_order
from bert_cli.text import count
from bert_cli.train import card, checkpoint, scores
from bert_cli.train.checkpoint import Folder
from bert_cli.train.loop import StoppedError


def run(settings: FinetuneSettings, steps: Steps) -> None:
    """Fine-tune and score, with the number of seeds in the settings. A request to stop saves and returns."""
    with ExitStack() as stack:
        draft = Draft(settings, stack)
        draft.take(steps)
        try:
            if settings.do_training:
                _train_seeds(draft)
            else:
                _only_score(draft)
        except StoppedError:
            if not settings.do_training:  # there is nothing to continue
                raise KeyboardInterrupt from None
            if settings.exit_code_when_stopped:
                raise SystemExit(settings.exit_code_when_stopped) from None


# --- training


def _train_seeds(draft: Draft[FinetuneSettings]) -> None:
    """Train with each seed or, after the folds, on all examples. Raises StoppedError on a request to stop."""
    order = draft.order
    in_folds = draft.task.folds is not None
    is_described = in_folds and order.saves
    if is_described:
        draft.task = _tested_in_folds(draft)
    parts = parts_of_seeds(draft)
    scored = []
    for part in parts:
        if len(parts) > 1:
            print_line(f"seed {part.order.seed}:")
        result = _train_and_score(part, describes=not is_described)
        is_described = True  # all seeds have one plan
        if result.samples:
            scored.append(result)
            if len(parts) > 1:
                draft.task.print_scores(result)
    if scored:
        _report(order, draft.task, scored, draft.processes.rank)


def parts_of_seeds(draft: Draft[FinetuneSettings]) -> list[Draft[FinetuneSettings]]:
    """Return the draft of each seed in a folder of its own; for one seed or folds, only the draft."""
    first = draft.order.seed
    if draft.task.folds is not None or draft.order.seeds == 1:
        return [draft]
    return [
        _part_of(draft, seed, f"seed_{seed}") for seed in range(first, first + draft.order.seeds)
    ]


def _part_of(draft: Draft[FinetuneSettings], seed: int, name: str) -> Draft[FinetuneSettings]:
    """Return the draft with another seed, and with folders of its own in those of the order."""
    part = copy(draft)
    paths = draft.order.model_dump(include={"save_ckpt_path", "tensorboard_dir"}, exclude_none=True)
    changes = {field: path / name for field, path in paths.items()}
    part.order = draft.order.model_copy(update={"seed": seed, **changes})
    # A folder of its own, so that each seed continues from its own checkpoint.
    part.start = replace(draft.start, folder=Folder(part.order.save_ckpt_path))
    return part


def _tested_in_folds(draft: Draft[FinetuneSettings]) -> Task:
    """Test each fold, and return the task with their scores. Raises StoppedError on a request to stop."""
    task = draft.task
    folds = task.folds
    assert folds is not None
    job = resolve(copy(draft))
    train.describe_run(job)
    newest = draft.start.folder.newest
    if newest:
        checkpoint.refuse_another_run(newest, job.fixed, job.record)
    # [rows, labels]: each row is filled by the one fold that tests it; rows that no fold tests stay 0.
    logits = np.zeros((len(folds), task.labels), np.float32)
    size = folds.max() + 1
    for number in range(size):
        tested = folds == number
        print_line(f"fold {number + 1} of {size} tests {count(tested.sum(), 'row')}:")
        part = _part_of(draft, draft.order.seed + number, f"fold_{number + 1}")
        part.task = task.of_fold(tested)
        logits[tested] = _answers_of_fold(resolve(part))
    print_line("the training on all rows:")
    note = f", each row by one of {size} models, which had not learned it"
    result = replace(task.evaluate({FOLD: logits[folds >= 0]}), note=note)
    return replace(task, evaluate=lambda _: result)


def _answers_of_fold(job: Job) -> Floats32 | float:
    """Return the logits of the examples that a fold tests, on rank 0. Raises StoppedError on a stop.

    They are kept in place of the fold's folder, so that the same command does not train it again.
    """
    group = runtime(job.order.engine).group_of(job.mesh)
    about = json.dumps([job.fixed, job.task.fingerprint], sort_keys=True)
    # The name has a checksum of all that the answers depend on: another setting finds no answers.
    kept = job.folder.with_name(f"fold_{zlib.crc32(about.encode()):08x}.npz")
    # Decided by rank 0: a file may appear later on another host.
    if not group.broadcast([kept.is_file()])[0]:
        with ExitStack() as locks:
            built = _train_to_end(job, locks)
            scorer = Scorer(job.order, job.task, job.stop)
            logits = scorer.logits(built.engine, job.task.development)
            if group.rank == 0:
                with atomic_file(kept) as partial_file, partial_file.open("wb") as file:
                    write_arrays(file, logits)
    if group.rank > 0:
        return 0.0
    shutil.rmtree(job.folder, ignore_errors=True)
    answers: Floats32 = read_arrays(kept)[FOLD]
    return answers


def _train_to_end(job: Job, locks: ExitStack) -> Run:
    """Train; raises StoppedError on a request to stop before the end."""
    built, finished = train.run_training(job, locks)
    if not finished:
        raise StoppedError
    return built


def resolve(draft: Draft[Any], scorer: Scorer | None = None) -> Job:
    """Return the training run of one seed, which `scorer` scores."""
    order = draft.order
    task = draft.task
    examples = training_examples(task, order.seed)
    assert examples is not None
    plan, reader, sample = open_features(order, examples, draft.mesh, task.reader)
    # Rounded up: the last step of an epoch may reach into the next.
    per_epoch = -(-reader.epoch_size // plan.examples_per_step)
    draft.extend_vocabulary()
    return replace(
        draft.job(plan, reader, sample),
        evaluate=None if scorer is None else scorer.evaluate,
        evaluate_every=order.evaluate_every_steps or per_epoch,
        early_stop=order.early_stop,
    )


def _train_and_score(draft: Draft[FinetuneSettings], *, describes: bool) -> Result:
    """Train and score one seed; `describes` prints its plan. Raises StoppedError on a request to stop."""
    order = draft.order
    scorer = Scorer(order, draft.task, draft.stop)
    # Folds have scored before, and no score chooses a checkpoint.
    in_folds = draft.task.folds is not None
    with ExitStack() as locks:
        job = resolve(draft, scorer if order.do_validation and not in_folds else None)
        if describes:
            train.describe_run(job)
        built = _train_to_end(job, locks)
        engine = built.engine
        folder = order.save_ckpt_path
        step = built.state.step
        if order.dry_run or not order.do_validation or folder is None:
            return Result()
        # Decided by rank 0: a file may appear later on another host.
        if job.evaluate and engine.group.rank == 0 and (best := job.start.folder.best_checkpoint):
            step = checkpoint.step_of(best)
        step = int(engine.group.broadcast([step])[0])
        path = folder / checkpoint.checkpoint_name(step)
        models.load_weights(models.find_source(str(path)), built.state.weights)
        if scorer.best[0] == step:
            result = scorer.result
        else:
            result = scorer.score(engine)
        if not in_folds:
            print_line(f"run: the best checkpoint is {path}; its scores follow")
        result = scorer.reported(result)
        _write(folder, engine, scorer, result)
        chosen = result.decision.model_dump(exclude_defaults=True)
        if chosen and engine.group.rank == 0:
            text = json.dumps(with_checksum(chosen), indent=1)
            add_to_checkpoint(path, DECISION, text.encode())
            card.add_section(path, card.decision_section(chosen))
    note = result.note or CHOSEN_ON_SAME
    return replace(result, note=note, checkpoint=path, trained_on=job.stream.fingerprint)


def open_features(
    settings: FinetuneSettings,
    features: Features,
    mesh: Mesh,
    reader_class: type[FeatureReader] = FeatureReader,
) -> tuple[Plan, FeatureReader, Batch]:
    """Return the plan of training on these examples, their reader, and micro-batches to trace with."""
    group = settings.texts_per_example
    plan = make_plan(settings, len(features) // group)
    processes = mesh.processes
    batching = Batching(
        plan.examples_per_step, plan.micro_batch_size, processes.rank, processes.count
    )
    reader = reader_class(features, batching, settings.seed, settings.max_seq_length, group)
    sample = {name: column[: len(mesh.devices)] for name, column in reader[0].items()}
    return plan, reader, sample


def _report(order: FinetuneSettings, task: Task, results: Sequence[Result], rank: int) -> None:
    """Print the baselines, then the scores of a seed or the mean of several, and last whether a baseline is as good."""
    warning = ""
    assert order.save_ckpt_path is not None
    if order.baselines and task.baselines and rank == 0:
        baselines = kept_baselines(task, order.save_ckpt_path, results[0].trained_on)
        warning = compare(results, baselines, task.best, halves=task.halves)
    if len(results) == 1:
        task.print_scores(results[0])
    else:
        print_line(f"{len(results)} seeds, {order.seed} to {order.seed + len(results) - 1}:")
        spread = {}
        for name in results[0].samples:
            score = interval(*(result.samples[name] for result in results))
            values = [result.samples[name].value for result in results]
            deviation = statistics.stdev(values)
            spread[name] = {
                "mean": score.value,
                "standard_deviation": deviation,
                "values": values,
                **score.bounds,
            }
            listed = ", ".join(f"{value:.4f}" for value in values)
            print_line(f"  {name}: {score:.4f} +- {deviation:.4f}  ({listed}); n {score.n:,}")
        if rank == 0:
            write_json_atomically(order.save_ckpt_path / checkpoint.SCORES, with_checksum(spread))
        # One line for programs; the lines above are for people.
        print_line(json.dumps(spread))
    if warning:
        print_error(warning)


# --- scoring


def _only_score(draft: Draft[FinetuneSettings]) -> None:
    """Score a model without training. Raises StoppedError on a request to stop."""
    source = draft.start.source
    assert source is not None
    task = draft.task
    order = draft.order
    engine = assemble.build_engine(order, draft.mesh, task.labels, trains=False)
    new, _ = models.load_weights(source, engine.weights)
    if new:
        raise another_model(source, f"has no {', '.join(new)}: it was not trained for this task")
    problem = models.labels_problem(source, several=task.has_several_labels)
    if problem:
        raise another_model(source, problem)
    scorer = Scorer(order, task, draft.stop, label_order(source, task.label_names))
    print_line(f"run: scores {source.folder}")
    result = scorer.reported(scorer.score(engine))
    _write(draft.order.save_ckpt_path, engine, scorer, result)
    task.print_scores(result)


def _write(folder: Path | None, engine: Engine, scorer: Scorer, result: Result) -> None:
    """Predict the sets without labels; write predictions and scores into the run's folder, if there is one."""
    if result.table:
        print_line(result.table)
    if folder is None:
        return
    unlabelled = scorer.logits(engine, scorer.task.unlabelled)
    if engine.group.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        result.write(folder, unlabelled)
        for name, value in result.run_files.items():
            write_json_atomically(folder / name, with_checksum(value))
        scores.write(folder, result.samples, result.intervals, **result.counts)
