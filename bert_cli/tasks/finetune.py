"""What every fine-tuning walks through: a task is its features, its labels and its score.

The model is the encoder of the one it starts from with a head for the task. It is trained by the walk
of every run, scored on the development set after each epoch, and the best checkpoint is kept; at the
end that one is scored, its predictions are written, and the score is printed as one JSON object.
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from bert_cli.config.finetune import FinetuneSettings
from bert_cli.config.load import Loaded, validate
from bert_cli.config.plan import plan_of
from bert_cli.data.features import FeatureReader, Features, by_length, padded_length
from bert_cli.data.ledger import JSON, write_json_atomically
from bert_cli.data.tokenizer import TextTokenizer, read_tokenizer
from bert_cli.errors import ConfigError
from bert_cli.model.hf import ARCHITECTURES
from bert_cli.parallel.engine import Engine
from bert_cli.parallel.mesh import Mesh
from bert_cli.tasks import assemble, start, training
from bert_cli.train import checkpoint
from bert_cli.train.loop import StopRequest
from bert_cli.train.report import say

Logits = Mapping[str, npt.NDArray[np.float32]]
"""Of each development set by its name: [n, L] for examples, [T, L] for places."""
Scores = dict[str, float]
Asked = TypeVar("Asked", bound=FinetuneSettings)

SCORES = "scores.json"


@dataclass(frozen=True)
class Task:
    """What a task brings to the walk."""

    labels: int
    """Outputs of the head."""
    label_names: Sequence[str] | None
    """Names of a classifier's labels; None where they have none."""
    train: Features | None
    development: Mapping[str, Features]
    score: Callable[[Logits], Scores]
    best: str
    """The score whose highest value decides which checkpoint is kept."""
    show: Callable[[Logits], None] = lambda logits: None
    """Says more about the scored predictions than the scores."""
    write: Callable[[Path, Logits], None] = lambda folder, logits: None
    """Writes the predictions of the best checkpoint into the run's folder."""
    more: Mapping[str, Features] | None = None
    """Sets without labels to be predicted for `write` at the end."""


Build = Callable[[Asked, TextTokenizer, start.Source | None], Task]


def run(settings: Asked, build: Build[Asked], needs: Sequence[str] = ()) -> None:
    """Fine-tune and score, with as many seeds as the settings ask for.

    `build` makes the task from the settings, the tokenizer and the model it starts from; `needs` names
    the settings that it cannot do without. Raises ConfigError, DataError, CheckpointError or
    DeviceError; a request to stop saves and returns.
    """
    _refuse_what_lacks(settings, needs)
    with ExitStack() as claims:
        source = _source(settings)
        settings = _of_the_model(settings, source)
        settings, mesh, stop = training.prepare(settings, claims)
        tokenizer_folder = _tokenizer_folder(settings, source)
        tokenizer = read_tokenizer(tokenizer_folder)
        _refuse_another_vocabulary(settings, tokenizer, tokenizer_folder)
        if not settings.do_training:
            _refuse_another_head(settings, source)
        task = build(settings, tokenizer, source)
        if not settings.do_training:
            _only_score(settings, mesh, task, source)
            return
        found = []
        for seed in range(settings.seed, settings.seed + settings.seeds):
            with ExitStack() as own:
                one = _with_seed(settings, seed)
                scores = _train_and_score(one, mesh, task, stop, own, tokenizer_folder)
            if scores is None:
                return
            found.append(scores)
        if len(found) > 1:
            _say_spread(settings, found)


def _refuse_what_lacks(settings: FinetuneSettings, needs: Sequence[str]) -> None:
    """Name all that is missing at once, so that nobody mends one after another."""
    lines = [
        f"{name}: is not given; give --{name.replace('_', '-')}"
        for name in needs
        if getattr(settings, name) is None
    ]
    if settings.pretrained_ckpt_path is None:
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
    try:
        if settings.do_training:
            training.needs_a_folder(settings)
    except ConfigError as error:
        lines.append(str(error))
    if lines:
        raise ConfigError("\n".join(lines))


