"""What every fine-tuning walks through: a task is its features, its labels and its score.

The model is the encoder of the one it starts from with a head for the task. It is trained by the walk
of every run, scored on the development set after each epoch, and the best checkpoint is kept; at the
end that one is scored, its predictions are written, and the score is printed as one JSON object.
"""

import json
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from bert_cli.config.finetune import FinetuneSettings
from bert_cli.config.load import Loaded, validate
from bert_cli.config.plan import Plan, plan_of
from bert_cli.data.finetune.features import FeatureReader, Features
from bert_cli.data.records.tokenizer import TextTokenizer, model_max_length, read_tokenizer
from bert_cli.data.stream.synthetic import synthetic_features
from bert_cli.errors import ConfigError
from bert_cli.files import JSON, write_json_atomically
from bert_cli.model.hf import ARCHITECTURES
from bert_cli.parallel.engine import Batch, Engine, Mesh
from bert_cli.tasks.finetune.evaluation import Scorer, fingerprint_of, label_order
from bert_cli.tasks.finetune.task import Logits, Scores, Task
from bert_cli.tasks.run import build as assemble
from bert_cli.tasks.run import start, train
from bert_cli.tasks.run.spec import RunSpec
from bert_cli.train.folder import SCORES, best_checkpoint, checkpoint_name, complete_checkpoints
from bert_cli.train.loop import StoppedWhileScoringError, StopRequest
from bert_cli.train.metrics import print_line

Asked = TypeVar("Asked", bound=FinetuneSettings)

Build = Callable[[Asked, TextTokenizer, start.Source | None], Task]
SYNTHETIC_EXAMPLES = 12_000
"""As many as Graphcore's example generates."""


def run(
    settings: Asked,
    build: Build[Asked],
    needs: Sequence[str] = (),
    label_names: Sequence[str] | None = None,
) -> None:
    """Fine-tune and score, with as many seeds as the settings ask for.

    `build` makes the task from the settings, the tokenizer and the model it starts from; `needs` names
    the settings that it cannot do without; `label_names` are those of synthetic examples. Raises
    ConfigError, DataError, CheckpointError or DeviceError; a request to stop saves and returns.
    """
    if settings.generated_dataset:
        settings, needs = _without_scores(settings), ()
    _refuse_what_lacks(settings, needs)
    with ExitStack() as claims:
        source = _source(settings)
        settings = start.with_shape_of(settings, source)
        tokenizer_folder = _tokenizer_folder(settings, source)
        asked_length = "max_seq_length" in settings.model_fields_set
        settings = _with_length_of(settings, tokenizer_folder)
        settings, mesh, stop = train.prepare(settings, claims)
        if not asked_length:
            print_line(f"run: max_seq_length is {settings.max_seq_length}, as no length was given")
        if settings.generated_dataset:
            print_line("run: trains on synthetic examples, which nothing is scored on")
            task = _synthetic_task(settings, label_names)
        else:
            assert tokenizer_folder is not None
            tokenizer = read_tokenizer(tokenizer_folder)
            _refuse_another_vocabulary(settings, tokenizer, tokenizer_folder)
            if not settings.do_training:
                _refuse_another_head(settings, source)
            task = build(settings, tokenizer, source)
        if not settings.do_training:
            _only_score(settings, mesh, task, source, stop)
            return
        found, stopped = [], False
        for seed in range(settings.seed, settings.seed + settings.seeds):
            with ExitStack() as own:
                one = _with_seed(settings, seed)
                finished, scores = _train_and_score(one, mesh, task, stop, own, tokenizer_folder)
            if not finished:
                stopped = not settings.compile_only
                break
            found += [scores] if scores is not None else []
        if len(found) > 1 and len(found) == settings.seeds:
            _say_spread(settings, found, mesh.processes.rank)
    if stopped:
        train.exit_stopped(settings)


def _without_scores(settings: Asked) -> Asked:
    """The settings of a run on synthetic examples. Raises ConfigError for what has no effect on them."""
    useless = {
        "do_training": not settings.do_training,
        "do_test": getattr(settings, "do_test", False),
        "evaluate_every_steps": settings.evaluate_every_steps is not None,
    }
    lines = [
        f"{name} ({getattr(settings, name)}): has no effect with generated_dataset, whose synthetic examples are "
        "only trained on; leave out one of them"
        for name in useless
        if useless[name]
    ]
    if lines:
        raise ConfigError("\n".join(lines))
    return settings.model_copy(update={"do_validation": False})


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
    return Task(labels, label_names, features, {}, score=lambda logits: {}, best="")


