"""The shape of ModernBERT (Warner et al. 2024, arXiv 2412.13663), and its blocks after the encoder layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, ValidationError
from pydantic_core import InitErrorDetails

from bert_cli.facts import heads
from bert_cli.facts.bert import BertConfig
from bert_cli.facts.heads import Block
from bert_cli.facts.products import BatchShape, Product
from bert_cli.files import JSONObject
from bert_cli.settings.markers import Hidden
from bert_cli.settings.numbers import Depth, Positive, Size

Theta = Annotated[float, Field(gt=1.0)]
# Setting -> its name in `config.json`.
RENAMED = {"layer_norm_eps": "norm_eps", "hidden_act": "hidden_activation"}
GLOBAL = "full_attention"
LOCAL = "sliding_attention"
EVERY = "global_attn_every_n_layers"
# Setting, which is the name of transformers 4 -> its group in the `rope_parameters` of transformers 5.
THETAS = {"global_rope_theta": GLOBAL, "local_rope_theta": LOCAL}
# Engine -> blocks of two windows in a sequence from which local layers do not compute the scores of all positions.
# Forward and backward of a layer of 12 heads and window 128 for 2,048 tokens on one core, with all scores and in
# blocks: TensorFlow takes 118 and 186 ms at 512 positions, 243 and 185 ms at 1,024; JAX 320 and 124 ms at 512.
WORTH_BLOCKS = {"tensorflow": 5, "jax": 3}
# Positions above which a global layer computes the scores of few queries at a time, and again for the gradient.
# 12 heads of 2,048 x 2,048 float32 scores take 201 MB for one example.
MAX_SCORED = 2048
# Queries of a global layer whose scores are in memory together.
QUERIES = 512
BIASES = dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"), False)
# Entry of `config.json` -> its only supported value.
FIXED: Mapping[str, object] = {**BIASES, "decoder_bias": True}


class ModernBertConfig(BertConfig):
    """The shape of a model with rotary positions, local and global attention, gated feed-forward and no biases."""

    IS_PRE_NORM = True
    HAS_EQUAL_LAYERS = False
    # A run on longer sequences changes the rotary positions.
    TRAINING_ONLY = BertConfig.TRAINING_ONLY | {"classifier_pooling", *THETAS}
    attention_probs_dropout_prob: ClassVar[float] = 0.0  # type: ignore[misc]
    type_vocab_size: ClassVar[int] = 1  # type: ignore[misc]
    position_embedding_type: ClassVar[str] = "rotary"  # type: ignore[assignment,misc]

    architecture: Literal["modernbert"] = "modernbert"
    vocab_size: Size = 50368
    num_hidden_layers: Depth = 22
    intermediate_size: Size = 1152
    max_position_embeddings: Size = 8192
    layer_norm_eps: PositiveFloat = 1e-5
    hidden_act: Hidden[Literal["gelu", "silu"]] = "gelu"  # type: ignore[assignment]
    """Activation of the feed-forward layers: `silu`, x times its sigmoid, in some published models."""
    classifier_activation: Hidden[Literal["gelu", "silu"]] = "gelu"
    """Activation of the transform before every head."""
    local_attention: Annotated[int, Field(ge=2)] = 128
    """Window of a local layer: a position reads half of it on each side."""
    global_attn_every_n_layers: Positive = 3
    """Every n-th layer, from the first, reads all positions; the others are local."""
    global_rope_theta: Theta = 160_000.0
    """Base of the wavelengths of rotary positions in global layers."""
    local_rope_theta: Theta = 10_000.0
    """Base of the wavelengths of rotary positions in local layers."""
    classifier_pooling: Literal["cls", "mean"] = "cls"
    """Vector that ModernBERT's text classifier reads: the output at [CLS], or the `mean` over the tokens."""

    @property
    def window(self) -> int:
        """Return the number of positions on each side that a position of a local layer reads."""
        return self.local_attention // 2

    def products(self, rows: int) -> list[Product]:
        """Return the matrix products of a layer: attention, then the gated feed-forward."""
        width = self.hidden_size
        inner = self.intermediate_size
        gate = Product(rows, width, inner, has_bias=False, has_own_input=False)
        return [
            *(product._replace(has_bias=False) for product in self.attention_products(rows)),
            gate._replace(has_own_input=True, is_activated=True),
            gate._replace(is_gate=True),
            Product(rows, inner, width, has_bias=False),
        ]

    @property
    def norm_weights(self) -> int:
        """Return the number of weights of a LayerNorm: gamma."""
        return self.hidden_size

    @property
    def embedding_weights(self) -> int:
        """Return the number of weights of the embeddings: the word table and a LayerNorm."""
        return self.vocab_size * self.hidden_size + self.norm_weights

    @property
    def final_norm_weights(self) -> int:
        """Return 0: the first layer has no LayerNorm before attention, the last layer one more at its end."""
        return 0

    def keys_read(self, positions: int) -> int:
        """Return the number of keys that a query reads, in all layers together."""
        return self._keys(positions, min(positions, 2 * self.window + 1))

    def keys_saved(self, positions: int, engine: str) -> int:
        """Return the number of keys whose attention probabilities a query saves, in all layers together.

        A global layer of many positions saves none; the probabilities of some queries are in memory.
        """
        block = 2 * self.window
        is_in_blocks = positions >= WORTH_BLOCKS[engine] * block
        # A layer that scores some queries at a time has the probabilities of those in memory.
        of_global = QUERIES
        if positions <= MAX_SCORED:
            of_global = positions
        of_local = 2 * block if is_in_blocks else positions
        return self._keys(of_global, of_local)

    def _keys(self, of_global: int, of_local: int) -> int:
        keys = {GLOBAL: of_global, LOCAL: of_local}
        types = layer_types(self.num_hidden_layers, self.global_attn_every_n_layers)
        return sum(keys[kind] for kind in types)

    def deviation_of(self, name: str) -> float:
        """Return the standard deviation of the initial values of a weight."""
        if name.endswith(("/classifier/kernel", "/span/kernel")):
            return float(self.hidden_size**-0.5)
        is_output = "/output/" in name or "/transform/" in name
        if not is_output:
            return self.initializer_range
        depth = 2 * self.num_hidden_layers
        return self.initializer_range / depth**0.5

    def to_hf(self) -> JSONObject:
        """Return the entries of a `config.json`, both those that transformers 4.48 and those that 5.x reads."""
        described = super().to_hf()
        # No entry of theirs means the dropout of the attention output alone.
        del described["hidden_dropout_prob"]
        for ours, theirs in RENAMED.items():
            described[theirs] = described.pop(ours)
        described["layer_types"] = layer_types(self.num_hidden_layers, described[EVERY])
        described["rope_parameters"] = {
            kind: {"rope_type": "default", "rope_theta": described[name]}
            for name, kind in THETAS.items()
        }
        # Their defaults are ids of another vocabulary.
        return described | dict.fromkeys(
            ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")
        )

    @classmethod
    def from_hf(cls, described: JSONObject) -> JSONObject:
        """Return the settings that a `config.json` has, whichever spelling it uses.

        Raises ValidationError for biases, layers that are not global at a regular distance, and
        scaled rotary positions.
        """
        for name, value in FIXED.items():
            if described.get(name, value) != value:
                raise _refusal(name, described[name], f"only {value} is supported")
        values = super().from_hf(described)
        values |= {ours: described[name] for ours, name in RENAMED.items() if name in described}
        for name, kind in THETAS.items():
            rope = (described.get("rope_parameters") or {}).get(kind, {})
            if rope.get("rope_type", "default") != "default":
                raise _refusal("rope_parameters", rope, "only rope_type default is supported")
            if "rope_theta" in rope:
                values[name] = rope["rope_theta"]
        types = described.get("layer_types")
        if types:
            distances = {
                every
                for every in (values.get(EVERY), [*types[1:], GLOBAL].index(GLOBAL) + 1)
                if every and types == layer_types(len(types), every)
            }
            if not distances:
                problem = "full_attention must be at layer 0 and every n layers, for one n"
                raise _refusal("layer_types", types, problem)
            values[EVERY] = max(distances)
        return values


