"""The labels of texts: how they weigh in the loss, from which probability on a text has them, and how they are scored.

A model's folder has what its held-out texts have chosen in decision.json.

Shapes: n texts, L labels.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, Field

from bert_cli.arrays import Array, Floats, Ints64
from bert_cli.data.io.rows import listed
from bert_cli.errors import CheckpointError, ConfigError, did_you_mean
from bert_cli.files import read_json
from bert_cli.statistics import Examples, Sample, sample_of

DECISION = "decision.json"
# Where a label and its absence are equally probable.
USUAL_THRESHOLD = 0.5
# In logarithms, so that the search is as fine below 1 as above.
BOUNDS = np.log([0.05, 20.0])  # of the temperature
LEAST = 50  # texts: the temperature of fewer is worse than none, and fewer show nothing of single levels
# As many as in Guo et al. 2017.
BINS = 15  # of equal width, of probabilities
LEVELS = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
RARE = 0.2  # of the share that a label has where all are equally frequent
ClassWeights = Literal["balanced"] | Mapping[str, float]


class Decision(BaseModel):
    """How the outputs of a classifier become an answer: what held-out texts have chosen, and defaults."""

    thresholds: dict[str, float] = {}
    """Probability above which a text has a label, where it may have several: of each output, in their order."""
    temperature: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1.0
    """Divisor of the logits, where a text has one label."""

    def thresholds_of(self, size: int) -> list[float]:
        """Return the threshold of each of `size` labels."""
        return [*self.thresholds.values()] or [USUAL_THRESHOLD] * size

    def answers(self, logits: Floats, *, several: bool) -> Array:
        """Return the label of each text [n] from logits [n, L]; with several labels, whether it has each [n, L]."""
        if not several:
            return logits.argmax(1)
        has: Array = expit(logits) > self.thresholds_of(logits.shape[1])
        return has


def decide(logits: Floats, labels: Array, names: Sequence[str]) -> Decision:
    """Return what texts choose: a temperature by labels [n], or by several labels [n, L] the threshold of each."""
    if labels.ndim == 1:
        return Decision(temperature=best_temperature(logits, labels))
    best = best_thresholds(labels, expit(logits))
    return Decision(thresholds=dict(zip(names, best, strict=True)))


def read_decision(folder: Path) -> Decision:
    """Return the decision of a model's folder. Raises CheckpointError if its file cannot be read."""
    path = folder / DECISION
    if not path.is_file():
        return Decision()
    return read_json(path, Decision, CheckpointError, "copy the model again")


def label_counts(labels: Array, size: int) -> Ints64:
    """Return the number of texts of each label [L], from numbers [n] or, of several labels, 0 and 1 [n, L]."""
    if labels.ndim == 2:
        return labels.sum(0)
    return np.bincount(labels, minlength=size)


def weights_of(labels: Array, names: Sequence[str], table: ClassWeights) -> Array:
    """Return the weight of each label of each text, shaped as `labels`; the least is 1, as their ratio alone counts.

    `balanced` weights are inverse to the number of texts: each label has the same sum of weights, and of several
    labels each has as much weight where it is as where it is not. A label that a table lacks has the weight 1. Raises
    ConfigError for a label that no text has.
    """
    counts = np.maximum(label_counts(labels, len(names)), 1)
    if table == "balanced":
        # Of several labels: texts without a label for each text with it, so that both sides weigh as much.
        if labels.ndim == 2:
            weights = np.maximum(len(labels) - counts, 1) / counts
        else:
            weights = 1.0 / counts
    else:
        for name in table:
            if name not in names:
                remedy = did_you_mean(name, names, f"the labels are {listed(names)}")
                raise ConfigError(f"class_weights ({name})", "is not a label in train_file", remedy)
        weights = np.array([table.get(name, 1.0) for name in names])
    if labels.ndim == 2:
        column = np.where(labels, weights, 1.0)
    else:
        column = weights[labels]
    return (column / column.min()).astype(np.float32)


def describe_rare(labels: Array, names: Sequence[str]) -> str:
    """Return what accuracy hides, in a sentence, where a label is rare; otherwise ""."""
    counts = label_counts(labels, len(names))
    rare = int(counts.argmin())
    usual = int(counts.argmax())
    if labels.ndim == 2 or counts[rare] * len(names) >= RARE * len(labels):
        return ""
    return (
        f"labels: {counts[rare]:,} of {len(labels):,} texts are '{names[rare]}'; always answering '{names[usual]}' has "
        f"an accuracy of {counts[usual] / len(labels):.2f}, so read macro F1, in which all labels have equal weight"
    )


def best_thresholds(labels: Array, probabilities: Floats) -> list[float]:
    """Return the threshold of each label [L] with the best F1 on texts [n, L]; 0.5 where none is better.

    A threshold lies halfway between two probabilities; of equally good ones, the nearest to 0.5 is taken.
    """
    thresholds = []
    predicted = np.arange(1, len(labels) + 1)
    for has_label, column in zip(labels.T, probabilities.T.astype(np.float64), strict=True):
        order = np.argsort(-column, kind="stable")
        ordered = column[order]
        # The next lower probability. A threshold between two equal ones would part equal texts.
        after = np.append(ordered[1:], 0.0)
        hits = has_label[order].cumsum(dtype=np.int64)
        # [n] F1 if the first 1, 2, ... texts get the label: 2 hits / (predicted + true).
        f1 = np.where(ordered > after, 2 * hits / (predicted + hits[-1]), 0.0)
        middle = (ordered + after) / 2
        # The second term only breaks ties, up to 30,000 texts: F1 differs by at least 1 / (2 n^2).
        best = (f1 - 1e-9 * np.abs(middle - USUAL_THRESHOLD)).argmax()
        usual = column > USUAL_THRESHOLD
        usual_f1 = 2 * (has_label * usual).sum() / max(1, has_label.sum() + usual.sum())
        threshold = USUAL_THRESHOLD
        if f1[best] > usual_f1:
            threshold = float(middle[best])
        thresholds.append(threshold)
    return thresholds


