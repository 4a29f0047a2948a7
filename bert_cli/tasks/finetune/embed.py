"""`bert embed`: vectors of texts, trained on pairs of similar texts, on texts alone or by a teacher, and scored.

The contrastive loss needs the vectors of the complete batch, so each step of several micro-batches begins with a
forward pass of all (`Engine.forward`) and computes, on the host, the loss and its gradient with respect to the
vectors. The update that follows has the gradients of the complete batch in the memory of one micro-batch (gradient
caching). Shapes: n rows of G texts each, D size of a vector.
"""

import sqlite3
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import logsumexp, softmax

from bert_cli.config.embed import EmbedSettings
from bert_cli.data.finetune import embeddings
from bert_cli.data.finetune.features import PackReader, TextReader
from bert_cli.data.finetune.simple import bm25
from bert_cli.data.finetune.tables import TextExamples, held_out_rows, samples_of
from bert_cli.data.tokens.tokenizer import TextTokenizer
from bert_cli.errors import ConfigError
from bert_cli.parallel.engine import Batch, Engine, UpdateRequest
from bert_cli.processes import print_line
from bert_cli.statistics import Sample, identify
from bert_cli.tasks.finetune.texts import features_of_texts
from bert_cli.tasks.run import finetune, models
from bert_cli.tasks.run.task import Floats, Logits, Result, Task
from bert_cli.tasks.run.teacher import with_vectors

BM25_PAIRS = 4_000_000  # of a query and a document: each takes up to two microseconds
FEWEST = 100  # queries of many that stand for all
ROWS = 1024  # anchors whose scores are computed at once: 4 kB for each candidate


def run(settings: EmbedSettings) -> None:
    """Train vectors of texts and score them; raises the errors of `finetune.run`."""
    if settings.generated_dataset:
        raise ConfigError("generated_dataset", "is not for `bert embed`", "leave it out")
    is_scored = settings.validation_file or settings.retrieval_file
    if settings.do_validation and not is_scored and len(settings.columns) == 1:
        remedy = "pass --validation-file or --retrieval-file, or --no-do-validation"
        raise ConfigError("do_validation", "has nothing to score on without pairs", remedy)
    needs_texts = settings.do_training or not is_scored
    finetune.run(settings, build, ("train_file",) if needs_texts else ())


def build(settings: EmbedSettings, tokenizer: TextTokenizer, source: models.Source | None) -> Task:
    """Return the task: the training texts, and the validation texts with their judgements."""
    file = settings.train_file
    is_scored = settings.do_validation
    hidden_size = settings.bert_config.hidden_size
    if (longest := max(settings.prefixes, default=0)) > hidden_size:
        problem = f"is more than the {hidden_size} values of the model's vectors"
        raise ConfigError(f"matryoshka ({longest})", problem, f"leave {longest} out")
    rows = embeddings.read_texts(file, settings.columns) if file else []
    texts: dict[str, Sequence[str]] = {}
    judged = retrieval = None
    if is_scored and settings.validation_file is not None:
        columns = settings.validation_column
        pairs, judged = embeddings.read_similarities(settings.validation_file, columns)
        texts["first"], texts["second"] = zip(*pairs, strict=True)
    if is_scored and settings.retrieval_file is not None:
        retrieval = embeddings.read_retrieval(settings.retrieval_file)
    is_split = is_scored and judged is None and retrieval is None
    if is_split:
        held = held_out_rows(np.zeros(len(rows), int), settings.held_out_fraction, settings.seed)
        retrieval = embeddings.retrieval_of_pairs([rows[n] for n in np.flatnonzero(held)])
        rows = [rows[n] for n in np.flatnonzero(~held)]
    if retrieval is not None:
        texts |= {"queries": retrieval.queries, "documents": retrieval.documents}
    if settings.do_training:
        times = settings.texts_per_example // len(settings.columns)  # twice for SimCSE
        texts["train"] = [text for row in rows for text in row * times]
    sets = {
        name: features_of_texts(
            TextExamples(list(column), None, None, [], None), name, settings, tokenizer, "texts"
        )
        for name, column in texts.items()
    }

    def evaluate(logits: Logits) -> Result:
        samples: dict[str, Sample] = {}
        for size in (hidden_size, *settings.prefixes):
            vectors = {name: complete[:, :size] for name, complete in logits.items()}
            of_size: dict[str, Sample] = {}
            if judged is not None:
                cosines = embeddings.cosines(vectors["first"], vectors["second"])
                of_size |= samples_of(["spearman"], judged, cosines, identify(pairs))
            if retrieval is not None:
                rankings = embeddings.ranked(vectors["queries"], vectors["documents"])
                of_size |= embeddings.retrieval_samples(rankings, retrieval)
            suffix = "" if size == hidden_size else f"_dim{size}"
            samples |= {f"{name}{suffix}": sample for name, sample in of_size.items()}
        return Result(samples)

    size = settings.global_batch.examples
    is_one = size == settings.global_batch.micro_batch_size <= ROWS
    # The vector of [CLS] needs a text at the start of each row.
    is_packed = settings.pooling == "mean"
    sizes = (hidden_size, *settings.prefixes)
    contrast = Contrast(size, settings.texts_per_example, settings.temperature, sizes)
    has_teacher = settings.distillation.teacher is not None
    return Task(
        labels=hidden_size,
        label_names=None,
        train=sets.pop("train", None),
        development=sets,
        evaluate=evaluate,
        best="ndcg_10" if judged is None else "spearman",
        prepare=partial(add_candidates if is_packed and is_one else add_gradients, contrast),
        reader=PackReader if is_packed else TextReader,
        digits=4,
        held_out="" if retrieval is None else retrieval.examples.digest,
        baselines=partial(_baselines, retrieval),
        teach=partial(with_vectors, settings, texts=texts["train"]) if has_teacher else None,
        halves=is_split,
    )


