"""The shape of the model, under the names that Hugging Face uses."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from bert_cli.config.settings import Positive, Probability, Settings


class BertConfig(Settings):
    """The shape of the model, by Hugging Face's names."""

    vocab_size: Positive = 30522
    """Words V in the vocabulary; in pre-training by default those of the records, which must be as many."""
    hidden_size: Positive = 768
    """Model width D."""
    num_hidden_layers: Positive = 12
    """Encoder layers."""
    num_attention_heads: Positive = 12
    """Attention heads N; divides the model width."""
    intermediate_size: Positive = 3072
    """Inner width F of the feed-forward part."""
    hidden_act: Literal["gelu"] = "gelu"
    """Activation: the exact GELU of the paper."""
    hidden_dropout_prob: Probability = 0.1
    """Dropout after embeddings, attention output and feed-forward output."""
    attention_probs_dropout_prob: Probability = 0.1
    """Dropout of the attention probabilities."""
    max_position_embeddings: Positive = 512
    """Longest sequence the model can read."""
    type_vocab_size: Positive = 2
    """Segments: first and second sentence."""
    initializer_range: Annotated[float, Field(gt=0.0)] = 0.02
    """Standard deviation of the first values of the weights (truncated at two of them)."""
    layer_norm_eps: Annotated[float, Field(gt=0.0)] = 1e-12
    """Added to the variance in LayerNorm."""
    position_embedding_type: Literal["absolute"] = "absolute"
    """Positions are learnt, one vector for each place."""

    @model_validator(mode="after")
    def _heads_divide_width(self) -> "BertConfig":
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) is no multiple of num_attention_heads "
                f"({self.num_attention_heads}); choose heads that divide it"
            )
        return self
