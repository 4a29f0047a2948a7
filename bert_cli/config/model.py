"""The shape of the model, under the names that Hugging Face uses."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from bert_cli.config.settings import Positive, Probability, SettingError, Settings


class BertConfig(Settings):
    """The shape of the model, under the names that Hugging Face uses."""

    vocab_size: Positive = 30522
    """Vocabulary size V; for pre-training it must be that of the records, which is the default."""
    hidden_size: Positive = 768
    """Hidden size D."""
    num_hidden_layers: Positive = 12
    """Encoder layers."""
    num_attention_heads: Positive = 12
    """Attention heads N; must divide the hidden size."""
    intermediate_size: Positive = 3072
    """Inner size F of the feed-forward layers."""
    hidden_act: Literal["gelu"] = "gelu"
    """Activation: the exact GELU of the paper."""
    hidden_dropout_prob: Probability = 0.1
    """Dropout after embeddings, attention output and feed-forward output."""
    attention_probs_dropout_prob: Probability = 0.1
    """Dropout of the attention probabilities."""
    max_position_embeddings: Positive = 512
    """Maximum sequence length of the model."""
    type_vocab_size: Positive = 2
    """Number of segments: first and second sentence."""
    initializer_range: Annotated[float, Field(gt=0.0)] = 0.02
    """Standard deviation of the initial weights (a normal distribution truncated at two of them)."""
    layer_norm_eps: Annotated[float, Field(gt=0.0)] = 1e-12
    """Added to the variance in LayerNorm."""
    position_embedding_type: Literal["absolute"] = "absolute"
    """Position embeddings are learned, one vector for each position."""

    @model_validator(mode="after")
    def _heads_divide_hidden_size(self) -> "BertConfig":
        if self.hidden_size % self.num_attention_heads:
            raise SettingError(
                "num_attention_heads",
                f"{self.num_attention_heads} does not divide hidden_size ({self.hidden_size})",
                "choose a number that does",
            )
        return self
