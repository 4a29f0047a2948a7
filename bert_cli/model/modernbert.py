"""The blocks of ModernBERT: rotary positions, attention to all positions or to a window, gated feed-forward, no biases.

From Warner et al. 2024, arXiv 2412.13663. Both halves of a layer read the LayerNorm of the residual stream and add
their output to it (pre-norm); the first layer reads the embeddings' LayerNorm, the last one ends with a LayerNorm. The
stream is float32 inside a layer. Shapes: as in `bert.encoder`, and for local attention K blocks of W positions.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from keras import ops

from bert_cli.facts.modernbert import MAX_SCORED, QUERIES, WORTH_BLOCKS, ModernBertConfig
from bert_cli.model.arithmetic.fused import (
    BACKEND,
    Dropout,
    Operation,
    Tensor,
    attention_probabilities,
    custom_gradient,
    dropout,
    dropout_seed,
    float32,
    gated_gelu,
    gelu,
    matmul,
    run_after,
)
from bert_cli.model.arithmetic.operations import linear
from bert_cli.model.arithmetic.parts import Block, Columns, Key, Layer
from bert_cli.model.bert import heads
from bert_cli.model.bert.encoder import MASKED_SCORE, GatherPositions, MeanPooling, attention_bias
from bert_cli.model.bert.heads import Loss

MIN_BLOCKS = WORTH_BLOCKS[BACKEND]


class Embeddings(Block):
    """Block `emb`, the first block: word embeddings and LayerNorm."""

    READS = ("input_ids",)

    def _create_weights(self) -> None:
        self.word = self.embedding("word", self.config.vocab_size)
        self.layer_norm = self.norm(has_beta=False)

    def call(self, hidden: None, batch: Columns, key: Key) -> Tensor:
        """Reads `input_ids` [B, S]; returns [B, S, D]."""
        return ops.cast(self.layer_norm(self.word(batch["input_ids"])), self.compute_dtype)


class RotaryAttention(Layer):
    """Multi-head attention with rotary positions (Su et al. 2021) reading `window` positions on each side, or all."""

    config: ModernBertConfig

    window: int | None
    theta: float
    is_first: bool

    def _create_weights(self) -> None:
        self.layer_norm = None if self.is_first else self.norm(has_beta=False)
        self.query, self.key, self.value, self.project = (
            self.dense(name, has_bias=False) for name in ("query", "key", "value", "output")
        )

    def call(self, x_BSD: Tensor, batch: Columns) -> Tensor:
        """[B, S, D] in float32 -> float32."""
        x_BSD = self.layer_norm(x_BSD) if self.layer_norm else x_BSD
        x_BSD = ops.cast(x_BSD, self.compute_dtype)
        heads = self.config.num_attention_heads
        size = self.config.hidden_size // heads
        shape = (*ops.shape(x_BSD)[:2], heads, size)
        rotation = self._rotation(batch, size)
        # The query is scaled in float32: scores of a float16 product stay far from 65504.
        query = rotated(ops.reshape(self.query(x_BSD) * size**-0.5, shape), rotation)
        key = rotated(ops.reshape(self.key(x_BSD), shape), rotation)
        value = ops.reshape(self.value(x_BSD), shape)
        query_BNSH, key_BNSH, value_BNSH = (
            ops.transpose(ops.cast(x, self.compute_dtype), (0, 2, 1, 3))
            for x in (query, key, value)
        )
        context_BNSH = self._context((query_BNSH, key_BNSH, value_BNSH), batch)
        context_BSD = ops.reshape(ops.transpose(context_BNSH, (0, 2, 1, 3)), ops.shape(x_BSD))
        return self.project(context_BSD)

    def _context(self, inputs_BNSH: Sequence[Tensor], batch: Columns) -> Tensor:
        """Return the context; the length, maybe known only when the graph runs, decides how it is computed."""
        query, key, value = inputs_BNSH
        length = ops.shape(query)[2]
        above = MIN_BLOCKS * 2 * self.window - 1 if self.window else MAX_SCORED
        if not self.window and BACKEND == "tensorflow" and not isinstance(length, int):
            # A prediction, without a gradient for which scores are computed again: 34 instead of 101 MB for 2,048.
            above = 2 * QUERIES

        def long() -> Tensor:
            if self.window:
                return self._attend_in_blocks(query, key, value, batch)
            return attended_by_queries(query, key, value, self._bias(batch), QUERIES)

        def short() -> Tensor:
            return self._attend(query, key, value, self._bias(batch))

        longest = length if isinstance(length, int) else self.config.max_position_embeddings
        if longest is length or longest <= above:
            return long() if longest > above else short()
        return ops.cond(length > above, long, short)

    def _rotation(self, batch: Columns, size: int) -> tuple[Tensor, Tensor]:
        """Return cosine and sine [S, 1, H / 2], for packs [B, S, 1, H / 2], float32."""
        positions = batch.get("position_ids")
        if positions is None:
            positions = ops.arange(ops.shape(batch["input_mask"])[1])
        # Su et al. 2021: the frequencies of H / 2 pairs of coordinates, from 1 down to about 1 / theta.
        frequencies = self.theta ** (-np.arange(0, size, 2) / size)
        angles = float32(positions)[..., None, None] * frequencies.astype(np.float32)
        return ops.cos(angles), ops.sin(angles)

    def _bias(self, batch: Columns) -> Tensor:
        """Return the additive mask [B, 1, 1, S] or [B, 1, S, S]."""
        bias = attention_bias(batch)
        if self.window is None:
            return bias
        positions = ops.arange(ops.shape(batch["input_mask"])[1])
        is_far_SS = ops.abs(positions[:, None] - positions) > self.window
        return bias + float32(is_far_SS) * MASKED_SCORE

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        """Return the context [..., Q, H] of queries [..., Q, H] for keys and values [..., S, H]."""
        scores = matmul(query, key, transpose_b=True)
        probabilities = attention_probabilities(scores, bias, Dropout(), self.operations.fuse_above)
        return matmul(probabilities, value)

    def _attend_in_blocks(
        self, query_BNSH: Tensor, key_BNSH: Tensor, value_BNSH: Tensor, batch: Columns
    ) -> Tensor:
        """Return the context [B, N, S, H] without the scores of all pairs of positions."""
        # In blocks of twice the window: the keys of a block are two blocks of the sequence shifted by the window.
        assert self.window is not None
        window = self.window
        width = 2 * window
        length = ops.shape(query_BNSH)[2]
        # Rounded up: the last block is filled with padding, which no token reads.
        blocks = -(-length // width)
        rest = blocks * width - length

        def in_blocks(x: Tensor, axis: int, before: int, after: int) -> Tensor:
            """[.., S, ..] with zeros before and after -> [.., K, W, ..]."""
            x = padded(x, axis, before, after)
            return ops.reshape(x, (*ops.shape(x)[:axis], -1, width, *x.shape[axis + 1 :]))

        def of_keys(x: Tensor, axis: int) -> Tensor:
            """[.., S, ..] -> the positions that each block reads [.., K, 2 W, ..]."""
            parts = in_blocks(x, axis, window, rest + window)
            if BACKEND == "jax":
                parts = ops.split(parts, [1, blocks], axis)
                sides = [ops.concatenate(part, axis) for part in (parts[:2], parts[1:])]
            else:
                ends = slice(0, -1), slice(1, None)
                sides = [parts[(*[slice(None)] * axis, end)] for end in ends]
            return ops.concatenate(sides, axis + 1)

        # 0 is padding, also beyond the ends; in packs the number of the sequence.
        mask_BS = ops.cast(batch["input_mask"], "int32")
        keys_BK1T = of_keys(mask_BS, 1)[:, :, None]
        is_masked = ops.equal(keys_BK1T, 0)
        if "position_ids" in batch:
            is_masked = ops.not_equal(keys_BK1T, in_blocks(mask_BS, 1, 0, rest)[..., None])
        # From each of W queries to each of the 2 W keys of its block, which begin `window` before it.
        distances_WT = np.arange(2 * width) - window - np.arange(width)[:, None]
        far_WT = np.float32(MASKED_SCORE) * (np.abs(distances_WT) > window)
        bias_B1KWT = (float32(is_masked) * MASKED_SCORE + far_WT)[:, None]
        query_BNKWH = in_blocks(query_BNSH, 2, 0, rest)
        keys_values = of_keys(key_BNSH, 2), of_keys(value_BNSH, 2)
        context_BNKWH = self._attend(query_BNKWH, *keys_values, bias_B1KWT)
        padded_shape = (*ops.shape(query_BNSH)[:2], blocks * width, query_BNSH.shape[3])
        return ops.reshape(context_BNKWH, padded_shape)[:, :, :length]


def padded(x: Tensor, axis: int, before: int, after: Tensor) -> Tensor:
    """Return a tensor with zeros before and after an axis; `after` may be known only when the graph runs."""
    if isinstance(after, int) and before + after == 0:
        return x
    padding = [(0, 0)] * len(x.shape)
    padding[axis] = (before, after)
    return ops.pad(x, padding)


def in_parts(x: Tensor, rows: int) -> Tensor:
    """[B, n, S, m] -> [K, B, n, rows, m], the last part with zeros."""
    length = ops.shape(x)[2]
    count = -(-length // rows)
    x = padded(x, 2, 0, count * rows - length)
    shape = (*ops.shape(x)[:2], count, rows, x.shape[3])
    return ops.transpose(ops.reshape(x, shape), (2, 0, 1, 3, 4))


def joined(parts: Tensor, length: Tensor) -> Tensor:
    """[K, B, n, rows, m] -> [B, n, S, m], without the zeros after `length` rows."""
    count, batch, heads, rows, _ = ops.shape(parts)
    parts = ops.transpose(parts, (1, 2, 0, 3, 4))
    return ops.reshape(parts, (batch, heads, count * rows, parts.shape[4]))[:, :, :length]


def attended_by_queries(
    query_BNSH: Tensor, key_BNSH: Tensor, value_BNSH: Tensor, bias: Tensor, rows: int
) -> Tensor:
    """Return the context [B, N, S, H], computed for `rows` queries at a time; only the inputs are saved."""
    length = ops.shape(query_BNSH)[2]

    def operation(
        bias: Tensor, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Operation]:
        queries = [in_parts(query, rows)]
        if bias.shape[2] > 1:  # else it is the same for all queries
            queries.append(in_parts(bias, rows))
        count = ops.shape(queries[0])[0]

        def probabilities(query: Tensor, part_bias: Tensor = bias) -> Tensor:
            scores = float32(matmul(query, key, transpose_b=True))
            return ops.softmax(scores + part_bias, axis=-1)

        def context(inputs: Sequence[Tensor]) -> Tensor:
            return matmul(ops.cast(probabilities(*inputs), value.dtype), value)

        numbers = ops.reshape(ops.arange(count), (-1, 1, 1, 1, 1))

        def put(number: Tensor, contexts: Tensor) -> Tensor:
            number = run_after(number, [contexts])
            part = context([ops.take(x, number, axis=0) for x in queries])
            return ops.where(ops.equal(numbers, number), part[None], contexts)

        def pull(gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            parts = in_parts(gradient, rows), *queries

            def add(number: Tensor, totals: Sequence[Tensor]) -> list[Tensor]:
                query_gradient, key_gradient, value_gradient = totals
                number = number if BACKEND == "jax" else run_after(number, totals)
                part_gradient, *inputs = (ops.take(x, number, axis=0) for x in parts)
                weights = probabilities(*inputs)
                slopes = float32(matmul(part_gradient, value, transpose_b=True))
                slopes = weights * (slopes - ops.sum(weights * slopes, axis=-1, keepdims=True))
                slopes = ops.cast(slopes, query.dtype)
                weights = ops.cast(weights, value.dtype)
                # Keras' scan takes no results of another shape than the totals.
                is_part = ops.equal(numbers, number)
                return [
                    ops.where(is_part, matmul(slopes, key)[None], query_gradient),
                    key_gradient + float32(matmul(slopes, inputs[0], transpose_a=True)),
                    value_gradient + float32(matmul(weights, part_gradient, transpose_a=True)),
                ]

            zeros = [ops.zeros_like(x) for x in (queries[0], float32(key), float32(value))]
            query_gradient, *sums = ops.fori_loop(0, count, add, zeros)
            return joined(query_gradient, length), *(ops.cast(x, query.dtype) for x in sums)

        # TensorFlow would compute ten parts at once, with the scores of all.
        if BACKEND == "jax":
            return joined(ops.map(context, queries), length), pull
        contexts = ops.fori_loop(0, count, put, ops.zeros_like(queries[0]))
        return joined(contexts, length), pull

    return custom_gradient(operation, bias)(query_BNSH, key_BNSH, value_BNSH)


def rotated(x_BSNH: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Return each head's two halves as coordinates that are rotated; nothing is saved for the gradient."""

    def turn(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        first, second = ops.split(x, 2, axis=-1)
        halves = [first * cosine - second * sine, second * cosine + first * sine]
        return ops.concatenate(halves, axis=-1)

    def operation(cosine: Tensor, sine: Tensor, x: Tensor) -> tuple[Tensor, Operation]:
        return turn(x, cosine, sine), lambda gradient: turn(gradient, cosine, -sine)

    return custom_gradient(operation, *rotation)(x_BSNH)


class GatedFeedForward(Layer):
    """GELU or SiLU of a dense layer times another one, and a dense layer."""

    config: ModernBertConfig

    def _create_weights(self) -> None:
        inner = self.config.intermediate_size
        self.layer_norm = self.norm(has_beta=False)
        self.inner = self.dense("inner", outputs=inner, has_bias=False)
        self.gate = self.dense("gate", outputs=inner, has_bias=False)
        self.project = self.dense("output", inner, has_bias=False)

    def call(self, x_BSD: Tensor) -> Tensor:
        """[B, S, D] in float32 -> float32, through [B, S, F]."""
        x_BSD = ops.cast(self.layer_norm(x_BSD), self.compute_dtype)
        product = linear(x_BSD, self.inner.kernel)
        gate = linear(x_BSD, self.gate.kernel)
        if self.config.hidden_act == "silu":
            gated = ops.silu(float32(product)) * float32(gate)
            return self.project(ops.cast(gated, self.compute_dtype))
        return self.project(gated_gelu(product, gate, self.operations.fuse_above))


class ModernLayer(Block):
    """Block `hid_N`; uses the dropout id `dropout_id`."""

    config: ModernBertConfig
    DROPOUT_IDS = 1
    READS = ("input_mask", "position_ids")
    number: int

    def _create_weights(self) -> None:
        config = self.config
        self.dropout_id = 1 + self.number
        is_global = self.number % config.global_attn_every_n_layers == 0
        is_last = self.number == config.num_hidden_layers - 1
        self.attention = RotaryAttention(
            **self.part("attention"),
            window=None if is_global else config.window,
            theta=config.global_rope_theta if is_global else config.local_rope_theta,
            is_first=self.number == 0,
        )
        self.feed_forward = GatedFeedForward(**self.part("feed_forward"))
        self.final_norm = self.norm("final_norm", has_beta=False) if is_last else None

    def call(self, hidden: Tensor, batch: Columns, key: Key) -> Tensor:
        """Reads `input_mask` [B, S], 0 for padding; [B, S, D] -> [B, S, D]."""
        x_BSD = float32(hidden)
        seed = dropout_seed(key, self.dropout_id)
        x_BSD = x_BSD + dropout(self.attention(x_BSD, batch), self.config.hidden_dropout_prob, seed)
        x_BSD = x_BSD + self.feed_forward(x_BSD)
        x_BSD = self.final_norm(x_BSD) if self.final_norm else x_BSD
        return ops.cast(x_BSD, self.compute_dtype)


class GatherMasked(GatherPositions):
    """Block `enc_out`: gather the masked positions. No weights."""

    READS = ("masked_lm_positions",)
    has_first = False


class Transform(Layer):
    """Dense, GELU or SiLU, LayerNorm: the first part of every head."""

    config: ModernBertConfig

    def _create_weights(self) -> None:
        self.dense_1 = self.dense("dense", has_bias=False)
        self.activation = ops.silu if self.config.classifier_activation == "silu" else gelu
        self.layer_norm = self.norm("norm", has_beta=False)

    def call(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D] in the compute dtype."""
        normal = self.layer_norm(self.activation(self.dense_1(ops.cast(x, self.compute_dtype))))
        return ops.cast(normal, self.compute_dtype)


class MaskedLM(heads.MaskedLM):
    """The shared transform, then a score for every token from the tied word embeddings."""

    def _create_weights(self) -> None:
        transform = Transform(**self.part("transform"))
        self.transform = transform.dense_1
        self.activation = transform.activation
        self.layer_norm = transform.layer_norm
        self.bias = self.add_zeros("bias", self.config.vocab_size)


class MaskedLMHead(heads.PretrainingHeads):
    """Block `heads`: masked-LM alone."""

    READS = heads.MASKED_LM_COLUMNS
    COUNTS: ClassVar = {"masked": "masked_lm_weights"}
    MEANS: ClassVar = {
        "mlm_loss": ("mlm_loss", "masked"),
        "mlm_accuracy": ("mlm_correct", "masked"),
    }

    def _create_weights(self) -> None:
        shared = {"word_table": self.word_table, "chunks": self.chunks}
        self.masked_lm = MaskedLM(**self.part("masked_lm"), **shared)

    def logits(self, hidden: Tensor, key: Key = None) -> Any:
        """[B, P, D] -> scores [B, P, V] in float32."""
        return (self.masked_lm(hidden),)

    def outputs(self, logits: Any, hf_class: str) -> dict[str, Tensor]:
        """Return the scores."""
        return {"logits": logits[0]}

    def call(self, hidden: Tensor, labels: Columns, counts: Columns, key: Key) -> Loss:
        """Return the masked-LM loss of `masked_lm_*` [B, P]."""
        loss, correct = self.masked_lm.sums(hidden, labels)
        return loss / counts["masked"], {"mlm_loss": loss, "mlm_correct": correct}


class Pooling(MeanPooling):
    """Block `pool`: the vector that a classifier of texts reads. No weights."""

    config: ModernBertConfig
    READS = ("input_mask",)

    def call(self, hidden: Tensor, batch: Columns, key: Key) -> Tensor:
        """Reads `input_mask` [B, S]; [B, S, D] -> [B, 1, D]."""
        if self.config.classifier_pooling == "cls":
            return hidden[:, :1]
        return super().call(hidden, batch, key)


class WithTransform(heads.Head):
    """A head of a task that reads the shared transform of its input."""

    def _create_weights(self) -> None:
        self.transform = Transform(**self.part("transform"))
        super()._create_weights()

    def logits(self, hidden: Tensor, key: Key) -> Tensor:
        """Return the logits of the transformed input."""
        return super().logits(self.transform(hidden), key)


class QuestionAnswering(WithTransform, heads.QuestionAnswering):
    """Block `qa_head`: scores of each position as the start and the end of an answer."""


class SequenceClassification(WithTransform, heads.SequenceClassification):
    """Block `glue_head`: a classifier of a text's vector; with one output, regression."""


class TokenClassification(WithTransform, heads.TokenClassification):
    """Block `token_head`: a classifier of every position."""
