"""Fine-tuning, the same for all tasks.

The model is the encoder of the model that the run starts from, with a head for the task. It is scored on the
development set after each epoch. At the end the best checkpoint's predictions are written, and its scores printed as
one JSON object.
"""

import json
import shutil
import statistics
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from bert_cli.arrays import Floats32
from bert_cli.config.finetune import FinetuneSettings, TaskSettings
from bert_cli.config.training import TrainSettings
from bert_cli.data.examples.reader import Batching
from bert_cli.data.finetune.embeddings import read_embedding
from bert_cli.data.finetune.features import FeatureReader, Features
from bert_cli.data.finetune.labels import DECISION
from bert_cli.data.finetune.synthetic import synthetic_features
from bert_cli.data.io.arrays import read_arrays, write_arrays
from bert_cli.data.tokens.tokenizer import TextTokenizer, TokenizerFolder
from bert_cli.errors import ConfigError, DataError, combine
from bert_cli.facts.architectures import ARCHITECTURES
from bert_cli.facts.heads import MEAN_CLASSIFICATION
from bert_cli.files import (
    add_to_checkpoint,
    atomic_file,
    is_writable,
    with_checksum,
    write_json_atomically,
)
from bert_cli.parallel.engine import Batch, Engine
from bert_cli.parallel.runtime import Mesh
from bert_cli.parse.load import changed
from bert_cli.planning.plan import Plan, make_plan
from bert_cli.processes import print_error, print_line
from bert_cli.statistics import interval
from bert_cli.tasks.model import models
from bert_cli.tasks.model.models import Source
from bert_cli.tasks.model.opened import head_of
from bert_cli.tasks.run import build as assemble
from bert_cli.tasks.run import train
from bert_cli.tasks.run.job import Draft, Job, Steps, choose_layout, take_devices
from bert_cli.tasks.run.resolve import check_output_paths, runtime, with_shape_of
from bert_cli.tasks.run.start import Folder, Start
from bert_cli.tasks.run.task import FOLD, SAME, Result, Scorer, Task, compare, kept_baselines
from bert_cli.tasks.run.teacher import label_order, with_teacher
from bert_cli.train import card, checkpoint, scores
from bert_cli.train.loop import StoppedWhileScoringError

Settings = TypeVar("Settings", bound=FinetuneSettings)
Build = Callable[[Settings, TextTokenizer, Source | None], Task]


def run(settings: FinetuneSettings, steps: Steps) -> None:
    """Fine-tune and score, with the number of seeds in the settings. A request to stop saves and returns."""
    stopped = False
    with ExitStack() as stack:
        draft = Draft(settings, stack)
        draft.take(steps)
        if settings.do_training:
            in_folds = bool(draft.task.folds) and draft.order.saves
            stopped = _train_folds(draft) if in_folds else _train_seeds(draft)
        else:
            _only_score(draft)
    if stopped and settings.exit_code_when_stopped:
        raise SystemExit(settings.exit_code_when_stopped)


# --- the steps from an order to a task


def steps_of(build: Build[Settings], needs: Sequence[str] = ()) -> Steps:
    """Return the steps of fine-tuning, which raise ConfigError, DataError, CheckpointError or DeviceError.

    `build` returns the task for the settings, the tokenizer and the model from which the run starts; `needs` names
    required settings.
    """
    return (
        ("model", partial(find_trained, needs=needs)),
        ("sizes", take_lengths),
        ("layout", choose_layout),
        ("devices", take_devices),
        ("examples", partial(read_examples, build=build)),
    )


def find_trained(draft: Draft[FinetuneSettings], needs: Sequence[str]) -> str:
    """Find the model from which the run starts or, without training, which is scored, and take its shape.

    A model in the run's folder has priority where nothing is trained.
    """
    order = draft.order
    if order.generated_dataset:
        order = order.model_copy(update={"do_validation": False})
        needs = ()
    remedies = {name: f"pass --{name.replace('_', '-')}" for name in needs}
    instead = "--save-ckpt-path of a trained run"
    has_other = order.save_ckpt_path is not None
    if order.do_training:
        instead = "for new weights --tokenizer-path and bert_config"
        has_other = order.tokenizer_path is not None
    if not has_other and not order.generated_dataset:
        remedies["pretrained_ckpt_path"] = f"pass --pretrained-ckpt-path MODEL, or {instead}"
    values = order.model_dump(include={*remedies}, exclude_none=True)
    errors = [ConfigError(n, "is missing", remedies[n]) for n in remedies if n not in values]
    try:
        if order.do_training:
            check_output_paths(order)
    except ConfigError as error:
        errors.append(error)
    if errors:
        raise combine(errors)
    run = Folder(order.save_ckpt_path)
    # Asked before the first step, not after the last.
    if run.path and not is_writable(run.path):
        remedy = "use another --save-ckpt-path"
        raise DataError(f"save_ckpt_path ({run.path})", "cannot be written", remedy)
    name = order.pretrained_ckpt_path
    flag = "--pretrained-ckpt-path"
    if not order.do_training and run.path and (name is None or run.newest):
        name = str(run.path)
        flag = "--save-ckpt-path"
    source = None if name is None else models.find_source(name, flag)
    if source is not None and not order.do_training:
        order = _scored_as_trained(order, source)
    draft.order = with_shape_of(order, source)
    draft.start = Start(run, source)
    return "none: new weights" if source is None else f"from {source.folder}"


