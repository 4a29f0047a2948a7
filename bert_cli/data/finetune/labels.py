"""The labels of texts: how they weigh in the loss, from which probability on a text has them, and how they are scored.

A model's folder has what its held-out texts have chosen in decision.json.

Shapes: n texts, L labels.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field
from scipy.optimize import minimize_scalar
from scipy.special import logsumexp, softmax

from bert_cli.data.finetune.tables import Column
from bert_cli.data.io.rows import listed
from bert_cli.errors import CheckpointError, ConfigError, nearest
from bert_cli.files import read_json
from bert_cli.statistics import Examples, Sample, interval, sample_of

DECISION = "decision.json"
USUAL_THRESHOLD = 0.5
BOUNDS = np.log([0.05, 20.0])  # of the temperature
LEAST = 50  # texts; the temperature of fewer is worse than none where a model is hardly too sure
LEVELS = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
RARE = 0.2  # of the share that a label has where all are equally frequent
ClassWeights = Literal["balanced"] | Mapping[str, float]
Floats = npt.NDArray[np.floating[Any]]


class Decision(BaseModel):
    """How the outputs of a classifier become an answer: what held-out texts have chosen, and defaults."""

    thresholds: dict[str, float] = {}
    """Probability above which a text has a label, where it may have several."""
    temperature: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1.0
    """Divisor of the logits, where a text has one label."""

    def thresholds_of(self, names: Sequence[str]) -> Floats:
        """Return the threshold of each label [L]."""
        return np.array([self.thresholds.get(name, USUAL_THRESHOLD) for name in names])


def read_decision(folder: Path) -> Decision:
    """Return the decision of a model's folder. Raises CheckpointError if its file cannot be read."""
    path = folder / DECISION
    if not path.is_file():
        return Decision()
    return read_json(path, Decision, CheckpointError, "copy the model again")


def label_counts(labels: Column, size: int) -> npt.NDArray[np.int64]:
    """Return the number of texts of each label [L], from numbers [n] or, of several labels, 0 and 1 [n, L]."""
    return labels.sum(0) if labels.ndim == 2 else np.bincount(labels, minlength=size)


def weights_of(labels: Column, names: Sequence[str], table: ClassWeights) -> Column:
    """Return the weight of each label of each text, shaped as `labels`; the least is 1, as their ratio alone counts.

    `balanced` weights are inverse to the number of texts: each label has the same sum of weights, and of several
    labels each has as much weight where it is as where it is not. A label that a table lacks has the weight 1. Raises
    ConfigError for a label that no text has.
    """
    counts = np.maximum(label_counts(labels, len(names)), 1)
    if table == "balanced":
        weights = (np.maximum(len(labels) - counts, 1) if labels.ndim == 2 else 1.0) / counts
    else:
        for name in table:
            if name not in names:
                near = nearest(name, names)
                remedy = f"did you mean '{near}'?" if near else f"the labels are {listed(names)}"
                raise ConfigError(f"class_weights ({name})", "is no label of train_file", remedy)
        weights = np.array([table.get(name, 1.0) for name in names])
    column = np.where(labels, weights, 1.0) if labels.ndim == 2 else weights[labels]
    return (column / column.min()).astype(np.float32)


def describe_rare(labels: Column, names: Sequence[str]) -> str:
    """Return what accuracy hides, in a sentence, where a label is rare; otherwise ""."""
    counts = label_counts(labels, len(names))
    rare, usual = int(counts.argmin()), int(counts.argmax())
    if labels.ndim == 2 or counts[rare] * len(names) >= RARE * len(labels):
        return ""
    return (
        f"labels: {counts[rare]:,} of {len(labels):,} texts are '{names[rare]}'; to answer '{names[usual]}' always has "
        f"an accuracy of {counts[usual] / len(labels):.2f}, so read macro F1, which counts all labels alike"
    )