def layer_types(layers: int, period: int) -> list[str]:
    """Return transformers' name of the attention of each layer."""
    return [LOCAL if layer % period else GLOBAL for layer in range(layers)]


def _refusal(name: str, value: object, problem: str) -> ValidationError:
    context = {"error": ValueError(problem)}
    error = InitErrorDetails(type="value_error", loc=(name,), input=value, ctx=context)
    return ValidationError.from_exception_data("config.json", [error])


# --- the blocks after the encoder layers


GATHER = replace(heads.GATHER, layer="bert_cli.model.modernbert:GatherMasked")
POOL = Block(
    name=heads.POOL.name,
    layer="bert_cli.model.modernbert:Pooling",
)
PRETRAINING = replace(
    heads.PRETRAINING,
    layer="bert_cli.model.modernbert:MaskedLMHead",
    before=(GATHER.name,),
    products=lambda config, shape: heads.PRETRAINING.products(config, shape)[1:],
    # The transform has the gamma of a LayerNorm instead of a bias.
    other_weights=lambda config: -config.vocab_size * config.hidden_size,
    hf_names={"heads/masked_lm": "decoder", "heads/masked_lm/transform": "head"},
    parts={"heads/masked_lm/transform": "head", "heads/masked_lm/bias": "decoder"},
    needs=("heads/masked_lm/transform", "heads/masked_lm/bias"),
    hf_classes=("BertForMaskedLM",),
)


def _with_transform(head: heads.Head, layer: str) -> heads.Head:
    """Return the head of a task that reads the transform of the masked-LM head."""
    names = {f"{head.name}/transform": "head", **dict.fromkeys(head.hf_names, "classifier")}
    is_pooled = POOL.name in head.before

    def products(config: BertConfig, shape: BatchShape) -> list[Product]:
        rows = shape.examples
        if not is_pooled:
            rows *= shape.positions
        width = config.hidden_size
        return [Product(rows, width, width, has_bias=False), *head.products(config, shape)]

    return replace(
        head,
        layer=f"bert_cli.model.modernbert:{layer}",
        products=products,
        other_weights=lambda config: config.hidden_size,  # the gamma of the transform's LayerNorm
        hf_names=names,
        parts=names,
        needs=tuple(names),
    )


BLOCKS = (
    GATHER,
    POOL,
    PRETRAINING,
    _with_transform(heads.QUESTION_ANSWERING, "QuestionAnswering"),
    _with_transform(heads.SEQUENCE_CLASSIFICATION, "SequenceClassification"),
    _with_transform(heads.TOKEN_CLASSIFICATION, "TokenClassification"),
)
