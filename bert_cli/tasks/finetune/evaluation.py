"""What a model says to the development sets, and what is remembered of the best time it was asked.

Examples go through it in batches of like length, shared out over the processes; a request to stop is
looked at between them, since a large set takes minutes. A model that is scored without training keeps
its own order of the labels, which is brought into the task's.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bert_cli.config.finetune import FinetuneSettings
from bert_cli.data.finetune.features import Features, by_length, padded_length
from bert_cli.errors import ConfigError, DeviceError
from bert_cli.parallel.engine import Engine
from bert_cli.tasks.finetune.task import Logits, Scores, Task
from bert_cli.tasks.run import start
from bert_cli.train.folder import checkpoint_name
from bert_cli.train.loop import StoppedWhileScoringError
from bert_cli.train.metrics import print_line

Floats = npt.NDArray[np.float32]
Stop = Callable[[], bool]


class Scorer:
    """Scores the development sets of a run, and holds on to the logits of the best time."""

    def __init__(self, settings: FinetuneSettings, task: Task, stop: Stop) -> None:
        self.settings, self.task, self.stop = settings, task, stop
        self.best: tuple[int, float] | None = None
        """Step and score, by the rule of `note_best`: of equals the older one."""
        self.logits: Logits = {}

    def evaluate(self, engine: Engine, step: int) -> Scores:
        """The scores of the weights as they are. Raises StoppedWhileScoringError when asked to stop."""
        logits = self.logits_of(engine, self.task.development)
        scores = self.task.score(logits)
        value = scores[self.task.best]
        if self.best is None or value > self.best[1]:
            self.best, self.logits = (step, value), logits
        return scores

    def take(self, engine: Engine, kept: Path, weights: Mapping[str, Any]) -> Logits:
        """Put the kept checkpoint's weights into the engine; the logits that it has."""
        start.load_weights(start.find_source(str(kept)), weights)
        if self.best is None or checkpoint_name(self.best[0]) != kept.name:
            self.logits = self.logits_of(engine, self.task.development)
        return self.logits

    def logits_of(self, engine: Engine, sets: Mapping[str, Features]) -> dict[str, Floats]:
        """The logits of all examples of some sets."""
        size, most = self.settings.global_batch.micro_batch_size, self.settings.max_seq_length
        by_place = self.settings.LAST_BLOCKS[-1] != "glue_head"
        found = {}
        for name, features in sets.items():
            found[name] = _logits(
                engine, features, self.task.labels, by_place, size, most, self.stop
            )
            if not np.isfinite(found[name]).all():
                raise DeviceError(
                    f"{name}: what the model says of it is not finite; its weights are damaged, or the precision "
                    "is too small"
                )
        return found


def _logits(
    engine: Engine,
    features: Features,
    labels: int,
    by_place: bool,
    size: int,
    most: int,
    stop: Stop,
) -> Floats:
    """[n, labels], or by place [T, labels]; the processes take batches in turn."""
    group = engine.group
    found = np.zeros((len(features.tokens) if by_place else len(features), labels), np.float32)
    starts, lengths = features.starts, features.lengths
    batches = by_length(features, size)
    for first in range(0, len(batches), group.world_size):
        if group.all_reduce([stop()])[0]:
            raise StoppedWhileScoringError
        for numbers in batches[first + group.rank : first + group.world_size][:1]:
            # Filled up with what is there: another number of examples would be traced once more.
            filled = np.resize(numbers, size)
            places = padded_length(int(lengths[numbers].max()), most)
            logits = engine.predict(features.batch(filled, places))[: len(numbers)]
            if by_place:
                inside = np.arange(places) < lengths[numbers, None]
                found[(starts[numbers, None] + np.arange(places))[inside]] = logits[inside]
            else:
                found[numbers] = logits
    return group.all_reduce(found).astype(np.float32)


def fingerprint_of(sets: Mapping[str, Features]) -> str:
    """Tells sets of examples apart, in order and content."""
    digests = [f"{name} {zlib.crc32(features.tokens.tobytes())}" for name, features in sets.items()]
    return ", ".join(digests)


def label_order(source: start.Source, names: Sequence[str] | None) -> list[int] | None:
    """Which output of a model is each of a task's labels; None where they are in order already.

    Raises ConfigError for a model of other labels. Labels without names are taken in the task's order,
    and that is said.
    """
    own = source.label_names
    if names is None or own == tuple(names):
        return None
    if own is None or own == tuple(f"LABEL_{number}" for number in range(len(names))):
        told = ", ".join(names)
        print_line(f"run: the labels of {source.folder} have no names; taken in this order: {told}")
        return None
    if sorted(own) != sorted(names):
        raise ConfigError(
            f"{source.where} (labels {', '.join(own)}): are not this task's, which are {', '.join(names)}; give a "
            "model that was trained for it"
        )
    print_line(f"run: the labels of {source.folder} are in another order, which is heeded")
    return [own.index(name) for name in names]