def scores_of_labels(labels: Array, predictions: Array) -> list[list[float]]:
    """Return five columns [L] for labels [n, L]: texts, predictions, precision, recall and F1; 0 where undefined."""
    from sklearn.metrics import precision_recall_fscore_support

    *ratios, texts = precision_recall_fscore_support(labels, predictions, zero_division=0)
    return [column.tolist() for column in (texts, predictions.sum(0), *ratios)]


def several_samples(labels: Array, predictions: Array, examples: Examples) -> dict[str, Sample]:
    """Return micro and macro F1 of predictions [n, L]; a label that no text has and none gets counts for neither."""
    hits = 2 * (labels & predictions)
    occurs = labels + predictions.astype(np.int8)
    is_used: Array = np.array(occurs.any(0))
    # Without any label in texts and answers the macro F1 is 0, not undefined.
    is_used[0] |= not is_used.any()
    return {
        "micro_f1": sample_of(examples, "ratio", hits.sum(1), occurs.sum(1)),
        "macro_f1": sample_of(examples, "ratio", *hits.T[is_used], *occurs.T[is_used]),
    }


def softmax(logits: Floats, axis: int = -1) -> Floats:
    """Return the probabilities of labels of which a text has one."""
    values: Floats = np.exp(logits - logits.max(axis, keepdims=True))
    values /= values.sum(axis, keepdims=True)
    return values


def expit(logits: Floats) -> Floats:
    """Return the probabilities of labels of which a text may have several."""
    # 1 / (1 + exp(-x)) without an overflow for large negative logits.
    values: Floats = np.exp(-np.logaddexp(0, -logits))
    return values


def confidences(logits: Floats, temperature: float = 1.0) -> Floats:
    """Return the probability of the most probable label of each text [n]."""
    highest: Floats = softmax(logits / np.float32(temperature), 1).max(1)
    return highest


def best_temperature(logits: Floats, labels: Array) -> float:
    """Return the temperature with the least mean cross entropy of labels [n]; 1 for few texts or without an error.

    A trained classifier is too sure of itself. Dividing its logits by one number makes a label of probability 0.8 right
    four times of five, and changes no answer (Guo et al. 2017, "On Calibration of Modern Neural Networks").
    """
    if len(labels) < LEAST or (logits.argmax(1) == labels).all():
        return 1.0
    from scipy.optimize import minimize_scalar
    from scipy.special import logsumexp

    def loss(logarithm: float) -> float:
        scaled = logits.astype(np.float64) / np.exp(logarithm)
        return float(np.mean(logsumexp(scaled, 1) - scaled[np.arange(len(labels)), labels]))

    optimum = minimize_scalar(loss, bounds=BOUNDS, method="bounded", options={"xatol": 1e-9})
    return float(np.exp(optimum.x))


def calibration_error(probability: Floats, is_right: Array) -> float:
    """Return how far the mean probability and the accuracy of a bin are apart: the root of the mean square over texts.

    A bin of a few texts has a gap by chance, whose mean square is subtracted: otherwise no model would be calibrated
    (Kumar et al. 2019, "Verified Uncertainty Calibration", section 4). A bin of one text says nothing.
    """
    # The upper end of a bin belongs to it, and 0 to the first.
    bins = np.clip(np.ceil(probability * BINS).astype(int) - 1, 0, BINS - 1)
    columns = (np.bincount(bins, weights, BINS) for weights in (None, is_right, probability))
    table = np.stack([*columns])
    sizes, right, sums = table[:, table[0] > 1]
    accuracy = right / sizes
    # The variance of an accuracy of so many texts.
    chance = accuracy * (1.0 - accuracy) / (sizes - 1)
    squares = sizes * (np.square(accuracy - sums / sizes) - chance)
    return float(np.sqrt(max(0.0, squares.sum() / max(1, sizes.sum()))))


def kept_decision(decision: Decision, logits: Floats, labels: Array) -> Decision:
    """Return the decision, or none where the temperature does not lower the error of texts that did not choose it."""
    after, before = _errors(decision, logits, labels)
    if after < before:
        return decision
    return Decision()


def describe_calibration(decision: Decision, logits: Floats, labels: Array) -> str:
    """Return the calibration errors of answers at a temperature and without, and how many are answered how well."""
    after, before = _errors(decision, logits, labels)
    first = f"calibration error {after:.4f} at temperature {decision.temperature:.4f}"
    if len(labels) < LEAST:
        return f"{first}; n {len(labels):,}"
    lines = [f"{first}, {before:.4f} without; n {len(labels):,}", "none below  answered  accuracy"]
    probability = confidences(logits, decision.temperature)
    is_right = logits.argmax(1) == labels
    for level in LEVELS:
        answered = probability >= level
        if answered.any():
            accuracy = is_right[answered].mean()
            lines.append(f"{level:10.2f}  {answered.mean():8.1%}  {accuracy:8.4f}")
    return "\n".join(lines)


def _errors(decision: Decision, logits: Floats, labels: Array) -> list[float]:
    """Return the calibration errors with the temperature and without."""
    is_right = logits.argmax(1) == labels
    return [
        calibration_error(confidences(logits, temperature), is_right)
        for temperature in (decision.temperature, 1.0)
    ]
