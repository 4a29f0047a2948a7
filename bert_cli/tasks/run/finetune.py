"""Fine-tuning, the same for all tasks.

The model is the encoder of the model that the run starts from, with a head for the task. It is trained like
any run and scored on the development set after each epoch. At the end the best checkpoint is scored, its
predictions are written, and the scores are printed as one JSON object.
"""

import json
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from bert_cli.config.finetune import FinetuneSettings
from bert_cli.config.load import Loaded, validate
from bert_cli.config.training import Plan, plan_of
from bert_cli.data.finetune.features import FeatureReader, Features
from bert_cli.data.records.tokenizer import TextTokenizer, model_max_length, read_tokenizer
from bert_cli.data.stream.synthetic import synthetic_features
from bert_cli.errors import ConfigError
from bert_cli.files import JSON, write_json_atomically
from bert_cli.model.hf import ARCHITECTURES
from bert_cli.parallel.engine import Batch, Engine, Mesh
from bert_cli.tasks.finetune.evaluation import Scorer, fingerprint_of, label_order
from bert_cli.tasks.finetune.task import Result, Scores, Task
from bert_cli.tasks.run import build as assemble
from bert_cli.tasks.run import start, train
from bert_cli.tasks.run.spec import RunSpec
from bert_cli.train.folder import SCORES, best_checkpoint, checkpoint_name, complete_checkpoints
from bert_cli.train.loop import StoppedWhileScoringError, StopRequest
from bert_cli.train.metrics import print_line

Settings = TypeVar("Settings", bound=FinetuneSettings)
Build = Callable[[Settings, TextTokenizer, start.Source | None], Task]

SYNTHETIC_EXAMPLES = 12_000
"""As many as Graphcore's example generates."""


def run(
    settings: Settings,
    build: Build[Settings],
    needs: Sequence[str] = (),
    label_names: Sequence[str] | None = None,
) -> None:
    """Fine-tune and score, with as many seeds as the settings say.

    `build` returns the task for the settings, the tokenizer and the model that the run starts from; `needs`
    names required settings; `label_names` are those of synthetic examples. Raises ConfigError, DataError,
    CheckpointError or DeviceError. A request to stop saves and returns.
    """
    if settings.generated_dataset:
        settings, needs = _without_scores(settings), ()
    _check_settings(settings, needs)
    with ExitStack() as locks:
        source = _source(settings)
        settings = start.with_shape_of(settings, source)
        folder = _tokenizer_folder(settings, source)
        is_default_length = "max_seq_length" not in settings.model_fields_set
        settings = _with_tokenizer_length(settings, folder)
        settings, mesh, stop = train.prepare(settings, locks)
        if is_default_length:
            print_line(f"run: max_seq_length is {settings.max_seq_length}, as none was given")
        if settings.generated_dataset:
            print_line("run: trains on synthetic examples; nothing is scored")
            task = _synthetic_task(settings, label_names)
        else:
            assert folder is not None
            tokenizer = read_tokenizer(folder)
            _check_vocabulary(settings, tokenizer, folder)
            if source is not None and not settings.do_training:
                _check_head(settings, source)
            task = build(settings, tokenizer, source)
        if settings.do_training:
            stopped = _train_seeds(settings, mesh, task, stop, folder)
        else:
            assert source is not None
            stopped = False
            _only_score(settings, mesh, task, source, stop)
    if stopped:
        train.exit_stopped(settings)


# --- settings


def _without_scores(settings: Settings) -> Settings:
    """Return the settings for synthetic examples. ConfigError for what has no effect on them."""
    useless = {
        "do_training": not settings.do_training,
        "do_test": getattr(settings, "do_test", False),
        "evaluate_every_steps": settings.evaluate_every_steps is not None,
    }
    problem = "has no effect with generated_dataset, whose examples are not scored"
    errors = [
        ConfigError(f"{name} ({getattr(settings, name)})", problem, "leave out one of them")
        for name, is_set in useless.items()
        if is_set
    ]
    if errors:
        raise ConfigError("\n".join(map(str, errors)))
    return settings.model_copy(update={"do_validation": False})


def _check_settings(settings: FinetuneSettings, needs: Sequence[str]) -> None:
    """Raise one ConfigError for everything that is missing."""
    errors = [
        ConfigError(name, "is missing", f"give --{name.replace('_', '-')}")
        for name in needs
        if getattr(settings, name) is None
    ]
    if settings.pretrained_ckpt_path is None and not settings.generated_dataset:
        remedy = "give --pretrained-ckpt-path, the model to "
        if settings.do_training and settings.tokenizer_path is None:
            remedy += "start from, or, to train new weights, --tokenizer-path and bert_config"
            errors.append(ConfigError("pretrained_ckpt_path", "is missing", remedy))
        elif not settings.do_training and settings.save_ckpt_path is None:
            remedy += "score, or --save-ckpt-path, the folder of the run that trained it"
            errors.append(ConfigError("pretrained_ckpt_path", "is missing", remedy))
    output = settings.output_dir
    if output is not None and not train.is_writable(output / SCORES):
        where, remedy = f"output_dir ({output})", "give another --output-dir"
        errors.append(ConfigError(where, "cannot be written", remedy))
    try:
        if settings.do_training:
            train.check_output_paths(settings)
    except ConfigError as error:
        errors.append(error)
    if errors:
        raise ConfigError("\n".join(map(str, errors)))


