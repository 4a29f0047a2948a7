"""Embeddings, encoder layer, gather of the masked positions, pooler: the blocks before the heads.

Every block is `block(hidden, batch, key) -> hidden`; READS names the columns of a micro-batch that it needs. Matrix
products, and the hidden states between blocks, have the compute dtype of the policy; the operations between products
run in float32. An example may be a pack of several sequences (Krell et al. 2021): then `position_ids` start again in
each sequence, `next_sentence_positions` are their first positions, and `input_mask` numbers them. Shapes: B examples, S
sequence length, P masked positions, C sequences of a pack (1 without packing), N heads, H head size, D hidden size, F
intermediate size.
"""

from collections.abc import Hashable, Mapping
from functools import cached_property
from typing import Any, TypedDict, Unpack

import keras
from keras import ops

from bert_cli.facts.bert import BertConfig
from bert_cli.model.fused import (
    NEVER,
    Tensor,
    add_and_normalize,
    attention_probabilities,
    bias_gelu,
    dense_by_library,
    dropout,
    dropout_seed,
    exact_matmul,
    matmul,
    normalize,
    normalize_by_library,
    scaled,
)
from bert_cli.model.scaling import Factor

# Added in float32 to the score of a padded position: its exponential is 0, and a row of padding has finite scores.
MASKED_SCORE = -1e9
# Attributes of Keras itself, and attributes that may differ between layers with one trace.
NOT_IN_TRACE_KEY = {*vars(keras.layers.Layer(name="layer")), "factors", "dropout_id"}


def linear(x: Tensor, kernel: Tensor, *, uses_amx: bool = False) -> Tensor:
    """Multiply the last axis of `x` by `kernel`, in the dtype of `x`, as one rank-2 product.

    The reshape afterwards keeps Grappler from fusing product and bias in float16, which takes 40 ms a row on CPUs.
    """
    inputs, outputs = kernel.shape
    rows = matmul(ops.reshape(x, (-1, inputs)), kernel, uses_amx=uses_amx)
    return ops.reshape(rows, (*ops.shape(x)[:-1], outputs))


class Layer(keras.layers.Layer):
    """A Keras layer that is built at once, inside its name scope, and casts neither inputs nor weights."""

    factors: Mapping[str, Factor] = {}
    """Factors of Unit Scaling, by path below this layer."""
    fuse_above = NEVER
    """Elements above which the operations between matrix products are fused."""
    uses_library = False
    """Whether TensorFlow's library computes bias, GELU, softmax and LayerNorm; for predictions on a CPU."""
    uses_amx = False
    """Whether products in bfloat16 have the form that XLA computes with AMX."""

    def __init__(self, *, name: str, policy: keras.DTypePolicy) -> None:
        """Create the weights; a class first sets the attributes on which they depend."""
        super().__init__(name=name, dtype=policy, autocast=False)
        self.build()

    def build(self) -> None:
        """Create the weights, in the scope of the layer's name."""
        self._create_weights()

    def _create_weights(self) -> None:
        pass

    def add_zeros(self, name: str, *shape: int) -> keras.Variable:
        """Return a new weight; `build_block` sets its first value."""
        return self.add_weight(name=name, shape=shape, initializer="zeros", autocast=False)

    @cached_property
    def trace_key(self) -> Hashable:
        """A key that is equal for layers that may share one trace.

        Such layers have equal classes and attributes, also in their inner layers. The values of their weights and the
        dropout ids may differ. A layer with an attribute that cannot be compared shares no trace.
        """
        values: list[Any] = [type(self), self.dtype_policy.name, *self.factors.items()]
        for name, value in vars(self).items():
            if name.startswith("_") or name in NOT_IN_TRACE_KEY:
                continue
            if isinstance(value, Layer):
                value = value.trace_key
            elif isinstance(value, keras.Variable):
                value = value.shape
            values.append((name, value if isinstance(value, Hashable) else id(value)))
        return tuple(values)

    @property
    def kernel_dtype(self) -> str:
        """The dtype to which the kernels of an encoder layer may be cast before it reads them.

        Unit Scaling multiplies kernels before they are rounded, and products for AMX return gradients in float32.
        """
        is_cast_late = bool(self.factors) or self.uses_amx
        return str(self.variable_dtype if is_cast_late else self.compute_dtype)

    def set_factors(self, table: Mapping[str, Factor]) -> None:
        """Take the factors of this layer and of its inner layers from a table of Unit Scaling, by path."""
        paths = {path.removeprefix(f"{self.path}/"): path for path in table}
        self.factors = {name: table[path] for name, path in paths.items() if name != path}
        for layer in vars(self).values():
            if isinstance(layer, Layer):
                layer.set_factors(table)

    def fuse_operations(self, above: float, *, uses_library: bool, uses_amx: bool) -> None:
        """Set the form of the operations in this layer and its inner layers; see the attributes."""
        self.fuse_above = above
        self.uses_library = uses_library
        self.uses_amx = uses_amx
        for value in vars(self).values():
            for layer in value if isinstance(value, list) else [value]:
                if isinstance(layer, Layer):
                    layer.fuse_operations(above, uses_library=uses_library, uses_amx=uses_amx)

    def scaled(self, name: str, value: Any) -> Any:
        """Return a weight or activation times its factors; without Unit Scaling the value itself."""
        factor = self.factors.get(name)
        return value if factor is None else scaled(value, factor.forward, factor.backward)


