"""Embeddings, encoder layer, gather of the masked places, pooler: the blocks before the heads.

Every block is `block(hidden, batch, key) -> hidden`; its READS names the columns of a micro-batch that it
needs. Weights are never cast behind our back: products run in the compute dtype of the policy, what is
between them in float32, and one tensor in the compute dtype travels from block to block.

An example may be a pack of several sequences (Krell et al. 2021). Its batch then has `position_ids`,
which start again in each sequence, and `next_sentence_positions`, where each begins, and `input_mask`
numbers the sequences instead of only telling them from padding.

Shapes: B examples, S places, P masked places, C sequences of a pack (1 without packing), N heads, H head
width, D model width, F inner width.
"""

from collections.abc import Hashable, Mapping

import keras
from keras import ops

from bert_cli.config.model import BertConfig
from bert_cli.model.dropout import Tensor, dropout, stream_of
from bert_cli.model.fused import added_and_normalized, biased_gelu, normalize, shares_of

# Added in float32 to the score of a padded place. exp(-1e9 - max) is exactly 0 there, and a row in
# which every place is padded still has finite scores.
MASKED_SCORE = -1e9


def product(x: Tensor, kernel: Tensor) -> Tensor:
    """Multiply the last axis of `x` by `kernel`, in the dtype of `x`.

    As one rank-2 product, whose gradient is again one product. The reshape afterwards also keeps
    Grappler from fusing product and bias in float16, a fusion that takes 40 ms a row on CPUs.
    """
    inputs, outputs = kernel.shape
    rows = ops.matmul(ops.reshape(x, (-1, inputs)), ops.cast(kernel, x.dtype))
    return ops.reshape(rows, (*ops.shape(x)[:-1], outputs))


def add_weight(layer: keras.layers.Layer, name: str, shape: tuple[int, ...]) -> keras.Variable:
    """A weight that Keras never casts; its first value is set by whoever builds the model."""
    return layer.add_weight(name=name, shape=shape, initializer="zeros", autocast=False)


class Dense(keras.layers.Layer):
    """x @ kernel in the compute dtype, plus bias in float32; the result stays float32."""

    def __init__(self, inputs: int, outputs: int, *, name: str, policy: keras.DTypePolicy) -> None:
        super().__init__(name=name, dtype=policy, autocast=False)
        self.kernel_shape = (inputs, outputs)
        self.build()

    def build(self) -> None:
        """Create the weights, inside this layer's name scope."""
        self.kernel = add_weight(self, "kernel", self.kernel_shape)
        self.bias = add_weight(self, "bias", self.kernel_shape[1:])

    def call(self, x: Tensor) -> Tensor:
        """[..., inputs] in the compute dtype -> [..., outputs] in float32."""
        return ops.cast(product(x, self.kernel), "float32") + ops.cast(self.bias, "float32")


class LayerNorm(keras.layers.Layer):
    """LayerNorm over the last axis, float32 in and out."""

    def __init__(self, width: int, epsilon: float, *, name: str, policy: keras.DTypePolicy) -> None:
        super().__init__(name=name, dtype=policy, autocast=False)
        self.width = width
        self.epsilon = epsilon
        self.build()

    def build(self) -> None:
        """Create the weights, inside this layer's name scope."""
        self.gamma = add_weight(self, "gamma", (self.width,))
        self.beta = add_weight(self, "beta", (self.width,))

    def call(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D], both float32."""
        return normalize(x, self.gamma, self.beta, self.epsilon)


class Table(keras.layers.Layer):
    """Rows looked up by number, as float32."""

    def __init__(self, rows: int, width: int, *, name: str, policy: keras.DTypePolicy) -> None:
        super().__init__(name=name, dtype=policy, autocast=False)
        self.table_shape = (rows, width)
        self.build()

    def build(self) -> None:
        """Create the weight, inside this layer's name scope."""
        self.embeddings = add_weight(self, "embeddings", self.table_shape)

    def call(self, numbers: Tensor) -> Tensor:
        """Integers [...] -> float32 [..., D]; only the rows read are cast."""
        return ops.cast(ops.take(self.embeddings, numbers, axis=0), "float32")