def _baselines(retrieval: embeddings.Retrieval | None) -> dict[str, Result]:
    """Return the result of BM25, of so many queries as it ranks in a few seconds; nothing for similarities."""
    if retrieval is None:
        return {}
    queries = retrieval.queries
    every = -(-len(queries) * len(retrieval.documents) // BM25_PAIRS)
    if every > 1 and len(queries) < FEWEST * every:
        print_line("baseline, BM25: left out, it takes too long")
        return {}
    try:
        best = bm25(queries[::every], retrieval.documents)
    except sqlite3.OperationalError as error:  # this SQLite has no FTS5
        print_line(f"baseline, BM25: left out ({error})")
        return {}
    rankings = [None if n % every else best[n // every] for n in range(len(queries))]
    name = "BM25" if every == 1 else f"BM25 of {len(best):,} queries"
    return {name: Result(embeddings.retrieval_samples(rankings, retrieval))}


class Contrast(NamedTuple):
    """What the contrastive loss of a batch depends on besides its texts."""

    rows: int
    """Rows n of a batch."""
    texts: int
    """Texts G of a row."""
    temperature: float
    sizes: tuple[int, ...]
    """The size of the vectors, and the smaller sizes to which they can be shortened."""


def add_candidates(
    contrast: Contrast, engine: Engine, batch: Batch, request: UpdateRequest
) -> Batch:
    """Return the batch of one micro-batch with the order of its texts, and the candidates of each row."""
    order = np.argsort(batch["text_index"], axis=1, kind="stable").astype(np.int32)
    slots = order[:, -contrast.rows * contrast.texts :]
    texts = np.take_along_axis(batch["text_numbers"], slots, 1).reshape(-1, contrast.texts)
    columns = {
        "text_slots": slots,
        "is_left_out": _left_out(texts, np.arange(len(texts)))[None],
        "temperature": np.full(1, contrast.temperature, np.float32),
    }
    if len(contrast.sizes) > 1:
        sizes = np.array(contrast.sizes)
        columns["is_in_prefix"] = (np.arange(sizes[0]) < sizes[:, None])[None]
    return {**batch, **columns}


def _left_out(
    texts: npt.NDArray[np.integer[Any]], rows: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Return a mask [rows, n * (G - 1)] of the candidates that are not negatives of some of the rows [n, G].

    Their text equals the row's anchor or positive.
    """
    candidates = texts[:, 1:].reshape(-1)
    left_out = (candidates == texts[rows, :1]) | (candidates == texts[rows, 1:2])
    left_out[np.arange(len(rows)), rows * (texts.shape[1] - 1)] = False
    return left_out


def add_gradients(
    contrast: Contrast, engine: Engine, batch: Batch, request: UpdateRequest
) -> Batch:
    """Return the batch with the loss of each row and the gradient with respect to each vector."""
    vectors = engine.forward(batch, request)
    index = batch["text_index"]
    is_text = index >= 0
    # Every process computes the loss of all texts.
    number_of_texts = contrast.rows * contrast.texts
    everywhere = np.zeros((number_of_texts, vectors.shape[2] + 1))
    everywhere[index[is_text], :-1] = vectors[is_text]
    everywhere[index[is_text], -1] = batch["text_numbers"][is_text]
    rows = engine.group.all_reduce(everywhere)
    rows = rows.reshape(-1, contrast.texts, rows.shape[-1])
    texts = rows[:, :, -1].astype(np.int64)
    complete = rows[:, :, :-1].astype(np.float32)
    temperature = contrast.temperature
    losses, is_correct, vector_gradients = contrastive_loss(complete, texts, temperature)
    for size in contrast.sizes[1:]:
        prefixes = complete[:, :, :size]
        more, _, gradients_of_prefix = contrastive_loss(prefixes, texts, temperature)
        losses += more
        vector_gradients[:, :, :size] += gradients_of_prefix
    columns = {
        # Each text gets the loss of its row, so that the mean over texts equals the mean over rows.
        "losses": np.repeat(losses, texts.shape[1]),
        "is_correct": np.repeat(is_correct, texts.shape[1]),
        "vector_gradients": vector_gradients.reshape(number_of_texts, -1),
    }
    # Index -1, of no text, reads the zeros at the end.
    gradients = {
        name: np.concatenate([column, np.zeros_like(column[:1])])[index]
        for name, column in columns.items()
    }
    return {**batch, **gradients}


def contrastive_loss(
    vectors: Floats, texts: npt.NDArray[np.int64], temperature: float
) -> tuple[Floats, Floats, Floats]:
    """Return the InfoNCE loss (van den Oord et al. 2018, equation 4) of vectors [n, G, D].

    A row is an anchor, its positive and hard negatives. The scores of an anchor are its cosines, over the temperature,
    with the positives and hard negatives of all rows; the loss [n] is their cross entropy with its own positive. Also
    returned: whether the positive alone has the highest score [n], and the gradient of the mean loss with respect to
    the vectors. `texts` [n, G] numbers the texts: candidates equal to the anchor or its positive are not used as
    negatives.
    """
    n, _, size = vectors.shape
    lengths = np.maximum(np.linalg.norm(vectors, axis=2, keepdims=True), 1e-12)
    units = vectors / lengths
    anchors = units[:, 0]
    candidates = units[:, 1:].reshape(-1, size)
    losses = np.empty(n, np.float32)
    is_correct = np.empty(n, np.float32)
    gradients = np.empty_like(units)
    of_candidates = np.zeros_like(candidates)
    for first in range(0, n, ROWS):
        rows = np.arange(first, min(first + ROWS, n))
        positive = rows - first, rows * (vectors.shape[1] - 1)  # the score of the positive
        scores = anchors[rows] @ candidates.T / np.float32(temperature)
        scores[_left_out(texts, rows)] = -np.inf
        is_correct[rows] = (scores >= scores[positive][:, None]).sum(1) == 1
        losses[rows] = logsumexp(scores, axis=1) - scores[positive]
        changes = softmax(scores, axis=1)  # the gradient of a row's loss with respect to its scores
        changes[positive] -= 1.0
        changes /= np.float32(n * temperature)
        gradients[rows, 0] = changes @ candidates
        of_candidates += changes.T @ anchors[rows]
    gradients[:, 1:] = of_candidates.reshape(n, -1, size)
    # A vector's length does not matter, so its gradient is orthogonal to it.
    gradients -= (gradients * units).sum(2, keepdims=True) * units
    return losses, is_correct, gradients / lengths
