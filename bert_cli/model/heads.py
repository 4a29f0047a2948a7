"""The last blocks of a model: the heads of pre-training and fine-tuning, and their losses.

`head(hidden, labels, counts, key) -> loss, sums`. The sums are those of metrics over this micro-batch, in float32;
the loss is a sum divided by a count of the complete step (masked positions, examples). Micro-batches, replicas and
accumulation then only add, and the gradient is that of the one big batch, however the padding falls.

Sections are those of Devlin et al. 2019. Shapes: B examples, S sequence length, P masked positions, M = B * P, C
sequences of a pack (1 without packing), D hidden size, V vocabulary size, W tokens of a chunk, L labels.
"""

from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple

import keras
from keras import ops

from bert_cli.model.fused import (
    Tensor,
    argmax,
    compiled,
    custom_gradient,
    dropout,
    dropout_seed,
    float32,
    gelu,
    matmul_transposed,
    run_after,
    value_of,
)
from bert_cli.model.layers import MASKED_SCORE, ConfiguredLayer

Columns = Mapping[str, Tensor]
Sums = dict[str, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]


class Head(ConfiguredLayer):
    """The last block of a model. Prediction and export use its `logits(hidden, key)`."""

    READS: ClassVar[tuple[str, ...]]
    COUNTS: ClassVar[Mapping[str, str]] = {}
    """Counts that the loss is divided by, besides `examples` -> the column whose sum they are."""
    MEANS: ClassVar[Mapping[str, tuple[str, str]]]
    """Metric -> the sum and the count that it is the ratio of."""
    labels: int
    dropout_id: int