def best_thresholds(labels: Column, probabilities: Floats) -> Floats:
    """Return the threshold of each label [L] with the best F1 on texts [n, L]; 0.5 where none is better.

    A threshold lies halfway between two probabilities; of equally good ones, the nearest to 0.5 is taken.
    """
    order = np.argsort(-probabilities, axis=0, kind="stable")
    ordered = np.take_along_axis(probabilities.astype(np.float64), order, axis=0)
    after = np.append(ordered[1:], np.zeros((1, ordered.shape[1])), axis=0)
    hits = np.take_along_axis(labels, order, axis=0).cumsum(0, dtype=np.int64)
    predicted = np.arange(1, len(labels) + 1)[:, None]
    f1 = np.where(ordered > after, 2 * hits / (predicted + hits[-1]), 0.0)
    middle = (ordered + after) / 2
    best = (f1 - 1e-9 * np.abs(middle - USUAL_THRESHOLD)).argmax(0)[None]
    usual = probabilities > USUAL_THRESHOLD
    usual_f1 = 2 * (labels * usual).sum(0) / np.maximum(labels.sum(0) + usual.sum(0), 1)
    is_better = np.take_along_axis(f1, best, 0)[0] > usual_f1
    return np.where(is_better, np.take_along_axis(middle, best, 0)[0], USUAL_THRESHOLD)


def scores_of_labels(labels: Column, predictions: Column) -> list[list[float]]:
    """Return the texts, predictions, precision, recall and F1 of each label of [n, L]; 0 where one is undefined."""
    from sklearn.metrics import precision_recall_fscore_support

    *ratios, texts = precision_recall_fscore_support(labels, predictions, zero_division=0)
    columns = [texts, predictions.sum(0), *ratios]
    return [list(row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def several_samples(labels: Column, predictions: Column, examples: Examples) -> dict[str, Sample]:
    """Return micro and macro F1 of predictions [n, L]; a label that no text has and none gets counts for neither."""
    hits = 2 * (labels & predictions)
    occurs = labels + predictions.astype(np.int8)
    is_used: Column = np.array(occurs.any(0))
    is_used[0] |= not is_used.any()
    return {
        "micro_f1": sample_of(examples, "ratio", hits.sum(1), occurs.sum(1)),
        "macro_f1": sample_of(examples, "ratio", *hits.T[is_used], *occurs.T[is_used]),
    }


def best_temperature(logits: Floats, labels: Column) -> float:
    """Return the temperature with the least mean cross entropy of labels [n]; 1 for few texts or without an error.

    A trained classifier is too sure of itself. Dividing its logits by one number makes a label of probability 0.8 right
    four times of five, and changes no answer (Guo et al. 2017, "On Calibration of Modern Neural Networks").
    """
    if len(labels) < LEAST or (logits.argmax(1) == labels).all():
        return 1.0

    def loss(logarithm: float) -> float:
        scaled = logits.astype(np.float64) / np.exp(logarithm)
        return float(np.mean(logsumexp(scaled, 1) - scaled[np.arange(len(labels)), labels]))

    optimum = minimize_scalar(loss, bounds=BOUNDS, method="bounded", options={"xatol": 1e-9})
    return float(np.exp(optimum.x))


def describe_calibration(
    temperature: float,
    logits: Floats,
    labels: Column,
    examples: Examples,
    reported: npt.NDArray[np.bool_],
) -> str:
    """Return the calibration error of the reported texts before and after, and how many are answered how well."""
    samples = []
    for scaled in (logits / temperature, logits):
        columns = softmax(scaled.astype(np.float64), 1).max(1), scaled.argmax(1) == labels
        samples.append(sample_of(examples, "calibration_error", *columns).take(reported))
    after, before = map(interval, samples)
    probability, is_right = samples[0].columns.T
    lines = [
        f"calibration error {after:.4f} at temperature {temperature:.4f}, {before:.4f} without; n {after.n:,}",
        "none below  answered  accuracy",
    ]
    for level in LEVELS:
        answered = probability >= level
        if answered.any():
            accuracy = is_right[answered].mean()
            lines.append(f"{level:10.2f}  {answered.mean():8.1%}  {accuracy:8.4f}")
    return "\n".join(lines)
