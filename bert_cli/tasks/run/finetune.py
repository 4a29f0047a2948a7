"""Fine-tuning, the same for all tasks.

The model is the encoder of the model that the run starts from, with a head for the task. It is scored on the
development set after each epoch. At the end the best checkpoint's predictions are written, and its scores printed as
one JSON object. A task has features, labels, and an evaluation of the model's logits.
"""

import json
import statistics
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from bert_cli.config.finetune import FinetuneSettings
from bert_cli.config.load import changed
from bert_cli.data.finetune.features import FeatureReader, Features, by_length, padded_length
from bert_cli.data.records.tokenizer import TextTokenizer, model_max_length
from bert_cli.data.stream.reader import Batching
from bert_cli.data.stream.synthetic import synthetic_features
from bert_cli.errors import ConfigError, DataError, DeviceError, combine
from bert_cli.files import JSON, write_json_atomically
from bert_cli.model.hf import class_name
from bert_cli.parallel.engine import Batch, Engine
from bert_cli.parallel.runtime import Mesh
from bert_cli.planning.plan import Plan, plan_of, samples_of
from bert_cli.tasks.run import build as assemble
from bert_cli.tasks.run import models, start, train
from bert_cli.train import checkpoint
from bert_cli.train.loop import Prepare, Step, StoppedWhileScoringError, StopRequest
from bert_cli.train.metrics import print_line

Floats = npt.NDArray[np.float32]
Logits = Mapping[str, Floats]
"""Name of a set of examples -> [n, labels] for examples, [T, labels] for positions."""
Scores = dict[str, float]
Settings = TypeVar("Settings", bound=FinetuneSettings)
Build = Callable[[Settings, TextTokenizer, models.Source | None], "Task"]


@dataclass(frozen=True)
class Result:
    """The scores of a model on the development sets, and what is written about its predictions."""

    scores: Scores = field(default_factory=dict)
    write: Callable[[Path, Logits], None] = lambda folder, logits: None
    """Writes predictions into output_dir, also those from the logits of the sets without labels."""
    table: str = ""
    """Printed before the scores."""
    run_files: Mapping[str, JSON] = field(default_factory=dict)
    """JSON files for the run's folder, which `bert predict` needs besides the model."""


@dataclass(frozen=True)
class Task:
    """A task for fine-tuning."""

    labels: int
    """Outputs of the head."""
    label_names: Sequence[str] | None
    """Names of a classifier's labels; None where they have none."""
    train: Features | None
    development: Mapping[str, Features] = field(default_factory=dict)
    evaluate: Callable[[Logits], Result] = lambda logits: Result()
    """Evaluates the logits of the development sets."""
    best: str = ""
    """The score whose highest value decides which checkpoint is the best."""
    unlabelled: Mapping[str, Features] = field(default_factory=dict)
    """Sets that are only predicted, at the end."""
    prepare: Prepare = Step.prepare
    digits: int = 17
    """Decimals of the printed scores; files have all."""

    def print_scores(self, scores: Scores) -> None:
        """Print scores as a line of JSON."""
        rounded = {name: round(value, self.digits) for name, value in scores.items()}
        print_line(json.dumps(rounded))