class Embeddings(keras.layers.Layer):
    """Block `emb`: word + position + segment, LayerNorm, dropout. The first block: no input."""

    READS = ("input_ids", "segment_ids", "position_ids")

    def __init__(
        self, config: BertConfig, *, name: str, policy: keras.DTypePolicy, site: int
    ) -> None:
        super().__init__(name=name, dtype=policy, autocast=False)
        self.config = config
        self.site = site
        self.build()

    def build(self) -> None:
        """Create the weights, inside this block's name scope."""
        config, policy = self.config, self.dtype_policy
        width = config.hidden_size
        self.word = Table(config.vocab_size, width, name="word", policy=policy)
        self.position = Table(config.max_position_embeddings, width, name="position", policy=policy)
        self.segment = Table(config.type_vocab_size, width, name="segment", policy=policy)
        self.layer_norm = LayerNorm(width, config.layer_norm_eps, name="layer_norm", policy=policy)

    def call(self, hidden: None, batch: Mapping[str, Tensor], key: Tensor | None) -> Tensor:
        """Reads `input_ids`, `segment_ids` and, of packs, `position_ids` [B, S]; returns [B, S, D]."""
        is_packed = "position_ids" in batch
        places = (
            batch["position_ids"] if is_packed else ops.arange(ops.shape(batch["input_ids"])[1])
        )
        words_BSD = self.word(batch["input_ids"]) + self.segment(batch["segment_ids"])
        x_BSD = self.layer_norm(words_BSD + self.position(places))
        x_BSD = dropout(x_BSD, self.config.hidden_dropout_prob, stream_of(key, self.site))
        return ops.cast(x_BSD, self.compute_dtype)


class Sublayer(keras.layers.Layer):
    """The end of both halves of an encoder layer: dense, dropout, residual, LayerNorm (post-norm)."""

    def __init__(
        self, inputs: int, config: BertConfig, *, name: str, policy: keras.DTypePolicy, site: int
    ) -> None:
        super().__init__(name=name, dtype=policy, autocast=False)
        self.width = inputs
        self.config = config
        self.site = site
        self.build()

    def build(self) -> None:
        """Create the weights, inside this layer's name scope."""
        config, policy = self.config, self.dtype_policy
        self.dense = Dense(self.width, config.hidden_size, name="dense", policy=policy)
        self.layer_norm = LayerNorm(
            config.hidden_size, config.layer_norm_eps, name="layer_norm", policy=policy
        )

    def call(self, x: Tensor, residual_BSD: Tensor, key: Tensor | None) -> Tensor:
        """Add what this half computed to what came in, and normalise the sum: [B, S, D]."""
        norm = self.layer_norm
        return added_and_normalized(
            product(x, self.dense.kernel),
            self.dense.bias,
            residual_BSD,
            (norm.gamma, norm.beta),
            norm.epsilon,
            self.config.hidden_dropout_prob,
            stream_of(key, self.site),
        )


