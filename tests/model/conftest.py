"""A small model."""

import pytest

from bert_cli.facts.architectures import shape_of
from bert_cli.facts.bert import BertConfig


@pytest.fixture(scope="session")
def tiny():
    return BertConfig(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=24,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )


@pytest.fixture(scope="session", params=["bert", "groupbert"])
def model(request, tiny):
    """The small model of each architecture, its convolution in four groups."""
    changes = {"architecture": request.param, "conv_group_size": 8, "layer_norm_eps": 1e-3}
    return tiny if request.param == "bert" else shape_of({**tiny.model_dump(), **changes})
