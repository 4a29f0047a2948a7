"""Fine-tuning, the same for all tasks.

The model is the encoder of the model that the run starts from, with a head for the task. It is scored on the
development set after each epoch. At the end the best checkpoint's predictions are written, and its scores printed as
one JSON object.
"""

import json
import math
import statistics
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from bert_cli.config.finetune import FinetuneSettings, TaskSettings
from bert_cli.data.examples.reader import Batching
from bert_cli.data.finetune.embeddings import read_embedding
from bert_cli.data.finetune.features import FeatureReader, Features
from bert_cli.data.finetune.synthetic import synthetic_features
from bert_cli.data.tokens.tokenizer import TextTokenizer, TokenizerFolder
from bert_cli.errors import ConfigError, DataError, combine
from bert_cli.facts.architectures import ARCHITECTURES
from bert_cli.files import JSON, JSONObject, with_checksum, write_json_atomically
from bert_cli.parallel.engine import Batch, Engine
from bert_cli.parallel.runtime import Mesh
from bert_cli.parse.load import changed
from bert_cli.planning.plan import Plan, length_of, make_plan
from bert_cli.planning.workload import workload_of
from bert_cli.processes import print_line
from bert_cli.tasks.run import build as assemble
from bert_cli.tasks.run import models, start, train
from bert_cli.tasks.run.folder import Folder, Start
from bert_cli.tasks.run.models import Source
from bert_cli.tasks.run.resolve import (
    ResolvedRun,
    check_output_paths,
    is_writable,
    runtime,
    take_devices,
    with_shape_of,
)
from bert_cli.tasks.run.task import Result, Scorer, Scores, Task
from bert_cli.tasks.run.teacher import with_teacher
from bert_cli.train import checkpoint
from bert_cli.train.checkpoint import newest_checkpoint
from bert_cli.train.loop import StoppedWhileScoringError, StopRequest

Settings = TypeVar("Settings", bound=FinetuneSettings)
Build = Callable[[Settings, TextTokenizer, Source | None], Task]


@dataclass(frozen=True)
class TaskRun(Generic[Settings]):
    """A run of a task, with one seed or several."""

    settings: Settings
    """With the sizes of the model, and with the layout."""
    start: Start
    """With the model that the run starts from, or scores."""
    tokenizer: TokenizerFolder | None
    mesh: Mesh
    stop: StopRequest
    task: Task


def run(
    settings: Settings,
    build: Build[Settings],
    needs: Sequence[str] = (),
    label_names: Sequence[str] | None = None,
) -> None:
    """Fine-tune and score, with the number of seeds in the settings.

    `build` returns the task for the settings, the tokenizer and the model from which the run starts; `needs` names
    required settings; `label_names` are for synthetic examples. A request to stop saves and returns.
    """
    stopped = False
    with ExitStack() as locks:
        run = prepare(settings, build, locks, needs, label_names)
        if run.settings.do_training:
            stopped = _train_seeds(run)
        else:
            _only_score(run)
    if stopped and settings.exit_code_when_stopped:
        raise SystemExit(settings.exit_code_when_stopped)


