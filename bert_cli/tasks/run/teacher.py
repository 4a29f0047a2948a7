"""The outputs of a teacher, a trained model, as columns of the training examples (`distillation`).

Soft labels of a task and vectors of texts are computed once, before the first step, without dropout. Replicas, stages,
processes and a resumed run read them like labels. The fingerprint of the examples has the teacher's weights.

Shapes: n examples, T tokens of all examples, L labels, D size of a vector.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from bert_cli.arrays import Floats32
from bert_cli.config.embed import EmbedSettings
from bert_cli.config.finetune import TaskSettings
from bert_cli.config.training import TrainSettings
from bert_cli.config.use import PredictSettings
from bert_cli.data.finetune.embeddings import unit_vectors
from bert_cli.data.finetune.features import Features, cached, texts_hash
from bert_cli.data.tokens.tokenizer import TextTokenizer
from bert_cli.errors import ConfigError, logger
from bert_cli.parallel.group import ProcessGroup
from bert_cli.processes import print_line
from bert_cli.tasks.model import models
from bert_cli.tasks.model.opened import Input, Predictor, labels_of, open_model, task_of
from bert_cli.tasks.model.vectors import BATCH, Embedding, open_vectors
from bert_cli.tasks.run.task import Learn, Task
from bert_cli.text import count
from bert_cli.train.loop import Step

# Most vectors in a file of the cache, on average; an interrupted command computes about as many again.
STORED_AT_ONCE = 64 * BATCH


def find_labels(order: TaskSettings, tokenizer: TextTokenizer, task: Task) -> Learn:
    """Return what adds the outputs of the teacher of a task with labels.

    Raises ConfigError for a teacher of another task, with other labels, another vocabulary or too few positions.
    """
    distillation = order.distillation
    source = models.find_source(str(distillation.teacher), "--distillation.teacher")
    where = f"distillation.teacher ({source.folder})"
    problem = models.labels_problem(source, several=task.has_several_labels)
    if task_of(source, None) != order.head.task:
        problem = f"is a {source.architecture}, not a model for {order.head.task}"
    elif labels_of(source) != task.labels:
        problem = f"has {labels_of(source)} outputs, and the task {task.labels}"
    if problem:
        raise ConfigError(where, problem, "use a model that was trained for the task")
    if models.read_tokenizer_for(source.config, source.tokenizer).pieces != tokenizer.pieces:
        remedy = "use a teacher with the vocabulary of the model"
        raise ConfigError(where, "has another vocabulary than the model", remedy)
    positions = source.config.max_position_embeddings
    if positions < order.max_seq_length:
        raise ConfigError(where, f"reads at most {positions} tokens", "lower max_seq_length")
    if distillation.unlabelled_file is not None and task.train_unlabelled is None:
        problem = "is only for `bert classify` and for tasks of `bert glue` whose texts are columns"
        raise ConfigError("distillation.unlabelled_file", problem, "leave it out")
    outputs = label_order(source, task.label_names) or range(task.labels)
    logger.info(f"run: learns from the outputs of {source.folder}")
    return lambda _: _with_labels(order, tokenizer, task, source, outputs)


def _with_labels(
    order: TaskSettings,
    tokenizer: TextTokenizer,
    task: Task,
    source: models.Source,
    outputs: Sequence[int],
) -> Task:
    """Return the task with `outputs` of the teacher on its training examples."""
    examples = task.train
    assert examples is not None
    distillation = order.distillation
    weights = source.fingerprint

    def taught(part: Features, weight: float) -> Features:
        """Return examples with the teacher's outputs as columns, and as labels if they have none."""
        made_from = {"teacher": weights, "examples": part.fingerprint}
        build = partial(_logits, order, source, tokenizer, part)
        logits = cached(order.cache_dir, made_from, build)["logits"][:, outputs]
        numbers = {"weight": weight, "temperature": distillation.temperature}
        columns = {f"teacher_{n}": np.full(len(part), v, np.float32) for n, v in numbers.items()}
        if task.train_unlabelled is not None:
            is_labelled = part is not task.train_unlabelled
            columns["is_labelled"] = np.full(len(part), is_labelled, np.float32)
        labels = {**part.labels, **columns}
        if order.head.is_per_position:
            positions = {**part.position_labels, "teacher_logits": logits}
            return replace(part, labels=labels, position_labels=positions)
        if task.labels == 1:
            predicted = logits[:, 0]
        else:
            predicted = logits.argmax(1).astype(np.int32)
        if task.has_several_labels:
            predicted = (logits > 0.0).astype(np.int8)
        return replace(part, labels={"labels": predicted, **labels, "teacher_logits": logits})

    origin = f"{examples.fingerprint}, teacher {weights}"
    origin += f", weight {distillation.logits}, temperature {distillation.temperature}"
    train = taught(examples, distillation.logits)
    if task.train_unlabelled is not None:
        train = train.followed_by(taught(task.train_unlabelled, 1.0))
        origin += f", unlabelled {task.train_unlabelled.fingerprint}"
    return replace(task, train=replace(train, origin=origin))