def _source(settings: FinetuneSettings) -> start.Source | None:
    """The model to start from or, where nothing is trained, to score: what this run has come to, if anything."""
    run = settings.save_ckpt_path
    if not settings.do_training and run is not None and checkpoint.whole_checkpoints(run):
        return start.find_source(str(run), "--save-ckpt-path")
    if settings.pretrained_ckpt_path is not None:
        return start.find_source(settings.pretrained_ckpt_path)
    if settings.do_training:
        return None
    return start.find_source(str(run), "--save-ckpt-path")


def _of_the_model(settings: Asked, source: start.Source | None) -> Asked:
    """The settings with the shape of the model they start from, unless they say it themselves."""
    if source is None or "bert_config" in settings.model_fields_set:
        return settings
    given = settings.model_dump(exclude_unset=True)
    shape = source.config.model_dump()
    return validate(type(settings), Loaded({**given, "bert_config": shape}, {}))


def _tokenizer_folder(settings: FinetuneSettings, source: start.Source | None) -> Path:
    if settings.tokenizer_path is not None:
        return start.find_folder(settings.tokenizer_path, "--tokenizer-path")
    assert source is not None
    return source.folder


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
    say(f"seed {seed}:")
    folder = settings.save_ckpt_path
    own = folder / f"seed_{seed}" if folder is not None else None
    return settings.model_copy(update={"seed": seed, "save_ckpt_path": own})


