"""Embeddings, encoder layer, gather of the masked positions, pooler: the blocks before the heads.

Every block is `block(hidden, batch, key) -> hidden`; READS names the columns of a micro-batch that it needs.
`model/build.py` has their order: `emb`, `hid_0` and so on, then in pre-training `enc_out`, `pool`, `heads`. Their
`dense`, `norm` and `part` stand in `arithmetic/parts.py`, as does `scaled`, which does nothing without Unit Scaling.

Matrix products, and the hidden states between blocks, have the compute dtype of the policy; the operations between
products run in float32. In a pack of several sequences (Krell et al. 2021) `position_ids` start again in each sequence,
`next_sentence_positions` are their first positions, and `input_mask` numbers them. Shapes: B examples, S length, P
masked positions, C sequences (1 without packs), N heads, H head size, D hidden size, F intermediate size.
"""

from typing import ClassVar

from keras import ops

from bert_cli.model.arithmetic.fused import (
    Dropout,
    Tensor,
    dropout,
    dropout_seed,
    exact_matmul,
    float32,
    matmul,
)
from bert_cli.model.arithmetic.parts import Block, Columns, Key, Layer

# Added in float32 to the score of a padded position: its exponential is 0, and a row of padding has finite scores.
MASKED_SCORE = -1e9


class Embeddings(Block):
    """Block `emb`, the first block: word + position + segment embeddings, LayerNorm, dropout."""

    READS = ("input_ids", "segment_ids", "position_ids")

    def _create_weights(self) -> None:
        config = self.config
        self.word = self.embedding("word", config.vocab_size)
        self.position = self.embedding("position", config.max_position_embeddings)
        self.segment = self.embedding("segment", config.type_vocab_size)
        self.layer_norm = self.norm()

    def call(self, hidden: None, batch: Columns, key: Key) -> Tensor:
        """Reads `input_ids`, `segment_ids` and, for packs, `position_ids` [B, S]; returns [B, S, D]."""
        positions = batch.get("position_ids")
        if positions is None:
            # [S], the same for every example; columns of packs are [B, S].
            positions = ops.arange(ops.shape(batch["input_ids"])[1])
        x_BSD = self.word(batch["input_ids"]) + self.segment(batch["segment_ids"])
        x_BSD = self.layer_norm(self.scaled("sum", x_BSD + self.position(positions)))
        seed = dropout_seed(key, self.dropout_id)
        x_BSD = dropout(x_BSD, self.config.hidden_dropout_prob, seed)
        return ops.cast(x_BSD, self.compute_dtype)


class Output(Layer):
    """The end of both halves of an encoder layer: dense, dropout, residual, LayerNorm (post-norm)."""

    inputs: int
    dropout_id: int

    def _create_weights(self) -> None:
        self.projection = self.dense("dense", self.inputs)
        self.layer_norm = self.norm()

    def call(self, x: Tensor, residual_BSD: Tensor, key: Key) -> Tensor:
        """Project to [B, S, D], add the residual and normalise."""
        return self.operations.add_and_normalize(
            self.projection.operands(x),
            residual_BSD,
            self.layer_norm.parameters,
            Dropout(self.config.hidden_dropout_prob, dropout_seed(key, self.dropout_id)),
        )