class Dense(Layer):
    """x @ kernel in the compute dtype, plus bias in float32; the result stays float32."""

    def __init__(
        self,
        *,
        name: str,
        policy: keras.DTypePolicy,
        inputs: int,
        outputs: int,
        has_bias: bool = True,
    ) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self.has_bias = has_bias
        super().__init__(name=name, policy=policy)

    def _create_weights(self) -> None:
        self.kernel = self.add_zeros("kernel", self.inputs, self.outputs)
        self.bias = self.add_zeros("bias", self.outputs) if self.has_bias else None

    def call(self, x: Tensor) -> Tensor:
        """[..., inputs] in the compute dtype -> [..., outputs] in float32."""
        product = linear(x, self.scaled("kernel", self.kernel), uses_amx=self.uses_amx)
        product = ops.cast(product, "float32")
        if self.bias is None:
            return product
        return product + ops.cast(self.scaled("bias", self.bias), "float32")

    def in_compute_dtype(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs], both in the compute dtype; without the library the result is float32."""
        if self.uses_library and self.bias is not None:
            return dense_by_library(x, self.kernel, self.bias)
        return self(x)


class LayerNorm(Layer):
    """LayerNorm over the last axis, float32 in and out."""

    def __init__(
        self,
        *,
        name: str,
        policy: keras.DTypePolicy,
        size: int,
        epsilon: float,
        has_beta: bool = True,
    ) -> None:
        self.size = size
        self.epsilon = epsilon
        self.has_beta = has_beta
        super().__init__(name=name, policy=policy)

    def _create_weights(self) -> None:
        self.gamma = self.add_zeros("gamma", self.size)
        self.beta = self.add_zeros("beta", self.size) if self.has_beta else None

    def call(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D], both float32."""
        if self.uses_library and self.beta is not None:
            return normalize_by_library(x, self.gamma, self.beta, self.epsilon)
        epsilon = self.scaled("epsilon", self.epsilon)
        return normalize(x, *self.scales, epsilon)

    @property
    def scales(self) -> tuple[Tensor, Tensor | None]:
        """Return gamma and beta."""
        return self.scaled("gamma", self.gamma), self.scaled("beta", self.beta)


class Embedding(Layer):
    """A table whose rows are looked up by number, as float32."""

    def __init__(self, *, name: str, policy: keras.DTypePolicy, rows: int, size: int) -> None:
        self.rows = rows
        self.size = size
        super().__init__(name=name, policy=policy)

    def _create_weights(self) -> None:
        self.embeddings = self.add_zeros("embeddings", self.rows, self.size)

    def call(self, numbers: Tensor) -> Tensor:
        """Integers [...] -> float32 [..., D]; only the rows that are read are cast."""
        rows = ops.cast(ops.take(self.embeddings, numbers, axis=0), "float32")
        return self.scaled("embeddings", rows)


class Configured(TypedDict):
    """The arguments of every layer of the model's sizes."""

    name: str
    policy: keras.DTypePolicy
    config: BertConfig


