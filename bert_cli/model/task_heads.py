"""The heads of fine-tuning: where an answer begins and ends, what a text is, what a token is.

Each is one dense layer on what the encoder gives, the last block of its model, and has the shape of
the pre-training heads: `head(hidden, labels, counts, key) -> loss, sums`, with the loss a sum over
this micro-batch divided by a count of the whole step. `logits(hidden, key)` is the rest of it, which
prediction and export use.

Shapes: B examples, S places, D model width, L labels.
"""

from collections.abc import Mapping
from typing import ClassVar

import keras
from keras import ops

from bert_cli.config.model import BertConfig
from bert_cli.model.dropout import Tensor, dropout, stream_of
from bert_cli.model.heads import summed
from bert_cli.model.layers import MASKED_SCORE, Dense

Sums = dict[str, Tensor]


class QuestionAnswering(keras.layers.Layer):
    """Block `qa_head`: for every place, how well an answer begins and ends there.

    Devlin et al. 2019, section 4.2. Padded places are out of the question: their scores are those of
    a masked place of attention.
    """

    READS = ("input_mask", "start_positions", "end_positions")
    COUNTS: ClassVar[Mapping[str, str]] = {}
    MEANS: ClassVar[Mapping[str, tuple[str, str]]] = {
        "loss": ("loss", "examples"),
        "start_accuracy": ("start_correct", "examples"),
        "end_accuracy": ("end_correct", "examples"),
    }
    """Figure -> the sum and the count it is the ratio of."""

    def __init__(
        self, config: BertConfig, *, name: str, policy: keras.DTypePolicy, site: int, labels: int
    ) -> None:
        super().__init__(name=name, dtype=policy, autocast=False)
        self.config = config
        self.build()

    def build(self) -> None:
        """Create the weights, inside this block's name scope."""
        self.span = Dense(self.config.hidden_size, 2, name="span", policy=self.dtype_policy)

    def logits(self, hidden: Tensor, key: Tensor | None) -> Tensor:
        """[B, S, D] -> [B, S, 2]: scores of a beginning and of an end, float32."""
        return self.span(hidden)

    def call(
        self,
        hidden: Tensor,
        labels: Mapping[str, Tensor],
        counts: Mapping[str, Tensor],
        key: Tensor | None,
    ) -> tuple[Tensor, Sums]:
        """Half the cross entropies of beginning and end; labels are places [B], 0 for no answer."""
        padding_BS1 = (1.0 - ops.cast(labels["input_mask"], "float32"))[:, :, None] * MASKED_SCORE
        logits_BS2 = self.logits(hidden, key) + padding_BS1
        start, start_correct = summed(logits_BS2[:, :, 0], labels["start_positions"], None)
        end, end_correct = summed(logits_BS2[:, :, 1], labels["end_positions"], None)
        loss = (start + end) / 2.0
        sums = {"loss": loss, "start_correct": start_correct, "end_correct": end_correct}
        return loss / counts["examples"], sums


class SequenceClassification(keras.layers.Layer):
    """Block `glue_head`: dropout and a dense layer on the pooled [CLS]; with one output, regression.

    Devlin et al. 2019, section 4.1. A regression has no accuracy.
    """

    READS = ("labels",)
    COUNTS: ClassVar[Mapping[str, str]] = {}
    MEANS: ClassVar[Mapping[str, tuple[str, str]]] = {
        "loss": ("loss", "examples"),
        "accuracy": ("correct", "examples"),
    }
    """Figure -> the sum and the count it is the ratio of."""

    def __init__(
        self, config: BertConfig, *, name: str, policy: keras.DTypePolicy, site: int, labels: int
    ) -> None:
        super().__init__(name=name, dtype=policy, autocast=False)
        self.config = config
        self.site = site
        self.labels = labels
        self.build()

    def build(self) -> None:
        """Create the weights, inside this block's name scope."""
        width, policy = self.config.hidden_size, self.dtype_policy
        self.classifier = Dense(width, self.labels, name="classifier", policy=policy)

    def logits(self, hidden: Tensor, key: Tensor | None) -> Tensor:
        """[B, S, D], pooled in place 0 -> [B, L] in float32."""
        pooled_BD = ops.cast(hidden[:, 0], "float32")
        pooled_BD = dropout(pooled_BD, self.config.hidden_dropout_prob, stream_of(key, self.site))
        return self.classifier(ops.cast(pooled_BD, self.compute_dtype))

    def call(
        self,
        hidden: Tensor,
        labels: Mapping[str, Tensor],
        counts: Mapping[str, Tensor],
        key: Tensor | None,
    ) -> tuple[Tensor, Sums]:
        """Cross entropy with `labels` [B], or with one output the squared error."""
        logits_BL = self.logits(hidden, key)
        if self.labels == 1:
            error_B = logits_BL[:, 0] - ops.cast(labels["labels"], "float32")
            loss = ops.sum(ops.square(error_B))
            return loss / counts["examples"], {"loss": loss}
        loss, correct = summed(logits_BL, labels["labels"], None)
        return loss / counts["examples"], {"loss": loss, "correct": correct}


class TokenClassification(keras.layers.Layer):
    """Block `token_head`: dropout and a dense layer on every place; only weighted places count.

    Devlin et al. 2019, section 5.3: a word is labelled at its first piece.
    """

    READS = ("labels", "label_weights")
    COUNTS: ClassVar[Mapping[str, str]] = {"words": "label_weights"}
    MEANS: ClassVar[Mapping[str, tuple[str, str]]] = {
        "loss": ("loss", "words"),
        "accuracy": ("correct", "words"),
    }
    """Figure -> the sum and the count it is the ratio of."""

    def __init__(
        self, config: BertConfig, *, name: str, policy: keras.DTypePolicy, site: int, labels: int
    ) -> None:
        super().__init__(name=name, dtype=policy, autocast=False)
        self.config = config
        self.site = site
        self.labels = labels
        self.build()

    def build(self) -> None:
        """Create the weights, inside this block's name scope."""
        width, policy = self.config.hidden_size, self.dtype_policy
        self.classifier = Dense(width, self.labels, name="classifier", policy=policy)

    def logits(self, hidden: Tensor, key: Tensor | None) -> Tensor:
        """[B, S, D] -> [B, S, L] in float32."""
        hidden_BSD = ops.cast(hidden, "float32")
        hidden_BSD = dropout(hidden_BSD, self.config.hidden_dropout_prob, stream_of(key, self.site))
        return self.classifier(ops.cast(hidden_BSD, self.compute_dtype))

    def call(
        self,
        hidden: Tensor,
        labels: Mapping[str, Tensor],
        counts: Mapping[str, Tensor],
        key: Tensor | None,
    ) -> tuple[Tensor, Sums]:
        """Cross entropy with `labels` [B, S] where `label_weights` [B, S] is 1."""
        weights = ops.reshape(ops.cast(labels["label_weights"], "float32"), (-1,))
        loss, correct = summed(self.logits(hidden, key), labels["labels"], weights)
        return loss / counts["words"], {"loss": loss, "correct": correct}