class SelfAttention(Layer):
    """Multi-head attention (Vaswani et al. 2017, equation 1), with output projection and residual."""

    dropout_id: int

    def _create_weights(self) -> None:
        self.query, self.key, self.value = map(self.dense, ("query", "key", "value"))
        self._create_output()

    def _create_output(self) -> None:
        size = self.config.hidden_size
        self.project = Output(**self.part("output"), inputs=size, dropout_id=self.dropout_id + 1)

    def call(self, x_BSD: Tensor, bias: Tensor, key: Key) -> Tensor:
        """[B, S, D] -> [B, S, D]; `bias` is the attention bias."""
        return self.project(self.context(x_BSD, bias, key), x_BSD, key)

    def context(self, x_BSD: Tensor, bias: Tensor, key: Key) -> Tensor:
        """[B, S, D] -> [B, S, D]: the mean of the values, weighted by the softmax of query times key.

        `key` is that of dropout.
        """
        # 1 / sqrt(H): the variance of a score is about 1, whatever the size of a head (Vaswani et al. 2017, section
        # 3.2.1).
        scale = (self.config.hidden_size // self.config.num_attention_heads) ** -0.5
        operations = self.operations
        # `query` or `probabilities` applies the scale, never both.
        query_BSD = operations.query(operations.project(self.query, x_BSD), scale)
        key_BSD = operations.project(self.key, x_BSD)
        value_BSD = operations.project(self.value, x_BSD)
        # The key is transposed while it is divided into heads, so that the scores need no transposed product.
        query_BNSH = self._heads(query_BSD, (0, 2, 1, 3))
        key_BNHS = self._heads(key_BSD, (0, 2, 3, 1))
        value_BNSH = self._heads(value_BSD, (0, 2, 1, 3))
        scores_BNSS = matmul(query_BNSH, key_BNHS)
        seed = dropout_seed(key, self.dropout_id)
        dropped = Dropout(self.config.attention_probs_dropout_prob, seed)
        probabilities_BNSS = operations.probabilities(scores_BNSS, bias, scale, dropped)
        context_BNSH = matmul(probabilities_BNSS, value_BNSH)
        return ops.reshape(ops.transpose(context_BNSH, (0, 2, 1, 3)), ops.shape(x_BSD))

    def _heads(self, x_BSD: Tensor, order: tuple[int, ...]) -> Tensor:
        """Split D into heads [B, S, N, H] in the compute dtype and transpose the axes to `order`."""
        heads = self.config.num_attention_heads
        shape = (*ops.shape(x_BSD)[:2], heads, self.config.hidden_size // heads)
        return ops.transpose(ops.reshape(ops.cast(x_BSD, self.compute_dtype), shape), order)


class FeedForward(Layer):
    """Two dense layers with the exact GELU between them, and the residual."""

    dropout_id: int

    def _create_weights(self) -> None:
        inner = self.config.intermediate_size
        self.inner = self.dense("inner", outputs=inner)
        self.project = Output(**self.part("output"), inputs=inner, dropout_id=self.dropout_id)

    def call(self, x_BSD: Tensor, key: Key) -> Tensor:
        """[B, S, D] -> [B, S, D], through [B, S, F]."""
        inner_BSF = self.operations.dense_gelu(*self.inner.operands(x_BSD))
        return self.project(inner_BSF, x_BSD, key)


class EncoderLayer(Block):
    """Block `hid_N`: attention, then feed-forward. Uses the dropout ids `dropout_id` to `dropout_id` + 2."""

    # One each for the attention probabilities, the output of attention and the output of the feed-forward layer.
    DROPOUT_IDS = 3
    READS = ("input_mask", "position_ids")
    number: int

    def _create_weights(self) -> None:
        first = self.dropout_id = 1 + self.number * self.DROPOUT_IDS
        self.attention = SelfAttention(**self.part("attention"), dropout_id=first)
        self.feed_forward = FeedForward(**self.part("feed_forward"), dropout_id=first + 2)

    def call(self, hidden: Tensor, batch: Columns, key: Key) -> Tensor:
        """Reads `input_mask` [B, S], 0 for padding; [B, S, D] -> [B, S, D]."""
        hidden = self.attention(hidden, attention_bias(batch), key)
        return self.feed_forward(hidden, key)


def attention_bias(batch: Columns) -> Tensor:
    """Return the additive mask of padding [B, 1, 1, S]; for packs it also masks other sequences [B, 1, S, S]."""
    # Two slices: TFLite has none that adds two axes to a tensor of unknown shape.
    mask_B1S = batch["input_mask"][:, None]
    if "position_ids" in batch:
        # Numbers of sequences, and 0 for padding: a position reads the positions with its own number.
        is_other_BSS = ops.not_equal(mask_B1S, ops.swapaxes(mask_B1S, 1, 2))
        return (float32(is_other_BSS) * MASKED_SCORE)[:, None]
    return (1.0 - float32(mask_B1S))[:, None] * MASKED_SCORE


class GatherPositions(Block):
    """Block `enc_out`: gather the positions that the heads read, each sequence's [CLS] first. No weights."""

    READS: ClassVar[tuple[str, ...]] = ("masked_lm_positions", "next_sentence_positions")
    has_first = True  # ModernBERT has no next-sentence prediction, so no first position

    def call(self, hidden: Tensor, batch: Columns, key: Key) -> Tensor:
        """Reads `masked_lm_positions` [B, P], for packs `next_sentence_positions` [B, C]; returns [B, C + P, D]."""
        positions_BP = ops.cast(batch["masked_lm_positions"], "int32")
        examples, length, size = ops.shape(hidden)
        start_B1 = ops.arange(examples, dtype="int32")[:, None] * length
        first_BC = start_B1
        if "next_sentence_positions" in batch:
            first_BC = start_B1 + ops.cast(batch["next_sentence_positions"], "int32")
        # Flat indices: one gather from [B * S, D] for all examples, and its gradient is one scatter.
        rows = [first_BC] if self.has_first else []
        rows += [start_B1 + positions_BP]
        return ops.take(ops.reshape(hidden, (-1, size)), ops.concatenate(rows, axis=1), axis=0)


class Pooler(Block):
    """Block `pool`: tanh(dense([CLS])) in the first rows; the masked positions pass through."""

    READS = ("next_sentence_positions",)

    def _create_weights(self) -> None:
        self.projection = self.dense("dense")

    def call(self, hidden: Tensor, batch: Columns, key: Key) -> Tensor:
        """[B, C + P, D] -> [B, C + P, D]; before a classifier [B, S, D], pooled at its first position."""
        starts = batch.get("next_sentence_positions")
        sequences = 1 if starts is None else starts.shape[1]
        first_BCD = ops.tanh(self.projection(hidden[:, :sequences]))
        first_BCD = ops.cast(first_BCD, self.compute_dtype)
        return ops.concatenate([first_BCD, hidden[:, sequences:]], axis=1)


class MeanPooling(Block):
    """Block `mean_pool`: the mean over the tokens of each text. No weights."""

    READS: ClassVar[tuple[str, ...]] = ("input_mask", "next_sentence_positions")

    def call(self, hidden: Tensor, batch: Columns, key: Key) -> Tensor:
        """Reads `input_mask` [B, S]; [B, S, D] -> [B, 1, D] in float32, for packs [B * C, 1, D]."""
        hidden = float32(hidden)
        if "next_sentence_positions" not in batch:
            mask_BS1 = float32(batch["input_mask"])[:, :, None]
            return ops.sum(hidden * mask_BS1, 1, keepdims=True) / ops.sum(
                mask_BS1, 1, keepdims=True
            )
        # `input_mask` numbers the texts of a pack from 1.
        numbers_C1 = ops.arange(1, 1 + batch["next_sentence_positions"].shape[1])[:, None]
        is_in_BCS = float32(ops.equal(numbers_C1, batch["input_mask"][:, None]))
        # A pack may have fewer texts.
        sizes_BC1 = ops.maximum(ops.sum(is_in_BCS, 2, keepdims=True), 1.0)
        means_BCD = exact_matmul(is_in_BCS / sizes_BC1, hidden)
        return ops.reshape(means_BCD, (-1, 1, hidden.shape[-1]))