class ConfiguredLayer(Layer):
    """A layer of the model's sizes."""

    def __init__(self, *, name: str, policy: keras.DTypePolicy, config: BertConfig) -> None:
        self.config = config
        super().__init__(name=name, policy=policy)

    def part(self, name: str) -> Configured:
        """Return the arguments of a layer inside this layer."""
        return {"name": name, "policy": self.dtype_policy, "config": self.config}

    def dense(self, name: str, inputs: int, outputs: int, *, has_bias: bool = True) -> Dense:
        """Return a new dense layer of this layer's policy."""
        policy = self.dtype_policy
        return Dense(name=name, policy=policy, inputs=inputs, outputs=outputs, has_bias=has_bias)

    def norm(self, name: str = "layer_norm", *, has_beta: bool = True) -> LayerNorm:
        """Return a new LayerNorm of this layer's policy."""
        return LayerNorm(
            name=name,
            policy=self.dtype_policy,
            size=self.config.hidden_size,
            epsilon=self.config.layer_norm_eps,
            has_beta=has_beta,
        )


class Embeddings(ConfiguredLayer):
    """Block `emb`, the first block: word + position + segment embeddings, LayerNorm, dropout."""

    READS = ("input_ids", "segment_ids", "position_ids")
    dropout_id = 0

    def _create_weights(self) -> None:
        config = self.config
        shared = {"policy": self.dtype_policy, "size": config.hidden_size}
        self.word = Embedding(name="word", **shared, rows=config.vocab_size)
        self.position = Embedding(name="position", **shared, rows=config.max_position_embeddings)
        self.segment = Embedding(name="segment", **shared, rows=config.type_vocab_size)
        self.layer_norm = self.norm()

    def call(self, hidden: None, batch: Mapping[str, Tensor], key: Tensor | None) -> Tensor:
        """Reads `input_ids`, `segment_ids` and, for packs, `position_ids` [B, S]; returns [B, S, D]."""
        positions = batch.get("position_ids")
        if positions is None:
            positions = ops.arange(ops.shape(batch["input_ids"])[1])
        x_BSD = self.word(batch["input_ids"]) + self.segment(batch["segment_ids"])
        x_BSD = self.layer_norm(self.scaled("sum", x_BSD + self.position(positions)))
        seed = dropout_seed(key, self.dropout_id)
        x_BSD = dropout(x_BSD, self.config.hidden_dropout_prob, seed)
        return ops.cast(x_BSD, self.compute_dtype)


class Output(ConfiguredLayer):
    """The end of both halves of an encoder layer: dense, dropout, residual, LayerNorm (post-norm)."""

    def __init__(self, *, inputs: int, dropout_id: int, **layer: Unpack[Configured]) -> None:
        self.inputs = inputs
        self.dropout_id = dropout_id
        super().__init__(**layer)

    def _create_weights(self) -> None:
        self.projection = self.dense("dense", self.inputs, self.config.hidden_size)
        self.layer_norm = self.norm()

    def call(self, x: Tensor, residual_BSD: Tensor, key: Tensor | None) -> Tensor:
        """Project to [B, S, D], add the residual and normalise."""
        norm = self.layer_norm
        projection = self.projection
        if self.uses_library:
            return norm(projection.in_compute_dtype(x) + residual_BSD)
        x = self.scaled("input", x)
        return add_and_normalize(
            linear(x, projection.scaled("kernel", projection.kernel), uses_amx=self.uses_amx),
            projection.scaled("bias", projection.bias),
            residual_BSD,
            norm.scales,
            norm.epsilon,
            self.config.hidden_dropout_prob,
            dropout_seed(key, self.dropout_id),
            self.fuse_above,
        )


