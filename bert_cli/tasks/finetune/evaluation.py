"""Evaluation of a model on the development sets.

Examples are batched by length and divided among the processes. A request to stop is checked between batches,
since a large set takes minutes. A model that is scored without training has its own order of the labels; its
logits are put into the order of the task.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert_cli.config.finetune import FinetuneSettings
from bert_cli.data.finetune.features import Features, by_length, padded_length
from bert_cli.errors import ConfigError, DeviceError
from bert_cli.parallel.engine import Engine
from bert_cli.tasks.finetune.task import Floats, Result, Scores, Task
from bert_cli.tasks.run import start
from bert_cli.train.folder import checkpoint_name
from bert_cli.train.loop import StoppedWhileScoringError
from bert_cli.train.metrics import print_line


class Scorer:
    """Scores the development sets of a run, and remembers the best result."""

    def __init__(
        self,
        settings: FinetuneSettings,
        task: Task,
        stop: Callable[[], bool],
        order: Sequence[int] | None = None,
    ) -> None:
        """Score with this model's settings; `order` has the model's output of each label of the task."""
        self.task, self.stop, self.order = task, stop, order
        self.micro_batch_size = settings.global_batch.micro_batch_size
        self.max_seq_length = settings.max_seq_length
        self.is_per_position = settings.LAST_BLOCKS[-1] != "glue_head"
        self.best: tuple[int, float] | None = None
        """Step and score; of equal scores the older."""
        self.result = Result()

    def evaluate(self, engine: Engine, step: int) -> Scores:
        """Return the scores of the current weights. Raises StoppedWhileScoringError on a request to stop."""
        result = self.score(engine)
        value = result.scores[self.task.best]
        if self.best is None or value > self.best[1]:
            self.best, self.result = (step, value), result
        return result.scores

    def score(self, engine: Engine) -> Result:
        """Return the result of the current weights."""
        return self.task.evaluate(self.logits(engine, self.task.development))

    def best_result(self, engine: Engine, best: Path, weights: Mapping[str, Any]) -> Result:
        """Load the best checkpoint's weights into the engine and return its result."""
        start.load_weights(start.find_source(str(best)), weights)
        if self.best is None or checkpoint_name(self.best[0]) != best.name:
            return self.score(engine)
        return self.result

    def logits(self, engine: Engine, sets: Mapping[str, Features]) -> dict[str, Floats]:
        """Return the logits of all examples of some sets. DeviceError for values that are not finite."""
        logits = {name: self._predict(engine, features) for name, features in sets.items()}
        for name, values in logits.items():
            if not np.isfinite(values).all():
                problem = "the model's outputs are not finite"
                remedy = "check its weights, or choose a higher precision"
                raise DeviceError(name, problem, remedy)
        if self.order is not None:
            return {name: values[:, self.order] for name, values in logits.items()}
        return logits

    def _predict(self, engine: Engine, features: Features) -> Floats:
        """Return logits [n, labels], or per position [T, labels]; each process takes every count-th batch."""
        group = engine.group
        rows = len(features.tokens) if self.is_per_position else len(features)
        logits = np.zeros((rows, self.task.labels), np.float32)
        starts, lengths = features.starts, features.lengths
        batches = by_length(features, self.micro_batch_size)
        for first in range(0, len(batches), group.world_size):
            if group.all_reduce([self.stop()])[0]:
                raise StoppedWhileScoringError
            for numbers in batches[first + group.rank : first + group.world_size][:1]:
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


def fingerprint_of(sets: Mapping[str, Features]) -> str:
    """Return a fingerprint of sets of examples, of their order and tokens."""
    digests = [f"{name} {zlib.crc32(features.tokens.tobytes())}" for name, features in sets.items()]
    return ", ".join(digests)


def label_order(source: start.Source, names: Sequence[str] | None) -> list[int] | None:
    """Return the model's output of each of the task's labels; None where they are in order already.

    ConfigError for a model of other labels. Labels without names are assumed to be in the task's order, which
    is printed.
    """
    own = source.label_names
    if names is None or own == tuple(names):
        return None
    if own is None or own == tuple(f"LABEL_{number}" for number in range(len(names))):
        order = ", ".join(names)
        print_line(
            f"run: the labels of {source.folder} have no names; assumed to be in this order: {order}"
        )
        return None
    if sorted(own) != sorted(names):
        where = f"{source.where} (labels {', '.join(own)})"
        problem = f"are not those of this task ({', '.join(names)})"
        raise ConfigError(where, problem, "give a model that was trained for it")
    print_line(f"run: the labels of {source.folder} are in another order, which is converted")
    return [own.index(name) for name in names]
