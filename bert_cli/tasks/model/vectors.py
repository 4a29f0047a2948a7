"""The vectors of texts by a model from disk: for `bert predict`, for teachers and for exports.

Shapes: B texts, S positions, D hidden size.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from bert_cli.arrays import Floats32
from bert_cli.config.use import PredictSettings
from bert_cli.data.finetune import embeddings
from bert_cli.errors import ConfigError, logger
from bert_cli.files import JSONObject
from bert_cli.tasks.model import models, opened
from bert_cli.tasks.model.opened import (
    Columns,
    Input,
    OpenedModel,
    Predictor,
    Row,
    exact,
    head_of,
    row_of,
)
from bert_cli.train.checkpoint import read_settings

BATCH = 32  # texts that are read at once


class Embedding(Predictor):
    """The vector of a text."""

    SETTINGS = ("pooling", "normalize", "dimensions")
    EMPTY: ClassVar[Row] = {"embedding": None}

    @classmethod
    def read_defaults(cls, source: models.Source, settings: PredictSettings) -> JSONObject:
        """Return pooling, normalization and length of the model; warn about one that fills masks, or of other sizes."""
        head = head_of(source)
        if head is not None and head.fills_masks:
            problem = "was trained to fill masks, so the similarities of its vectors hardly differ"
            remedy = "train it with `bert embed` first"
            logger.warning(f"warning: {source.folder} {problem}; {remedy}")
        check_dimensions(settings.dimensions, source)
        fixed = read_settings(source.folder).fixed
        sizes = [source.config.hidden_size, *(fixed.get("matryoshka") or [])]
        size = settings.dimensions or sizes[0]
        if "matryoshka" in fixed and size not in sizes:
            trained = ", ".join(map(str, sizes))
            problem = f"is not a size for which the vectors were trained ({trained})"
            remedy = "use one of these, or train with `bert embed --matryoshka`"
            logger.warning(f"warning: dimensions ({size}): {problem}; {remedy}")
        return embeddings.read_embedding(source.folder)

    def outputs(self, columns: Columns) -> Any:
        """Return the vectors [B, D]."""
        ops = self.model.ops
        hidden_BSD = ops.cast(self.model.hidden(columns), "float32")
        mask_BS1 = ops.cast(columns["input_mask"], "float32")[:, :, None]
        vector_BD = hidden_BSD[:, 0]
        if self.settings.pooling != "cls":
            vector_BD = ops.sum(hidden_BSD * mask_BS1, 1) / ops.sum(mask_BS1, 1)
        vector_BD = vector_BD[:, : self.settings.dimensions]
        if not self.settings.normalize:
            return vector_BD
        squared_B1 = ops.sum(ops.square(vector_BD), -1, keepdims=True)
        return vector_BD * ops.rsqrt(ops.maximum(squared_B1, 1e-12))

    def answer(self, inputs: Sequence[Input]) -> list[Row]:
        """Return a vector of each text, from the encoder's last layer."""
        rows = zip(inputs, *self.of_texts(inputs), strict=True)
        return [row_of(item, {"embedding": [*map(exact, row)]}, cut) for item, row, cut in rows]


def open_vectors(
    source: models.Source,
    *,
    batch_size: int = BATCH,
    normalize: bool = False,
    uses_library: bool = False,
    warns: bool = True,
    model: OpenedModel | None = None,
) -> Embedding:
    """Return what computes the vectors of texts, with the pooling and the length of the model's folder."""
    settings = PredictSettings(model=str(source.folder), batch_size=batch_size, normalize=normalize)
    defaults = embeddings.read_embedding(source.folder)
    if warns:
        defaults = Embedding.read_defaults(source, settings)
    settings = settings.model_copy(update={"pooling": defaults.get("pooling", "mean")})
    positions = source.config.max_position_embeddings
    length = min(positions, defaults.get("max_seq_length", positions))
    tokenizer = models.read_tokenizer_for(source.config, source.tokenizer)
    task = opened.task_of(source, "embed")
    model = model or opened.open_model(source, task, uses_library=uses_library)
    return Embedding(model, tokenizer, settings, length)


class TokenEmbedding(Embedding):
    """The vectors of texts, and of their tokens."""

    def outputs(self, columns: Columns) -> Any:
        """Return the encoder's output [B, S, D]."""
        return self.model.ops.cast(self.model.hidden(columns), "float32")

    def vectors(self, inputs: Sequence[Input]) -> tuple[Floats32, list[Floats32]]:
        """Return the vectors [n, D] of texts, and those of the tokens of each, all of length 1.

        The tokens are those between the special ones at both ends, or the last one where there are none.
        """
        features, _ = self.encoded(inputs)
        hidden = self.of_examples(features, [item.where for item in inputs])  # [T, D]
        texts = hidden[features.starts]
        if self.settings.pooling != "cls":
            texts = np.add.reduceat(hidden, features.starts)
            texts /= features.lengths[:, None]
        hidden = embeddings.unit_vectors(hidden)
        bounds = zip(features.starts, features.lengths, strict=True)
        # Without [CLS] and [SEP]; an empty text has its [SEP], so that it has a token.
        inner = [hidden[n + 1 : n + max(2, size - 1)] for n, size in bounds]
        return embeddings.unit_vectors(texts), inner


class Similarity(Embedding):
    """The texts that are most similar to the first."""

    SETTINGS = ("pooling", "top", "dimensions")
    EMPTY: ClassVar[Row] = {"similarity": None}
    COMPARES = True

    def answer(self, inputs: Sequence[Input]) -> list[Row]:
        """Return the texts that are most similar to the first text, by the cosine of their vectors, the best first."""
        vectors, is_cut = self.of_texts(inputs)
        similarities = embeddings.cosines(
            np.broadcast_to(vectors[:1], vectors[1:].shape), vectors[1:]
        )
        best = np.argsort(-similarities, kind="stable")[: self.settings.top]
        return [
            row_of(inputs[n + 1], {"similarity": exact(similarities[n])}, is_cut[n + 1])
            for n in best.tolist()
        ]


def check_dimensions(dimensions: int | None, source: models.Source) -> None:
    """Raise ConfigError for more values than the model's vectors have."""
    size = source.config.hidden_size
    if dimensions is not None and dimensions > size:
        problem = f"is more than the {size} values of the model's vectors"
        raise ConfigError(f"dimensions ({dimensions})", problem, "lower it")
