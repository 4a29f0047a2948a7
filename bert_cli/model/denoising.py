"""Block `denoise_head`: a decoder that restores a text from its vector (TSDAE, Wang et al. 2021, section 3).

Its layers share the weights of the encoder's layers; each has attention to the vector after its self-attention. The
vector is the only key, so the attention probability is 1 and this attention is only the projection of the value. After
training only the encoder is used.

Shapes: B texts, S sequence length of a text, M = B * (S - 1) predicted tokens, D hidden size, V vocabulary size.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Unpack

import keras
from keras import ops

from bert_cli.model.fused import Tensor, shifted_key
from bert_cli.model.heads import Columns, MaskedLM, SentenceEmbedding, Sums
from bert_cli.model.layers import MASKED_SCORE, Configured, ConfiguredLayer, Output

OTHER_DROPOUT = 1 << 16  # added to the dropout ids of the encoder; a model has fewer ids


class VectorAttention(ConfiguredLayer):
    """Attention of every position to the vector of the text, with output projection and residual."""

    def __init__(self, *, dropout_id: int, **layer: Unpack[Configured]) -> None:
        self.dropout_id = dropout_id
        super().__init__(**layer)

    def _create_weights(self) -> None:
        size = self.config.hidden_size
        self.value = self.dense("value", size, size)
        self.project = Output(**self.part("output"), inputs=size, dropout_id=self.dropout_id)

    def call(self, x_BSD: Tensor, vector_B1D: Tensor, key: Tensor | None) -> Tensor:
        """[B, S, D], [B, 1, D] -> [B, S, D]."""
        value_B1D = ops.cast(self.value(vector_B1D), self.compute_dtype)
        value_BSD = ops.broadcast_to(value_B1D, ops.shape(x_BSD))
        return self.project(value_BSD, x_BSD, key)


class DenoisingDecoder(SentenceEmbedding):
    """The decoder and its masked-LM head; `encoder` are the blocks emb, hid_0 ... hid_(L-1) of the model."""

    READS = ("target_ids", "target_weights")
    COUNTS: ClassVar[Mapping[str, str]] = {"targets": "target_weights"}
    MEANS: ClassVar[Mapping[str, tuple[str, str]]] = {
        "loss": ("loss", "targets"),
        "accuracy": ("correct", "targets"),
    }

    def __init__(
        self,
        *,
        encoder: Sequence[Any],
        word_table: keras.Variable,
        chunks: int,
        dropout_id: int,
        **layer: Unpack[Configured],
    ) -> None:
        """Share the weights of the encoder; the loss is computed in `chunks` of the vocabulary."""
        self.encoder = encoder
        self.word_table = word_table
        self.chunks = chunks
        self.dropout_id = dropout_id
        super().__init__(**layer)

    def _create_weights(self) -> None:
        self.cross = [
            VectorAttention(**self.part(f"cross_{layer}"), dropout_id=self.dropout_id + layer)
            for layer in range(self.config.num_hidden_layers)
        ]
        self.masked_lm = MaskedLM(
            **self.part("masked_lm"), word_table=self.word_table, chunks=self.chunks
        )

    def call(
        self, hidden: Tensor, labels: Columns, counts: Columns, key: Tensor | None
    ) -> tuple[Tensor, Sums]:
        """Return the cross entropy of the tokens `target_ids` [B, S] after the first, predicted from the tokens before.

        `target_weights` [B, S] is 1 for tokens that count.
        """
        targets_BS = ops.cast(labels["target_ids"], "int32")
        decoded = self._decode(targets_BS[:, :-1], hidden[:, :1], key)
        weights_M = ops.reshape(ops.cast(labels["target_weights"][:, 1:], "float32"), (-1,))
        loss, correct = self.masked_lm.loss_sums(decoded, targets_BS[:, 1:], weights_M)
        return loss / counts["targets"], {"loss": loss, "correct": correct}

    def _decode(self, ids: Tensor, vector_B1D: Tensor, key: Tensor | None) -> Tensor:
        key = shifted_key(key, OTHER_DROPOUT)
        vector_B1D = ops.cast(vector_B1D, self.compute_dtype)
        emb, *layers = self.encoder
        positions = ops.arange(ops.shape(ids)[1])
        is_later_SS = ops.cast(positions[None] > positions[:, None], "float32")
        bias = (is_later_SS * MASKED_SCORE)[None, None]
        x_BSD = emb(None, {"input_ids": ids, "segment_ids": ops.zeros_like(ids)}, key)
        for layer, cross in zip(layers, self.cross, strict=True):
            x_BSD = layer.attention(x_BSD, bias, key)
            x_BSD = layer.feed_forward(cross(x_BSD, vector_B1D, key), key)
        return x_BSD