class SelfAttention(keras.layers.Layer):
    """Multi-head attention (Vaswani et al. 2017, equation 1), its output and its residual."""

    def __init__(
        self, config: BertConfig, *, name: str, policy: keras.DTypePolicy, site: int
    ) -> None:
        super().__init__(name=name, dtype=policy, autocast=False)
        self.config = config
        self.site = site
        self.build()

    def build(self) -> None:
        """Create the weights, inside this layer's name scope."""
        width, policy = self.config.hidden_size, self.dtype_policy
        self.query = Dense(width, width, name="query", policy=policy)
        self.key = Dense(width, width, name="key", policy=policy)
        self.value = Dense(width, width, name="value", policy=policy)
        self.project = Sublayer(
            width, self.config, name="output", policy=policy, site=self.site + 1
        )

    def call(self, x_BSD: Tensor, unread: Tensor, key: Tensor | None) -> Tensor:
        """[B, S, D] -> [B, S, D]; `unread` is added to the scores, as `unread_scores` makes it."""
        # The scale goes into the query in float32: scores of a float16 product stay far from 65504.
        scale = (self.config.hidden_size // self.config.num_attention_heads) ** -0.5
        query_BNSH = self._heads(self.query(x_BSD) * scale, (0, 2, 1, 3))
        key_BNHS = self._heads(self.key(x_BSD), (0, 2, 3, 1))
        value_BNSH = self._heads(self.value(x_BSD), (0, 2, 1, 3))
        rate = self.config.attention_probs_dropout_prob
        scores_BNSS = ops.matmul(query_BNSH, key_BNHS)
        shares_BNSS = shares_of(scores_BNSS, unread, rate, stream_of(key, self.site))
        read_BNSH = ops.matmul(shares_BNSS, value_BNSH)
        read_BSD = ops.reshape(ops.transpose(read_BNSH, (0, 2, 1, 3)), ops.shape(x_BSD))
        return self.project(read_BSD, x_BSD, key)

    def _heads(self, x_BSD: Tensor, order: tuple[int, ...]) -> Tensor:
        """Cut D into heads, [B, S, N, H], in the compute dtype, and put the axes in `order`."""
        heads = self.config.num_attention_heads
        shape = (*ops.shape(x_BSD)[:2], heads, self.config.hidden_size // heads)
        return ops.transpose(ops.reshape(ops.cast(x_BSD, self.compute_dtype), shape), order)


class FeedForward(keras.layers.Layer):
    """Two dense layers with the exact GELU between them, and the residual."""

    def __init__(
        self, config: BertConfig, *, name: str, policy: keras.DTypePolicy, site: int
    ) -> None:
        super().__init__(name=name, dtype=policy, autocast=False)
        self.config = config
        self.site = site
        self.build()

    def build(self) -> None:
        """Create the weights, inside this layer's name scope."""
        config, policy = self.config, self.dtype_policy
        self.inner = Dense(
            config.hidden_size, config.intermediate_size, name="inner", policy=policy
        )
        self.project = Sublayer(
            config.intermediate_size, config, name="output", policy=policy, site=self.site
        )

    def call(self, x_BSD: Tensor, key: Tensor | None) -> Tensor:
        """[B, S, D] -> [B, S, D], through [B, S, F]."""
        inner_BSF = biased_gelu(product(x_BSD, self.inner.kernel), self.inner.bias)
        return self.project(inner_BSF, x_BSD, key)


class EncoderLayer(keras.layers.Layer):
    """Block `hid_N`: attention, then feed-forward. Uses the dropout sites `site` to `site` + 2."""

    SITES = 3
    READS = ("input_mask", "position_ids")

    def __init__(
        self, config: BertConfig, *, name: str, policy: keras.DTypePolicy, site: int
    ) -> None:
        super().__init__(name=name, dtype=policy, autocast=False)
        self.config = config
        self.site = site
        self.build()

    def build(self) -> None:
        """Create the weights, inside this block's name scope."""
        config, policy, site = self.config, self.dtype_policy, self.site
        self.attention = SelfAttention(config, name="attention", policy=policy, site=site)
        self.feed_forward = FeedForward(config, name="feed_forward", policy=policy, site=site + 2)

    @property
    def kind(self) -> Hashable:
        """What layers have in common that differ by their weights and `site` alone."""
        return type(self), self.config, self.dtype_policy.name

    def call(self, hidden: Tensor, batch: Mapping[str, Tensor], key: Tensor | None) -> Tensor:
        """Reads `input_mask` [B, S], 0 for padding; [B, S, D] -> [B, S, D]."""
        return self.feed_forward(self.attention(hidden, unread_scores(batch), key), key)


def unread_scores(batch: Mapping[str, Tensor]) -> Tensor:
    """What is added to a place's scores of the places that it must not read: [B, 1, 1, S] or [B, 1, S, S].

    Of a single sequence that is padding, the same for all places. In a pack it is every place of another
    sequence too; padding reads padding, which no real place does.
    """
    # Two slices: TFLite has none that adds two axes to a tensor of unknown shape.
    mask_B1S = batch["input_mask"][:, None]
    if "position_ids" in batch:
        others_BSS = ops.not_equal(mask_B1S, ops.swapaxes(mask_B1S, 1, 2))
        return (ops.cast(others_BSS, "float32") * MASKED_SCORE)[:, None]
    return (1.0 - ops.cast(mask_B1S, "float32"))[:, None] * MASKED_SCORE


class MaskedPlaces(keras.layers.Layer):
    """Block `enc_out`: keep only the places the heads read, each sequence's [CLS] first. No weights."""

    READS = ("masked_lm_positions", "next_sentence_positions")

    def __init__(self, *, name: str, policy: keras.DTypePolicy) -> None:
        super().__init__(name=name, dtype=policy, autocast=False)
        self.build()

    def build(self) -> None:
        """Nothing to create."""

    def call(self, hidden: Tensor, batch: Mapping[str, Tensor], key: Tensor | None) -> Tensor:
        """Reads `masked_lm_positions` [B, P], of packs `next_sentence_positions` [B, C]; [B, C + P, D]."""
        places_BP = ops.cast(batch["masked_lm_positions"], "int32")
        examples, places, width = ops.shape(hidden)
        first_B1 = ops.arange(examples, dtype="int32")[:, None] * places
        firsts_BC = first_B1
        if "next_sentence_positions" in batch:
            firsts_BC = first_B1 + ops.cast(batch["next_sentence_positions"], "int32")
        rows = ops.concatenate([firsts_BC, first_B1 + places_BP], axis=1)
        return ops.take(ops.reshape(hidden, (-1, width)), rows, axis=0)


class Pooler(keras.layers.Layer):
    """Block `pool`: tanh(dense([CLS])) in the first row or rows; the masked places pass through."""

    READS = ("next_sentence_positions",)

    def __init__(self, config: BertConfig, *, name: str, policy: keras.DTypePolicy) -> None:
        super().__init__(name=name, dtype=policy, autocast=False)
        self.width = config.hidden_size
        self.build()

    def build(self) -> None:
        """Create the weights, inside this block's name scope."""
        self.dense = Dense(self.width, self.width, name="dense", policy=self.dtype_policy)

    def call(self, hidden: Tensor, batch: Mapping[str, Tensor], key: Tensor | None) -> Tensor:
        """[B, C + P, D] -> [B, C + P, D]."""
        starts = batch.get("next_sentence_positions")
        sequences = 1 if starts is None else starts.shape[1]
        first_BCD = ops.cast(ops.tanh(self.dense(hidden[:, :sequences])), self.compute_dtype)
        return ops.concatenate([first_BCD, hidden[:, sequences:]], axis=1)