def run(
    settings: Settings,
    build: Build[Settings],
    needs: Sequence[str] = (),
    label_names: Sequence[str] | None = None,
) -> None:
    """Fine-tune and score, with as many seeds as the settings say.

    `build` returns the task for the settings, the tokenizer and the model that the run starts from; `needs` names
    required settings; `label_names` are those of synthetic examples. A request to stop saves and returns.
    """
    if settings.generated_dataset:
        settings = _without_scores(settings)
        needs = ()
    _check_settings(settings, needs)
    stopped = False
    with ExitStack() as locks:
        source = _source(settings)
        settings = start.with_shape_of(settings, source)
        folder = None if source is None else source.folder
        if settings.tokenizer_path is not None:
            folder = models.find_tokenizer(settings.tokenizer_path)
        is_default_length = "max_seq_length" not in settings.model_fields_set
        longest = model_max_length(folder) if is_default_length and folder is not None else None
        if longest is not None and longest < settings.max_seq_length:
            settings = changed(settings, max_seq_length=longest)
        settings, mesh, stop = train.prepare(settings, locks)
        if is_default_length:
            print_line(f"run: max_seq_length is {settings.max_seq_length}, as none was given")
        if settings.generated_dataset:
            print_line("run: trains on synthetic examples; nothing is scored")
            labels = settings.head.outputs if label_names is None else len(label_names)
            # As many as Graphcore's example generates.
            features = synthetic_examples(settings, 12_000, labels)
            task = Task(labels, label_names, features)
        else:
            assert folder is not None
            tokenizer = models.read_tokenizer_for(settings.bert_config, folder)
            wanted = class_name(settings.bert_config, settings.head)
            fits = wanted.endswith("BertModel") or (source and source.architecture in (wanted, "?"))
            if source and not settings.do_training and not fits:
                problem = f"was not trained for this task, which needs a {wanted}"
                raise _another_model(source, problem)
            task = build(settings, tokenizer, source)
        if settings.do_training:
            stopped = _train_seeds(settings, mesh, task, stop, folder)
        else:
            assert source is not None
            _only_score(settings, mesh, task, source, stop)
    if stopped and settings.exit_code_when_stopped:
        raise SystemExit(settings.exit_code_when_stopped)


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


def _without_scores(settings: Settings) -> Settings:
    defaults = {
        "do_training": True,
        "do_test": False,
        "evaluate_every_steps": None,
        "held_out_fraction": 0.1,
    }
    problem = "has no effect with generated_dataset, whose examples are not scored"
    errors = [
        ConfigError(f"{name} ({value})", problem, "leave out one of them")
        for name, default in defaults.items()
        if (value := getattr(settings, name, default)) != default
    ]
    if errors:
        raise combine(errors)
    return changed(settings, do_validation=False)


def _check_settings(settings: FinetuneSettings, needs: Sequence[str]) -> None:
    remedies = {name: f"give --{name.replace('_', '-')}" for name in needs}
    if not settings.generated_dataset:
        model = "give --pretrained-ckpt-path, the model to "
        if settings.do_training and settings.tokenizer_path is None:
            model += "start from, or, to train new weights, --tokenizer-path and bert_config"
            remedies["pretrained_ckpt_path"] = model
        elif not settings.do_training and settings.save_ckpt_path is None:
            model += "score, or --save-ckpt-path, the folder of the run that trained it"
            remedies["pretrained_ckpt_path"] = model
    errors = [
        ConfigError(name, "is missing", remedy)
        for name, remedy in remedies.items()
        if getattr(settings, name) is None
    ]
    try:
        if settings.do_training:
            train.check_output_paths(settings)
    except ConfigError as error:
        errors.append(error)
    if errors:
        raise combine(errors)
    if (output := settings.output_dir) and not train.is_writable(output / checkpoint.SCORES):
        where = f"output_dir ({output})"
        remedy = "give another --output-dir"
        raise DataError(where, "cannot be written", remedy)


def _source(settings: FinetuneSettings) -> models.Source | None:
    """Return the model to start from or, without training, to score: the run's own if there is one."""
    run = settings.save_ckpt_path
    given = settings.pretrained_ckpt_path
    if not settings.do_training and run and (given is None or checkpoint.complete_checkpoints(run)):
        return models.find_source(str(run), "--save-ckpt-path")
    return None if given is None else models.find_source(given)


def _another_model(source: models.Source, problem: str) -> ConfigError:
    remedy = "leave out --no-do-training, or give a model that was"
    return ConfigError(f"{source.folder} ({source.architecture})", problem, remedy)


# --- training


def _train_seeds(
    settings: Settings, mesh: Mesh, task: Task, stop: StopRequest, tokenizer: Path | None
) -> bool:
    """Train with each seed; return whether a request stopped it."""
    results: list[Scores] = []
    for seed in range(settings.seed, settings.seed + settings.seeds):
        one = settings
        if settings.seeds > 1:
            print_line(f"seed {seed}:")
            folders = {
                name: folder / f"seed_{seed}"
                for name in ("save_ckpt_path", "output_dir", "tensorboard_dir")
                if (folder := getattr(settings, name)) is not None
            }
            one = changed(settings, seed=seed, **folders)
        scores = _train_and_score(one, mesh, task, stop, tokenizer)
        if scores is None:
            return not settings.compile_only
        results += [scores] if scores else []
    if len(results) > 1:
        _report_seeds(settings, results, mesh.processes.rank)
    return False