def take_lengths(draft: Draft[FinetuneSettings]) -> str:
    """Take the tokenizer and, where the order does not set them, the pooling and the length of the model's folder."""
    order = draft.order
    source = draft.start.source
    stored = {}
    if source is not None:
        draft.tokenizer = source.tokenizer
    if source is not None and order.pools_by is not None:
        stored = read_embedding(source.folder)
        if "pooling" in stored and "pooling" not in order.model_fields_set:
            order = changed(order, pooling=stored["pooling"])
            draft.lines.append(f"run: pooling is {order.pools_by}, as in {source.folder}")
    if order.tokenizer_path is not None:
        draft.tokenizer = TokenizerFolder(models.find_tokenizer(order.tokenizer_path))
    if "max_seq_length" not in order.model_fields_set:
        of_tokenizer = draft.tokenizer and draft.tokenizer.max_length
        lengths = (order.max_seq_length, of_tokenizer, stored.get("max_seq_length"))
        longest = min(filter(None, lengths))
        if longest < order.max_seq_length:
            order = changed(order, max_seq_length=longest)
        draft.lines.append(f"run: max_seq_length is {order.max_seq_length} (default)")
    draft.order = order
    return ""


def read_examples(draft: Draft[Settings], build: Build[Settings]) -> str:
    """Read the examples of the task, with the outputs of its teacher."""
    order = draft.order
    source = draft.start.source
    if order.generated_dataset:
        draft.lines.append("run: trains on synthetic examples; nothing is scored")
        # Graphcore's example generates as many; two are the labels of a text, or the ends of an answer.
        names = ("0", "1") if order.head.has_label_names else None
        draft.task = Task(2, names, synthetic_examples(order, 12_000, 2))
        return "synthetic examples"
    assert draft.tokenizer is not None
    tokenizer = models.read_tokenizer_for(order.bert_config, draft.tokenizer)
    if source is not None and not order.do_training:
        needed = ARCHITECTURES[order.bert_config.architecture].class_name(order.head)
        if order.head.needs and source.architecture != needed:
            raise _another_model(source, f"was not trained for this task, which needs a {needed}")
    task = build(order, tokenizer, source)
    for part in filter(None, (task.train, *task.development.values())):
        models.check_segments(order.bert_config, part)
    if isinstance(order, TaskSettings) and order.distillation.teacher is not None:
        task = with_teacher(order, task, tokenizer)
    if task.teach is not None:
        task = task.teach(task=task, group=runtime(order.engine).group_of(draft.mesh))
    draft.task = task
    return ""


def _scored_as_trained(settings: Settings, source: Source) -> Settings:
    """Return the settings of scoring with the head of the model, and the windows of its training where none are set."""
    fields = type(settings).model_fields
    is_few = head_of(source) == MEAN_CLASSIFICATION
    trained: dict[str, object] = {"few": True} if is_few and "few" in fields else {}
    if not is_few:
        sizes = models.as_trained(source).window_sizes
        trained = {n: v for n, v in sizes.items() if n in fields}
    trained = {n: v for n, v in trained.items() if n not in settings.model_fields_set}
    for name, value in trained.items():
        if value != getattr(settings, name):
            print_line(f"run: {name} is {value}, as in the training of {source.folder}")
    return changed(settings, **trained) if trained else settings


def synthetic_examples(order: TrainSettings, number: int, labels: int) -> Features:
    """Return synthetic examples for the head of the model."""
    return synthetic_features(
        order.head,
        number,
        labels=labels,
        vocab_size=order.bert_config.vocab_size,
        sequence_length=order.max_seq_length,
        seed=order.seed,
    )


