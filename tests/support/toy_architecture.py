"""An architecture in one file: windows in some layers, a gated feed-forward, a head of its own, no position table."""

from dataclasses import replace
from typing import ClassVar, Literal

import keras
from keras import ops

from bert_cli.config.settings import Positive
from bert_cli.facts.architectures import Architecture, Part
from bert_cli.facts.bert import BertConfig
from bert_cli.facts.heads import GATHER, PRETRAINING
from bert_cli.facts.products import Product
from bert_cli.model import heads
from bert_cli.model.fused import float32, gelu
from bert_cli.model.layers import MASKED_SCORE, SelfAttention, attention_bias
from bert_cli.model.parts import Layer


class ToyConfig(BertConfig):
    """The shape, without segments."""

    IS_PRE_NORM = True
    type_vocab_size: ClassVar[int] = 1  # type: ignore[misc]
    architecture: Literal["toy"] = "toy"
    """`toy` of the tests."""
    window: Positive = 3
    """Positions on each side that a position reads, but for the last layer."""

    def products(self, rows):
        width, inner = self.hidden_size, self.intermediate_size
        gate = Product(rows, width, inner, has_bias=False, has_own_input=False)
        return [
            *self.attention_products(rows),
            gate._replace(has_own_input=True, is_activated=True),
            gate,
            Product(rows, inner, width, has_bias=False),
        ]

    @property
    def embedding_weights(self):
        return self.vocab_size * self.hidden_size + self.norm_weights

    @property
    def final_norm_weights(self):
        return -self.norm_weights

    def keys_read(self, positions):
        return positions + (self.num_hidden_layers - 1) * min(positions, 2 * self.window + 1)

    def to_hf(self):
        described = super().to_hf()
        return described | {"local_attention": 2 * described.pop("window")}

    @classmethod
    def from_hf(cls, described):
        return super().from_hf(described | {"window": described["local_attention"] // 2})

    def deviation_of(self, name):
        return self.initializer_range / (2.0 if "output" in name else 1.0)


class ToyEmbeddings(Layer):
    """Block `emb`: word embeddings and LayerNorm."""

    READS = ("input_ids",)

    def _create_weights(self):
        self.word = self.embedding("word", self.config.vocab_size)
        self.layer_norm = self.norm()

    def call(self, hidden, batch, key):
        return ops.cast(self.layer_norm(self.word(batch["input_ids"])), self.compute_dtype)


class ToyLayer(Layer):
    """Block `hid_N`: attention in a window, then a gated feed-forward, whose LayerNorm the first layer lacks."""

    DROPOUT_IDS = 1
    READS = ("input_mask", "position_ids")

    def __init__(self, *, number, **layer):
        config = layer["config"]
        self.dropout_id = 1 + number
        self.is_first = number == 0
        self.window = None if number == config.num_hidden_layers - 1 else config.window
        super().__init__(**layer)

    def _create_weights(self):
        width, inner = self.config.hidden_size, self.config.intermediate_size
        attention = self.part("attention")
        self.attention = SelfAttention(**attention, dropout_id=self.dropout_id, is_pre_norm=True)
        self.layer_norm = None if self.is_first else self.norm()
        self.inner = self.dense("inner", width, inner, has_bias=False)
        self.gate = self.dense("gate", width, inner, has_bias=False)
        self.project = self.dense("output", inner, width, has_bias=False)

    def call(self, hidden, batch, key):
        x_BSD = float32(hidden)
        bias = attention_bias(batch)
        if self.window is not None:
            positions = ops.arange(ops.shape(hidden)[1])
            is_far = ops.abs(positions[:, None] - positions) > self.window
            bias = bias + float32(is_far) * MASKED_SCORE
        normal_BSD = ops.cast(self.attention.layer_norm(x_BSD), self.compute_dtype)
        x_BSD = x_BSD + self.attention(normal_BSD, bias, key)
        normal_BSD = ops.cast(
            self.layer_norm(x_BSD) if self.layer_norm else x_BSD, self.compute_dtype
        )
        gated_BSF = gelu(self.inner(normal_BSD)) * self.gate(normal_BSD)
        x_BSD = x_BSD + self.project(ops.cast(gated_BSF, self.compute_dtype))
        return ops.cast(x_BSD, self.compute_dtype)


class ToyHead(heads.Head):
    """Block `heads`: masked-LM alone, without the pooled [CLS]."""

    READS = ("masked_lm_ids", "masked_lm_weights")
    COUNTS: ClassVar = {"masked": "masked_lm_weights"}
    MEANS: ClassVar = {
        name: value
        for name, value in heads.PretrainingHeads.MEANS.items()
        if name.startswith("mlm")
    }

    word_table: keras.Variable
    chunks: int = 1

    def _create_weights(self):
        shared = {"word_table": self.word_table, "chunks": self.chunks}
        self.masked_lm = heads.MaskedLM(**self.part("masked_lm"), **shared)

    def logits(self, hidden, key):
        return (self.masked_lm(hidden[:, 1:]),)

    def call(self, hidden, labels, counts, key):
        loss, correct = self.masked_lm.loss_sums(hidden[:, 1:], labels)
        return loss / counts["masked"], {"mlm_loss": loss, "mlm_correct": correct}


HEAD_NAMES = {
    "heads/masked_lm/transform": "head.dense",
    "heads/masked_lm/layer_norm": "head.norm",
    "heads/masked_lm": "decoder",
}
HEAD = replace(
    PRETRAINING,
    layer="support.toy_architecture:ToyHead",
    before=(GATHER.name,),
    weights=lambda config: PRETRAINING.weights(config) - 2 * config.hidden_size - 2,
    products=lambda config, shape: PRETRAINING.products(config, shape)[1:],
    hf_names=HEAD_NAMES,
    parts=HEAD_NAMES,
    hf_classes=("BertForMaskedLM",),
)
LAYER = "model.layers.{}"
RECORD = Architecture(
    shape=ToyConfig,
    embeddings="support.toy_architecture:ToyEmbeddings",
    layer="support.toy_architecture:ToyLayer",
    own_blocks=(HEAD,),
    hf_names={
        "emb/word": "model.embeddings.tok_embeddings",
        "emb/layer_norm": "model.embeddings.norm",
        "hid_{}": LAYER,
        "hid_{}/attention/query": Part(f"{LAYER}.attn.Wqkv", 0, 3),
        "hid_{}/attention/key": Part(f"{LAYER}.attn.Wqkv", 1, 3),
        "hid_{}/attention/value": Part(f"{LAYER}.attn.Wqkv", 2, 3),
        "hid_{}/inner": Part(f"{LAYER}.mlp.Wi", 0, 2),
        "hid_{}/gate": Part(f"{LAYER}.mlp.Wi", 1, 2),
    },
    hf_copies={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
    hf_prefix="Toy",
)
