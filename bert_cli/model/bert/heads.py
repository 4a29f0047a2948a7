"""The last blocks of a model: the heads of pre-training and fine-tuning, and their losses.

`head(hidden, labels, counts, key) -> loss, sums`. The sums are sums of metrics over the micro-batch, in float32; the
loss is a sum divided by a count of the complete step (masked positions, examples). Micro-batches, replicas and
accumulation then only add, and the gradient is the gradient of the complete batch, for any distribution of padding.

Section numbers refer to Devlin et al. 2019. Shapes: B examples, S sequence length, P masked positions, M = B * P, C
sequences of a pack (1 without packing), D hidden size, V vocabulary size, L labels.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import keras
from keras import ops

from bert_cli.model.arithmetic.chunked_loss import chunked_loss
from bert_cli.model.arithmetic.fused import (
    Tensor,
    argmax,
    dropout,
    dropout_seed,
    exact_matmul,
    float32,
    gelu,
    matmul,
    value_of,
)
from bert_cli.model.arithmetic.parts import Block, Columns, Key, Layer
from bert_cli.model.bert.encoder import MASKED_SCORE

# A part of the loss of a step, and the sums for its metrics.
Loss = tuple[Tensor, dict[str, Tensor]]
MASKED_LM_COLUMNS = ("masked_lm_ids", "masked_lm_weights")
# Optional columns of a head: the teacher's logits, shaped as the head's, and for each example [B] the weight of the
# loss against them and the temperature of both softmaxes.
TEACHER = ("teacher_logits", "teacher_weight", "teacher_temperature")


class Head(Block):
    """The last block of a model. Prediction uses its `logits(hidden, key)`, export its `outputs`."""

    COUNTS: ClassVar[Mapping[str, str]] = {}
    """Name of a count by which the loss is divided -> the column whose sum over a step it is; `examples` needs none."""
    MEANS: ClassVar[Mapping[str, tuple[str, str]]] = {
        "loss": ("loss", "examples"),
        "accuracy": ("correct", "examples"),
    }
    """Metric -> the sum and the count whose ratio it is."""

    def logits(self, hidden: Tensor, key: Key) -> Any:
        """Return the scores or vectors of a prediction."""
        raise NotImplementedError

    def outputs(self, logits: Any, hf_class: str) -> dict[str, Tensor]:
        """Return the logits under the names of a class of transformers."""
        return {"logits": logits}


class ScoresWords(Layer):
    """A layer that shares the word embeddings; its masked-LM loss is computed in `chunks` of the vocabulary."""

    word_table: keras.Variable
    chunks: int = 1


class MaskedLM(ScoresWords):
    """Transform (dense, GELU, LayerNorm), then a score for every token from the tied word embeddings."""

    def _create_weights(self) -> None:
        self.transform = self.dense("transform")
        self.activation = gelu
        self.layer_norm = self.norm()
        self.bias = self.add_zeros("bias", self.config.vocab_size)

    def call(self, x_BPD: Tensor) -> Tensor:
        """[B, P, D] -> scores [B, P, V] in float32."""
        x_MD, table_VD, bias_V = self.operands(x_BPD)
        scores_MV = float32(matmul(x_MD, table_VD, transpose_b=True)) + float32(bias_V)
        return ops.reshape(scores_MV, (*ops.shape(x_BPD)[:2], self.config.vocab_size))

    def sums(self, x_BPD: Tensor, columns: Columns) -> tuple[Tensor, Tensor]:
        """Return `loss_sums` for `masked_lm_*` [B, P]; with several chunks, not all scores are computed at once."""
        labels = columns["masked_lm_ids"]
        weights = ops.reshape(float32(columns["masked_lm_weights"]), (-1,))
        # All scores at once are [M, V] in float32: 78 MB for 32 examples of 20 masked positions and BERT's 30,522
        # tokens.
        if self.chunks == 1:
            return loss_sums(self(x_BPD), labels, weights)
        x_MD, table_VD, bias_V = self.operands(x_BPD)
        labels_M = ops.cast(ops.reshape(labels, (-1,)), "int32")
        inputs = x_MD, table_VD, value_of(bias_V), labels_M, weights
        return chunked_loss(*inputs, self.chunks, self.operations.fuse_above)

    def operands(self, x_BPD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the transformed positions [M, D] and the word table [V, D], in the compute dtype, and the bias [V]."""
        x_BPD = self.layer_norm(self.activation(self.transform(x_BPD)))
        x_MD = ops.cast(ops.reshape(x_BPD, (-1, self.config.hidden_size)), self.compute_dtype)
        table_VD = ops.cast(value_of(self.word_table), self.compute_dtype)
        bias_V = self.scaled("bias", self.bias)
        return self.scaled("readout", x_MD), self.scaled("table", table_VD), bias_V


