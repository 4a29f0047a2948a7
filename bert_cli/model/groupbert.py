"""The encoder layers of GroupBERT: convolution, feed-forward, attention, feed-forward.

From Chelombiev et al. 2021, arXiv 2106.05822, in the form that Graphcore published. Each of the four modules reads the
LayerNorm of the residual stream and adds its output to the stream (pre-norm); the last layer ends with a LayerNorm. The
stream is float32 inside a layer and has the compute dtype between them. Shapes as in `bert.encoder`, K positions of the
convolution's kernel, W channels of a group.
"""

import keras
from keras import ops

from bert_cli.arrays import Shape
from bert_cli.facts.groupbert import GroupBertConfig
from bert_cli.model.arithmetic.fused import (
    Tensor,
    bias_gelu,
    convolution,
    dropout,
    dropout_seed,
    float32,
)
from bert_cli.model.arithmetic.operations import linear
from bert_cli.model.arithmetic.parts import Block, Columns, Key, Layer
from bert_cli.model.bert.encoder import SelfAttention, attention_bias


class Grouped(Layer):
    """A product in groups: part g of the outputs reads part g of the inputs. A kernel [K, W, D] is a convolution."""

    shape: Shape
    groups: int

    def _create_weights(self) -> None:
        self.kernel = self.add_zeros("kernel", *self.shape)
        self.bias = self.add_zeros("bias", self.shape[-1])
        # One product for each group: a batched product would need the groups on the first axis, a transposed copy. GPUs
        # have grouped convolutions; on CPUs TensorFlow's take 300 times as long as a convolution for each group.
        is_cpu = keras.config.backend() == "tensorflow" and "GPU" not in self.kernel.value.device
        self.parts = self.groups if is_cpu or len(self.shape) == 2 else 1

    def call(self, x: Tensor) -> Tensor:
        """[..., inputs] in the compute dtype -> [..., outputs] in float32."""
        parts, kernels = (ops.split(tensor, self.parts, axis=-1) for tensor in (x, self.kernel))
        products = [self._multiply(*pair) for pair in zip(parts, kernels, strict=True)]
        return float32(ops.concatenate(products, axis=-1)) + float32(self.bias)

    def _multiply(self, x: Tensor, kernel: Tensor) -> Tensor:
        if len(self.shape) == 2:
            return linear(x, kernel)
        dtype = "float32" if self.parts > 1 else x.dtype  # CPUs convolve fastest in float32
        return convolution(ops.cast(x, dtype), ops.cast(kernel, dtype))


class Convolution(Layer):
    """Gated linear unit, grouped convolution, LayerNorm, swish, dense."""

    config: GroupBertConfig

    def _create_weights(self) -> None:
        config = self.config
        size = config.hidden_size
        self.layer_norm = self.norm()
        self.inner_norm = self.norm("inner_norm")
        self.value, self.gate, self.project = map(self.dense, ("value", "gate", "output"))
        shape = config.conv_kernel_size, config.conv_group_size, size
        groups = size // config.conv_group_size
        self.grouped = Grouped(**self.part("grouped"), shape=shape, groups=groups)

    def call(self, x_BSD: Tensor, batch: Columns) -> Tensor:
        """[B, S, D] in the compute dtype -> float32."""
        # TFLite cannot add the axis by an index.
        is_token_BS1 = ops.expand_dims(ops.not_equal(batch["input_mask"], 0), -1)
        gated_BSD = self.value(x_BSD) * ops.sigmoid(self.gate(x_BSD))
        gated_BSD = ops.cast(gated_BSD * float32(is_token_BS1), self.compute_dtype)
        is_pack = "position_ids" in batch
        mixed_BSD = self._convolve_apart(gated_BSD, batch) if is_pack else self.grouped(gated_BSD)
        return self.project(ops.cast(ops.silu(self.inner_norm(mixed_BSD)), self.compute_dtype))

    def _convolve_apart(self, x_BSD: Tensor, batch: Columns) -> Tensor:
        """Convolve the sequences of packs [B, S, D], separated by more zeros than a kernel spans."""
        examples, length, size = ops.shape(x_BSD)
        sequences = batch["next_sentence_positions"].shape[1]
        gap = self.config.conv_kernel_size // 2
        wider = length + (sequences - 1) * gap
        # Padding has number 0 and goes behind the last sequence.
        gaps_BS = (ops.cast(batch["input_mask"], "int32") - 1) % sequences
        rows_BS = ops.arange(examples)[:, None] * wider + ops.arange(length) + gaps_BS * gap
        apart = ops.scatter(rows_BS[..., None], x_BSD, (examples * wider, size))
        mixed = self.grouped(ops.reshape(apart, (examples, wider, size)))
        return ops.take(ops.reshape(mixed, (-1, size)), rows_BS, axis=0)