def _with_length_of(settings: Asked, tokenizer_folder: Path | None) -> Asked:
    """The settings with the tokenizer's max_seq_length, where they give none and it is the shorter one."""
    if "max_seq_length" in settings.model_fields_set or tokenizer_folder is None:
        return settings
    longest = model_max_length(tokenizer_folder)
    if longest is None or longest >= settings.max_seq_length:
        return settings
    given = settings.model_dump(exclude_unset=True, by_alias=True)
    return validate(type(settings), Loaded({**given, "max_seq_length": longest}, {}))


def _refuse_what_lacks(settings: FinetuneSettings, needs: Sequence[str]) -> None:
    """Name all that is missing at once, so that nobody mends one after another."""
    lines = [
        f"{name}: is not given; give --{name.replace('_', '-')}"
        for name in needs
        if getattr(settings, name) is None
    ]
    if settings.pretrained_ckpt_path is None and not settings.generated_dataset:
        if settings.do_training and settings.tokenizer_path is None:
            lines.append(
                "pretrained_ckpt_path: is not given; give --pretrained-ckpt-path, the model to start from, or, "
                "to train new weights, --tokenizer-path and bert_config"
            )
        elif not settings.do_training and settings.save_ckpt_path is None:
            lines.append(
                "pretrained_ckpt_path: is not given; give --pretrained-ckpt-path, the model to score, or "
                "--save-ckpt-path, the folder of the run that trained it"
            )
    output = settings.output_dir
    if output is not None and not train.is_writable(output / SCORES):
        lines.append(f"output_dir ({output}): cannot be written; give another --output-dir")
    try:
        if settings.do_training:
            train.check_output_paths(settings)
    except ConfigError as error:
        lines.append(str(error))
    if lines:
        raise ConfigError("\n".join(lines))


def _source(settings: FinetuneSettings) -> start.Source | None:
    """The model to start from or, where nothing is trained, to score: what this run has come to, if anything."""
    run = settings.save_ckpt_path
    if not settings.do_training and run is not None and complete_checkpoints(run):
        return start.find_source(str(run), "--save-ckpt-path")
    if settings.pretrained_ckpt_path is not None:
        return start.find_source(settings.pretrained_ckpt_path)
    if settings.do_training:
        return None
    return start.find_source(str(run), "--save-ckpt-path")


def _tokenizer_folder(settings: FinetuneSettings, source: start.Source | None) -> Path | None:
    """The tokenizer's folder; None only where synthetic examples train new weights."""
    if settings.tokenizer_path is not None:
        return start.find_tokenizer(settings.tokenizer_path)
    return source.folder if source is not None else None


def _refuse_another_vocabulary(
    settings: FinetuneSettings, tokenizer: TextTokenizer, folder: Path
) -> None:
    words = settings.bert_config.vocab_size
    if len(tokenizer.pieces) > words:
        raise ConfigError(
            f"{folder} (tokenizer of {len(tokenizer.pieces):,} pieces): the model has {words:,} words; give "
            "--tokenizer-path, the folder of the tokenizer that it was trained with"
        )


def _refuse_another_head(settings: FinetuneSettings, source: start.Source | None) -> None:
    """What is scored without training has been trained for this task; better known before its data are read."""
    assert source is not None
    wanted = ARCHITECTURES[settings.LAST_BLOCKS[-1]]
    if source.architecture not in (wanted, "?"):
        raise ConfigError(
            f"{source.folder} ({source.architecture}): was not trained for this task, which is scored with a "
            f"{wanted}; leave out --no-do-training, or give a model that was"
        )


