"""Small models."""

import pytest

from bert_cli.facts.architectures import shape_of
from bert_cli.facts.bert import BertConfig
from bert_cli.model import modernbert


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


@pytest.fixture(scope="session")
def shapes(tiny):
    """Architecture -> a small shape, with an epsilon that changes outputs."""
    groups = {"conv_kernel_size": 5, "conv_group_size": 8, "ffn_groups": 4}
    wide = {"hidden_size": 48, "intermediate_size": 96, "layer_norm_eps": 1e-3}
    modern = {
        "architecture": "modernbert",
        "vocab_size": 97,
        "hidden_size": 32,
        "num_hidden_layers": 5,  # global, local, local, global, local
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 80,
        "layer_norm_eps": 0.1,
        "local_attention": 8,
        "global_rope_theta": 160.0,
        "local_rope_theta": 10.0,
    }
    return {
        "bert": tiny.model_copy(update={"layer_norm_eps": 0.1}),
        "groupbert": shape_of({**tiny.model_dump(), "architecture": "groupbert", **groups, **wide}),
        "modernbert": shape_of(modern),
    }


@pytest.fixture(scope="session", params=["bert", "groupbert"])
def model(request, tiny, shapes):
    return {**shapes, "bert": tiny}[request.param]


@pytest.fixture
def queries_apart(monkeypatch):
    """Global layers of ModernBERT compute 16 queries at a time."""
    monkeypatch.setattr(modernbert, "MAX_SCORED", 16)
    monkeypatch.setattr(modernbert, "QUERIES", 16)