def _another_model(source: Source, problem: str) -> ConfigError:
    remedy = "leave out --no-do-training, or use a model that was"
    return ConfigError(f"{source.folder} ({source.architecture})", problem, remedy)


# --- training


class Trained(NamedTuple):
    """A seed's trained model."""

    result: Result
    """Its reported scores, empty if nothing is scored."""
    examples: str = ""
    """The fingerprint of the training examples, the same for all seeds but with `--few`, whose pairs a seed draws."""
    best: Path = Path()
    """Its best checkpoint."""


def _train_seeds(draft: Draft[FinetuneSettings]) -> bool:
    """Train with each seed; return whether a request stopped it."""
    task = draft.task
    order = draft.order
    start = draft.start
    scored = []
    for seed in range(order.seed, order.seed + order.seeds):
        if order.seeds > 1:  # each has its folders
            print_line(f"seed {seed}:")
            _take_part(draft, order, start, seed, f"seed_{seed}")
        trained = _train_and_score(draft)
        if trained is None:
            return True
        if trained.result.samples:
            scored.append(trained)
            if order.seeds > 1:
                task.print_scores(trained.result)
    if scored:
        _report(order, task, scored, draft.mesh.processes.rank)
    return False


def _take_part(
    draft: Draft[FinetuneSettings], order: FinetuneSettings, start: Start, seed: int, name: str
) -> None:
    """Let the draft be of a part of the order, with a seed and with folders of its own in those of the order."""
    paths = {n: getattr(order, n) for n in ("save_ckpt_path", "tensorboard_dir")}
    changes = {field: path and path / name for field, path in paths.items()}
    draft.order = order.model_copy(update={"seed": seed, **changes})
    draft.start = replace(start, folder=Folder(draft.order.save_ckpt_path))


def _train_folds(draft: Draft[FinetuneSettings]) -> bool:
    """Test each fold, then train on all examples, which the folds score; return whether a request stopped it.

    No score chooses a checkpoint: the last of each training is taken.
    """
    task = draft.task
    order = draft.order
    start = draft.start
    logits = np.zeros((sum(len(rows) for _, rows in task.folds), task.labels), np.float32)
    try:
        for number, (draft.task, rows) in enumerate(task.folds):
            print_line(f"fold {number + 1} of {len(task.folds)}, which tests {len(rows):,} rows:")
            _take_part(draft, order, start, order.seed + number, f"fold_{number + 1}")
            logits[rows] = _answers_of_fold(resolve(draft))
    except StoppedWhileScoringError:
        return True
    print_line("the training on all rows:")
    draft.task = task
    draft.order = order
    draft.start = start
    with ExitStack() as locks:
        job = resolve(draft)
        built, finished = train.run_training(job, locks)
        if not finished:
            return True
        path = job.folder / checkpoint.checkpoint_name(built.state.step)
        note = f", each row by one of {len(task.folds)} models, which had not learned it"
        result = replace(task.evaluate({FOLD: logits}), note=note)
        _keep(path, built.engine, Scorer(order, task, draft.stop), result)
    _report(order, task, [Trained(result, job.stream.fingerprint, path)], draft.processes.rank)
    return False


def _answers_of_fold(job: Job) -> Floats32 | float:
    """Return the logits of the examples that a fold tests, on rank 0. Raises StoppedWhileScoringError on a stop.

    They are kept in place of the fold's folder, so that the same command does not train it again.
    """
    group = runtime(job.order.engine).group_of(job.mesh)
    about = json.dumps([job.fixed, job.task.fingerprint], sort_keys=True)
    kept = job.folder.with_name(f"fold_{zlib.crc32(about.encode()):08x}.npz")
    # Decided by rank 0: a file may appear later on another host.
    if not group.broadcast([kept.is_file()])[0]:
        with ExitStack() as locks:
            built, finished = train.run_training(job, locks)
            if not finished:
                raise StoppedWhileScoringError
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