class SelfAttention(ConfiguredLayer):
    """Multi-head attention (Vaswani et al. 2017, equation 1), with output projection and residual.

    With `is_pre_norm` the caller applies `layer_norm` to its input and adds the residual.
    """

    def __init__(
        self, *, dropout_id: int, is_pre_norm: bool = False, **layer: Unpack[Configured]
    ) -> None:
        self.dropout_id = dropout_id
        self.is_pre_norm = is_pre_norm
        super().__init__(**layer)

    def _create_weights(self) -> None:
        size = self.config.hidden_size
        self.query, self.key, self.value = (
            self.dense(name, size, size) for name in ("query", "key", "value")
        )
        if self.is_pre_norm:
            self.layer_norm = self.norm()
            self.project = self.dense("output", size, size)
            return
        self.project = Output(**self.part("output"), inputs=size, dropout_id=self.dropout_id + 1)

    def call(self, x_BSD: Tensor, bias: Tensor, key: Tensor | None) -> Tensor:
        """[B, S, D] -> [B, S, D]; `bias` is the attention bias."""
        # The query is scaled in float32: scores of a float16 product stay far from 65504.
        scale = (self.config.hidden_size // self.config.num_attention_heads) ** -0.5
        scored_BSD = self.scaled("split_scores", x_BSD)
        query_BSD = self.query.in_compute_dtype(scored_BSD)
        key_BSD = self.key.in_compute_dtype(scored_BSD)
        value_BSD = self.value.in_compute_dtype(self.scaled("split", x_BSD))
        if not self.uses_library:
            query_BSD = self.scaled("queries", query_BSD * scale)
        query_BNSH = self._heads(query_BSD, (0, 2, 1, 3))
        key_BNHS = self._heads(self.scaled("keys", key_BSD), (0, 2, 3, 1))
        value_BNSH = self._heads(self.scaled("values", value_BSD), (0, 2, 1, 3))
        rate = self.config.attention_probs_dropout_prob
        seed = dropout_seed(key, self.dropout_id)
        scores_BNSS = matmul(query_BNSH, key_BNHS, uses_amx=self.uses_amx)
        if self.uses_library:
            # The library multiplies, adds and takes the softmax in float32, and rounds the results.
            scores_BNSS = scores_BNSS * scale + ops.cast(bias, self.compute_dtype)
            probabilities_BNSS = ops.softmax(scores_BNSS, axis=-1)
        else:
            probabilities_BNSS = attention_probabilities(
                scores_BNSS, bias, rate, seed, self.fuse_above
            )
        context_BNSH = matmul(probabilities_BNSS, value_BNSH, uses_amx=self.uses_amx)
        context_BSD = ops.reshape(ops.transpose(context_BNSH, (0, 2, 1, 3)), ops.shape(x_BSD))
        if self.is_pre_norm:
            return self.project(context_BSD)
        return self.project(context_BSD, x_BSD, key)

    def _heads(self, x_BSD: Tensor, order: tuple[int, ...]) -> Tensor:
        """Split D into heads [B, S, N, H] in the compute dtype and transpose the axes to `order`."""
        heads = self.config.num_attention_heads
        shape = (*ops.shape(x_BSD)[:2], heads, self.config.hidden_size // heads)
        return ops.transpose(ops.reshape(ops.cast(x_BSD, self.compute_dtype), shape), order)


class FeedForward(ConfiguredLayer):
    """Two dense layers with the exact GELU between them, and the residual."""

    def __init__(self, *, dropout_id: int, **layer: Unpack[Configured]) -> None:
        self.dropout_id = dropout_id
        super().__init__(**layer)

    def _create_weights(self) -> None:
        size = self.config.hidden_size
        inner = self.config.intermediate_size
        self.inner = self.dense("inner", size, inner)
        self.project = Output(**self.part("output"), inputs=inner, dropout_id=self.dropout_id)

    def call(self, x_BSD: Tensor, key: Tensor | None) -> Tensor:
        """[B, S, D] -> [B, S, D], through [B, S, F]."""
        inner = self.inner
        if self.uses_library:
            inner_BSF = dense_by_library(x_BSD, inner.kernel, inner.bias, is_gelu=True)
            return self.project(inner_BSF, x_BSD, key)
        kernel = inner.scaled("kernel", inner.kernel)
        product_BSF = linear(self.scaled("split", x_BSD), kernel, uses_amx=self.uses_amx)
        bias = inner.scaled("bias", inner.bias)
        inner_BSF = bias_gelu(product_BSF, bias, self.fuse_above)
        return self.project(inner_BSF, x_BSD, key)


class EncoderLayer(ConfiguredLayer):
    """Block `hid_N`: attention, then feed-forward. Uses the dropout ids `dropout_id` to `dropout_id` + 2."""

    DROPOUT_IDS = 3
    READS = ("input_mask", "position_ids")

    def __init__(self, *, number: int, **layer: Unpack[Configured]) -> None:
        self.dropout_id = 1 + number * self.DROPOUT_IDS
        super().__init__(**layer)

    def _create_weights(self) -> None:
        first = self.dropout_id
        self.attention = SelfAttention(**self.part("attention"), dropout_id=first)
        self.feed_forward = FeedForward(**self.part("feed_forward"), dropout_id=first + 2)

    def call(self, hidden: Tensor, batch: Mapping[str, Tensor], key: Tensor | None) -> Tensor:
        """Reads `input_mask` [B, S], 0 for padding; [B, S, D] -> [B, S, D]."""
        hidden = self.attention(hidden, attention_bias(batch), key)
        return self.feed_forward(hidden, key)


def attention_bias(batch: Mapping[str, Tensor]) -> Tensor:
    """Return the additive mask of padding [B, 1, 1, S]; for packs it also masks other sequences [B, 1, S, S]."""
    # Two slices: TFLite has none that adds two axes to a tensor of unknown shape.
    mask_B1S = batch["input_mask"][:, None]
    if "position_ids" in batch:
        is_other_BSS = ops.not_equal(mask_B1S, ops.swapaxes(mask_B1S, 1, 2))
        return (ops.cast(is_other_BSS, "float32") * MASKED_SCORE)[:, None]
    return (1.0 - ops.cast(mask_B1S, "float32"))[:, None] * MASKED_SCORE


class GatherPositions(ConfiguredLayer):
    """Block `enc_out`: gather the positions that the heads read, each sequence's [CLS] first. No weights."""

    READS: tuple[str, ...] = ("masked_lm_positions", "next_sentence_positions")
    has_first = True

    def call(self, hidden: Tensor, batch: Mapping[str, Tensor], key: Tensor | None) -> Tensor:
        """Reads `masked_lm_positions` [B, P], for packs `next_sentence_positions` [B, C]; returns [B, C + P, D]."""
        positions_BP = ops.cast(batch["masked_lm_positions"], "int32")
        examples, length, size = ops.shape(hidden)
        start_B1 = ops.arange(examples, dtype="int32")[:, None] * length
        first_BC = start_B1
        if "next_sentence_positions" in batch:
            first_BC = start_B1 + ops.cast(batch["next_sentence_positions"], "int32")
        rows = [first_BC] if self.has_first else []
        rows += [start_B1 + positions_BP]
        return ops.take(ops.reshape(hidden, (-1, size)), ops.concatenate(rows, axis=1), axis=0)


class Pooler(ConfiguredLayer):
    """Block `pool`: tanh(dense([CLS])) in the first rows; the masked positions pass through."""

    READS = ("next_sentence_positions",)

    def _create_weights(self) -> None:
        self.projection = self.dense("dense", self.config.hidden_size, self.config.hidden_size)

    def call(self, hidden: Tensor, batch: Mapping[str, Tensor], key: Tensor | None) -> Tensor:
        """[B, C + P, D] -> [B, C + P, D]."""
        starts = batch.get("next_sentence_positions")
        sequences = 1 if starts is None else starts.shape[1]
        first_BCD = self.projection(self.scaled("split", hidden[:, :sequences]))
        first_BCD = ops.cast(ops.tanh(first_BCD), self.compute_dtype)
        return ops.concatenate([first_BCD, hidden[:, sequences:]], axis=1)


class MeanPooling(ConfiguredLayer):
    """Block `mean_pool`: the mean over the tokens of each text. No weights."""

    READS: tuple[str, ...] = ("input_mask", "next_sentence_positions")

    def call(self, hidden: Tensor, batch: Mapping[str, Tensor], key: Tensor | None) -> Tensor:
        """Reads `input_mask` [B, S]; [B, S, D] -> [B, 1, D] in float32, for packs [B * C, 1, D]."""
        hidden = ops.cast(hidden, "float32")
        if "next_sentence_positions" not in batch:
            mask_BS1 = ops.cast(batch["input_mask"], "float32")[:, :, None]
            return ops.sum(hidden * mask_BS1, 1, keepdims=True) / ops.sum(
                mask_BS1, 1, keepdims=True
            )
        numbers_C1 = ops.arange(1, 1 + batch["next_sentence_positions"].shape[1])[:, None]
        is_in_BCS = ops.cast(ops.equal(numbers_C1, batch["input_mask"][:, None]), "float32")
        # A pack may have fewer texts.
        sizes_BC1 = ops.maximum(ops.sum(is_in_BCS, 2, keepdims=True), 1.0)
        means_BCD = exact_matmul(is_in_BCS / sizes_BC1, hidden)
        return ops.reshape(means_BCD, (-1, 1, hidden.shape[-1]))