class PretrainingHeads(ScoresWords, Head):
    """Block `heads`: masked-LM and next-sentence prediction (section 3.1)."""

    READS: ClassVar[tuple[str, ...]] = (
        *MASKED_LM_COLUMNS,
        "next_sentence_labels",
        "next_sentence_weights",
    )
    COUNTS: ClassVar = {"masked": "masked_lm_weights", "pairs": "next_sentence_weights"}
    MEANS: ClassVar = {
        "mlm_loss": ("mlm_loss", "masked"),
        "nsp_loss": ("nsp_loss", "pairs"),
        "mlm_accuracy": ("mlm_correct", "masked"),
        "nsp_accuracy": ("nsp_correct", "pairs"),
    }

    def _create_weights(self) -> None:
        shared = {"word_table": self.word_table, "chunks": self.chunks}
        self.masked_lm = MaskedLM(**self.part("masked_lm"), **shared)
        self.next_sentence = self.dense("next_sentence", outputs=2)

    def logits(self, hidden: Tensor, key: Key = None) -> tuple[Tensor, Tensor]:
        """[B, 1 + P, D] -> masked-LM scores [B, P, V], next-sentence scores [B, 2]; float32."""
        return self.masked_lm(hidden[:, 1:]), self.next_sentence(hidden[:, :1])[:, 0]

    def outputs(self, logits: Any, hf_class: str) -> dict[str, Tensor]:
        """Return the masked-LM scores, and the next-sentence scores if the class has them."""
        words_BPV, next_B2 = logits
        if hf_class.endswith("ForMaskedLM"):
            return {"logits": words_BPV}
        return {"prediction_logits": words_BPV, "seq_relationship_logits": next_B2}

    def call(self, hidden: Tensor, labels: Columns, counts: Columns, key: Key) -> Loss:
        """Return the sum of both losses, of `masked_lm_*` [B, P] and `next_sentence_*` [B], or [B, C] for packs."""
        next_sentence = labels["next_sentence_labels"]
        sequences = 1 if len(next_sentence.shape) == 1 else next_sentence.shape[1]
        mlm_loss, mlm_correct = self.masked_lm.sums(hidden[:, sequences:], labels)
        mlm_loss = self.scaled("mlm_loss", mlm_loss)
        nsp_BC2 = self.next_sentence(hidden[:, :sequences])
        nsp_weights = labels.get("next_sentence_weights")
        nsp_loss, nsp_correct = loss_sums(nsp_BC2, next_sentence, nsp_weights)
        nsp_loss = self.scaled("nsp_loss", nsp_loss)
        loss = mlm_loss / counts["masked"] + nsp_loss / counts["pairs"]
        sums = {"mlm_loss": mlm_loss, "mlm_correct": mlm_correct}
        return loss, {**sums, "nsp_loss": nsp_loss, "nsp_correct": nsp_correct}