class Attention(SelfAttention):
    """BERT's attention without the residual, which the layer adds."""

    def _create_output(self) -> None:
        self.layer_norm = self.norm()
        self.project = self.dense("output")

    def call(self, x_BSD: Tensor, bias: Tensor, key: Key) -> Tensor:
        """[B, S, D] in the compute dtype -> float32."""
        return self.project(self.context(x_BSD, bias, key))


class GroupedFeedForward(Layer):
    """Dense, GELU, grouped dense and, if there are several groups, a dense layer that mixes them."""

    config: GroupBertConfig

    def _create_weights(self) -> None:
        inner = self.config.intermediate_size
        groups = self.config.ffn_groups
        self.layer_norm = self.norm()
        self.inner = self.dense("inner", outputs=inner)
        shape = inner // groups, self.config.hidden_size
        self.grouped = Grouped(**self.part("grouped"), shape=shape, groups=groups)
        self.mixer = self.dense("mixer") if groups > 1 else None

    def call(self, x_BSD: Tensor) -> Tensor:
        """[B, S, D] in the compute dtype -> float32."""
        product_BSF = linear(x_BSD, self.inner.kernel)
        inner_BSF = bias_gelu(product_BSF, self.inner.bias, self.operations.fuse_above)
        mixed_BSD = self.grouped(inner_BSF)
        if self.mixer is None:
            return mixed_BSD
        return self.mixer(ops.cast(mixed_BSD, self.compute_dtype))


class GroupLayer(Block):
    """Block `hid_N`; the last block ends with a LayerNorm. Uses the dropout ids `dropout_id` to `dropout_id` + 4."""

    DROPOUT_IDS = 5
    READS = ("input_mask", "position_ids", "next_sentence_positions")
    number: int

    def _create_weights(self) -> None:
        self.dropout_id = 1 + self.number * self.DROPOUT_IDS
        self.convolution = Convolution(**self.part("convolution"))
        self.feed_forward_1 = GroupedFeedForward(**self.part("feed_forward_1"))
        self.attention = Attention(**self.part("self_attention"), dropout_id=self.dropout_id + 4)
        self.feed_forward_2 = GroupedFeedForward(**self.part("feed_forward_2"))
        is_last = self.number == self.config.num_hidden_layers - 1
        self.final_norm = self.norm("final_norm") if is_last else None

    def call(self, hidden: Tensor, batch: Columns, key: Key) -> Tensor:
        """Reads `input_mask` [B, S], 0 for padding; [B, S, D] -> [B, S, D]."""
        x_BSD = float32(hidden)
        rate = self.config.hidden_dropout_prob
        modules = self.convolution, self.feed_forward_1, self.attention, self.feed_forward_2
        inputs = (batch,), (), (attention_bias(batch), key), ()
        for number, (module, read) in enumerate(zip(modules, inputs, strict=True)):
            normal_BSD = ops.cast(module.layer_norm(x_BSD), self.compute_dtype)
            seed = dropout_seed(key, self.dropout_id + number)
            x_BSD = x_BSD + dropout(module(normal_BSD, *read), rate, seed)
        x_BSD = self.final_norm(x_BSD) if self.final_norm else x_BSD
        return ops.cast(x_BSD, self.compute_dtype)