def resolve(draft: Draft[Any], scorer: Scorer | None = None) -> Job:
    """Return the training run of one seed, which `scorer` scores."""
    order = draft.order
    task = draft.task
    assert task.train is not None
    examples = task.train if task.draw is None else task.draw(order.seed)
    plan, reader, sample = open_features(order, examples, draft.mesh, task.reader)
    per_epoch = -(-reader.epoch_size // plan.examples_per_step)
    draft.extend_vocabulary()
    return replace(
        draft.job(plan, reader, sample),
        evaluate=None if scorer is None else scorer.evaluate,
        evaluate_every=order.evaluate_every_steps or per_epoch,
        early_stop=order.early_stop,
    )


def _train_and_score(draft: Draft[FinetuneSettings]) -> Trained | None:
    """Train and score one seed; return None if it did not reach its end."""
    order = draft.order
    scorer = Scorer(order, draft.task, draft.stop)
    with ExitStack() as locks:
        job = resolve(draft, scorer if order.do_validation else None)
        built, finished = train.run_training(job, locks)
        engine = built.engine
        if not finished:
            return None
        folder = order.save_ckpt_path
        step = -1
        if order.dry_run or not order.do_validation or folder is None:
            return Trained(Result())
        # Decided by rank 0: a file may appear later on another host.
        if engine.group.rank == 0 and (best := checkpoint.best_checkpoint(folder)):
            step = checkpoint.step_of(best)
        step = int(engine.group.broadcast([step])[0])
        path = folder / checkpoint.checkpoint_name(step)
        try:
            models.load_weights(models.find_source(str(path)), built.state.weights)
            is_best = scorer.best is not None and scorer.best[0] == step
            result = scorer.result if is_best else scorer.score(engine)
            print_line(f"run: the best checkpoint is {path}; its scores follow")
            result = scorer.reported(result)
            _keep(path, engine, scorer, result)
        except StoppedWhileScoringError:
            print_line("run: stopped before its end; the same command scores the trained model")
            return None
    result = replace(result, note=result.note or SAME)
    return Trained(result, job.stream.fingerprint, path)


def _keep(path: Path, engine: Engine, scorer: Scorer, result: Result) -> None:
    """Write a result into the folder of the run, and what it has chosen into the checkpoint."""
    _write(path.parent, engine, scorer, result)
    chosen = {}
    if engine.group.rank == 0 and result.decision is not None:
        chosen = result.decision.model_dump(exclude_defaults=True)
    if chosen:
        text = json.dumps(with_checksum(chosen), indent=1)
        add_to_checkpoint(path, DECISION, text.encode())
        card.add_section(path, card.decision_section(chosen))


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


def _report(order: FinetuneSettings, task: Task, scored: Sequence[Trained], rank: int) -> None:
    """Print the baselines, then the scores of a seed or the mean of several, and last whether a baseline is as good."""
    results = [trained.result for trained in scored]
    warning = ""
    assert order.save_ckpt_path is not None
    if order.baselines and task.baselines and rank == 0:
        baselines = kept_baselines(task, order.save_ckpt_path, scored[0].examples)
        best = [trained.best for trained in scored]
        warning = compare(results, baselines, task.best, best, halves=task.halves)
    if len(results) == 1:
        task.print_scores(results[0])
    else:
        print_line(f"{len(results)} seeds, {order.seed} to {order.seed + len(results) - 1}:")
        spread = {}
        for name in results[0].samples:
            score = interval(*(result.samples[name] for result in results))
            values = [result.samples[name].value for result in results]
            deviation = statistics.stdev(values)
            moments = {"mean": score.value, "standard_deviation": deviation}
            spread[name] = {**moments, "values": values, **score.bounds}
            each = ", ".join(f"{value:.4f}" for value in values)
            print_line(f"  {name}: {score:.4f} +- {deviation:.4f}  ({each}); n {score.n:,}")
        if rank == 0:
            write_json_atomically(order.save_ckpt_path / checkpoint.SCORES, with_checksum(spread))
        print_line(json.dumps(spread))
    if warning:
        print_error(warning)


# --- scoring


def _only_score(draft: Draft[FinetuneSettings]) -> None:
    """Score a model without training. Raises KeyboardInterrupt on a request to stop: there is nothing to save."""
    source = draft.start.source
    assert source is not None
    task = draft.task
    order = draft.order
    engine = assemble.build_engine(order, draft.mesh, task.labels, trains=False)
    new, _ = models.load_weights(source, engine.weights)
    if new:
        raise _another_model(source, f"has no {', '.join(new)}: it was not trained for this task")
    if problem := models.labels_problem(source, several=task.has_several_labels):
        raise _another_model(source, problem)
    scorer = Scorer(order, task, draft.stop, label_order(source, task.label_names))
    print_line(f"run: scores {source.folder}")
    try:
        result = scorer.reported(scorer.score(engine))
        _write(draft.order.save_ckpt_path, engine, scorer, result)
    except StoppedWhileScoringError:
        raise KeyboardInterrupt from None
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
