"""Labels of few texts: `bert classify --few`.

Pairs of texts with the same label train the vectors of the start: the first text of a pair must pick out the second
among texts with other labels (as SetFit of Tunstall et al. 2022, with the loss of `bert embed`). Logistic regression on
the trained vectors of all training texts is the classifier. It is computed before the model is scored, so it is a
function of the other weights. Shapes: n texts, L labels, D hidden size.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial

import numpy as np

from bert_cli.arrays import Array, Floats32, Ints64
from bert_cli.config.finetune import ClassifySettings
from bert_cli.data.finetune.features import Features
from bert_cli.data.finetune.readers import PackReader
from bert_cli.data.finetune.simple import unit_scale
from bert_cli.errors import ConfigError, DataError
from bert_cli.facts.architectures import ARCHITECTURES
from bert_cli.facts.heads import MEAN_CLASSIFICATION
from bert_cli.model.build import named_weights
from bert_cli.parallel.engine import Value
from bert_cli.tasks.finetune.contrast import Contrast, add_candidates
from bert_cli.tasks.model import models
from bert_cli.tasks.model.vectors import Embedding, open_vectors
from bert_cli.tasks.run.task import Task

PAIRS = 320
TEMPERATURE = 0.05


def of_pairs(task: Task, settings: ClassifySettings, source: models.Source | None) -> Task:
    """Return the task with pairs for training. Raises ConfigError or DataError where there can be none."""
    train = task.train
    if train is None:
        return task
    # The class that an export has for PyTorch is of BERT, whose classes have no prefix.
    if source is None or ARCHITECTURES[source.config.architecture].hf_prefix:
        remedy = "pass --pretrained-ckpt-path of a BERT, or do not pass --few"
        raise ConfigError("few", "needs the vectors of a trained BERT", remedy)
    size = settings.global_batch.micro_batch_size
    if task.has_several_labels:
        raise ConfigError("few", "learns one label of a text, not several", "do not pass --few")
    if size != settings.global_batch.examples:
        remedy = "do not set replicas and grad_acc_steps_per_replica"
        raise ConfigError("few", "needs all pairs of a step in one micro-batch", remedy)
    contrast = Contrast(size, 2, TEMPERATURE, (settings.bert_config.hidden_size,))
    pairs_of(train.labels["labels"], settings.seed)  # raises before the model is built
    return replace(
        task,
        draw=draw,
        reader=PackReader,
        prepare=partial(add_candidates, contrast),
        fit=partial(fit, cache(partial(_vectors_of, source))),
    )


def draw(train: Features, seed: int) -> Features:
    """Return pairs of the training texts."""
    pairs = train.take(pairs_of(train.labels["labels"], seed))
    # As numbers of texts, because texts with the same label are no negatives of one another.
    return replace(pairs, labels={"text_numbers": pairs.labels["labels"]})


def pairs_of(labels: Array, seed: int) -> Ints64:
    """Return the numbers of texts [2 * PAIRS]: pairs of one label, where the texts come about equally often.

    Raises DataError if no label has two texts.
    """
    drawn = np.random.default_rng(seed)
    rows = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    sizes = [len(row) // 2 * 2 for row in rows]
    if not any(sizes):
        problem = "no label has two texts, and pairs of one label train the vectors"
        raise DataError("train_file", problem, "add texts, or do not pass --few")
    turns = []
    for _ in range(-(-2 * PAIRS // sum(sizes))):
        turn = [drawn.permutation(row)[:size] for row, size in zip(rows, sizes, strict=True)]
        turns.append(drawn.permutation(np.concatenate(turn).reshape(-1, 2)))
    return np.concatenate(turns)[:PAIRS].reshape(-1)


def _vectors_of(source: models.Source) -> Embedding:
    predictor = open_vectors(source, warns=False)
    mean = predictor.settings.model_copy(update={"pooling": "mean"})
    return replace(predictor, settings=mean)


def fit(opened: Callable[[], Embedding], train: Features, weights: Mapping[str, Value]) -> None:
    """Set the classifier to the `regression` on the vectors of the training texts by the encoder of `weights`.

    A model is `opened` once for all folds, since each model takes memory and is traced anew.
    """
    predictor = opened()
    for name, weight in named_weights(predictor.model.blocks).items():
        weight.assign(weights[name].numpy())
    vectors = predictor.of_examples(train, ["train_file"] * len(train))
    for name, value in regression(vectors, train.labels["labels"]).items():
        weights[f"{MEAN_CLASSIFICATION.name}/classifier/{name}"].assign(value)


def regression(vectors: Array, labels: Array) -> dict[str, Floats32]:
    """Return `kernel` [D, L] and `bias` [L] of logistic regression on vectors [n, D], scaled to the mean square 1."""
    from sklearn.linear_model import LogisticRegression  # takes a second
    from threadpoolctl import threadpool_limits

    # The penalty of the regression depends on the scale of its inputs.
    scale = unit_scale(vectors)
    with threadpool_limits(1):
        method = LogisticRegression(max_iter=1000).fit(scale * vectors, labels)
    values = {"kernel": scale * method.coef_.T, "bias": method.intercept_}
    if len(values["bias"]) == 1:  # of two labels
        # Scikit-learn has one logit for two labels; the head has two, whose difference it is.
        values = {name: np.concatenate([-side, side], -1) / 2 for name, side in values.items()}
    return {name: value.astype(np.float32) for name, value in values.items()}
