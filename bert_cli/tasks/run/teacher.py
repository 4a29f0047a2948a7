"""The soft labels of a teacher: outputs of a trained model on the training examples of a task (`distillation`).

They are computed once, without dropout, and become columns of the examples. So replicas, stages, processes and a
resumed run read them like labels. The fingerprint of the examples has the teacher's weights and the settings.

Shapes: n examples, T tokens of all examples, L labels.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from bert_cli.config.finetune import TaskSettings
from bert_cli.config.use import PredictSettings
from bert_cli.data.finetune.features import Features, cached
from bert_cli.data.records.tokenizer import TextTokenizer
from bert_cli.errors import ConfigError
from bert_cli.tasks.run import models
from bert_cli.tasks.run.task import Task
from bert_cli.tasks.use.model import Predictor, labels_of, open_model, task_of
from bert_cli.train.metrics import print_line

BATCH = 32
"""Examples that the teacher reads at once."""


def with_teacher(
    settings: TaskSettings,
    task: Task,
    tokenizer: TextTokenizer,
    label_order: Callable[[models.Source, Sequence[str] | None], list[int] | None],
) -> Task:
    """Return the task with the teacher's outputs on its training examples, if there is a teacher.

    `label_order` returns the output of a model for each label of the task. Raises ConfigError for a teacher of another
    task, with other labels, another vocabulary or too few positions.
    """
    distillation = settings.distillation
    name = distillation.teacher
    examples = task.train
    if name is None or examples is None:
        return task
    source = models.find_source(name, "--distillation.teacher")
    where = f"distillation.teacher ({source.folder})"
    if task_of(source, None) != settings.head.task:
        problem = f"is a {source.architecture}, not a model for {settings.head.task}"
        raise ConfigError(where, problem, "give a model that was trained for the task")
    if labels_of(source) != task.labels:
        problem = f"has {labels_of(source)} outputs, and the task {task.labels}"
        raise ConfigError(where, problem, "give a model that was trained for the task")
    if models.read_tokenizer_for(source.config, source.folder).pieces != tokenizer.pieces:
        remedy = "give a teacher with the vocabulary of the model"
        raise ConfigError(where, "has another vocabulary than the model", remedy)
    if (positions := source.config.max_position_embeddings) < settings.max_seq_length:
        raise ConfigError(where, f"reads at most {positions} tokens", "lower max_seq_length")
    order = label_order(source, task.label_names)
    digest = hashlib.sha256()
    for tensor, values in sorted(source.tensors().items()):
        digest.update(tensor.encode() + np.ascontiguousarray(values).tobytes())
    weights = digest.hexdigest()[:16]
    print_line(f"run: learns from the outputs of {source.folder}")

    def taught(part: Features, weight: float) -> Features:
        """Return examples with the teacher's outputs as columns, and as labels if they have none."""
        made_from = {"teacher": weights, "examples": part.fingerprint, "order": order}

        def build() -> dict[str, npt.NDArray[Any]]:
            logits = _logits(settings, source, tokenizer, part)
            return {"logits": logits if order is None else logits[:, order]}

        logits = cached(settings.cache_dir, made_from, build)["logits"]
        numbers = {"weight": weight, "temperature": distillation.temperature}
        labels = {
            **part.labels,
            **{f"teacher_{n}": np.full(len(part), v, np.float32) for n, v in numbers.items()},
        }
        if settings.head.is_per_position:
            positions = {**part.position_labels, "teacher_logits": logits}
            return replace(part, labels=labels, position_labels=positions)
        predicted = logits[:, 0] if task.labels == 1 else logits.argmax(1).astype(np.int32)
        return replace(part, labels={"labels": predicted, **labels, "teacher_logits": logits})

    described = [f"teacher {weights}", f"weight {distillation.logits}"]
    described += [f"temperature {distillation.temperature}"]
    train = taught(examples, distillation.logits)
    if (more := task.train_unlabelled) is not None:
        train = train.followed_by(taught(more, 1.0))
        described += [f"unlabelled {more.fingerprint}"]
    origin = ", ".join([examples.fingerprint, *described])
    return replace(task, train=replace(train, origin=origin))


def _logits(
    settings: TaskSettings, source: models.Source, tokenizer: TextTokenizer, examples: Features
) -> npt.NDArray[np.float32]:
    """Return the teacher's logits [n, L], or [T, L] of positions."""
    reading = PredictSettings(model=str(source.folder), batch_size=BATCH)
    model = open_model(source, settings.head.task)
    predictor = Predictor(model, tokenizer, reading, settings.max_seq_length)
    results: list[Any] = [None] * len(examples)
    names = [f"example {number} of the teacher" for number in range(len(examples))]
    for numbers, columns, (values,) in predictor.batches(examples, names):
        for row, number in enumerate(numbers):
            length = int(columns["input_mask"][row].sum())
            is_per_position = settings.head.is_per_position
            results[number] = values[row, :length] if is_per_position else values[row]
    joined = np.concatenate(results) if settings.head.is_per_position else np.stack(results)
    return joined.astype(np.float32)