def prepare(
    settings: Settings,
    build: Build[Settings],
    stack: ExitStack,
    needs: Sequence[str] = (),
    label_names: Sequence[str] | None = None,
) -> TaskRun[Settings]:
    """Return the run on its devices, with the examples of its task; takes the arguments of `run`.

    Raises ConfigError, DataError, CheckpointError or DeviceError.
    """
    if settings.generated_dataset:
        settings = changed(settings, do_validation=False)
        needs = ()
    _check_settings(settings, needs)
    source = _source(settings)
    settings = with_shape_of(settings, source)
    stored: JSONObject = {}
    if source is not None and settings.pools_by is not None:
        stored = {n: v for n, v in read_embedding(source.folder).items() if n != "normalize"}
        if "pooling" in stored and "pooling" not in settings.model_fields_set:
            settings = changed(settings, pooling=stored["pooling"])
            print_line(f"run: pooling is {settings.pools_by}, as in {source.folder}")
    folder = None if source is None else source.tokenizer
    if settings.tokenizer_path is not None:
        folder = TokenizerFolder(models.find_tokenizer(settings.tokenizer_path))
    is_default_length = "max_seq_length" not in settings.model_fields_set
    longest = folder.max_length if is_default_length and folder is not None else None
    longest = min(longest or settings.max_seq_length, stored.get("max_seq_length", math.inf))
    if is_default_length and longest < settings.max_seq_length:
        settings = changed(settings, max_seq_length=longest)
    run = Folder(settings.save_ckpt_path)
    start = Start(run, source, run.newest)
    settings, mesh, stop = take_devices(settings, start, stack)
    if is_default_length:
        print_line(f"run: max_seq_length is {settings.max_seq_length} (default)")
    if settings.generated_dataset:
        print_line("run: trains on synthetic examples; nothing is scored")
        labels = settings.head.outputs if label_names is None else len(label_names)
        # Graphcore's example generates as many.
        task = Task(labels, label_names, synthetic_examples(settings, 12_000, labels))
    else:
        assert folder is not None
        tokenizer = models.read_tokenizer_for(settings.bert_config, folder)
        if source is not None and not settings.do_training:
            _check_class(settings, source)
        task = build(settings, tokenizer, source)
        if isinstance(settings, TaskSettings):
            task = with_teacher(settings, task, tokenizer, _label_order)
        if task.teach is not None:
            task = task.teach(task=task, group=runtime(settings.engine).group_of(mesh))
    return TaskRun(settings, start, folder, mesh, stop, task)


# --- settings


def synthetic_examples(settings: FinetuneSettings, number: int, labels: int) -> Features:
    """Return synthetic examples for the head of the settings' model."""
    return synthetic_features(
        settings.head,
        number,
        labels=labels,
        vocab_size=settings.bert_config.vocab_size,
        sequence_length=settings.max_seq_length,
        seed=settings.seed,
    )


def _check_settings(settings: FinetuneSettings, needs: Sequence[str]) -> None:
    remedies = {name: f"give --{name.replace('_', '-')}" for name in needs}
    if not settings.generated_dataset:
        name = "pretrained_ckpt_path"
        if settings.do_training and settings.tokenizer_path is None:
            remedies[name] = (
                "give --pretrained-ckpt-path MODEL, or for new weights --tokenizer-path and bert_config"
            )
        elif not settings.do_training and settings.save_ckpt_path is None:
            remedies[name] = (
                "give --pretrained-ckpt-path MODEL, or --save-ckpt-path of a trained run"
            )
    errors = [
        ConfigError(name, "is missing", remedy)
        for name, remedy in remedies.items()
        if getattr(settings, name) is None
    ]
    try:
        if settings.do_training:
            check_output_paths(settings)
    except ConfigError as error:
        errors.append(error)
    if errors:
        raise combine(errors)
    if (run := settings.save_ckpt_path) and not is_writable(run / checkpoint.SCORES):
        remedy = "give another --save-ckpt-path"
        raise DataError(f"save_ckpt_path ({run})", "cannot be written", remedy)


def _source(settings: FinetuneSettings) -> Source | None:
    """Return the model to start from or, without training, to score; a model in the run's folder has priority."""
    run = settings.save_ckpt_path
    name = settings.pretrained_ckpt_path
    if not settings.do_training and run and (name is None or newest_checkpoint(run)):
        return models.find_source(str(run), "--save-ckpt-path")
    return None if name is None else models.find_source(name)


def _check_class(settings: FinetuneSettings, source: Source) -> None:
    """Raise ConfigError for a model of another class than the task's; one without a class may fit."""
    needed = ARCHITECTURES[settings.bert_config.architecture].class_name(settings.head)
    if settings.head.needs and source.architecture != needed:
        raise _another_model(source, f"was not trained for this task, which needs a {needed}")


