"""The two heads of pre-training and their losses, summed over examples and divided by whole-step counts.

A loss here is a sum over this micro-batch divided by a count of the *whole step* (masked tokens,
examples). Micro-batches, replicas and accumulation then only add, and the gradient is that of the
one big batch however the padding falls. The masked-LM head reads only the P masked places, and its
output matrix is the word table of block `emb`, the same variable.

Shapes: B examples, P masked places, M = B * P, C sequences of a pack (1 without packing), D model width,
V words.
"""

from collections.abc import Mapping
from typing import ClassVar

import keras
from keras import ops

from bert_cli.config.model import BertConfig
from bert_cli.model.chunked import summed_by_chunks
from bert_cli.model.dropout import Tensor
from bert_cli.model.fused import gelu, largest, product_with_table, value_of
from bert_cli.model.layers import Dense, LayerNorm, add_weight


class MaskedLM(keras.layers.Layer):
    """Transform (dense, GELU, LayerNorm), then a score for every word from the tied table."""

    def __init__(
        self, config: BertConfig, word_table: keras.Variable, *, name: str, policy: str
    ) -> None:
        super().__init__(name=name, dtype=policy, autocast=False)
        self.config = config
        self.word_table = word_table
        self.build()

    def build(self) -> None:
        """Create the weights, inside this layer's name scope."""
        width, policy = self.config.hidden_size, self.dtype_policy
        self.transform = Dense(width, width, name="transform", policy=policy)
        self.layer_norm = LayerNorm(
            width, self.config.layer_norm_eps, name="layer_norm", policy=policy
        )
        self.bias = add_weight(self, "bias", (self.config.vocab_size,))

    def call(self, x_BPD: Tensor) -> Tensor:
        """[B, P, D] -> scores [B, P, V] in float32."""
        scores_MV = product_with_table(*self._factors(x_BPD))
        scores_MV = ops.cast(scores_MV, "float32") + ops.cast(self.bias, "float32")
        return ops.reshape(scores_MV, (*ops.shape(x_BPD)[:2], self.config.vocab_size))

    def summed(
        self, x_BPD: Tensor, labels: Tensor, weights: Tensor, chunks: int
    ) -> tuple[Tensor, Tensor]:
        """What `summed` says of the scores [B, P, V], which in several chunks are never there as a whole."""
        if chunks == 1:
            return summed(self(x_BPD), labels, weights)
        x_MD, table_VD = self._factors(x_BPD)
        labels_M = ops.cast(ops.reshape(labels, (-1,)), "int32")
        return summed_by_chunks(x_MD, table_VD, value_of(self.bias), labels_M, weights, chunks)

    def _factors(self, x_BPD: Tensor) -> tuple[Tensor, Tensor]:
        """The transformed places [M, D] and the word table [V, D], in the compute dtype."""
        x_BPD = self.layer_norm(gelu(self.transform(x_BPD)))
        x_MD = ops.cast(ops.reshape(x_BPD, (-1, self.config.hidden_size)), self.compute_dtype)
        table_VD = ops.cast(value_of(self.word_table), self.compute_dtype)
        return x_MD, table_VD


class PretrainingHeads(keras.layers.Layer):
    """Block `heads`, the last piece: hidden -> loss and the sums that are reported."""

    READS = (
        "masked_lm_ids",
        "masked_lm_weights",
        "next_sentence_labels",
        "next_sentence_weights",
    )
    COUNTS: ClassVar[Mapping[str, str]] = {
        "masked": "masked_lm_weights",
        "pairs": "next_sentence_weights",
    }
    """What the loss is divided by, beside the examples -> the column that it is the sum of."""
    MEANS: ClassVar[Mapping[str, tuple[str, str]]] = {
        "mlm_loss": ("mlm_loss", "masked"),
        "nsp_loss": ("nsp_loss", "pairs"),
        "mlm_accuracy": ("mlm_correct", "masked"),
        "nsp_accuracy": ("nsp_correct", "pairs"),
    }
    """Figure -> the sum and the count it is the ratio of."""

    def __init__(
        self,
        config: BertConfig,
        word_table: keras.Variable,
        *,
        name: str,
        policy: str,
        chunks: int = 1,
    ) -> None:
        """`chunks` are those of the vocabulary that the masked-LM loss is computed in."""
        super().__init__(name=name, dtype=policy, autocast=False)
        self.config = config
        self.word_table = word_table
        self.chunks = chunks
        self.build()

    def build(self) -> None:
        """Create the weights, inside this block's name scope."""
        policy = self.dtype_policy
        self.masked_lm = MaskedLM(self.config, self.word_table, name="masked_lm", policy=policy)
        self.next_sentence = Dense(self.config.hidden_size, 2, name="next_sentence", policy=policy)

    def logits(self, hidden: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[B, 1 + P, D] -> masked-LM scores [B, P, V], next-sentence scores [B, 2]; float32."""
        mlm_BPV, nsp_B12 = self.scores(hidden, 1)
        return mlm_BPV, nsp_B12[:, 0]

    def scores(self, hidden: Tensor, sequences: int) -> tuple[Tensor, Tensor]:
        """[B, C + P, D] -> masked-LM scores [B, P, V], next-sentence scores [B, C, 2]; float32."""
        return self.masked_lm(hidden[:, sequences:]), self.next_sentence(hidden[:, :sequences])

    def call(
        self,
        hidden: Tensor,
        labels: Mapping[str, Tensor],
        counts: Mapping[str, Tensor],
        key: Tensor | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Losses of Devlin et al. 2019 (section 3.1) as sums over the whole step's counts.

        `labels`: `masked_lm_ids` and `masked_lm_weights` [B, P], `next_sentence_labels` and, where not
        every sequence has one, `next_sentence_weights` [B], of packs [B, C]. `counts`: float32 scalars,
        `masked` and `pairs`, the sums of both weights over the whole step.
        Returns this micro-batch's share of the loss, and the float32 sums `mlm_loss`,
        `mlm_correct`, `nsp_loss`, `nsp_correct`. There is no dropout here; `key` is not read.
        """
        next_sentence = labels["next_sentence_labels"]
        sequences = 1 if len(next_sentence.shape) == 1 else next_sentence.shape[1]
        weights = ops.reshape(ops.cast(labels["masked_lm_weights"], "float32"), (-1,))
        mlm_loss, mlm_correct = self.masked_lm.summed(
            hidden[:, sequences:], labels["masked_lm_ids"], weights, self.chunks
        )
        nsp_BC2 = self.next_sentence(hidden[:, :sequences])
        known = labels.get("next_sentence_weights")
        known = None if known is None else ops.reshape(known, (-1,))
        nsp_loss, nsp_correct = summed(nsp_BC2, next_sentence, known)
        loss = mlm_loss / counts["masked"] + nsp_loss / counts["pairs"]
        sums = {
            "mlm_loss": mlm_loss,
            "mlm_correct": mlm_correct,
            "nsp_loss": nsp_loss,
            "nsp_correct": nsp_correct,
        }
        return loss, sums


def summed(logits: Tensor, labels: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weighted sums over all rows [..., L] of the cross entropy and of the right answers, in float32."""
    logits = ops.reshape(logits, (-1, logits.shape[-1]))
    labels = ops.cast(ops.reshape(labels, (-1,)), "int32")
    losses = ops.sparse_categorical_crossentropy(labels, logits, from_logits=True)
    best = largest(logits)
    correct = ops.cast(ops.equal(best, labels), "float32")
    if weights is not None:
        losses, correct = losses * weights, correct * weights
    return ops.sum(losses), ops.sum(correct)