def label_order(source: models.Source, names: Sequence[str] | None) -> list[int] | None:
    """Return the model's output for each label of the task; None if the order is the same.

    Labels without names are assumed to be in the task's order, which is printed.
    """
    model_names = source.label_names
    if names is None or model_names == tuple(names):
        return None
    if model_names is None or model_names == tuple(
        f"LABEL_{number}" for number in range(len(names))
    ):
        assumed = f"have no names; assumed to be in this order: {', '.join(names)}"
        logger.info(f"run: the labels of {source.folder} {assumed}")
        return None
    if sorted(model_names) != sorted(names):
        where = f"{source.where} (labels {', '.join(model_names)})"
        problem = f"are not the labels of this task ({', '.join(names)})"
        raise ConfigError(where, problem, "use a model that was trained for the task")
    logger.info(f"run: the labels of {source.folder} are in another order; they are reordered")
    return [model_names.index(name) for name in names]


def _logits(
    order: TrainSettings, source: models.Source, tokenizer: TextTokenizer, examples: Features
) -> dict[str, Floats32]:
    """Return the teacher's `logits` [n, L], or [T, L] of positions."""
    print_line(f"teacher: reads {len(examples):,} examples")
    reading = PredictSettings(model=str(source.folder), batch_size=BATCH)
    model = open_model(source, order.head.task)
    predictor = Predictor(model, tokenizer, reading, order.max_seq_length)
    names = [f"example {number} of the teacher" for number in range(len(examples))]
    return {"logits": predictor.of_examples(examples, names)}


def find_vectors(settings: EmbedSettings, texts: Sequence[str], task: Task) -> Learn:
    """Return what adds the teacher's vectors of the training texts.

    Raises CheckpointError without the teacher, ConfigError for one that is not supported.
    """
    source = models.find_source(str(settings.distillation.teacher), "--distillation.teacher")
    predictor = open_vectors(source, normalize=True)
    logger.info(f"run: learns the vectors of {source.folder}")
    return partial(_with_vectors, settings, texts, task, predictor)


def _with_vectors(
    settings: EmbedSettings,
    texts: Sequence[str],
    task: Task,
    predictor: Embedding,
    group: ProcessGroup,
) -> Task:
    """Return the task with `teacher_vectors` [n, D] of its texts, D the student's size; the processes divide the texts.

    Raises DataError if the cache cannot be written, DeviceError for vectors that are not finite.
    """
    source = predictor.model.source
    pooling = predictor.settings.pooling
    length = predictor.max_seq_length
    described = source.fingerprint, predictor.tokenizer.fingerprint, pooling, length
    teacher = hashlib.sha256(repr(described).encode()).hexdigest()[:16]
    vectors = _vectors_of(texts, predictor, settings.cache_dir, teacher, group)
    assert task.train is not None
    columns = {"teacher_vectors": unit_vectors(_resized(vectors, task.labels))}
    origin = f"{task.train.fingerprint}, teacher {teacher}"
    train = replace(task.train, labels=columns, origin=origin)
    return replace(task, train=train, prepare=Step.prepare)


def _vectors_of(
    texts: Sequence[str],
    predictor: Embedding,
    cache_dir: Path | None,
    teacher: str,
    group: ProcessGroup,
) -> Floats32:
    """Return the vector [n, D] of each text; each process caches the vectors that it computes."""
    parts = _parts_of(texts)
    rows = {text: row for row, text in enumerate(chain.from_iterable(parts))}
    print_line(f"teacher: reads {count(len(rows), 'text')}, those of its cache not again")
    vectors = np.zeros((len(rows), predictor.model.source.config.hidden_size), np.float32)
    for first in range(0, len(parts), group.world_size):
        at_once = parts[first : first + group.world_size]  # a part for each process
        for part in at_once[group.rank : group.rank + 1]:
            inputs = [Input("distillation.teacher", {"text": text}) for text in part]
            predictor.progress.move(rows[part[0]], len(part), len(rows))
            made_from = {"teacher": teacher, "texts": texts_hash(part)}
            arrays = cached(cache_dir, made_from, partial(_vectors, predictor, inputs))
            vectors[rows[part[0]] : rows[part[-1]] + 1] = arrays["vectors"]
        computed = slice(rows[at_once[0][0]], rows[at_once[-1][-1]] + 1)
        vectors[computed] = group.all_reduce(vectors[computed])
    return vectors[[rows[text] for text in texts]]


def _parts_of(texts: Sequence[str]) -> list[list[str]]:
    """Return the different texts in parts by the first bits of their hashes, so that one more text changes one part."""
    different = sorted(set(texts))
    # Parts of about STORED_AT_ONCE texts, or of down to half as many.
    bits = (len(different) // STORED_AT_ONCE).bit_length()
    parts: dict[int, list[str]] = {}
    for text in different:
        start = bytes.fromhex(texts_hash([text])[:8])
        parts.setdefault(int.from_bytes(start) >> (32 - bits), []).append(text)
    return [parts[number] for number in sorted(parts)]


def _vectors(predictor: Embedding, inputs: Sequence[Input]) -> dict[str, Floats32]:
    return {"vectors": predictor.of_texts(inputs)[0]}


def _resized(vectors: Floats32, size: int) -> Floats32:
    """Return vectors [n, size]: longer ones on their first principal axes, shorter ones followed by zeros."""
    if size < vectors.shape[1]:
        # Axes through the origin, so that inner products change least.
        # [D, D], summed in float64 over all texts.
        axes = np.linalg.eigh(np.float64(vectors.T) @ vectors)[1][:, : -size - 1 : -1]
        # The sign of an axis is arbitrary: the largest of its values becomes positive.
        signs = np.sign(np.take_along_axis(axes, np.abs(axes).argmax(axis=0)[None], 0))
        vectors = vectors @ np.float32(axes * signs)
    return np.pad(vectors, ((0, 0), (0, size - vectors.shape[1])))