def _source(settings: FinetuneSettings) -> start.Source | None:
    """Return the model to start from or, without training, to score: the run's own if there is one."""
    run = settings.save_ckpt_path
    if not settings.do_training and run is not None and complete_checkpoints(run):
        return start.find_source(str(run), "--save-ckpt-path")
    if settings.pretrained_ckpt_path is not None:
        return start.find_source(settings.pretrained_ckpt_path)
    return None if settings.do_training else start.find_source(str(run), "--save-ckpt-path")


def _tokenizer_folder(settings: FinetuneSettings, source: start.Source | None) -> Path | None:
    """Return the tokenizer's folder; None only where synthetic examples train new weights."""
    if settings.tokenizer_path is not None:
        return start.find_tokenizer(settings.tokenizer_path)
    return source.folder if source is not None else None


def _with_tokenizer_length(settings: Settings, folder: Path | None) -> Settings:
    """Return the settings with the tokenizer's maximum length, if they have none and it is shorter."""
    if "max_seq_length" in settings.model_fields_set or folder is None:
        return settings
    longest = model_max_length(folder)
    if longest is None or longest >= settings.max_seq_length:
        return settings
    values = settings.model_dump(exclude_unset=True, by_alias=True)
    return validate(type(settings), Loaded({**values, "max_seq_length": longest}, {}))


def _check_vocabulary(settings: FinetuneSettings, tokenizer: TextTokenizer, folder: Path) -> None:
    size, model_size = len(tokenizer.pieces), settings.bert_config.vocab_size
    if size > model_size:
        remedy = (
            "give --tokenizer-path, the folder of the tokenizer that the model was trained with"
        )
        where, problem = f"{folder} (tokenizer of {size:,} pieces)", "is too large for the model"
        raise ConfigError(where, f"{problem}, whose vocabulary has {model_size:,}", remedy)


def _check_head(settings: FinetuneSettings, source: start.Source) -> None:
    """Refuse a model of another task, before the data are read."""
    wanted = ARCHITECTURES[settings.LAST_BLOCKS[-1]]
    if source.architecture not in (wanted, "?"):
        problem = f"was not trained for this task, which needs a {wanted}"
        raise _another_model(source, problem)


def _another_model(source: start.Source, problem: str) -> ConfigError:
    remedy = "leave out --no-do-training, or give a model that was"
    return ConfigError(f"{source.folder} ({source.architecture})", problem, remedy)


def _synthetic_task(settings: FinetuneSettings, label_names: Sequence[str] | None) -> Task:
    head = settings.LAST_BLOCKS[-1]
    labels = len(label_names) if label_names is not None else 2 if head == "qa_head" else 1
    features = synthetic_features(
        head,
        SYNTHETIC_EXAMPLES,
        labels=labels,
        vocab_size=settings.bert_config.vocab_size,
        sequence_length=settings.max_seq_length,
        seed=settings.seed,
    )
    return Task(labels, label_names, features)


# --- training


def _train_seeds(
    settings: Settings, mesh: Mesh, task: Task, stop: StopRequest, tokenizer: Path | None
) -> bool:
    """Train with each seed; return whether a request stopped it."""
    results: list[Scores] = []
    for seed in range(settings.seed, settings.seed + settings.seeds):
        with ExitStack() as locks:
            one = _with_seed(settings, seed)
            finished, scores = _train_and_score(one, mesh, task, stop, locks, tokenizer)
        if not finished:
            return not settings.compile_only
        results += [scores] if scores is not None else []
    if len(results) > 1:
        _report_seeds(settings, results, mesh.processes.rank)
    return False


def _with_seed(settings: Settings, seed: int) -> Settings:
    if settings.seeds == 1:
        return settings
    print_line(f"seed {seed}:")
    folders = {
        name: folder / f"seed_{seed}"
        for name in ("save_ckpt_path", "output_dir", "tensorboard_dir")
        if (folder := getattr(settings, name)) is not None
    }
    return settings.model_copy(update={"seed": seed, **folders})