def _another_model(source: Source, problem: str) -> ConfigError:
    remedy = "leave out --no-do-training, or give a model that was"
    return ConfigError(f"{source.folder} ({source.architecture})", problem, remedy)


# --- training


def _train_seeds(run: TaskRun[Settings]) -> bool:
    """Train with each seed; return whether a request stopped it."""
    results: list[Scores] = []
    settings = run.settings
    for seed in range(settings.seed, settings.seed + settings.seeds):
        of_seed = run
        if settings.seeds > 1:
            print_line(f"seed {seed}:")
            folders = {
                name: folder / f"seed_{seed}"
                for name in ("save_ckpt_path", "tensorboard_dir")
                if (folder := getattr(settings, name)) is not None
            }
            seeded = changed(settings, seed=seed, **folders)
            begin = replace(run.start, folder=Folder(seeded.save_ckpt_path))
            of_seed = replace(run, settings=seeded, start=begin)
        scores = _train_and_score(of_seed)
        if scores is None:
            return True
        results += [scores] if scores else []
    if len(results) > 1:
        _report_seeds(settings, results, run.mesh.processes.rank)
    return False


def resolve(run: TaskRun[Settings], scorer: Scorer | None) -> ResolvedRun:
    """Return the training run of one seed, which `scorer` scores."""
    settings = run.settings
    task = run.task
    assert task.train is not None
    plan, reader, sample = open_features(settings, task.train, run.mesh, task.reader)
    sets = {**task.development, **task.unlabelled}
    digests = (f"{name} {zlib.crc32(part.tokens.tobytes())}" for name, part in sets.items())
    assert reader.epoch_size is not None
    per_epoch = -(-reader.epoch_size // plan.examples_per_step)
    return ResolvedRun(
        settings,
        run.start.extended(run.tokenizer),
        run.mesh,
        run.stop,
        plan=plan,
        stream=reader,
        sample=sample,
        tokenizer=run.tokenizer,
        label_names=task.label_names,
        labels=task.labels,
        prepare=task.prepare,
        evaluate=None if scorer is None else scorer.evaluate,
        held_out=", ".join(digests),
        evaluate_every=settings.evaluate_every_steps or per_epoch,
        best=task.best,
        early_stop=settings.early_stop,
    )


def _train_and_score(run: TaskRun[Settings]) -> Scores | None:
    """Run one seed; return its scores (empty if nothing is scored), or None if it did not reach its end."""
    settings = run.settings
    task = run.task
    scorer = Scorer(settings, task, run.stop)
    with ExitStack() as locks:
        resolved = resolve(run, scorer if settings.do_validation else None)
        built, status = train.run_training(resolved, locks)
        engine = built.engine
        if status != "finished":
            return None
        folder = settings.save_ckpt_path
        step = -1
        if settings.dry_run or not settings.do_validation or folder is None:
            return {}
        # Decided by rank 0: a file may appear later on another host.
        if engine.group.rank == 0 and (best := checkpoint.best_checkpoint(folder)):
            step = checkpoint.step_of(best)
        step = int(engine.group.broadcast([step])[0])
        path = folder / checkpoint.checkpoint_name(step)
        try:
            start.load_weights(models.find_source(str(path)), built.state.weights)
            is_best = scorer.best is not None and scorer.best[0] == step
            result = scorer.result if is_best else scorer.score(engine)
            print_line(f"run: the best checkpoint is {path}; its scores follow")
            _write(settings, task, engine, scorer, result)
        except StoppedWhileScoringError:
            print_line("run: stopped before its end; the same command scores the trained model")
            return None
    task.print_scores(result.scores)
    return result.scores


def open_features(
    settings: FinetuneSettings,
    features: Features,
    mesh: Mesh,
    reader_class: type[FeatureReader] = FeatureReader,
) -> tuple[Plan, FeatureReader, Batch]:
    """Return the plan of training on these examples, their reader, and micro-batches to trace with."""
    group = settings.texts_per_example
    size = len(features) // group
    plan = make_plan(workload_of(settings), length_of(settings), size)
    processes = mesh.processes
    batching = Batching(
        plan.examples_per_step, plan.micro_batch_size, processes.rank, processes.count
    )
    reader = reader_class(features, batching, settings.seed, settings.max_seq_length, group)
    sample = {name: column[: len(mesh.devices)] for name, column in reader[0].items()}
    return plan, reader, sample


def _report_seeds(settings: FinetuneSettings, results: Sequence[Scores], rank: int) -> None:
    print_line(f"{len(results)} seeds, {settings.seed} to {settings.seed + len(results) - 1}:")
    spread: dict[str, JSON] = {}
    for name in results[0]:
        values = [scores[name] for scores in results]
        mean = statistics.mean(values)
        deviation = statistics.stdev(values)
        spread[name] = {"mean": mean, "standard_deviation": deviation, "values": values}
        each = ", ".join(f"{value:.4f}" for value in values)
        print_line(f"  {name}: {mean:.4f} +- {deviation:.4f}  ({each})")
    assert settings.save_ckpt_path is not None
    if rank == 0:
        write_json_atomically(settings.save_ckpt_path / checkpoint.SCORES, spread)
    print_line(json.dumps(spread))


# --- scoring


def _only_score(run: TaskRun[Settings]) -> None:
    """Score a model without training. Raises KeyboardInterrupt on a request to stop: there is nothing to save."""
    settings = run.settings
    source = run.start.source
    task = run.task
    assert source is not None
    engine = assemble.build_engine(settings, run.mesh, task.labels, trains=False)
    new, _ = start.load_weights(source, engine.weights)
    if new:
        raise _another_model(source, f"has no {', '.join(new)}: it was not trained for this task")
    scorer = Scorer(settings, task, run.stop, _label_order(source, task.label_names))
    print_line(f"run: scores {source.folder}")
    try:
        result = scorer.score(engine)
        _write(settings, task, engine, scorer, result)
    except StoppedWhileScoringError:
        raise KeyboardInterrupt from None
    task.print_scores(result.scores)


def _label_order(source: Source, names: Sequence[str] | None) -> list[int] | None:
    """Return the model's output for each label of the task; None if the order is the same.

    Labels without names are assumed to be in the task's order, which is printed.
    """
    model_names = source.label_names
    if names is None or model_names == tuple(names):
        return None
    if model_names is None or model_names == tuple(
        f"LABEL_{number}" for number in range(len(names))
    ):
        assumed = f"have no names; assumed to be in this order: {', '.join(names)}"
        print_line(f"run: the labels of {source.folder} {assumed}")
        return None
    if sorted(model_names) != sorted(names):
        where = f"{source.where} (labels {', '.join(model_names)})"
        problem = f"are not the labels of this task ({', '.join(names)})"
        raise ConfigError(where, problem, "give a model that was trained for the task")
    print_line(f"run: the labels of {source.folder} are in another order; they are reordered")
    return [model_names.index(name) for name in names]


def _write(
    settings: FinetuneSettings, task: Task, engine: Engine, scorer: Scorer, result: Result
) -> None:
    """Predict the sets without labels; write predictions and scores into the run's folder, if there is one."""
    if result.table:
        print_line(result.table)
    folder = settings.save_ckpt_path
    if folder is None:
        return
    unlabelled = scorer.logits(engine, task.unlabelled)
    if engine.group.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        result.write(folder, unlabelled)
        for name, value in result.run_files.items():
            write_json_atomically(folder / name, with_checksum(value))
        write_json_atomically(folder / checkpoint.SCORES, result.scores)