class QuestionAnswering(Head):
    """Block `qa_head`: scores of each position as the start and the end of an answer (section 4.2)."""

    READS = ("input_mask", "start_positions", "end_positions", *TEACHER)
    MEANS: ClassVar = {
        "loss": ("loss", "examples"),
        "start_accuracy": ("start_correct", "examples"),
        "end_accuracy": ("end_correct", "examples"),
    }

    def _create_weights(self) -> None:
        self.span = self.dense("span", outputs=2)

    def logits(self, hidden: Tensor, key: Key) -> Tensor:
        """[B, S, D] -> [B, S, 2]: scores of start and end, float32."""
        return self.span(hidden)

    def outputs(self, logits: Any, hf_class: str) -> dict[str, Tensor]:
        """Return the scores of start and end [B, S]."""
        return {"start_logits": logits[:, :, 0], "end_logits": logits[:, :, 1]}

    def call(self, hidden: Tensor, labels: Columns, counts: Columns, key: Key) -> Loss:
        """Return half the cross entropies of start and end; labels are positions [B], 0 for no answer."""
        padding_BS1 = (1.0 - float32(labels["input_mask"]))[:, :, None] * MASKED_SCORE
        logits_BS2 = self.logits(hidden, key) + padding_BS1
        sums_of_ends = []
        for number, name in enumerate(("start", "end")):
            columns = dict(labels)
            if "teacher_logits" in labels:
                columns["teacher_logits"] = (labels["teacher_logits"] + padding_BS1)[:, :, number]
            positions_B = labels[f"{name}_positions"]
            sums_of_ends.append(task_sums(logits_BS2[:, :, number], positions_B, None, columns))
        (start, start_correct), (end, end_correct) = sums_of_ends
        # The mean of both, as in Google's run_squad.py.
        loss = (start + end) / 2.0
        sums = {"loss": loss, "start_correct": start_correct, "end_correct": end_correct}
        return loss / counts["examples"], sums


class Classifier(Head):
    """Dropout and a dense layer with as many outputs as there are labels."""

    labels: int

    def _create_weights(self) -> None:
        self.classifier = self.dense("classifier", outputs=self.labels)

    def logits(self, hidden: Tensor, key: Key) -> Tensor:
        """[..., D] -> [..., L] in float32."""
        seed = dropout_seed(key, self.dropout_id)
        hidden = dropout(float32(hidden), self.config.hidden_dropout_prob, seed)
        return self.classifier(ops.cast(hidden, self.compute_dtype))


class SequenceClassification(Classifier):
    """Block `glue_head`: a classifier of the pooled [CLS] (section 4.1); with one output, regression.

    `labels` are numbers [B], or 0 and 1 for each label [B, L] where a text may have several. Each of these is then a
    classifier with two logits, 0 and its own, and the loss is the mean over examples and labels. With `label_weights`,
    of the shape of `labels`, it is their weighted mean over the step.
    """

    READS = ("labels", "label_weights", "is_labelled", *TEACHER)
    COUNTS: ClassVar = {"labelled": "is_labelled", "weighted": "label_weights"}
    MEANS: ClassVar = {"loss": ("loss", "weighted"), "accuracy": ("correct", "labelled")}

    def logits(self, hidden: Tensor, key: Key) -> Tensor:
        """[B, S, D], pooled in position 0 -> [B, L] in float32."""
        return super().logits(hidden[:, 0], key)

    def call(self, hidden: Tensor, labels: Columns, counts: Columns, key: Key) -> Loss:
        """Return the cross entropy with `labels`, or with one output the squared error."""
        logits = self.logits(hidden, key)
        if self.labels == 1:
            error_B = logits[:, 0] - float32(labels["labels"])
            losses_B = ops.square(error_B)
            if "teacher_logits" in labels:
                weight_B = labels["teacher_weight"]
                soft_B = ops.square(logits[:, 0] - labels["teacher_logits"][:, 0])
                losses_B = (1.0 - weight_B) * losses_B + weight_B * soft_B
            loss = ops.sum(losses_B)
            return loss / counts["weighted"], {"loss": loss}
        counted = labels.get("is_labelled")  # 0 where a teacher made the label
        weights = labels.get("label_weights")
        if len(labels["labels"].shape) == 2:
            ones_BL = ops.ones_like(logits) / self.labels
            counted = ones_BL if counted is None else ones_BL * counted[:, None]
            weights = ones_BL if weights is None else weights
            # [B, L] -> [B, L, 2]: each label is a question of its own, with yes and no.
            logits = _with_zero(logits)
            if "teacher_logits" in labels:
                labels = {**labels, "teacher_logits": _with_zero(labels["teacher_logits"])}
        loss, _ = task_sums(logits, labels["labels"], weights, labels)
        _, correct = loss_sums(logits, labels["labels"], counted)
        return loss / counts["weighted"], {"loss": loss, "correct": correct}