def _train_and_score(
    settings: FinetuneSettings,
    mesh: Mesh,
    task: Task,
    stop: StopRequest,
    locks: ExitStack,
    tokenizer: Path | None,
) -> tuple[bool, Scores | None]:
    """Run one seed; return whether it reached its end, and its scores if there are any."""
    assert task.train is not None
    plan, reader, sample = open_features(settings, task.train, mesh)
    scorer = Scorer(settings, task, stop)
    spec = RunSpec(
        plan=plan,
        stream=reader,
        sample=sample,
        form=lambda model: start.disk_format(settings, model, tokenizer, task.label_names),
        evaluate=scorer.evaluate if settings.do_validation else None,
        held_out=fingerprint_of({**task.development, **task.unlabelled}),
        evaluate_every=settings.evaluate_every_steps
        or -(-len(task.train) // plan.examples_per_step),
        best=task.best,
        labels=task.labels,
    )
    trained = train.run_training(settings, mesh, spec, stop, locks)
    if not trained.finished:
        return False, None
    if settings.dry_run or not settings.do_validation:
        return True, None
    best = _best_checkpoint(settings, trained.engine)
    try:
        result = scorer.best_result(trained.engine, best, trained.state.weights)
        print_line(f"run: the best checkpoint is {best}; its predictions and scores follow")
        _write(settings, task, trained.engine, scorer, result)
    except StoppedWhileScoringError:
        print_line("run: stopped before its end; the same command scores the trained model")
        return False, None
    print_line(json.dumps(result.scores))
    return True, result.scores


def open_features(
    settings: FinetuneSettings, features: Features, mesh: Mesh
) -> tuple[Plan, FeatureReader, Batch]:
    """Return the plan of training on these examples, their reader, and micro-batches to trace with."""
    examples = settings.total_num_train_samples or round(settings.num_epochs * len(features))
    plan = plan_of(settings, examples, len(features))
    reader = FeatureReader(
        features,
        seed=settings.seed,
        examples_per_step=plan.examples_per_step,
        micro_batch_size=plan.micro_batch_size,
        sequence_length=settings.max_seq_length,
        part=mesh.processes.rank,
        parts=mesh.processes.count,
    )
    sample = {name: column[: len(mesh.devices)] for name, column in reader[0].items()}
    return plan, reader, sample


def _best_checkpoint(settings: FinetuneSettings, engine: Engine) -> Path:
    """Return the best checkpoint as rank 0 sees it: a file may appear later on another host."""
    folder, step = settings.save_ckpt_path, -1
    assert folder is not None
    if engine.group.rank == 0:
        best = best_checkpoint(folder)
        assert best is not None, "a run that was evaluated has a best checkpoint"
        step = int(best.name.rpartition("_")[2])
    return folder / checkpoint_name(int(engine.group.broadcast([step])[0]))


def _report_seeds(settings: FinetuneSettings, results: Sequence[Scores], rank: int) -> None:
    """Print and write the mean and standard deviation of each score over the seeds."""
    print_line(f"{len(results)} seeds, {settings.seed} to {settings.seed + len(results) - 1}:")
    spread: dict[str, JSON] = {}
    for name in results[0]:
        values = [scores[name] for scores in results]
        mean, deviation = statistics.mean(values), statistics.stdev(values)
        spread[name] = {"mean": mean, "standard_deviation": deviation, "values": values}
        print_line(
            f"  {name}: {mean:.4f} +- {deviation:.4f}  ({', '.join(f'{v:.4f}' for v in values)})"
        )
    assert settings.save_ckpt_path is not None
    if rank == 0:
        write_json_atomically(settings.save_ckpt_path / SCORES, spread)
    print_line(json.dumps(spread))


# --- scoring


def _only_score(
    settings: FinetuneSettings, mesh: Mesh, task: Task, source: start.Source, stop: StopRequest
) -> None:
    """Score a model without training; KeyboardInterrupt on a request to stop, as there is nothing to save."""
    model = assemble.build_model(settings, mesh, task.labels)
    engine = assemble.build_engine(model, settings, mesh)
    new, _ = start.load_weights(source, model.weights)
    if new:
        raise _another_model(source, f"has no {', '.join(new)}: it was not trained for this task")
    scorer = Scorer(settings, task, stop, label_order(source, task.label_names))
    print_line(f"run: scores {source.folder}")
    try:
        result = scorer.score(engine)
        if settings.save_ckpt_path is not None or settings.output_dir is not None:
            _write(settings, task, engine, scorer, result)
        elif result.table:
            print_line(result.table)
    except StoppedWhileScoringError:
        raise KeyboardInterrupt from None
    print_line(json.dumps(result.scores))


def _write(
    settings: FinetuneSettings, task: Task, engine: Engine, scorer: Scorer, result: Result
) -> None:
    """Predict the sets without labels; write predictions into output_dir and scores into the run's folder.

    If only one of the folders is given, it receives everything.
    """
    run = settings.save_ckpt_path or settings.output_dir
    output = settings.output_dir or run
    assert run is not None and output is not None
    if result.table:
        print_line(result.table)
    unlabelled = scorer.logits(engine, task.unlabelled)
    if engine.group.rank == 0:
        for folder in (run, output):
            folder.mkdir(parents=True, exist_ok=True)
        result.write(output, unlabelled)
        for name, value in result.run_files.items():
            write_json_atomically(run / name, value)
        write_json_atomically(run / SCORES, result.scores)
