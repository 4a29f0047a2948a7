"""A task of fine-tuning: its examples, its labels, how the model's logits are scored and compared with baselines."""

import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from bert_cli.arrays import Bools, Floats32, Ints
from bert_cli.config.training import TrainSettings
from bert_cli.data.finetune.features import Features, by_length, outputs_of
from bert_cli.data.finetune.labels import Decision
from bert_cli.data.finetune.readers import FeatureReader
from bert_cli.data.random import chooses
from bert_cli.errors import DeviceError
from bert_cli.files import JSONObject, atomic_folder
from bert_cli.parallel.engine import Batch, Engine, StopRequested, Value
from bert_cli.parallel.group import ProcessGroup
from bert_cli.processes import print_line
from bert_cli.statistics import Examples, Sample, Score, describe, difference, intervals
from bert_cli.text import count
from bert_cli.train import card, scores
from bert_cli.train.loop import Prepare, Step, StoppedError

# Name of a set of examples -> [n, labels] for examples, [T, labels] for positions.
Logits = Mapping[str, Floats32]
# Rows below which scores come with a line that says what they cannot show.
# The standard error of an accuracy of 0.8 is then 0.04, and its interval 0.08 to each side.
FEW_ROWS = 100
# The set of examples that a fold tests.
FOLD = "validation"
CHOSEN_ON_SAME = ", chosen on the same examples"


@dataclass(frozen=True)
class Result:
    """The scores of a model on the development sets, and what is written about its predictions."""

    samples: Mapping[str, Sample] = field(default_factory=dict)
    """What the scores are computed from, by their names."""
    write: Callable[[Path, Logits], None] = lambda folder, logits: None
    """Writes predictions into a folder, also for the sets without labels, from their logits."""
    table: str = ""
    """Printed before the scores."""
    run_files: Mapping[str, JSONObject] = field(default_factory=dict)
    """JSON files for the run's folder, which `bert predict` needs besides the model."""
    decision: Decision = field(default_factory=Decision)
    """What the examples have chosen of the model's answers, which is stored with the model."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Numbers of examples that are written like scores."""
    note: str = ""
    """What the scores are of."""
    checkpoint: Path | None = None
    """The model that is scored."""
    trained_on: str = ""
    """The fingerprint of its examples, the same for all seeds but with `--few`, whose pairs a seed draws."""

    @cached_property
    def intervals(self) -> Mapping[str, Score]:
        """The scores with their intervals."""
        return intervals(self.samples)

    @property
    def scores(self) -> dict[str, float]:
        """The scores by their names."""
        return {**{name: sample.value for name, sample in self.samples.items()}, **self.counts}

    def half(self, *, choosing: bool) -> "Result":
        """Return the result on a half of the examples, as `half_of`."""
        samples = {}
        for name, sample in self.samples.items():
            rows = half_of(sample.examples, choosing=choosing)
            samples[name] = sample
            if not rows.all():
                samples[name] = sample.take(rows)
        return replace(self, samples=samples)


def half_of(examples: Examples, *, choosing: bool) -> Bools:
    """Return a mask [n] of the half of the groups that chooses, or of the other half; a single group is both."""
    rows: Bools = chooses(examples.groups) == choosing
    if rows.any():
        return rows
    return ~rows


