"""The parts of a fine-tuning that differ from task to task, and what tasks of texts share.

A task has features, labels, and an evaluation of the model's logits; everything else is the same for all
tasks. GLUE, CLUE and one's own table label a text or a pair of texts: their examples become features through
the cache, and their predictions become JSON lines.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bert_cli.config.finetune import FinetuneSettings
from bert_cli.data.finetune.features import (
    Features,
    arrays_of,
    cached,
    encode_texts,
    features_of,
    texts_hash,
)
from bert_cli.data.finetune.tables import TextExamples, write_lines
from bert_cli.data.records.tokenizer import TextTokenizer
from bert_cli.files import JSON
from bert_cli.train.metrics import print_line

Floats = npt.NDArray[np.float32]
Logits = Mapping[str, Floats]
"""Name of a set of examples -> [n, labels] for examples, [T, labels] for positions."""
Scores = dict[str, float]


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


def features_of_texts(
    examples: TextExamples, name: str, settings: FinetuneSettings, tokenizer: TextTokenizer
) -> Features:
    """Return the examples as features; print how many there are and what was left out or cut."""
    labels: dict[str, npt.NDArray[Any]] = {}
    if examples.labels is not None:
        labels["labels"] = examples.labels
    length = settings.max_seq_length

    def build() -> Mapping[str, npt.NDArray[Any]]:
        texts = examples.first, examples.second
        features, cut = encode_texts(tokenizer, *texts, labels, max_seq_length=length)
        return {**arrays_of(features), "cut": np.array(cut)}

    made_from = {
        "texts": texts_hash(examples.first, examples.second or []),
        "labels": None if examples.labels is None else examples.labels.tolist(),
        "tokenizer": tokenizer.fingerprint,
        "max_seq_length": length,
    }
    arrays = cached(settings.cache_dir, made_from, build)
    remarks = dict(examples.remarks)
    if cut := int(arrays["cut"]):
        remarks[f"longer than {length} tokens, cut"] = cut
    more = "".join(f"; {count:,} {remark}" for remark, count in remarks.items())
    print_line(f"{name}: {len(examples):,} examples{more}")
    return features_of(arrays)


def predictions_of(logits: Floats, label_names: Sequence[str] | None) -> npt.NDArray[Any]:
    """Return the label numbers [n], or for regression the numbers themselves, from logits [n, L]."""
    return logits[:, 0] if label_names is None else np.argmax(logits, axis=1)


def write_predictions(folder: Path, name: str, examples: TextExamples, logits: Floats) -> None:
    """Write the prediction of each example with its text; those of "validation_x" to predictions_x.jsonl."""
    path = folder / f"predictions{name.removeprefix('validation')}.jsonl"
    write_lines(path, (json.dumps(row) for row in _rows(examples, logits)))
    print_line(f"{name}: {len(examples):,} predictions in {path}")


def _rows(examples: TextExamples, logits: Floats) -> Iterator[Mapping[str, object]]:
    assert examples.labels is not None
    names, second = examples.label_names, examples.second
    probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    for number, text in enumerate(examples.first):
        row: dict[str, object] = {"id": examples.ids[number], "text": text}
        if second is not None:
            row["second"] = second[number]
        label = examples.labels[number]
        if names is None:
            # As it was read: 3.8, and not the nearest float32 in 16 digits.
            yield row | {"label": float(str(label)), "predicted": float(logits[number, 0])}
            continue
        best = int(np.argmax(probabilities[number]))
        probability = round(float(probabilities[number, best]), 6)
        row |= {"label": names[int(label)], "predicted": names[best]}
        yield row | {"probability": probability}
