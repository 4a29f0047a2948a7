"""The records of heads agree with the layers that they name."""

import math

import pytest

from bert_cli.facts.bert import BertConfig
from bert_cli.facts.heads import heads


@pytest.mark.tensorflow
@pytest.mark.parametrize("head", heads(), ids=lambda head: head.name)
def test_a_record_counts_the_weights_of_its_layer(head):
    from bert_cli.model.build import build_blocks, named_weights

    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    blocks = build_blocks(config, seed=1, policy="float32", last_blocks=head.last_blocks)
    weights = named_weights(blocks)
    created = [weight for path, weight in weights.items() if path.startswith(f"{head.name}/")]
    assert sum(math.prod(weight.shape) for weight in created) == head.weights(config)