# Returns the task with the outputs of its teacher, which the processes of a group compute together.
Learn = Callable[[ProcessGroup], "Task"]


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
    held_out: str = ""
    """Names the texts and judgements of the development sets, which have the same features as others."""
    unlabelled: Mapping[str, Features] = field(default_factory=dict)
    """Sets that are only predicted, at the end."""
    train_unlabelled: Features | None = None
    """More examples for training, which only a teacher labels."""
    teach: Callable[["Task"], "Learn"] | None = None
    """Opens the teacher of a task."""
    baselines: Callable[[], Mapping[str, Result]] | None = None
    """Computes the results of simple methods on the development sets, by their names."""
    prepare: Prepare = Step.prepare
    reader: type[FeatureReader] = FeatureReader
    draw: Callable[[Features, int], Features] | None = None
    """Returns the examples that a run with a seed trains on, from `train`."""
    fit: Callable[[Features, Mapping[str, Value]], None] | None = None
    """Sets the weights that no step trains, from `train` and the others, before the model is scored."""
    digits: int = 17
    """Decimals of the printed scores; files have all."""
    unigram_entropy: float | None = None
    """Unigram entropy of the masked tokens, None if it cannot be compared with the loss."""
    halves: bool = False
    """Whether half of the development set chooses the checkpoint and the other half reports its scores."""
    has_several_labels: bool = False
    """Whether an example may have several of the labels, or none."""
    folds: Ints | None = None
    """The fold [n] that tests each text of `train`, before the training on all; -1 for a text that no fold tests."""

    @property
    def fingerprint(self) -> str:
        """Return what names the examples that are scored."""
        sets = self.development.values()
        return " ".join([self.held_out, *(part.fingerprint for part in sets), str(self.folds)])

    def of_fold(self, tested: Bools) -> "Task":
        """Return the task of the fold that tests a mask of texts [n] and trains on the others."""
        assert self.train is not None
        development = {FOLD: self.train.of_texts(tested)}
        return replace(self, train=self.train.of_texts(~tested), development=development)

    def print_scores(self, result: Result) -> None:
        """Print scores as a line with intervals and a note, and as a line of JSON."""
        rows = min((score.n for score in result.intervals.values()), default=FEW_ROWS)
        if (self.halves or self.folds is not None) and self.label_names and rows < FEW_ROWS:
            known = "with 100, an accuracy of 0.8 is known to within 0.08"
            remedy = "label more rows"
            if self.halves:
                remedy = "to score more, use a --validation-file or a larger --held-out-fraction"
            print_line(f"{count(rows, 'row')} cannot show a small difference ({known}); {remedy}")
        print_line(f"scores: {describe(result.intervals)}{result.note}; in brackets 95 % intervals")
        rounded = {name: round(value, self.digits) for name, value in result.scores.items()}
        print_line(json.dumps(rounded))


@dataclass
class Scorer:
    """Scores the development sets of a run, and remembers the best result."""

    order: TrainSettings
    """The order of the run."""
    task: Task
    stop: StopRequested
    """Asked between batches, since a large set takes minutes."""
    outputs: Sequence[int] | None = None
    """The model's output of each label of the task; None if the order is the same."""
    best: tuple[int, float] = -1, -math.inf
    """Step and score of the best result; of equal scores, the older result."""
    result: Result = field(default_factory=Result)

    def evaluate(self, engine: Engine, step: int) -> Mapping[str, Sample]:
        """Return the scores that choose the checkpoint, of the current weights.

        Raises StoppedError on a request to stop.
        """
        result = self.score(engine)
        if self.task.halves:
            choosing = result.half(choosing=True)
        else:
            choosing = result
        value = choosing.samples[self.task.best].value
        if value > self.best[1]:
            self.best = (step, value)
            self.result = result
        return choosing.samples

    def reported(self, result: Result) -> Result:
        """Return the result that is reported, with a note where half of the texts may have chosen."""
        if not self.task.halves:
            return result
        if not any(sample.examples.groups.any() for sample in result.samples.values()):
            return replace(result, note=CHOSEN_ON_SAME)
        note = ", from the half of the held-out texts that chose nothing"
        return replace(result.half(choosing=False), note=note)

    def score(self, engine: Engine) -> Result:
        """Return the result of the current weights."""
        return self.task.evaluate(self.logits(engine, self.task.development))

    def logits(self, engine: Engine, sets: Mapping[str, Features]) -> dict[str, Floats32]:
        """Return the logits of all examples of some sets. DeviceError for values that are not finite."""
        engine.gather_weights()
        logits = {}
        for name, features in sets.items():
            values = self._predict(engine, features)
            if not np.isfinite(values).all():
                remedy = "check its weights, or choose a higher precision"
                raise DeviceError(name, "the model's outputs are not finite", remedy)
            if not self.order.head.is_per_position:
                values = features.by_text(values)
            logits[name] = values if self.outputs is None else values[:, self.outputs]
        return logits

    def _predict(self, engine: Engine, features: Features) -> Floats32:
        """Return logits [n, labels], or per position [T, labels]; each process takes every count-th batch."""
        group = engine.group
        is_per_position = self.order.head.is_per_position
        rows = len(features.tokens) if is_per_position else len(features)
        logits = np.zeros((rows, self.task.labels), np.float32)
        size = self.order.global_batch.micro_batch_size
        shape = size, self.order.max_seq_length
        batches = by_length(features, size)

        def predict(batch: Batch) -> list[Floats32]:
            return [engine.predict(batch)]

        for first in range(0, len(batches), group.world_size):
            if group.all_reduce([self.stop()])[0]:
                print_line("run: stopped while scoring; the same command scores the model")
                raise StoppedError
            # All processes go through the loop as often, also one whose slice is empty: collectives wait for all.
            mine = batches[first : first + group.world_size][group.rank : group.rank + 1]
            for numbers, _, (values,) in outputs_of(features, mine, predict, shape):
                features.put(logits, numbers, values)
        # The sum of float64 would need three times the memory.
        if group.world_size == 1:
            return logits
        return group.all_reduce(logits).astype(np.float32)


