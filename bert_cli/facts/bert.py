"""The shape of a model: its sizes, and the matrix products of an encoder layer, from which memory and FLOPs follow.

`BertConfig` is the shape of BERT, and the base class of the shapes of other architectures, each in a file of its own.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import BaseModel, PositiveFloat
from pydantic.fields import FieldInfo

from bert_cli.facts.products import Product
from bert_cli.files import JSONObject
from bert_cli.settings.markers import Hidden
from bert_cli.settings.numbers import Depth, Probability, Size
from bert_cli.settings.settings import SettingError, Settings


class BertConfig(Settings):
    """The shape of the model, under the names that Hugging Face uses."""

    DIVISORS: ClassVar[Sequence[tuple[str, str]]] = (("num_attention_heads", "hidden_size"),)
    """Setting -> the size that it must divide."""
    LAYER_NORMS: ClassVar[int] = 2
    """LayerNorms in a layer, of the hidden size."""
    IS_PRE_NORM: ClassVar[bool] = False
    """Whether a LayerNorm reads the residual stream, so that the last layer ends with one more."""
    HAS_EQUAL_LAYERS: ClassVar[bool] = True
    """Whether layers differ only in their weights."""
    TRAINING_ONLY: ClassVar[frozenset[str]] = frozenset(
        {"hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range"}
    )
    """Settings that change how a model is trained and not its output."""

    vocab_size: Size = 30522
    """Vocabulary size V; for pre-training by default the records' vocabulary size. Additional rows are padding."""
    hidden_size: Size = 768
    """Hidden size D."""
    num_hidden_layers: Depth = 12
    """Encoder layers."""
    num_attention_heads: Size = 12
    """Attention heads N; must divide the hidden size."""
    intermediate_size: Size = 3072
    """Intermediate size F of the feed-forward layers."""
    hidden_act: Hidden[Literal["gelu"]] = "gelu"
    """Activation: the exact GELU of the paper."""
    hidden_dropout_prob: Probability = 0.1
    """Dropout after embeddings, attention output and feed-forward output."""
    attention_probs_dropout_prob: Probability = 0.1
    """Dropout of the attention probabilities."""
    max_position_embeddings: Size = 512
    """Maximum sequence length of the model."""
    type_vocab_size: Size = 2
    """Number of segments: first and second sentence."""
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of the initial weights (a normal distribution truncated at two standard deviations)."""
    layer_norm_eps: PositiveFloat = 1e-12
    """Added to the variance in LayerNorm."""
    position_embedding_type: Hidden[Literal["absolute"]] = "absolute"
    """Position embeddings are learned, one vector for each position."""
    architecture: Literal["bert", "groupbert", "modernbert"] = "bert"
    """Encoder layers: `bert`, or `groupbert` with a convolution and a second feed-forward (Chelombiev et al. 2021), or
    `modernbert` with rotary positions, local and global attention and a gated feed-forward (Warner et al. 2024); its
    sizes have the values of ModernBERT-base by default. `hidden_dropout_prob` acts after the attention output, and
    before the classifier of a task."""

    def products(self, rows: int) -> list[Product]:
        """Return the matrix products of a layer for so many positions: attention, then feed-forward."""
        inner = self.intermediate_size
        return [
            *self.attention_products(rows),
            Product(rows, self.hidden_size, inner, is_activated=True),
            Product(rows, inner, self.hidden_size),
        ]

    def attention_products(self, rows: int) -> list[Product]:
        """Return the products of attention with weights: query, key, value, output."""
        square = Product(rows, self.hidden_size, self.hidden_size)
        # Query, key and value read one input, which is saved once.
        shared = square._replace(has_own_input=False)
        return [square, shared, shared, square]

    @property
    def layer_matrices(self) -> int:
        """Return the number of weights of a layer that every position is multiplied by."""
        return sum(product.matrix_weights for product in self.products(1))

    @property
    def norm_weights(self) -> int:
        """Return the number of weights of a LayerNorm: gamma and beta."""
        return 2 * self.hidden_size

    @property
    def layer_weights(self) -> int:
        """Return the number of weights of a layer: matrices, biases, LayerNorms."""
        biases = sum(product.outputs for product in self.products(1) if product.has_bias)
        return self.layer_matrices + biases + self.LAYER_NORMS * self.norm_weights

    @property
    def embedding_weights(self) -> int:
        """Return the number of weights of the embeddings: three tables and a LayerNorm."""
        # One row for each piece, position and segment.
        rows = self.vocab_size + self.max_position_embeddings + self.type_vocab_size
        return rows * self.hidden_size + self.norm_weights

    @property
    def final_norm_weights(self) -> int:
        """Return the number of weights of the LayerNorm after the last layer, 0 without it."""
        return self.IS_PRE_NORM * self.norm_weights

    def keys_read(self, positions: int) -> int:
        """Return the number of keys that a query reads, in all layers together."""
        return self.num_hidden_layers * positions

    def keys_saved(self, positions: int, engine: str) -> int:
        """Return the number of keys whose attention probabilities a query saves, in all layers together."""
        return self.keys_read(positions)

    def deviation_of(self, name: str) -> float:
        """Return the standard deviation of the initial values of a weight."""
        return self.initializer_range

    def to_hf(self) -> JSONObject:
        """Return the entries of a `config.json` that describe the shape."""
        return self.model_dump(mode="json", exclude={"architecture"})

    @classmethod
    def from_hf(cls, described: JSONObject) -> JSONObject:
        """Return the settings that a `config.json` has; both have the same defaults."""
        return {name: described[name] for name in cls.model_fields if name in described}

    def _check(self) -> None:
        for name, of in self.DIVISORS:
            number = getattr(self, name)
            size = getattr(self, of)
            if size % number:
                problem = f"{number} does not divide {of} ({size})"
                raise SettingError(name, problem, "choose a number that does")


def fields_of(group: type[BaseModel]) -> Mapping[str, FieldInfo]:
    """Return the fields of a group of settings; for the shape of a model the fields of all architectures."""
    fields = dict(group.model_fields)
    if group is not BertConfig:
        return fields
    for shape in BertConfig.__subclasses__():
        for name, about in shape.model_fields.items():
            fields.setdefault(name, about)
    return fields