class TokenClassification(Classifier):
    """Block `token_head`: a classifier of every position (section 5.3); only weighted positions count."""

    READS = ("labels", "label_weights", *TEACHER)
    COUNTS: ClassVar = {"words": "label_weights"}
    MEANS: ClassVar = {"loss": ("loss", "words"), "accuracy": ("correct", "words")}

    def call(self, hidden: Tensor, labels: Columns, counts: Columns, key: Key) -> Loss:
        """Return the cross entropy with `labels` [B, S] where `label_weights` [B, S] is 1."""
        weights = float32(labels["label_weights"])
        loss, correct = task_sums(self.logits(hidden, key), labels["labels"], weights, labels)
        return loss / counts["words"], {"loss": loss, "correct": correct}


class SentenceEmbedding(Head):
    """Block `embed_head`: the vector of a text, in position 0. No weights.

    The loss of a batch needs the vectors of all its texts. In a step of one micro-batch this head has them all. In
    other steps the loss is computed between two forward passes (`tasks/finetune/embed.py`). This head then reads the
    gradient with respect to each vector as a column; its loss is the product of both, which has the weight gradients
    of the complete batch (Gao, Zhang et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited
    Setup", section 3.2).
    """

    READS = (
        "vector_gradients",
        "losses",
        "is_correct",
        "text_slots",
        "is_left_out",
        "temperature",
        "is_in_prefix",
        "teacher_vectors",
    )

    def logits(self, hidden: Tensor, key: Key) -> Tensor:
        """[B, 1, D] -> the vectors [B, D] in float32."""
        return float32(hidden[:, 0])

    def call(self, hidden: Tensor, labels: Columns, counts: Columns, key: Key) -> Loss:
        """Return the product of vectors and `vector_gradients` [B, D], and the sums of two columns [B].

        In a step of one micro-batch return the InfoNCE loss of n rows (see `contrastive_loss`), whose texts
        `text_slots` [n * G] are in order; `is_left_out` [n, n * (G - 1)] masks candidates that are not negatives.
        With `is_in_prefix` [K, D] the loss is the sum over K prefixes; the first row is the complete vector.

        With a teacher return the squared distances of the vectors, scaled to length 1, from `teacher_vectors` [B, D],
        which are zeros in a slot without a text.
        """
        vectors_BD = self.logits(hidden, key)
        if "teacher_vectors" in labels:
            loss = ops.sum(ops.square(unit_vectors(vectors_BD) - labels["teacher_vectors"]))
            return loss / counts["examples"], {"loss": loss}
        if "is_in_prefix" in labels:
            return self._loss_of_prefixes(vectors_BD, labels, counts)
        if "text_slots" in labels:
            return self._contrastive_loss(vectors_BD, labels, counts)
        loss = ops.sum(vectors_BD * labels["vector_gradients"])
        return loss, {"loss": ops.sum(labels["losses"]), "correct": ops.sum(labels["is_correct"])}

    def _loss_of_prefixes(self, vectors_BD: Tensor, labels: Columns, counts: Columns) -> Loss:
        masks_KD = float32(labels["is_in_prefix"])
        parts = [
            self._contrastive_loss(vectors_BD * masks_KD[prefix], labels, counts)
            for prefix in range(masks_KD.shape[0])
        ]
        loss = sum(part for part, _ in parts)
        return loss, {**parts[0][1], "loss": sum(sums["loss"] for _, sums in parts)}

    def _contrastive_loss(self, vectors_BD: Tensor, labels: Columns, counts: Columns) -> Loss:
        size = vectors_BD.shape[-1]
        rows = labels["is_left_out"].shape[0]
        texts = ops.take(unit_vectors(vectors_BD), labels["text_slots"], axis=0)
        texts = ops.reshape(texts, (rows, -1, size))
        candidates = ops.reshape(texts[:, 1:], (-1, size))
        # Rounded cosines would be divided by a temperature of 0.05.
        scores = exact_matmul(texts[:, 0], candidates, transpose_b=True)
        scores = scores / labels["temperature"]
        scores = ops.where(labels["is_left_out"], MASKED_SCORE, scores)
        # The candidates of row n begin with its positive, and each row has G - 1 of them.
        positives = ops.arange(rows) * (texts.shape[1] - 1)
        loss, _ = loss_sums(scores, positives, None)
        # As in `contrastive_loss`, a positive with the score of another candidate is not correct.
        positive_scores = ops.take_along_axis(scores, positives[:, None], axis=1)
        rivals = ops.sum(float32(scores >= positive_scores), axis=1)
        correct = ops.sum(float32(ops.equal(rivals, 1.0)))
        # Each text counts with the loss of its row.
        sums = {"loss": loss * texts.shape[1], "correct": correct * texts.shape[1]}
        return sums["loss"] / counts["examples"], sums


