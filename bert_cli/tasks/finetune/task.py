"""What a task brings to fine-tuning: its features, its labels, its score, what it writes.

Everything else about a fine-tuning is the same for all tasks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bert_cli.data.finetune.features import Features

Logits = Mapping[str, npt.NDArray[np.float32]]
"""Of each development set by its name: [n, L] for examples, [T, L] for places."""
Scores = dict[str, float]


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
    """Writes the predictions of the best checkpoint into output_dir."""
    keep: Callable[[Path, Logits], None] = lambda folder, logits: None
    """Writes into the run's folder what `bert predict` needs beside the model."""
    more: Mapping[str, Features] | None = None
    """Sets without labels to be predicted for `write` at the end."""