def _train_and_score(
    settings: FinetuneSettings,
    mesh: Mesh,
    task: Task,
    stop: StopRequest,
    claims: ExitStack,
    tokenizer_folder: Path,
) -> Scores | None:
    """One run with one seed; None when it was asked to stop, or nothing was to be scored."""
    assert task.train is not None
    total = round(settings.num_epochs * len(task.train))
    plan = plan_of(settings, total, len(task.train))
    reader = FeatureReader(
        task.train,
        seed=settings.seed,
        examples_per_step=plan.examples_per_step,
        micro_batch_size=plan.micro_batch_size,
        sequence_length=settings.max_seq_length,
        part=mesh.processes.rank,
        parts=mesh.processes.count,
    )
    best = _Best(settings, task)
    job = training.Job(
        plan=plan,
        reader=reader,
        sample={name: column[: len(mesh.devices)] for name, column in reader[0].items()},
        form=lambda model: start.disk_format(settings, model, tokenizer_folder, task.label_names),
        evaluate=best.evaluate if settings.do_validation else None,
        evaluate_every=settings.evaluate_every_steps
        or -(-len(task.train) // plan.examples_per_step),
        best=task.best,
        labels=task.labels,
    )
    walked = training.walk(settings, mesh, job, stop, claims)
    if walked is None or not walked.finished or settings.dry_run or not settings.do_validation:
        return None
    assert settings.save_ckpt_path is not None
    kept = checkpoint.best_of(settings.save_ckpt_path)
    if kept is None:
        return None
    best.take(walked.engine, kept, walked.state.weights)
    scores = task.score(best.logits)
    say(f"run: the best of its checkpoints is {kept}, whose predictions and scores follow")
    _finish(settings, task, walked.engine, best.logits, scores)
    say(json.dumps(scores))
    return scores


class _Best:
    """Scores the development sets, and holds on to the logits of the best time."""

    def __init__(self, settings: FinetuneSettings, task: Task) -> None:
        self.settings, self.task = settings, task
        self.value: float | None = None
        self.logits: Logits = {}

    def evaluate(self, engine: Engine) -> Scores:
        logits = logits_of_sets(engine, self.task.development, self.settings, self.task)
        scores = self.task.score(logits)
        if self.value is None or scores[self.task.best] > self.value:
            self.value, self.logits = scores[self.task.best], logits
        return scores

    def take(self, engine: Engine, kept: Path, weights: Mapping[str, Any]) -> None:
        """Have the logits of the checkpoint that was kept, and its weights in the engine."""
        start.put_weights(start.find_source(str(kept)), weights)
        if self.value is None or self.value != checkpoint.best_value(kept.parent):
            self.logits = logits_of_sets(engine, self.task.development, self.settings, self.task)


def _only_score(
    settings: FinetuneSettings, mesh: Mesh, task: Task, source: start.Source | None
) -> None:
    """Score a model as it is."""
    assert source is not None
    model = assemble.build_model(settings, mesh, task.labels)
    engine = assemble.build_engine(model, settings, mesh)
    new, _ = start.put_weights(source, model.weights)
    if new:
        raise ConfigError(
            f"{source.folder} ({source.architecture}): has no {', '.join(new)}, so it was not trained for this "
            "task; leave out --no-do-training, or give a model that was"
        )
    say(f"run: scores {source.folder}")
    logits = logits_of_sets(engine, task.development, settings, task)
    scores = task.score(logits)
    if settings.save_ckpt_path is not None:
        _finish(settings, task, engine, logits, scores)
    else:
        task.show(logits)
    say(json.dumps(scores))


def _finish(
    settings: FinetuneSettings, task: Task, engine: Engine, logits: Logits, scores: Scores
) -> None:
    """Predict what has no labels and write everything into the run's folder."""
    folder = settings.save_ckpt_path
    assert folder is not None
    task.show(logits)
    more = logits_of_sets(engine, task.more or {}, settings, task)
    if engine.peers.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        task.write(folder, {**logits, **more})
        write_json_atomically(folder / SCORES, scores)


def logits_of_sets(
    engine: Engine, sets: Mapping[str, Features], settings: FinetuneSettings, task: Task
) -> dict[str, npt.NDArray[np.float32]]:
    """The logits of all examples of some sets; the processes share them."""
    size, most = settings.global_batch.micro_batch_size, settings.max_seq_length
    by_place = settings.LAST_BLOCKS[-1] != "glue_head"
    return {
        name: _logits(engine, features, task.labels, by_place, size, most)
        for name, features in sets.items()
    }


def _logits(
    engine: Engine, features: Features, labels: int, by_place: bool, size: int, most: int
) -> npt.NDArray[np.float32]:
    peers = engine.peers
    found = np.zeros((len(features.tokens) if by_place else len(features), labels), np.float32)
    starts, lengths = features.starts, features.lengths
    for numbers in by_length(features, size)[peers.rank :: peers.count]:
        # Filled up with what is there: another number of examples would be traced once more.
        filled = np.resize(numbers, size)
        places = padded_length(int(lengths[numbers].max()), most)
        logits = engine.predict(features.batch(filled, places))[: len(numbers)]
        if by_place:
            inside = np.arange(places) < lengths[numbers, None]
            found[(starts[numbers, None] + np.arange(places))[inside]] = logits[inside]
        else:
            found[numbers] = logits
    return peers.total(found).astype(np.float32)


def _say_spread(settings: FinetuneSettings, found: Sequence[Scores]) -> None:
    """Mean and standard deviation of each score over the seeds, for people and as one JSON object."""
    say(f"{len(found)} seeds, {settings.seed} to {settings.seed + len(found) - 1}:")
    spread: dict[str, JSON] = {}
    for name in found[0]:
        values = [scores[name] for scores in found]
        mean, deviation = statistics.mean(values), statistics.stdev(values)
        spread[name] = {"mean": mean, "standard_deviation": deviation, "values": values}
        say(f"  {name}: {mean:.4f} +- {deviation:.4f}  ({', '.join(f'{v:.4f}' for v in values)})")
    assert settings.save_ckpt_path is not None
    write_json_atomically(settings.save_ckpt_path / SCORES, spread)
    say(json.dumps(spread))