# --- baselines


def kept_baselines(task: Task, folder: Path, trained_on: str) -> dict[str, Result]:
    """Return the baselines of a task, computed once and kept in the run's folder; `trained_on` names the examples."""
    made_from = f"{trained_on} {task.fingerprint}"
    saved = folder / f"baselines_{zlib.crc32(made_from.encode()):08x}"
    if not saved.is_dir():
        assert task.baselines is not None
        computed = task.baselines()
        with atomic_folder(saved, 0) as partial:
            for name, result in computed.items():
                (partial / name).mkdir()
                scores.write(partial / name, result.samples, result.intervals)
    return {path.name: Result(scores.read_samples(path)) for path in sorted(saved.iterdir())}


def compare(
    models: Sequence[Result],
    baselines: Mapping[str, Result],
    best: str,
    *,
    halves: bool = False,
) -> str:
    """Print baselines, and write them into the cards of the models' checkpoints.

    Return a warning if the mean of the models does not beat the best of them by a score, otherwise "". With `halves`,
    as of `Task`, one half chooses the best: on the half of the models' scores it would be the luckiest.
    """
    # Baselines are compared where the model is, but the best of them is chosen on the other half.
    choosing = baselines
    if halves:
        choosing, baselines = (
            {name: result.half(choosing=side) for name, result in baselines.items()}
            for side in (True, False)
        )
    for name, result in baselines.items():
        print_line(f"baseline, {name}: {describe(result.intervals)}")
    # A lower loss is better; every other score is better where it is higher.
    sign = -1 if best.endswith("loss") else 1
    scored = [name for name in baselines if best in baselines[name].samples]
    ranked = sorted(scored, key=lambda name: sign * choosing[name].samples[best].value)
    if not ranked:
        return ""
    sides = [[each.samples[best] for each in side] for side in (models, [baselines[ranked[-1]]])]
    first, second = sides[::sign]
    gain = difference(first, second)
    if math.isnan(gain.low):
        print_line("the model and the baselines cannot be compared: all examples are one group")
        return ""
    beats = "does not beat"
    if gain.low > 0:
        beats = "beats"
    model = "the model"
    if len(models) > 1:
        model = f"the mean of {len(models)} seeds"
    verdict = f"{model} {beats} the baseline '{ranked[-1]}': its gain in {best} is {gain:.4f}"
    rows = {name: f"{best} {baselines[name].intervals[best]:.4f}" for name in ranked}
    for path in filter(None, (each.checkpoint for each in models)):
        card.add_section(path, f"{card.table(card.BASELINES, rows)}\n\nResult: {verdict}.\n")
    if gain.low > 0:
        print_line(verdict)
        return ""
    return f"warning: {verdict}"