def _with_seed(settings: Asked, seed: int) -> Asked:
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
    claims: ExitStack,
    tokenizer_folder: Path | None,
) -> tuple[bool, Scores | None]:
    """One run with one seed: whether it came to its end, and its scores where there are some."""
    assert task.train is not None
    plan, reader, sample = open_features(settings, task.train, mesh)
    scorer = Scorer(settings, task, stop)
    job = RunSpec(
        plan=plan,
        stream=reader,
        sample=sample,
        form=lambda model: start.disk_format(settings, model, tokenizer_folder, task.label_names),
        evaluate=scorer.evaluate if settings.do_validation else None,
        held_out=fingerprint_of({**task.development, **(task.more or {})}),
        evaluate_every=settings.evaluate_every_steps
        or -(-len(task.train) // plan.examples_per_step),
        best=task.best,
        labels=task.labels,
    )
    result = train.run_training(settings, mesh, job, stop, claims)
    if not result.finished:
        return False, None
    if settings.dry_run or not settings.do_validation:
        return True, None
    kept = _kept(settings, result.engine)
    try:
        logits = scorer.take(result.engine, kept, result.state.weights)
        scores = task.score(logits)
        print_line(
            f"run: the best of its checkpoints is {kept}, whose predictions and scores follow"
        )
        _finish(settings, task, result.engine, scorer, logits, scores)
    except StoppedWhileScoringError:
        print_line("run: stopped before its end; the same command scores what it has trained")
        return False, None
    print_line(json.dumps(scores))
    return True, scores


def open_features(
    settings: FinetuneSettings, features: Features, mesh: Mesh
) -> tuple[Plan, FeatureReader, Batch]:
    """The plan of training on these examples, their reader, and some micro-batches to trace with."""
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


def _kept(settings: FinetuneSettings, engine: Engine) -> Path:
    """The best checkpoint, as rank 0 sees it: a file may show later on another host."""
    folder, step = settings.save_ckpt_path, -1
    assert folder is not None
    if engine.group.rank == 0:
        best = best_checkpoint(folder)
        assert best is not None, "a run that was evaluated has a best checkpoint"
        step = int(best.name.rpartition("_")[2])
    return folder / checkpoint_name(int(engine.group.broadcast([step])[0]))


def _only_score(
    settings: FinetuneSettings,
    mesh: Mesh,
    task: Task,
    source: start.Source | None,
    stop: StopRequest,
) -> None:
    """Score a model as it is; KeyboardInterrupt when asked to stop, since there is nothing to save."""
    assert source is not None
    model = assemble.build_model(settings, mesh, task.labels)
    engine = assemble.build_engine(model, settings, mesh)
    new, _ = start.load_weights(source, model.weights)
    if new:
        raise ConfigError(
            f"{source.folder} ({source.architecture}): has no {', '.join(new)}, so it was not trained for this "
            "task; leave out --no-do-training, or give a model that was"
        )
    order = label_order(source, task.label_names)
    scorer = Scorer(settings, task, stop)
    print_line(f"run: scores {source.folder}")
    try:
        logits = _in_order(scorer.logits_of(engine, task.development), order)
        scores = task.score(logits)
        if settings.save_ckpt_path is not None or settings.output_dir is not None:
            _finish(settings, task, engine, scorer, logits, scores, order)
        else:
            task.show(logits)
    except StoppedWhileScoringError:
        raise KeyboardInterrupt from None
    print_line(json.dumps(scores))


def _in_order(logits: Logits, order: Sequence[int] | None) -> Logits:
    return logits if order is None else {name: found[:, order] for name, found in logits.items()}


def _finish(
    settings: FinetuneSettings,
    task: Task,
    engine: Engine,
    scorer: Scorer,
    logits: Logits,
    scores: Scores,
    order: Sequence[int] | None = None,
) -> None:
    """Predict what has no labels; write predictions into output_dir and scores into the run's folder.

    Either folder stands for the other where only one is given.
    """
    run = settings.save_ckpt_path or settings.output_dir
    output = settings.output_dir or run
    assert run is not None and output is not None
    task.show(logits)
    more = _in_order(scorer.logits_of(engine, task.more or {}), order)
    if engine.group.rank == 0:
        for folder in (run, output):
            folder.mkdir(parents=True, exist_ok=True)
        task.write(output, {**logits, **more})
        task.keep(run, logits)
        write_json_atomically(run / SCORES, scores)


def _say_spread(settings: FinetuneSettings, found: Sequence[Scores], rank: int) -> None:
    """Mean and standard deviation of each score over the seeds, for people and as one JSON object."""
    print_line(f"{len(found)} seeds, {settings.seed} to {settings.seed + len(found) - 1}:")
    spread: dict[str, JSON] = {}
    for name in found[0]:
        values = [scores[name] for scores in found]
        mean, deviation = statistics.mean(values), statistics.stdev(values)
        spread[name] = {"mean": mean, "standard_deviation": deviation, "values": values}
        print_line(
            f"  {name}: {mean:.4f} +- {deviation:.4f}  ({', '.join(f'{v:.4f}' for v in values)})"
        )
    assert settings.save_ckpt_path is not None
    if rank == 0:
        write_json_atomically(settings.save_ckpt_path / SCORES, spread)
    print_line(json.dumps(spread))