class MaskedLM(ConfiguredLayer):
    """Transform (dense, GELU, LayerNorm), then a score for every token from the tied word embeddings."""

    word_table: keras.Variable

    def _create_weights(self) -> None:
        self.transform = self.dense("transform", self.config.hidden_size, self.config.hidden_size)
        self.layer_norm = self.norm()
        self.bias = self.add_zeros("bias", self.config.vocab_size)

    def call(self, x_BPD: Tensor) -> Tensor:
        """[B, P, D] -> scores [B, P, V] in float32."""
        product_MV = matmul_transposed(*self._factors(x_BPD), transpose_b=True)
        scores_MV = float32(product_MV) + float32(self.scaled("bias", self.bias))
        return ops.reshape(scores_MV, (*ops.shape(x_BPD)[:2], self.config.vocab_size))

    def loss_sums(
        self, x_BPD: Tensor, labels: Tensor, weights: Tensor, chunks: int
    ) -> tuple[Tensor, Tensor]:
        """Return `loss_sums` of the scores [B, P, V]; with several chunks they are not computed at once."""
        if chunks == 1:
            return loss_sums(self(x_BPD), labels, weights)
        x_MD, table_VD = self._factors(x_BPD)
        labels_M = ops.cast(ops.reshape(labels, (-1,)), "int32")
        bias_V = value_of(self.scaled("bias", self.bias))
        return chunked_loss(x_MD, table_VD, bias_V, labels_M, weights, chunks)

    def _factors(self, x_BPD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the transformed positions [M, D] and the word table [V, D], in the compute dtype."""
        x_BPD = self.layer_norm(gelu(self.transform(x_BPD)))
        x_MD = ops.cast(ops.reshape(x_BPD, (-1, self.config.hidden_size)), self.compute_dtype)
        table_VD = ops.cast(value_of(self.word_table), self.compute_dtype)
        return self.scaled("readout", x_MD), self.scaled("table", table_VD)


class PretrainingHeads(Head):
    """Block `heads`: masked-LM and next-sentence prediction (section 3.1)."""

    READS = ("masked_lm_ids", "masked_lm_weights", "next_sentence_labels", "next_sentence_weights")
    COUNTS: ClassVar[Mapping[str, str]] = {
        "masked": "masked_lm_weights",
        "pairs": "next_sentence_weights",
    }
    MEANS: ClassVar[Mapping[str, tuple[str, str]]] = {
        "mlm_loss": ("mlm_loss", "masked"),
        "nsp_loss": ("nsp_loss", "pairs"),
        "mlm_accuracy": ("mlm_correct", "masked"),
        "nsp_accuracy": ("nsp_correct", "pairs"),
    }
    word_table: keras.Variable
    chunks: int = 1
    """Chunks of the vocabulary in which the masked-LM loss is computed."""

    def _create_weights(self) -> None:
        shared = {"policy": self.dtype_policy, "config": self.config}
        self.masked_lm = MaskedLM(name="masked_lm", **shared, word_table=self.word_table)
        self.next_sentence = self.dense("next_sentence", self.config.hidden_size, 2)

    def logits(self, hidden: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[B, 1 + P, D] -> masked-LM scores [B, P, V], next-sentence scores [B, 2]; float32."""
        mlm_BPV, nsp_B12 = self.scores(hidden, 1)
        return mlm_BPV, nsp_B12[:, 0]

    def scores(self, hidden: Tensor, sequences: int) -> tuple[Tensor, Tensor]:
        """[B, C + P, D] -> masked-LM scores [B, P, V], next-sentence scores [B, C, 2]; float32."""
        return self.masked_lm(hidden[:, sequences:]), self.next_sentence(hidden[:, :sequences])

    def call(
        self, hidden: Tensor, labels: Columns, counts: Columns, key: Tensor | None
    ) -> tuple[Tensor, Sums]:
        """Return the sum of both losses, of `masked_lm_*` [B, P] and `next_sentence_*` [B], of packs [B, C]."""
        next_sentence = labels["next_sentence_labels"]
        sequences = 1 if len(next_sentence.shape) == 1 else next_sentence.shape[1]
        weights = ops.reshape(ops.cast(labels["masked_lm_weights"], "float32"), (-1,))
        mlm_loss, mlm_correct = self.masked_lm.loss_sums(
            hidden[:, sequences:], labels["masked_lm_ids"], weights, self.chunks
        )
        mlm_loss = self.scaled("mlm_loss", mlm_loss)
        nsp_BC2 = self.next_sentence(self.scaled("readout", hidden[:, :sequences]))
        nsp_weights = labels.get("next_sentence_weights")
        nsp_weights = None if nsp_weights is None else ops.reshape(nsp_weights, (-1,))
        nsp_loss, nsp_correct = loss_sums(nsp_BC2, next_sentence, nsp_weights)
        nsp_loss = self.scaled("nsp_loss", nsp_loss)
        loss = mlm_loss / counts["masked"] + nsp_loss / counts["pairs"]
        sums = {"mlm_loss": mlm_loss, "mlm_correct": mlm_correct}
        return loss, {**sums, "nsp_loss": nsp_loss, "nsp_correct": nsp_correct}


class QuestionAnswering(Head):
    """Block `qa_head`: scores of each position as the start and the end of an answer (section 4.2)."""

    READS = ("input_mask", "start_positions", "end_positions")
    MEANS: ClassVar[Mapping[str, tuple[str, str]]] = {
        "loss": ("loss", "examples"),
        "start_accuracy": ("start_correct", "examples"),
        "end_accuracy": ("end_correct", "examples"),
    }

    def _create_weights(self) -> None:
        self.span = self.dense("span", self.config.hidden_size, 2)

    def logits(self, hidden: Tensor, key: Tensor | None) -> Tensor:
        """[B, S, D] -> [B, S, 2]: scores of start and end, float32."""
        return self.span(hidden)

    def call(
        self, hidden: Tensor, labels: Columns, counts: Columns, key: Tensor | None
    ) -> tuple[Tensor, Sums]:
        """Half the cross entropies of start and end; labels are positions [B], 0 for no answer."""
        padding_BS1 = (1.0 - ops.cast(labels["input_mask"], "float32"))[:, :, None] * MASKED_SCORE
        logits_BS2 = self.logits(hidden, key) + padding_BS1
        start, start_correct = loss_sums(logits_BS2[:, :, 0], labels["start_positions"], None)
        end, end_correct = loss_sums(logits_BS2[:, :, 1], labels["end_positions"], None)
        loss = (start + end) / 2.0
        sums = {"loss": loss, "start_correct": start_correct, "end_correct": end_correct}
        return loss / counts["examples"], sums


class Classifier(Head):
    """Dropout and a dense layer."""

    def _create_weights(self) -> None:
        self.classifier = self.dense("classifier", self.config.hidden_size, self.labels)

    def logits(self, hidden: Tensor, key: Tensor | None) -> Tensor:
        """[..., D] -> [..., L] in float32."""
        seed = dropout_seed(key, self.dropout_id)
        hidden = dropout(ops.cast(hidden, "float32"), self.config.hidden_dropout_prob, seed)
        return self.classifier(ops.cast(hidden, self.compute_dtype))


class SequenceClassification(Classifier):
    """Block `glue_head`: a classifier of the pooled [CLS] (section 4.1); with one output, regression."""

    READS = ("labels",)
    MEANS: ClassVar[Mapping[str, tuple[str, str]]] = {
        "loss": ("loss", "examples"),
        "accuracy": ("correct", "examples"),
    }

    def logits(self, hidden: Tensor, key: Tensor | None) -> Tensor:
        """[B, S, D], pooled in position 0 -> [B, L] in float32."""
        return super().logits(hidden[:, 0], key)

    def call(
        self, hidden: Tensor, labels: Columns, counts: Columns, key: Tensor | None
    ) -> tuple[Tensor, Sums]:
        """Cross entropy with `labels` [B], or with one output the squared error."""
        logits_BL = self.logits(hidden, key)
        if self.labels == 1:
            error_B = logits_BL[:, 0] - ops.cast(labels["labels"], "float32")
            loss = ops.sum(ops.square(error_B))
            return loss / counts["examples"], {"loss": loss}
        loss, correct = loss_sums(logits_BL, labels["labels"], None)
        return loss / counts["examples"], {"loss": loss, "correct": correct}


class TokenClassification(Classifier):
    """Block `token_head`: a classifier of every position (section 5.3); only weighted positions count."""

    READS = ("labels", "label_weights")
    COUNTS: ClassVar[Mapping[str, str]] = {"words": "label_weights"}
    MEANS: ClassVar[Mapping[str, tuple[str, str]]] = {
        "loss": ("loss", "words"),
        "accuracy": ("correct", "words"),
    }

    def call(
        self, hidden: Tensor, labels: Columns, counts: Columns, key: Tensor | None
    ) -> tuple[Tensor, Sums]:
        """Cross entropy with `labels` [B, S] where `label_weights` [B, S] is 1."""
        weights = ops.reshape(ops.cast(labels["label_weights"], "float32"), (-1,))
        loss, correct = loss_sums(self.logits(hidden, key), labels["labels"], weights)
        return loss / counts["words"], {"loss": loss, "correct": correct}


class SentenceEmbedding(Head):
    """Block `embed_head`: the vector of a text, in position 0. No weights.

    The loss of a batch needs the vectors of all its texts. It is computed between two forward passes
    (`tasks/finetune/embed.py`). Here its gradient with respect to each vector is a column, and the loss the product of
    both, whose gradients with respect to the weights are those of the complete batch (Gao, Zhang et al. 2021, "Scaling
    Deep Contrastive Learning Batch Size under Memory Limited Setup", section 3.2).
    """

    READS: ClassVar[tuple[str, ...]] = ("vector_gradients", "losses", "is_correct")
    MEANS: ClassVar[Mapping[str, tuple[str, str]]] = {
        "loss": ("loss", "examples"),
        "accuracy": ("correct", "examples"),
    }

    def logits(self, hidden: Tensor, key: Tensor | None) -> Tensor:
        """[B, S, D] -> the vectors [B, D] in float32."""
        return ops.cast(hidden[:, 0], "float32")

    def call(
        self, hidden: Tensor, labels: Columns, counts: Columns, key: Tensor | None
    ) -> tuple[Tensor, Sums]:
        """Return the product of vectors and `vector_gradients` [B, D], and the sums of two columns [B]."""
        loss = ops.sum(self.logits(hidden, key) * labels["vector_gradients"])
        sums = {"loss": labels["losses"], "correct": labels["is_correct"]}
        return loss, {name: ops.sum(column) for name, column in sums.items()}


def loss_sums(logits: Tensor, labels: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the weighted float32 sums over rows [..., L] of the cross entropy and of the right predictions."""
    logits = ops.reshape(logits, (-1, logits.shape[-1]))
    labels = ops.cast(ops.reshape(labels, (-1,)), "int32")
    losses = ops.sparse_categorical_crossentropy(labels, logits, from_logits=True)
    correct = ops.cast(ops.equal(argmax(logits), labels), "float32")
    if weights is not None:
        losses = losses * weights
        correct = correct * weights
    return ops.sum(losses), ops.sum(correct)


class RowState(NamedTuple):
    """The state of each row [M] after some chunks, float32 but for the best token."""

    largest: Tensor
    exponentials: Tensor  # sum of exp(score - largest)
    label_score: Tensor  # 0 before the label's chunk
    best: Tensor  # the token of the largest score, int32


def chunk_ranges(size: int, chunks: int) -> list[tuple[int, int]]:
    """Return the first index and the end of each chunk; the last one may be shorter."""
    step = -(-size // chunks)
    return [(start, min(start + step, size)) for start in range(0, size, step)]


def chunked_loss(
    x_MD: Tensor, table_VD: Tensor, bias_V: Tensor, labels_M: Tensor, weights_M: Tensor, chunks: int
) -> tuple[Tensor, Tensor]:
    """Return the weighted float32 sums over rows of the cross entropy and of the right predictions.

    Equal to `loss_sums` of the complete scores, but for rounding. Computed in chunks of the vocabulary, for 1 / chunks
    of the memory: the row state is carried from one to the next (Milakov and Gimelshein 2018, "Online normalizer
    calculation for softmax", section 3), and the backward pass computes each chunk's scores again. `x_MD` and
    `table_VD` are in the compute dtype, labels int32, weights float32.
    """

    def sums(
        labels_M: Tensor, weights_M: Tensor, x_MD: Tensor, table_VD: Tensor, bias_V: Tensor
    ) -> tuple[tuple[Tensor, Tensor], Callable[..., Gradients]]:
        state = _forward(x_MD, table_VD, bias_V, labels_M, chunks)
        log_sum_M = state.largest + ops.log(state.exponentials)
        loss = ops.sum((log_sum_M - state.label_score) * weights_M)
        correct = ops.sum(ops.cast(ops.equal(state.best, labels_M), "float32") * weights_M)

        def gradient(loss_gradient: Tensor, correct_gradient: Tensor) -> Gradients:
            scale_M = weights_M * loss_gradient
            return _backward(x_MD, table_VD, bias_V, labels_M, log_sum_M, scale_M, chunks)

        return (loss, correct), gradient

    return custom_gradient(sums, labels_M, weights_M)(x_MD, table_VD, bias_V)


def _forward(
    x_MD: Tensor, table_VD: Tensor, bias_V: Tensor, labels_M: Tensor, chunks: int
) -> RowState:
    zeros_M = ops.zeros_like(labels_M)
    zeros32_M = ops.cast(zeros_M, "float32")
    state = RowState(zeros32_M - float("inf"), zeros32_M, zeros32_M, zeros_M)
    for start, end in chunk_ranges(table_VD.shape[0], chunks):
        # One chunk after the other: all at once would need the memory of all scores.
        after_MD = run_after(x_MD, state)
        product_MW = matmul_transposed(after_MD, table_VD[start:end], transpose_b=True)
        scores_MW = float32(product_MW) + float32(bias_V[start:end])
        state = _with_chunk(state, scores_MW, labels_M - start, start)
    return state


def _with_chunk(state: RowState, scores_MW: Tensor, labels_M: Tensor, start: int) -> RowState:
    chunk_largest_M = ops.max(scores_MW, axis=-1)
    largest_M = ops.maximum(state.largest, chunk_largest_M)
    column_M = ops.clip(labels_M, 0, scores_MW.shape[1] - 1)
    at_column_M = ops.take_along_axis(scores_MW, column_M[:, None], axis=1)[:, 0]
    is_in_chunk_M = ops.equal(column_M, labels_M)
    best_M = ops.where(chunk_largest_M > state.largest, argmax(scores_MW) + start, state.best)
    added_M = ops.sum(ops.exp(scores_MW - largest_M[:, None]), axis=-1)
    return RowState(
        largest_M,
        state.exponentials * ops.exp(state.largest - largest_M) + added_M,
        ops.where(is_in_chunk_M, at_column_M, state.label_score),
        best_M,
    )


def _backward(
    x_MD: Tensor,
    table_VD: Tensor,
    bias_V: Tensor,
    labels_M: Tensor,
    log_sum_M: Tensor,
    scale_M: Tensor,
    chunks: int,
) -> Gradients:
    """Return the gradients of x, table and bias; that of a score is scale * (probability - 1 at the label)."""
    x_gradient_MD = ops.zeros_like(ops.cast(x_MD, "float32"))
    table_gradients: list[Tensor] = []
    bias_gradients: list[Tensor] = []
    for start, end in chunk_ranges(table_VD.shape[0], chunks):
        # The dependency also keeps the graph optimizer from merging this with the forward pass, which
        # would save all scores.
        done = (x_gradient_MD, scale_M, *table_gradients[-1:], *bias_gradients[-1:])
        x_again_MD = run_after(x_MD, done)
        table_WD = table_VD[start:end]
        product_MW = matmul_transposed(x_again_MD, table_WD, transpose_b=True)
        gradient_MW = compiled(_chunk_gradient)(
            product_MW, bias_V[start:end], labels_M - start, log_sum_M, scale_M
        )
        x_gradient_MD = x_gradient_MD + float32(ops.matmul(gradient_MW, table_WD))
        table_gradients.append(matmul_transposed(gradient_MW, x_again_MD, transpose_a=True))
        bias_gradients.append(ops.sum(float32(gradient_MW), axis=0))
    return (
        ops.cast(x_gradient_MD, x_MD.dtype),
        ops.concatenate(table_gradients, axis=0),
        ops.cast(ops.concatenate(bias_gradients, axis=0), bias_V.dtype),
    )


def _chunk_gradient(
    product_MW: Tensor, bias_W: Tensor, labels_M: Tensor, log_sum_M: Tensor, scale_M: Tensor
) -> Tensor:
    """Return the gradient of a chunk's products; a label of another chunk is in no column."""
    probabilities_MW = ops.exp(float32(product_MW) + float32(bias_W) - log_sum_M[:, None])
    is_label_MW = ops.equal(ops.arange(product_MW.shape[1], dtype="int32"), labels_M[:, None])
    gradient_MW = (probabilities_MW - float32(is_label_MW)) * scale_M[:, None]
    return ops.cast(gradient_MW, product_MW.dtype)
