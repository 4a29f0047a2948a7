"""Labels of few texts: `bert classify --few`.

Pairs of texts with the same label train the vectors of the start: the first text of a pair must pick out the second
among texts with other labels (supervised contrast, as in SetFit of Tunstall et al. 2022, with the loss of `bert
embed`). Logistic regression on the trained vectors of all training texts is the classifier. It is computed before the
model is saved and scored, so it is a function of the other weights. Shapes: n texts, L labels, D hidden size.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from bert_cli.config.finetune import ClassifySettings
from bert_cli.data.finetune.features import Features, Numbers, PackReader
from bert_cli.errors import ConfigError, DataError
from bert_cli.facts.heads import MEAN_CLASSIFICATION
from bert_cli.model.bert import named_weights
from bert_cli.parallel.engine import Value
from bert_cli.tasks.finetune.contrast import Contrast, add_candidates
from bert_cli.tasks.run import models
from bert_cli.tasks.run.task import Task
from bert_cli.tasks.run.vectors import open_vectors

PAIRS = 320
TEMPERATURE = 0.05
CLASSIFIER = f"{MEAN_CLASSIFICATION.name}/classifier"


class LabelReader(PackReader):
    """Packed texts, whose numbers are their labels: texts with the same label are no negatives of one another."""

    FINGERPRINT_SUFFIX = ", packs of labels"

    def _text_numbers(self, examples: Numbers) -> npt.NDArray[np.int32]:
        return self.features.labels["labels"][examples].astype(np.int32)


def of_pairs(task: Task, settings: ClassifySettings, source: models.Source | None) -> Task:
    """Return the task with pairs for training. Raises ConfigError or DataError where there can be none."""
    if source is None or source.config.architecture != "bert":
        remedy = "start from a BERT with --pretrained-ckpt-path, or leave --few out"
        raise ConfigError("few", "needs the vectors of a trained BERT", remedy)
    train = task.train
    if train is None:
        return task
    labels = train.labels["labels"]
    if labels.ndim > 1:
        raise ConfigError("few", "learns one label of a text", "leave --few out")
    size = settings.global_batch.micro_batch_size
    if size != settings.global_batch.examples:
        remedy = "use one replica and no accumulation"
        raise ConfigError("few", "compares all pairs of a step in one micro-batch", remedy)
    contrast = Contrast(size, 2, TEMPERATURE, (settings.bert_config.hidden_size,))
    return replace(
        task,
        train=train.take(pairs_of(labels, settings.seed)),
        reader=LabelReader,
        prepare=partial(add_candidates, contrast),
        fit=partial(fit, source, train),
        halves=False,  # nothing is chosen
    )


def pairs_of(labels: npt.NDArray[np.generic], seed: int) -> Numbers:
    """Return the numbers of texts [2 * PAIRS]; neighbours are pairs of one label, whose texts come about equally often.

    Raises DataError if no label has two texts.
    """
    drawn = np.random.default_rng(seed)
    rows = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    rows = [of_label for of_label in rows if len(of_label) > 1]
    if not rows:
        problem = "no label has two texts, and pairs of one label train the vectors"
        raise DataError("train_file", problem, "add texts, or leave --few out")
    pairs: list[npt.NDArray[np.int64]] = []
    while sum(map(len, pairs)) < PAIRS:
        each = [drawn.permutation(row)[: len(row) // 2 * 2].reshape(-1, 2) for row in rows]
        pairs.append(drawn.permutation(np.concatenate(each)))
    return np.concatenate(pairs)[:PAIRS].reshape(-1)


def fit(source: models.Source, train: Features, weights: Mapping[str, Value]) -> None:
    """Set the classifier to logistic regression on the vectors of the training texts by the encoder of `weights`."""
    predictor = open_vectors(source, warns=False)
    mean = predictor.settings.model_copy(update={"pooling": "mean"})
    predictor = replace(predictor, settings=mean)
    for name, weight in named_weights(predictor.model.blocks).items():
        weight.assign(weights[name].numpy())
    vectors = np.zeros((len(train), source.config.hidden_size), np.float32)
    for numbers, _, (values,) in predictor.batches(train, ["train_file"] * len(train)):
        vectors[numbers] = values
    kernel, bias = regression(vectors, train.labels["labels"])
    weights[f"{CLASSIFIER}/kernel"].assign(kernel)
    weights[f"{CLASSIFIER}/bias"].assign(bias)


def regression(
    vectors: npt.NDArray[np.float32], labels: npt.NDArray[np.generic]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return kernel [D, L] and bias [L] of logistic regression on standardised vectors [n, D]; they standardise too."""
    from sklearn import linear_model, preprocessing  # takes a second
    from threadpoolctl import threadpool_limits

    scaler = preprocessing.StandardScaler()
    method = linear_model.LogisticRegression(max_iter=1000)
    with threadpool_limits(1):
        method.fit(scaler.fit_transform(vectors), labels)
    kernel, bias = method.coef_.T, method.intercept_
    if len(bias) == 1:  # of two labels
        kernel, bias = (np.concatenate([-side, side], -1) / 2 for side in (kernel, bias))
    kernel = kernel / scaler.scale_[:, None]
    return kernel.astype(np.float32), (bias - scaler.mean_ @ kernel).astype(np.float32)