def _train_and_score(
    settings: FinetuneSettings, mesh: Mesh, task: Task, stop: StopRequest, tokenizer: Path | None
) -> Scores | None:
    """Run one seed; return its scores, none where nothing is scored, or None if it did not reach its end."""
    assert task.train is not None
    plan, reader, sample = open_features(settings, task.train, mesh)
    scorer = Scorer(settings, task, stop)
    sets = {**task.development, **task.unlabelled}
    digests = (f"{name} {zlib.crc32(one.tokens.tobytes())}" for name, one in sets.items())
    assert reader.epoch_size is not None
    per_epoch = -(-reader.epoch_size // plan.examples_per_step)
    spec = assemble.RunSpec(
        plan=plan,
        stream=reader,
        sample=sample,
        tokenizer=tokenizer,
        label_names=task.label_names,
        labels=task.labels,
        prepare=task.prepare,
        evaluate=scorer.evaluate if settings.do_validation else None,
        held_out=", ".join(digests),
        evaluate_every=settings.evaluate_every_steps or per_epoch,
        best=task.best,
    )
    with ExitStack() as locks:
        engine, state, status = train.run_training(settings, mesh, spec, stop, locks)
        if status != "finished":
            return None
        folder = settings.save_ckpt_path
        step = -1
        if settings.dry_run or not settings.do_validation or folder is None:
            return {}
        # As rank 0 sees it: a file may appear later on another host.
        if engine.group.rank == 0 and (best := checkpoint.best_checkpoint(folder)):
            step = checkpoint.step_of(best)
        step = int(engine.group.broadcast([step])[0])
        path = folder / checkpoint.checkpoint_name(step)
        try:
            start.load_weights(models.find_source(str(path)), state.weights)
            is_best = scorer.best is not None and scorer.best[0] == step
            result = scorer.result if is_best else scorer.score(engine)
            print_line(f"run: the best checkpoint is {path}; its predictions and scores follow")
            _write(settings, task, engine, scorer, result)
        except StoppedWhileScoringError:
            print_line("run: stopped before its end; the same command scores the trained model")
            return None
    task.print_scores(result.scores)
    return result.scores


def open_features(
    settings: FinetuneSettings, features: Features, mesh: Mesh
) -> tuple[Plan, FeatureReader, Batch]:
    """Return the plan of training on these examples, their reader, and micro-batches to trace with."""
    group = settings.texts_per_example
    size = len(features) // group
    plan = plan_of(settings, [samples_of(settings, size)], size)
    processes = mesh.processes
    batching = Batching(
        plan.examples_per_step, plan.micro_batch_size, processes.rank, processes.count
    )
    reader = FeatureReader(features, batching, settings.seed, settings.max_seq_length, group)
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


class Scorer:
    """Scores the development sets of a run, and remembers the best result.

    A request to stop is checked between batches, since a large set takes minutes.
    """

    def __init__(
        self,
        settings: FinetuneSettings,
        task: Task,
        stop: Callable[[], bool],
        order: Sequence[int] | None = None,
    ) -> None:
        """Score with this model's settings; `order` has the model's output of each label of the task."""
        self.task = task
        self.stop = stop
        self.order = order
        self.micro_batch_size = settings.global_batch.micro_batch_size
        self.max_seq_length = settings.max_seq_length
        self.is_per_position = settings.head.is_per_position
        self.best: tuple[int, float] | None = None
        """Step and score; of equal scores the older."""
        self.result = Result()

    def evaluate(self, engine: Engine, step: int) -> Scores:
        """Return the scores of the current weights. Raises StoppedWhileScoringError on a request to stop."""
        result = self.score(engine)
        value = result.scores[self.task.best]
        if self.best is None or value > self.best[1]:
            self.best = (step, value)
            self.result = result
        return result.scores

    def score(self, engine: Engine) -> Result:
        """Return the result of the current weights."""
        return self.task.evaluate(self.logits(engine, self.task.development))

    def logits(self, engine: Engine, sets: Mapping[str, Features]) -> dict[str, Floats]:
        """Return the logits of all examples of some sets. DeviceError for values that are not finite."""
        engine.gather_weights()
        logits: dict[str, Any] = {}
        for name, features in sets.items():
            values = self._predict(engine, features)
            if not np.isfinite(values).all():
                remedy = "check its weights, or choose a higher precision"
                raise DeviceError(name, "the model's outputs are not finite", remedy)
            logits[name] = values if self.order is None else values[:, self.order]
        return logits

    def _predict(self, engine: Engine, features: Features) -> Floats:
        """Return logits [n, labels], or per position [T, labels]; each process takes every count-th batch."""
        group = engine.group
        rows = len(features.tokens) if self.is_per_position else len(features)
        logits = np.zeros((rows, self.task.labels), np.float32)
        starts = features.starts
        lengths = features.lengths
        batches = by_length(features, self.micro_batch_size)
        for first in range(0, len(batches), group.world_size):
            if group.all_reduce([self.stop()])[0]:
                raise StoppedWhileScoringError
            if first + group.rank < len(batches):
                numbers = batches[first + group.rank]
                # Filled up with its own examples: another number of examples would be traced again.
                filled = np.resize(numbers, self.micro_batch_size)
                length = padded_length(int(lengths[numbers].max()), self.max_seq_length)
                values = engine.predict(features.batch(filled, length))[: len(numbers)]
                if self.is_per_position:
                    inside = np.arange(length) < lengths[numbers, None]
                    logits[(starts[numbers, None] + np.arange(length))[inside]] = values[inside]
                else:
                    logits[numbers] = values
        return group.all_reduce(logits).astype(np.float32)


def _only_score(
    settings: FinetuneSettings, mesh: Mesh, task: Task, source: models.Source, stop: StopRequest
) -> None:
    """Score a model without training; KeyboardInterrupt on a request to stop, as there is nothing to save."""
    engine = assemble.build_engine(settings, mesh, task.labels, trains=False)
    new, _ = start.load_weights(source, engine.weights)
    if new:
        raise _another_model(source, f"has no {', '.join(new)}: it was not trained for this task")
    scorer = Scorer(settings, task, stop, _label_order(source, task.label_names))
    print_line(f"run: scores {source.folder}")
    try:
        result = scorer.score(engine)
        _write(settings, task, engine, scorer, result)
    except StoppedWhileScoringError:
        raise KeyboardInterrupt from None
    task.print_scores(result.scores)


def _label_order(source: models.Source, names: Sequence[str] | None) -> list[int] | None:
    """Return the model's output of each of the task's labels; None where they are in order already.

    Labels without names are assumed to be in the task's order, which is printed.
    """
    own = source.label_names
    if names is None or own == tuple(names):
        return None
    if own is None or own == tuple(f"LABEL_{number}" for number in range(len(names))):
        assumed = f"have no names; assumed to be in this order: {', '.join(names)}"
        print_line(f"run: the labels of {source.folder} {assumed}")
        return None
    if sorted(own) != sorted(names):
        where = f"{source.where} (labels {', '.join(own)})"
        problem = f"are not those of this task ({', '.join(names)})"
        raise ConfigError(where, problem, "give a model that was trained for it")
    print_line(f"run: the labels of {source.folder} are in another order, which is converted")
    return [own.index(name) for name in names]


def _write(
    settings: FinetuneSettings, task: Task, engine: Engine, scorer: Scorer, result: Result
) -> None:
    """Predict the sets without labels; write predictions into output_dir and scores into the run's folder.

    If only one of the folders is given, it receives everything; if none is, nothing is written.
    """
    if result.table:
        print_line(result.table)
    run = settings.save_ckpt_path or settings.output_dir
    output = settings.output_dir or run
    if run is None or output is None:
        return
    unlabelled = scorer.logits(engine, task.unlabelled)
    if engine.group.rank == 0:
        for folder in (run, output):
            folder.mkdir(parents=True, exist_ok=True)
        result.write(output, unlabelled)
        for name, value in result.run_files.items():
            write_json_atomically(run / name, value)
        write_json_atomically(run / checkpoint.SCORES, result.scores)
