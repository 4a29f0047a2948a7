"""`bert embed`: vectors of texts, trained on pairs of similar texts or on texts alone, and scored.

The contrastive loss needs the vectors of the complete batch, so each step begins with a forward pass of all
micro-batches (`Engine.forward`) and computes the loss and its gradient with respect to the vectors; the update that
follows has the gradients of the complete batch in the memory of one micro-batch (gradient caching). Before the steps of
TSDAE, words are deleted from the texts. Both are functions of the seed and the step.
"""

import hashlib
from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from bert_cli.config.embed import EmbedSettings
from bert_cli.data.finetune import embeddings
from bert_cli.data.finetune.tables import TextExamples, score
from bert_cli.data.records.tokenizer import TextTokenizer
from bert_cli.errors import ConfigError
from bert_cli.model.contrastive import contrastive_loss
from bert_cli.parallel.engine import Batch, Engine, UpdateRequest
from bert_cli.tasks.finetune.texts import features_of_texts
from bert_cli.tasks.run import finetune, start
from bert_cli.tasks.run.finetune import Logits, Result, Scores, Task

DELETED = 0.6  # fraction of the words; the best of Wang et al. 2021, table 6


def run(settings: EmbedSettings) -> None:
    """Train vectors of texts and score them; see `finetune.run` for what it raises."""
    if settings.generated_dataset:
        raise ConfigError("generated_dataset", "is not for `bert embed`", "leave it out")
    is_scored = settings.validation_file or settings.retrieval_file
    if settings.do_validation and not is_scored and settings.objective != "pairs":
        remedy = "give a validation_file or a retrieval_file, or --no-do-validation"
        raise ConfigError("do_validation", "has nothing to score on without pairs", remedy)
    needs_texts = settings.do_training or not is_scored
    finetune.run(settings, build, ("train_file",) if needs_texts else ())


def build(settings: EmbedSettings, tokenizer: TextTokenizer, source: start.Source | None) -> Task:
    """Return the task: the texts to train on, and those to score on with their judgements."""
    file, is_scored = settings.train_file, settings.do_validation
    rows = embeddings.read_texts(file, settings.columns) if file else []
    texts: dict[str, Sequence[str]] = {}
    judged = retrieval = None
    if is_scored and settings.validation_file is not None:
        columns = settings.validation_column
        pairs, judged = embeddings.read_similarities(settings.validation_file, columns)
        texts["first"], texts["second"] = zip(*pairs, strict=True)
    if is_scored and settings.retrieval_file is not None:
        retrieval = embeddings.read_retrieval(settings.retrieval_file)
    elif is_scored and judged is None:
        held_out, rows = embeddings.hold_out(rows, settings.held_out_fraction, settings.seed)
        retrieval = embeddings.retrieval_of_pairs(held_out)
    if retrieval is not None:
        texts |= {"queries": retrieval.queries, "documents": retrieval.documents}
    if settings.do_training:
        times = settings.texts_per_example // len(settings.columns)  # twice for SimCSE
        texts["train"] = [text for row in rows for text in row * times]
    sets = {
        name: features_of_texts(
            TextExamples(list(own), None, None, [], None), name, settings, tokenizer
        )
        for name, own in texts.items()
    }

    def evaluate(logits: Logits) -> Result:
        scores: Scores = {}
        if judged is not None:
            cosines = embeddings.cosines(logits["first"], logits["second"])
            scores |= score(["spearman"], judged, cosines)
        if retrieval is not None:
            vectors = logits["queries"], logits["documents"]
            scores |= embeddings.retrieval_scores(*vectors, retrieval.relevant)
        return Result(scores)

    is_denoising = settings.last_blocks[-1] == "denoise_head"
    prepare = partial(delete_words, tokenizer, settings.seed)
    return Task(
        labels=settings.bert_config.hidden_size,
        label_names=None,
        train=sets.pop("train", None),
        development=sets,
        evaluate=evaluate,
        best="ndcg_10" if judged is None else "spearman",
        prepare=prepare if is_denoising else partial(add_gradients, settings),
    )


def add_gradients(
    settings: EmbedSettings, engine: Engine, batch: Batch, request: UpdateRequest
) -> Batch:
    """Return the batch with the loss of each anchor and the gradient with respect to each vector."""
    vectors, group = engine.forward(batch, request), engine.group
    ids = batch["input_ids"]
    numbers = np.array([[_text_number(row) for row in rows] for rows in ids])
    # Every process computes the loss of all texts.
    everywhere = np.zeros((group.world_size, *ids.shape[:2], vectors.shape[2] + 1))
    everywhere[group.rank] = np.concatenate([vectors, numbers[:, :, None]], 2)
    each = everywhere.shape[2:]
    rows = group.all_reduce(everywhere).reshape(-1, settings.texts_per_example, each[-1])
    texts = rows[:, :, -1].astype(np.int64)
    loss = contrastive_loss(rows[:, :, :-1].astype(np.float32), texts, settings.temperature)
    of_anchors = np.zeros((3, *texts.shape), np.float32)
    of_anchors[:, :, 0] = loss.losses, loss.is_correct, np.ones_like(loss.losses)
    shape = (group.world_size, *ids.shape[:2])
    names = ("losses", "is_correct", "is_anchor")
    columns = {n: one.reshape(shape)[group.rank] for n, one in zip(names, of_anchors, strict=True)}
    gradients = loss.gradients.reshape(*shape, -1)[group.rank]
    return {**batch, **columns, "vector_gradients": gradients}


def _text_number(ids: npt.NDArray[np.int32]) -> int:
    """Return 48 bits of a hash of the tokens, which a float64 holds exactly."""
    return int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=6).digest(), "little")


def delete_words(
    tokenizer: TextTokenizer, seed: int, engine: Engine, batch: Batch, request: UpdateRequest
) -> Batch:
    """Return the batch with words deleted from its texts, and the complete texts as targets."""
    ids, mask = batch["input_ids"], batch["input_mask"]
    special = tokenizer.special
    continues = np.array([piece.startswith("##") for piece in tokenizer.pieces])
    is_fixed = (ids == special.cls) | (ids == special.sep) | (mask == 0)
    words = np.cumsum(~continues[ids] & ~is_fixed, axis=2)  # 0 before the first word
    first = request.first_micro_batch + engine.group.rank * len(ids)
    draws = np.stack(
        [
            np.random.Generator(np.random.Philox(key=[seed, first + number])).random(ids.shape[1:])
            for number in range(len(ids))
        ]
    )
    # A word has the draw of its number; the word with the largest draw stays.
    last = words.max(axis=2, keepdims=True)
    position = np.arange(ids.shape[2])
    best = np.where((position >= 1) & (position <= last), draws, -1.0).argmax(2)[:, :, None]
    stays = np.take_along_axis(draws, words, 2) >= DELETED
    stays |= words == best
    stays = (stays & (mask > 0)) | (is_fixed & (mask > 0))
    order = np.argsort(~stays, axis=2, kind="stable")
    shortened = np.take_along_axis(stays, order, 2).astype(ids.dtype)
    return {
        **batch,
        "input_ids": np.take_along_axis(ids, order, 2) * shortened,
        "input_mask": shortened,
        "segment_ids": np.zeros_like(ids),
        "target_ids": ids,
        # [CLS] is not predicted.
        "target_weights": (mask * (position > 0)).astype(np.float32),
    }