class MeanClassification(SentenceEmbedding):
    """Block `mean_head`: vectors, which alone are trained, and a dense layer that is computed from them."""

    labels: int

    def _create_weights(self) -> None:
        self.classifier = self.dense("classifier", outputs=self.labels)

    def logits(self, hidden: Tensor, key: Key) -> Tensor:
        """[B, 1, D], the mean -> [B, L] in float32."""
        return self.classifier(ops.cast(hidden[:, 0], self.compute_dtype))

    def call(self, hidden: Tensor, labels: Columns, counts: Columns, key: Key) -> Loss:
        """Return the InfoNCE loss of the vectors in a step of one micro-batch, as `SentenceEmbedding`."""
        return self._contrastive_loss(super().logits(hidden, key), labels, counts)


def unit_vectors(vectors_BD: Tensor) -> Tensor:
    """Return the vectors scaled to length 1; a vector of zeros is unchanged."""
    # 1e-24 is the square of the shortest length, 1e-12, by which a vector is divided.
    squared_B1 = ops.sum(ops.square(vectors_BD), -1, keepdims=True)
    return vectors_BD * ops.rsqrt(ops.maximum(squared_B1, 1e-24))


def _with_zero(logits_BL: Tensor) -> Tensor:
    """Return the two logits [B, L, 2] of each label of several: their softmax has the sigmoid of the label's logit."""
    return ops.stack([ops.zeros_like(logits_BL), logits_BL], axis=-1)


def task_sums(
    logits: Tensor, labels: Tensor, weights: Tensor | None, columns: Columns
) -> tuple[Tensor, Tensor]:
    """Return `loss_sums` of logits [B, L] or [B, S, L]; with a teacher in `columns`, also against its logits.

    The loss of a row is (1 - w) times the cross entropy with its label and w T^2 times the Kullback-Leibler divergence
    of the softmaxes at temperature T (Hinton et al. 2015, section 2).
    """
    loss, correct = loss_sums(logits, labels, weights)
    if "teacher_logits" not in columns:
        return loss, correct
    teacher = columns["teacher_logits"]
    of_examples = (-1, *[1] * (len(logits.shape) - 2))
    weight = ops.reshape(columns["teacher_weight"], of_examples)
    temperature = ops.reshape(columns["teacher_temperature"], of_examples)
    counted = ops.ones_like(logits[..., 0]) if weights is None else weights
    loss, _ = loss_sums(logits, labels, (1.0 - weight) * counted)
    expected = ops.log_softmax(teacher / temperature[..., None])
    log_probabilities = ops.log_softmax(logits / temperature[..., None])
    divergences = ops.sum(ops.exp(expected) * (expected - log_probabilities), axis=-1)
    # T^2: gradients of the soft part shrink as 1 / T^2, so both parts stay as important at any temperature.
    soft = ops.sum(divergences * ops.square(temperature) * weight * counted)
    return loss + soft, correct


def loss_sums(logits: Tensor, labels: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the weighted float32 sums over rows [..., L] of the cross entropy and of the correct predictions."""
    logits = ops.reshape(logits, (-1, logits.shape[-1]))
    labels = ops.cast(ops.reshape(labels, (-1,)), "int32")
    losses = ops.sparse_categorical_crossentropy(labels, logits, from_logits=True)
    correct = float32(ops.equal(argmax(logits), labels))
    if weights is not None:
        weights = ops.reshape(weights, (-1,))
        losses = losses * weights
        correct = correct * weights
    return ops.sum(losses), ops.sum(correct)
